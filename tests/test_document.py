"""The file of settings as a file: whatever stands in it, the answer names it."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import ServerConfig, load_settings
from app.errors import ConfigError
from tests.written_config import Write, refusal_of

EXAMPLE = Path(__file__).parent.parent / "config.example.yaml"

_NOT_YAML = {
    "tab": ("server:\n\tport: 1\n", ":2: "),
    "open bracket": ("models: [\n", ":2: "),
    "two values": ("a: b: c\n", ":1: "),
    "two documents": ("server: {}\n---\nserver: {}\n", ":2: "),
    "unknown tag": ("server: !!python/object:os.system x\n", ":1: "),
    "impossible date": ("state_dir: 2024-13-45\n", ""),
    "half a number": ("server: {port: 0x_}\n", ""),
    "endless number": ("server: {port: " + "9" * 5000 + "}\n", ""),
    "no text": ("server: \x01\n", ""),
    "deep": ("models: " + "[" * 50_000 + "\n", ""),
    "itself": ("models: &a {x: *a}\n", ""),
}


@pytest.mark.parametrize(("text", "place"), _NOT_YAML.values(), ids=_NOT_YAML)
def test_what_is_not_yaml_names_the_file_and_the_line(write: Write, text: str, place: str) -> None:
    file = write(text)
    assert f"{file}{place}" in refusal_of(file)


@pytest.mark.parametrize("path", [r"C:\models\m.gguf", r"C:\Users\me\m.gguf", r"D:\x\m.gguf"])
def test_a_windows_path_in_double_quotes_gets_the_cure(write: Write, path: str) -> None:
    assert "write Windows paths in single quotes" in refusal_of(write(f'models: {{m: {{path: "{path}"}}}}\n'))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("server: {}\nserver: {}\n", ":2: server"),
        ("server:\n  port: 1\n  port: 2\n", ":3: server.port"),
        ("models:\n  m: {path: a.gguf}\n  m: {path: b.gguf}\n", ":3: models.m"),
        ("keys:\n  - {name: a, name: b}\n", ":2: keys[0].name"),
    ],
)
def test_a_key_given_twice(write: Write, text: str, place: str) -> None:
    file = write(text)
    assert f"{file}{place}: this key is given twice." in refusal_of(file)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "\ufeff"])
def test_an_empty_file_is_all_defaults(write: Write, text: str) -> None:
    assert load_settings(write(text)).server == ServerConfig()


@pytest.mark.parametrize("text", ["- a\n", "word\n", "7\n"])
def test_something_else_than_a_mapping(write: Write, text: str) -> None:
    assert "must be a mapping of sections" in refusal_of(write(text))


def test_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes("server: {host: möhre}".encode("latin-1"))
    assert "is not UTF-8" in refusal_of(file)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "cannot be read (No such file" in refusal_of(tmp_path / "absent.yaml")
    assert "cannot be read (Is a directory" in refusal_of(tmp_path)


# References to the environment


def test_a_reference_is_replaced(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_FOLDER", "sub")
    monkeypatch.setenv("TEST_PORT", "9001")
    loaded = load_settings(write("state_dir: '${env:TEST_FOLDER}/x'\nserver: {port: '${env:TEST_PORT}'}\n"))
    assert loaded.state_dir.parts[-2:] == ("sub", "x")
    assert loaded.server.port == 9001


def test_a_missing_reference_names_its_place(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_ABSENT", raising=False)
    file = write("server:\n  host: ${env:TEST_ABSENT}\n")
    assert f"{file}:2: server.host: the environment has no variable TEST_ABSENT; set it" in refusal_of(file)


# Anything at all

_LINES = EXAMPLE.read_text(encoding="utf-8").splitlines()
_VALUES = (
    *("yes", "0x_", "2024-02-30", "9" * 5000, ".inf", "-1", "1e999", "''", "~", "*a", "&a [*a]", "{", "[", "]", "'"),
    *('"\\Users"', "!!set {a}", "!!binary x", "${env:ABSENT}", "~nobody/x", "{a: b}", "[{}]", "\t", "|", "<<: 1"),
)
_KEYS = ("", "  ", "server", "_env_file", "~", "? [a]", "1", "<<", "'", "- a", "context", "    offload")


def _mutated(changes: list[tuple[int, str, str]]) -> str:
    """The example with values, keys or whole lines of it replaced."""
    lines = list(_LINES)
    for index, what, content in changes:
        key, _, value = lines[index].partition(":")
        lines[index] = {"value": f"{key}: {content}", "key": f"{content}:{value}", "line": content}[what]
    return "\n".join(lines)


_KEY_LINES = [index for index, line in enumerate(_LINES) if ":" in line.partition("#")[0]]
_WHERE = st.sampled_from(_KEY_LINES)
_CONTENT = st.text("ab:-[]{}&*!|>'\"#%@,?<=~ \t\n0189._x\u00df\x00", max_size=6)
_CHANGE = st.one_of(
    st.tuples(_WHERE, st.just("value"), st.sampled_from(_VALUES)),
    st.tuples(_WHERE, st.just("value"), _CONTENT),
    st.tuples(_WHERE, st.just("key"), st.sampled_from(_KEYS) | _CONTENT),
    st.tuples(_WHERE, st.just("line"), st.sampled_from(_LINES) | _CONTENT),
)


@given(st.lists(_CHANGE, min_size=1, max_size=2))
@hypothesis.settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
def test_any_text_loads_or_is_refused_by_name(tmp_path: Path, changes: list[tuple[int, str, str]]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(_mutated(changes), encoding="utf-8", errors="replace")
    (tmp_path / "models").mkdir(exist_ok=True)
    (tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    message = str(file)
    try:
        load_settings(file)
    except ConfigError as refusal:
        message = refusal.message
    assert str(file) in message
