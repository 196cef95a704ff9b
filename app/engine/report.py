"""What an engine's log says: the memory it took, and why it died."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from app.engine.exit_status import Ending, ending_of
from app.engine.state import State
from app.offload.step_down import Shortage

_MIB = 1 << 20


class BufferKind(StrEnum):
    """What a buffer holds, in the engine's words."""

    MODEL = "model"
    KV = "kv"
    RS = "rs"
    COMPUTE = "compute"
    OUTPUT = "output"
    MMPROJ = "mmproj"
    MOE_CACHE = "moe_cache"


@dataclass(frozen=True, slots=True)
class MeasuredBuffer:
    """All buffers of one kind on one device (``CUDA0``, ``CPU_Mapped``, ``CUDA_Host`` …), in bytes to 0.01 MiB."""

    device: str
    kind: BufferKind
    size_bytes: int

    @property
    def on_host(self) -> bool:
        """In RAM: plain, mapped, repacked or pinned."""
        return self.device.startswith("CPU") or self.device.endswith("_Host")


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """What the engine itself says it holds; None is what it has not (yet) said.

    ``complaint`` is the first line in which it says that it has no device, or no driver for one.
    """

    buffers: tuple[MeasuredBuffer, ...] = ()
    layers_offloaded: int | None = None
    layers_total: int | None = None
    slots: int | None = None
    context_per_slot: int | None = None
    complaint: str | None = None

    def device_bytes(self) -> dict[str, int]:
        """Bytes by device, RAM left out."""
        sums: dict[str, int] = {}
        for buffer in self.buffers:
            if not buffer.on_host:
                sums[buffer.device] = sums.get(buffer.device, 0) + buffer.size_bytes
        return sums

    def device_weights_bytes(self) -> int:
        """Bytes of the model's tensors that are on devices."""
        return sum(each.size_bytes for each in self.buffers if each.kind is BufferKind.MODEL and not each.on_host)

    def host_bytes(self) -> int:
        """Bytes in RAM; a mapped model counts from its first to its last tensor there."""
        return sum(buffer.size_bytes for buffer in self.buffers if buffer.on_host)


# One expression for the size of every buffer (llama.cpp src/llama-model.cpp, llama-kv-cache.cpp,
# llama-memory-recurrent.cpp, llama-context.cpp); the prefix with time and level is not looked at.
_BUFFER = re.compile(r"\b(\w+): +(\S+) +(model|KV|RS|compute|output) buffer size = +([\d.]+) MiB")
# Experts in RAM that a device keeps too.
_EXPERT_CACHE = re.compile(r": +(\S+) MoE cache size = +([\d.]+) MiB")
# A projector has buffers of the same words (llama.cpp tools/mtmd/clip.cpp), and says its device and weights before.
_PROJECTOR_DEVICE = re.compile(r"CLIP using (\S+) backend")
_PROJECTOR_WEIGHTS = re.compile(r"load_hparams: model size: +([\d.]+) MiB")
_PROJECTOR_GRAPH = "reserve_compute_meta"
_LAYERS = re.compile(r"load_tensors: offloaded (\d+)/(\d+) layers to GPU")
_SLOTS = re.compile(r"initializing, n_slots = (\d+), n_ctx_slot = (\d+)")
# ggml's backends, and common/arg.cpp of an engine without any.
_COMPLAINT = re.compile(
    r"ggml_\w+_init: (?:failed|no \w+ devices found).*|no usable GPU found|ggml_vulkan: No devices found.*|"
    r"compiled without GPU support.*"
)
_NEW_CONTEXT = "llama_context: constructing llama_context"
# Everything before this line was a trial without memory behind it.
_FIT_ENDED = "fitting params to free memory took"
# These are printed again when a context is re-planned; the last one holds. The others add up (two caches with SWA).
_LAST_HOLDS = frozenset({BufferKind.COMPUTE, BufferKind.OUTPUT, BufferKind.MMPROJ})
_OF_PROJECTOR_WEIGHTS, _OF_PROJECTOR_GRAPH = -1, -2


class MemoryReport:
    """Reads the log of one engine life, line by line."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, str, BufferKind], int] = {}
        self._context = 0
        self._projector_device = "CPU"
        self._complaint: str | None = None
        self._layers: tuple[int | None, int | None] = (None, None)
        self._slots: tuple[int | None, int | None] = (None, None)

    def feed(self, lines: Iterable[str]) -> None:
        """Take note of what these lines say."""
        for line in lines:
            self._feed_line(line)

    def measured(self) -> MeasuredMemory:
        """The sum so far."""
        sums: dict[tuple[str, BufferKind], int] = {}
        for (_, device, kind), size in self._sizes.items():
            sums[device, kind] = sums.get((device, kind), 0) + size
        return MeasuredMemory(
            tuple(MeasuredBuffer(device, kind, size) for (device, kind), size in sums.items()),
            layers_offloaded=self._layers[0],
            layers_total=self._layers[1],
            slots=self._slots[0],
            context_per_slot=self._slots[1],
            complaint=self._complaint,
        )

    def _feed_line(self, line: str) -> None:
        if " buffer size = " in line and (found := _BUFFER.search(line)):
            if found[1] == _PROJECTOR_GRAPH:
                self._add(_OF_PROJECTOR_GRAPH, found[2], BufferKind.MMPROJ, found[4])
            else:
                self._add(self._context, found[2], BufferKind(found[3].lower()), found[4])
        elif found := _EXPERT_CACHE.search(line):
            self._add(self._context, found[1], BufferKind.MOE_CACHE, found[2])
        elif _NEW_CONTEXT in line:
            self._context += 1
        elif _FIT_ENDED in line:
            self._sizes.clear()
            self._layers = (None, None)
        elif found := _PROJECTOR_DEVICE.search(line):
            self._projector_device = found[1]
        elif found := _PROJECTOR_WEIGHTS.search(line):
            self._add(_OF_PROJECTOR_WEIGHTS, self._projector_device, BufferKind.MMPROJ, found[1])
        elif self._layers[1] is None and (found := _LAYERS.search(line)):
            # A draft model says the same of itself afterwards.
            self._layers = (int(found[1]), int(found[2]))
        elif found := _SLOTS.search(line):
            self._slots = (int(found[1]), int(found[2]))
        elif self._complaint is None and (found := _COMPLAINT.search(line)):
            self._complaint = found[0].strip()[:200]

    def _add(self, context: int, device: str, kind: BufferKind, size_mib: str) -> None:
        key = (context, device, kind)
        before = 0 if kind in _LAST_HOLDS else self._sizes.get(key, 0)
        self._sizes[key] = before + round(float(size_mib) * _MIB)


class Cause(StrEnum):
    """Why an engine process ended."""

    ASKED = "asked"
    OUT_OF_DEVICE_MEMORY = "out_of_device_memory"
    KILLED_FOR_MEMORY = "killed_for_memory"
    WRONG_CPU = "wrong_cpu"
    MISSING_LIBRARY = "missing_library"
    CANNOT_EXECUTE = "cannot_execute"
    DEVICE_GONE = "device_gone"
    ADDRESS_IN_USE = "address_in_use"
    BAD_FLAG = "bad_flag"
    BAD_FILE = "bad_file"
    CRASH = "crash"
    HANG = "hang"

    @property
    def permanent(self) -> bool:
        """Another try with the same command would end the same way."""
        return self in _SENTENCES and _SENTENCES[self][0]


# Permanent or not, and what a person is told; no path and no argument in these, so that a client may see them.
_SENTENCES: dict[Cause, tuple[bool, str]] = {
    Cause.ASKED: (False, "The engine was asked to stop."),
    Cause.OUT_OF_DEVICE_MEMORY: (
        False,
        "The device ran out of memory; close what else uses it, or lower context, parallel or the offloaded layers.",
    ),
    Cause.KILLED_FOR_MEMORY: (
        False,
        "The system ran out of RAM and ended the engine; lower context or parallel, or give it more memory.",
    ),
    Cause.WRONG_CPU: (True, "The engine is built for another CPU (illegal instruction); install a build for this one."),
    Cause.MISSING_LIBRARY: (True, "The engine lacks a shared library; install it, or another build."),
    Cause.CANNOT_EXECUTE: (True, "The engine program is missing or cannot be executed; install it again."),
    Cause.DEVICE_GONE: (False, "The engine no longer finds the device that was planned on; look after its driver."),
    Cause.ADDRESS_IN_USE: (False, "The engine could not listen: its socket or port is taken; stop what holds it."),
    Cause.BAD_FLAG: (True, "The engine refused its command line; correct extra_args, or use another build."),
    Cause.BAD_FILE: (True, "The engine cannot load the model file; it is damaged or needs a newer engine."),
    Cause.CRASH: (False, "The engine crashed; the last log lines say more."),
    Cause.HANG: (False, "The engine made no progress and was ended."),
}

_START_UP: tuple[tuple[Cause, re.Pattern[str]], ...] = (
    (Cause.CANNOT_EXECUTE, re.compile(r"^launcher: cannot execute")),
    (
        Cause.MISSING_LIBRARY,
        re.compile(
            r"error while loading shared libraries|cannot open shared object file|symbol lookup error|"
            r"Library not loaded|version `[^']+' not found|ImportError: DLL load failed"
        ),
    ),
    # Ours: --device is not among the extra_args that may be given.
    (Cause.DEVICE_GONE, re.compile(r"invalid device: ")),
    (Cause.BAD_FLAG, re.compile(r"^error: invalid argument|^error while handling argument|requires flash_attn to be")),
    (Cause.ADDRESS_IN_USE, re.compile(r"couldn't bind HTTP server socket|Address already in use")),
)
_DEVICE_MEMORY = re.compile(
    r"cudaMalloc failed: out of memory|CUDA error: out of memory|hipMalloc failed|ErrorOutOfDeviceMemory|"
    r"OutOfDeviceMemory|allocating [\d.]+ MiB on device|(?:failed|unable) to allocate (?!CPU|\w+_Host)\w+ buffer"
)
_HOST_MEMORY = re.compile(
    r"(?:failed|unable) to allocate (?:CPU\w*|\w+_Host) buffer|std::bad_alloc|ErrorOutOfHostMemory"
)
_GRAPH_MEMORY = re.compile(r"failed to allocate compute|failed to initialize the context")
_MODEL_FILE = re.compile(
    r"error loading model|failed to load model|failed to open GGUF|invalid magic|exiting due to model loading error"
)
# Those that need no look into the log.
_CAUSES: Mapping[Ending | None, Cause] = {
    Ending.ILLEGAL_INSTRUCTION: Cause.WRONG_CPU,
    Ending.MISSING_LIBRARY: Cause.MISSING_LIBRARY,
    Ending.NO_MEMORY: Cause.KILLED_FOR_MEMORY,
}


def cause_of_death(
    *, returncode: int | None, phase: State, lines: Sequence[str], oom_kills: int | None = None
) -> Cause:
    """Why a process ended that nobody had asked to end.

    ``phase`` is the state it died in, ``lines`` its last log lines, ``oom_kills`` how many processes the kernel ended
    for memory meanwhile (None when it does not say): SIGKILL alone may also have come from a person.
    """
    ending = ending_of(returncode)
    if ending in _CAUSES:
        return _CAUSES[ending]
    if ending is Ending.KILLED:
        return Cause.CRASH if oom_kills == 0 else Cause.KILLED_FOR_MEMORY
    for pattern, cause in ((_DEVICE_MEMORY, Cause.OUT_OF_DEVICE_MEMORY), (_HOST_MEMORY, Cause.KILLED_FOR_MEMORY)):
        if _any(pattern, lines):
            return cause
    if phase is not State.STARTING:
        return Cause.CRASH
    for cause, pattern in _START_UP:
        if _any(pattern, lines):
            return cause
    if _any(_GRAPH_MEMORY, lines):
        return Cause.OUT_OF_DEVICE_MEMORY
    if ending is None and _any(_MODEL_FILE, lines):
        return Cause.BAD_FILE
    return Cause.MISSING_LIBRARY if returncode == 127 else Cause.CRASH


def _any(pattern: re.Pattern[str], lines: Sequence[str]) -> bool:
    return any(pattern.search(line) for line in lines)


@dataclass(frozen=True, slots=True)
class EngineExit:
    """The end of one engine process; ``returncode`` is negative for a signal, None when it never ran."""

    returncode: int | None
    cause: Cause
    phase: State
    log_tail: tuple[str, ...] = ()

    @property
    def public(self) -> str:
        """One sentence for a client: no path, no argument, no log."""
        return _SENTENCES[self.cause][1]

    @property
    def shortage(self) -> Shortage | None:
        """The memory that it ran out of, None when it died of something else."""
        if self.cause is Cause.OUT_OF_DEVICE_MEMORY:
            return Shortage.DEVICE
        if self.cause is Cause.KILLED_FOR_MEMORY:
            return Shortage.RAM_AT_LOAD if self.phase is State.STARTING else Shortage.RAM_IN_USE
        return None

    @property
    def sentence(self) -> str:
        """One sentence for the operator, with what the engine said last."""
        told = _telling_line(self.log_tail, self.cause)
        return f"{self.public} It said: {told}" if told else self.public


_LEVEL_ERROR = re.compile(r"^(?:[\d.]+ )?E ")
_PREFIX = re.compile(r"^[\d.]+ [A-Z] (?:(?:srv|cmn|slot|que) +\S+: )?")


def _telling_line(lines: Sequence[str], cause: Cause) -> str:
    """The line that explains the end best: for a start-up cause the first that names it, else the first error."""
    if cause in {Cause.ASKED, Cause.HANG}:
        return ""
    patterns = [pattern for named, pattern in _START_UP if named is cause]
    patterns += {
        Cause.OUT_OF_DEVICE_MEMORY: [_DEVICE_MEMORY, _GRAPH_MEMORY],
        Cause.KILLED_FOR_MEMORY: [_HOST_MEMORY],
    }.get(cause, [])
    for pattern in (*patterns, _LEVEL_ERROR):
        for line in lines:
            if pattern.search(line):
                return _PREFIX.sub("", line).strip()[:300]
    return ""
