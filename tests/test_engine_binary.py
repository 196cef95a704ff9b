"""Finding an engine, and every way in which a binary can be no engine."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from app.engine.binary import find_engine, parse_help
from app.engine.probe import run_probe
from app.errors import EngineUnusable
from app.hardware import parse_device_list

HELP = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
                                        (env: LLAMA_ARG_CTX_SIZE)
-fa,   --flash-attn [on|off|auto]       set Flash Attention use
-kvu,  --kv-unified, -no-kvu, --no-kv-unified
                                        use single unified KV buffer
--spec-draft-ngl, -ngld, --gpu-layers-draft, --n-gpu-layers-draft N
                                        --not-a-flag in a text
--draft, --draft-n, --draft-max N       the argument has been removed. use --spec-draft-n-max
--metrics                               enable prometheus compatible metrics endpoint
--fim-qwen-1.5b-default                 use default Qwen 2.5 Coder 1.5B
"""


def script(path: Path, body: str, *, mode: int = 0o755) -> Path:
    path.write_text("#!/bin/sh\n" + body, encoding="utf-8")
    path.chmod(mode)
    return path


def test_help_is_read_row_by_row() -> None:
    flags, valued = parse_help(HELP)
    assert flags == {
        "-h", "--help", "--usage", "-c", "--ctx-size", "-fa", "--flash-attn", "-kvu", "--kv-unified", "-no-kvu",
        "--no-kv-unified", "--spec-draft-ngl", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--metrics",
        "--fim-qwen-1.5b-default",
    }  # fmt: skip
    assert {"--ctx-size", "-fa", "--n-gpu-layers-draft"} <= valued
    assert not {"--metrics", "--no-kv-unified", "--usage"} & valued


def test_the_native_engine(native_engine: Path | None) -> None:
    if native_engine is None:
        pytest.skip("no native llama-server here")
    engine = find_engine(str(native_engine))
    assert (engine.kind, engine.path, engine.command) == ("native", native_engine, (str(native_engine),))
    assert engine.build is not None
    assert str(native_engine) in engine.because
    assert {"--ctx-size", "--no-kv-unified", "--api-key-file", "--fit", "--n-cpu-moe"} <= engine.flags
    assert "Available devices:" in engine.device_list()
    parse_device_list(engine.device_list())


def test_the_embedded_engine() -> None:
    engine = find_engine("embedded")
    assert engine.kind == "embedded"
    assert engine.command[0] == sys.executable
    assert engine.build is not None
    assert engine.build > 10_000
    assert {"--ctx-size", "--no-kv-unified", "--api-key-file", "--fit", "--n-cpu-moe"} <= engine.flags
    assert parse_device_list(engine.device_list()) == ()


def test_auto_takes_path_first_then_the_embedded_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native_engine: Path | None
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    engine = find_engine("auto")
    assert engine.kind == "embedded"
    assert "no llama-server on PATH" in engine.because
    if native_engine is not None:
        (tmp_path / "llama-server").symlink_to(native_engine)
        engine = find_engine("auto")
        assert (engine.kind, engine.path) == ("native", tmp_path / "llama-server")


def test_auto_falls_back_from_a_broken_binary_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    script(tmp_path / "llama-server", "kill -ILL $$\n")
    engine = find_engine("auto")
    assert engine.kind == "embedded"
    assert "built for another CPU" in engine.because
    # Without the embedded engine the same binary is an error.
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(EngineUnusable, match="built for another CPU"):
        find_engine("auto")


def test_no_engine_at_all_names_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(EngineUnusable, match=r"llama-gateway\[demo\]") as caught:
        find_engine("auto")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("kill -ILL $$\n", "built for another CPU"),
        ("exit 132\n", "built for another CPU"),
        ("kill -SEGV $$\n", "killed by SIGSEGV"),
        ("echo 'llama-server: error while loading shared libraries: libggml.so.0: cannot open shared object file: No "
         "such file or directory' >&2; exit 127\n", "libggml.so.0: cannot open shared object file"),
        ("echo 'no good' >&2; exit 3\n", r"exit code 3 \(no good\)"),
        ("exit 0\n", "is not a llama-server"),
        ("echo 'version: 1 (abc)' >&2\n", "lists no --ctx-size"),
    ],
)  # fmt: skip
def test_broken_programs_are_explained_in_one_sentence(tmp_path: Path, body: str, says: str) -> None:
    broken = script(tmp_path / "llama-server", body)
    with pytest.raises(EngineUnusable, match=says) as caught:
        find_engine(str(broken))
    assert str(broken) in caught.value.message
    assert "\n" not in caught.value.message
    assert str(tmp_path) not in caught.value.public


def test_a_real_program_without_its_library(tmp_path: Path) -> None:
    true = shutil.which("true")
    assert true is not None
    # A program of this machine that asks for a library which is not there: the message is the real loader's.
    needs = Path(true).read_bytes()
    if b"libc.so.6" not in needs:
        pytest.skip("the programs of this system are not linked with glibc")
    broken = tmp_path / "llama-server"
    broken.write_bytes(needs.replace(b"libc.so.6", b"libq.so.6"))
    broken.chmod(0o755)
    with pytest.raises(EngineUnusable, match=r"a library is missing \(.*libq\.so\.6"):
        find_engine(str(broken))


def test_files_that_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(EngineUnusable, match="no such file"):
        find_engine(str(tmp_path / "nowhere"))
    with pytest.raises(EngineUnusable, match="it is a folder"):
        find_engine(str(tmp_path))
    with pytest.raises(EngineUnusable, match=r"not executable; run chmod \+x"):
        find_engine(str(script(tmp_path / "plain", "exit 0\n", mode=0o644)))
    alien = tmp_path / "alien"
    alien.write_bytes(b"\x7fELF" + bytes(60))
    alien.chmod(0o755)
    with pytest.raises(EngineUnusable, match="not a program for this kind of machine"):
        find_engine(str(alien))
    orphan = tmp_path / "orphan"
    orphan.write_text("#!/no/such/interpreter\n", encoding="ascii")
    orphan.chmod(0o755)
    with pytest.raises(EngineUnusable, match="loader or interpreter that it names is missing"):
        find_engine(str(orphan))


def test_a_probe_is_bounded_in_time_and_output(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"]}
    hanging = script(tmp_path / "hanging", "sleep 100 & sleep 100\n")
    assert run_probe((str(hanging),), environment=environment, timeout_seconds=0.2).returncode is None
    talking = run_probe(("yes",), environment=environment, timeout_seconds=0.3)
    assert talking.returncode is None
    assert len(talking.stdout) <= 1 << 20
    # The end of the process counts, although its child keeps the pipe open.
    leaving = script(tmp_path / "leaving", "sleep 100 &\necho done\n")
    result = run_probe((str(leaving),), environment=environment, timeout_seconds=20)
    assert (result.returncode, result.stdout) == (0, "done\n")
