"""The allow-list: every other path is 404."""

from __future__ import annotations

from fastapi import APIRouter

from app.api import admin, chat, completions, embeddings, events, health, messages, models, openapi, responses, usage

router = APIRouter()
for _noun in (chat, completions, embeddings, messages, responses, models, health, usage, admin, events, openapi):
    router.routes.extend(_noun.routes)
