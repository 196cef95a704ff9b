"""What is asked of a model without a text being generated."""

from __future__ import annotations

from typing import Protocol


class Call(Protocol):
    """``route`` is the engine's, ``field`` what the client calls the inputs."""

    @property
    def route(self) -> str: ...

    @property
    def field(self) -> str: ...

    @property
    def model(self) -> str: ...
