"""The file that turns pictures or sound into what a model reads: a projector, ``mmproj-….gguf``."""

from __future__ import annotations

from pathlib import Path

from app.errors import ModelFileError
from app.gguf.facts import ModelFacts
from app.gguf.shards import read_header

_ARCHITECTURE = "clip"


def read_projector(path: Path) -> ModelFacts:
    """The header of a projector; raises ModelFileError for any other file."""
    facts = read_header(path)
    if facts.architecture != _ARCHITECTURE:
        raise ModelFileError(
            f"{path} is no projector but a model ({facts.architecture or 'unnamed architecture'}): "
            "name the mmproj file that belongs to the model, or take the setting away."
        )
    return facts
