"""Filling in the middle on a real engine, with a tiny model of random weights that has the marks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from app.errors import InvalidValue
from app.protocol import InfillRequest, infill_request
from tests.checklist import lines, rows
from tests.gateway import GatewayProcess, running_gateway
from tests.random_model import write_random
from tests.shapes import dense, uniform

CONTEXT_TOKENS = 512
# llama-server keeps three quarters of a batch for the prefix and one for the suffix; on a CPU a batch is 128.
BATCH_TOKENS = 128
MODEL_ID = "coder"
MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
PROJECT_ID = "project-coder"
PROJECT_MARKS = ("<reponame>", "<file_sep>")


@pytest.fixture(scope="module")
def coder(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway with a model whose vocabulary has the marks, and one that has those of whole projects too."""
    folder = tmp_path_factory.mktemp("coder")
    sizes: dict[str, Any] = {"layers": 2, "embedding": 64, "heads": 4, "kv_heads": 2, "head_length": 16}
    shape = dense(architecture="qwen3", feed_forward=128, vocabulary=512, context=1024, kind=uniform("F32"), **sizes)
    specials = {MODEL_ID: MARKS, PROJECT_ID: (*MARKS, *PROJECT_MARKS)}
    paths = {model: write_random(folder / f"{model}.gguf", shape, specials=marks) for model, marks in specials.items()}
    config = {
        "engine": {"binary": engine},
        "memory": {"ram_reserve": "256MiB"},
        "models": {
            model: {"path": str(path), "context": CONTEXT_TOKENS, "max_tokens": 8} for model, path in paths.items()
        },
    }
    with running_gateway(config, folder) as running:
        yield running


def post(gateway: GatewayProcess, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/infill", json={"model": MODEL_ID, "ignore_eos": True, **body}, timeout=60)


def test_the_middle_is_filled(coder: GatewayProcess) -> None:
    answer = post(coder, input_prefix="abc", input_suffix="de", n_predict=4, temperature=0).json()
    assert answer["content"]
    # The marks, and a token for each letter.
    assert answer["tokens_evaluated"] == 3 + 5
    assert (answer["tokens_predicted"], answer["stop_type"], answer["truncated"]) == (4, "limit", False)


def test_the_stream_says_the_same(coder: GatewayProcess) -> None:
    fields: dict[str, Any] = {"input_prefix": "abc", "input_suffix": "de", "n_predict": 4, "temperature": 0}
    whole = post(coder, **fields).json()
    stream = post(coder, **fields, stream=True).text
    events = [orjson.loads(event.removeprefix("data: ")) for event in stream.split("\n\n") if event]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["tokens_evaluated"] == whole["tokens_evaluated"]


@lines(95)
def test_95_more_than_a_batch_is_read_whole_and_more_than_a_context_refused(coder: GatewayProcess) -> None:
    for prefix, suffix in ((2 * BATCH_TOKENS, 10), (10, 2 * BATCH_TOKENS)):
        answer = post(coder, input_prefix="a" * prefix, input_suffix="b" * suffix, n_predict=1)
        assert answer.json()["tokens_evaluated"] == 3 + prefix + suffix
    refused = post(coder, input_prefix="a" * CONTEXT_TOKENS, input_suffix="b", n_predict=1)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@rows(1)
def test_row_1_the_head_of_the_prefix_counts(coder: GatewayProcess) -> None:
    fields: dict[str, Any] = {"input_suffix": "b", "n_predict": 8, "temperature": 0}
    one, other = (post(coder, input_prefix=head + "a" * 200, **fields).json() for head in ("XYXYXY", "qrqrqr"))
    assert one["content"] != other["content"]


SNIPPETS = [{"filename": "f.py", "text": "xyz\n", "time": 5}, {"text": "uv"}]


@pytest.mark.parametrize(
    ("model", "others"),
    [
        # The project's mark and name, then each file's; the last is the one that is being written.
        (PROJECT_ID, 1 + 2 + (1 + 5 + 4) + (1 + 1 + 2) + (1 + 2)),
        (MODEL_ID, len("\n\n--- f.py ---\n\nxyz\n" + "\n\n---  ---\n\nuv" + "\n\n------\n\n")),
    ],
)
def test_snippets_of_other_files_are_read_whole(coder: GatewayProcess, model: str, others: int) -> None:
    fields: dict[str, Any] = {"model": model, "input_prefix": "abc", "input_suffix": "de", "n_predict": 4}
    answer = post(coder, input_extra=SNIPPETS, temperature=0, **fields).json()
    assert answer["tokens_evaluated"] == others + 3 + 5
    changed = post(coder, input_extra=[{"filename": "f.py", "text": "qqq\n"}, SNIPPETS[1]], temperature=0, **fields)
    assert changed.json()["content"] != answer["content"]
    refused = post(coder, input_extra=[{"text": "a" * CONTEXT_TOKENS}], **fields)
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_an_editor_sends_ahead_is_read_and_answered_with_nothing(
    coder: GatewayProcess, stream: bool
) -> None:
    ahead: dict[str, Any] = {"input_prefix": f"{stream}" + "a" * 100, "input_suffix": "b"}
    answer = post(coder, **ahead, n_predict=0, stream=stream)
    assert answer.status_code == 200, answer.text
    last = orjson.loads(answer.text.split("\n\n")[-2].removeprefix("data: ")) if stream else answer.json()
    assert (answer.status_code, last["content"]) == (200, "")
    assert answer.text.count("content") == 1
    assert post(coder, **ahead, n_predict=1).json()["tokens_cached"] > 100


def test_a_model_without_marks_is_refused(gateway: GatewayProcess) -> None:
    answer = httpx.post(f"{gateway.url}/infill", json={"model": "smollm2", "input_prefix": "a"}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_endpoint_for_model"


def parsed(**fields: object) -> InfillRequest:
    return infill_request({"model": "m", "input_prefix": "a", **fields})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_prefix", ""),
        ("input_prefix", 5),
        ("input_suffix", ["a"]),
        ("input_extra", {"text": "a"}),
        ("input_extra", ["a"]),
        ("input_extra", [{"filename": "a"}]),
        ("input_extra", [{"text": "a", "filename": 5}]),
        ("input_extra", [{"text": "a"}] * 129),
        ("input_extra", [{"text": "a" * (1 << 19)}] * 3),
        ("n_predict", -1),
        ("prompt", 5),
        ("input_suffix", "a" * ((1 << 20) + 1)),
    ],
)
def test_what_cannot_be_filled_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidValue) as refused:
        parsed(**{field: value})
    assert refused.value.param == field


def test_the_prompt_belongs_to_the_prefix() -> None:
    assert parsed(prompt="b", input_suffix="c", n_predict=7).prefix == "ab"
    assert parsed(n_predict=7).completion.max_tokens == 7
