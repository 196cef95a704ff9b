"""The sections of the configuration: frozen values, unknown keys refused, every limit stated."""

from __future__ import annotations

import math
import re
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

_KEY_HASH = re.compile(r"sha256:[0-9a-f]{64}")

OnOverflow = Literal["reject", "clamp", "trim_oldest"]
ModelKind = Literal["auto", "chat", "embedding", "rerank"]
KVCache = Literal["auto", "f16", "q8_0", "q4_0"]


def _no_truth_value(value: object) -> object:
    # YAML reads yes, no, on and off as truth values, and pydantic those as 1 and 0.
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


Integer = Annotated[int, BeforeValidator(_no_truth_value)]
Tokens = Annotated[Integer, Field(ge=1, le=1 << 30)]


def _at_most_the_address_space(size: ByteSize) -> ByteSize:
    if size >= 1 << 63:
        raise ValueError("is larger than any machine")
    return size


Size = Annotated[ByteSize, AfterValidator(_at_most_the_address_space)]


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _duration(value: object) -> object:
    """``90``, ``90s``, ``1.5m``, ``2h``: seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a time like 30m, 90s or 2h")
    found = _DURATION.fullmatch(str(value).strip())
    if found is None:
        raise ValueError("must be a time like 30m, 90s or 2h")
    return float(found[1]) * _SECONDS[found[2] or "s"]


Duration = Annotated[float, BeforeValidator(_duration), Field(ge=0, le=366 * 86400)]


def _idle_time(value: object) -> object:
    return math.inf if value == "never" else _duration(value)


IdleTime = Annotated[float, BeforeValidator(_idle_time), Field(gt=0)]


def _auto_size(value: object) -> object:
    return None if value == "auto" else value


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def _is_origin(value: str) -> str:
    if value != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", value.rstrip("/"), re.IGNORECASE):
        raise ValueError("must be the origin of a web page, like https://chat.example.org, or *")
    return value


Origin = Annotated[str, AfterValidator(_is_origin)]


class ServerConfig(_Section):
    """Where and how the gateway listens."""

    host: str = "127.0.0.1"
    port: Integer = Field(default=8080, ge=0, le=65535)
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[Origin, ...] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    max_body: Size = ByteSize(16 << 20)
    drain_seconds: float = Field(default=30, ge=0, le=3600)
    load_wait: Duration = 300.0
    watch_config: bool = False

    @model_validator(mode="after")
    def _certificate_and_key(self) -> ServerConfig:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: name both files or neither")
        return self

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
    """What the planner leaves free, and how models that cannot live together take turns."""

    vram_reserve: Size = ByteSize(512 << 20)
    ram_reserve: Size = ByteSize(2 << 30)
    ram_limit: Annotated[Size | None, BeforeValidator(_auto_size)] = None
    min_residency: Duration = 10.0
    max_swap_wait: Duration = 20.0


class Defaults(_Section):
    """What a model uses that does not say otherwise."""

    context: Tokens = 8192
    parallel: Integer = Field(default=1, ge=1, le=64)
    max_tokens: Tokens = 4096
    max_tokens_ceiling: Tokens | None = None
    on_overflow: OnOverflow = "reject"
    max_queue: Integer = Field(default=64, ge=0, le=100_000)
    max_queue_per_key: Integer | None = Field(default=None, ge=0, le=100_000)
    max_wait: Duration | None = None
    long_prompt: Tokens = 8192
    long_prefills: Integer = Field(default=1, ge=1, le=64)
    idle_unload: IdleTime = math.inf


class FixedOffload(_Section):
    """A placement by hand: then exactly that, or an error."""

    gpu_layers: Integer | None = Field(default=None, ge=0, le=10_000)
    cpu_moe_layers: Integer | None = Field(default=None, ge=0, le=10_000)

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


def _base_url(value: str) -> str:
    """An address to which ``/models`` or ``/chat/completions`` can be appended."""
    try:
        parts = urlsplit(value)
        port_is_possible = parts.port is None or parts.port > 0
    except ValueError:
        port_is_possible = False
    if not port_is_possible or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an address like http://10.0.0.7:8080/v1")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("must be a plain address; a key belongs into the environment variable that key_env names")
    return value.rstrip("/")


BaseUrl = Annotated[str, AfterValidator(_base_url)]


class ModelEntry(_Section):
    """One model of the file, as written there: a file of ours (``path``) or a server elsewhere (``url``)."""

    path: Path | None = None
    url: BaseUrl | None = None
    key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    remote_model: str | None = Field(default=None, min_length=1)
    tokenizer: Path | None = None
    mmproj: Path | None = None
    draft: Literal["head"] | Path | None = None
    aliases: tuple[str, ...] = ()
    context: Tokens | None = None
    parallel: Integer | None = Field(default=None, ge=1, le=64)
    max_tokens: Tokens | None = None
    max_tokens_ceiling: Tokens | None = None
    on_overflow: OnOverflow | None = None
    round_prompt_times: bool = False
    max_queue: Integer | None = Field(default=None, ge=0, le=100_000)
    kind: ModelKind = "auto"
    kv_cache: KVCache = "auto"
    offload: Annotated[FixedOffload | None, BeforeValidator(_auto_is_none)] = None
    idle_unload: IdleTime | None = None
    pin: bool = False
    preload: bool = False
    keep_conversations: Size | None = None
    require_gpu: bool = False
    allow_smaller_context: bool = False
    extra_args: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _is_somewhere(self) -> ModelEntry:
        if (self.path is None) == (self.url is None):
            raise ValueError("needs either path, a model file, or url, the address of a server; one of them")
        return self


Amount = Annotated[Integer, Field(ge=0, le=1 << 53)]


class ImageConfig(_Section):
    """Pictures in conversations; ``fetch`` lets clients have them fetched from addresses on the internet."""

    fetch: bool = False
    max_fetch: Size = ByteSize(16 << 20)
    max_pixels: Integer = Field(default=32_000_000, ge=1, le=1 << 31)
    max_count: Integer = Field(default=16, ge=1, le=1024)


class QuotaConfig(_Section):
    """Who keeps what keys have used, and what happens while nobody can; no store is a file in the state folder."""

    store: str | None = Field(default=None, pattern=r"^(sqlite:.+|rediss?://.+|unix:.+|memory:)$")
    fail: Literal["open", "closed"] = "closed"


class RequestLogConfig(_Section):
    """What is kept of each request: figures in ``file``, and only if ``bodies`` names a folder what was said."""

    file: Path | None = None
    bodies: Path | None = None
    bodies_limit: Size = ByteSize(1 << 30)

    @property
    def is_stdout(self) -> bool:
        """Whether the lines go to standard output."""
        return self.file == Path("stdout")


class TelemetryConfig(_Section):
    """Where traces and metrics go by OTLP over HTTP; nowhere without an address."""

    otlp: Annotated[str | None, Field(pattern=r"^https?://\S+$")] = None
    traces: bool = True
    metrics: bool = True


class KeyConfig(_Section):
    """One API key: its hash only, the models that it may use, and how much of them."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.@-]+$")
    hash: str
    models: tuple[str, ...] = ("*",)
    admin: bool = False
    comments: bool = True
    requests_per_minute: Amount | None = None
    tokens_per_minute: Amount | None = None
    requests_per_day: Amount | None = None
    tokens_per_day: Amount | None = None
    gpu_seconds_per_day: Amount | None = None
    concurrent: Amount | None = None
    weight: Annotated[float, BeforeValidator(_no_truth_value), Field(ge=0.01, le=1000)] = 1.0
    priority: Literal["interactive", "batch"] = "interactive"
    max_tokens_ceiling: Tokens | None = None

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
    default_model: str | None = None
    keys: tuple[KeyConfig, ...] = ()
    quota: QuotaConfig = QuotaConfig()
    images: ImageConfig = ImageConfig()
    request_log: RequestLogConfig = RequestLogConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
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
