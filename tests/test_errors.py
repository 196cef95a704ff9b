"""The tree of failures: what each class answers, in the shape that SDKs read."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import pytest

from app import errors
from app.errors import (
    ContextLengthExceeded,
    DoesNotFit,
    GatewayError,
    InvalidApiKey,
    MethodNotAllowed,
    ModelLoading,
    Overloaded,
    RequestError,
    RequestTimeout,
    SetupError,
    Unavailable,
    UpstreamFailed,
)
from tests.checklist import rows

# status, type, code: what a client is answered with; SDKs choose their own error class by the status.
_ANSWERS: dict[str, tuple[int, str, str | None]] = {
    "GatewayError": (500, "server_error", "internal_error"),
    "RequestError": (400, "invalid_request_error", None),
    "InvalidValue": (400, "invalid_request_error", "invalid_value"),
    "UnsupportedEndpoint": (400, "invalid_request_error", "unsupported_endpoint_for_model"),
    "UnsupportedParameter": (400, "invalid_request_error", "unsupported_parameter"),
    "ContextLengthExceeded": (400, "invalid_request_error", "context_length_exceeded"),
    "ContextRefused": (400, "invalid_request_error", "context_length_exceeded"),
    "InvalidApiKey": (401, "invalid_request_error", "invalid_api_key"),
    "ModelNotAllowed": (403, "permission_error", "model_not_allowed"),
    "NotAdmin": (403, "permission_error", "admin_required"),
    "ModelNotFound": (404, "invalid_request_error", "model_not_found"),
    "ResponseNotFound": (404, "invalid_request_error", "response_not_found"),
    "UnknownRoute": (404, "invalid_request_error", "unknown_url"),
    "MethodNotAllowed": (405, "invalid_request_error", "method_not_allowed"),
    "RequestTimeout": (408, "timeout_error", "request_timeout"),
    "BodyTooLarge": (413, "invalid_request_error", "request_too_large"),
    "UnsupportedMediaType": (415, "invalid_request_error", "unsupported_media_type"),
    "Overloaded": (429, "rate_limit_error", "rate_limit_exceeded"),
    "Unavailable": (503, "service_unavailable_error", "server_is_overloaded"),
    "ModelLoading": (503, "service_unavailable_error", "model_loading"),
    "ModelFailed": (503, "service_unavailable_error", "model_failed"),
    "Draining": (503, "service_unavailable_error", "server_is_stopping"),
    "CountingTimedOut": (503, "service_unavailable_error", "server_is_overloaded"),
    "UpstreamFailed": (502, "server_error", "upstream_failed"),
    "EngineGone": (502, "server_error", "upstream_failed"),
    "AnswerRejected": (502, "server_error", "answer_rejected"),
    "UpstreamTimeout": (504, "timeout_error", "upstream_timeout"),
}


def _classes(root: type[GatewayError] = GatewayError) -> Iterator[type[GatewayError]]:
    if root.__module__ == errors.__name__:
        yield root
    for child in root.__subclasses__():
        yield from _classes(child)


CLASSES = {cls.__name__: cls for cls in _classes()}


def _make(cls: type[GatewayError]) -> GatewayError:
    if cls is ContextLengthExceeded:
        return ContextLengthExceeded(prompt_tokens=3000, max_tokens=2000, context_tokens=4096)
    if cls is MethodNotAllowed:
        return MethodNotAllowed("what, why, what next", allow="POST")
    return cls("what, why, what next")


def test_every_class_has_its_answer_here() -> None:
    setup = {name for name, cls in CLASSES.items() if issubclass(cls, SetupError)}
    assert CLASSES.keys() - setup == _ANSWERS.keys()


@pytest.mark.parametrize("name", _ANSWERS)
def test_the_answer_of_each_class(name: str) -> None:
    error = _make(CLASSES[name])
    body = error.body()["error"]
    assert (error.status, body["type"], body["code"]) == _ANSWERS[name]


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_the_body_has_the_four_keys(cls: type[GatewayError]) -> None:
    error = _make(cls)
    body = orjson.loads(orjson.dumps(error.body()))
    assert body.keys() == {"error"}
    assert body["error"].keys() >= {"message", "type", "param", "code"}
    assert body["error"]["message"] == str(error) == error.message
    assert body["error"]["code"] is None or isinstance(body["error"]["code"], str)
    assert all(key == key.lower() and isinstance(value, str) for key, value in error.headers().items())


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_the_tree_is_drawn_in_the_module(cls: type[GatewayError]) -> None:
    assert errors.__doc__ is not None
    drawn = [line for line in errors.__doc__.splitlines() if f" {cls.__name__} " in f" {line} "]
    assert len(drawn) == 1
    if not issubclass(cls, SetupError):
        assert str(cls.status) in drawn[0]


def test_the_field_is_named() -> None:
    assert RequestError("x", param="messages[0].role").body()["error"]["param"] == "messages[0].role"
    assert RequestError("x").body()["error"]["param"] is None


# The overflow


@rows(56)
def test_an_overflow_in_the_words_that_clients_know() -> None:
    error = _make(ContextLengthExceeded)
    assert error.message == (
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (3000 in the messages, "
        "2000 in the completion). Please reduce the length of the messages or completion."
    )
    body = error.body()["error"]
    assert (body["n_prompt_tokens"], body["n_ctx"], body["param"]) == (3000, 4096, "messages")


def test_an_overflow_of_the_prompt_alone() -> None:
    message = ContextLengthExceeded(prompt_tokens=5000, max_tokens=None, context_tokens=4096).message
    assert "maximum context length is 4096 tokens" in message
    assert "your messages resulted in 5000 tokens" in message
    assert "None" not in message


def test_an_overflow_known_only_by_a_bound_says_so() -> None:
    error = ContextLengthExceeded(prompt_tokens=5000, max_tokens=1, context_tokens=4096, at_least=True)
    assert "you requested at least 5001 tokens (at least 5000 in the messages, 1 in the completion)" in error.message


# Headers: openai-python looks at x-should-retry first, then at the status (408, 409, 429, 5xx are sent again).


def _is_sent_again(error: GatewayError) -> bool:
    told = error.headers().get("x-should-retry")
    return told == "true" if told is not None else error.status in (408, 409, 429) or error.status >= 500


@pytest.mark.parametrize("cls", [cls for cls in CLASSES.values() if issubclass(cls, RequestError)])
def test_a_request_at_fault_is_not_sent_again(cls: type[GatewayError]) -> None:
    assert not _is_sent_again(_make(cls))


@pytest.mark.parametrize("cls", [Overloaded, Unavailable, ModelLoading])
def test_what_passes_by_is_sent_again_after_a_while(cls: type[GatewayError]) -> None:
    error = cls("x", retry_after_seconds=5)
    assert _is_sent_again(error)
    assert error.headers()["retry-after"] == "5"


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.4, "1"), (59.6, "60"), (None, None)])
def test_retry_after_is_whole_seconds_and_never_none_at_all(seconds: float | None, header: str | None) -> None:
    assert Overloaded("x", retry_after_seconds=seconds).headers().get("retry-after") == header


def test_an_answer_that_began_is_not_sent_again() -> None:
    assert not _is_sent_again(UpstreamFailed("x", streamed=True))
    assert _is_sent_again(UpstreamFailed("x"))
    assert not _is_sent_again(RequestTimeout("x"))


def test_headers_that_http_asks_for() -> None:
    assert InvalidApiKey("x").headers() == {"www-authenticate": "Bearer"}
    assert MethodNotAllowed("x", allow="GET, HEAD").headers() == {"allow": "GET, HEAD"}


# What the operator has to mend


@pytest.mark.parametrize("cls", [cls for cls in CLASSES.values() if issubclass(cls, SetupError)])
def test_setup_errors_end_the_program_and_keep_their_message_from_clients(cls: type[SetupError]) -> None:
    assert cls.exit_code == (3 if issubclass(cls, DoesNotFit) else 2)
    assert cls.status == 503
    assert cls.public
    assert "/" not in cls.public


def test_what_does_not_fit_keeps_its_numbers() -> None:
    numbers = {"needed_bytes": 5, "free_bytes": 3}
    error = DoesNotFit("x", numbers=numbers)
    numbers.clear()
    assert error.numbers == {"needed_bytes": 5, "free_bytes": 3}
    assert DoesNotFit("x").numbers == {}
