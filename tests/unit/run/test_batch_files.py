"""A step's batch on disk: the same bits come back."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from batches import scored_batch, sequence_batch, shaped_batch, train_batch
from posttrain.errors import RequestError
from posttrain.records.batches import ScoredBatch, SequenceBatch, TrainerLogprobs
from posttrain.run.batch_files import batch_path, load_scored, save_step


def made_up() -> ScoredBatch:
    sequences = sequence_batch(
        tokens=torch.tensor([[0, 5, 6, 7], [4, 5, 8, 0]]),
        prompt_lengths=torch.tensor([1, 2]),
        response_mask=torch.tensor([[True, True], [True, False]]),
        rollout_logprobs=torch.tensor([[-0.1, -1e-30], [-float("inf"), 0.0]]),
        group_index=torch.tensor([0, 0]),
        sample_ids=("train.jsonl:0/0", 'odd "name" é/1'),
    )
    return scored_batch(
        sequences,
        rewards=torch.tensor([0.1, float("nan")]),  # saved under two names
        valid=torch.tensor([True, False]),
        reward_terms={"b": torch.tensor([1.0, float("nan")]), "a.c": torch.tensor([0.5, 0.25])},
        turn_rewards=torch.tensor([[0.0, 0.1], [float("nan"), 0.0]]),
        extras={"state_index": torch.tensor([3, 0]), "greedy_rewards": torch.tensor([0.5, float("nan")])},
    )


def same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one.view(-1).nan_to_num(7.0), other.view(-1).nan_to_num(7.0))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    return one == other


def test_what_was_sampled_comes_back_as_it_was(tmp_path: Path) -> None:
    sampled = made_up()
    shaped = shaped_batch(sampled, TrainerLogprobs(ref=torch.full((2, 2), -1.5)), rewards=torch.zeros(2))
    trained = train_batch(sampled.sequences, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    path = batch_path(tmp_path, 7)
    save_step(path, sampled, shaped, trained)
    found = load_scored(path)
    assert path.name == "step_7.safetensors" and [file.name for file in path.parent.iterdir()] == [path.name]
    for item in fields(SequenceBatch):
        assert same(getattr(found.sequences, item.name), getattr(sampled.sequences, item.name)), item.name
    for item in fields(ScoredBatch):
        assert item.name == "sequences" or same(getattr(found, item.name), getattr(sampled, item.name)), item.name
    with safe_open(path, framework="pt") as file:  # anybody can look at it
        assert torch.equal(file.get_tensor("trained.advantages"), trained.advantages)
        assert torch.equal(file.get_tensor("trained.sequences.rewards"), torch.zeros(2))
        assert torch.equal(file.get_tensor("trained.sequences.ref_logprobs"), torch.full((2, 2), -1.5))
        assert same(file.get_tensor("sampled.scores"), sampled.rewards)
        assert same(file.get_tensor("sampled.step_rewards"), torch.tensor([0.1, float("nan")]))
        assert "trained.returns" not in file.keys()  # noqa: SIM118


def test_a_step_that_was_not_recorded_is_told_with_those_that_were(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"step_3.safetensors \(the run wrote none\); .*batches_every_steps=1"):
        load_scored(batch_path(tmp_path, 3))
    sampled = made_up()
    for step in (12, 7):
        save_step(batch_path(tmp_path, step), sampled, shaped_batch(sampled), train_batch(sampled.sequences))
    with pytest.raises(RequestError, match=r"\(there are steps 7, 12\)"):
        load_scored(batch_path(tmp_path, 3))


@pytest.mark.parametrize("content", [b"", b"\x80\x04not a batch", b"\x02\x00\x00\x00\x00\x00\x00\x00{}"])
def test_another_file_of_that_name_is_told(tmp_path: Path, content: bytes) -> None:
    path = batch_path(tmp_path, 1)
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(RequestError, match="is not a recorded batch"):
        load_scored(path)
