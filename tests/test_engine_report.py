"""What log lines mean: memory measured, causes of death."""

from __future__ import annotations

import pytest

from app.engine.report import BufferKind, Cause, EngineExit, MemoryReport, cause_of_death
from app.engine.state import State

MIB = 1 << 20

NATIVE = """\
0.00.141.675 I load_tensors: loading model tensors, this can take a while... (load_mode = mmap)
0.00.141.700 I load_tensors: offloaded 31/31 layers to GPU
0.00.210.558 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB
0.00.210.559 I load_tensors:      Vulkan0 model buffer size =    76.50 MiB
0.00.211.782 I llama_context: constructing llama_context
0.00.211.831 I llama_context: Vulkan_Host  output buffer size =     0.19 MiB
0.00.211.900 I llama_kv_cache_iswa: creating non-SWA KV cache, size = 512 cells
0.00.211.917 I llama_kv_cache:    Vulkan0 KV buffer size =    11.25 MiB
0.00.211.920 I llama_kv_cache_iswa: creating     SWA KV cache, size = 256 cells
0.00.211.921 I llama_kv_cache:    Vulkan0 KV buffer size =     4.00 MiB
0.00.211.930 I llama_memory_recurrent:    Vulkan0 RS buffer size =    62.81 MiB
0.00.251.678 I sched_reserve:    Vulkan0 compute buffer size =    99.00 MiB
0.00.251.679 I sched_reserve: Vulkan_Host compute buffer size =     2.50 MiB
0.00.261.678 I sched_reserve:    Vulkan0 compute buffer size =    15.14 MiB
0.00.321.458 I srv    load_model: initializing, n_slots = 2, n_ctx_slot = 512, kv_unified = 'false'
"""


def test_buffers_are_summed_by_device_and_kind() -> None:
    report = MemoryReport()
    report.feed(NATIVE.splitlines())
    measured = report.measured()
    sizes = {(buffer.device, buffer.kind): buffer.size_bytes for buffer in measured.buffers}
    assert sizes["Vulkan0", BufferKind.MODEL] == round(76.5 * MIB)
    # Two caches, with and without a sliding window, are both there.
    assert sizes["Vulkan0", BufferKind.KV] == round(15.25 * MIB)
    # A graph that is planned again replaces the first plan.
    assert sizes["Vulkan0", BufferKind.COMPUTE] == round(15.14 * MIB)
    assert measured.device_bytes() == {"Vulkan0": sum(round(x * MIB) for x in (76.5, 11.25, 4, 62.81, 15.14))}
    assert measured.host_bytes() == sum(round(x * MIB) for x in (92.10, 0.19, 2.5))
    assert (measured.layers_offloaded, measured.layers_total) == (31, 31)
    assert (measured.slots, measured.context_per_slot) == (2, 512)


def test_a_second_context_adds_up_and_trials_of_fit_do_not_count() -> None:
    report = MemoryReport()
    trial = "sched_reserve: CUDA0 compute buffer size = 700.00 MiB"
    report.feed([trial, "common_fit_params: fitting params to free memory took 0.16 seconds"])
    assert report.measured().buffers == ()
    for size in ("10.00", "5.00"):
        report.feed(["llama_context: constructing llama_context"])
        report.feed([f"sched_reserve:      CUDA0 compute buffer size =    {size} MiB"])
    assert report.measured().device_bytes() == {"CUDA0": 15 * MIB}


PROJECTOR = """\
0.30.537.062 I clip_ctx: CLIP using Vulkan0 backend
0.30.537.572 I load_hparams: model size:         2.84 MiB
0.30.543.220 I reserve_compute_meta:    Vulkan0 compute buffer size =     1.53 MiB
0.30.543.221 I reserve_compute_meta:        CPU compute buffer size =     0.57 MiB
0.30.543.236 I reserve_compute_meta:    Vulkan0 compute buffer size =     2.00 MiB
"""


def test_a_projector_is_a_part_of_its_own() -> None:
    report = MemoryReport()
    report.feed((NATIVE + PROJECTOR).splitlines())
    sizes = {(buffer.device, buffer.kind): buffer.size_bytes for buffer in report.measured().buffers}
    assert sizes["Vulkan0", BufferKind.COMPUTE] == round(15.14 * MIB)
    assert sizes["Vulkan0", BufferKind.MMPROJ] == round(2.84 * MIB) + 2 * MIB
    assert sizes["CPU", BufferKind.MMPROJ] == round(0.57 * MIB)


def test_older_builds_have_no_prefix() -> None:
    report = MemoryReport()
    report.feed(["llama_context:      CUDA0 compute buffer size =   298.50 MiB"])
    assert report.measured().device_bytes() == {"CUDA0": round(298.5 * MIB)}


@pytest.mark.parametrize(
    ("cause", "returncode", "phase", "line"),
    [
        (Cause.WRONG_CPU, -4, State.STARTING, ""),
        (Cause.WRONG_CPU, 132, State.READY, ""),
        (Cause.CRASH, -11, State.READY, ""),
        (Cause.CRASH, 134, State.STARTING, "GGML_ASSERT(x) failed"),
        (Cause.MISSING_LIBRARY, 127, State.STARTING, "x: error while loading shared libraries: libggml.so.0: cannot"),
        (Cause.BAD_FLAG, 1, State.STARTING, "error: invalid argument: --no-mmap"),
        (Cause.DEVICE_GONE, 1, State.STARTING, 'error while handling argument "--device": invalid device: CUDA0'),
        (Cause.BAD_FLAG, 1, State.STARTING, 'error while handling argument "-c": stoi'),
        (Cause.ADDRESS_IN_USE, 1, State.STARTING, "0.1 E srv start: couldn't bind HTTP server socket, hostname: x"),
        (Cause.BAD_FILE, 1, State.STARTING, "0.0 E gguf_init_from_file: failed to open GGUF file 'x'"),
        (Cause.OUT_OF_DEVICE_MEMORY, 1, State.STARTING, "ggml_backend_cuda_buffer_type_alloc_buffer: allocating "
         "7000.00 MiB on device 0: cudaMalloc failed: out of memory"),
        (Cause.OUT_OF_DEVICE_MEMORY, 1, State.STARTING, "E graph_reserve: failed to allocate compute buffers"),
        (Cause.OUT_OF_DEVICE_MEMORY, 134, State.READY, "CUDA error: out of memory"),
        (Cause.KILLED_FOR_MEMORY, 1, State.STARTING, "ggml: failed to allocate CPU buffer of size 99999"),
        (Cause.CRASH, 1, State.READY, "E llama_model_load: error loading model: a line of long ago"),
        (Cause.CRASH, 0, State.READY, ""),
        # Windows: an exception's NTSTATUS is the exit code, and one of Python's own says what is missing.
        (Cause.WRONG_CPU, 0xC000001D, State.READY, ""),
        (Cause.MISSING_LIBRARY, 0xC0000135, State.STARTING, ""),
        (Cause.MISSING_LIBRARY, 1, State.STARTING, "ImportError: DLL load failed while importing xllamacpp: x"),
        (Cause.KILLED_FOR_MEMORY, 0xC0000017, State.READY, ""),
        (Cause.KILLED_FOR_MEMORY, 0xC0000409, State.READY, "terminate called: std::bad_alloc"),
        (Cause.OUT_OF_DEVICE_MEMORY, 0xC0000409, State.READY, "CUDA error: out of memory"),
        (Cause.CRASH, 0xC0000005, State.READY, ""),
        (Cause.CRASH, 0xC0000005, State.STARTING, ""),
        (Cause.CRASH, 15, State.READY, ""),
    ],
)  # fmt: skip
def test_causes(cause: Cause, returncode: int, phase: State, line: str) -> None:
    # What follows every failed load must not hide the reason before it.
    lines = ["0.00 I starting", line, "0.1 E srv  llama_server: exiting due to model loading error"]
    if phase is State.READY or cause is Cause.CRASH:
        lines.pop()
    assert cause_of_death(returncode=returncode, phase=phase, lines=lines) is cause
    end = EngineExit(returncode, cause, phase, tuple(lines))
    assert end.sentence.startswith(end.public)
    assert end.public.endswith(".")


@pytest.mark.parametrize(
    ("kills", "cause"), [(0, Cause.CRASH), (1, Cause.KILLED_FOR_MEMORY), (None, Cause.KILLED_FOR_MEMORY)]
)
def test_a_sigkill_is_the_kernels_when_it_says_so(kills: int | None, cause: Cause) -> None:
    assert cause_of_death(returncode=-9, phase=State.READY, lines=[], oom_kills=kills) is cause


def test_the_sentence_quotes_the_line_that_tells_most() -> None:
    lines = (
        "0.00.030.152 E gguf_init_from_reader: invalid magic characters: '<htm', expected 'GGUF'",
        "0.00.030.402 E srv    load_model: failed to load model, '/secret/path.gguf'",
    )
    end = EngineExit(1, Cause.BAD_FILE, State.STARTING, lines)
    assert end.sentence.endswith("It said: gguf_init_from_reader: invalid magic characters: '<htm', expected 'GGUF'")
    assert "/secret" not in end.public
    assert EngineExit(0, Cause.ASKED, State.READY, lines).sentence == "The engine was asked to stop."


def test_only_what_repeats_itself_is_permanent() -> None:
    permanent = {cause for cause in Cause if cause.permanent}
    assert permanent == {
        Cause.WRONG_CPU, Cause.MISSING_LIBRARY, Cause.CANNOT_EXECUTE, Cause.BAD_FLAG, Cause.BAD_FILE,
    }  # fmt: skip


def test_experts_kept_twice_and_the_layers_of_a_draft() -> None:
    report = MemoryReport()
    report.feed(
        [
            "0.03.1 I load_tensors: offloaded 33/33 layers to GPU",
            "0.03.334.807 I impl:    Vulkan0 MoE cache size =    39.00 MiB for 144.00 MiB of host experts",
            "0.04.1 I load_tensors: offloaded 17/17 layers to GPU",
        ]
    )
    measured = report.measured()
    (cache,) = measured.buffers
    assert (cache.device, cache.kind, cache.size_bytes) == ("Vulkan0", BufferKind.MOE_CACHE, 39 * MIB)
    assert (measured.layers_offloaded, measured.layers_total) == (33, 33)
