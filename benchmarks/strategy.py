"""Learning a strategy: a small model that writes the right form and hardly reads the answers it gets learns to by GRPO.

    python benchmarks/strategy.py FOLDER [--steps 200] [--seeds 1,2,3]
    python benchmarks/strategy.py FOLDER --table

The task is the lock of examples/code_lock.py, whose held-out codes no training episode has. Before training, a random model of
three layers is fine-tuned on games of a beginner, who writes codes (so the form is right: action_is_valid) and hardly reads the
answers. Success beyond 8/256 needs the answers; sound_share is the share of guesses, from the second of an episode on, that
agree with all answers so far. A finished run is not repeated.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from common import print_table, taught, written_to

import posttrain
from posttrain.report.read import read_run

LOCK = Path(__file__).resolve().parent.parent / "examples" / "code_lock.py"
# Games that the model is taught with, in order: the share of the digits seen to be right that a guess keeps, and their number.
SCHOOL = ((1.0, 24000), (0.25, 8000))
METRICS = ("success", "sound_share", "action_is_valid")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="models and runs are written into it")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--games", type=float, default=1.0, help="share of the games that the model is taught with")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    seeds = [int(each) for each in arguments.seeds.split(",")]
    if not arguments.table:
        for seed in seeds:
            learn(arguments.folder, seed, arguments.steps, arguments.games)
    print_table(["seed", "measure", *titles(arguments.steps)], table(arguments.folder, seeds))


def learn(folder: Path, seed: int, steps: int, games: float) -> None:
    place = folder / f"seed_{seed}"
    if (place / "done").exists():
        return
    model = beginner(folder, seed, games)
    written = {
        "run": {"name": "strategy", "folder": str(folder / f"seed_{seed}"), "seed": seed, "total_steps": steps},
        "model": {"path": str(model), "compute_dtype": "float32"},
        "data": {"train_files": [], "prompts_per_step": 16, "max_prompt_tokens": 64},
        "environment": {
            "name": f"{LOCK}:build",
            "max_turns": 8,
            "train_episodes": 4096,
            "validation_episodes": 64,
            "workers": 0,
        },
        "rollout": {"samples_per_prompt": 8, "temperature": 1.0, "max_response_tokens": 6},
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "kl_coef": 0.0},
        "policy": {
            "sequences_per_mini_batch": 128,
            "sequences_per_micro_batch_per_device": 64,
            "optimizer": {"lr": 1e-3, "max_grad_norm": 1.0},
            "schedule": {"name": "constant"},
        },
        "validation": {"temperature": 1.0, "samples_per_prompt": 4, "every_steps": every(steps)},
        "checkpoint": {"at_end": False},
    }
    posttrain.train(written_to(place.with_suffix(".yaml"), written))
    (place / "done").touch()


def beginner(folder: Path, seed: int, games: float) -> Path:
    """A model that writes codes, and keeps a digit that it has seen to be right a quarter of the time."""
    draws = random.Random(seed)
    # Careful games first, so that it can read at all; then those of a beginner, whose play it takes on.
    rows = (row(draws, kept) for kept, count in SCHOOL for _ in range(int(count * games)))
    return taught(folder / "beginner" / str(seed), seed, rows, layers=3, max_tokens=512)


def every(steps: int) -> int:
    return max(steps // 4, 1)


def titles(steps: int) -> list[str]:
    return [f"step {step}" for step in range(0, steps + 1, every(steps))]


def table(folder: Path, seeds: list[int]) -> list[list[str]]:
    rows = []
    for seed in seeds:
        if not (folder / f"seed_{seed}").is_dir():
            continue
        run = read_run(folder / f"seed_{seed}")
        for name in METRICS:
            series = run.series(f"validation/{LOCK}:build/environment/{name}")
            rows.append([str(seed), name, *(f"{value or 0.0:.3f}" for value in series.values())])
    return rows


def row(draws: random.Random, kept: float) -> dict[str, object]:
    """The beginning of a game of such a beginner, and the next guess."""
    code = "".join(draws.choices("0123", k=4))
    shown, messages = "____", [{"role": "user", "content": "____"}]
    for _ in range(draws.randrange(8)):
        guess = guessed(shown, draws, kept)
        shown = "".join(
            right if right in (said, seen) else "_" for right, said, seen in zip(code, guess, shown, strict=True)
        )
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": shown}]
    return {"prompt": messages, "response": guessed(shown, draws, kept)}


def guessed(shown: str, draws: random.Random, kept: float) -> str:
    return "".join(seen if seen != "_" and draws.random() < kept else draws.choice("0123") for seen in shown)


if __name__ == "__main__":
    main()
