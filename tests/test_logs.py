"""Log lines: one per event, with the request id, never with a key."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator

import pytest

from app.credential import new_key
from app.logs import configure_logging, redact, request_id
from tests.checklist import rows

KEY = "lg-" + "Zm9v_YmFy-" * 4
FOREIGN = "sk-proj-" + "abcDEF123" * 4

Configure = Callable[..., io.StringIO]


@pytest.fixture
def configure() -> Iterator[Configure]:
    """Configures logging to a buffer; puts the loggers back as they were."""
    names = (None, "app", "uvicorn.error")
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    handlers = list(logging.getLogger().handlers)

    def configure_to_buffer(*, verbose: bool = False, quiet: bool = False) -> io.StringIO:
        buffer = io.StringIO()
        with contextlib.redirect_stderr(buffer):
            configure_logging(verbose=verbose, quiet=quiet)
        return buffer

    yield configure_to_buffer
    logging.getLogger().handlers[:] = handlers
    for logger, level in before:
        logger.setLevel(level)


@pytest.mark.parametrize(
    "text",
    [
        KEY,
        new_key()[0],
        f"Authorization: Bearer {FOREIGN}",
        f"authorization=bearer   {FOREIGN}",
        f"[(b'authorization', b'Bearer {FOREIGN}')]",
        f"x-api-key: {FOREIGN}",
        f"--api-key {FOREIGN}",
        f"api_key={FOREIGN}",
        f"the key {KEY}, and again {KEY}",
    ],
)
def test_what_looks_like_a_key_is_replaced(text: str) -> None:
    shown = redact(text)
    assert "[redacted]" in shown
    assert not any(secret in shown for secret in (KEY, FOREIGN, text.split()[-1].strip("'])")))


@pytest.mark.parametrize(
    "text",
    [
        "engine: llama-server 11669 on PATH",
        "model small: 2 slots of 4096 tokens",
        "the key 'alice' may not",
        "bearer",
        "",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert redact(text) == text


@rows(39)
def test_no_key_in_any_line(configure: Configure) -> None:
    buffer = configure(verbose=True)
    log = logging.getLogger("app.anything")
    log.info("plain %s", KEY)
    log.debug("headers %s", {"authorization": f"Bearer {FOREIGN}"})
    log.warning("argument %(key)s", {"key": KEY})
    log.error("object %r", ValueError(f"Bearer {FOREIGN}"))
    logging.getLogger("uvicorn.error").error("x-api-key: %s", FOREIGN)
    logging.getLogger("aiohttp.client").warning("Bearer %s", FOREIGN)
    lines = buffer.getvalue()
    assert lines.count("\n") == 6
    assert lines.count("[redacted]") == 6
    assert KEY not in lines
    assert FOREIGN not in lines


@rows(39)
def test_no_key_in_a_traceback(configure: Configure) -> None:
    buffer = configure()
    try:
        raise ValueError(f"could not send Bearer {FOREIGN}")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application")
    assert "Exception in ASGI application" in buffer.getvalue()
    assert FOREIGN not in buffer.getvalue()


def test_every_line_carries_the_request(configure: Configure) -> None:
    buffer = configure()
    log = logging.getLogger("app.proxy")
    log.info("outside")
    token = request_id.set("req-1")
    try:
        log.info("inside %d", 5)
    finally:
        request_id.reset(token)
    outside, inside = buffer.getvalue().splitlines()
    assert outside.endswith("INFO app.proxy - outside")
    assert inside.endswith("INFO app.proxy req-1 inside 5")


def _levels_shown(buffer: io.StringIO, name: str) -> list[str]:
    for level in ("DEBUG", "INFO", "WARNING", "ERROR"):
        logging.getLogger(name).log(getattr(logging, level), "said at %s", level)
    return [line.rpartition(" ")[2] for line in buffer.getvalue().splitlines()]


def test_how_much_is_said(configure: Configure) -> None:
    assert _levels_shown(configure(), "app.x") == ["INFO", "WARNING", "ERROR"]
    assert _levels_shown(configure(verbose=True), "app.x") == ["DEBUG", "INFO", "WARNING", "ERROR"]
    assert _levels_shown(configure(quiet=True), "app.x") == ["WARNING", "ERROR"]
    assert _levels_shown(configure(verbose=True), "somebody.else") == ["WARNING", "ERROR"]


def test_a_stream_that_we_broke_off_is_no_complaint(configure: Configure) -> None:
    buffer = configure()
    server = logging.getLogger("uvicorn.error")
    server.error("ASGI callable returned without completing response.")
    assert buffer.getvalue() == ""
    server.error("ASGI callable returned without starting response.")
    assert buffer.getvalue().count("\n") == 1


def test_a_wrong_log_call_does_not_hurt_the_caller(configure: Configure) -> None:
    configure()
    with contextlib.redirect_stderr(io.StringIO()):
        logging.getLogger("app.x").warning("%d tokens", "many")
