"""Whether a server that failed is worth asking, on a clock that stands still."""

from __future__ import annotations

import pytest

from app.backends.breaker import Breaker, BreakerRules, Circuit
from app.backends.remote_faults import is_its_fault
from app.errors import (
    AnswerRejected,
    ContextLengthExceeded,
    EngineGone,
    GatewayError,
    Overloaded,
    RequestError,
    Unavailable,
    UpstreamFailed,
    UpstreamTimeout,
)


def test_the_breaker() -> None:
    now = [0.0]
    breaker = Breaker(lambda: now[0], BreakerRules(failures=3, first_pause=5, longest_pause=12))
    for _ in range(2):
        assert breaker.enter()
        breaker.failed()
    breaker.answered()
    assert breaker.circuit is Circuit.CLOSED
    breaker.failed()
    assert (breaker.circuit, breaker.retry_seconds, breaker.enter()) == (Circuit.OPEN, 5.0, False)
    pauses = []
    for _ in range(3):
        now[0] += breaker.retry_seconds
        assert breaker.circuit is Circuit.HALF_OPEN
        assert (breaker.enter(), breaker.enter()) == (True, False)
        breaker.failed()
        pauses.append(breaker.retry_seconds)
    assert pauses == [10.0, 12.0, 12.0]
    now[0] += 12
    assert breaker.enter()
    breaker.left()
    assert breaker.enter()
    breaker.succeeded()
    assert (breaker.circuit, breaker.enter(), breaker.enter()) == (Circuit.CLOSED, True, True)


def test_a_server_that_could_not_be_reached_is_forgiven_when_it_answers() -> None:
    now = [0.0]
    breaker = Breaker(lambda: now[0], BreakerRules(failures=1))
    breaker.failed(was_reached=False)
    now[0] += breaker.retry_seconds
    breaker.answered()
    assert breaker.circuit is Circuit.CLOSED


@pytest.mark.parametrize("error", [EngineGone("x"), UpstreamFailed("x"), UpstreamTimeout("x")], ids=repr)
def test_what_a_server_is_at_fault_for(error: GatewayError) -> None:
    assert is_its_fault(error)


_OTHERS = [
    RequestError("x"),
    ContextLengthExceeded(prompt_tokens=1, max_tokens=None, context_tokens=1),
    Overloaded("x"),
    Unavailable("x"),
    # The model kept a promise badly; the server did its work.
    AnswerRejected("x"),
    OSError("x"),
]


@pytest.mark.parametrize("error", _OTHERS, ids=repr)
def test_what_others_are_at_fault_for(error: Exception) -> None:
    assert not is_its_fault(error)
