"""One task that looks and renders for everybody who watches, once a second, and only while somebody does."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from app.views.observer import Sample
from app.views.page import MODEL_REGION, Page
from app.views.scene import Audience

_log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Shown:
    """A region as it was last rendered, and in which frame it came to look so."""

    shows: object
    html: str
    frame: int


class Board:
    """The page as one audience sees it now; every watcher of that audience reads the same strings."""

    def __init__(self, audience: Audience) -> None:
        self.audience = audience
        self.watchers = 0
        self.frame = 0
        self._regions: dict[str, _Shown] = {}

    def draw(self, page: Page, sample: Sample) -> Iterator[None]:
        """Render what has changed, a region per step, so that answers may go out in between; seen after the last."""
        regions: dict[str, _Shown] = {}
        for region in page.regions(sample, self.audience):
            before = self._regions.get(region.name)
            if before is not None and before.shows == region.shows:
                regions[region.name] = before
                continue
            html = region.render()
            frame = before.frame if before is not None and before.html == html else self.frame + 1
            regions[region.name] = _Shown(region.shows, html, frame)
            yield
        self._regions = regions
        self.frame += 1

    def since(self, frame: int) -> dict[str, str]:
        """HTML of the regions that have changed after a frame."""
        return {name: shown.html for name, shown in self._regions.items() if shown.frame > frame}

    def models(self) -> list[str]:
        """The models on the board, in order."""
        return [name.removeprefix(MODEL_REGION) for name in self._regions if name.startswith(MODEL_REGION)]


class Broadcaster:
    """Boards for all audiences. ``is_over`` once the gateway stops: then watchers leave."""

    def __init__(
        self,
        page: Page,
        *,
        look: Callable[[], Sample],
        is_draining: Callable[[], bool],
        interval_seconds: float = _INTERVAL_SECONDS,
    ) -> None:
        self._page = page
        self._look = look
        self._is_draining = is_draining
        self._interval_seconds = interval_seconds
        self._boards: dict[Audience, Board] = {}
        self._task: asyncio.Task[None] | None = None
        self._changed: asyncio.Future[None] | None = None
        self.is_over = False

    @property
    def watchers(self) -> int:
        """How many watch now."""
        return sum(board.watchers for board in self._boards.values())

    @contextmanager
    def watch(self, audience: Audience) -> Iterator[Board]:
        """The board for this audience, kept up to date until the block ends."""
        board = self._boards.get(audience)
        if board is None:
            board = Board(audience)
            deque(board.draw(self._page, self._look()), maxlen=0)
            self._boards[audience] = board
        board.watchers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="broadcast")
        try:
            yield board
        finally:
            board.watchers -= 1
            if board.watchers == 0:
                del self._boards[audience]
            if not self._boards and self._task is not None:
                self._task.cancel()
                self._task = None

    async def change(self) -> None:
        """Until the boards have been drawn anew, or the gateway stops."""
        if not self.is_over:
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._changed)

    async def _run(self) -> None:
        while not self.is_over:
            await asyncio.sleep(self._interval_seconds)
            self.is_over = self._is_draining()
            if not self.is_over:
                await self._draw()
            self._wake()

    async def _draw(self) -> None:
        try:
            sample = self._look()
            for board in tuple(self._boards.values()):
                for _ in board.draw(self._page, sample):
                    await asyncio.sleep(0)
        except Exception:
            # Whatever it was, who watches must not be left with a page that stands still for ever.
            _log.exception("the status page could not be drawn")

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)
