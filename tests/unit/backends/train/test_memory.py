"""Out of memory: cut in two, done again, the same result, and said so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from batches import sequence_batch, train_batch
from posttrain.backends.torch_training import memory, policy
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.config.policy import OptimizerConfig
from posttrain.errors import RunStopped
from posttrain.models.loading import load_causal_lm
from posttrain.records.batches import TrainBatch
from posttrain.records.notices import Notices
from posttrain.records.plans import LossPlan

PLAN = LossPlan(
    name="ppo_clip",
    parameters={"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
    aggregation="token_mean",
    temperature=1.0,
)


def make_batch() -> TrainBatch:
    """Six rows of 3 prompt tokens and 2, 5, 4, 1, 6 and 3 response tokens: 5, 8, 7, 4, 9 and 6 tokens."""
    lengths = torch.tensor([2, 5, 4, 1, 6, 3])
    mask = torch.arange(6) < lengths[:, None]
    sequences = sequence_batch(
        tokens=torch.randint(0, 256, (6, 9), generator=torch.Generator().manual_seed(0)),
        prompt_lengths=torch.full((6,), 3),
        response_mask=mask,
        rollout_logprobs=torch.zeros(6, 6),
        group_index=torch.arange(6),
        sample_ids=tuple("abcdef"),
    )
    return train_batch(sequences, advantages=mask * torch.linspace(-1, 1, 6)[:, None], loss_mask=mask)


def make_engine(folder: Path, dtype: torch.dtype, **how: Any) -> LocalTrainEngine:
    return LocalTrainEngine(
        load_causal_lm(str(folder), dtype=dtype),
        AutoTokenizer.from_pretrained(folder),
        optimizer=OptimizerConfig(lr=1e-2),
        learning_rate_factor=lambda update: 1.0,
        sequences_per_micro_batch=4,
        sequences_per_scoring_batch=6,
        **how,
    )


class _Full(torch.autograd.Function):
    """Passes its input on; its backward pass finds no memory, as the allocator says it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def full_above(monkeypatch: pytest.MonkeyPatch, tokens: int, where: str) -> list[int]:
    """Memory for so many tokens in a micro-batch. Returns the list to which the sizes tried are added.

    A backward pass breaks off after the head and before the layers: the head has its gradient by then.
    """
    hidden, seen = policy.LogprobScorer.hidden, []

    def limited(self: Any, packed: Any) -> Tensor:
        seen.append(len(packed.token_ids))
        if len(packed.token_ids) <= tokens:
            return hidden(self, packed)
        if where == "forward":
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory: you tried ..."
            )
        result: Tensor = _Full.apply(hidden(self, packed))
        return result

    monkeypatch.setattr(policy.LogprobScorer, "hidden", limited)
    return seen


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_update_is_that_of_smaller_micro_batches(
    tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch, where: str, dtype: torch.dtype
) -> None:
    batch, notices = make_batch(), Notices()
    # What it comes to: rows of 5 + 8, 7 + 4 and 9 + 6 tokens.
    wanted = make_engine(tiny_qwen, dtype)
    wanted.cutter.sequences = 2
    expected = wanted.forward_backward(batch, PLAN, batch.counts())
    expected_norm = wanted.optimizer_step().grad_norm

    engine = make_engine(tiny_qwen, dtype, notices=notices)
    tried = full_above(monkeypatch, 15, where)
    found = engine.forward_backward(batch, PLAN, batch.counts())
    assert tried == [24, 13, 11, 15]  # 5 + 8 + 7 + 4, which is too much, then all again
    assert found.loss == expected.loss and torch.equal(found.policy_logprobs, expected.policy_logprobs)
    assert engine.optimizer_step().grad_norm == expected_norm
    for (name, mine), theirs in zip(engine.model.named_parameters(), wanted.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    [told] = notices.take()
    assert told.startswith(
        "out of memory with 4 sequences of 24 tokens in a micro-batch: batches of this size are cut in two"
    )

    engine.forward_backward(batch, PLAN, batch.counts())
    assert tried[4:] == [13, 11, 15] and notices.take() == []  # remembered


def test_scoring_goes_on_where_it_stopped(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, notices = make_batch().sequences, Notices()
    engine = make_engine(tiny_qwen, torch.float32, notices=notices)
    wanted = engine.logprobs(sequences, 1.0)
    tried = full_above(monkeypatch, 20, "forward")
    torch.testing.assert_close(engine.logprobs(sequences, 1.0), wanted, rtol=0, atol=1e-5)
    assert tried == [39, 20, 19]  # 5 + 8 + 7 and 4 + 9 + 6
    assert len(notices.take()) == 1
    engine.logprobs(sequences, 1.0)
    assert tried[3:] == [20, 19]


def test_one_sequence_that_does_not_fit_ends_the_run(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, batch = make_engine(tiny_qwen, torch.float32), make_batch()
    full_above(monkeypatch, 8, "forward")
    with pytest.raises(RunStopped, match=r"a single sequence of 9 tokens .* model\.gradient_checkpointing"):
        engine.forward_backward(batch, PLAN, batch.counts())


def test_gradients_held_before_cannot_be_made_again(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, batch = make_engine(tiny_qwen, torch.float32), make_batch()
    engine.forward_backward(batch, PLAN, batch.counts())
    full_above(monkeypatch, 15, "backward")
    with pytest.raises(RunStopped, match="out of memory with a micro-batch of 24 tokens; use smaller micro-batches"):
        engine.forward_backward(batch, PLAN, batch.counts())


def test_other_errors_stay_what_they_are(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, batch = make_engine(tiny_qwen, torch.float32), make_batch()

    def broken(*args: Any) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(policy.LogprobScorer, "hidden", broken)
    for call in (
        lambda: engine.forward_backward(batch, PLAN, batch.counts()),
        lambda: engine.logprobs(batch.sequences, 1.0),
    ):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            call()


def test_what_is_not_on_a_device_is_not_moved(tiny_qwen: Path) -> None:
    weight = torch.zeros(1 << 20, requires_grad=True)
    assert memory._to_cpu(weight)[1] is weight
    with memory.offloaded_activations(True):
        (weight * weight).sum().backward()
    assert weight.grad is not None
    engine = make_engine(tiny_qwen, torch.float32, activation_offload=True)
    assert engine.note == "no effect of model.activation_offload: everything is on the CPU already"


def test_optimizer_state_moves_and_its_counters_do_not() -> None:
    from posttrain.backends.torch_training.optimizers import build_optimizer, move_state

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer({"weight": weight}, OptimizerConfig())
    weight.grad = torch.ones(3)
    optimizer.step()
    places: list[Tensor] = []
    place: Callable[[Tensor], torch.device] = lambda parameter: (places.append(parameter), torch.device("meta"))[1]  # noqa: E731
    move_state(optimizer, place)
    state = optimizer.state[weight]
    assert places == [weight]
    assert {name: value.device.type for name, value in state.items()} == {
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
        "step": "cpu",
    }


@pytest.mark.parametrize(("master", "moves"), [("float32", True), ("bfloat16", False)])
def test_bfloat16_masters_lose_small_updates(tiny_qwen: Path, master: str, moves: bool) -> None:
    """A step of 1e-4 beside norm gains of about 1, whose neighbours in bfloat16 are 0.004 to 0.008 away."""
    engine = LocalTrainEngine(
        load_causal_lm(str(tiny_qwen), dtype=torch.bfloat16),
        AutoTokenizer.from_pretrained(tiny_qwen),
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.0),
        learning_rate_factor=lambda update: 1.0,
        sequences_per_micro_batch=6,
        sequences_per_scoring_batch=6,
        master_dtype=getattr(torch, master),
    )
    name = "model.norm.weight"
    before, batch = engine._masters.parameters[name].detach().clone(), make_batch()
    assert before.dtype == getattr(torch, master)
    engine.forward_backward(batch, PLAN, batch.counts())
    engine.optimizer_step()
    assert (not torch.equal(engine._masters.parameters[name], before)) == moves
    dtypes = {value.dtype for state in engine._optimizer.state.values() for value in state.values() if value.dim()}
    assert dtypes == {getattr(torch, master)}


def test_reference_that_rests_scores_the_same(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on its device while a batch is scored and nowhere else. Here both places are the CPU, so its moves are noted."""
    model, moves, scored = load_causal_lm(str(tiny_qwen), dtype=torch.float32), [], []
    awake = policy.LogprobScorer(model, 2)
    wanted = awake.logprobs(make_batch().sequences, 1.0)
    monkeypatch.setattr(type(model), "to", lambda self, place: moves.append((place, len(scored))))
    hidden = policy.LogprobScorer.hidden
    monkeypatch.setattr(
        policy.LogprobScorer, "hidden", lambda self, packed: (scored.append(1), hidden(self, packed))[1]
    )
    resting = policy.LogprobScorer(model, 2, rests_on_cpu=True)
    assert torch.equal(resting.logprobs(make_batch().sequences, 1.0), wanted)
    assert moves == [("cpu", 0), (torch.device("cpu"), 0), ("cpu", 3)]  # before and after three micro-batches
    assert resting.note == "no effect of reference.offload: everything is on the CPU already" and awake.note is None
