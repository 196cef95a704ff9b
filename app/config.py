"""Frozen settings: what the operator wants, in the operator's units; unknown keys are refused.

A value comes from the environment (``LLAMA_GATEWAY_SERVER__PORT``), else from the YAML file, else from here.
Every message names file, line, key and cure.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from app.document import Document
from app.errors import ConfigError, ModelNotFound

_KEY_HASH = re.compile(r"sha256:[0-9a-f]{64}")

OnOverflow = Literal["reject", "clamp"]
KVCache = Literal["auto", "f16", "q8_0", "q4_0"]
Tokens = Annotated[int, Field(ge=1, le=1 << 30)]


def _at_most_the_address_space(size: ByteSize) -> ByteSize:
    if size >= 1 << 63:
        raise ValueError("is larger than any machine")
    return size


Size = Annotated[ByteSize, AfterValidator(_at_most_the_address_space)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ServerConfig(_Section):
    """Where and how the gateway listens."""

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    max_body: Size = ByteSize(16 << 20)
    drain_seconds: float = Field(default=30, ge=0, le=3600)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False


class EngineConfig(_Section):
    """Which llama-server runs the models: ``auto``, ``embedded``, or a path."""

    binary: str = Field(default="auto", min_length=1)


class MemoryConfig(_Section):
    """What the planner leaves free."""

    vram_reserve: Size = ByteSize(512 << 20)
    ram_reserve: Size = ByteSize(2 << 30)


class Defaults(_Section):
    """What a model uses that does not say otherwise."""

    context: Tokens = 8192
    parallel: int = Field(default=1, ge=1, le=64)
    max_tokens: Tokens = 4096
    on_overflow: OnOverflow = "reject"
    max_queue: int = Field(default=64, ge=0, le=100_000)


class FixedOffload(_Section):
    """A placement by hand: then exactly that, or an error."""

    gpu_layers: int | None = Field(default=None, ge=0, le=10_000)
    cpu_moe_layers: int | None = Field(default=None, ge=0, le=10_000)

    @model_validator(mode="after")
    def _says_something(self) -> FixedOffload:
        if self.gpu_layers is None and self.cpu_moe_layers is None:
            raise ValueError("needs gpu_layers or cpu_moe_layers; for the computed placement write: offload: auto")
        return self


def _auto_is_none(value: object) -> object:
    if isinstance(value, str):
        if value != "auto":
            raise ValueError("must be auto, {gpu_layers: N} or {cpu_moe_layers: N}")
        return None
    return value


class ModelEntry(_Section):
    """One model of the file, as written there."""

    path: Path
    aliases: tuple[str, ...] = ()
    context: Tokens | None = None
    parallel: int | None = Field(default=None, ge=1, le=64)
    max_tokens: Tokens | None = None
    on_overflow: OnOverflow | None = None
    max_queue: int | None = Field(default=None, ge=0, le=100_000)
    kv_cache: KVCache = "auto"
    offload: Annotated[FixedOffload | None, BeforeValidator(_auto_is_none)] = None
    require_gpu: bool = False
    extra_args: tuple[str, ...] = ()


class KeyConfig(_Section):
    """One API key: its hash only, and the models that it may use."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.@-]+$")
    hash: str
    models: tuple[str, ...] = ("*",)

    @model_validator(mode="after")
    def _hash_is_a_hash(self) -> KeyConfig:
        if not _KEY_HASH.fullmatch(self.hash):
            raise ValueError(
                "hash must be 'sha256:' and 64 hexadecimal digits; `llama-gateway keys new NAME` prints such a line"
            )
        return self


class Settings(BaseSettings):
    """The whole configuration; relative paths are already resolved against the file's folder."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="LLAMA_GATEWAY_", env_nested_delimiter="__", protected_namespaces=()
    )

    server: ServerConfig = ServerConfig()
    engine: EngineConfig = EngineConfig()
    memory: MemoryConfig = MemoryConfig()
    defaults: Defaults = Defaults()
    models: dict[str, ModelEntry] = {}
    keys: tuple[KeyConfig, ...] = ()
    state_dir: Path = Path("state")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment wins over the file, whose content arrives as ``init_settings``."""
        return env_settings, init_settings

    def listening_on(self, *, host: str | None, port: int | None) -> Settings:
        """The same settings with the address given on the command line."""
        changes = {"host": host, "port": port}
        given = {key: value for key, value in changes.items() if value is not None}
        return self.model_copy(update={"server": self.server.model_copy(update=given)})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model with every default filled in.

    ``context`` is what each request may use, in tokens; None leaves it to the smaller of ``default_context`` and the
    context that the model was trained for.
    """

    id: str
    path: Path
    aliases: tuple[str, ...]
    context: int | None
    default_context: int
    parallel: int
    max_tokens: int
    on_overflow: OnOverflow
    max_queue: int
    kv_cache: KVCache
    gpu_layers: int | None
    cpu_moe_layers: int | None
    require_gpu: bool
    extra_args: tuple[str, ...]


class ModelCatalog:
    """Names and aliases → model."""

    def __init__(self, settings: Settings) -> None:
        self._models = {name: _complete(name, entry, settings.defaults) for name, entry in settings.models.items()}
        self._names = {name: name for name in self._models}
        for model in self._models.values():
            self._names |= dict.fromkeys(model.aliases, model.id)

    def __iter__(self) -> Iterator[ModelConfig]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    def resolve(self, name: str) -> ModelConfig:
        """The model of this name or alias; raises ModelNotFound."""
        try:
            return self._models[self._names[name]]
        except KeyError:
            raise ModelNotFound(
                f"The model {name[:200]!r} does not exist; this gateway has: {', '.join(self._models) or 'none'}.",
                param="model",
            ) from None


def _complete(name: str, entry: ModelEntry, defaults: Defaults) -> ModelConfig:
    fixed = entry.offload or FixedOffload.model_construct()
    return ModelConfig(
        id=name,
        path=entry.path,
        aliases=entry.aliases,
        context=entry.context,
        default_context=defaults.context,
        parallel=entry.parallel or defaults.parallel,
        max_tokens=entry.max_tokens or defaults.max_tokens,
        on_overflow=entry.on_overflow or defaults.on_overflow,
        max_queue=defaults.max_queue if entry.max_queue is None else entry.max_queue,
        kv_cache=entry.kv_cache,
        gpu_layers=fixed.gpu_layers,
        cpu_moe_layers=fixed.cpu_moe_layers,
        require_gpu=entry.require_gpu,
        extra_args=entry.extra_args,
    )


def load_settings(path: Path | None = None, *, model: Path | None = None) -> Settings:
    """Settings from a YAML file, from a single model file, or from both; raises ConfigError.

    With ``model`` alone the model's file name (without .gguf) becomes its public name and runtime files go to the
    user's state folder.
    """
    document = Document.read(path) if path is not None else Document(name="the command line")
    tree = dict(document.tree)
    if model is not None:
        tree["models"] = dict(tree.get("models") or {}) | {model.name.removesuffix(".gguf"): {"path": str(model)}}
    try:
        settings = Settings(**tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, document)) from None
    base = path.absolute().parent if path is not None else Path.cwd()
    settings = _with_absolute_paths(settings, base=base, state=None if path is not None else _user_state_dir())
    _refuse_contradictions(settings, document)
    return settings


def _user_state_dir() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "llama-gateway"


def _with_absolute_paths(settings: Settings, *, base: Path, state: Path | None) -> Settings:
    def absolute(path: Path) -> Path:
        return base / path.expanduser()

    models = {name: entry.model_copy(update={"path": absolute(entry.path)}) for name, entry in settings.models.items()}
    binary = settings.engine.binary
    if "/" in binary or "\\" in binary:
        binary = str(absolute(Path(binary)))
    return settings.model_copy(
        update={
            "models": models,
            "engine": settings.engine.model_copy(update={"binary": binary}),
            "state_dir": absolute(settings.state_dir) if state is None else state,
        }
    )


def _refuse_contradictions(settings: Settings, document: Document) -> None:
    problems = [*_missing_files(settings, document), *_names_given_twice(settings, document)]
    problems += _keys_to_nowhere(settings, document)
    if problems:
        raise ConfigError("\n".join(problems))


def _missing_files(settings: Settings, document: Document) -> Iterator[str]:
    for name, entry in settings.models.items():
        if not entry.path.exists():
            place = document.place(("models", name, "path"))
            yield f"{place}: there is no file {entry.path}; correct the path or fetch the model first."


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


def _explain(error: ValidationError, document: Document) -> str:
    """One sentence per problem."""
    return "\n".join(dict.fromkeys(_sentence(problem, document) for problem in error.errors()))


def _sentence(problem: Any, document: Document) -> str:
    location = problem["loc"]
    place = document.place(location)
    if problem["type"] == "extra_forbidden":
        return f"{place}: this key is unknown{_nearest(location)}"
    if problem["type"] == "missing":
        return f"{place}: this key is missing; add it."
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{place}: {message[:1].lower()}{message[1:].rstrip('.')}."


_SECTIONS: Mapping[str, type[BaseModel]] = {
    "server": ServerConfig,
    "engine": EngineConfig,
    "memory": MemoryConfig,
    "defaults": Defaults,
}


def _nearest(location: Sequence[str | int]) -> str:
    """``; did you mean 'context'?`` for a misspelt key, else the list of what may stand there."""
    section: type[BaseModel] = Settings
    if len(location) > 1:
        kinds = {"models": FixedOffload if "offload" in location else ModelEntry, "keys": KeyConfig}
        section = _SECTIONS.get(str(location[0]), kinds.get(str(location[0]), Settings))
    known = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(known)}."
