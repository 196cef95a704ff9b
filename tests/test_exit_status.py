"""What ended a process, by its exit code alone, on either system."""

from __future__ import annotations

import socket

import pytest

from app.engine.endpoint import Endpoint
from app.engine.exit_status import Ending, ending_of, name_of


@pytest.mark.parametrize(
    ("returncode", "ending", "name"),
    [
        (-4, Ending.ILLEGAL_INSTRUCTION, "SIGILL"),
        (132, Ending.ILLEGAL_INSTRUCTION, "SIGILL"),
        (-9, Ending.KILLED, "SIGKILL"),
        (137, Ending.KILLED, "SIGKILL"),
        (-11, Ending.OTHER, "SIGSEGV"),
        (-99, Ending.OTHER, "signal 99"),
        (0xC000001D, Ending.ILLEGAL_INSTRUCTION, "illegal instruction (0xC000001D)"),
        (0xC0000135, Ending.MISSING_LIBRARY, "library not found (0xC0000135)"),
        (0xC0000017, Ending.NO_MEMORY, "no memory (0xC0000017)"),
        (0xC0000005, Ending.OTHER, "access violation (0xC0000005)"),
        (0xC0FFEE00, Ending.OTHER, "exception (0xC0FFEE00)"),
    ],
)
def test_what_ended_it(returncode: int, ending: Ending, name: str) -> None:
    assert ending_of(returncode) is ending
    assert name_of(returncode) == name


@pytest.mark.parametrize("returncode", [None, 0, 1, 15, 127, 128, 160, 0xBFFFFFFF])
def test_a_process_that_left_by_itself(returncode: int | None) -> None:
    assert ending_of(returncode) is None


def test_a_port_of_the_loopback_is_free_and_a_socket_is_none() -> None:
    endpoint = Endpoint.on_loopback()
    assert endpoint.port
    assert endpoint.base_url == f"http://127.0.0.1:{endpoint.port}"
    with socket.create_server(("127.0.0.1", endpoint.port)):
        assert Endpoint.on_loopback().port != endpoint.port
