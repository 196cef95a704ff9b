"""YAML file and environment → Settings, or every reason why not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import SettingsError

from app.config.document import Document
from app.config.explain import explain, nearest
from app.config.remote import remote_problems
from app.config.settings import ModelEntry, Settings
from app.errors import ConfigError

_MODEL_FILES = ("path", "mmproj", "draft", "tokenizer")
_TLS_FILES = ("tls_certificate", "tls_key")

CheckFlags = Callable[[Sequence[str]], object]
"""Raises ConfigError for engine flags that are not allowed."""


def load_settings(
    path: Path | None = None, *, model: Path | None = None, check_flags: CheckFlags | None = None
) -> Settings:
    """Settings from a YAML file, from a single model file, or from both; raises ConfigError.

    With ``model`` alone the model's file name (without .gguf) becomes its public name and runtime files go to the
    user's state folder.
    """
    document = Document.read(path) if path is not None else Document(name="the command line")
    tree = dict(document.tree)
    if model is not None:
        tree["models"] = dict(tree.get("models") or {}) | {model.name.removesuffix(".gguf"): {"path": str(model)}}
    _refuse_unknown_sections(tree, document)
    _refuse_unknown_variables()
    try:
        settings = Settings(**tree)
    except ValidationError as error:
        raise ConfigError(explain(error, document)) from None
    except SettingsError as error:
        raise ConfigError(f"The environment (LLAMA_GATEWAY_…): {error}; write JSON, or one variable per key.") from None
    base = path.absolute().parent if path is not None else Path.cwd()
    is_own_state = path is not None or "state_dir" in settings.model_fields_set
    settings = _with_absolute_paths(settings, base=base, state=None if is_own_state else _user_state_dir())
    _refuse_contradictions(settings, document, check_flags)
    return settings


def _refuse_unknown_sections(tree: Mapping[str, Any], document: Document) -> None:
    """Before pydantic sees them: BaseSettings takes names with an underscore for its own options."""
    unknown = [key for key in tree if key not in Settings.model_fields]
    if unknown:
        raise ConfigError(
            "\n".join(f"{document.place((key,))}: this key is unknown{nearest((key,))}" for key in unknown)
        )


def _refuse_unknown_variables() -> None:
    for variable in os.environ:
        section = variable.upper().removeprefix("LLAMA_GATEWAY_").partition("__")[0].lower()
        if variable.upper().startswith("LLAMA_GATEWAY_") and section not in Settings.model_fields:
            raise ConfigError(f"the environment variable {variable}: this key is unknown{nearest((section,))}")


def _user_state_dir() -> Path:
    if named := os.environ.get("XDG_STATE_HOME"):
        return Path(named) / "llama-gateway"
    usual = "AppData/Local/llama-gateway/state" if sys.platform == "win32" else ".local/state/llama-gateway"
    return Path.home() / usual


def _with_absolute_paths(settings: Settings, *, base: Path, state: Path | None) -> Settings:
    def absolute(path: Path) -> Path:
        try:
            return base / path.expanduser()
        except RuntimeError:
            # "~name" of a user that does not exist: then it is an ordinary file name.
            return base / path

    server = settings.server
    files = {
        key: absolute(path) for key in ("tls_certificate", "tls_key") if (path := getattr(server, key)) is not None
    }

    def located(entry: ModelEntry) -> ModelEntry:
        files = {key: getattr(entry, key) for key in _MODEL_FILES}
        return entry.model_copy(update={key: absolute(path) for key, path in files.items() if isinstance(path, Path)})

    models = {name: located(entry) for name, entry in settings.models.items()}
    binary = settings.engine.binary
    if "/" in binary or "\\" in binary:
        binary = str(absolute(Path(binary)))
    log = settings.request_log
    logs = {
        "file": log.file if log.file is None or log.is_stdout else absolute(log.file),
        "bodies": None if log.bodies is None else absolute(log.bodies),
    }
    store = settings.quota.store or ""
    if store.startswith("sqlite:"):
        store = f"sqlite:{absolute(Path(store.removeprefix('sqlite:')))}"
    return settings.model_copy(
        update={
            "server": server.model_copy(update=files),
            "models": models,
            "request_log": log.model_copy(update=logs),
            "quota": settings.quota.model_copy(update={"store": store or None}),
            "engine": settings.engine.model_copy(update={"binary": binary}),
            "state_dir": absolute(settings.state_dir) if state is None else state,
        }
    )


def _refuse_contradictions(settings: Settings, document: Document, check_flags: CheckFlags | None) -> None:
    problems = [*_missing_files(settings, document), *_names_given_twice(settings, document)]
    problems += [*_flags_not_allowed(settings, document, check_flags), *_state_not_writable(settings, document)]
    problems += [*_tls_files_missing(settings, document), *remote_problems(settings, document)]
    problems += [*_keys_to_nowhere(settings, document), *_default_to_nowhere(settings, document)]
    if problems:
        raise ConfigError("\n".join(problems))


def _missing_files(settings: Settings, document: Document) -> Iterator[str]:
    for name, entry in settings.models.items():
        for key, path in ((key, getattr(entry, key)) for key in _MODEL_FILES):
            if isinstance(path, Path) and not _is_file(path):
                place = document.place(("models", name, key))
                yield f"{place}: there is no file {path}; correct the path or fetch the model first."


def _tls_files_missing(settings: Settings, document: Document) -> Iterator[str]:
    for key in _TLS_FILES:
        path = getattr(settings.server, key)
        if path is not None and not _is_file(path):
            place = document.place(("server", key))
            yield f"{place}: there is no file {path}; correct the path or leave out both keys."


def _flags_not_allowed(settings: Settings, document: Document, check_flags: CheckFlags | None) -> Iterator[str]:
    if check_flags is None:
        return
    for name, entry in settings.models.items():
        try:
            check_flags(entry.extra_args)
        except ConfigError as error:
            yield f"{document.place(('models', name, 'extra_args'))}: {error}"


def _state_not_writable(settings: Settings, document: Document) -> Iterator[str]:
    """Looks at the nearest folder that exists, and creates nothing."""
    if not _can_be_written(settings.state_dir):
        place = document.place(("state_dir",))
        yield f"{place}: {settings.state_dir} cannot be written; set it to a folder that this user may write."


def _can_be_written(folder: Path) -> bool:
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # A name that is too long, a folder that may not be entered.
        return False


def _names_given_twice(settings: Settings, document: Document) -> Iterator[str]:
    owner = {name: name for name in settings.models}
    for name, entry in settings.models.items():
        for alias in entry.aliases:
            if owner.setdefault(alias, name) != name or alias in settings.models:
                place = document.place(("models", name, "aliases"))
                yield f"{place}: the alias {alias!r} already names {owner[alias]!r}; give each name to one model only."


def _keys_to_nowhere(settings: Settings, document: Document) -> Iterator[str]:
    for index, key in enumerate(settings.keys):
        for name in key.models:
            if name != "*" and name not in settings.models:
                place = document.place(("keys", index, "models"))
                yield f"{place}: the key {key.name!r} names the model {name!r}, which is not configured."
    names = [key.name for key in settings.keys]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield f"{document.place(('keys', index, 'name'))}: the key name {name!r} is given twice."


def _default_to_nowhere(settings: Settings, document: Document) -> Iterator[str]:
    name = settings.default_model
    known = {*settings.models, *(alias for entry in settings.models.values() for alias in entry.aliases)}
    if name is not None and name not in known:
        yield f"{document.place(('default_model',))}: there is no model {name!r}; name one of those below 'models:'."
