"""The environment an engine is started with: ours, less everything that could steer it behind our back."""

from __future__ import annotations

from collections.abc import Mapping

# LLAMA_ARG_* are command line flags in disguise, LLAMA_API_KEY a key, LLAMA_SERVER_* change what the process is;
# AIP_* (Vertex AI) moves the port and the routes.
_SCRUBBED_PREFIXES = ("LLAMA_", "AIP_")
# Set by service managers for the gateway alone: an engine that inherits them could speak in its name.
_SCRUBBED = frozenset({"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"})


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what would steer an engine; the choice of devices (``CUDA_VISIBLE_DEVICES`` …) stays."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_SCRUBBED_PREFIXES) and name not in _SCRUBBED
    }
    # Without it ggml starts a debugger on its own process before it aborts, which can hang for minutes.
    return kept | {"GGML_NO_BACKTRACE": "1"}
