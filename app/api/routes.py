"""The allow-list: every other path is 404."""

from __future__ import annotations

from fastapi import APIRouter

from app.api import admin, chat, events, health, messages, models, usage

router = APIRouter()
router.routes.extend(
    [*chat.routes, *messages.routes, *models.routes, *health.routes, *usage.routes, *admin.routes, *events.routes]
)
