"""The allow-list: every other path is 404."""

from __future__ import annotations

from fastapi import APIRouter

from app.api import (
    admin,
    audio,
    chat,
    completions,
    embeddings,
    events,
    health,
    messages,
    models,
    openapi,
    responses,
    tokens,
    usage,
)

router = APIRouter()
_OF_TEXT = (chat, completions, embeddings, tokens, audio, messages, responses, models)
for _noun in (*_OF_TEXT, health, usage, admin, events, openapi):
    router.routes.extend(_noun.routes)
