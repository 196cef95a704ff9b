"""An API key as its owner holds it, and the hash that is all we keep of it."""

from __future__ import annotations

import hashlib
import secrets


def new_key() -> tuple[str, str]:
    """A fresh key of 256 random bits, and the hash for the configuration."""
    key = "lg-" + secrets.token_urlsafe(32)
    return key, "sha256:" + hashlib.sha256(key.encode()).hexdigest()
