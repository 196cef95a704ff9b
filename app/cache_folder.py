"""Where the user's cached files of this program lie."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """The user's cache folder of this program; raises RuntimeError for a user without a home."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "llama-gateway"
    usual = "AppData/Local/llama-gateway/cache" if sys.platform == "win32" else ".cache/llama-gateway"
    return Path.home() / usual
