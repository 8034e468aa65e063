"""The one-device critic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, AutoTokenizer

from batches import sequence_batch, train_batch
from posttrain.backends.train.local import LocalValueEngine
from posttrain.config.policy import OptimizerConfig
from posttrain.errors import ModelError
from posttrain.models import attention as attention_module
from posttrain.models.tiny import draw_weights
from posttrain.models.value_head import load_value_model, value_head
from posttrain.records.batches import SequenceBatch, TrainBatch
from posttrain.records.plans import ValueLossPlan
from posttrain.records.statistics import OptimizerStats

# Two groups of three that share a prompt each; the second row is invalid, the fourth has a hole (a tool's answer).
PROMPTS, RESPONSES = [4, 4, 4, 7, 7, 7], [5, 8, 2, 8, 1, 3]
HOLE = (3, slice(2, 5))


@pytest.fixture(scope="module")
def critic_folder(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token classification model with a random head, so that every weight matters from the first update."""
    folder = tmp_path_factory.mktemp("critic")
    model = AutoModelForTokenClassification.from_pretrained(tiny_qwen, num_labels=1)
    draw_weights(model.score, 3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_qwen).save_pretrained(folder)
    return folder


def make_critic(
    folder: Path, *, dtype: torch.dtype = torch.float32, micro: int = 4, **options: Any
) -> LocalValueEngine:
    optimizer = {"lr": 1e-2, "weight_decay": 0.0, "max_grad_norm": None, **options.pop("optimizer", {})}
    return LocalValueEngine(
        load_value_model(str(folder), dtype=dtype),
        AutoTokenizer.from_pretrained(folder),
        optimizer=OptimizerConfig(**optimizer),
        learning_rate_factor=lambda update_number: 1.0,
        sequences_per_micro_batch=micro,
        **options,
    )


def make_batch(seed: int = 0) -> TrainBatch:
    generator = torch.Generator().manual_seed(seed)
    rows, width, length = len(PROMPTS), max(PROMPTS), max(RESPONSES)
    mask = torch.arange(length) < torch.tensor(RESPONSES)[:, None]
    mask[HOLE] = False
    tokens = torch.randint(0, 256, (rows, width + length), generator=generator)
    tokens[1:3, :width] = tokens[0, :width]
    tokens[4:6, :width] = tokens[3, :width]
    valid = torch.tensor([True, False, True, True, True, True])
    sequences = sequence_batch(
        tokens=tokens,
        prompt_lengths=torch.tensor(PROMPTS),
        response_mask=mask,
        rollout_logprobs=torch.zeros(rows, length),
        group_index=torch.tensor([0, 0, 0, 1, 1, 1]),
        sample_ids=tuple(f"p:{row}/0" for row in range(rows)),
    )
    values = torch.where(mask, torch.randn(rows, length, generator=generator), 0.0)
    returns = torch.where(mask, torch.randn(rows, length, generator=generator), 0.0)
    loss_mask = mask & valid[:, None]
    return train_batch(sequences, loss_mask=loss_mask, values=values, returns=returns)


def plan(value_clip: float | None = 0.5, aggregation: str = "token_mean") -> ValueLossPlan:
    return ValueLossPlan(value_clip=value_clip, aggregation=aggregation)


def train_once(critic: LocalValueEngine, batch: TrainBatch | None = None) -> tuple[float, OptimizerStats]:
    """The loss and what the optimizer says."""
    batch = batch or make_batch()
    return critic.forward_backward(batch, plan(), batch.counts()).loss, critic.optimizer_step()


def weights_of(critic: LocalValueEngine) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in critic.model.named_parameters()}


def gradients_of(critic: LocalValueEngine) -> dict[str, Tensor]:
    return {name: master.grad.clone() for name, master in critic._masters.parameters.items() if master.grad is not None}


def unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def plain_values(folder: Path, batch: SequenceBatch) -> tuple[Any, list[Tensor]]:
    """transformers' own model in float64, a row at a time: the head's output at the token before each response token."""
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float64).eval()
    values = []
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        tokens = batch.tokens[row, batch.prompt_width - prompt : batch.prompt_width + response]
        values.append(model(tokens[None]).logits[0, prompt - 1 : -1, 0])
    return model, values


# ---------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("micro", [1, 4, 6])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_values_are_the_heads_output_one_token_earlier(critic_folder: Path, micro: int, share_prompts: bool) -> None:
    batch = make_batch().sequences
    values = make_critic(critic_folder, micro=micro, share_prompts=share_prompts).values(batch)
    assert values.dtype == torch.float32 and values.shape == (6, 8) and not values.requires_grad
    _, expected = plain_values(critic_folder, batch)
    for row, length in enumerate(RESPONSES):
        mask = batch.response_mask[row, :length]
        torch.testing.assert_close(values[row, :length][mask].double(), expected[row].detach()[mask], rtol=0, atol=2e-5)
    assert not values[~batch.response_mask].any()


# ------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("value_clip", [0.5, None])
@pytest.mark.parametrize("micro", [1, 4, 6])
def test_loss_and_gradient_equal_the_plain_calculation(
    critic_folder: Path, value_clip: float | None, micro: int
) -> None:
    batch = make_batch()
    critic = make_critic(critic_folder, micro=micro)
    stats = critic.forward_backward(batch, plan(value_clip), batch.counts())

    model, values = plain_values(critic_folder, batch.sequences)
    assert batch.critic is not None
    terms, clipped = [], 0
    for row, length in enumerate(RESPONSES):
        for t in range(length):
            if not batch.loss_mask[row, t]:
                continue
            new, old = values[row][t], batch.critic.values[row, t].double()
            target = batch.critic.returns[row, t].double()
            term = (new - target) ** 2
            if value_clip is not None:
                near = (torch.clamp(new - old, -value_clip, value_clip) + old - target) ** 2
                clipped += int(near > term)
                term = torch.maximum(term, near)
            terms.append(term / 2)
    assert len(terms) == stats.tokens == 5 + 2 + (8 - 3) + 1 + 3  # the second row is invalid, three tokens are a tool's
    loss = torch.stack(terms).sum() / len(terms)
    loss.backward()
    assert stats.loss == pytest.approx(loss.item(), rel=1e-5)
    assert stats.sums == {"critic/value_clip_fraction": clipped}
    if value_clip is not None:
        assert 0 < clipped < len(terms)
    mine = gradients_of(critic)
    for name, weight in model.named_parameters():
        assert (mine[name].double() - weight.grad).norm() < 2e-5 * weight.grad.norm(), name


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"])
def test_splitting_and_sharing_change_rounding_only(critic_folder: Path, aggregation: str) -> None:
    batch = make_batch()
    losses, gradients = [], []
    for micro, share in ((6, True), (6, False), (4, True), (1, False)):
        critic = make_critic(critic_folder, micro=micro, share_prompts=share)
        losses.append(critic.forward_backward(batch, plan(aggregation=aggregation), batch.counts()).loss)
        gradients.append(gradients_of(critic))
    assert losses[1:] == pytest.approx([losses[0]] * 3, rel=1e-5)
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            assert (other[name] - gradient).norm() < 1e-5 * gradient.norm(), name


def test_a_token_budget_changes_rounding_only(critic_folder: Path) -> None:
    """21 tokens: the rows of a prompt (4 + 15 and 7 + 12 tokens) stay together."""
    batch = make_batch()
    by_count = make_critic(critic_folder)
    by_tokens = make_critic(critic_folder, micro=1, max_tokens_per_micro_batch=21)
    values = by_count.values(batch.sequences)
    torch.testing.assert_close(by_tokens.values(batch.sequences), values, rtol=0, atol=1e-5)
    for critic in (by_count, by_tokens):
        critic.forward_backward(batch, plan(), batch.counts())
    other = gradients_of(by_tokens)
    for name, gradient in gradients_of(by_count).items():
        assert (other[name] - gradient).norm() < 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("garbage", [float("nan"), 1e4])
def test_garbage_behind_the_mask_stays_there(critic_folder: Path, garbage: float) -> None:
    """In the padding, in the tool's answer and in the whole invalid row: old values and returns are never read there."""
    clean, dirty = make_batch(), make_batch()
    assert dirty.critic is not None
    dirty.critic.values[~dirty.loss_mask] = garbage
    dirty.critic.returns[~dirty.loss_mask] = garbage
    critics = [make_critic(critic_folder) for _ in range(2)]
    results = [train_once(critic, batch) for critic, batch in zip(critics, (clean, dirty), strict=True)]
    assert results[0] == results[1]
    assert unequal(weights_of(critics[0]), weights_of(critics[1])) == []


def test_padding_tokens_are_not_read(critic_folder: Path) -> None:
    batch = make_batch().sequences
    width = batch.prompt_width
    column = torch.arange(batch.tokens.shape[1])
    ends = width + torch.tensor(RESPONSES)
    padding = (column < width - batch.prompt_lengths[:, None]) | (column >= ends[:, None])
    other = replace(batch, tokens=torch.where(padding, 255 - batch.tokens, batch.tokens))
    assert (other.tokens != batch.tokens).any()
    critic = make_critic(critic_folder)
    assert torch.equal(critic.values(other), critic.values(batch))


def test_a_batch_without_a_loss_token_has_loss_and_gradient_zero(critic_folder: Path) -> None:
    batch = make_batch()
    batch = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    critic = make_critic(critic_folder)
    stats = critic.forward_backward(batch, plan(), batch.counts())
    assert (stats.loss, stats.tokens) == (0.0, 0)
    assert not any(gradient.any() for gradient in gradients_of(critic).values())


def test_a_batch_without_any_response_token_is_no_error(critic_folder: Path) -> None:
    batch = make_batch()
    nothing = torch.zeros_like(batch.loss_mask)
    batch = replace(batch, sequences=replace(batch.sequences, response_mask=nothing), loss_mask=nothing)
    critic = make_critic(critic_folder)
    assert not critic.values(batch.sequences).any()
    assert critic.forward_backward(batch, plan(), batch.counts()).loss == 0.0


def test_a_new_head_learns_first_and_pulls_the_body_from_the_second_update_on(tiny_qwen: Path) -> None:
    critic = make_critic(tiny_qwen)
    batch = make_batch()
    critic.forward_backward(batch, plan(None), batch.counts())
    moved = {name for name, gradient in gradients_of(critic).items() if gradient.any()}
    assert moved == {"score.weight", "score.bias"}
    critic.optimizer_step()
    critic.forward_backward(batch, plan(None), batch.counts())
    assert all(gradient.any() for name, gradient in gradients_of(critic).items() if "norm" in name)


def test_a_critic_learns_constant_returns(tiny_qwen: Path) -> None:
    batch = make_batch()
    assert batch.critic is not None
    batch = replace(batch, critic=replace(batch.critic, returns=torch.where(batch.loss_mask, 0.7, 0.0)))
    critic = make_critic(tiny_qwen)
    for _ in range(40):
        critic.forward_backward(batch, plan(None), batch.counts())
        critic.optimizer_step()
    assert (critic.values(batch.sequences) - 0.7)[batch.loss_mask].abs().max() < 0.05


# ---------------------------------------------------------------------------------------------- gradient checkpointing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_checkpointing_changes_no_bit_and_does_recompute(
    critic_folder: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    attend = attention_module.attend_packed
    monkeypatch.setattr(attention_module, "attend_packed", lambda *args: (calls.append(1), attend(*args))[1])
    results = {}
    for on in (False, True):
        critic = make_critic(critic_folder, dtype=dtype, gradient_checkpointing=on)
        calls.clear()
        batch = make_batch()
        loss = critic.forward_backward(batch, plan(), batch.counts()).loss
        results[on] = (gradients_of(critic), loss, len(calls))
        assert not any(module.training for module in critic.model.modules())
    assert unequal(results[True][0], results[False][0]) == []
    assert results[True][1] == results[False][1]
    assert (results[False][2], results[True][2]) == (4, 8)  # 2 micro-batches x 2 layers, each once more going back


# ----------------------------------------------------------------------------------------------- saving and loading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_critic_goes_on_bit_for_bit(critic_folder: Path, dtype: torch.dtype, tmp_path: Path) -> None:
    straight, resumed = make_critic(critic_folder, dtype=dtype), make_critic(critic_folder, dtype=dtype)
    train_once(straight, make_batch(0))
    straight.save(tmp_path)
    train_once(resumed, make_batch(9))  # whatever it held before is replaced
    resumed.load(tmp_path)
    assert resumed.version == straight.version == 1
    assert train_once(straight, make_batch(1)) == train_once(resumed, make_batch(1))
    masters = [dict(critic._masters.parameters) for critic in (straight, resumed)]
    assert unequal(*masters) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_folder_is_a_plain_token_classification_model(
    critic_folder: Path, dtype: torch.dtype, tmp_path: Path
) -> None:
    critic = make_critic(critic_folder, dtype=dtype)
    train_once(critic)
    critic.save(tmp_path)
    plain, report = AutoModelForTokenClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert (plain.num_labels, plain.dtype) == (1, torch.float32)
    assert unequal(dict(plain.named_parameters()), dict(critic._masters.parameters)) == []
    assert "posttrain" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    assert value_head(critic.model).weight.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == critic.tokenizer.chat_template


def test_a_policys_checkpoint_is_not_a_critics(critic_folder: Path, tiny_llama: Path, tmp_path: Path) -> None:
    make_critic(tiny_llama).save(tmp_path)
    with pytest.raises(ModelError, match=r"set critic\.path back, or name another run\.folder"):
        make_critic(critic_folder).load(tmp_path)
