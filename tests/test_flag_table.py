"""What an engine said of its flags, kept: found again as long as nothing that decides them has changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from app.engine.binary import find_engine
from app.engine.flag_table import FlagTable, fingerprint

FLAGS = (frozenset({"--ctx-size", "-c", "--metrics"}), frozenset({"--ctx-size", "-c"}))
OTHER = (frozenset({"--ctx-size", "--fit"}), frozenset({"--ctx-size"}))
VERSION = "0.7.0 (build 11669, commit abc)"


def program(path: Path, content: bytes = b"\x7fELF one") -> Path:
    path.write_bytes(content)
    return path


def wrapper(path: Path, *lines: str) -> Path:
    return program(path, "\n".join(["#!/bin/sh", *lines, ""]).encode())


def table(folder: Path) -> FlagTable:
    return FlagTable(folder / "cache" / "engine-flags.json")


def test_what_was_said_is_found_by_the_next_start(tmp_path: Path) -> None:
    engine = program(tmp_path / "llama-server")
    assert table(tmp_path).find([engine], VERSION) is None
    table(tmp_path).keep([engine], VERSION, FLAGS)
    assert table(tmp_path).find([engine], VERSION) == FLAGS
    assert table(tmp_path).find([engine], "0.8.0 (build 12000, commit abc)") is None
    assert table(tmp_path).find([program(tmp_path / "other")], VERSION) is None


def test_a_binary_that_was_replaced_is_asked_again_though_its_size_and_time_are_the_same(tmp_path: Path) -> None:
    engine = program(tmp_path / "llama-server")
    table(tmp_path).keep([engine], VERSION, FLAGS)
    before = engine.stat()
    program(tmp_path / "new", b"\x7fELF two").replace(engine)
    os.utime(engine, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (engine.stat().st_size, engine.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert table(tmp_path).find([engine], VERSION) is None


def test_a_binary_replaced_behind_its_wrapper_is_asked_again(tmp_path: Path) -> None:
    engine = program(tmp_path / "llama-server.real")
    inner = wrapper(tmp_path / "inner", f'exec {engine} "$@"')
    outer = wrapper(
        tmp_path / "llama-server",
        "# libraries of this engine only",
        f'export LD_LIBRARY_PATH=/one:/two VK_DRIVER_FILES="{tmp_path}/a b.json"',
        f'exec "{inner}" "$@"',
    )
    table(tmp_path).keep([outer], VERSION, FLAGS)
    assert table(tmp_path).find([outer], VERSION) == FLAGS
    program(tmp_path / "new").replace(engine)
    assert table(tmp_path).find([outer], VERSION) is None
    engine.unlink()
    assert table(tmp_path).find([outer], VERSION) is None


@pytest.mark.parametrize(
    "lines",
    [
        ['exec "$HOME/llama-server" "$@"'],
        ['exec llama-server.real "$@"'],
        ['cd "$(dirname "$0")"', 'exec /bin/true "$@"'],
        ["export A=`which llama-server`", 'exec /bin/true "$@"'],
        ["export A=b; PATH=/other", 'exec /bin/true "$@"'],
        [". /etc/engine.conf", 'exec /bin/true "$@"'],
        ['exec /bin/true --no-mmap "$@"'],
        ['/bin/true "$@"'],
        ["exit 0"],
        [],
    ],
)
def test_a_wrapper_that_may_execute_anything_is_asked_each_time(tmp_path: Path, lines: list[str]) -> None:
    engine = wrapper(tmp_path / "llama-server", *lines)
    assert fingerprint([engine]) is None
    table(tmp_path).keep([engine], VERSION, FLAGS)
    assert not (tmp_path / "cache").exists()
    assert table(tmp_path).find([engine], VERSION) is None


def test_wrappers_that_execute_each_other_are_no_program(tmp_path: Path) -> None:
    one = wrapper(tmp_path / "one", f'exec {tmp_path}/two "$@"')
    wrapper(tmp_path / "two", f'exec {one} "$@"')
    assert fingerprint([one]) is None
    assert fingerprint([program(tmp_path / "empty", b"")]) is not None
    assert fingerprint([tmp_path / "nowhere"]) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda _: "",
        lambda _: "[" * 100_000,
        lambda _: "\0" * 100,
        lambda _: "[1, 2]",
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace('"engines": {', '"engines": 7, "x": {'),
        lambda text: text.replace('"--metrics"', '{"a": 1}').replace('"--ctx-size"', '"rm"').replace('"-c"', "null"),
    ],
)
def test_a_damaged_file_counts_as_empty_and_is_replaced(tmp_path: Path, damage: object) -> None:
    engine = program(tmp_path / "llama-server")
    table(tmp_path).keep([engine], VERSION, FLAGS)
    file = tmp_path / "cache" / "engine-flags.json"
    assert callable(damage)
    file.write_text(damage(file.read_text()))
    assert table(tmp_path).find([engine], VERSION) is None
    table(tmp_path).keep([engine], VERSION, OTHER)
    assert table(tmp_path).find([engine], VERSION) == OTHER


def test_a_folder_that_cannot_be_written_costs_a_question(tmp_path: Path) -> None:
    engine = program(tmp_path / "llama-server")
    (tmp_path / "cache").write_text("a file, so that no folder can be made here, even by root")
    table(tmp_path).keep([engine], VERSION, FLAGS)
    assert table(tmp_path).find([engine], VERSION) is None


def test_no_more_than_sixteen_engines_and_no_scraps_are_kept(tmp_path: Path) -> None:
    engines = [program(tmp_path / f"engine-{number}") for number in range(18)]
    for engine in engines:
        table(tmp_path).keep([engine], VERSION, FLAGS)
    found = [table(tmp_path).find([engine], VERSION) for engine in engines]
    assert found == [None, None, *[FLAGS] * 16]
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["engine-flags.json"]


def test_an_engine_is_asked_once_for_its_flags_and_each_time_for_its_version(tmp_path: Path) -> None:
    asked = find_engine("embedded", flag_table=table(tmp_path))
    file = tmp_path / "cache" / "engine-flags.json"
    document = json.loads(file.read_text())
    (entry,) = document["engines"].values()
    entry["flags"].append("--made-up")
    file.write_text(json.dumps(document))
    known = find_engine("embedded", flag_table=table(tmp_path))
    assert known.flags == asked.flags | {"--made-up"}
    assert (known.version, known.valued_flags) == (asked.version, asked.valued_flags)
    entry["version"] = "an older one"
    file.write_text(json.dumps(document))
    assert find_engine("embedded", flag_table=table(tmp_path)).flags == asked.flags


def test_a_native_engine_behind_its_wrapper_is_known(tmp_path: Path, native_engine: Path | None) -> None:
    if native_engine is None or fingerprint([native_engine]) is None:
        pytest.skip("no native llama-server here, or one whose wrapper is not simple")
    asked = find_engine(str(native_engine), flag_table=table(tmp_path))
    assert table(tmp_path).find([native_engine], asked.version) == (asked.flags, asked.valued_flags)
    assert find_engine(str(native_engine), flag_table=table(tmp_path)) == asked
