"""Every benchmark runs at its smallest size: that it starts and prints its table, not what it measures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from warm.processes import run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
MODEL, CHECKOUT, RUNS = (
    "MODEL",
    "CHECKOUT",
    "RUNS",
)  # stand for the tiny model's folder, one with LAUNCH, and one for runs
LAUNCH = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=x actor_rollout_ref.model.path=y \\
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
"""
# Script -> its arguments, and a word of its table.
SMALLEST: dict[str, tuple[str, str]] = {
    "async.py": (
        "MODEL --steps 3 --staleness 1 --case environments,resets,ragged,one_step --median-s 0.02 --update-s 0.02",
        "times as fast",
    ),
    "async_learning.py": ("RUNS --task digits --steps 2 --staleness 0,1 --seeds 1", "mean staleness"),
    "async_separate.py": ("--steps 7 --update-s 0.02", "each group once"),
    "boxes.py": ("--programs 2 --rounds 1", "programs/s"),
    "checkpoint.py": ("MODEL --rounds 1", "by every process its own part"),
    "contention.py": ("MODEL --neighbours 0", "GOMP_SPINCOUNT"),
    "controller.py": ("--samples 16 --steps 2 --tokens 8", "KiB a sample"),
    "corpus.py": ("CHECKOUT --dialect verl", "1 launches: 1 accepted"),
    "deaths.py": ("--workers 3 --light 2 --kills 1 --every 0 --samples 24", "| 3 | nothing |"),
    "distillation.py": (
        "RUNS --model MODEL --seeds 1 --steps 1 --student run.total_steps=1 data.prompts_per_step=4 policy.epochs_per_step=1 "
        "policy.sequences_per_mini_batch=4 validation.max_prompts=4",
        "as good as the teacher after",
    ),
    "environments.py": ("2 2", "in flight"),
    "environments_native.py": ("--episodes 4 --turns 2 --tokens 4 --median-s 0.01", "schedule bound"),
    "forks.py": ("CHECKOUT --arithmetic", "1 launches: 1 accepted (100%); 1 arithmetic right, 1 as it is"),
    "generate_evaluate.py": ("--rows 8 --samples 2 --tokens 4 --parts 64 --draws 0", "0 bootstrap draws"),
    "gpu.py": (
        "--device cpu --tiny --rounds 1 --sequences 4 --groups 1 --micro-batch 4 --samples 8 --tokens 4",
        "model.generate",
    ),
    "launch_arithmetic.py": ("CHECKOUT run.sh", "1 right, 0 wrong"),
    "mistakes.py": ("examples --keys 2 --values 2", "2 tried, 2 named, 2 right"),
    "own_loop.py": ("--tiny --rounds 1 --steps 2", "metrics of all 2 steps are equal"),
    "overhead.py": ("--tiny --seconds 1", "of a step"),
    "predicted.py": (
        "--model MODEL --prompts 2 --samples 2 --response 8 --words 6 --steps 2 --threads 1",
        "predicted / measured",
    ),
    "prefill.py": ("MODEL --prompts 2x8 --rounds 1", "of peak, fast"),
    "restarts.py": ("--every 2 --kills 1", "ETTR"),
    "rollout.py": ("MODEL --sequences 8 --rounds 1 --tokens 4", "gap to the trainer"),
    "scaling.py": ("", "512"),
    "scoring.py": ("--tokens 64 --rounds 1 --dtypes float32 --entropy value", "float32, entropy's value"),
    "scoring_rewards.py": ("--answers 8 --rounds 1", "math_verify"),
    "sft.py": ("MODEL --rounds 1 --rows 4", "posttrain, micro-batch 8"),
    "start.py": ("--rounds 1 --only train --model MODEL", "to the first token"),
    "step.py": ("MODEL --rounds 1", "posttrain, micro-batch 32"),
    "self_play.py": ("RUNS --steps 1 --seeds 1 --games 64", "action_is_valid"),
    "strategy.py": ("RUNS --steps 1 --seeds 1 --games 0.004", "sound_share"),
    "tune.py": ("MODEL --methods dpo --rounds 1 --sequences 4 --words 3", "dpo, posttrain, float32"),
    "train.py": ("MODEL --rounds 1 --sequences 4 --micro-batch 2 --only packed", "packed, by tokens"),
    "update.py": ("MODEL --rounds 1 --groups 2", "prompts shared"),
    "weight_sync.py": ("MODEL --rounds 1 --bucket-mib 1", "shared memory"),
}
# Their processes are started as users' are: they are looked for among their descendants.
COLD = {"deaths.py", "restarts.py"}


def test_every_benchmark_is_here() -> None:
    scripts = {path.name for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text("utf-8")}
    assert set(SMALLEST) == scripts


@pytest.mark.parametrize("script", SMALLEST)
def test_it_runs_to_its_table(script: str, tiny_llama: Path, tmp_path: Path) -> None:
    place = tmp_path / "fork" if script == "forks.py" else tmp_path
    place.mkdir(exist_ok=True)
    (place / "run.sh").write_text(LAUNCH)
    arguments, word = SMALLEST[script]
    words = [
        {MODEL: str(tiny_llama), CHECKOUT: str(tmp_path), RUNS: str(tmp_path / "runs")}.get(each, each)
        for each in arguments.split()
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = run(
        [sys.executable, f"benchmarks/{script}", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        children=script not in COLD,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert word in done.stdout
