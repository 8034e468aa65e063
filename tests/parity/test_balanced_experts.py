"""A toy mixture of experts whose tokens all go to one expert: it stays collapsed by itself, and learns with a balance loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from batches import sequence_batch, train_batch
from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.config.policy import OptimizerConfig
from posttrain.models import tiny
from posttrain.models.loading import load_causal_lm
from posttrain.models.routing import routers_of
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import LossPlan

ROWS, LENGTH, UPDATES = 32, 12, 300
FOLLOWING = torch.randperm(250, generator=torch.Generator().manual_seed(0))  # of every token, the token that comes next


def make_batch(seed: int) -> TrainBatch:
    tokens = [torch.randint(0, 250, (ROWS,), generator=torch.Generator().manual_seed(seed))]
    for _ in range(LENGTH):
        tokens.append(FOLLOWING[tokens[-1]])
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    lengths = torch.ones(ROWS, dtype=torch.int64)
    sequences = sequence_batch(tokens=torch.stack(tokens, dim=1), prompt_lengths=lengths, response_mask=mask)
    return train_batch(sequences, advantages=mask.float(), loss_mask=mask)


def collapsed_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LocalTrainEngine:
    """Eight experts, one per token, of which the first gets every token; only experts and router are trained."""
    shape = {"head_dim": 8, "num_experts": 8, "moe_intermediate_size": 8, "norm_topk_prob": True}
    monkeypatch.setitem(tiny.FAMILIES, "qwen3_moe", shape | {"num_experts_per_tok": 1, "tie_word_embeddings": False})
    if not folder.exists():
        tiny.write_tiny_model(folder, "qwen3_moe", layers=1)
    model = load_causal_lm(str(folder), dtype=torch.float32)
    layer, states = model.model.layers[0], []
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(0.4)  # what all tokens have in common
        layer.mlp.gate.weight.mul_(0.3)
        hook = layer.post_attention_layernorm.register_forward_hook(lambda module, given, found: states.append(found))
        LogprobScorer(model, ROWS).logprobs(make_batch(5).sequences, 1.0)
        hook.remove()
        common = torch.cat([each.flatten(0, -2) for each in states]).mean(dim=0)
        layer.mlp.gate.weight[0] += 2 * common / common.norm()
    for name, weight in model.named_parameters():
        weight.requires_grad_(".mlp." in name)
    return LocalTrainEngine(
        model,
        AutoTokenizer.from_pretrained(folder),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0),
        learning_rate_factor=lambda update: 1.0,
        sequences_per_micro_batch=ROWS,
        sequences_per_scoring_batch=ROWS,
        routers=routers_of(model, "loss.router_balance_coef"),
    )


@pytest.mark.slow
def test_a_collapsed_mixture_learns_with_a_balance_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares, losses = [], []
    for coef in (0.0, 0.03):
        engine = collapsed_model(tmp_path / "model", monkeypatch)
        plan = LossPlan(name="cross_entropy", aggregation="token_mean", temperature=1.0, router_balance_coef=coef)
        for update in range(UPDATES):
            batch = make_batch(update)
            engine.forward_backward(batch, plan, batch.counts())
            engine.optimizer_step()
        held_out = make_batch(10**6)
        counts = engine._expert_counts(held_out, routers_of(engine.model, ""))
        shares.append((counts.max() / counts.sum()).item())
        losses.append(-engine.logprobs(held_out.sequences, 1.0).mean().item())
    assert shares[0] > 0.95 and shares[1] < 0.5
    assert losses[1] < losses[0] - 0.5
