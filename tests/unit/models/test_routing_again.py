"""Updates that use the experts which tokens had while old log-probs were computed (policy.routing_replay, R2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.unit.models.test_routing import MIXTURES, PLAN, chosen_in_training, engine_of, sampled
from torch import Tensor

from batches import train_batch
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.models.tiny import Family, write_tiny_model
from posttrain.records.batches import SequenceBatch, TrainBatch


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    return {family: write_tiny_model(tmp_path_factory.mktemp(family), family) for family in MIXTURES}


def turn_routers_around(engine: LocalTrainEngine) -> None:
    """Let every router choose other experts than before."""
    with torch.no_grad():
        for name, weight in engine.model.named_parameters():
            if name.endswith("gate.weight"):
                weight.neg_()


def gradient(engine: LocalTrainEngine, batch: SequenceBatch) -> dict[str, Tensor]:
    rows: TrainBatch = train_batch(batch, advantages=torch.ones(batch.response_mask.shape))
    engine.forward_backward(rows, PLAN, rows.counts())
    found = {name: each.grad.clone() for name, each in engine._masters.parameters.items() if each.grad is not None}
    engine.zero_grad()
    return found


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("how", [{}, {"share_prompts": False}, {"padded": True}], ids=str)
def test_the_update_uses_the_experts_of_the_old_logprobs(
    mixtures: dict[Family, Path], family: Family, how: dict[str, bool]
) -> None:
    engine = engine_of(mixtures[family], **how)
    plain = replace(sampled(engine), experts=None)
    expected = engine.logprobs(plain, 1.0)
    old, experts = engine.logprobs_and_experts(plain, 1.0)
    assert torch.equal(old, expected)  # one pass gives both
    batch = replace(plain, experts=experts)
    # every token of every row, prompts that rows share included
    tokens = (experts >= 0).all(dim=3).all(dim=2).sum(dim=1)
    assert tokens.tolist() == (batch.prompt_lengths + batch.response_lengths).tolist()
    same = gradient(engine, plain)
    for name, values in gradient(engine, batch).items():
        assert torch.allclose(values, same[name], atol=1e-6)  # nothing has changed between the passes yet
    turn_routers_around(engine)
    used, recorded = chosen_in_training(engine, batch)
    assert torch.equal(used, recorded)  # 0 % disagreement
    replayed, free = gradient(engine, batch), gradient(engine, plain)
    experts_of = [name for name in free if ".experts." in name]
    assert experts_of and all((replayed[name] - free[name]).norm() > 0.01 * free[name].norm() for name in experts_of)


def test_rows_in_another_order_keep_their_experts(mixtures: dict[Family, Path]) -> None:
    """Mini-batches are drawn: a row has its experts wherever it is packed, and whichever row shares its prompt."""
    engine = engine_of(mixtures["qwen3_moe"])
    batch = replace(sampled(engine), experts=None)
    _, experts = engine.logprobs_and_experts(batch, 1.0)
    turn_routers_around(engine)
    order = [5, 0, 3, 1, 4, 2]
    mixed = replace(batch, experts=experts).rows(order)
    used, recorded = chosen_in_training(engine, mixed)
    assert torch.equal(used, recorded)
    # with the experts and weights of the others turned around, a log-prob differs by router weights alone
    again, _ = engine.logprobs_and_experts(batch.rows(order), 1.0)
    assert not torch.allclose(engine.logprobs(mixed, 1.0), again, atol=1e-3)
