"""Routers of mixtures of experts: recorded, replayed, and balanced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from batches import train_batch
from posttrain.backends.rollout.native import NativeEngine
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.config import RunConfig
from posttrain.config.policy import OptimizerConfig
from posttrain.errors import ModelError
from posttrain.models.loading import load_causal_lm
from posttrain.models.packed_attention import shared_layout
from posttrain.models.routing import routers_of
from posttrain.models.tiny import FAMILIES, Family, tiny_tokenizer, write_tiny_model
from posttrain.plan.checks.engines import router_warnings
from posttrain.plan.checks.train import check
from posttrain.records.batches import SequenceBatch, TrainBatch
from posttrain.records.plans import LossPlan
from posttrain.records.prompts import Prompt
from posttrain.records.samples import sample_rows
from posttrain.records.trajectories import Reward, SamplingParams, ScoredGroup
from posttrain.steps.padding import pad

MIXTURES: list[Family] = [family for family, more in FAMILIES.items() if "num_experts_per_tok" in more]
PLAN = LossPlan(name="gpg", aggregation="token_mean", temperature=1.0)


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    return {family: write_tiny_model(tmp_path_factory.mktemp(family), family) for family in MIXTURES}


def engine_of(folder: Path, *, micro: int = 4, **given: Any) -> LocalTrainEngine:
    model = load_causal_lm(str(folder), dtype=torch.float32)
    return LocalTrainEngine(
        model,
        AutoTokenizer.from_pretrained(folder),
        optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=None, weight_decay=0.0),
        learning_rate_factor=lambda update: 1.0,
        sequences_per_micro_batch=micro,
        sequences_per_scoring_batch=3,
        routers=routers_of(model, "loss.router_balance_coef"),
        **given,
    )


def sampled(engine: LocalTrainEngine) -> SequenceBatch:
    """Three prompts with two responses each, sampled from the engine's own weights with their experts."""
    sampler = NativeEngine(
        engine.model, tiny_tokenizer(), max_concurrent_sequences=4, max_prefill_tokens=64, records_experts=True
    )
    prompts = [
        Prompt(prompt_id=f"p{n}", token_ids=tuple(range(65, 69 + 2 * n)), text="", data_source="") for n in range(3)
    ]
    groups = sampler.generate(prompts, SamplingParams(samples_per_prompt=2, max_response_tokens=7, seed=3))
    return pad(sample_rows([ScoredGroup(group=group, outcomes=(Reward(1.0),) * 2) for group in groups]))


def chosen_in_training(engine: LocalTrainEngine, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Experts that the trainer's pass uses, and those recorded, of the tokens that have any, [n, layers, chosen]."""
    routers = engine._routers
    assert routers is not None
    packed = engine._scorer.pack(batch)
    assert packed.experts is not None
    used: dict[int, Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda m, i, output, layer=layer: used.__setitem__(layer, output[2]))
        for layer, module in enumerate(
            each for each in engine.model.modules() if type(each).__name__.endswith("Router")
        )
    ]
    engine.logprobs(batch, 1.0)  # in micro-batches of its own
    routers.prepare(packed.experts)
    with torch.no_grad():
        engine._scorer.score(packed, 1.0)
    routers.clear()
    for hook in hooks:
        hook.remove()
    known = (packed.experts >= 0).all(dim=2).all(dim=1)
    return routers.stacked(used)[known], packed.experts[known]


@pytest.mark.parametrize("family", MIXTURES)
def test_the_trainer_uses_the_experts_of_the_sampler(mixtures: dict[Family, Path], family: Family) -> None:
    engine = engine_of(mixtures[family])
    batch = sampled(engine)
    before = engine.logprobs(batch, 1.0)
    torch.testing.assert_close(before, batch.rollout_logprobs, atol=1e-4, rtol=0)
    # every token of every row but the last of each response
    assert batch.experts is not None
    known = (batch.experts >= 0).all(dim=3).all(dim=2).sum(dim=1)
    assert known.tolist() == (batch.prompt_lengths + batch.response_lengths - 1).tolist()
    # the routers are turned around: they would choose others now
    with torch.no_grad():
        for name, weight in engine.model.named_parameters():
            if name.endswith("gate.weight"):
                weight.neg_()
    used, recorded = chosen_in_training(engine, batch)
    assert torch.equal(used, recorded)  # 0 % disagreement
    free = engine.logprobs(replace(batch, experts=None), 1.0)
    assert (free - engine.logprobs(batch, 1.0)).abs().max() > 1e-3  # what is replayed decides


def learning(batch: SequenceBatch) -> TrainBatch:
    """Advantages of 0, so that nothing but the balance loss is left; the third row has no loss token."""
    mask = batch.response_mask.clone()
    mask[2] = False
    return train_batch(batch, advantages=torch.zeros(mask.shape), loss_mask=mask)


def gradients(engine: LocalTrainEngine, batch: TrainBatch) -> tuple[float, dict[str, Tensor]]:
    stats = engine.forward_backward(batch, replace(PLAN, router_balance_coef=0.5), batch.counts())
    masters = engine._masters.parameters
    return stats.loss, {name: each.grad.clone() for name, each in masters.items() if each.grad is not None}


@pytest.mark.parametrize("family", MIXTURES)
def test_the_balance_loss_is_that_of_the_whole_mini_batch(mixtures: dict[Family, Path], family: Family) -> None:
    whole = engine_of(mixtures[family], micro=6)
    sequences = replace(sampled(whole), experts=None)
    batch = learning(sequences)
    loss, wanted = gradients(whole, batch)
    router = next(name for name in wanted if name.endswith("gate.weight"))
    assert wanted[router].norm() > 1e-6
    for how in ({"micro": 1}, {"micro": 4, "share_prompts": False}, {"micro": 2, "gradient_checkpointing": True}):
        found, mine = gradients(engine_of(mixtures[family], **how), batch)
        assert found == pytest.approx(loss, rel=1e-5)
        for name, gradient in wanted.items():
            assert (mine[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name
    assert loss == pytest.approx(0.5 * balance_by_hand(whole.model, sequences), rel=1e-5)


def balance_by_hand(model: nn.Module, batch: SequenceBatch) -> float:
    """experts x sum of f P over all response tokens but the third row's, mean over layers, sequence by sequence."""
    kept: dict[int, list[tuple[Tensor, Tensor]]] = {}
    modules = [each for each in model.modules() if type(each).__name__.endswith("Router")]
    outputs: dict[int, Any] = {}
    hooks = [
        module.register_forward_hook(lambda m, i, output, layer=layer: outputs.__setitem__(layer, output))
        for layer, module in enumerate(modules)
    ]
    width = batch.prompt_width
    for row in range(len(batch)):
        prompt, length = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        ids = batch.tokens[row, width - prompt : width + length]
        with torch.no_grad():
            model(
                input_ids=ids[None],
                position_ids=torch.arange(len(ids))[None],
                attention_layout=shared_layout(((len(ids), ()),), torch.device("cpu")),
                use_cache=False,
            )
        for layer, (logits, _, chosen) in outputs.items():
            if row != 2:
                kept.setdefault(layer, []).append((logits[prompt:].softmax(-1), chosen[prompt:]))
    for hook in hooks:
        hook.remove()
    losses = []
    for found in kept.values():
        probabilities, chosen = (torch.cat(each) for each in zip(*found, strict=True))
        experts = probabilities.shape[1]
        f = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
        losses.append(experts * (f * probabilities.mean(0)).sum().item())
    return sum(losses) / len(losses)


def test_even_use_has_a_loss_of_one() -> None:
    class TopKRouter(nn.Module):
        top_k = 2

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden @ self.weight.T
            values, chosen = logits.softmax(-1).topk(2)
            return logits, values, chosen

    model = nn.Sequential(TopKRouter())
    routers = routers_of(model, "loss.router_balance_coef")
    assert routers_of(model, "rollout.routing_replay") is routers and routers._normalized == [False]
    # tokens whose experts are 0 and 1, and 2 and 3: probabilities of a token are e^9/(2 e^9 + 2) = 0.5 for its two
    even = torch.tensor([[9.0, 9, 0, 0], [0, 0, 9, 9]])
    routers.prepare(None, torch.tensor([True, True]))
    model(even)
    assert routers.counts().tolist() == [[1, 1, 1, 1]]
    assert routers.balance(torch.full((1, 4), 0.25), 2).item() == pytest.approx(1.0)
    # all tokens to 0 and 1: f = P = (1/2, 1/2, 0, 0), 4 x (1/4 + 1/4) = 2
    routers.prepare(None, torch.tensor([True, True]))
    model(even[[0, 0]])
    assert routers.counts().tolist() == [[2, 2, 0, 0]]
    assert routers.balance(torch.tensor([[0.5, 0.5, 0, 0]]), 2).item() == pytest.approx(2.0, abs=1e-3)
    # replayed: the first token goes to 3 and 0 instead, with the weights of these; the second is not known
    routers.prepare(torch.tensor([[[3, 0]], [[-1, -1]]], dtype=torch.int16))
    logits, weights, chosen = model(even)
    assert chosen.tolist()[0] == [3, 0] and sorted(chosen.tolist()[1]) == [2, 3]
    assert weights[0].tolist() == pytest.approx([logits.softmax(-1)[0, 3].item(), 0.5], abs=1e-3)
    routers.clear()
    assert sorted(model(even)[2][0].tolist()) == [0, 1]


def test_models_without_such_routers_are_refused(tiny_llama: Path) -> None:
    model = load_causal_lm(str(tiny_llama), dtype=torch.float32)
    with pytest.raises(ModelError, match="mixture of experts, and LlamaForCausalLM has none") as error:
        routers_of(model, "loss.router_balance_coef")
    assert error.value.problems[0].field == "loss.router_balance_coef"

    class SigmoidRouter(nn.Linear):
        top_k = 1

        def forward(self, hidden: Tensor) -> Any:
            logits = super().forward(hidden)
            values, chosen = logits.sigmoid().topk(1)
            return logits, values, chosen

    with pytest.raises(ModelError, match=r"SigmoidRouter .* does not weigh experts by the softmax"):
        routers_of(nn.Sequential(SigmoidRouter(4, 3)), "rollout.routing_replay")


def test_replaying_without_a_pass_to_record_is_reported() -> None:
    def said(**sections: Any) -> list[str]:
        plain = {"model": {"path": "x"}, "data": {"train_files": ["x"]}}
        return list(router_warnings(RunConfig.model_validate(plain | sections)))

    again, epochs = {"routing_replay": True}, {"epochs_per_step": 2}
    assert said(policy=epochs) == said(policy=again | epochs) == []
    assert said(policy=again) == [
        "policy.routing_replay has no effect: a step makes one update, whose own pass computes the old log-probs"
    ]
    [text] = said(policy=again | epochs, loss={"rollout_correction": {"use_rollout_logprobs": True}})
    assert "the sampler's log-probs are the old ones" in text


def test_runs_that_cannot_replay_or_balance_say_so() -> None:
    def said(**sections: Any) -> list[str]:
        plain = {"model": {"path": "x"}, "data": {"train_files": ["x"]}}
        return [problem.what for problem in check(RunConfig.model_validate(plain | sections))]

    two, replay = {"placement": {"devices": 2}}, {"rollout": {"routing_replay": True}}
    assert said(**replay) == said(**two, **replay, policy={"engine": "fsdp"}) == []
    assert said(**two, **replay, policy={"engine": "megatron"}) == []
    assert said(**two, loss={"router_balance_coef": 0.1}, policy={"engine": "megatron"}) == []
    assert said(**two, loss={"router_balance_coef": 0.1}, policy={"engine": "deepspeed"}) == [
        "loss.router_balance_coef is not supported by policy.engine=deepspeed"
    ]
    again = {"routing_replay": True}
    assert said(**two, policy={"engine": "deepspeed", **again}) == [
        "policy.routing_replay is not supported by policy.engine=deepspeed"
    ]
    assert said(**two, policy={"engine": "megatron", "pipeline_parallel": 2, **again}) == []
    assert said(**replay, policy=again) == [
        "policy.routing_replay and rollout.routing_replay replay two choices of experts: that of the old log-probs, and the "
        "sampler's"
    ]
    shared = {"sequence_parallel": 2}
    assert said(**two, loss={"router_balance_coef": 0.1}, policy={"engine": "fsdp", **shared}) == []
    assert said(**two, **replay, policy={"engine": "fsdp", **shared}) == []
    assert said(**two, policy={"engine": "megatron", **shared, **again}) == []
    assert said(rollout={"routing_replay": True, "engine": "hf"}) == [
        "rollout.routing_replay: rollout.engine=hf does not report the experts of its tokens"
    ]
    assert "rollout.routing_replay is for single-turn responses: experts are not kept from turn to turn" in said(
        **replay, environment={"name": "guess_number"}
    )
