"""The command line; ``python -m app`` is the same as ``llama-gateway``."""

from __future__ import annotations

from app.cli.program import main

if __name__ == "__main__":
    main()
