"""What one audience may see of a sample."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.views.observer import ModelView, Sample


@dataclass(frozen=True, slots=True)
class Audience:
    """Operators see everything; others the models that their key may use (None: all), without paths and names."""

    is_operator: bool
    models: frozenset[str] | None = None

    def allows(self, model_id: str) -> bool:
        """Whether it may see this model."""
        return self.models is None or model_id in self.models

    def view(self, sample: Sample) -> Sample:
        """The sample with everything left out that is none of its business."""
        if self.is_operator:
            return sample
        return replace(
            sample,
            models=tuple(_modest(model) for model in sample.models if self.allows(model.id)),
            # The map names every model, and how much memory the machine has is the operator's business.
            places=(),
            events=tuple(event for event in sample.events if event.model is not None and self.allows(event.model)),
        )


def _modest(model: ModelView) -> ModelView:
    return replace(
        model,
        detail=None,
        placement=None,
        reasons=(),
        expected_basis=None,
        resident_bytes=0,
        running=tuple(replace(one, key="") for one in model.running),
    )
