"""A configured projector: found, checked, planned, counted and really loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.engine.binary import find_engine
from app.errors import ModelFileError
from app.gguf import read_projector
from tests import projector_shapes
from tests.fleet import fake_engine_binary, fleet_of
from tests.gguf_writer import write

SMALL = projector_shapes.siglip(blocks=2, width=256, feed_forward=512, text_width=576, image=224)


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that the demo model can have: 576 wide, all weights zero."""
    return write(tmp_path_factory.mktemp("projector") / "mmproj.gguf", SMALL)


async def test_the_engine_loads_it_and_the_plan_counts_it(
    native_engine: Path | None, demo_model: Path, projector: Path
) -> None:
    if native_engine is None:
        pytest.skip("no native engine")
    engine = find_engine(str(native_engine))
    async with fleet_of(engine, demo_model, {"a": {"mmproj": projector}}) as fleet:
        backend = await fleet.supervisor.ready(fleet.model("a"))
        assert any("loaded multimodal model" in line for line in backend.process.log_tail(400))
        plan = backend.plan
        assert plan.placement.mmproj_on == "host"
        assert plan.verified is not None
        # Its weights are 2.84 MiB; the engine counts the graph of its largest picture too.
        stated = plan.verified.accounting.mmproj_bytes
        assert stated is not None
        assert stated > sum(tensor.size_bytes for tensor in read_projector(projector).tensors)
        assert plan.memory.host.weights_bytes >= stated + 0.9 * plan.model.file_bytes
        assert fleet.count("model_memory_measured_bytes", model="a", device="CPU", part="mmproj") > 2 << 20


async def test_a_model_instead_of_a_projector_is_refused_before_anything_starts(demo_model: Path) -> None:
    with pytest.raises(ModelFileError, match="is no projector but a model"):
        async with fleet_of(fake_engine_binary(), demo_model, {"a": {"mmproj": demo_model}}):
            pass
