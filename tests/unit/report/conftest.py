"""A made-up run folder: what the training loop writes, without the loop."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

CONFIG = """\
model:
  path: models/tiny-llama
data:
  train_files: [train.parquet]
run:
  name: {name}
  seed: {seed}
"""


def made_up_run(
    folder: Path, *, steps: int = 60, samples: int = 64, seed: int = 1, name: str = "demo", every: int = 20
) -> Path:
    """Write a run folder of ``steps`` steps with ``samples`` responses each, 8 per prompt, validated every ``every`` steps."""
    draw = random.Random(seed)
    (folder / "samples").mkdir(parents=True)
    (folder / "validation").mkdir()
    (folder / "config.yaml").write_text(CONFIG.format(name=name, seed=seed))
    info = {"name": name, "started": "2025-01-02T03:04:05+00:00", "versions": {"posttrain": "0.1.0", "torch": "2.13.0"}}
    (folder / "run.json").write_text(json.dumps(info | {"device": "cpu", "total_steps": steps, "status": "finished"}))
    lines, phases, now = [], [], 1_760_000_000.0
    for step in range(steps + 1):
        metrics: dict[str, Any] = {"step": step}
        skill = 0.3 + 0.4 * (1 - math.exp(-step / 20))
        if step:
            rows = [sample(draw, step, i, skill) for i in range(samples)]
            write_rows(folder / "samples" / f"step_{step}.jsonl", rows)
            write_rows(folder / "samples" / f"step_{step}.tokens.jsonl", token_lines(draw, rows))
            metrics |= training_metrics(draw, step, rows)
        if step % every == 0 or step == steps:
            rows = [sample(draw, step, 8 * i, skill) | {"advantage": None} for i in range(100)]
            write_rows(folder / "validation" / f"step_{step}.jsonl", rows)
            right = sum(row["reward"] == 1.0 for row in rows) / len(rows)
            metrics |= {"validation/chain_sum/accuracy": right, "validation/chain_sum/reward_mean": right}
            metrics |= {"time/validation_s": 6.0 + draw.random()}
        for phase in ("rollout", "reward", "update", "weight_sync", "validation"):
            if seconds := metrics.get(f"time/{phase}_s"):
                phases.append({"step": step, "phase": phase, "start_s": now, "end_s": now + seconds})
                now += seconds
        lines.append(json.dumps(metrics, sort_keys=True) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    write_rows(folder / "timeline.jsonl", phases)
    return folder


def training_metrics(draw: random.Random, step: int, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Plausible numbers for one step."""
    rollout_s, update_s = 4 + draw.random(), 3 + draw.random()
    return {
        "reward/mean": sum(row["reward"] or 0.0 for row in rows) / len(rows),
        "response/length_mean": 14 + 6 * math.exp(-step / 15) + draw.random(),
        "reference/kl": 0.0008 * step * (1 + 0.2 * draw.random()),
        "policy/kl_old": 0.0001 * draw.random(),
        "policy/entropy": 0.9 * math.exp(-step / 40) + 0.1 * draw.random(),
        "policy/grad_norm": 0.5 + draw.random() ** 4,
        "policy/lr": 1e-5,
        "gap/mean": 2e-6 * (1 + draw.random()),
        "group/no_signal_share": 0.3 + 0.2 * draw.random(),
        "speed/rollout_tokens_per_s": 600 + 40 * draw.random(),
        "speed/update_tokens_per_s": 900 + 90 * draw.random(),
        "time/rollout_s": rollout_s,
        "time/reward_s": 0.1,
        "time/update_s": update_s,
        "time/weight_sync_s": 0.01,
        "time/step_s": rollout_s + update_s + 0.3,
    }


def sample(draw: random.Random, step: int, number: int, skill: float) -> dict[str, Any]:
    """One response to one sum; ``skill`` is the chance that it is right."""
    a, b = draw.randrange(10, 99), draw.randrange(10, 99)
    right, invalid = draw.random() < skill, draw.random() < 0.02
    question = f"State the final answer to the following arithmetic problem: {a} + {b} ="
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    reward = None if invalid else 1.0 if right else 0.0
    return {
        "step": step,
        "sample_id": f"train.parquet:{number // 8}/{number % 8}",
        "prompt_id": f"train.parquet:{number // 8}",
        "data_source": "chain_sum",
        "prompt": f"{system}{question}<|im_end|>\n<|im_start|>assistant\n",
        "response": f"{a} + {b} = {a + b if right else a + b + draw.randrange(1, 20)}",
        "ground_truth": str(a + b),
        "reward": reward,
        "reward_terms": {} if invalid else {"reasoning_gym": reward},
        "invalid": {"reason": "timeout", "detail": "the grader took longer than 5 s"} if invalid else None,
        "advantage": draw.uniform(-1.5, 1.5),
        "stop_reason": "eos",
        "policy_version": step,
        "response_tokens": draw.randrange(5, 40),
    }


def token_lines(draw: random.Random, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What step_N.tokens.jsonl holds: the words of each response are its tokens."""
    words = [word for row in rows for word in row["response"].split()]
    ids = {word: number for number, word in enumerate(dict.fromkeys(words), start=100)}
    lines: list[dict[str, Any]] = [{"texts": {str(number): f" {word}" for word, number in ids.items()}}]
    for line, row in enumerate(rows):
        tokens = [ids[word] for word in row["response"].split()]
        logprobs = [round(-(draw.random() ** 2), 4) for _ in tokens]
        gap = [round(draw.uniform(-2e-3, 2e-3), 6) for _ in tokens]
        lines.append(
            {
                "line": line, "sample_id": row["sample_id"], "token_ids": tokens, "sampled": 1,
                "in_loss": int(row["reward"] is not None), "rollout_logprobs": logprobs, "gap": gap,
                "advantages": row["advantage"],
            }
        )  # fmt: skip
    return lines


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A small run: 4 steps of 16 samples, validated at 0, 2 and 4."""
    return made_up_run(tmp_path / "run", steps=4, samples=16, every=2)
