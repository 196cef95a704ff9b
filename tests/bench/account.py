"""What counting costs: microseconds of CPU per request and per chunk. Run: python -m tests.bench.account"""

from __future__ import annotations

import time
from collections.abc import Callable

from app.events import EventLog
from app.metrics import Metrics
from app.protocol import UsageMeter
from app.protocol.usage import Timings, Usage
from app.proxy.account import Account
from app.slowdown import SlowdownWatch

_REQUESTS = 20_000
_CHUNKS = 500_000


def _best(work: Callable[[int], None], count: int) -> float:
    """Microseconds per turn, the best of five."""
    costs = []
    for _ in range(5):
        started = time.process_time()
        work(count)
        costs.append((time.process_time() - started) / count * 1e6)
    return min(costs)


def _requests(metrics: Metrics, meter: UsageMeter) -> Callable[[int], None]:
    observers = (SlowdownWatch(metrics, EventLog()).observe,)

    def work(count: int) -> None:
        for _ in range(count):
            account = Account(metrics, model_id="m", key="alice", endpoint="chat", observers=observers)
            account.entered(time.monotonic())
            account.entered(time.monotonic())
            account.sent()
            account.first_token = account.first_byte = time.monotonic()
            metrics.of("m").queue_wait.observe(0.0)
            account.close("ok", None, meter, prompt_tokens=100)

    return work


def _chunks(account: Account, meter: UsageMeter) -> Callable[[int], None]:
    def work(count: int) -> None:
        for _ in range(count):
            if account.first_token is None and meter.events:
                account.first_token = 0.0

    return work


def costs(*, requests: int = _REQUESTS, chunks: int = _CHUNKS) -> tuple[float, float]:
    """Microseconds per request and per chunk."""
    metrics, meter = Metrics(), UsageMeter(keep_usage=False)
    meter.events, meter.usage, meter.timings = 65, Usage(100, 64, 50), Timings(900.0, 40.0)
    account = Account(metrics, model_id="m", key="alice", endpoint="chat")
    account.first_token = 1.0
    return _best(_requests(metrics, meter), requests), _best(_chunks(account, meter), chunks)


def main() -> None:
    """Print both."""
    per_request, per_chunk = costs()
    print(f"{per_request:.1f} us per request, everything counted")
    print(f"{per_chunk:.2f} us per chunk")


if __name__ == "__main__":
    main()
