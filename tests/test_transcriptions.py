"""Transcriptions with an engine that hears: forms within bounds, words in OpenAI's shapes, cuts never hidden."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fleet import fake_binary
from tests.gateway import GatewayProcess, running_gateway

WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(64)
WORDS = "well "
MAX_BODY = 1 << 20


@pytest.fixture(scope="module")
def hearing(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One model that hears and one that does not."""
    folder = tmp_path_factory.mktemp("hearing")
    (folder / "ears.json").write_text(json.dumps({"audio": True, "content": WORDS, "chunks": 4}))
    (folder / "long.json").write_text(json.dumps({"audio": True, "content": WORDS, "chunks": 40}))
    models = {name: {"path": str(demo_model), "context": 512, "max_tokens": 8} for name in ("ears", "long", "deaf")}
    config = {
        "server": {"max_body": MAX_BODY},
        "engine": {"binary": str(fake_binary(folder))},
        "models": models,
        "memory": {"ram_reserve": 0},
    }
    with running_gateway(config, folder, environment={"FAKE_SWITCHES": str(folder)}) as running:
        yield running


def post(gateway: GatewayProcess, *, recording: bytes = WAV, **fields: str) -> httpx.Response:
    files = {"file": ("a.wav", recording, "audio/wav")}
    url = f"{gateway.url}/v1/audio/transcriptions"
    return httpx.post(url, data={"model": "ears", **fields}, files=files, timeout=60)


def test_the_sdk_gets_the_words(hearing: GatewayProcess) -> None:
    with openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = client.audio.transcriptions.create(model="ears", file=("a.wav", WAV), language="en")
        assert answer.text == WORDS * 4
        assert answer.usage.output_tokens == 4
        bare = client.audio.transcriptions.create(model="ears", file=("a.wav", WAV), response_format="text")
        assert bare == WORDS * 4
        events = list(client.audio.transcriptions.create(model="ears", file=("a.wav", WAV), stream=True))
    assert [event.type for event in events] == ["transcript.text.delta"] * (len(events) - 1) + ["transcript.text.done"]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == WORDS * 4


def test_the_prompt_goes_through_the_gate(hearing: GatewayProcess) -> None:
    answer = post(hearing, prompt="word " * 600)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_transcript_that_was_cut_is_never_passed_off_as_whole(hearing: GatewayProcess) -> None:
    whole = post(hearing, model="long")
    assert whole.status_code == 502
    assert whole.json()["error"]["code"] == "answer_rejected"
    with (
        openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
        pytest.raises(openai.APIError) as broken,
    ):
        for event in client.audio.transcriptions.create(model="long", file=("a.wav", WAV), stream=True):
            assert event.type == "transcript.text.delta"
    assert broken.value.code == "answer_rejected"


def test_a_model_that_does_not_hear_is_refused(hearing: GatewayProcess) -> None:
    answer = post(hearing, model="deaf")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_value"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "srt"}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "9"}, "temperature"),
        ({"stream": "maybe"}, "stream"),
        ({"model": ""}, "model"),
    ],
)
def test_what_cannot_be_done_is_refused(fields: dict[str, str], param: str, hearing: GatewayProcess) -> None:
    answer = post(hearing, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_what_is_no_recording_is_refused(hearing: GatewayProcess) -> None:
    assert post(hearing, recording=b"OggS" + bytes(60)).json()["error"]["param"] == "file"
    url, fields = f"{hearing.url}/audio/transcriptions", {"model": "ears"}
    no_file: dict[str, Any] = {"data": fields, "files": {"other": b"x"}}
    assert httpx.post(url, **no_file, timeout=60).json()["error"]["param"] == "file"
    assert httpx.post(url, json=fields, timeout=60).status_code == 415
    broken = httpx.post(url, content=b"--x", headers={"content-type": "multipart/form-data"}, timeout=60)
    assert broken.status_code == 400


def test_a_form_over_the_limit_is_refused(hearing: GatewayProcess) -> None:
    assert post(hearing, recording=WAV + bytes(MAX_BODY)).status_code == 413
    assert post(hearing, prompt="a" * (1 << 17)).status_code == 400
