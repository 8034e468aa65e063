"""Alarms in live runs of the tiny model: each planted fault is told within three steps, a healthy run tells nothing."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.backends.runtime import inprocess
from posttrain.build import runs
from posttrain.build.sft import sft_run
from posttrain.build.train import train_run
from posttrain.config import RunConfig, SftConfig

# The share of digits: something that the tiny model can learn to write more of, in many ways.
DIGITS = (
    "def score(data_source, solution_str, ground_truth, extra_info):\n"
    "    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)\n"
)
ALWAYS_RIGHT = "def score(**_):\n    return 1.0\n"
Run = Callable[..., list[str]]


class Noting:
    """A tracker that keeps what is said to people."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)

    def nothing(self, *_: object, **__: object) -> None:
        """begin, phase, advance, log, close"""

    begin = phase = advance = log = close = nothing


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Noting:
    found = Noting()
    monkeypatch.setattr(runs, "tracker", lambda name, folder: found)
    return found


@pytest.fixture
def run(tmp_path: Path, tiny_llama: Path, noting: Noting) -> Run:
    """Runs GRPO on sums; returns the alarms."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n}+{n}="}],
            "reward_model": {"ground_truth": "0"},
            "data_source": "sums",
        }
        for n in range(64)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(
        steps: int, lr: float = 1e-3, reward: str = DIGITS, model: Path = tiny_llama, engine: str = "native"
    ) -> list[str]:
        (tmp_path / "reward.py").write_text(reward)
        sections: dict[str, Any] = {
            "run": {"seed": 1, "total_steps": steps, "folder": str(tmp_path / "run")},
            "model": {"path": str(model), "compute_dtype": "float32"},
            "data": {"train_files": [str(tmp_path / "train.jsonl")], "prompts_per_step": 4},
            "rollout": {"engine": engine, "samples_per_prompt": 8, "max_response_tokens": 12},
            "reward": {"workers": 1, "terms": [{"name": "score", "path": str(tmp_path / "reward.py")}]},
            "policy": {"optimizer": {"lr": lr}},
            "checkpoint": {"at_end": False},
            "tracking": {"trackers": ["console"], "samples_every_steps": None},
            "placement": {"device": "cpu", "cpu_threads": 1},
        }
        train_run(RunConfig.model_validate(sections))
        return alarms(noting)

    return start


def alarms(noting: Noting) -> list[str]:
    """The alarms but that of responses that are cut: this model ends none, from the first step on."""
    return [text for text in noting.said if "Usual causes: " in text and "cut at the token limit" not in text]


@pytest.mark.slow
def test_a_healthy_run_of_sixty_steps_raises_no_alarm(run: Run, tmp_path: Path) -> None:
    assert run(60) == []
    rewards = [json.loads(line)["reward/mean"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert sum(rewards[-5:]) / 5 > 0.4 > 0.1 > sum(rewards[:5]) / 5  # it has learned something, so it was a run


def test_a_learning_rate_a_thousand_times_too_high(run: Run) -> None:
    found = run(3, lr=1.0)
    assert any(alarm.startswith("step 2: the policy has stopped exploring: policy/entropy is ") for alarm in found)
    assert all("a learning rate that is too high" in alarm for alarm in found)


def test_a_reward_that_is_always_one(run: Run) -> None:
    [alarm] = run(3, reward=ALWAYS_RIGHT)
    assert alarm.startswith("step 3: no group has had a signal for 3 steps: group/no_signal_share is 1. ")


def test_a_template_that_leaves_the_question_out(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    template = (model / "chat_template.jinja").read_text()
    assert "message['content']" in template
    (model / "chat_template.jinja").write_text(template.replace("message['content']", "message['contents']"))
    [alarm] = run(1, model=model)
    assert alarm.startswith(
        "step 1: different prompts read the same: prompt/distinct_share is 0.25. "
    )  # 1 text / 4 prompts


def test_a_sampler_with_old_weights(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = inprocess.make_sampler

    def with_a_copy(config: Any, model_config: Any, load: Any, *more: Any, **settings: Any) -> Any:
        stale = copy.deepcopy(load())  # which no update reaches, although every version is said to have arrived
        return made(config, model_config, lambda: stale, *more, **settings)

    monkeypatch.setattr(inprocess, "make_sampler", with_a_copy)
    found = run(3, lr=1e-2, engine="hf")
    assert found[0].startswith(("step 2: sampler and trainer disagree", "step 3: sampler and trainer disagree"))


def test_faults_of_supervised_fine_tuning(tmp_path: Path, tiny_llama: Path, noting: Noting) -> None:
    """Six steps of one kind of row, then a step of rows that nobody would write."""
    usual = [{"question": f"{n}+1?", "answer": "the answer is 7"} for n in range(24)]
    broken = [{"question": f"{n}+1?", "answer": "\x00\x7f\x03~^|" * 12} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*usual, *broken]))
    sections: dict[str, Any] = {
        "run": {"folder": str(tmp_path / "run"), "total_epochs": 1},
        "model": {"path": str(tiny_llama), "compute_dtype": "float32"},
        "data": {"train_files": [str(tmp_path / "train.jsonl")], "sequences_per_step": 4, "shuffle": False},
        "policy": {"optimizer": {"lr": 3e-2}, "schedule": {"name": "constant"}},
        "checkpoint": {"at_end": False},
        "tracking": {"trackers": ["console"]},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }
    sft_run(SftConfig.model_validate(sections))
    found = alarms(noting)
    assert [alarm.split(":")[0] for alarm in found] == ["step 7"] * len(found)
    assert "the loss has jumped: policy/loss is " in found[0]
    assert found[0].endswith("in the training files") and "train.jsonl:2" in found[0]


def test_a_reward_with_the_wrong_sign_is_reported_before_the_first_step(
    run: Run, noting: Noting, tmp_path: Path
) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n}+0="}],
            "reward_model": {"ground_truth": str(n)},
            "data_source": "s",
        }
        for n in range(8)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(1, reward="def score(solution_str, ground_truth):\n    return -float(solution_str == ground_truth)\n")
    warning = "warning: the reward gives reference answers less than wrong ones: -1 and 0"
    assert sum(text.startswith(warning) for text in noting.said) == 1
