"""samples/step_N.tokens.jsonl: the values of single tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import batches
from posttrain.records.batches import CriticTargets, TrainBatch, TrainerLogprobs
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Reward, ScoredGroup, StopReason, Trajectory, TrajectoryGroup, Turn
from posttrain.run.samples import write_samples
from posttrain.run.token_values import first_groups, significant, token_lines, token_values_path
from posttrain.steps.assemble import assemble


def texts(ids: Sequence[int]) -> list[str]:
    return [f"<{number}>" for number in ids]


def train_batch() -> TrainBatch:
    """Two responses to prompts of two tokens: of three tokens, the second given by an environment, and of one."""
    sequences = batches.sequence_batch(
        tokens=torch.tensor([[1, 2, 5, 6, 7], [1, 2, 5, 0, 0]]),
        prompt_lengths=torch.tensor([2, 2]),
        response_mask=torch.tensor([[True, False, True], [True, False, False]]),
        rollout_logprobs=torch.tensor([[-1.0, 0.0, -2.00004], [-0.5, 0.0, 0.0]]),
        group_index=torch.tensor([0, 0]),
        sample_ids=("a/0", "a/1"),
    )
    return batches.train_batch(
        sequences=sequences,
        advantages=torch.tensor([[0.70711, 0.0, 0.70711], [-0.70711, 0.0, 0.0]]),
        loss_mask=sequences.response_mask,
    )


def read(lines: list[str]) -> tuple[dict[str, str], list[dict[str, Any]]]:
    first, *rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    return first["texts"], rows


def test_token_values_by_hand() -> None:
    trainer = torch.tensor([[-1.25, 99.0, -2.00004], [-0.5000125, 99.0, 99.0]])  # 99 is behind the mask
    names, rows = read(token_lines(train_batch(), trainer, texts, lines=[0, 1]))
    assert names == {"5": "<5>", "6": "<6>", "7": "<7>"}
    assert rows[0] == {
        "line": 0,
        "sample_id": "a/0",
        "token_ids": [5, 6, 7],
        "sampled": [1, 0, 1],
        "in_loss": [1, 0, 1],
        "rollout_logprobs": [-1.0, 0.0, -2.0],  # 4 decimals
        "advantages": [0.7071, 0.0, 0.7071],
        "gap": [0.25, 0.0, 0.0],  # -1 + 1.25
    }
    assert rows[1] == {
        "line": 1, "sample_id": "a/1", "token_ids": [5], "sampled": 1, "in_loss": 1, "rollout_logprobs": -0.5,
        "advantages": -0.7071, "gap": pytest.approx(1.25e-5, rel=1e-2),  # float32 has 0.5 to 6e-8
    }  # fmt: skip


def test_columns_are_there_where_their_values_are() -> None:
    train = train_batch()
    full = torch.full((2, 3), 0.5)
    logprobs = TrainerLogprobs(
        ref=torch.full((2, 3), -1.5),
        importance_weights=full,
        rejected=torch.tensor([[True, False, False], [False, False, False]]),
    )
    train = replace(train, logprobs=logprobs, critic=CriticTargets(values=full, returns=full))
    trainer = torch.full((1, 3), -1.0)  # of the first row only
    _, rows = read(token_lines(train, trainer, texts, lines=[0, 1], token_rewards=full))
    assert rows[0]["ref_gap"] == [0.5, 0.0, 0.5] and rows[0]["rejected"] == [1, 0, 0]
    for name in ("values", "returns", "token_rewards", "importance_weights"):
        assert rows[0][name] == [0.5, 0.0, 0.5] and rows[1][name] == 0.5
    assert "gap" not in rows[1] and "ref_gap" not in rows[1]
    _, plain = read(token_lines(train_batch(), None, texts, lines=[0, 1]))
    assert set(plain[0]) == {"line", "sample_id", "token_ids", "sampled", "in_loss", "rollout_logprobs", "advantages"}


def test_a_validation_has_no_loss_and_no_advantages() -> None:
    sequences = train_batch().sequences
    trainer = torch.tensor([[-1.25, 99.0, -2.00004], [-0.5, 99.0, 99.0]])
    _, rows = read(token_lines(sequences, trainer, texts, lines=[0, 1]))
    assert rows[0] == {
        "line": 0, "sample_id": "a/0", "token_ids": [5, 6, 7], "sampled": [1, 0, 1], "rollout_logprobs": [-1.0, 0.0, -2.0],
        "gap": [0.25, 0.0, 0.0],
    }  # fmt: skip
    _, plain = read(token_lines(sequences, None, texts, lines=[0, 1]))
    assert plain[1] == {"line": 1, "sample_id": "a/1", "token_ids": [5], "sampled": 1, "rollout_logprobs": -0.5}


def test_what_is_not_finite_is_null() -> None:
    _, rows = read(
        token_lines(train_batch(), torch.tensor([[math.nan, 0.0, -math.inf], [-1.0, 0, 0]]), texts, lines=[0, 1])
    )
    assert rows[0]["gap"] == [None, 0.0, None] and rows[1]["gap"] == 0.5


def test_first_rows_are_kept_as_many_as_fit() -> None:
    for most, kept in ((4, 2), (3, 1), (2, 0)):  # 3 + 1 tokens
        names, rows = read(token_lines(train_batch(), None, texts, lines=[0, 1], max_tokens=most))
        assert len(rows) == kept
        assert len(names) == (3 if kept else 0)


def test_significant_digits() -> None:
    values = np.array([123456.0, -0.00123449, 1.23e-7, 0.0, math.nan, math.inf, 9.99996, 5e-320])
    rounded = significant(values)
    assert rounded[:4].tolist() == [123500.0, -0.001234, 1.23e-7, 0.0]
    assert np.isnan(rounded[4]) and np.isinf(rounded[5]) and rounded[6] == 10.0 and rounded[7] >= 0


# ----------------------------------------------------------------------------------------------- beside the samples


def trajectory(number: int, *, turns: tuple[Turn, ...] = (), **changes: Any) -> Trajectory:
    return Trajectory(
        **{
            "sample_id": f"a/{number}", "token_ids": (5, 6, 7), "logprobs": (-1.0, 0.0, -2.0), "text": "r",
            "stop_reason": StopReason.EOS, "policy_version": 1, "turns": turns, **changes,
        }
    )  # fmt: skip


def group(*trajectories: Trajectory) -> ScoredGroup:
    prompt = Prompt(prompt_id="a", token_ids=(1, 2), text="q", data_source="s")
    outcomes = tuple(Reward(float(number)) for number in range(len(trajectories)))
    return ScoredGroup(group=TrajectoryGroup(prompt=prompt, trajectories=trajectories), outcomes=outcomes)


def written(tmp_path: Path, *trajectories: Trajectory) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    groups = [group(*trajectories)]
    sequences = assemble(groups).sequences
    weights = torch.arange(1.0, len(sequences) + 1).unsqueeze(1)
    train = batches.train_batch(
        sequences=sequences, advantages=weights * sequences.response_mask, loss_mask=sequences.response_mask
    )
    path = tmp_path / "samples" / "step_1.jsonl"
    write_samples(path, 1, groups, train, token_texts=texts)
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    return samples, read(token_values_path(path).read_text().splitlines())[1]


def test_turns_and_the_environment_are_in_the_sample(tmp_path: Path) -> None:
    turn = Turn(
        start=0, end=1, text="look", observation="a door", reward=0.5, stop_reason=StopReason.EOS, policy_version=1
    )
    last = Turn(start=2, end=3, text="open", stop_reason=StopReason.LENGTH, policy_version=2)
    played = trajectory(
        0,
        turns=(turn, last),
        response_mask=(True, False, True),
        env_reward=0.5,
        env_stop="won",
        env_metrics=(("doors", 1.0),),
    )
    (sample, plain), rows = written(tmp_path, played, trajectory(1))
    assert sample["turns"] == [
        {"sample": 0, "start": 0, "end": 1, "text": "look", "observation": "a door", "reward": 0.5, "stop_reason": "eos",
         "policy_version": 1},
        {"sample": 0, "start": 2, "end": 3, "text": "open", "observation": "", "reward": None, "stop_reason": "length",
         "policy_version": 2},
    ]  # fmt: skip
    assert sample["environment"] == {"reward": 0.5, "stop": "won", "metrics": {"doors": 1.0}}
    assert sample["response_tokens"] == 2 and "turns" not in plain and plain["response_tokens"] == 3
    assert rows[0]["sampled"] == [1, 0, 1] and rows[1]["sampled"] == 1


def test_a_trajectory_of_several_rows_has_one_line_and_all_its_tokens(tmp_path: Path) -> None:
    turn = Turn(start=0, end=3, text="x", stop_reason=StopReason.EOS, policy_version=1)
    earlier = trajectory(0, sample_id="a/0#0", turns=(turn,), prompt_token_ids=(1,))
    whole = trajectory(0, turns=(turn,), earlier=(earlier,), prompt_token_ids=(1, 2, 3))
    samples, rows = written(tmp_path, whole, trajectory(1))
    assert [sample["sample_id"] for sample in samples] == ["a/0", "a/1"]
    assert [(row["line"], row["sample_id"]) for row in rows] == [(0, "a/0#0"), (0, "a/0"), (1, "a/1")]
    assert [turn["sample"] for turn in samples[0]["turns"]] == [0, 1] and samples[0]["response_tokens"] == 6
    assert [sample["advantage"] for sample in samples] == [2.0, 3.0]  # rows have 1, 2, 3: that of the last one


def test_groups_up_to_the_one_in_which_the_file_is_full() -> None:
    """Of two responses of three tokens each: after the first group 6 are used, after the second 12."""
    groups = [group(trajectory(0), trajectory(1)) for _ in range(3)]
    assert [len(first_groups(groups, most)) for most in (1, 6, 7, 12, 13, 1000)] == [1, 1, 2, 2, 3, 3]
    empty = trajectory(0, token_ids=(), logprobs=())
    assert len(first_groups([group(empty), group(trajectory(0))])) == 2
    assert first_groups([group(empty)]) == []  # a batch of no tokens has no shape to speak of


def test_samples_of_a_validation_whose_first_groups_have_token_values(tmp_path: Path) -> None:
    groups = [group(trajectory(0), trajectory(1)), group(trajectory(0))]
    path = tmp_path / "validation" / "step_0.jsonl"
    write_samples(path, 0, groups, assemble(groups[:1]).sequences, token_texts=texts)
    assert [json.loads(line)["advantage"] for line in path.read_text().splitlines()] == [None, None, None]
    _, rows = read(token_values_path(path).read_text().splitlines())
    assert [(row["line"], row["rollout_logprobs"]) for row in rows] == [(0, [-1.0, 0.0, -2.0]), (1, [-1.0, 0.0, -2.0])]


def test_samples_without_a_batch_leave_no_old_token_values(tmp_path: Path) -> None:
    written(tmp_path, trajectory(0))
    write_samples(tmp_path / "samples" / "step_1.jsonl", 1, [group(trajectory(0))])
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step_1.jsonl"]
