"""megatron-core's routers get the losses that autograd gives for the same model of transformers, row by row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_update_paths import PLAN, make_batch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.config.policy import OptimizerConfig
from posttrain.models.loading import load_causal_lm
from posttrain.models.tiny import write_tiny_model
from posttrain.records.batches import TrainBatch
from posttrain.registry import is_installed
from warm.processes import on_ranks

WARM = ("posttrain.backends.train.megatron",)  # see conftest.py
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_installed("megatron"), reason="needs megatron-core")]
BALANCE, SMALL = 0.7, 0.05
WAYS: dict[str, dict[str, Any]] = {
    "experts 2": {"parallel": 2},
    "tokens shared": {"tensor": 2},
    "stages": {"pipeline": 2},
    "stages recomputed": {"pipeline": 2, "how": {"gradient_checkpointing": True}},
    "sequences split": {"context": 2},
}


def quiet_batch() -> TrainBatch:
    """Rows whose own loss is 0: routers' losses alone have a gradient."""
    batch = make_batch(0)
    return replace(batch, advantages=torch.zeros_like(batch.advantages))


def by_hand(folder: Path) -> Tensor:
    """The loss, its two means over layers, and the norm of its gradient."""
    model, rows = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), quiet_batch().sequences
    found = []
    for row, prompt in enumerate(rows.prompt_lengths.tolist()):
        length = int(rows.response_mask[row].sum())
        tokens = rows.tokens[row, rows.prompt_width - prompt : rows.prompt_width + length]
        logits = model(input_ids=tokens[None], output_router_logits=True).router_logits
        found.append(torch.stack([layer[prompt:] for layer in logits]))  # [layers, response, experts]
    logits = torch.cat(found, dim=1)
    tokens, experts = logits.shape[1:]
    balance = []
    for layer in logits:
        assigned = layer.topk(2).indices.flatten().bincount(minlength=experts) / (2 * tokens)
        balance.append(experts * (assigned * layer.softmax(-1).mean(0)).sum())
    small = logits.logsumexp(-1).square().mean(1)
    loss = BALANCE * torch.stack(balance).sum() + SMALL * small.sum()
    loss.backward()
    norm = torch.stack([weight.grad.norm() for weight in model.parameters() if weight.grad is not None]).norm()
    return torch.stack([loss.detach(), torch.stack(balance).detach().mean(), small.detach().mean(), norm])


def by_megatron(folder: Path, about: dict[str, Any]) -> Tensor:
    from posttrain.backends.train.megatron import MegatronTrainEngine
    from posttrain.backends.train.megatron.sharding import MegatronSharding
    from posttrain.plan.engines.megatron.experts import ExpertSettings
    from posttrain.plan.engines.megatron.options import MegatronSettings

    experts = ExpertSettings(parallel=about.get("parallel", 1), balance=BALANCE, small_logits=SMALL)
    sizes = {name: about.get(name, 1) for name in ("tensor", "pipeline", "context")}
    engine = MegatronTrainEngine(
        load_causal_lm(str(folder), dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
        optimizer=OptimizerConfig(lr=1e-2),
        learning_rate_factor=lambda update: 1.0,
        sequences_per_micro_batch=3,
        sequences_per_scoring_batch=3,
        sharding=MegatronSharding(torch.device("cpu"), settings=MegatronSettings(experts=experts), **sizes),
        **about.get("how", {}),
    )
    batch, plan = quiet_batch(), replace(PLAN, entropy_coef=0.0, kl_coef=0.0)
    counts = batch.counts()
    stats = engine.forward_backward(batch, plan, counts)
    means = [stats.sums[f"policy/router_{name}"] / counts.tokens for name in ("balance", "small_logits")]
    return torch.tensor([stats.loss, *means, engine.optimizer_step().grad_norm])


def in_process(rank: int, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    for way, about in WAYS.items():
        dist.init_process_group("gloo", init_method=f"file://{out}/{way}", rank=rank, world_size=2)
        torch.save(by_megatron(folder, about), out / f"{way} {rank}.pt")
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def test_routers_get_their_losses_however_they_are_split(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen3_moe")
    wanted = by_hand(folder)
    assert 1 < wanted[1] < 2 and wanted[3] > 1e-2
    on_ranks(in_process, (folder, tmp_path), 2)
    for way in WAYS:
        for rank in range(2):
            found = torch.load(tmp_path / f"{way} {rank}.pt")
            assert torch.allclose(found, wanted, rtol=2e-5), (way, rank, found, wanted)
