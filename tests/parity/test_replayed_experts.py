"""Experts recorded with the old log-probs, replayed and balanced in updates, by two processes as by one: FSDP, and
megatron-core."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_update_paths import PLAN, make_batch
from torch import Tensor
from transformers import AutoTokenizer

from posttrain.backends.train.fsdp import FsdpTrainEngine
from posttrain.backends.train.fsdp.sharding import FsdpSharding
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.config.policy import OptimizerConfig
from posttrain.models.loading import load_causal_lm
from posttrain.models.routing import routers_of
from posttrain.models.tiny import write_tiny_model
from warm.processes import on_ranks

pytest.importorskip("megatron.core")
WARM = ("posttrain.backends.train.megatron",)  # see conftest.py
pytestmark = pytest.mark.slow
WAYS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "fsdp, sequences shared": {"sequence": 2},
    "megatron, experts 2": {"parallel": 2},
    "megatron, tokens shared": {"tensor": 2},
    "megatron, sequences shared": {"context": 2},
    "megatron, recomputed": {"parallel": 2, "how": {"gradient_checkpointing": True}},
    "megatron, stages": {"pipeline": 2},
    "megatron, stages recomputed": {"pipeline": 2, "how": {"gradient_checkpointing": True}},
}


def engine_of(folder: Path, kind: Any = LocalTrainEngine, **how: Any) -> Any:
    model = load_causal_lm(str(folder), dtype=torch.float32)
    return kind(
        model,
        AutoTokenizer.from_pretrained(folder),
        optimizer=OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5),
        learning_rate_factor=lambda update: 1.0,
        sequences_per_micro_batch=5,
        sequences_per_scoring_batch=5,
        routers=routers_of(model, "policy.routing_replay"),
        **how,
    )


def outcome(engine: Any) -> dict[str, Tensor]:
    """Old log-probs and their experts; then losses, norms and log-probs of updates with experts that the model would not choose,
    with those, and with what it chooses by then."""
    batch = make_batch(0)
    rows = batch.sequences
    old, experts = engine.logprobs_and_experts(rows, PLAN.temperature)
    others = torch.where(experts >= 0, (experts + 1) % 4, experts)
    found = {"old": old, "experts": experts, "plain": engine.logprobs(rows, PLAN.temperature)}
    found["scored by others"] = engine.logprobs(replace(rows, experts=others), PLAN.temperature)
    for name, given in (("others", others), ("same", experts), ("free", None)):
        stats = engine.forward_backward(replace(batch, sequences=replace(rows, experts=given)), PLAN, batch.counts())
        found[name] = torch.tensor([stats.loss, engine.optimizer_step().grad_norm])
        found[f"{name} log-probs"] = torch.where(rows.response_mask, stats.policy_logprobs, 0.0)
    stats = engine.forward_backward(batch, replace(PLAN, router_balance_coef=5.0), batch.counts())
    found["balanced"] = torch.tensor(
        [stats.loss, stats.sums["policy/router_balance"], engine.optimizer_step().grad_norm]
    )
    return found


def sharded_engine(way: str, folder: Path) -> Any:
    if way.startswith("fsdp"):
        sharding = FsdpSharding("cpu", param_dtype=torch.float32, sequence=WAYS[way].get("sequence", 1))
        return engine_of(folder, FsdpTrainEngine, sharding=sharding, gradient_checkpointing=sharding.sequence > 1)
    from posttrain.backends.train.megatron import MegatronTrainEngine
    from posttrain.backends.train.megatron.sharding import MegatronSharding
    from posttrain.plan.engines.megatron.experts import ExpertSettings
    from posttrain.plan.engines.megatron.options import MegatronSettings

    about = WAYS[way]
    settings = MegatronSettings(experts=ExpertSettings(parallel=about.get("parallel", 1)))
    sizes = {name: about.get(name, 1) for name in ("tensor", "pipeline", "context")}
    sharding = MegatronSharding(torch.device("cpu"), settings=settings, **sizes)
    return engine_of(folder, MegatronTrainEngine, sharding=sharding, **about.get("how", {}))


def in_process(rank: int, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    for way in WAYS:
        dist.init_process_group("gloo", init_method=f"file://{out}/{way}", rank=rank, world_size=2)
        torch.save(outcome(sharded_engine(way, folder)), out / f"{way} {rank}.pt")
        if way.startswith("megatron"):
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def test_experts_are_recorded_and_replayed_by_every_engine(tmp_path: Path) -> None:
    # its first layer has no router, and an expert is shared by all tokens
    folder = write_tiny_model(tmp_path / "model", "qwen2_moe")
    wanted = outcome(engine_of(folder))
    assert torch.equal(wanted["old"], wanted["plain"])
    # what is replayed decides: log-probs and gradients are others
    assert (wanted["scored by others"] - wanted["old"]).abs().max() > 1e-3
    assert (wanted["others"] - wanted["same"]).abs().max() > 1e-4
    assert wanted["balanced"][0] - wanted["free"][0] > 1
    on_ranks(in_process, (folder, tmp_path), 2)
    for way in WAYS:
        for rank in range(2):
            found = torch.load(tmp_path / f"{way} {rank}.pt")
            assert torch.equal(found["experts"].sort(dim=-1).values, wanted["experts"].sort(dim=-1).values), way
            for name in wanted.keys() - {"experts"}:
                gap = (found[name] - wanted[name]).norm() / wanted[name].norm()
                assert gap < 2e-5, (way, rank, name, float(gap))
