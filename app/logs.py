"""Logging to stderr, one line per event, with the request id and without secrets."""

from __future__ import annotations

import logging
import re
from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="-")

_SECRET = re.compile(r"(?i)(bearer\s+|api[-_]?key[=: ]+|lg-)[A-Za-z0-9_\-.~+/]{8,}")


def redact(text: str) -> str:
    """``text`` with everything that looks like a key replaced."""
    return _SECRET.sub(lambda match: match.group(1) + "[redacted]", text)


class _Context(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


class _RedactingFormatter(logging.Formatter):
    """Redacts the whole line, a traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _NotOurAborts(logging.Filter):
    """Drops uvicorn's complaint about a stream that we broke off on purpose after telling the client why."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "returned without completing response" not in str(record.msg)


def configure_logging(*, verbose: bool = False, quiet: bool = False) -> None:
    """Send log lines to stderr: all of ours with ``verbose``, only warnings with ``quiet``."""
    level = "DEBUG" if verbose else "WARNING" if quiet else "INFO"
    handler = logging.StreamHandler()
    handler.setFormatter(_RedactingFormatter("%(asctime)s %(levelname)s %(name)s %(request_id)s %(message)s"))
    handler.addFilter(_Context())
    handler.addFilter(_NotOurAborts())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("app").setLevel(level)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
