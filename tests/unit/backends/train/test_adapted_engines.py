"""Engines that train an adapter: only it learns, and only it is saved."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer

from batches import sequence_batch, train_batch
from posttrain.backends.train.local import LocalTrainEngine, LocalValueEngine
from posttrain.config.lora import LoraConfig
from posttrain.config.policy import OptimizerConfig
from posttrain.errors import ModelError
from posttrain.models.loading import load_causal_lm
from posttrain.models.lora import adapter_off, add_adapter
from posttrain.models.merging import merge_saved_adapter
from posttrain.models.value_head import load_value_model
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import LossPlan, ValueLossPlan

pytest.importorskip("peft")

OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.0, max_grad_norm=None)
PLAN = LossPlan(
    name="ppo_clip",
    parameters={"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
    aggregation="token_mean",
    temperature=1.0,
)
SCORED = {"learning_rate_factor": lambda update: 1.0, "sequences_per_micro_batch": 2}


def make_engine(
    folder: Path, *, dropout: float = 0.0, dtype: torch.dtype = torch.float32, **how: Any
) -> LocalTrainEngine:
    model = load_causal_lm(str(folder), dtype=dtype)
    add_adapter(model, LoraConfig(rank=2, dropout=dropout), seed=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return LocalTrainEngine(model, tokenizer, optimizer=OPTIMIZER, sequences_per_scoring_batch=4, **SCORED, **how)


def make_batch(seed: int = 0) -> TrainBatch:
    """Four rows: prompts of 5 tokens, responses of 6, 3, 6 and 1."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(6) < torch.tensor([6, 3, 6, 1])[:, None]
    sequences = sequence_batch(
        tokens=torch.randint(0, 256, (4, 11), generator=generator),
        prompt_lengths=torch.full((4,), 5),
        response_mask=mask,
        rollout_logprobs=torch.zeros(4, 6),
        group_index=torch.arange(4),
        sample_ids=("a", "b", "c", "d"),
    )
    advantages = torch.tensor([1.0, -1.0, 2.0, 0.5])[:, None] * mask
    return train_batch(sequences, advantages=advantages, loss_mask=mask, values=torch.zeros(4, 6), returns=advantages)


def train_once(engine: LocalTrainEngine, seed: int = 0) -> Any:
    batch = make_batch(seed)
    stats = engine.forward_backward(batch, PLAN, batch.counts())
    return stats.loss, engine.optimizer_step()


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in engine.model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_moves_the_adapter_and_nothing_else(tiny_qwen: Path, dtype: torch.dtype) -> None:
    engine = make_engine(tiny_qwen, dtype=dtype)
    before, first = weights_of(engine), engine.logprobs(make_batch().sequences, 1.0)
    train_once(engine)
    after = weights_of(engine)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    # In the first update B is 0, so the gradient of A is 0: AdamW without decay leaves it.
    assert moved == {name for name in before if "lora_B" in name}
    train_once(engine)
    assert {n for n, w in weights_of(engine).items() if not torch.equal(w, before[n])} == {
        name for name in before if "lora_" in name
    }
    assert (engine.logprobs(make_batch().sequences, 1.0) - first).abs().max() > 1e-3
    states = {id(weight) for weight in engine._optimizer.state}
    assert states == {id(weight) for name, weight in engine._masters.parameters.items() if "lora_" in name}
    assert engine.note is not None and engine.note.startswith("LoRA trains ")


def test_reference_without_a_second_model(tiny_qwen: Path) -> None:
    """Log-probs without the adapter stay those of the starting model, and the KL over the whole vocabulary has a gradient
    although policy and reference share a model."""
    engine = make_engine(tiny_qwen)
    sequences = make_batch().sequences
    start = engine.logprobs(sequences, 1.0)
    shared = LocalTrainEngine.scorer(engine.model, 4, weights=partial(adapter_off, engine.model))
    engine._reference = shared
    own = make_engine(tiny_qwen)
    own._reference = LocalTrainEngine.scorer(
        load_causal_lm(str(tiny_qwen), dtype=torch.float32), 4, weights=nullcontext
    )
    batch = make_batch()
    plan = LossPlan(**{name: getattr(PLAN, name) for name in ("name", "parameters", "aggregation", "temperature")},
                    kl_coef=0.5, kl_estimator="full")  # fmt: skip
    for _ in range(3):
        losses = [each.forward_backward(batch, plan, batch.counts()).loss for each in (engine, own)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        norms = [each.optimizer_step().grad_norm for each in (engine, own)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    torch.testing.assert_close(shared.logprobs(sequences, 1.0), start, rtol=0, atol=1e-6)
    assert (engine.logprobs(sequences, 1.0) - start).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_adapter_goes_on_bit_for_bit(tiny_qwen: Path, dtype: torch.dtype, tmp_path: Path) -> None:
    straight, resumed = (make_engine(tiny_qwen, dtype=dtype, dropout=0.3, seed=7) for _ in range(2))
    train_once(straight)
    straight.save(tmp_path)
    train_once(resumed, seed=9)
    resumed.load(tmp_path)
    assert resumed.version == 1
    assert train_once(straight, seed=1) == train_once(resumed, seed=1)
    one, other = weights_of(straight), weights_of(resumed)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_checkpoint_holds_the_adapter_alone(tiny_qwen: Path, tmp_path: Path) -> None:
    engine = make_engine(tiny_qwen)
    train_once(engine)
    folder = tmp_path / "policy"
    folder.mkdir()
    engine.save(folder)
    assert not (folder / "model.safetensors").exists()
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert len(names) == 2 * 2 * 7  # A and B, 2 layers, 7 linear layers in each
    written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert engine.saved_bytes() <= written < 3 * engine.saved_bytes()  # a tiny file is mostly headers
    assert json.loads((folder / "engine.json").read_text()) == {"updates": 1}
    merge_saved_adapter(folder, tmp_path / "merged")
    plain = LocalTrainEngine.scorer(load_causal_lm(str(tmp_path / "merged"), dtype=torch.float32), 4)
    sequences = make_batch().sequences
    torch.testing.assert_close(plain.logprobs(sequences, 1.0), engine.logprobs(sequences, 1.0), rtol=0, atol=1e-4)


def test_checkpoint_of_the_other_kind_is_refused(tiny_qwen: Path, tmp_path: Path) -> None:
    adapted = make_engine(tiny_qwen)
    whole = LocalTrainEngine(
        load_causal_lm(str(tiny_qwen), dtype=torch.float32),
        AutoTokenizer.from_pretrained(tiny_qwen),
        optimizer=OPTIMIZER,
        sequences_per_scoring_batch=4,
        **SCORED,
    )
    for saving, loading, message in (
        (adapted, whole, "holds an adapter, and this run trains the weights of a whole model"),
        (whole, adapted, "holds the weights of a whole model, and this run trains an adapter"),
    ):
        folder = tmp_path / message[:10]
        folder.mkdir()
        saving.save(folder)
        with pytest.raises(ModelError, match=message) as caught:
            loading.load(folder)
        assert caught.value.problems[0].field == "policy.lora"


def test_dropout_acts_in_updates_only_and_depends_on_seed_and_update(tiny_qwen: Path) -> None:
    batch = make_batch()

    def losses(seed: int) -> list[float]:
        engine = make_engine(tiny_qwen, dropout=0.5, seed=seed)
        train_once(engine)  # so that B is not 0
        torch.rand(3)  # what others draw changes nothing
        first = engine.forward_backward(batch, PLAN, batch.counts())
        second = engine.forward_backward(batch, PLAN, batch.counts())
        scored = engine.logprobs(batch.sequences, 1.0)
        assert torch.equal(scored, engine.logprobs(batch.sequences, 1.0))
        assert not torch.allclose(scored, first.policy_logprobs, atol=1e-4)
        return [float(first.policy_logprobs.sum()), float(second.policy_logprobs.sum())]

    one, same, other = losses(1), losses(1), losses(2)
    assert one == same and one != other and one[0] != one[1]


def test_global_random_state_is_left_alone(tiny_qwen: Path) -> None:
    engine = make_engine(tiny_qwen, dropout=0.5)
    before = torch.get_rng_state()
    train_once(engine)
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------------- the critic


def make_critic(folder: Path) -> LocalValueEngine:
    model = load_value_model(str(folder), dtype=torch.float32)
    add_adapter(model, LoraConfig(rank=2), head="score", field="critic.lora")
    return LocalValueEngine(model, AutoTokenizer.from_pretrained(folder), optimizer=OPTIMIZER, **SCORED)


def test_critic_trains_adapter_and_head_and_saves_both(tiny_qwen: Path, tmp_path: Path) -> None:
    critic, plan = make_critic(tiny_qwen), ValueLossPlan(value_clip=None, aggregation="token_mean")
    before = weights_of(critic)
    for _ in range(3):
        batch = make_batch()
        critic.forward_backward(batch, plan, batch.counts())
        critic.optimizer_step()
    moved = {name for name, weight in weights_of(critic).items() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if "lora_" in name or name.startswith("score.")}
    folder = tmp_path / "critic"
    folder.mkdir()
    critic.save(folder)
    again = make_critic(tiny_qwen)
    again.load(folder)
    values = critic.values(make_batch().sequences)
    assert torch.equal(again.values(make_batch().sequences), values) and values.abs().max() > 1e-3
    merge_saved_adapter(folder, tmp_path / "merged")
    merged = LocalValueEngine(
        load_value_model(str(tmp_path / "merged"), dtype=torch.float32), critic.tokenizer, optimizer=OPTIMIZER, **SCORED
    )
    torch.testing.assert_close(merged.values(make_batch().sequences), values, rtol=0, atol=1e-4)
