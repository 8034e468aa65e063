"""The one-device training engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from batches import sequence_batch, train_batch
from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.backends.torch_training.sharding import Sharding
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.config.policy import OptimizerConfig
from posttrain.errors import ModelError, RequestError
from posttrain.models import attention as attention_module
from posttrain.models.loading import load_causal_lm
from posttrain.models.tiny import draw_weights, tiny_tokenizer, write_tiny_model
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import LossPlan
from posttrain.records.statistics import ForwardBackwardStats, OptimizerStats

PROMPTS, RESPONSES = [4, 1, 9, 6, 2, 5], [5, 8, 2, 8, 1, 3]


def make_engine(
    folder: Path, *, dtype: torch.dtype = torch.float32, micro: int | None = 4, **options: Any
) -> LocalTrainEngine:
    optimizer = OptimizerConfig(
        **{"lr": 1e-2, "weight_decay": 0.0, "max_grad_norm": None, **options.pop("optimizer", {})}
    )
    return LocalTrainEngine(
        load_causal_lm(str(folder), dtype=dtype),
        AutoTokenizer.from_pretrained(folder),
        optimizer=optimizer,
        learning_rate_factor=options.pop("learning_rate_factor", lambda update_number: 1.0),
        sequences_per_micro_batch=micro,
        sequences_per_scoring_batch=4,
        **options,
    )


def make_batch(seed: int = 0) -> TrainBatch:
    """Six rows of random tokens and advantages; the second is invalid, the fourth has advantage 0."""
    generator = torch.Generator().manual_seed(seed)
    rows, width, length = len(PROMPTS), max(PROMPTS), max(RESPONSES)
    mask = torch.arange(length) < torch.tensor(RESPONSES)[:, None]
    valid = torch.tensor([True, False, True, True, True, True])
    advantages = torch.tensor([1.0, 0.0, -1.0, 0.0, 2.0, -0.5])[:, None] * mask
    sequences = sequence_batch(
        tokens=torch.randint(0, 256, (rows, width + length), generator=generator),
        prompt_lengths=torch.tensor(PROMPTS),
        response_mask=mask,
        rollout_logprobs=torch.zeros(rows, length),
        group_index=torch.arange(rows),
        sample_ids=tuple(f"p:{row}/0" for row in range(rows)),
    )
    return train_batch(sequences, advantages=advantages, loss_mask=mask & valid[:, None])


def loss_plan(**options: Any) -> LossPlan:
    parameters = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    return LossPlan(
        **{"name": "ppo_clip", "parameters": parameters, "aggregation": "token_mean", "temperature": 1.0, **options}
    )


def train_once(
    engine: LocalTrainEngine, batch: TrainBatch | None = None, **loss: Any
) -> tuple[ForwardBackwardStats, OptimizerStats]:
    batch = batch or make_batch()
    stats = engine.forward_backward(batch, loss_plan(**loss), batch.counts())
    return stats, engine.optimizer_step()


def weights_of(engine: LocalTrainEngine) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in engine.model.named_parameters()}


def gradients_of(engine: LocalTrainEngine) -> dict[str, Tensor]:
    return {name: master.grad.clone() for name, master in engine._masters.parameters.items() if master.grad is not None}


def unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


# ------------------------------------------------------------------------------------------------------- gradients


def plain_logprobs_and_entropies(folder: Path, batch: TrainBatch) -> tuple[Any, list[Tensor], list[Tensor]]:
    """From the unmodified model, a row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    logprobs, entropies = [], []
    sequences = batch.sequences
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        tokens = sequences.tokens[row, sequences.prompt_width - prompt : sequences.prompt_width + response]
        log_p = model(tokens[None]).logits[0, prompt - 1 : -1].log_softmax(-1)
        logprobs.append(log_p[torch.arange(response), tokens[prompt:]])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return model, logprobs, entropies


def test_scoring_gives_the_logprobs_of_the_plain_model_and_zero_elsewhere(tiny_qwen: Path) -> None:
    batch = make_batch()
    scores = make_engine(tiny_qwen).logprobs(batch.sequences, 1.0)
    assert scores.dtype == torch.float32 and not scores.requires_grad
    _, expected, _ = plain_logprobs_and_entropies(tiny_qwen, batch)
    for row, length in enumerate(RESPONSES):
        torch.testing.assert_close(scores[row, :length], expected[row].detach(), rtol=0, atol=2e-5)
        assert not scores[row, length:].any()


@pytest.mark.parametrize("what", ["entropy", "kl"])
def test_gradient_of_entropy_bonus_and_of_kl(tiny_llama: Path, what: str) -> None:
    """With all advantages 0 nothing else is left in the loss: -0.5 * mean entropy, or 0.5 * mean k2 to given log-probs."""
    batch = make_batch()
    reference = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(1)) - 5
    batch = train_batch(sequences=batch.sequences, loss_mask=batch.loss_mask, ref=reference)
    options = {"entropy_coef": 0.5} if what == "entropy" else {"kl_coef": 0.5, "kl_estimator": "k2"}
    engine = make_engine(tiny_llama, micro=2)
    stats = engine.forward_backward(batch, loss_plan(**options), batch.counts())

    model, logprobs, entropies = plain_logprobs_and_entropies(tiny_llama, batch)
    used = [0, 2, 3, 4, 5]
    tokens = sum(RESPONSES[row] for row in used)  # 5 + 2 + 8 + 1 + 3 = 19
    if what == "entropy":
        mean = torch.cat([entropies[row] for row in used]).sum() / tokens
        loss = -0.5 * mean
        assert stats.sums["policy/entropy"] / stats.tokens == pytest.approx(mean.item(), rel=1e-5)
    else:
        squares = [(logprobs[row] - reference[row, : RESPONSES[row]]).square() / 2 for row in used]
        mean = torch.cat(squares).sum() / tokens
        loss = 0.5 * mean
        assert stats.sums["reference/kl"] / stats.tokens == pytest.approx(mean.item(), rel=1e-5)
    loss.backward()
    assert stats.tokens == tokens == 19
    assert stats.loss == pytest.approx(loss.item(), rel=1e-5)
    mine = gradients_of(engine)
    for name, weight in model.named_parameters():
        assert (mine[name] - weight.grad).norm() < 2e-5 * weight.grad.norm(), name


def test_gradients_of_several_calls_add_up_until_cleared(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    batch = make_batch()
    engine.forward_backward(batch, loss_plan(), batch.counts())
    once = gradients_of(engine)
    engine.forward_backward(batch, loss_plan(), batch.counts())
    for name, gradient in gradients_of(engine).items():
        torch.testing.assert_close(gradient, 2 * once[name], rtol=1e-5, atol=1e-7)
    engine.zero_grad()
    assert gradients_of(engine) == {}


def test_policy_logprobs_of_an_update_are_those_before_it(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    before = engine.logprobs(make_batch().sequences, 1.0)
    stats, _ = train_once(engine)
    torch.testing.assert_close(stats.policy_logprobs, before, rtol=0, atol=2e-5)
    assert (engine.logprobs(make_batch().sequences, 1.0) - before).abs().max() > 1e-3


SPLITS: list[dict[str, Any]] = [
    {"micro": 1},
    {"micro": 6},
    {"micro": None, "max_tokens_per_micro_batch": 14},  # rows of 9, 9, 11, 14, 3 and 8 tokens
    {"micro": None, "max_tokens_per_micro_batch": 30},
    {"micro": None, "max_tokens_per_micro_batch": 1000},
]


@pytest.mark.parametrize("split", SPLITS)
def test_loss_gradient_and_order_of_results_do_not_depend_on_the_split(tiny_llama: Path, split: dict[str, Any]) -> None:
    batch = make_batch()
    one, other = make_engine(tiny_llama, micro=3), make_engine(tiny_llama, **split)
    options = {"entropy_coef": 0.1, "temperature": 0.8}
    wanted = one.forward_backward(batch, loss_plan(**options), batch.counts())
    stats = other.forward_backward(batch, loss_plan(**options), batch.counts())
    assert stats.loss == pytest.approx(wanted.loss, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(stats.policy_logprobs, wanted.policy_logprobs, rtol=0, atol=1e-5)
    mine, theirs = gradients_of(other), gradients_of(one)
    for name, gradient in theirs.items():
        assert (mine[name] - gradient).norm() < 2e-6 * gradient.norm(), name


class AlwaysBackward(Sharding):
    skips_backward = False


def backward_passes(engine: LocalTrainEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one with every backward pass."""
    backward, seen = engine._masters.backward, []

    def noted(loss: Tensor) -> None:
        seen.append(len(seen))
        backward(loss)

    monkeypatch.setattr(engine._masters, "backward", noted)
    return seen


def with_advantages(batch: TrainBatch, *numbers: float) -> TrainBatch:
    return replace(batch, advantages=torch.tensor(numbers)[:, None] * batch.sequences.response_mask)


@pytest.mark.parametrize(
    "numbers, terms, passes",
    [
        # Two rows learn, four do not: 1 and 2 micro-batches of two rows, and only the first needs a gradient
        ((1.0, 0.0, -1.0, 0.0, 0.0, 0.0), {}, 1),
        # Nothing moves the policy. One pass gives the gradients of 0 that an update's weight decay needs
        ((0.0,) * 6, {}, 1),
        # Zeros are no reason where another term moves the policy
        ((1.0, 0.0, -1.0, 0.0, 0.0, 0.0), {"entropy_coef": 0.01}, 3),
        ((0.0,) * 6, {"kl_coef": 0.1}, 3),
        # A loss that does move where advantages are 0, which its gradient tells
        ((1.0, 0.0, -1.0, 0.0, 0.0, 0.0), {"name": "dro", "parameters": {"dro_beta": 0.1}}, 3),
    ],
)
def test_rows_that_move_nothing_need_no_backward_pass(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, numbers: Any, terms: dict[str, Any], passes: int
) -> None:
    outcomes = []
    for how in ({}, {"sharding": AlwaysBackward()}):
        engine = make_engine(tiny_llama, micro=2, optimizer={"weight_decay": 0.1}, **how)
        train_once(engine)  # moments that are not 0
        batch = with_advantages(make_batch(), *numbers)
        old = engine.logprobs(batch.sequences, 1.0) - 0.1 * batch.sequences.response_mask
        batch = replace(batch, logprobs=replace(batch.logprobs, old=old, ref=old))
        made = backward_passes(engine, monkeypatch)
        stats, step = train_once(engine, batch, **terms)
        outcomes.append((stats.loss, stats.sums, step.grad_norm, weights_of(engine), len(made)))
    (loss, sums, norm, weights, made), (every_loss, every_sums, every_norm, every_weight, every_made) = outcomes
    assert made == passes and every_made == 3
    assert loss == pytest.approx(every_loss, rel=1e-5, abs=1e-9) and norm == pytest.approx(every_norm, rel=1e-5)
    assert sums == pytest.approx(every_sums, rel=1e-5, abs=1e-7)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, every_weight[name], rtol=1e-5, atol=1e-6)


def test_a_loss_without_a_gradient_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def frozen(policy_logprobs, advantages, mask):\n    return -(policy_logprobs.detach() * advantages), {}\n"
    )
    with pytest.raises(RequestError, match=r"the loss frozen of .*mine\.py does not depend on policy_logprobs"):
        train_once(make_engine(tiny_llama), name="frozen", path=str(file), parameters={})


def test_entropies_are_those_of_the_tokens_distributions(tiny_llama: Path) -> None:
    batch = make_batch()
    _, _, expected = plain_logprobs_and_entropies(tiny_llama, batch)
    found = make_engine(tiny_llama).entropies(batch.sequences, 1.0)
    for row, (length, wanted) in enumerate(zip(RESPONSES, expected, strict=True)):
        torch.testing.assert_close(found[row, :length], wanted.detach(), rtol=0, atol=1e-4)
        assert not found[row, length:].any()


def test_scoring_by_tokens_gives_rows_in_order(tiny_llama: Path) -> None:
    batch = make_batch().sequences
    by_count = make_engine(tiny_llama)
    by_tokens = make_engine(tiny_llama, max_tokens_per_scoring_batch=14)
    for score in ("logprobs", "sum_pi_squared"):
        mine, theirs = (getattr(engine, score)(batch, 0.9) for engine in (by_tokens, by_count))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    assert theirs[batch.response_mask].min() > 0 and theirs.max() <= 1
    assert not theirs[~batch.response_mask].any()


# ----------------------------------------------------------------------------------- the KL over the whole vocabulary


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("other_llama"), "llama", seed=1)


def test_full_kl_for_the_reward(tiny_llama: Path, other_llama: Path) -> None:
    """Without gradient, token by token, in micro-batches of its own: sum p (log p - log q) from the unmodified models."""
    batch = make_batch()
    frozen = load_causal_lm(str(other_llama), dtype=torch.float32).requires_grad_(False)
    engine = make_engine(tiny_llama, reference=LogprobScorer(frozen, 4))
    found = engine.reference_kl(batch.sequences, 0.7)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny_llama, other_llama)]
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        begin = batch.sequences.prompt_width - prompt
        ids = batch.sequences.tokens[row, begin : begin + prompt + response]
        with torch.no_grad():
            p, q = ((model(ids[None]).logits[0] / 0.7).log_softmax(-1)[prompt - 1 : -1] for model in models)
        torch.testing.assert_close(found[row, :response], (p.exp() * (p - q)).sum(-1), rtol=0, atol=1e-4)
        assert not found[row, response:].any()


@pytest.mark.parametrize("logits", ["never whole", "whole"])
def test_full_kl_in_the_loss(tiny_llama: Path, other_llama: Path, logits: str) -> None:
    """With all advantages 0 the loss is 0.5 * mean over loss tokens of sum p (log p - log q), and so is its gradient."""
    batch = make_batch()
    batch = train_batch(
        sequences=batch.sequences, advantages=torch.zeros_like(batch.advantages), loss_mask=batch.loss_mask
    )
    reference = LogprobScorer(load_causal_lm(str(other_llama), dtype=torch.float32).requires_grad_(False), 4)
    engine = make_engine(tiny_llama, micro=2, reference=reference)
    if logits == "whole":
        reference.head = "a reason"
        assert reference.note is not None and reference.note.startswith("LlamaForCausalLM: a reason; its logits")
    assert engine.note is None
    plan = loss_plan(kl_coef=0.5, kl_estimator="full", temperature=0.9)
    stats = engine.forward_backward(batch, plan, batch.counts())

    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    frozen = AutoModelForCausalLM.from_pretrained(other_llama)
    sequences, total = batch.sequences, torch.zeros(())
    for row in (0, 2, 3, 4, 5):  # 19 loss tokens
        prompt, response = PROMPTS[row], RESPONSES[row]
        tokens = sequences.tokens[row, sequences.prompt_width - prompt : sequences.prompt_width + response]
        log_p, log_q = ((m(tokens[None]).logits[0, prompt - 1 : -1] / 0.9).log_softmax(-1) for m in (model, frozen))
        total = total + (log_p.exp() * (log_p - log_q.detach())).sum()
    loss = 0.5 * total / 19
    loss.backward()
    assert stats.sums["reference/kl"] == pytest.approx(total.item(), rel=1e-5)
    assert stats.loss == pytest.approx(loss.item(), rel=1e-5)
    mine = gradients_of(engine)
    for name, weight in model.named_parameters():
        assert (mine[name] - weight.grad).norm() < 2e-5 * weight.grad.norm(), name


def test_full_kl_to_another_vocabulary_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_llama, vocab_size=300)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    reference = LogprobScorer(load_causal_lm(str(tmp_path), dtype=torch.float32), 4)
    with pytest.raises(ModelError, match="the policy's has 259 tokens, the reference's 300"):
        make_engine(tiny_llama, reference=reference)


# -------------------------------------------------------------------------------------------- the optimizer's step


def test_clipping_scales_the_whole_gradient_and_reports_the_norm_before(tiny_llama: Path) -> None:
    """SGD-like check through AdamW's first average: m = 0.1 * clipped gradient after one update."""
    engine = make_engine(tiny_llama, optimizer={"max_grad_norm": 0.25})
    batch = make_batch()
    engine.forward_backward(batch, loss_plan(), batch.counts())
    gradients = gradients_of(engine)
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
    assert norm > 0.25
    stats = engine.optimizer_step()
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)
    for name, master in engine._masters.parameters.items():
        average = engine._optimizer.state[master]["exp_avg"]
        torch.testing.assert_close(average, 0.1 * gradients[name] * 0.25 / norm, rtol=1e-4, atol=1e-9)


def test_learning_rate_follows_the_number_of_updates_made(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, learning_rate_factor=lambda number: [0.0, 0.5, 1.0][number])
    start = weights_of(engine)
    rates = []
    for expected_version in (1, 2, 3):
        rates.append(train_once(engine)[1].lr)
        assert engine.version == expected_version
        if expected_version == 1:
            assert unequal(weights_of(engine), start) == []  # a factor of 0 moves nothing
    assert rates == [0.0, 0.5e-2, 1e-2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_that_is_not_finite_is_dropped(tiny_llama: Path, bad: float, dtype: torch.dtype) -> None:
    engine, undisturbed = make_engine(tiny_llama, dtype=dtype), make_engine(tiny_llama, dtype=dtype)
    train_once(engine)
    train_once(undisturbed)
    before = weights_of(engine)
    batch = make_batch()
    engine.forward_backward(batch, loss_plan(), batch.counts())
    next(iter(engine._masters.parameters.values())).grad.view(-1)[3] = bad
    stats = engine.optimizer_step()
    assert stats.skipped and engine.version == 1
    assert unequal(weights_of(engine), before) == []
    # Nothing of it is left anywhere: the next update is the one an undisturbed engine makes.
    train_once(engine)
    train_once(undisturbed)
    assert unequal(weights_of(engine), weights_of(undisturbed)) == []


def test_advantage_of_an_invalid_row_never_counts(tiny_llama: Path) -> None:
    """NaN behind the mask stays there."""
    clean, dirty = make_engine(tiny_llama), make_engine(tiny_llama)
    train_once(clean)
    batch = make_batch()
    batch.advantages[1] = float("nan")
    _, stats = train_once(dirty, batch)
    assert not stats.skipped
    assert unequal(weights_of(clean), weights_of(dirty)) == []


# ------------------------------------------------------------------------------------------------ bfloat16 compute


def test_small_updates_reach_float32_masters_before_bfloat16_weights(tiny_llama: Path) -> None:
    """A weight near 0.2 has neighbours 2^-10 away in bfloat16: steps of 1e-5 only show after many."""
    engine = make_engine(tiny_llama, dtype=torch.bfloat16, optimizer={"lr": 1e-5})
    assert {weight.dtype for weight in engine.model.parameters()} == {torch.bfloat16}
    name = "model.layers.0.mlp.down_proj.weight"
    weight, master = engine.model.get_parameter(name), engine._masters.parameters[name]
    start_weight, start_master = weight.detach().clone(), master.detach().clone()
    train_once(engine)
    moved = (master.detach() - start_master).abs()
    assert master.dtype == torch.float32
    assert moved.max().item() == pytest.approx(1e-5, rel=0.1)
    assert (moved > 0).float().mean() > 0.99
    assert (weight != start_weight).float().mean() < 0.1
    assert torch.equal(weight, master.bfloat16())


def test_gradients_of_micro_batches_add_up_in_float32(tiny_llama: Path) -> None:
    """In bfloat16, 256 + 1 = 256: a thousand small parts would be lost in the sum."""
    engine = make_engine(tiny_llama, dtype=torch.bfloat16)
    weight = engine.model.model.norm.weight
    master = engine._masters.parameters["model.norm.weight"]
    (256.0 * weight.sum()).backward()
    for _ in range(3):
        weight.sum().backward()
    assert weight.grad is None
    assert master.grad.dtype == torch.float32
    assert master.grad.unique().tolist() == [259.0]


def test_bfloat16_gradient_is_near_the_float32_one(tiny_qwen: Path) -> None:
    exact, rounded = make_engine(tiny_qwen), make_engine(tiny_qwen, dtype=torch.bfloat16)
    batch = make_batch()
    for engine in (exact, rounded):
        engine.forward_backward(batch, loss_plan(), batch.counts())
    one, other = (torch.cat([g.flatten() for g in gradients_of(engine).values()]) for engine in (exact, rounded))
    assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.99


def test_tied_embeddings_stay_tied_in_bfloat16(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, dtype=torch.bfloat16)
    train_once(engine)
    assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight
    assert "lm_head.weight" not in engine._masters.parameters


# ---------------------------------------------------------------------------------------------- gradient checkpointing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_checkpointing_changes_no_bit_and_does_recompute(
    tiny_llama: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    attend = attention_module.attend_packed
    monkeypatch.setattr(attention_module, "attend_packed", lambda *args: (calls.append(1), attend(*args))[1])
    results = {}
    for on in (False, True):
        engine = make_engine(tiny_llama, dtype=dtype, gradient_checkpointing=on)
        calls.clear()
        batch = make_batch()
        stats = engine.forward_backward(batch, loss_plan(), batch.counts())
        results[on] = (gradients_of(engine), stats.loss, len(calls))
        assert not any(module.training for module in engine.model.modules())
    assert results[True][0].keys() == results[False][0].keys()
    assert unequal(results[True][0], results[False][0]) == []
    assert results[True][1] == results[False][1]
    # Two micro-batches (4 rows, and 2 that move nothing) of two layers: 4 calls of the attention, and those of the first once
    # more in its backward pass.
    assert (results[False][2], results[True][2]) == (4, 6)


def test_dropout_stays_off_with_gradient_checkpointing(tmp_path: Path) -> None:
    """Phi-3's residual dropout acts in training mode, which transformers wants for checkpointing."""
    config = AutoConfig.for_model(
        "phi3",
        vocab_size=259,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        resid_pdrop=0.5,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    draw_weights(model, 0)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    results = []
    for on in (False, True):
        engine = make_engine(tmp_path, gradient_checkpointing=on)
        batch = make_batch()
        engine.forward_backward(batch, loss_plan(), batch.counts())
        results.append(gradients_of(engine))
    assert unequal(*results) == []


# ----------------------------------------------------------------------------------------------- saving and loading


@pytest.mark.parametrize("folder", ["tiny_llama", "tiny_qwen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_engine_goes_on_bit_for_bit(
    request: pytest.FixtureRequest, folder: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model_folder: Path = request.getfixturevalue(folder)
    rates = {"learning_rate_factor": lambda number: 1 / (number + 1)}
    straight = make_engine(model_folder, dtype=dtype, **rates)
    for seed in range(2):
        train_once(straight, make_batch(seed))
    straight.save(tmp_path)
    resumed = make_engine(model_folder, dtype=dtype, **rates)
    train_once(resumed, make_batch(9))  # whatever it held before is replaced
    resumed.load(tmp_path)
    assert resumed.version == straight.version == 2
    assert unequal(weights_of(resumed), weights_of(straight)) == []
    for seed in range(2, 4):
        first, second = train_once(straight, make_batch(seed)), train_once(resumed, make_batch(seed))
        assert first[1] == second[1] and first[0].loss == second[0].loss
    assert unequal(weights_of(resumed), weights_of(straight)) == []
    masters = [dict(engine._masters.parameters) for engine in (straight, resumed)]
    assert unequal(*masters) == []


def test_saving_before_the_first_update_and_loading_over_later_state(tiny_llama: Path, tmp_path: Path) -> None:
    fresh = make_engine(tiny_llama)
    fresh.save(tmp_path)
    used = make_engine(tiny_llama)
    train_once(used)
    used.load(tmp_path)
    assert used.version == 0
    train_once(used)
    train_once(fresh)
    assert unequal(weights_of(used), weights_of(fresh)) == []


@pytest.mark.parametrize("folder", ["tiny_llama", "tiny_qwen"])
def test_saved_folder_is_a_plain_model_with_identical_logits(
    request: pytest.FixtureRequest, folder: str, tmp_path: Path
) -> None:
    """tiny_llama ties its embeddings, tiny_qwen does not. The trained model and the loaded one run the same kernel here."""
    engine = make_engine(request.getfixturevalue(folder))
    train_once(engine)
    engine.save(tmp_path)
    tokens = torch.randint(0, 256, (2, 20))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    engine.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(plain(tokens).logits, engine.model(tokens).logits)
    assert plain.config.tie_word_embeddings is (folder == "tiny_llama")
    assert "posttrain" not in (tmp_path / "config.json").read_text()  # our attention's name is no business of a reader
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == engine.tokenizer.chat_template


def test_bfloat16_run_saves_its_float32_masters(tiny_qwen: Path, tmp_path: Path) -> None:
    engine = make_engine(tiny_qwen, dtype=torch.bfloat16, optimizer={"lr": 1e-5})
    train_once(engine)
    engine.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    masters = dict(engine._masters.parameters)
    assert unequal(dict(plain.named_parameters()), masters) == []
    assert plain.dtype == torch.float32
    assert engine.model.dtype == torch.bfloat16  # saving leaves the engine as it was


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3", "qwen2"),
        ("qwen3", {"intermediate_size": 48}),
        ("qwen3_moe", "qwen3"),
        ("qwen3_moe", {"num_experts": 3}),
        ("qwen3_moe", {"num_experts": 5}),
        ("qwen3_moe", {"moe_intermediate_size": 24}),
    ],
    ids=str,
)
def test_checkpoint_of_another_model_is_refused(tmp_path: Path, family: Any, change: Any) -> None:
    """Qwen3 has norms that Qwen2 has not, and the other way round biases; nothing may be filled with random numbers."""
    engine = make_engine(write_tiny_model(tmp_path / "model", family))
    other = write_tiny_model(tmp_path / "other", change if isinstance(change, str) else family)
    if not isinstance(change, str):
        config = AutoConfig.from_pretrained(other, **change)
        AutoModelForCausalLM.from_config(config).save_pretrained(other)
    (tmp_path / "saved").mkdir()
    make_engine(other).save(tmp_path / "saved")
    before = weights_of(engine)
    with pytest.raises(
        ModelError, match=r"is of another model than .*/model; set model\.path back, or name another run"
    ):
        engine.load(tmp_path / "saved")
    assert unequal(weights_of(engine), before) == []


# With one table of embeddings and with two; experts, which are fused in memory and apart in files.
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "qwen3_moe", "qwen2_moe", "mixtral"])
def test_saved_weights_are_read_without_a_second_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Any
) -> None:
    path = write_tiny_model(tmp_path / "model", family)
    engine, other = make_engine(path), make_engine(path)
    train_once(engine)
    (tmp_path / "saved").mkdir()
    engine.save(tmp_path / "saved")
    monkeypatch.setattr(other._model_class, "from_pretrained", lambda *_, **__: pytest.fail("a second model was built"))
    other.load(tmp_path / "saved")
    assert unequal(weights_of(engine), weights_of(other)) == []
    train_once(engine, make_batch(1))
    train_once(other, make_batch(1))
    assert unequal(weights_of(engine), weights_of(other)) == []


def test_same_batch_twice_gives_the_same_bits(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "qwen2")
    engines = [make_engine(folder) for _ in range(2)]
    for engine in engines:
        train_once(engine, entropy_coef=0.1)
    assert unequal(weights_of(engines[0]), weights_of(engines[1])) == []


# ---------------------------------------------------------------------------------------------------------- float16


def test_a_scaled_loss_gives_the_same_update(tiny_llama: Path) -> None:
    """In float32, where a power of two rounds nothing: the same gradients, norm and weights."""
    plain, scaled = make_engine(tiny_llama), make_engine(tiny_llama, loss_scaling=True)
    batch = make_batch()
    found = [each.forward_backward(batch, loss_plan(), batch.counts()).loss for each in (plain, scaled)]
    assert found[0] == found[1]
    mine, theirs = gradients_of(scaled), gradients_of(plain)
    assert all(torch.equal(mine[name], 2.0**16 * theirs[name]) for name in theirs)
    steps = [each.optimizer_step() for each in (plain, scaled)]
    assert steps[0].grad_norm == steps[1].grad_norm and [step.loss_scale for step in steps] == [None, 2.0**16]
    mine, theirs = weights_of(scaled), weights_of(plain)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_small_gradients_survive_in_float16_and_an_overflow_is_skipped(tiny_llama: Path, tmp_path: Path) -> None:
    batch = make_batch()
    batch = replace(batch, advantages=batch.advantages * 1e-6)
    engines = [make_engine(tiny_llama, dtype=torch.float16, loss_scaling=scaling) for scaling in (False, True)]
    wanted = make_engine(tiny_llama)
    for each in (*engines, wanted):
        each.forward_backward(batch, loss_plan(), batch.counts())
    exact = gradients_of(wanted)
    errors = []
    for each, factor in zip(engines, (1.0, 2.0**16), strict=True):
        mine = gradients_of(each)
        errors.append(sum(((mine[n] / factor - exact[n]).norm() / exact[n].norm()).item() for n in exact) / len(exact))
    assert errors[1] < 0.05 < errors[0]

    engine = engines[1]
    engine._loss_scale.value = 2.0**60
    before = weights_of(engine)
    engine.zero_grad()
    engine.forward_backward(make_batch(), loss_plan(), batch.counts())
    step = engine.optimizer_step()
    assert step.skipped and engine.version == 0 and engine._loss_scale.value == 2.0**59
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(engine).items())
    engine.save(tmp_path)
    again = make_engine(tiny_llama, dtype=torch.float16, loss_scaling=True)
    again.load(tmp_path)
    assert again._loss_scale == engine._loss_scale
