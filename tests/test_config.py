"""Settings: what the example promises, what is refused and how it is said."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from app.config import (
    Defaults,
    EngineConfig,
    KeyConfig,
    MemoryConfig,
    ModelCatalog,
    ModelEntry,
    RemoteServer,
    ServerConfig,
    Settings,
    load_settings,
)
from app.config.remote import OF_A_REMOTE, OF_OUR_ENGINES
from app.engine.flags import check_extra_args
from app.errors import ConfigError, ModelNotFound
from tests.written_config import Write, refusal_of

EXAMPLE = Path(__file__).parent.parent / "config.example.yaml"
HASH = "sha256:" + "0" * 64

# The example


def _example_tree() -> dict[str, Any]:
    tree = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    assert isinstance(tree, dict)
    return tree


@pytest.mark.parametrize(
    ("section", "pick"),
    [
        (Settings, lambda tree: tree),
        (ServerConfig, lambda tree: tree["server"]),
        (EngineConfig, lambda tree: tree["engine"]),
        (MemoryConfig, lambda tree: tree["memory"]),
        (Defaults, lambda tree: tree["defaults"]),
        (ModelEntry, lambda tree: {key for model in tree["models"].values() for key in model}),
        (KeyConfig, lambda tree: tree["keys"][0]),
    ],
)
def test_the_example_holds_every_key(section: type[BaseModel], pick: Callable[[dict[str, Any]], Any]) -> None:
    assert set(pick(_example_tree())) == set(section.model_fields)


def test_every_line_of_the_example_is_commented() -> None:
    keys = [line for line in EXAMPLE.read_text().splitlines() if ":" in line and not line.lstrip().startswith("#")]
    bare = [line for line in keys if "#" not in line and not line.rstrip().endswith(":")]
    assert [line for line in bare if not line.lstrip().startswith(("host", "port"))] == []


def test_the_example_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOTE_KEY", "secret")
    file = shutil.copy(EXAMPLE, tmp_path / "config.yaml")
    (tmp_path / "models").mkdir()
    model = tmp_path / _example_tree()["models"]["smollm2"]["path"]
    model.touch()
    loaded = load_settings(Path(file))
    assert loaded.models["smollm2"].path == model
    assert loaded.state_dir == tmp_path / "state"
    assert loaded.server.max_body == 16 << 20


def test_the_example_shows_the_defaults(tmp_path: Path) -> None:
    shown, silent = _example_tree(), Settings()
    assert ServerConfig(**shown["server"]) == silent.server
    assert EngineConfig(**shown["engine"]) == silent.engine
    assert MemoryConfig(**shown["memory"]) == silent.memory
    assert Defaults(**shown["defaults"]) == silent.defaults


# Limits of keys

_LIMITS = ("requests_per_minute", "tokens_per_minute", "requests_per_day", "tokens_per_day", "gpu_seconds_per_day")


@pytest.mark.parametrize("limit", [*_LIMITS, "concurrent"])
def test_a_limit_is_a_whole_number_from_nothing_on(write: Write, limit: str) -> None:
    text = f'keys:\n  - name: a\n    hash: "sha256:{"0" * 64}"\n    {limit}: '
    for value in ("-1", "1.5", "true", ".nan", str(1 << 60), "many"):
        file = write(text + value)
        assert f"{file}:4: keys[0].{limit}: " in refusal_of(file), value
    for number in (0, 1, (1 << 32) + 2):
        assert getattr(load_settings(write(text + str(number))).keys[0], limit) == number


# Models elsewhere


def test_a_remote_model(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "secret")
    file = write("models:\n  m: {url: 'https://x.example/v1/', key_env: KEY_OF_TEST, context: 512, remote_model: big}")
    model = ModelCatalog(load_settings(file)).resolve("m")
    assert model.remote == RemoteServer("https://x.example/v1", "KEY_OF_TEST", "big", None)
    assert (model.path, model.context) == (None, 512)


_MISPLACED = {
    "pin": ("models:\n  m:\n    url: http://x/v1\n    pin: true", 4, "models with a path"),
    "offload": ("models:\n  m:\n    url: http://x/v1\n    offload: {gpu_layers: 1}", 4, "models with a path"),
    "remote_model": ("models:\n  m:\n    path: a.gguf\n    remote_model: b", 4, "models with a url"),
    "key_env": (
        "models:\n  m:\n    url: http://x/v1\n    key_env: NOT_SET_ANYWHERE",
        4,
        "no variable NOT_SET_ANYWHERE",
    ),
    "tokenizer": ("models:\n  m:\n    url: http://x/v1\n    tokenizer: gone.gguf", 4, "there is no file"),
}


def test_of_every_key_it_is_known_what_models_it_is_for() -> None:
    """A new key is for all, or named among those of our engines, or among those of other servers."""
    both = {"path", "url", "aliases", "context", "parallel", "max_tokens", "max_tokens_ceiling", "on_overflow"}
    both |= {"max_queue", "kind", "round_prompt_times"}
    assert both | {*OF_OUR_ENGINES, *OF_A_REMOTE} == set(ModelEntry.model_fields)


@pytest.mark.parametrize("key", _MISPLACED)
def test_what_does_not_belong_to_a_model(write: Write, key: str) -> None:
    text, line, problem = _MISPLACED[key]
    file = write(text)
    said = refusal_of(file)
    assert f"{file}:{line}: models.m.{key}: " in said
    assert problem in said


# Misspelt keys

_MISSPELT = {
    "top": ("sever: {port: 1}", 1, "sever", "server"),
    "server": ("server:\n  prot: 1", 2, "server.prot", "port"),
    "engine": ("engine:\n  binarry: auto", 2, "engine.binarry", "binary"),
    "memory": ("memory:\n  vram_reserved: 1GiB", 2, "memory.vram_reserved", "vram_reserve"),
    "defaults": ("defaults:\n  max_token: 1", 2, "defaults.max_token", "max_tokens"),
    "model": ("models:\n  m:\n    path: a.gguf\n    contxt: 1", 4, "models.m.contxt", "context"),
    "offload": (
        "models:\n  m:\n    path: a.gguf\n    offload:\n      gpu_layer: 1",
        5,
        "models.m.offload.gpu_layer",
        "gpu_layers",
    ),
    "key": (f"keys:\n  - name: a\n    hash: {HASH}\n    model: []", 4, "keys[0].model", "models"),
}


@pytest.mark.parametrize(("text", "line", "key", "meant"), _MISSPELT.values(), ids=_MISSPELT)
def test_a_misspelt_key_is_named_with_its_place_and_the_one_meant(
    write: Write, text: str, line: int, key: str, meant: str
) -> None:
    file = write(text)
    assert f"{file}:{line}: {key}: this key is unknown; did you mean {meant!r}?" in refusal_of(file)


def test_a_key_like_no_other_gets_the_list(write: Write) -> None:
    refusal = refusal_of(write("memory: {zzzz: 1}"))
    assert "known here: vram_reserve, ram_reserve, ram_limit" in refusal


@pytest.mark.parametrize("key", ["_env_file", "_cli_parse_args", "_secrets_dir", "__pydantic_self__", "model_config"])
def test_names_of_the_machinery_are_unknown_keys_too(write: Write, key: str) -> None:
    assert key in refusal_of(write(f"{key}: x\n"))


def test_all_problems_are_told_at_once(write: Write) -> None:
    refusal = refusal_of(write("server: {prot: 1}\nmemory: {ram: 1}\n"))
    assert len(refusal.splitlines()) == 2


# Values

_WRONG = {
    "text for a number": ("server: {port: many}", "server.port"),
    "port over": ("server: {port: 65536}", "server.port"),
    "port under": ("server: {port: -1}", "server.port"),
    "truth for a number": ("server: {port: yes}", "server.port"),
    "list for text": ("server: {host: []}", "server.host"),
    "number for text": ("server: {host: 1}", "server.host"),
    "text for a section": ("server: here", "server"),
    "nothing for a section": ("server:", "server"),
    "drain for ever": ("server: {drain_seconds: .inf}", "server.drain_seconds"),
    "drain for NaN": ("server: {drain_seconds: .nan}", "server.drain_seconds"),
    "negative size": ("server: {max_body: -5}", "server.max_body"),
    "negative size with unit": ("memory: {ram_reserve: -1GiB}", "memory.ram_reserve"),
    "unknown unit": ("memory: {ram_reserve: 2 potatoes}", "memory.ram_reserve"),
    "endless size": ("memory: {ram_reserve: .inf}", "memory.ram_reserve"),
    "size over 64 bits": ("memory: {vram_reserve: 99999999EiB}", "memory.vram_reserve"),
    "no tokens": ("defaults: {context: 0}", "defaults.context"),
    "half a slot": ("defaults: {parallel: 1.5}", "defaults.parallel"),
    "too many slots": ("defaults: {parallel: 65}", "defaults.parallel"),
    "unknown word": ("defaults: {on_overflow: truncate}", "defaults.on_overflow"),
    "negative queue": ("defaults: {max_queue: -1}", "defaults.max_queue"),
    "empty engine": ("engine: {binary: ''}", "engine.binary"),
    "models as a list": ("models: [a]", "models"),
    "model from nowhere": ("models: {m: {}}", "models.m"),
    "model from two places": ("models: {m: {path: a.gguf, url: 'http://x/v1'}}", "models.m"),
    "no address": ("models: {m: {url: 10.0.0.7:8080}}", "models.m.url"),
    "no host": ("models: {m: {url: 'http:///v1'}}", "models.m.url"),
    "impossible port": ("models: {m: {url: 'http://x:99999/v1'}}", "models.m.url"),
    "key in an address": ("models: {m: {url: 'http://me:secret@x/v1'}}", "models.m.url"),
    "query in an address": ("models: {m: {url: 'http://x/v1?key=secret'}}", "models.m.url"),
    "key instead of its variable": ("models: {m: {url: 'http://x/v1', key_env: sk-12345}}", "models.m.key_env"),
    "aliases as text": ("models: {m: {path: a.gguf, aliases: local}}", "models.m.aliases"),
    "unknown cache": ("models: {m: {path: a.gguf, kv_cache: q9}}", "models.m.kv_cache"),
    "unknown offload": ("models: {m: {path: a.gguf, offload: full}}", "models.m.offload"),
    "empty offload": ("models: {m: {path: a.gguf, offload: {}}}", "models.m.offload"),
    "negative layers": ("models: {m: {path: a.gguf, offload: {gpu_layers: -1}}}", "models.m.offload.gpu_layers"),
    "key without hash": ("keys: [{name: a}]", "keys[0].hash"),
    "short hash": ("keys: [{name: a, hash: 'sha256:00'}]", "keys[0]"),
    "plain key": ("keys: [{name: a, hash: lg-secret}]", "keys[0]"),
    "no time": ("server: {load_wait: soon}", "server.load_wait"),
    "negative time": ("memory: {min_residency: -1s}", "memory.min_residency"),
    "never": ("memory: {max_swap_wait: never}", "memory.max_swap_wait"),
    "idle for no time": ("models: {m: {path: a.gguf, idle_unload: 0}}", "models.m.idle_unload"),
    "name with spaces": (f"keys: [{{name: a b, hash: '{HASH}'}}]", "keys[0].name"),
}


@pytest.mark.parametrize(("text", "key"), _WRONG.values(), ids=_WRONG)
def test_a_wrong_value_is_refused_with_its_place(write: Write, text: str, key: str) -> None:
    file = write(text)
    assert f"{file}:1: {key}: " in refusal_of(file)


@pytest.mark.parametrize(
    ("written", "size_bytes"), [("16MiB", 16 << 20), ("1.5GiB", 3 << 29), ("2 GB", 2 * 10**9), ("4096", 4096)]
)
def test_sizes_have_units(write: Write, written: str, size_bytes: int) -> None:
    assert load_settings(write(f"memory: {{ram_reserve: {written}}}")).memory.ram_reserve == size_bytes


def test_offload_is_automatic_or_exactly_as_given(write: Write) -> None:
    text = "models:\n  auto: {path: a.gguf, offload: auto}\n  hand: {path: b.gguf, offload: {cpu_moe_layers: 0}}\n"
    models = ModelCatalog(load_settings(write(text)))
    automatic, by_hand = models.resolve("auto"), models.resolve("hand")
    assert (automatic.gpu_layers, automatic.cpu_moe_layers) == (None, None)
    assert (by_hand.gpu_layers, by_hand.cpu_moe_layers) == (None, 0)


def test_a_model_uses_the_defaults_it_does_not_override(write: Write) -> None:
    text = """
defaults: {context: 100, parallel: 3, max_tokens: 7, on_overflow: clamp, max_queue: 5}
models: {a: {path: a.gguf}, b: {path: b.gguf, context: 200, parallel: 1, max_tokens: 9, on_overflow: reject,
  max_queue: 0}}
"""
    a, b = ModelCatalog(load_settings(write(text)))
    assert (a.context, a.default_context, a.parallel, a.max_tokens, a.on_overflow, a.max_queue) == (
        *(None, 100, 3, 7, "clamp"),
        5,
    )
    assert (b.context, b.parallel, b.max_tokens, b.on_overflow, b.max_queue) == (200, 1, 9, "reject", 0)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback(host: str, is_loopback: bool) -> None:
    assert ServerConfig(host=host).is_loopback is is_loopback


def test_settings_are_frozen(write: Write) -> None:
    loaded = load_settings(write("models: {m: {path: a.gguf}}"))
    with pytest.raises(ValidationError, match="frozen"):
        loaded.server = ServerConfig()
    for section, field in [(loaded.server, "port"), (loaded.defaults, "context"), (loaded.models["m"], "context")]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, field, 1)


@pytest.mark.parametrize(
    ("written", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400), ("500ms", 0.5)]
)
def test_times_have_units(write: Write, written: str, seconds: float) -> None:
    text = f"server: {{load_wait: {written}}}\nmodels: {{m: {{path: a.gguf, idle_unload: {written}}}}}"
    loaded = load_settings(write(text))
    assert loaded.server.load_wait == seconds
    assert next(iter(ModelCatalog(loaded))).idle_unload_seconds == seconds


def test_a_model_is_unloaded_when_idle_as_the_defaults_say_or_never(write: Write) -> None:
    text = "defaults: {idle_unload: 5m}\nmodels: {a: {path: a.gguf}, b: {path: b.gguf, idle_unload: never}}"
    a, b = ModelCatalog(load_settings(write(text)))
    assert (a.idle_unload_seconds, b.idle_unload_seconds) == (300, None)


def test_a_default_model_may_be_named_by_its_alias(write: Write) -> None:
    text = "models: {m: {path: a.gguf, aliases: [x]}}\ndefault_model: x\n"
    assert ModelCatalog(load_settings(write(text))).default_model == "m"
    file = write("models: {m: {path: a.gguf}}\ndefault_model: y\n")
    assert f"{file}:2: default_model: there is no model 'y'" in refusal_of(file)


def test_a_flag_that_is_not_allowed_has_its_place(write: Write) -> None:
    file = write('models:\n  m:\n    path: a.gguf\n    extra_args: ["--host", "::"]\n')
    with pytest.raises(ConfigError) as refused:
        load_settings(file, check_flags=check_extra_args)
    assert str(refused.value).startswith(f"{file}:4: models.m.extra_args: ")
    assert "--host" in str(refused.value)


@pytest.mark.parametrize("folder", ["a.gguf/state", "n" * 300 + "/state"])
def test_a_state_folder_that_cannot_be_written(write: Write, folder: str) -> None:
    file = write(f"models: {{m: {{path: a.gguf}}}}\nstate_dir: {folder}\n")
    assert f"{file}:2: state_dir: " in refusal_of(file)


# Names


def test_two_models_with_one_alias(write: Write) -> None:
    text = "models:\n  a: {path: a.gguf, aliases: [x]}\n  b:\n    path: b.gguf\n    aliases: [x]\n"
    assert "config.yaml:5: models.b.aliases: the alias 'x' already names 'a'" in refusal_of(write(text))


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_an_alias_that_is_another_models_name(write: Write, order: tuple[str, str]) -> None:
    entries = {"a": "{path: a.gguf, aliases: [b]}", "b": "{path: b.gguf}"}
    text = "models:\n" + "".join(f"  {name}: {entries[name]}\n" for name in order)
    assert "models.a.aliases: the alias 'b' already names 'b'" in refusal_of(write(text))


def test_a_key_for_an_unknown_model(write: Write) -> None:
    text = f"models: {{m: {{path: a.gguf}}}}\nkeys:\n  - name: eve\n    hash: {HASH}\n    models: [m, other]\n"
    refusal = refusal_of(write(text))
    assert "config.yaml:5: keys[0].models: the key 'eve' names the model 'other'" in refusal


def test_a_key_name_given_twice(write: Write) -> None:
    text = f"keys:\n  - {{name: a, hash: '{HASH}'}}\n  - {{name: a, hash: '{HASH}'}}\n"
    assert "config.yaml:3: keys[1].name: the key name 'a' is given twice" in refusal_of(write(text))


def test_names_and_aliases_resolve(write: Write) -> None:
    catalog = ModelCatalog(load_settings(write("models: {m: {path: a.gguf, aliases: [x, y/z]}}")))
    assert [catalog.resolve(name).id for name in ("m", "x", "y/z")] == ["m", "m", "m"]
    with pytest.raises(ModelNotFound, match="this gateway has: m") as unknown:
        catalog.resolve("gpt-9" + "!" * 10_000)
    assert unknown.value.param == "model"
    assert len(unknown.value.message) < 400


# Files and paths


@pytest.mark.parametrize("path", ["missing.gguf", "~nobody-has-this-name/m.gguf", "n" * 5000 + ".gguf"])
def test_a_missing_model_file(write: Write, path: str) -> None:
    file = write(f"models:\n  m:\n    path: {path}\n")
    assert f"{file}:3: models.m.path: " in refusal_of(file)


def test_relative_paths_start_at_the_folder_of_the_file(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write("models: {m: {path: ./a.gguf}}\nengine: {binary: bin/llama-server}\nstate_dir: here\n")
    monkeypatch.chdir("/")
    loaded = load_settings(file)
    assert loaded.models["m"].path == tmp_path / "a.gguf"
    assert loaded.engine.binary == str(tmp_path / "bin" / "llama-server")
    assert loaded.state_dir == tmp_path / "here"


def test_absolute_paths_and_words_stay(write: Write, tmp_path: Path) -> None:
    loaded = load_settings(write(f"models: {{m: {{path: {tmp_path}/a.gguf}}}}\nengine: {{binary: embedded}}\n"))
    assert loaded.models["m"].path == tmp_path / "a.gguf"
    assert loaded.engine.binary == "embedded"


def test_a_model_alone_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    model = tmp_path / "Tiny-Q4_1.gguf"
    model.touch()
    loaded = load_settings(model=model)
    assert list(loaded.models) == ["Tiny-Q4_1"]
    assert loaded.state_dir == tmp_path / "state" / "llama-gateway"


def test_a_model_joins_those_of_the_file(write: Write, tmp_path: Path) -> None:
    loaded = load_settings(write("models: {m: {path: a.gguf}}"), model=tmp_path / "b.gguf")
    assert list(loaded.models) == ["m", "b"]


def test_a_missing_model_alone_names_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the command line: models\.x\.path: there is no file"):
        load_settings(model=tmp_path / "x.gguf")


def test_a_projector_is_looked_for_beside_the_configuration(write: Write, tmp_path: Path) -> None:
    loaded = load_settings(write("models: {m: {path: a.gguf, mmproj: b.gguf}}"))
    assert loaded.models["m"].mmproj == tmp_path / "b.gguf"
    assert next(iter(ModelCatalog(loaded))).mmproj == tmp_path / "b.gguf"
    assert "models.m.mmproj: there is no file" in refusal_of(write("models: {m: {path: a.gguf, mmproj: c}}"))


def test_the_address_of_the_command_line_wins() -> None:
    loaded = Settings().listening_on(host=None, port=9)
    assert (loaded.server.host, loaded.server.port) == ("127.0.0.1", 9)


# The environment


def test_the_environment_wins_over_the_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_GATEWAY_SERVER__PORT", "9000")
    monkeypatch.setenv("LLAMA_GATEWAY_MODELS__M__CONTEXT", "77")
    loaded = load_settings(write("server: {port: 1, host: '::1'}\nmodels: {m: {path: a.gguf}}\n"))
    assert (loaded.server.port, loaded.server.host) == (9000, "::1")
    assert loaded.models["m"].context == 77


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LLAMA_GATEWAY_SERVER__PORT", "many"),
        ("LLAMA_GATEWAY_SERVER__PROT", "1"),
        ("LLAMA_GATEWAY_SERVER", "not json"),
        ("LLAMA_GATEWAY_KEYS", "[{"),
    ],
)
def test_a_wrong_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"(?i)server|keys"):
        load_settings()
