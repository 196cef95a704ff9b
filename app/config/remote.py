"""What may not stand beside ``url``, and what must be there for it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from app.config.document import Document
from app.config.settings import ModelEntry, Settings

# They say how an engine of ours is run, which a server elsewhere decides for itself.
OF_OUR_ENGINES = (
    "mmproj",
    "draft",
    "kv_cache",
    "allow_smaller_context",
    "offload",
    "idle_unload",
    "pin",
    "preload",
    "keep_conversations",
    "require_gpu",
    "extra_args",
)
OF_A_REMOTE = ("key_env", "remote_model", "tokenizer")


def remote_problems(settings: Settings, document: Document) -> Iterator[str]:
    """A sentence for each key that cannot stand where it does."""
    for name, entry in settings.models.items():
        for key, problem in _problems(entry):
            yield f"{document.place(('models', name, key))}: {problem}"


def _problems(entry: ModelEntry) -> Iterator[tuple[str, str]]:
    is_remote = entry.url is not None
    for key in OF_OUR_ENGINES if is_remote else OF_A_REMOTE:
        if key in entry.model_fields_set:
            yield key, f"this key is for models with a {'path' if is_remote else 'url'}; leave it out here."
    if is_remote and entry.key_env is not None and not os.environ.get(entry.key_env):
        yield "key_env", f"the environment has no variable {entry.key_env}; set it to the key of that server."
