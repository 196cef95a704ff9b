"""The fake engine against a real one's recorded stream, and each of its switches."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("fake_engine.py")
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Say hi"}]

# llama-server build 11669, SmolLM2-135M: max_tokens 2, include_usage; one entry for each HTTP chunk.
RECORDED = [
    'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],'
    '"created":1796032324,"id":"chatcmpl-io9rCAkjESerg9G110p8lrtXBY3modsv","model":"demo",'
    '"system_fingerprint":"b11669-Debian","object":"chat.completion.chunk"}\n\n'
    'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"You"}}],'
    '"created":1796032324,"id":"chatcmpl-io9rCAkjESerg9G110p8lrtXBY3modsv","model":"demo",'
    '"system_fingerprint":"b11669-Debian","object":"chat.completion.chunk"}\n\n',
    'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"\'re"}}],'
    '"created":1796032324,"id":"chatcmpl-io9rCAkjESerg9G110p8lrtXBY3modsv","model":"demo",'
    '"system_fingerprint":"b11669-Debian","object":"chat.completion.chunk"}\n\n',
    'data: {"choices":[{"finish_reason":"length","index":0,"delta":{}}],"created":1796032324,'
    '"id":"chatcmpl-io9rCAkjESerg9G110p8lrtXBY3modsv","model":"demo","system_fingerprint":"b11669-Debian",'
    '"object":"chat.completion.chunk"}\n\n'
    'data: {"choices":[],"created":1796032324,"id":"chatcmpl-io9rCAkjESerg9G110p8lrtXBY3modsv","model":"demo",'
    '"system_fingerprint":"b11669-Debian","object":"chat.completion.chunk","usage":{"completion_tokens":2,'
    '"prompt_tokens":32,"total_tokens":34,"prompt_tokens_details":{"cached_tokens":0}},"timings":{"cache_n":0,'
    '"prompt_n":32,"prompt_ms":109.055,"prompt_per_token_ms":3.40796875,"prompt_per_second":293.4299206822245,'
    '"predicted_n":2,"predicted_ms":32.603,"predicted_per_token_ms":8.15075,'
    '"predicted_per_second":122.68809618746741}}\n\n',
    "data: [DONE]\n\n",
]
RECORDED_HEADERS = {"server", "access-control-allow-origin", "x-accel-buffering", "content-type", "transfer-encoding"}


class Server:
    """A fake engine that listens on a socket in `folder`."""

    def __init__(self, folder: Path, child: subprocess.Popen[str]) -> None:
        self.path = folder / "e.sock"
        self.child = child
        self.log: list[str] = []

    def ask(self, path: str, body: object = None, *, key: str = "k") -> tuple[int, bytes]:
        """Status and body of one exchange, read to the end of the connection; the body of a stream stays chunked."""
        content = json.dumps(body).encode() if body is not None else b""
        head = f"{'POST' if content else 'GET'} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        raw = self.send(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        head, _, rest = raw.decode("latin-1").partition("\r\n\r\n")
        return int(head[9:12]) if head else 0, rest.encode("latin-1")

    def send(self, content: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(str(self.path))
            connection.sendall(content)
            return read_to_end(connection)

    def json(self, path: str, body: object = None) -> Any:
        status, content = self.ask(path, body)
        assert status == 200, content
        return json.loads(content)

    def stream(self, **fields: object) -> list[bytes]:
        """The HTTP chunks of a stream, the last of them empty when the body ended properly."""
        status, body = self.ask(CHAT, {"messages": HELLO, "stream": True, **fields})
        assert status == 200, body
        return list(split_chunks(body))

    def wait_for_log(self, text: str) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.log.append(line)
            if text in line:
                return
        raise AssertionError(f"{text!r} is not in {self.log}")


def read_to_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def split_chunks(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, rest = body.partition(b"\r\n")
        yield rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]


@contextlib.contextmanager
def fake_engine(folder: Path, *argv: str, wait_for: str = "model loaded", **switches: object) -> Iterator[Server]:
    key_file = folder / "key"
    key_file.write_text("k\n")
    command = [sys.executable, str(PROGRAM), "--host", str(folder / "e.sock"), "--alias", "demo"]
    command += ["-c", "1000", "-np", "2", "--api-key-file", str(key_file), *argv]
    env = os.environ | {"FAKE_ENGINE": json.dumps(switches)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as child:
        server = Server(folder, child)
        try:
            server.wait_for_log(wait_for)
            yield server
        finally:
            child.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with fake_engine(tmp_path_factory.mktemp("fake")) as running:
        yield running


def shape(value: Any) -> Any:
    """Keys in their order and types; numbers are all alike."""
    if isinstance(value, dict):
        return [(key, shape(part)) for key, part in value.items()]
    if isinstance(value, list):
        return [shape(part) for part in value]
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def shapes(chunk: str) -> list[Any]:
    lines = chunk.split("\n\n")
    assert lines.pop() == "", "an event ends with a blank line"
    assert all(line.startswith("data: ") for line in lines)
    return [line if line == "data: [DONE]" else sorted_timings(shape(json.loads(line[6:]))) for line in lines]


def sorted_timings(pairs: list[Any]) -> list[Any]:
    return [(key, sorted(value) if key == "timings" else value) for key, value in pairs]


def test_stream_has_the_shape_of_a_real_one(server: Server) -> None:
    chunks = server.stream(max_tokens=2, stream_options={"include_usage": True})
    assert chunks.pop() == b"", "the body must end with the empty chunk"
    assert [shapes(chunk.decode()) for chunk in chunks] == [shapes(chunk) for chunk in RECORDED]
    assert 180 < len(chunks[1]) < 260


def test_stream_headers_are_those_of_a_real_one(server: Server) -> None:
    body = json.dumps({"messages": HELLO, "stream": True, "max_tokens": 1}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nAuthorization: Bearer k\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    answer = server.send(head.encode() + body).partition(b"\r\n\r\n")[0].decode().lower().split("\r\n")
    assert {line.partition(":")[0] for line in answer[1:]} == RECORDED_HEADERS | {"connection"}


def test_usage_is_sent_only_when_asked(server: Server) -> None:
    text = b"".join(server.stream(max_tokens=3))
    assert b'"usage"' not in text
    assert text.count(b'"timings"') == 1


def test_all_counters_agree(server: Server) -> None:
    messages = [{"role": "user", "content": '北京 <|im_end|> {"a": [1, 2]}\n\n🌍 don\'t'}]
    counted = server.json(f"{CHAT}/input_tokens", {"messages": messages})["input_tokens"]
    prompt = server.json("/apply-template", {"messages": messages})["prompt"]
    tokens = server.json("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})["tokens"]
    usage = server.json(CHAT, {"messages": messages, "max_tokens": 3})["usage"]
    assert counted == len(tokens) == usage["prompt_tokens"] <= len(prompt.encode()) + 2
    assert usage["completion_tokens"] == 3


def test_streamed_and_whole_answers_are_equal(server: Server) -> None:
    events = b"".join(server.stream()).decode().split("\n\n")[:-2]
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events]
    whole = server.json(CHAT, {"messages": HELLO})["choices"][0]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["message"]["content"] != ""
    assert whole["finish_reason"] == "stop"


def test_context_is_of_each_slot_in_steps_of_256(server: Server) -> None:
    assert server.json("/props")["default_generation_settings"]["n_ctx"] == 512
    assert server.json("/props")["total_slots"] == 2
    assert server.json("/v1/models")["data"][0]["meta"]["n_ctx"] == 512
    assert [slot["n_ctx"] for slot in server.json("/slots")] == [512, 512]
    status, body = server.ask(CHAT, {"messages": [{"role": "user", "content": "word " * 600}]})
    error = json.loads(body)["error"]
    assert (status, error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", 512)
    assert error["n_prompt_tokens"] > 600


@pytest.mark.parametrize(
    ("path", "key", "status"), [("/health", "", 200), ("/props", "", 401), (CHAT, "other", 401), ("/none", "k", 404)]
)
def test_key_and_unknown_path(server: Server, path: str, key: str, status: int) -> None:
    assert server.ask(path, {} if path == CHAT else None, key=key)[0] == status


def test_calls_are_counted(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as server:
        server.ask("/health")
        server.ask("/health")
        server.ask("/none")
        assert server.json("/calls") == {"/health": 2, "/none": 1}


def test_a_client_that_leaves_frees_its_slot(tmp_path: Path) -> None:
    with fake_engine(tmp_path, chunks=1000, chunk_interval_seconds=0.05) as server:
        body = json.dumps({"messages": HELLO, "stream": True}).encode()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(server.path))
            head = f"POST {CHAT} HTTP/1.1\r\nAuthorization: Bearer k\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            assert [slot["is_processing"] for slot in server.json("/slots")] == [True, False]
        while "departed" not in (calls := server.json("/calls")):
            pass
        assert calls["departed"] == 1
        assert [slot["is_processing"] for slot in server.json("/slots")] == [False, False]


def test_loading(tmp_path: Path) -> None:
    with fake_engine(tmp_path, wait_for="loading model", load_seconds=0.5, models_ready_early=True) as server:
        status, body = server.ask("/health")
        assert (status, json.loads(body)["error"]["message"]) == (503, "Loading model")
        assert server.ask("/v1/models")[0] == 200
        assert server.ask("/props")[0] == 503
        server.wait_for_log("model loaded")
        assert server.ask("/health")[0] == 200


def test_log_switches(tmp_path: Path) -> None:
    with fake_engine(tmp_path, log_flood=50, long_line=5000, offloaded="0/33", log_lines=["abort"]) as server:
        text = "".join(server.log)
    assert text.count("launch_slot_") == 50
    assert "x" * 5000 in text
    assert "ggml_cuda_init: failed" in text
    assert "offloaded 0/33 layers to GPU" in text
    assert "abort" in text


@pytest.mark.parametrize(
    ("how", "code"),
    [("sigkill", -signal.SIGKILL), ("sigill", -signal.SIGILL), ("exit137", 137), ("exit1", 1)],
)
def test_death_in_mid_stream(tmp_path: Path, how: str, code: int) -> None:
    with fake_engine(tmp_path, die=f"{how}@3") as server:
        text = b"".join(server.stream())
        assert text.count(b'"content":"') == 3
        assert b'finish_reason":"' not in text
        assert b"[DONE]" not in text
        assert server.child.wait(10) == code


@pytest.mark.parametrize("when", ["load", "request", "0.1s"])
def test_death_at_other_times(tmp_path: Path, when: str) -> None:
    with fake_engine(tmp_path, wait_for="loading model", die=f"exit1@{when}") as server:
        if when == "request":
            server.wait_for_log("model loaded")
            assert server.ask(CHAT, {"messages": HELLO}) == (0, b"")
        assert server.child.wait(10) == 1


def test_eof_in_mid_stream_leaves_the_engine_alive(tmp_path: Path) -> None:
    with fake_engine(tmp_path, die="eof@2") as server:
        chunks = server.stream()
        assert len(chunks) == 2
        assert chunks[-1] != b""
        assert server.ask("/health")[0] == 200


def test_rst_in_mid_stream(tmp_path: Path) -> None:
    body = json.dumps({"messages": HELLO, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nAuthorization: Bearer k\r\nContent-Length: {len(body)}\r\n\r\n"
    with fake_engine(tmp_path, "--host", "127.0.0.1", "--port", "0", wait_for="listening on", die="rst@1") as server:
        port = int(server.log[-1].rpartition(":")[2])
        server.wait_for_log("model loaded")
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(head.encode() + body)
            with pytest.raises(ConnectionResetError):
                read_to_end(connection)


@pytest.mark.parametrize("switch", ["error_event", "half_line"])
def test_clean_end_without_done(tmp_path: Path, switch: str) -> None:
    at = {"error_event": -1, "half_line": -1, switch: 2}
    with fake_engine(tmp_path, error_event=at["error_event"], half_line=at["half_line"]) as server:
        chunks = server.stream()
    assert chunks.pop() == b""
    assert b"[DONE]" not in b"".join(chunks)
    if switch == "error_event":
        assert json.loads(chunks[-1][6:])["error"]["code"] == 500
    else:
        assert chunks[-1].startswith(b"data: {")
        assert not chunks[-1].endswith(b"\n\n")


def test_error_event_without_streaming_is_an_error(tmp_path: Path) -> None:
    with fake_engine(tmp_path, error_event=2) as server:
        assert server.ask(CHAT, {"messages": HELLO})[0] == 500


def test_segments_say_the_same(tmp_path: Path, server: Server) -> None:
    with fake_engine(tmp_path, segment_bytes=1) as slow:
        chunks = slow.stream(max_tokens=12)
    assert {len(chunk) for chunk in chunks[:-1]} == {1}
    assert texts(chunks) == texts(server.stream(max_tokens=12))


def texts(chunks: list[bytes]) -> list[str]:
    return re.findall(r'"content":"([^"]*)"', b"".join(chunks).decode())


def test_answer_switches(tmp_path: Path) -> None:
    delta = {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    with fake_engine(tmp_path, tool_deltas=[delta], usage="always", ping=":\n\n", slots=3, nctx=300) as server:
        text = b"".join(server.stream())
        assert len(server.json("/slots")) == 3
        assert server.json("/props")["default_generation_settings"]["n_ctx"] == 300
    assert b'"arguments":"{}"' in text
    assert b'"finish_reason":"tool_calls"' in text
    assert b'"usage"' in text
    assert text.startswith(b":\n\ndata: ")


def test_connection_is_closed_after_a_response_that_promised_to_keep_it(tmp_path: Path) -> None:
    with fake_engine(tmp_path, close_after_response=True) as server:
        assert b"Keep-Alive: timeout=5" in server.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")


def test_connection_is_kept(server: Server) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = server.send(request + request + request.replace(b"Host: x", b"Connection: close"))
    assert answer.count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("ignored", [False, True])
def test_sigterm(tmp_path: Path, *, ignored: bool) -> None:
    with fake_engine(tmp_path, ignore_sigterm=ignored) as server:
        server.child.terminate()
        if ignored:
            server.wait_for_log("SIGTERM ignored")
            assert server.ask("/health")[0] == 200
        else:
            assert server.child.wait(10) == 0
            assert server.path.exists(), "llama-server leaves its socket file behind"


def test_stale_socket_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "e.sock"))
    with fake_engine(tmp_path, wait_for="couldn't bind HTTP server socket") as server:
        assert server.child.wait(10) == 1


def test_router_child_reports_and_obeys(tmp_path: Path) -> None:
    argv = [sys.executable, str(PROGRAM), "--host", str(tmp_path / "e.sock"), "--alias", "demo"]
    env = os.environ | {"LLAMA_SERVER_ROUTER_PORT": "1"}
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        state = child.stdout.readline().removeprefix("cmd_child_to_router:state:")
        assert json.loads(state)["state"] == "ready"
        child.stdin.write("cmd_router_to_child:exit\n")
        child.stdin.flush()
        assert child.wait(10) == 0


def run(*argv: str, switches: str = "{}") -> subprocess.CompletedProcess[str]:
    env = os.environ | {"FAKE_ENGINE": switches}
    return subprocess.run(
        [sys.executable, str(PROGRAM), *argv], env=env, capture_output=True, text=True, timeout=20, check=False
    )


def test_version_devices_and_help() -> None:
    assert "build 11669" in run("--version").stderr
    assert run("--list-devices").stdout == "Available devices:\n  (none)\n"
    flags = {flag for line in run("--help").stdout.splitlines() for flag in re.findall(r"^-[^ ].*", line)}
    assert any(flag.startswith("-ngl,") for flag in flags)
    assert any(flag.startswith("--metrics") for flag in flags)


def test_misspelt_switch_fails() -> None:
    done = run("--host", "127.0.0.1", "--port", "0", switches='{"chunk": 3}')
    assert done.returncode == 1
    assert "chunk" in done.stderr
