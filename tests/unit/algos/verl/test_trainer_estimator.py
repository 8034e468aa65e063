"""An estimator inside a fork's trainer, in a process of its own: what its loop prepares, and what its function returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.managed_fork import managed_fork
from torch import Tensor

from posttrain.errors import RequestError
from posttrain.registry import ADVANTAGES

CONFIG = {"algorithm": {"adv_estimator": "ranked", "gamma": 0.5, "ranked": {"scale": 3.0}}}


def estimated(file: Path, valid: list[bool], states: tuple[str, ...] = ("a", "b", "a", "b")) -> tuple[Tensor, Tensor]:
    """Two episodes of two turns each, of one group; the second turn of the first had an invalid action."""
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, True], [True, True, False]])
    inputs: dict[str, Any] = {
        "token_rewards": torch.zeros(4, 3),
        "response_mask": mask,
        "group_index": torch.zeros(4, dtype=torch.int64),
        "trajectory_index": torch.tensor([0, 0, 1, 1]),
        "step_index": torch.tensor([0, 1, 0, 1]),
        "step_rewards": torch.tensor([0.0, 4.0, 1.0, 2.0]),
        "turn_penalties": torch.tensor([0.0, 0.5, 0.0, 0.0]),
        "state_texts": states,
        "response_tokens": torch.zeros(4, 3, dtype=torch.int64),
        "valid": torch.tensor(valid),
    }
    names = ADVANTAGES.describe("ranked", str(file)).inputs
    found = ADVANTAGES.get("ranked", str(file))(*[inputs[name] for name in names], config=CONFIG)
    return found[0], found[1]


def trainer_of(folder: Path, **parts: str) -> Path:
    managed_fork(folder, estimator="ranked", **parts)
    return folder / "verl/trainer/ppo/ray_trainer.py"


def test_the_loops_own_statements_prepare_what_its_function_reads(tmp_path: Path) -> None:
    # returns with discount 0.5: 0 + 0.5 x 4 = 2 and 4, less the penalty 0.5, which is 3.5; 1 + 0.5 x 2 = 2 and 2
    # state a: 2 and 2, mean 2; state b: 3.5 and 2, mean 2.75; times 2 x 3, which the loop doubles
    advantages, returns = estimated(trainer_of(tmp_path), [True] * 4)
    assert advantages.tolist() == [[0, 0, 0], [4.5, 0, 0], [0, 0, 0], [-4.5, -4.5, 0]]
    assert torch.equal(advantages, returns)


def test_rows_without_a_reward_are_not_shown(tmp_path: Path) -> None:
    # without the first episode the turns of the second are alone in their states
    assert not estimated(trainer_of(tmp_path), [False, False, True, True])[0].any()
    # one state: 2, 3.5, 2 and 2, mean 2.375, times 6
    advantages = estimated(trainer_of(tmp_path), [True] * 4, ("a",) * 4)[0]
    assert advantages[:, 0].tolist() == [-2.25, 6.75, -2.25, -2.25]


def test_a_failure_names_the_forks_line(tmp_path: Path) -> None:
    file = trainer_of(tmp_path)
    core = tmp_path / "ranked/core_ranked.py"
    core.write_text(core.read_text().replace("    breakpoint()", "    raise ValueError('no ranks')"))
    with pytest.raises(RequestError, match=r"failed for ranked: ValueError: no ranks \(.*core_ranked.py:17\)"):
        estimated(file, [True] * 4)
