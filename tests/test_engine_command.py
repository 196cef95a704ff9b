"""From a plan to an argument vector, for new and for old binaries."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from app.engine.binary import EngineBinary, find_engine
from app.engine.command import Endpoint, build_argv, child_environment
from app.engine.flags import FLAGS, check_extra_args
from app.engine.process import EngineProcess, LaunchSpec
from app.engine.report import MeasuredMemory
from app.errors import ConfigError, EngineUnusable
from app.gguf import ModelFacts, read_header
from app.hardware import Device, Machine, parse_device_list
from app.memory import HostLedger, KVType, MemoryLedger, Placement
from app.offload import Expected, OffloadPlan, Wish
from tests.checklist import lines
from tests.placements import BASE

GIB = 1 << 30
CPU_ONLY = replace(BASE, parallel=2, batch=512, ubatch=256, threads=3, cache_ram_mib=512, context_checkpoints=4)
GPU = Device("CUDA0", "a card", 8 * GIB, 7 * GIB)


@pytest.fixture(scope="module")
def facts(demo_model: Path) -> ModelFacts:
    return read_header(demo_model)


def binary(*, known: frozenset[str] | None = None, valued: frozenset[str] = frozenset()) -> EngineBinary:
    everything = frozenset(spelling for flag in FLAGS.values() for spelling in flag.spellings)
    flags = everything if known is None else known
    return EngineBinary(
        ("/usr/bin/llama-server",), "native", Path("/usr/bin/llama-server"), "0.7.0", 11669, flags, "", valued
    )


def plan_of(
    facts: ModelFacts,
    placement: Placement,
    *devices: Device,
    wish: Wish | None = None,
    mmproj: ModelFacts | None = None,
) -> OffloadPlan:
    return OffloadPlan(
        model=facts,
        machine=Machine(devices, 32 * GIB, 30 * GIB, 3),
        placement=placement,
        memory=MemoryLedger((), HostLedger()),
        expected=Expected(None, None, "none"),
        reasons=(),
        wish=wish or Wish(context=4096),
        mmproj=mmproj,
    )


def argv_of(plan: OffloadPlan, engine: EngineBinary | None = None, *extra: str) -> tuple[str, ...]:
    engine = engine or binary(valued=frozenset({"--flash-attn"}))
    return build_argv(
        plan,
        engine,
        alias="demo",
        endpoint=Endpoint(socket=Path("/run/x.sock")),
        key_file=Path("/run/key"),
        extra_args=extra,
    )


def value_of(argv: tuple[str, ...], flag: str) -> str:
    assert argv.count(flag) == 1, flag
    return argv[argv.index(flag) + 1]


def test_every_placement_flag_is_explicit(facts: ModelFacts) -> None:
    argv = argv_of(plan_of(facts, CPU_ONLY))
    assert argv[0] == "/usr/bin/llama-server"
    expected = {
        "--model": str(facts.path), "--alias": "demo", "--host": "/run/x.sock", "--api-key-file": "/run/key",
        "--fit": "off", "--device": "none", "--n-gpu-layers": "0", "--load-mode": "mmap", "--threads": "3",
        "--threads-batch": "3", "--ctx-size": "8192", "--parallel": "2", "--cache-type-k": "f16",
        "--cache-type-v": "f16", "--flash-attn": "on", "--batch-size": "512", "--ubatch-size": "256",
        "--cache-ram": "512", "--ctx-checkpoints": "4", "--cors-origins": "https://gateway.invalid",
        "--sse-ping-interval": "15", "--timeout": "3600", "--verbosity": "4",
    }  # fmt: skip
    assert {flag: value_of(argv, flag) for flag in expected} == expected
    assert {"--no-kv-unified", "--no-context-shift", "--metrics", "--no-ui"} <= set(argv)
    assert not {"--n-cpu-moe", "--tensor-split", "--mmproj", "--embedding", "--port", "--api-key"} & set(argv)


def test_devices_layers_and_experts(facts: ModelFacts) -> None:
    placement = replace(CPU_ONLY, gpu_layers=31, cpu_moe_layers=7, kv_cache_k=KVType.Q8_0, kv_cache_v=KVType.Q8_0)
    argv = argv_of(plan_of(facts, placement, GPU))
    assert value_of(argv, "--device") == "CUDA0"
    assert value_of(argv, "--n-gpu-layers") == "31"
    assert value_of(argv, "--n-cpu-moe") == "7"
    assert value_of(argv, "--cache-type-v") == "q8_0"
    assert "--split-mode" not in argv

    argv = argv_of(plan_of(facts, replace(placement, tensor_split=(3.0, 1.5)), GPU, replace(GPU, name="CUDA1")))
    assert value_of(argv, "--device") == "CUDA0,CUDA1"
    assert value_of(argv, "--tensor-split") == "3,1.5"
    assert value_of(argv, "--split-mode") == "layer"


def test_an_idle_device_is_not_touched(facts: ModelFacts) -> None:
    assert value_of(argv_of(plan_of(facts, CPU_ONLY, GPU)), "--device") == "none"
    projector = plan_of(facts, replace(CPU_ONLY, mmproj_on="CUDA0"), GPU, mmproj=facts)
    assert value_of(argv_of(projector), "--device") == "CUDA0"


def test_the_projector_goes_where_the_plan_says(facts: ModelFacts) -> None:
    argv = argv_of(plan_of(facts, replace(CPU_ONLY, mmproj_on="host"), mmproj=facts))
    assert value_of(argv, "--mmproj") == str(facts.path)
    assert "--no-mmproj-offload" in argv
    second = replace(GPU, name="CUDA1")
    placement = replace(CPU_ONLY, gpu_layers=31, mmproj_on="CUDA1", tensor_split=(1.0, 1.0))
    argv = argv_of(plan_of(facts, placement, GPU, second, mmproj=facts))
    assert value_of(argv, "--mmproj-device") == "CUDA1"
    assert "--no-mmproj-offload" not in argv


def test_embedding_models_and_ports(facts: ModelFacts) -> None:
    plan = plan_of(facts, CPU_ONLY, wish=Wish(context=512, embedding=True))
    argv = build_argv(plan, binary(), alias="e", endpoint=Endpoint(port=4321), key_file=Path("/run/key"))
    assert "--embedding" in argv
    assert (value_of(argv, "--host"), value_of(argv, "--port")) == ("127.0.0.1", "4321")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("mmap", set()), ("none", {"--no-mmap"}), ("mlock", {"--no-mmap", "--mlock"}), ("mmap+mlock", {"--mlock"})],
)
def test_an_older_binary_gets_the_older_words(facts: ModelFacts, mode: str, expected: set[str]) -> None:
    newer = {"--load-mode", "-lm", "--fit", "-fit", "--no-ui", "--sse-ping-interval", "--cors-origins", "-dev"}
    known = frozenset(spelling for flag in FLAGS.values() for spelling in flag.spellings) - newer
    old = binary(known=known, valued=frozenset())
    argv = argv_of(plan_of(facts, replace(CPU_ONLY, load_mode=mode)), old)
    assert not newer & set(argv)
    assert {"--no-mmap", "--mlock"} & set(argv) == expected
    assert "--no-webui" in argv
    # A bare switch then, whose absence means off.
    assert argv[argv.index("--flash-attn") + 1] != "on"
    argv = argv_of(plan_of(facts, replace(CPU_ONLY, flash_attention=False)), old)
    assert "--flash-attn" not in argv


def test_a_binary_without_a_flag_that_we_need_is_refused(facts: ModelFacts) -> None:
    known = binary().flags - {"--n-cpu-moe", "-ncmoe"}
    with pytest.raises(EngineUnusable, match="--n-cpu-moe"):
        argv_of(plan_of(facts, replace(CPU_ONLY, cpu_moe_layers=3)), binary(known=known))


@pytest.mark.parametrize("which", ["embedded", "native"])
def test_real_engines_know_every_flag_we_emit(facts: ModelFacts, which: str, request: pytest.FixtureRequest) -> None:
    native: Path | None = request.getfixturevalue("native_engine")
    if which == "native" and native is None:
        pytest.skip("no native llama-server here")
    engine = find_engine("embedded" if which == "embedded" else str(native))
    placement = replace(CPU_ONLY, gpu_layers=31, cpu_moe_layers=2, tensor_split=(1.0, 1.0), mmproj_on="host")
    argv = argv_of(plan_of(facts, placement, GPU, GPU, mmproj=facts), engine)
    flags = {argument for argument in argv[len(engine.command) :] if argument.startswith("-")}
    assert flags <= engine.flags
    for name in ("fit", "load_mode", "split_kv", "no_context_shift", "no_ui", "sse_ping", "cors_origins", "device"):
        assert set(FLAGS[name].spellings) & flags, name


async def test_real_engines_start_with_what_we_build(facts: ModelFacts, native_engine: Path | None) -> None:
    placement = replace(CPU_ONLY, context_per_request=256, cpu_moe_layers=2, kv_cache_k=KVType.Q8_0, cache_ram_mib=0)
    for setting in ("embedded", str(native_engine)) if native_engine else ("embedded",):
        measured = await measured_after_start(plan_of(facts, placement), find_engine(setting))
        assert (measured.slots, measured.context_per_slot) == (2, 256)
        assert measured.device_bytes() == {}


@pytest.mark.slow
async def test_a_real_device_holds_what_it_was_given(
    facts: ModelFacts, native_engine: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A Vulkan driver that computes on the CPU: slow, but its accounting is that of any device.
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    engine = find_engine(str(native_engine)) if native_engine else None
    devices = parse_device_list(engine.device_list()) if engine else ()
    if engine is None or not devices:
        pytest.skip("no llama-server with a device here")
    placement = replace(CPU_ONLY, context_per_request=512, parallel=1, gpu_layers=31)
    measured = await measured_after_start(plan_of(facts, placement, devices[0]), engine)
    assert (measured.layers_offloaded, measured.layers_total) == (31, 31)
    sizes = {(buffer.device, buffer.kind.value): buffer.size_bytes for buffer in measured.buffers}
    # 30 layers, K and V of 192 elements in f16, 512 cells.
    assert sizes[devices[0].name, "kv"] == 512 * 30 * 2 * 192 * 2
    assert sizes[devices[0].name, "model"] == pytest.approx(sum(t.size_bytes for t in facts.tensors), rel=0.001)


async def measured_after_start(plan: OffloadPlan, engine: EngineBinary) -> MeasuredMemory:
    with tempfile.TemporaryDirectory(prefix="lg-") as folder:
        endpoint = Endpoint(socket=Path(folder) / "e.sock")
        key_file = Path(folder) / "key"
        key_file.write_text("secret\n", encoding="ascii")
        argv = build_argv(plan, engine, alias="demo", endpoint=endpoint, key_file=key_file, extra_args=["--no-warmup"])
        process = EngineProcess(LaunchSpec("demo", argv, child_environment(os.environ), endpoint, "secret"))
        process.start()
        try:
            await process.wait_ready()
            return process.measured
        finally:
            await process.stop()


# --- extra_args ------------------------------------------------------------------------------------------------------


def test_extra_args_are_passed_on(facts: ModelFacts) -> None:
    engine = binary(known=binary().flags | {"--top-k", "--jinja", "--seed"})
    argv = argv_of(plan_of(facts, CPU_ONLY), engine, "--top-k", "40", "--jinja", "--seed", "-1")
    assert argv[-5:] == ("--top-k", "40", "--jinja", "--seed", "-1")
    with pytest.raises(ConfigError, match=r"--min-p, which this engine \(0\.7\.0\) does not know"):
        argv_of(plan_of(facts, CPU_ONLY), engine, "--min-p", "0.1")


@pytest.mark.parametrize(
    "flag",
    [
        "--host", "--port", "--api-key", "--api-key-file", "--models-dir", "--models-preset", "--path", "--media-path",
        "--tools", "--mcp-servers-config", "--mcp-servers-json", "--agent", "-ag", "--slot-save-path", "-m", "--model",
        "-hf", "--hf-repo", "--model-url", "--log-file", "--props", "--ssl-key-file", "--api_key", "--rpc", "--no-ui",
        "--ui-mcp-proxy", "-ot", "--override-tensor", "--swa-full", "--log-prompts-dir", "--cors-origins", "-c",
        "stray", "--top-k=4", "--lookup-cache-dynamic", "--video-ffmpeg-dir",
    ],
)  # fmt: skip
def test_dangerous_and_planned_flags_are_refused_by_name(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_extra_args(["--top-k", "40", flag, "value"])
    assert flag.partition("=")[0] in caught.value.message


def test_refusals_say_what_to_do_and_keep_secrets() -> None:
    with pytest.raises(ConfigError, match="use `context` of the model instead"):
        check_extra_args(["--ctx_size", "4096"])
    with pytest.raises(ConfigError, match="needs 1 value"):
        check_extra_args(["--top-k"])
    with pytest.raises(ConfigError) as caught:
        check_extra_args(["--api-key=sk-secret"])
    assert "sk-secret" not in caught.value.message
    # The value of a flag is its value, whatever it looks like: llama-server reads it so, too.
    assert check_extra_args(["--chat_template", "--host"]) == ("--chat-template", "--host")


# --- endpoint and environment ----------------------------------------------------------------------------------------


def test_an_endpoint_is_one_thing() -> None:
    assert Endpoint(port=1).base_url == "http://127.0.0.1:1"
    for socket, port in ((None, None), (Path("/x.sock"), 1), (Path("/x"), None)):
        with pytest.raises(ValueError, match=r"endpoint|\.sock"):
            Endpoint(socket=socket, port=port)


@lines(94)
def test_the_environment_of_a_child_is_scrubbed() -> None:
    ours = {
        "PATH": "/bin", "HOME": "/root", "GGML_VK_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1",
        "LLAMA_ARG_MODEL": "x", "LLAMA_API_KEY": "k", "LLAMA_SERVER_SLOTS_DEBUG": "1",
        "LLAMA_GATEWAY_SERVER__PORT": "1", "AIP_HTTP_PORT": "8", "NOTIFY_SOCKET": "/run/n",
    }  # fmt: skip
    assert child_environment(ours) == {
        "PATH": "/bin", "HOME": "/root", "GGML_VK_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1",
        "GGML_NO_BACKTRACE": "1",
    }  # fmt: skip
