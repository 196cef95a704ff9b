"""Architectures by what they keep per layer; an unknown one gets the generic formulas."""

from __future__ import annotations

from collections.abc import Mapping

from app.memory.families import attention, encoder, hybrid, latent, sliding
from app.memory.families.family import Family, LayerCache, attention_cache

__all__ = ["REGISTRY", "Family", "LayerCache", "attention_cache", "family_of"]

REGISTRY: Mapping[str, Family] = {
    architecture: family
    for family in (
        attention.FAMILY,
        attention.FUSED,
        *encoder.FAMILIES,
        *hybrid.FAMILIES,
        *latent.FAMILIES,
        *sliding.FAMILIES,
    )
    for architecture in family.architectures
}


def family_of(architecture: str, registry: Mapping[str, Family] = REGISTRY) -> Family:
    """The formulas of an architecture; ``known`` is False when they are only the generic ones."""
    return registry.get(architecture, attention.UNKNOWN)
