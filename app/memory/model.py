"""One model's bytes under any placement; what the header says is summed once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from app.gguf import ModelFacts
from app.memory.compute import GraphTerms, device_compute_bytes, host_compute_bytes
from app.memory.correction import Correction
from app.memory.draft_head import head_compute_bytes, head_host_bytes
from app.memory.families import REGISTRY, Family, LayerCache, attention_cache, family_of
from app.memory.layout import HOST, layer_owners
from app.memory.ledger import DeviceLedger, HostLedger, MemoryLedger
from app.memory.placement import KVType, Placement, padded
from app.memory.projector import projector_bytes
from app.memory.shape import read_shape
from app.memory.weights import read_weights

_F32, _F16 = 4, 2
# Names of devices of ggml's CUDA backend, whatever it was compiled for.
_UNPACKING = ("CUDA", "ROCm", "MUSA")
_MIB = 1 << 20


def estimate(
    facts: ModelFacts, placement: Placement, *, device_names: Sequence[str], mmproj: ModelFacts | None = None
) -> MemoryLedger:
    """Bytes of a model per device and in RAM. Raises ModelFileError when its header cannot be right."""
    return MemoryModel(facts, mmproj=mmproj).ledger(placement, device_names=device_names)


class MemoryModel:
    """The formulas of one model, ready for many placements. Raises ModelFileError when the header cannot be right.

    ``draft`` is the model that guesses ahead for this one, ``draft_head`` says that blocks of its own do.
    ``correction`` is what the engine was found to count differently; ``families`` replaces formulas in tests.
    """

    def __init__(
        self,
        facts: ModelFacts,
        *,
        mmproj: ModelFacts | None = None,
        draft: ModelFacts | None = None,
        draft_head: bool = False,
        correction: Correction | None = None,
        families: Mapping[str, Family] = REGISTRY,
    ) -> None:
        self.shape = read_shape(facts)
        self.family = family_of(self.shape.architecture, families)
        if self.family.known and not self.family.hybrid and not max(self.shape.heads):
            raise facts.wrong(
                "attention.head_count", "is 0 or missing, but this architecture has attention in its layers"
            )
        self.correction = correction or Correction()
        self.weights = read_weights(self.shape, causal=self.family.causal, draft_head=draft_head)
        self.caches = self.family.layer_caches(self.shape)
        self.mmproj_bytes = self._projector_bytes(mmproj)
        self.draft = MemoryModel(draft) if draft is not None else None
        # Its blocks' caches, which are those of plain attention.
        head = range(self.shape.layers, self.shape.blocks if draft_head else 0)
        self.head_caches = {layer: attention_cache(self.shape, layer) for layer in head}

    @property
    def known(self) -> bool:
        """Whether the architecture has formulas of its own, not only the generic ones."""
        return self.family.known

    @property
    def all_layers(self) -> int:
        """``gpu_layers`` when everything is on devices: every block and the output layer."""
        return self.shape.blocks + 1

    @property
    def has_experts(self) -> bool:
        """Whether there is anything that ``cpu_moe_layers`` moves."""
        return any(block.experts_bytes for block in self.weights.blocks)

    def ledger(self, placement: Placement, *, device_names: Sequence[str]) -> MemoryLedger:
        """Bytes per device and in RAM under ``placement``, as far as is known as the engine counts them."""
        return self.correction.applied(self.uncorrected(placement, device_names=device_names))

    def uncorrected(self, placement: Placement, *, device_names: Sequence[str]) -> MemoryLedger:
        """Bytes by the formulas alone."""
        owners = layer_owners(self.all_layers, placement, devices=len(device_names))
        return MemoryLedger(
            devices=tuple(
                self._device(placement, owners, index=index, name=name) for index, name in enumerate(device_names)
            ),
            host=self._host(placement, owners),
        )

    def layer_bytes(self, placement: Placement, layer: int) -> int:
        """What entry ``layer`` of the stack (the last is the output layer) costs the device that holds it."""
        scale = self.correction.weights
        if layer == self.shape.blocks:
            return round(scale * (self.weights.output_bytes + self.weights.tied_bytes))
        block = self.weights.blocks[layer]
        experts = 0 if layer < placement.cpu_moe_layers else block.experts_bytes
        own = self._layer_cache_bytes(placement, layer) + self._head_cache_bytes(placement, [layer])
        cache = self.correction.context * own
        return round(scale * (block.dense_bytes + experts) + cache)

    def kv_bytes(self, placement: Placement, layers: Iterable[int]) -> int:
        """K and V of these layers, all slots (llama.cpp src/llama-kv-cache.cpp)."""
        width = 0 if placement.flash_attention else max((cache.value for cache in self.caches), default=0)
        total = 0
        for cache in self._caches_of(layers):
            # Without flash attention V is transposed and as wide as the widest layer's.
            value = max(cache.value, width) if cache.value else 0
            row = placement.kv_cache_k.row_bytes(cache.key) + placement.kv_cache_v.row_bytes(value)
            total += row * cells_of(cache, placement)
        return total * placement.parallel

    def state_bytes(self, placement: Placement, layers: Iterable[int]) -> int:
        """Recurrent state of these layers (llama.cpp src/llama-memory-recurrent.cpp).

        One row per slot, and one more for every token that a draft head guesses: a wrong one is rolled back.
        """
        rows = placement.parallel * (1 + placement.draft_tokens * placement.draft_head)
        return _F32 * sum(cache.state for cache in self._caches_of(layers)) * rows

    def checkpoint_bytes(self, placement: Placement) -> int:
        """One context checkpoint of one slot: its recurrent state and its windowed K and V; 0 for plain attention."""
        windowed = [layer for layer, cache in enumerate(self.caches) if cache.window]
        states = _F32 * sum(cache.state for cache in self.caches)
        return self.kv_bytes(placement, windowed) // placement.parallel + states

    def _projector_bytes(self, mmproj: ModelFacts | None) -> int:
        if mmproj is None:
            return 0
        stated = self.correction.mmproj_bytes
        return projector_bytes(mmproj) if stated is None else stated

    def _device(self, placement: Placement, owners: Sequence[int], *, index: int, name: str) -> DeviceLedger:
        mmproj = self.mmproj_bytes if placement.mmproj_on == name else 0
        draft = self._draft_bytes(placement) if placement.draft_on == name else 0
        if index not in owners:
            return DeviceLedger(name=name, mmproj_bytes=mmproj, draft_bytes=draft)
        blocks = [layer for layer in range(self.shape.blocks) if owners[layer] == index]
        output = self.weights.output_bytes + self.weights.tied_bytes if owners[-1] == index else 0
        # The first device computes what whole layers in RAM leave to devices.
        computed = [layer for layer, owner in enumerate(owners[:-1]) if owner == index or (owner == HOST and not index)]
        terms = self._terms(placement, owners, computed)
        return DeviceLedger(
            name=name,
            weights_bytes=output + sum(self.weights.blocks[layer].dense_bytes for layer in blocks),
            experts_bytes=self._experts(layer for layer in blocks if layer >= placement.cpu_moe_layers),
            kv_cache_bytes=self.kv_bytes(placement, blocks) + self._head_cache_bytes(placement, blocks),
            state_bytes=self.state_bytes(placement, blocks),
            compute_bytes=device_compute_bytes(self.shape, self.family, placement, terms, is_first=owners[0] == index)
            + self._head_compute_bytes(placement, blocks)
            + self._unpacked_cache_bytes(placement, blocks, name),
            mmproj_bytes=mmproj,
            draft_bytes=draft,
            moe_cache_bytes=placement.moe_cache_mib * _MIB,
        )

    def _head_cache_bytes(self, placement: Placement, layers: Iterable[int]) -> int:
        """K and V of the draft head's blocks among these: in f16, whatever the model's own are in."""
        own = [self.head_caches[layer] for layer in layers if layer in self.head_caches]
        elements = sum((cache.key + cache.value) * cells_of(cache, placement) for cache in own)
        return _F16 * elements * placement.parallel

    def _head_compute_bytes(self, placement: Placement, layers: Sequence[int]) -> int:
        head = [layer for layer in layers if layer in self.head_caches]
        if not head:
            return 0
        in_ram = [self.weights.blocks[layer].largest_expert_bytes for layer in head if layer < placement.cpu_moe_layers]
        buffers = head_compute_bytes(self.shape, placement, expert_copy_bytes=max(in_ram, default=0))
        if placement.parallel == 1:
            return buffers
        # Of several slots the states after each guess are alive at once, of one layer at a time.
        state = max((cache.state for cache in self.caches), default=0)
        return buffers + _F32 * state * placement.parallel * placement.draft_tokens

    def _draft_bytes(self, placement: Placement) -> int:
        """Everything that a draft model takes on its device."""
        if self.draft is None:
            return 0
        stated = self.correction.draft_bytes
        return self._draft_ledger(self.draft, placement).devices[0].total_bytes if stated is None else stated

    def _draft_ledger(self, draft: MemoryModel, placement: Placement) -> MemoryLedger:
        """The draft model's own: as many slots and cells, all of it on one device or none of it."""
        on_device = placement.draft_on not in {None, "host"}
        own = replace(
            placement,
            gpu_layers=draft.all_layers if on_device else 0,
            cpu_moe_layers=0,
            tensor_split=(),
            kv_cache_k=KVType.F16,
            kv_cache_v=KVType.F16,
            cache_ram_mib=0,
            context_checkpoints=0,
            mmproj_on=None,
            draft_on=None,
            draft_head=False,
            draft_tokens=0,
        )
        return draft.ledger(own, device_names=[placement.draft_on or ""] if on_device else [])

    def token_experts_bytes(self, placement: Placement) -> int:
        """What one token reads of the experts in RAM under ``cpu_moe_layers``: a cache must hold at least that."""
        in_ram = self._experts(range(min(placement.cpu_moe_layers, self.shape.blocks)))
        return in_ram * self.shape.experts_used // self.shape.experts if self.shape.experts else 0

    def _unpacked_cache_bytes(self, placement: Placement, layers: Iterable[int], device: str) -> int:
        """The f16 copy that CUDA's flash attention makes of one layer's quantised K and V."""
        if not device.startswith(_UNPACKING) or not placement.flash_attention:
            return 0
        quantised = (placement.kv_cache_k.quantised, placement.kv_cache_v.quantised)
        return placement.parallel * max(
            (
                _F16 * cells_of(cache, placement) * (cache.key * quantised[0] + cache.value * quantised[1])
                for cache in self._caches_of(layers)
            ),
            default=0,
        )

    def _host(self, placement: Placement, owners: Sequence[int]) -> HostLedger:
        terms = self._terms(placement, owners, range(self.shape.blocks))
        blocks = [layer for layer in range(self.shape.blocks) if owners[layer] == HOST]
        output = self.weights.output_bytes if owners[-1] == HOST else 0
        output += self.weights.repacked_bytes if terms.alone else 0
        mmproj = self.mmproj_bytes if placement.mmproj_on == "host" else 0
        in_ram = self._expert_layers_in_ram(placement, owners)
        own = HostLedger(
            weights_bytes=self.weights.input_bytes
            + output
            + mmproj
            + sum(self.weights.blocks[layer].dense_bytes for layer in blocks),
            experts_bytes=self._experts(in_ram),
            kv_cache_bytes=self.kv_bytes(placement, blocks) + self._head_cache_bytes(placement, blocks),
            state_bytes=self.state_bytes(placement, blocks),
            compute_bytes=host_compute_bytes(self.shape, self.family, placement, terms)
            + head_host_bytes(self.shape, placement) * bool(self.head_caches),
            prompt_cache_bytes=placement.cache_ram_mib * _MIB,
            checkpoints_bytes=self.checkpoint_bytes(placement) * placement.context_checkpoints * placement.parallel,
        )
        return own if self.draft is None or not placement.draft_on else self._with_draft(own, self.draft, placement)

    def _with_draft(self, own: HostLedger, draft: MemoryModel, placement: Placement) -> HostLedger:
        """RAM with the draft model's share of each part added; what the engine stated of it counts as weights."""
        host = self._draft_ledger(draft, placement).host
        stated = self.correction.draft_bytes if placement.draft_on == "host" else None
        if stated is not None:
            return replace(own, weights_bytes=own.weights_bytes + stated)
        return replace(
            own,
            weights_bytes=own.weights_bytes + host.weights_bytes + host.experts_bytes,
            kv_cache_bytes=own.kv_cache_bytes + host.kv_cache_bytes,
            state_bytes=own.state_bytes + host.state_bytes,
            compute_bytes=own.compute_bytes + host.compute_bytes,
        )

    def _terms(self, placement: Placement, owners: Sequence[int], computed: Collection[int]) -> GraphTerms:
        """What the graph of whoever computes these layers depends on."""
        on_host = [layer for layer in computed if owners[layer] == HOST] if self.family.host_copies else []
        in_ram = [layer for layer in self._expert_layers_in_ram(placement, owners) if layer in computed]
        # Layers that RAM computes itself need no mask on a device.
        masked = computed if self.family.host_copies else [layer for layer in computed if owners[layer] != HOST]
        masked = range(self.shape.blocks) if len(computed) == self.shape.blocks else masked
        kinds = {cache.window: cells_of(cache, placement) for cache in self._caches_of(masked) if cache.key}
        blocks = self.weights.blocks
        return GraphTerms(
            cells=sum(kinds.values()) if self.family.causal else placement.graph_tokens,
            expert_copy_bytes=max((blocks[layer].largest_expert_bytes for layer in in_ram), default=0),
            tensor_copy_bytes=max((blocks[layer].largest_dense_bytes for layer in on_host), default=0),
            down_copy_bytes=max((blocks[layer].largest_down_bytes for layer in on_host), default=0),
            cache_copy_bytes=self._cache_copy_bytes(placement, on_host),
            expert_pair_bytes=self._expert_pair_bytes(placement, set(in_ram).difference(on_host)),
            state_bytes=max((self.state_bytes(placement, [layer]) for layer in computed), default=0),
            recurrent_layers=sum(cache.state > 0 for cache in self._caches_of(computed)),
            alone=all(owner == HOST for owner in owners),
            has_host_layers=any(owners[layer] == HOST for layer in computed),
            is_pipelined=len(set(owners)) > 1 and HOST not in owners and not placement.cpu_moe_layers,
        )

    def _cache_copy_bytes(self, placement: Placement, layers: Iterable[int]) -> int:
        largest = max((self._layer_cache_bytes(placement, layer) for layer in layers), default=0)
        return round(largest * self.family.host_copies)

    def _layer_cache_bytes(self, placement: Placement, layer: int) -> int:
        return self.kv_bytes(placement, [layer]) + self.state_bytes(placement, [layer])

    def _expert_layers_in_ram(self, placement: Placement, owners: Sequence[int]) -> list[int]:
        return [
            layer for layer in range(self.shape.blocks) if layer < placement.cpu_moe_layers or owners[layer] == HOST
        ]

    def _expert_pair_bytes(self, placement: Placement, in_ram: Collection[int]) -> int:
        if self.family.chunks and any(0 < cache.window < placement.cells for cache in self.caches):
            return 2 * max((self.weights.blocks[layer].largest_expert_bytes for layer in in_ram), default=0)
        if self.family.whole_experts:
            full = next((layer for layer, cache in enumerate(self.caches) if cache.key and not cache.window), 0)
            return self.weights.blocks[full].experts_bytes if {full - 1, full} <= set(in_ram) else 0
        attention = next((layer for layer, cache in enumerate(self.caches) if cache.key), 0)
        if not self.family.pairs or attention - 1 not in in_ram or attention not in in_ram:
            return 0
        return sum(self.weights.blocks[layer].largest_expert_bytes for layer in (attention - 1, attention))

    def _experts(self, layers: Iterable[int]) -> int:
        return sum(self.weights.blocks[layer].experts_bytes for layer in layers)

    def _caches_of(self, layers: Iterable[int]) -> Iterable[LayerCache]:
        return (self.caches[layer] for layer in layers if layer < len(self.caches))


def cells_of(cache: LayerCache, placement: Placement) -> int:
    """Cells per slot: a window keeps itself and one ubatch (llama.cpp src/llama-kv-cache-iswa.cpp)."""
    if not cache.window:
        return placement.cells
    return padded(min(placement.cells, cache.window + placement.graph_tokens))
