"""Where an engine listens."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A Unix socket whose name ends in ``.sock``, or a port of the loopback: exactly one of them."""

    socket: Path | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        if (self.socket is None) == (self.port is None):
            raise ValueError("an endpoint is either a socket or a port")
        # llama-server takes any other name for a host to resolve.
        if self.socket is not None and self.socket.suffix != ".sock":
            raise ValueError(f"the name of an engine's socket must end in .sock: {self.socket}")

    @classmethod
    def on_loopback(cls) -> Endpoint:
        """A port that is free now. Should another program take it first, the engine says so and gets another one."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            return cls(port=server.getsockname()[1])

    @property
    def base_url(self) -> str:
        """The address for an HTTP client; over a socket the host is a placeholder."""
        return "http://engine" if self.socket is not None else f"http://127.0.0.1:{self.port}"
