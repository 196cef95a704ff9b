"""The states of one engine process and the only ways between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class State(StrEnum):
    """Where an engine process is in its life."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


# STOPPING is also the way out of a crash or a hang: what is left of the process group is being removed.
TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.STOPPED: frozenset({State.STARTING}),
    State.STARTING: frozenset({State.READY, State.STOPPING}),
    State.READY: frozenset({State.STOPPING}),
    State.STOPPING: frozenset({State.STOPPED, State.FAILED}),
    State.FAILED: frozenset({State.STARTING}),
}
