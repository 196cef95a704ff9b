"""Transcriptions of recordings."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from app.api.body import parts_of_body
from app.api.gateway import gateway_of, key_of
from app.api.preferences import preferences
from app.errors import InvalidValue, RequestError, UnsupportedMediaType
from app.protocol.transcription import TranscriptionRequest, ask_transcription, transcription_request
from app.proxy import ExchangeResponse

_MAX_FIELDS = 32
_MAX_FIELD_BYTES = 1 << 16


async def create_transcription(request: Request) -> ExchangeResponse:
    """``POST /v1/audio/transcriptions``: a form, read as it comes, with one recording of at most ``max_body``."""
    gateway, key = gateway_of(request), key_of(request)
    form = await _form(request, parts_of_body(request, limit_bytes=int(gateway.settings.server.max_body)))
    try:
        asked = await _parsed(form)
    finally:
        await form.close()
    return gateway.proxy.generate(ask_transcription(asked), key, preferences(request.headers))


async def _form(request: Request, body: AsyncGenerator[bytes, None]) -> FormData:
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "multipart/form-data":
        raise UnsupportedMediaType("Send 'Content-Type: multipart/form-data' with the recording as 'file'.")
    parser = MultiPartParser(request.headers, body, max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES)
    try:
        return await parser.parse()
    except (MultiPartException, KeyError) as error:
        reason = error.message if isinstance(error, MultiPartException) else "it names no boundary"
        raise RequestError(f"The form cannot be read: {reason[:200]}") from None


async def _parsed(form: FormData) -> TranscriptionRequest:
    recording = form.get("file")
    if not isinstance(recording, UploadFile):
        raise InvalidValue("'file' must be a recording.", param="file")
    fields = {name: value for name, value in form.items() if isinstance(value, str)}
    return transcription_request(fields, await recording.read())


routes: list[BaseRoute] = [
    Route(path, create_transcription, methods=["POST"])
    for path in ("/v1/audio/transcriptions", "/audio/transcriptions")
]
