"""Frozen settings: what the operator wants, in the operator's units; unknown keys are refused.

A value comes from the environment (``LLAMA_GATEWAY_SERVER__PORT``), else from the YAML file, else from the defaults.
Every message names file, line, key and cure.
"""

from app.config.catalog import ModelCatalog, ModelConfig, RemoteServer
from app.config.load import load_settings
from app.config.settings import (
    Defaults,
    EngineConfig,
    FixedOffload,
    ImageConfig,
    KeyConfig,
    MemoryConfig,
    ModelEntry,
    RequestLogConfig,
    ServerConfig,
    Settings,
    TelemetryConfig,
)

__all__ = [
    "Defaults",
    "EngineConfig",
    "FixedOffload",
    "ImageConfig",
    "KeyConfig",
    "MemoryConfig",
    "ModelCatalog",
    "ModelConfig",
    "ModelEntry",
    "RemoteServer",
    "RequestLogConfig",
    "ServerConfig",
    "Settings",
    "TelemetryConfig",
    "load_settings",
]
