"""What a model is for: read from its file, set by the operator, told to the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.cli.plan import PlanRequest
from app.config import ModelCatalog, ModelConfig, Settings
from app.engine.command import Endpoint, build_argv
from app.gguf import Kind, ModelFacts, natural_kind, read_header
from app.memory import MemoryModel
from app.offload import plan_offload
from app.supervisor import wish_for
from app.supervisor.planning import kind_of
from tests.gguf_writer import U32, Tensor, write
from tests.shapes import dense
from tests.test_engine_command import binary
from tests.test_offload import machine

POOLED = {"pooling_type": U32(3)}


def facts_of(folder: Path, architecture: str = "qwen3", *, head: str = "", **keys: U32) -> ModelFacts:
    shape = dense(architecture=architecture, layers=2, embedding=256, heads=4, kv_heads=2, vocabulary=512, keys=keys)
    more = [Tensor(head, (256, 1), "F32")] if head else []
    return read_header(write(folder / "model.gguf", replace(shape, tensors=[*shape.tensors, *more])))


def model(kind: str = "auto") -> ModelConfig:
    settings = Settings.model_validate({"models": {"m": {"path": "m.gguf", "kind": kind, "context": 1000}}})
    return next(iter(ModelCatalog(settings)))


@pytest.mark.parametrize(
    ("architecture", "pooling", "head", "kind"),
    [
        ("qwen3", None, "", Kind.CHAT),
        ("qwen3", 0, "", Kind.CHAT),
        ("qwen3", 3, "", Kind.EMBEDDING),
        ("bert", None, "", Kind.EMBEDDING),
        ("bert", 2, "", Kind.EMBEDDING),
        ("bert", 2, "cls.weight", Kind.RERANK),
        ("qwen3", 4, "cls.output.weight", Kind.RERANK),
        ("qwen3", 99, "", Kind.CHAT),
    ],
)
def test_the_file_says_what_a_model_is_for(
    architecture: str, pooling: int | None, head: str, kind: Kind, tmp_path: Path
) -> None:
    keys = {} if pooling is None else {"pooling_type": U32(pooling)}
    facts = facts_of(tmp_path, architecture, head=head, **keys)
    assert natural_kind(facts) is kind
    assert kind_of(model(), facts) is kind


def test_the_operator_has_the_last_word(tmp_path: Path) -> None:
    assert kind_of(model("embedding"), facts_of(tmp_path)) is Kind.EMBEDDING
    assert kind_of(model("chat"), facts_of(tmp_path, **POOLED)) is Kind.CHAT


@pytest.mark.parametrize(
    ("kind", "pooled", "flags"),
    [
        ("auto", False, []),
        ("embedding", False, ["--embedding", "--pooling", "mean"]),
        ("auto", True, ["--embedding"]),
        ("rerank", False, ["--reranking"]),
    ],
)
def test_the_engine_is_told(kind: str, pooled: bool, flags: list[str], tmp_path: Path) -> None:
    facts = facts_of(tmp_path, **(POOLED if pooled else {}))
    wish = wish_for(model(kind), Settings().memory, facts)
    plan = plan_offload(facts, machine(), wish)
    argv = build_argv(plan, binary(), alias="m", endpoint=Endpoint(socket=None, port=1), key_file=None)
    given = [word for word in argv if word in {"--embedding", "--pooling", "mean", "--reranking"}]
    assert given == flags


def test_a_text_of_the_whole_context_is_one_batch(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    for devices in ((), (24000,)):
        plan = plan_offload(facts, machine(*devices), wish_for(model("embedding"), Settings().memory, facts))
        # The engine rounds 1000 up to 1024 and takes texts of so many tokens.
        assert plan.placement.batch == plan.placement.ubatch == plan.placement.cells == 1024
        assert plan.placement.cache_ram_mib == 0


def test_each_slot_has_as_much_of_the_batch(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    wish = replace(wish_for(model("embedding"), Settings().memory, facts), parallel=3)
    placement = plan_offload(facts, machine(), wish).placement
    assert placement.batch == placement.ubatch == 1026


def test_the_batch_is_paid_for(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    chat, embedding = (
        plan_offload(facts, machine(), wish_for(model(kind), Settings().memory, facts))
        for kind in ("chat", "embedding")
    )
    assert embedding.memory.host.compute_bytes > 4 * chat.memory.host.compute_bytes
    assert MemoryModel(facts).ledger(embedding.placement, device_names=[]).host == embedding.memory.host


def test_slots_of_embeddings_share_their_cells_on_the_embedded_engine(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    for kind, engine, flag in (
        ("embedding", "embedded", "--kv-unified"),
        ("embedding", "native", "--no-kv-unified"),
        ("chat", "embedded", "--no-kv-unified"),
    ):
        plan = plan_offload(facts, machine(), wish_for(model(kind), Settings().memory, facts))
        endpoint = Endpoint(socket=None, port=1)
        argv = build_argv(plan, replace(binary(), kind=engine), alias="m", endpoint=endpoint, key_file=None)
        assert [word for word in argv if word.endswith("kv-unified")] == [flag]


@pytest.mark.parametrize("kind", ["auto", "chat", "embedding", "rerank"])
@pytest.mark.parametrize("pooled", [False, True])
def test_a_plan_from_the_command_line_is_the_one_that_is_served(kind: str, pooled: bool, tmp_path: Path) -> None:
    facts = facts_of(tmp_path, **(POOLED if pooled else {}))
    request = PlanRequest(
        file=facts.path, mmproj=None, vram=None, ram=None, context=1000, parallel=1, kv_cache="auto", engine="auto",
        kind=kind,
    )  # fmt: skip
    assert request.wish(facts) == wish_for(model(kind), Settings().memory, facts)
