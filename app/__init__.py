"""llama-gateway: point it at a GGUF file and it serves it."""

__version__ = "0.1.0"
