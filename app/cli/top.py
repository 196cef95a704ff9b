"""``llama-gateway top``: asks a running gateway once a second and shows what it says."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Self

import httpx
import orjson
from rich.console import Console
from rich.live import Live
from rich.text import Text

from app.cli.status import Status, answer_rate, height, new_rates, plain, screen
from app.errors import GatewaySilent

_INTERVAL_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_FEWEST_EVENTS, _MOST_EVENTS = 3, 20


class Top:
    """One gateway, looked at from a terminal; raises GatewaySilent when it cannot be."""

    def __init__(self, url: str, *, key_env: str | None, console: Console | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._key_env = key_env
        self._console = console or Console(highlight=False)
        self._rates = new_rates()
        try:
            self._client = httpx.Client(headers=self._headers(), timeout=_ANSWER_SECONDS, trust_env=False)
        except UnicodeEncodeError:
            raise GatewaySilent(f"What {key_env} holds is no key: keys are plain ASCII.") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def run(self, *, once: bool, as_json: bool) -> None:
        """Show it until interrupted; once where nobody looks, that is where the output is no terminal."""
        status = self.look()
        if as_json:
            self._print_lines(status, once=once)
        elif once or not self._console.is_terminal:
            self._console.print(self._screen(status, events=_MOST_EVENTS))
        else:
            self._show_live(status)

    def look(self) -> Status:
        """What the gateway says of itself now."""
        try:
            answer = self._client.get(f"{self._url}/admin/status")
        except (httpx.InvalidURL, httpx.UnsupportedProtocol):
            raise GatewaySilent(
                f"{self._url} is no address of a gateway; give one like http://127.0.0.1:8080."
            ) from None
        except httpx.HTTPError as error:
            raise GatewaySilent(
                f"No gateway answers at {self._url} ({str(error) or type(error).__name__}); "
                "start one with `llama-gateway serve`, or name its address with --url."
            ) from None
        if answer.status_code != 200:
            raise self._refusal(answer)
        return self._document(answer)

    def _headers(self) -> Mapping[str, str]:
        if self._key_env is None:
            return {}
        key = os.environ.get(self._key_env, "").strip()
        if not key:
            raise GatewaySilent(
                f"There is no key in the environment variable {self._key_env}; set it, or name another."
            )
        return {"authorization": f"Bearer {key}"}

    def _refusal(self, answer: httpx.Response) -> GatewaySilent:
        if answer.status_code == 401 and self._key_env is None:
            return GatewaySilent(
                f"The gateway at {self._url} asks for a key; put an admin key into an environment variable and give "
                "its name with --key-env."
            )
        if answer.status_code == 401:
            return GatewaySilent(f"The key in {self._key_env} is none of the gateway at {self._url}.")
        if answer.status_code == 403 and self._key_env is not None:
            return GatewaySilent(
                f"The key in {self._key_env} may not look at the whole gateway; use one with 'admin: true'."
            )
        if answer.status_code == 404:
            return GatewaySilent(f"What answers at {self._url} is no llama-gateway, or one without /admin/status.")
        return GatewaySilent(f"The gateway at {self._url} answered {answer.status_code}: {plain(_message(answer))}")

    def _document(self, answer: httpx.Response) -> Status:
        try:
            document: Status = answer.json()
            document["models"], document["places"]
        except (ValueError, KeyError, TypeError):
            raise GatewaySilent(f"What answers at {self._url} is no llama-gateway.") from None
        return document

    def _print_lines(self, status: Status, *, once: bool) -> None:
        while True:
            sys.stdout.write(orjson.dumps(status).decode() + "\n")
            sys.stdout.flush()
            if once:
                return
            time.sleep(_INTERVAL_SECONDS)
            status = self.look()

    def _show_live(self, status: Status) -> None:
        try:
            with Live(console=self._console, screen=True, auto_refresh=False) as live:
                while True:
                    live.update(self._screen(status, events=self._room_for_events(status)), refresh=True)
                    time.sleep(_INTERVAL_SECONDS)
                    status = self._look_again(live, status)
        except KeyboardInterrupt:
            # The usual way to leave.
            return

    def _look_again(self, live: Live, status: Status) -> Status:
        """A gateway that is started again in between comes back; until then its last word stays away."""
        while True:
            try:
                return self.look()
            except GatewaySilent as error:
                live.update(Text(f"{error}\n\nTrying again. Ctrl-C to leave."), refresh=True)
                time.sleep(_INTERVAL_SECONDS)

    def _screen(self, status: Status, *, events: int) -> Any:
        self._rates.append(answer_rate(status))
        return screen(status, self._rates, url=self._url, width=self._console.width, events=events)

    def _room_for_events(self, status: Status) -> int:
        return max(_FEWEST_EVENTS, min(_MOST_EVENTS, self._console.height - height(status)))


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.reason_phrase
