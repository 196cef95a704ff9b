"""Two real headers, mutated: a sentence or a plan, never a crash, within bounds of time and memory."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from struct import pack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import DoesNotFit, ModelFileError
from app.gguf import read_header
from app.hardware import Device, Machine
from app.offload import Wish, plan_offload
from tests import shapes
from tests.gguf_writer import header, write

GIB = 1 << 30
MACHINE = Machine((Device("GPU0", "", 8 * GIB, 7 * GIB),), 32 * GIB, 30 * GIB, threads=8)
_LONGEST_SECONDS = 5.0
_EDGES = (0, 1, 2, 255, 1 << 15, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 63, (1 << 64) - 1)


@dataclass(frozen=True)
class Original:
    """A header and the sparse file that it is written over; ``size`` is the whole model's."""

    head: bytes
    path: Path
    size: int


@pytest.fixture(scope="module")
def originals(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Original]:
    folder = tmp_path_factory.mktemp("mutated")
    hybrid = shapes.qwen35moe(layers=8, vocabulary=500, draft_head=True)
    hybrid_path = write(folder / "hybrid.gguf", hybrid, words=True)
    found = []
    for number, path in enumerate((demo_model, hybrid_path)):
        facts = read_header(path)
        first = path.stat().st_size - sum(-(-tensor.size_bytes // 32) * 32 for tensor in facts.tensors)
        with path.open("rb") as file:
            found.append(Original(file.read(first), folder / f"scratch{number}.gguf", path.stat().st_size))
    assert all(original.head.startswith(b"GGUF") for original in found)
    assert len(header({}, [])) == 24
    return found


Mutation = tuple[str, float, int]
_POSITION = st.one_of(
    # The counts and the first keys, the tensor table at the end, and anywhere.
    st.floats(0, 0.002),
    st.floats(0.97, 1),
    st.floats(0, 1),
)
_MUTATION: st.SearchStrategy[Mutation] = st.one_of(
    st.tuples(st.just("byte"), _POSITION, st.integers(0, 255)),
    st.tuples(st.just("u32"), _POSITION, st.sampled_from(_EDGES)),
    st.tuples(st.just("u64"), _POSITION, st.sampled_from(_EDGES)),
    st.tuples(st.just("delete"), _POSITION, st.integers(1, 64)),
    st.tuples(st.just("repeat"), _POSITION, st.integers(1, 64)),
)


def mutated(head: bytes, mutations: list[Mutation]) -> bytes:
    content = bytearray(head)
    for kind, share, number in mutations:
        position = min(int(share * len(content)), len(content) - 8)
        match kind:
            case "byte":
                content[position] = number
            case "u32":
                content[position : position + 4] = pack("<I", number & 0xFFFFFFFF)
            case "u64":
                content[position : position + 8] = pack("<Q", number)
            case "delete":
                del content[position : position + number]
            case _:
                content[position:position] = content[position : position + number]
    return bytes(content)


def survives(original: Original, mutations: list[Mutation]) -> None:
    """Anything but the two expected refusals fails the test by itself."""
    with original.path.open("wb") as file:
        file.write(mutated(original.head, mutations))
        file.truncate(original.size)
    begin = time.monotonic()
    try:
        facts = read_header(original.path)
        plan = plan_offload(facts, MACHINE, Wish(context=2048))
        assert all(plan.summary())
        assert plan.document()["model"]["layers"] == facts.layers
    except (ModelFileError, DoesNotFit) as refusal:
        message = str(refusal)
        assert "\n" not in message
        assert len(message) < 600 + len(os.fspath(original.path))
    assert time.monotonic() - begin < _LONGEST_SECONDS


_FEW = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
_MORE = settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
_MANY = settings(max_examples=10000, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("which", [0, 1], ids=["demo", "hybrid"])
@_FEW
@given(mutations=st.lists(_MUTATION, min_size=1, max_size=4))
def test_four_hundred_mutations(originals: list[Original], which: int, mutations: list[Mutation]) -> None:
    survives(originals[which], mutations)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", [0, 1], ids=["demo", "hybrid"])
@_MORE
@given(mutations=st.lists(_MUTATION, min_size=1, max_size=4))
def test_four_thousand_mutations(originals: list[Original], which: int, mutations: list[Mutation]) -> None:
    survives(originals[which], mutations)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("which", [0, 1], ids=["demo", "hybrid"])
@_MANY
@given(mutations=st.lists(_MUTATION, min_size=1, max_size=4))
def test_twenty_thousand_mutations(originals: list[Original], which: int, mutations: list[Mutation]) -> None:
    survives(originals[which], mutations)
