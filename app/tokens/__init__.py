"""How many tokens is this prompt: a provable bound first, then the engine's exact count if that does not settle it."""

from app.tokens.admission import Admission, Overflow
from app.tokens.bounds import VocabularyBound, vocabulary_bound
from app.tokens.counter import TokenCounter, learn_counter
from app.tokens.estimate import BY_LETTERS, Estimator, PromptEstimate, by_vocabulary
from app.tokens.fragments import FragmentCounts, calibrate_fragments
from app.tokens.prompts import PromptSizes, Sizes
from app.tokens.source import CountSource, RenderSource
from app.tokens.template import TemplateBound, calibrate_template
from app.tokens.trimming import droppable
from app.tokens.vocabulary import Vocabulary, read_vocabulary

__all__ = [
    "BY_LETTERS",
    "Admission",
    "CountSource",
    "Estimator",
    "FragmentCounts",
    "Overflow",
    "PromptEstimate",
    "PromptSizes",
    "RenderSource",
    "Sizes",
    "TemplateBound",
    "TokenCounter",
    "Vocabulary",
    "VocabularyBound",
    "by_vocabulary",
    "calibrate_fragments",
    "calibrate_template",
    "droppable",
    "learn_counter",
    "read_vocabulary",
    "vocabulary_bound",
]
