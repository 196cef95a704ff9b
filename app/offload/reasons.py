"""One sentence per setting: why the plan has it."""

from __future__ import annotations

from collections.abc import Iterator

from app.hardware import Machine
from app.memory import MemoryModel, Placement
from app.offload.base import DEVICE_UBATCH
from app.offload.plan import Reason
from app.offload.wish import Wish


def explain(model: MemoryModel, machine: Machine, wish: Wish, placement: Placement) -> tuple[Reason, ...]:
    """A reason for every setting of ``placement``, and one for an architecture without formulas of its own."""
    return (
        *_about_model(model),
        *_about_layers(model, machine, wish, placement),
        *_about_cache(model, wish, placement),
        *_about_requests(model, machine, wish, placement),
        *_about_ram(model, wish, placement),
    )


def _about_model(model: MemoryModel) -> Iterator[Reason]:
    if not model.known:
        yield Reason(
            "architecture",
            model.shape.architecture,
            "not known here: generic formulas were used, the engine's own accounting has to confirm them",
        )
    if not model.correction.is_none:
        yield Reason("correction", model.correction.describe(), "as this engine was found to count this model")


def _about_layers(model: MemoryModel, machine: Machine, wish: Wish, placement: Placement) -> Iterator[Reason]:
    yield Reason("gpu_layers", str(placement.gpu_layers), _why_layers(model, machine, wish, placement))
    yield Reason("cpu_moe_layers", str(placement.cpu_moe_layers), _why_experts(model, wish, placement))
    if placement.moe_cache_mib:
        why = "what is left on the device keeps the experts in RAM that are used most"
        yield Reason("moe_cache_mib", str(placement.moe_cache_mib), why)
    if placement.tensor_split:
        split = ",".join(f"{share:g}" for share in placement.tensor_split)
        yield Reason("tensor_split", split, "layers per device, in proportion to what is free on each")
    if placement.mmproj_on:
        on_host = placement.mmproj_on == "host"
        why = "on a device it would push layers out" if on_host else "it fits there without pushing a layer out"
        yield Reason("mmproj_on", placement.mmproj_on, why)
    if placement.draft_on:
        on_host = placement.draft_on == "host"
        why = "on a device it would push layers out" if on_host else "it fits there without pushing a layer out"
        yield Reason("draft_on", placement.draft_on, why)
    if placement.draft_tokens:
        who = "the model's own draft head" if placement.draft_head else "the draft model"
        yield Reason("draft_tokens", str(placement.draft_tokens), f"{who} guesses so many ahead, as the engine does")


def _why_layers(model: MemoryModel, machine: Machine, wish: Wish, placement: Placement) -> str:
    if not machine.devices:
        return "the engine sees no device"
    if wish.gpu_layers is not None:
        return "asked for"
    if placement.gpu_layers == model.all_layers:
        return f"all {model.shape.blocks} blocks and the output layer fit"
    if not placement.gpu_layers:
        return "not even one layer fits beside its buffers"
    return f"the most of {model.all_layers} (blocks and output layer) that fit"


def _why_experts(model: MemoryModel, wish: Wish, placement: Placement) -> str:
    if wish.cpu_moe_layers is not None:
        return "asked for"
    if not model.has_experts:
        return "a dense model has no experts to move"
    if not placement.gpu_layers:
        return "everything is in RAM anyway"
    return "the fewest layers whose experts must be in RAM" if placement.cpu_moe_layers else "all experts fit"


def _about_cache(model: MemoryModel, wish: Wish, placement: Placement) -> Iterator[Reason]:
    kind = placement.kv_cache_k.value
    if wish.kv_cache != "auto":
        why = "asked for"
    elif not placement.kv_cache_k.quantised:
        why = "full precision costs no layer here"
    elif kind == "q8_0":
        why = "half of f16 without a visible loss; f16 would push layers out or exceed the RAM"
    else:
        why = "nothing more precise fits"
    yield Reason("kv_cache_k", kind, why)
    apart = "a quantised V needs flash attention, which is off"
    same = placement.kv_cache_v is placement.kv_cache_k
    yield Reason("kv_cache_v", placement.kv_cache_v.value, "as K" if same else apart)
    heads = f"{model.shape.key_length}/{model.shape.value_length}"
    flash = (
        f"there is a kernel for heads of {heads}" if placement.flash_attention else f"no kernel for heads of {heads}"
    )
    yield Reason("flash_attention", "on" if placement.flash_attention else "off", flash)


def _about_requests(model: MemoryModel, machine: Machine, wish: Wish, placement: Placement) -> Iterator[Reason]:
    trained = model.shape.facts.context_trained
    limit = f"the default, within the {trained} tokens it was trained for" if trained else "the default"
    yield Reason(
        "context_per_request", str(placement.context_per_request), limit if wish.context is None else "asked for"
    )
    yield Reason("parallel", str(placement.parallel), "each has its own context, none can use up another's")
    if wish.embedding:
        why = "an embedding needs its whole text in one batch"
    elif machine.devices:
        why = "the engine's default: fast prompts at little compute memory"
    else:
        why = "on a CPU a cancelled request still finishes its batch, so that is kept short"
    yield Reason("batch", str(placement.batch), why)
    if machine.devices and placement.ubatch > DEVICE_UBATCH and not wish.embedding:
        why = "what is left on the device is too little for another layer, and makes long prompts faster"
    yield Reason("ubatch", str(placement.ubatch), why)
    yield Reason("threads", str(placement.threads), "physical cores that this process may use")


def _about_ram(model: MemoryModel, wish: Wish, placement: Placement) -> Iterator[Reason]:
    pinned = "experts in RAM, and RAM to spare: pinned memory doubles the speed of long prompts"
    mapped = "the file is mapped, its pages can be given back under pressure"
    yield Reason("load_mode", placement.load_mode, pinned if placement.load_mode == "none" else mapped)
    resumable = "up to half of the RAM that is left after the reserve"
    cache = "an embedding is computed at once, there is nothing to resume" if wish.embedding else resumable
    yield Reason("cache_ram_mib", str(placement.cache_ram_mib), cache)
    each = model.checkpoint_bytes(placement)
    some = f"{each / (1 << 20):.1f} MiB each, within a quarter of the RAM that is left"
    none = "a plain attention cache can be cut anywhere"
    yield Reason("context_checkpoints", str(placement.context_checkpoints), some if each else none)
