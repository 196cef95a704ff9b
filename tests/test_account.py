"""What a request adds to the numbers: waits apart, tokens of who left, refusals inside a stream, slots that worked."""

from __future__ import annotations

import asyncio
import time

from app.errors import Overloaded, UpstreamFailed
from app.metrics import Metrics
from app.protocol import UsageMeter
from app.proxy.account import Account
from app.request_record import RequestRecord
from app.scheduler import Scheduler
from tests.virtual_time import run_virtually

CHUNK = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
PROGRESS = b'data: {"choices":[],"prompt_progress":{"total":90,"cache":40,"processed":%d,"time_ms":1}}\n\n'


class Till:
    """One account and what was made of it."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.records: list[RequestRecord] = []
        self.account = Account(
            self.metrics, model_id="m", key="alice", endpoint="chat", observers=[self.records.append]
        )
        self.meter = UsageMeter(keep_usage=False)

    def tokens(self, name: str) -> float:
        labels = {"model": "m", "key": "alice"}
        return self.metrics.registry.get_sample_value(f"llama_gateway_{name}_tokens_total", labels) or 0

    def rejected(self) -> float:
        labels = {"reason": "rate_limit_exceeded"}
        return self.metrics.registry.get_sample_value("llama_gateway_rejected_total", labels) or 0


def test_the_parts_of_the_time_to_the_first_token_are_the_whole() -> None:
    till, now = Till(), time.monotonic()
    till.account._arrived = now - 10
    till.account.entered(now - 4)
    till.account.entered(now - 1)
    till.account.queue_seconds = 3
    till.account.sent()
    till.account.first_token = time.monotonic() + 2
    till.meter.events = 1
    till.account.close("ok", None, till.meter, prompt_tokens=5)
    (record,) = till.records
    assert round(record.load_seconds) == 5
    assert round(record.prefill_seconds) == 2
    parts = record.load_seconds + record.queue_seconds + record.prefill_seconds
    assert round(parts) == 10
    meters = till.metrics.of("m")
    assert (meters.prefill.count, meters.load_wait.count, meters.time_to_first_token.count) == (1, 1, 1)


def test_who_leaves_in_the_prompt_has_used_what_was_read_of_it() -> None:
    till = Till()
    till.account.sent()
    till.meter.feed(PROGRESS % 64)
    till.account.close("client_gone", None, till.meter, prompt_tokens=till.meter.prompt_tokens)
    assert (till.tokens("prompt"), till.tokens("cached_prompt"), till.tokens("generation")) == (64, 40, 0)
    assert till.metrics.of("m").time_to_first_token.count == 0


def test_who_leaves_in_the_answer_has_used_what_was_written_of_it() -> None:
    till = Till()
    till.account.sent()
    till.meter.feed(PROGRESS % 90)
    till.account.first_token = time.monotonic()
    # The first event carries the role only.
    till.meter.feed(CHUNK * 4)
    till.account.close("client_gone", None, till.meter, prompt_tokens=till.meter.prompt_tokens)
    assert (till.tokens("prompt"), till.tokens("generation")) == (90, 3)


def test_what_no_engine_saw_counts_as_a_request_and_as_nothing_else() -> None:
    till = Till()
    till.account.close("rejected", Overloaded("Full."), till.meter, prompt_tokens=0)
    meters = till.metrics.of("m")
    assert (till.tokens("prompt"), meters.load_wait.count, meters.prompt_size.count) == (0, 0, 0)
    assert meters.duration.count == 1
    assert till.records[0].error == "rate_limit_exceeded"


def test_a_refusal_inside_a_stream_is_counted_and_a_failure_of_the_engine_is_none() -> None:
    till = Till()
    till.account.told(UpstreamFailed("It died."))
    assert till.rejected() == 0
    till.account.told(Overloaded("Full."))
    assert till.rejected() == 1


def test_slots_that_worked_on_average_while_an_answer_was_written() -> None:
    async def two_of_three() -> None:
        scheduler = Scheduler(Metrics())
        async with scheduler.lease("m", key="a", capacity=3, max_queue=0) as first:
            first.prefilled()
            await asyncio.sleep(1)
            async with scheduler.lease("m", key="b", capacity=3, max_queue=0, slots=2) as second:
                await asyncio.sleep(2)
                # Nothing is written yet: as many as it holds.
                assert second.mean_busy() == 2
                second.prefilled()
                await asyncio.sleep(1)
                assert second.mean_busy() == 3
            await asyncio.sleep(1)
            # One slot for two seconds, three for three.
            assert round(first.mean_busy(), 6) == (2 * 1 + 3 * 3) / 5

    run_virtually(two_of_three())
