"""The wire: the fields that we read, the rest untouched; the engine's stream, cut and metered."""

from app.protocol.abilities import Abilities
from app.protocol.answer import ChatAnswer
from app.protocol.ask import Answer, Ask, ChatStream, StreamRendering, TextRequest, ask_chat, error_event
from app.protocol.chat import ChatRequest, chat_request, parse_chat_request
from app.protocol.checked import checked
from app.protocol.completion import CompletionRequest, parse_completion_request
from app.protocol.completion_answer import CompletionAnswer, CompletionStream, ask_completion
from app.protocol.delta import CallDelta, Delta, DeltaReader
from app.protocol.embedding import EmbeddingRequest, parse_embedding_request
from app.protocol.fields import parse_object
from app.protocol.infill import InfillRequest, ask_infill, infill_request
from app.protocol.inspection import Inspection, detokenize_request, template_request, tokenize_request
from app.protocol.native import ask_native, native_request
from app.protocol.prompts import Prompt, prompts_of
from app.protocol.question import Part, Question
from app.protocol.ranking import RankRequest, parse_rank_request
from app.protocol.sse import EventTooLong, SSESplitter, event_data
from app.protocol.usage import Timings, Usage, UsageMeter
from app.protocol.volatile import with_rounded_times

__all__ = [
    "Abilities",
    "Answer",
    "Ask",
    "CallDelta",
    "ChatAnswer",
    "ChatRequest",
    "ChatStream",
    "CompletionAnswer",
    "CompletionRequest",
    "CompletionStream",
    "Delta",
    "DeltaReader",
    "EmbeddingRequest",
    "EventTooLong",
    "InfillRequest",
    "Inspection",
    "Part",
    "Prompt",
    "Question",
    "RankRequest",
    "SSESplitter",
    "StreamRendering",
    "TextRequest",
    "Timings",
    "Usage",
    "UsageMeter",
    "ask_chat",
    "ask_completion",
    "ask_infill",
    "ask_native",
    "chat_request",
    "checked",
    "detokenize_request",
    "error_event",
    "event_data",
    "infill_request",
    "native_request",
    "parse_chat_request",
    "parse_completion_request",
    "parse_embedding_request",
    "parse_object",
    "parse_rank_request",
    "prompts_of",
    "template_request",
    "tokenize_request",
    "with_rounded_times",
]
