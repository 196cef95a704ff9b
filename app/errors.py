"""Every failure that a person or a client is answered with.

GatewayError                      500 server_error
├── RequestError                  400 invalid_request_error: the client can mend it
│   ├── InvalidValue              400 invalid_value, names the parameter
│   ├── UnsupportedEndpoint       400 unsupported_endpoint_for_model
│   ├── UnsupportedParameter      400 unsupported_parameter: right, but not for this model
│   ├── ContextLengthExceeded     400 context_length_exceeded, both numbers
│   ├── ContextRefused            400 context_length_exceeded: a remote server said so, without numbers
│   ├── InvalidApiKey             401 invalid_api_key
│   ├── ModelNotAllowed           403 model_not_allowed
│   ├── NotAdmin                  403 admin_required
│   ├── ModelNotFound             404 model_not_found
│   ├── ResponseNotFound          404 response_not_found: nothing is kept
│   ├── UnknownRoute              404 unknown_url
│   ├── MethodNotAllowed          405 method_not_allowed
│   ├── RequestTimeout            408 request_timeout
│   ├── BodyTooLarge              413 request_too_large
│   └── UnsupportedMediaType      415 unsupported_media_type
├── Overloaded                    429 rate_limit_exceeded, Retry-After
├── Unavailable                   503 service_unavailable_error, Retry-After
│   ├── ModelLoading              503 model_loading
│   ├── ModelFailed               503 model_failed, says why it cannot be started
│   ├── Draining                  503 server_is_stopping
│   └── CountingTimedOut          503 server_is_overloaded
├── UpstreamFailed                502 upstream_failed: the engine died or broke off
│   ├── AnswerRejected            502 answer_rejected: the model did not keep what the request was promised
│   └── EngineGone                502 upstream_failed: its connection ended; what had not begun may be sent again
├── UpstreamTimeout               504 upstream_timeout
└── SetupError                    exit code 2: the operator can mend it
    ├── ConfigError               names file, line, key and cure
    ├── ModelFileError            the file is missing or is not a model
    ├── EngineUnusable            no engine, or one that does not start
    ├── AddressInUse              somebody else listens there
    ├── StorageError              a folder or disk that cannot be written
    ├── DemoFailed                the demo could not fetch or ask
    ├── GatewaySilent             `top` found no gateway, or one that lets it see nothing
    └── DoesNotFit                exit code 3, with the numbers
        ├── ContextAboveTrained   more context than the model was trained for
        └── DeviceMissing         it must run on a device, and there is none that takes it

Status, type, code and Retry-After are attributes of the class; a message says what happened, why, and what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class GatewayError(Exception):
    """A failure with an answer: ``status``, ``type``, ``code`` and headers are known to its class."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = "internal_error"
    # openai-python retries 408, 409, 429 and every 5xx twice unless this header says otherwise.
    should_retry: ClassVar[bool | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    def body(self) -> dict[str, Any]:
        """The error object of OpenAI's API: always these four keys, ``code`` a string or null."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Headers that go with the answer."""
        headers: dict[str, str] = {}
        if self.retry_after_seconds is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_seconds)))
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        return headers


class RequestError(GatewayError):
    """The request itself is at fault."""

    status = 400
    type = "invalid_request_error"
    code: ClassVar[str | None] = None


class InvalidValue(RequestError):
    """A field has a value that we cannot serve."""

    code = "invalid_value"


class UnsupportedEndpoint(RequestError):
    """The model is of another kind than the endpoint needs."""

    code = "unsupported_endpoint_for_model"


class UnsupportedParameter(RequestError):
    """A field asks for what this model or this gateway cannot do."""

    code = "unsupported_parameter"


class ContextLengthExceeded(RequestError):
    """Prompt and answer together do not fit the context of a slot.

    The wording carries the phrases by which common clients recognise an overflow.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        *,
        prompt_tokens: int,
        max_tokens: int | None,
        context_tokens: int,
        at_least: bool = False,
        field: str = "messages",
        is_answered: bool = True,
    ) -> None:
        about = "at least " if at_least else ""
        if max_tokens is None:
            asked = f"your {field} resulted in {about}{prompt_tokens} tokens"
            asked += ", which leaves no room for an answer" if is_answered else ""
        else:
            asked = (
                f"you requested {about}{prompt_tokens + max_tokens} tokens "
                f"({about}{prompt_tokens} in the {field}, {max_tokens} in the completion)"
            )
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens. However, {asked}. "
            f"Please reduce the length of the {field}{' or completion' if is_answered else ''}.",
            param=field,
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.context_tokens = context_tokens
        self.at_least = at_least

    def body(self) -> dict[str, Any]:
        """OpenAI's object plus llama.cpp's two numbers."""
        body = super().body()
        body["error"] |= {"n_prompt_tokens": self.prompt_tokens, "n_ctx": self.context_tokens}
        return body


class ContextRefused(RequestError):
    """A remote server found the prompt too long and did not say by how much."""

    code = "context_length_exceeded"


class InvalidApiKey(RequestError):
    """No key, or one that is not ours."""

    status = 401
    code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        """Names the scheme, as HTTP asks of every 401."""
        return super().headers() | {"www-authenticate": "Bearer"}


class ModelNotAllowed(RequestError):
    """The key may not use this model."""

    status = 403
    type = "permission_error"
    code = "model_not_allowed"


class NotAdmin(RequestError):
    """The key may ask models, but not manage them."""

    status = 403
    type = "permission_error"
    code = "admin_required"


class ModelNotFound(RequestError):
    """No model has this name."""

    status = 404
    code = "model_not_found"


class ResponseNotFound(RequestError):
    """A response is asked for by its id, and none is ever kept."""

    status = 404
    code = "response_not_found"


class UnknownRoute(RequestError):
    """No route has this path."""

    status = 404
    code = "unknown_url"


class MethodNotAllowed(RequestError):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow

    def headers(self) -> dict[str, str]:
        """``Allow``, as HTTP asks of every 405."""
        return super().headers() | {"allow": self.allow}


class RequestTimeout(RequestError):
    """The client stopped sending its request."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"
    should_retry = False

    def headers(self) -> dict[str, str]:
        """Nothing may follow on a connection whose request never ended: without this it would stay open."""
        return super().headers() | {"connection": "close"}


class BodyTooLarge(RequestError):
    """The body is over ``server.max_body``."""

    status = 413
    code = "request_too_large"


class UnsupportedMediaType(RequestError):
    """The body is not JSON in UTF-8."""

    status = 415
    code = "unsupported_media_type"


class Overloaded(GatewayError):
    """The queue of the model is full."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Unavailable(GatewayError):
    """We cannot answer now, but may later."""

    status = 503
    type = "service_unavailable_error"
    code = "server_is_overloaded"


class ModelLoading(Unavailable):
    """The model is still being loaded and the client's deadline has passed."""

    code = "model_loading"


class ModelFailed(Unavailable):
    """The model cannot be started; the message says why, without paths."""

    code = "model_failed"


class Draining(Unavailable):
    """The gateway is stopping."""

    code = "server_is_stopping"


class CountingTimedOut(Unavailable):
    """The engine did not count the prompt within the deadline."""


class UpstreamFailed(GatewayError):
    """The engine died, broke off or answered nonsense."""

    status = 502
    code = "upstream_failed"

    def __init__(self, message: str, *, streamed: bool = False) -> None:
        super().__init__(message)
        self._streamed = streamed

    def headers(self) -> dict[str, str]:
        """A generation that began is not safe to repeat unseen."""
        return super().headers() | ({"x-should-retry": "false"} if self._streamed else {})


class AnswerRejected(UpstreamFailed):
    """The model's answer is not of the format that was asked for, or calls no tool where it had to."""

    code = "answer_rejected"

    def __init__(self, message: str) -> None:
        super().__init__(message, streamed=True)


class EngineGone(UpstreamFailed):
    """The connection to the engine ended; an answer that had not begun can be had from its successor."""


class UpstreamTimeout(GatewayError):
    """The engine sent nothing for too long."""

    status = 504
    type = "timeout_error"
    code = "upstream_timeout"


class SetupError(GatewayError):
    """The operator has to mend something; ``public`` is what a client may be told about it, without any path."""

    status = 503
    type = "service_unavailable_error"
    code = "model_failed"
    exit_code: ClassVar[int] = 2
    # For so long a model that cannot be loaded because of it is left alone.
    retry_seconds: ClassVar[float] = 10.0
    public: ClassVar[str] = "the gateway is not set up correctly"


class ConfigError(SetupError):
    """The configuration cannot be used: file, line, key and cure are in the message."""

    public = "its configuration is not valid"


class ModelFileError(SetupError):
    """The model file is missing, damaged, or no model."""

    public = "its file is missing or is not a usable model"


class EngineUnusable(SetupError):
    """No engine was found, or it does not start."""

    public = "the engine does not start"


class AddressInUse(SetupError):
    """Somebody else listens on that address."""


class StorageError(SetupError):
    """A folder or a disk cannot be written."""

    public = "the disk of the gateway cannot be written"


class DemoFailed(SetupError):
    """The demo could not fetch its model or got no answer."""


class GatewaySilent(SetupError):
    """A running gateway was to be looked at, and is not there or does not let us."""


class DoesNotFit(SetupError):
    """No placement fits the memory; ``numbers`` holds the bytes needed and available."""

    exit_code = 3
    public = "it does not fit into the memory of this machine"

    def __init__(self, message: str, *, numbers: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.numbers = dict(numbers or {})


class ContextAboveTrained(DoesNotFit):
    """The configured context exceeds the one that the model was trained for: no memory would help."""

    public = "its context is set higher than the model was trained for"


class DeviceMissing(DoesNotFit):
    """The model must run on a device, and the engine has none that it runs on."""

    retry_seconds = 300.0
    public = "it must run on a GPU, and the engine finds none that it can use"
