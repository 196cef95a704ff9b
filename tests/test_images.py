"""Pictures: looked at, counted by the engine, and fetched only where they may be."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from aiohttp import web

from app.config import ImageConfig
from app.errors import InvalidValue
from app.images import Images
from app.images.address import is_public
from app.images.fetch import Fetcher
from app.images.look import picture_of
from app.protocol import parse_chat_request
from tests import projector_shapes
from tests.checklist import lines, rows
from tests.conftest import MODEL_ID
from tests.gateway import GatewayProcess, running_gateway
from tests.gguf_writer import write

pytestmark = pytest.mark.any_engine

SMALL = projector_shapes.siglip(blocks=2, width=256, feed_forward=512, text_width=576, image=224)


def png(width: int = 8, height: int = 8) -> bytes:
    """A grey picture."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(b"\x00" + b"\x80" * width for _ in range(min(height, 64)))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def body_with(*urls: str, **fields: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is this?"}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": MODEL_ID, "messages": [{"role": "user", "content": parts}], "max_tokens": 2} | fields


def test_a_picture_is_measured_without_being_decoded() -> None:
    picture = picture_of(data_url(png(640, 480)), max_pixels=640 * 480, where="x")
    assert (picture.width, picture.height) == (640, 480)
    with pytest.raises(InvalidValue, match="307200 pixels"):
        picture_of(data_url(png(640, 480)), max_pixels=640 * 480 - 1, where="x")


@rows(57)
def test_a_bomb_is_refused_by_its_head() -> None:
    with pytest.raises(InvalidValue, match="pixels"):
        picture_of(data_url(png(65535, 65535)), max_pixels=32_000_000, where="x")


@pytest.mark.parametrize(
    "url",
    [
        "data:text/html;base64,AAAA",
        "data:image/svg+xml;base64,AAAA",
        "data:image/png,AAAA",
        "data:image/png;base64,!!!!",
        "data:image/png;base64,AAAA",
        "data:image/png;base64,",
        data_url(b"GIF89a"),
        data_url(png()[:20]),
        data_url(b"\xff\xd8\xff\xe0" + b"\xff" * 50, "image/jpeg"),
        data_url(b"RIFF\xff\xff\xff\xffWEBPVP8 ", "image/webp"),
    ],
)
def test_what_is_no_picture(url: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        picture_of(url, max_pixels=1 << 30, where="messages[0]")
    assert caught.value.param == "messages[0]"
    assert "AAAA" not in caught.value.message


@rows(37)
@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://example.org/x.png", "/etc/passwd", "javascript:1", "", "FILE:///x", "gopher://x"],
)
@lines(60)
def test_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse_chat_request(orjson.dumps(body_with(url)))
    assert caught.value.param == "messages[0].content[1].image_url.url"


@rows(37)
@lines(59)
async def test_nothing_is_fetched_unless_it_is_allowed() -> None:
    request = parse_chat_request(orjson.dumps(body_with("http://169.254.169.254/latest/meta-data")))
    with pytest.raises(InvalidValue, match=r"images\.fetch"):
        await Images(ImageConfig()).inlined(request)


async def test_too_many() -> None:
    request = parse_chat_request(orjson.dumps(body_with(*[data_url(png())] * 3)))
    assert (await Images(ImageConfig(max_count=3)).inlined(request)).media == {"image_url"}
    with pytest.raises(InvalidValue, match="3 pictures"):
        await Images(ImageConfig(max_count=2)).inlined(request)


_PUBLIC = ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"]
_NOT_PUBLIC = [
    *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0"),
    *("fc00::1", "fd00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:93.184.216.34", "2002:7f00:1::", "64:ff9b::7f00:1"),
    *("2001:db8::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "localhost", "", "1.2.3"),
]


@pytest.mark.parametrize(("address", "expected"), [*((a, True) for a in _PUBLIC), *((a, False) for a in _NOT_PUBLIC)])
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(address) is expected


class Host:
    """A real server on this machine, which a picture may never come from unless a test allows it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked: list[str] = []

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@asynccontextmanager
async def _hosting() -> AsyncIterator[Host]:
    host = Host(0)

    async def answer(request: web.Request) -> web.StreamResponse:
        host.asked.append(request.path)
        match request.path:
            case "/picture":
                return web.Response(body=png(), content_type="image/png")
            case "/page":
                return web.Response(text="<html>", content_type="text/html")
            case "/large":
                return web.Response(body=png() + bytes(10_000), content_type="image/png")
            case "/away":
                raise web.HTTPFound(request.query.get("to", "/away"))
            case _:
                raise web.HTTPNotFound()

    runner = web.AppRunner(_application(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host.port = runner.addresses[0][1]
    try:
        yield host
    finally:
        await runner.cleanup()


def _application(answer: Any) -> web.Application:
    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    return application


@rows(37)
@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "[::1]", "127.1"])
async def test_this_machine_is_never_asked_by_whatever_name(name: str) -> None:
    async with _hosting() as host:
        with pytest.raises(InvalidValue, match="cannot be asked"):
            await Fetcher(max_bytes=1 << 20).fetch(host.url("/picture", name), where="x")
        assert host.asked == []


async def test_a_picture_that_may_be_fetched() -> None:
    async with _hosting() as host:
        fetcher = Fetcher(max_bytes=1 << 20, is_allowed=lambda address: True)
        images = Images(ImageConfig(fetch=True), fetcher=fetcher)
        request = await images.inlined(parse_chat_request(orjson.dumps(body_with(host.url("/picture")))))
    assert request.messages[0]["content"][1]["image_url"]["url"] == data_url(png())


@pytest.mark.parametrize(
    ("path", "says"), [("/page", "no picture"), ("/large", "over 5000 bytes"), ("/nothing", "no picture")]
)
async def test_what_is_not_fetched(path: str, says: str) -> None:
    async with _hosting() as host:
        with pytest.raises(InvalidValue, match=says):
            await Fetcher(max_bytes=5000, is_allowed=lambda address: True).fetch(host.url(path), where="x")


@rows(37)
async def test_each_step_of_a_redirect_is_looked_at() -> None:
    async with _hosting() as host:
        allowed = Fetcher(max_bytes=5000, is_allowed=lambda address: address == "127.0.0.1")
        there = host.url(f"/away?to={host.url('/picture')}")
        assert (await allowed.fetch(there, where="x")).startswith("data:image/png")
        for inside in (host.url("/picture", "127.0.0.2"), "file:///etc/passwd", host.url("/picture", "[::1]")):
            with pytest.raises(InvalidValue, match="cannot be asked"):
                await allowed.fetch(host.url(f"/away?to={inside}"), where="x")
        with pytest.raises(InvalidValue, match="passed on"):
            await allowed.fetch(host.url(f"/away?to={host.url('/away?to=/away')}"), where="x")
    assert host.asked.count("/picture") == 1


@pytest.fixture(scope="module")
def seeing(
    native_engine: Path | None, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """The demo model with a projector whose weights are all zero: it sees nothing, but counts what it is shown."""
    if native_engine is None:
        pytest.skip("no native engine")
    folder = tmp_path_factory.mktemp("seeing")
    mmproj = write(folder / "mmproj.gguf", SMALL)
    entry = {"path": str(demo_model), "mmproj": str(mmproj), "context": 2048}
    config = {"engine": {"binary": str(native_engine)}, "models": {MODEL_ID: entry}, "memory": {"ram_reserve": 0}}
    with running_gateway(config, folder) as running:
        yield running


@rows(57)
@lines(93)
@pytest.mark.parametrize("pictures", [1, 2])
def test_pictures_are_counted_as_the_engine_does(seeing: GatewayProcess, pictures: int) -> None:
    answer = httpx.post(f"{seeing.url}/v1/chat/completions", json=body_with(*[data_url(png())] * pictures), timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-context-count"] == "exact"
    assert int(answer.headers["x-context-prompt-tokens"]) == answer.json()["usage"]["prompt_tokens"]


def test_pictures_in_messages_of_anthropics_api(seeing: GatewayProcess) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png()).decode()}
    picture = {"type": "image", "source": source}
    asked = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [picture]}]}
    counts = []
    for messages in ([asked], [asked, call, result]):
        body = {"model": MODEL_ID, "messages": messages}
        count = httpx.post(f"{seeing.url}/v1/messages/count_tokens", json=body, timeout=120)
        answer = httpx.post(f"{seeing.url}/v1/messages", json=body | {"max_tokens": 2}, timeout=120)
        usage = answer.json()["usage"]
        assert count.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
        counts.append(count.json()["input_tokens"])
    assert counts[1] > 2 * (counts[0] - 50)


def test_pictures_in_responses(seeing: GatewayProcess) -> None:
    def ask(url: str, path: str = "") -> httpx.Response:
        parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": url}]
        body = {"model": MODEL_ID, "input": [{"role": "user", "content": parts}], "max_output_tokens": 2}
        return httpx.post(f"{seeing.url}/v1/responses{path}", json=body, timeout=120)

    counted = ask(data_url(png()), "/input_tokens").json()["input_tokens"]
    assert counted == ask(data_url(png())).json()["usage"]["input_tokens"] > 50
    refused = ask("https://example.org/picture.png")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].content[1].image_url")


def test_a_picture_that_the_engine_cannot_read_is_the_clients_fault(seeing: GatewayProcess) -> None:
    """Its head is right, so that only the engine notices."""
    broken = data_url(png()[:45] + b"nonsense")
    answer = httpx.post(f"{seeing.url}/v1/chat/completions", json=body_with(broken), timeout=120)
    assert answer.status_code == 400, answer.text


@lines(58)
def test_a_model_without_eyes_says_so(gateway: GatewayProcess) -> None:
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body_with(data_url(png())), timeout=60)
    assert answer.status_code == 400
    assert "takes no pictures" in answer.json()["error"]["message"]
