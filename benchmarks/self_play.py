"""Self-play: a policy trained on games against itself alone, measured against a fixed opponent that it never trains with.

    python benchmarks/self_play.py FOLDER [--steps 120] [--seeds 1,2,3]
    python benchmarks/self_play.py FOLDER --table

The game is nim (take 1 to 3 stones, the last one wins). Before training, a random model of two layers is fine-tuned on random
games, so its moves are legal and no more. GRPO then has the present policy on both sides, of which one is trained. Validation
begins from numbers of stones that no training game begins with, against an opponent that uses every mistake (`best`; it
begins, in positions that a perfect player wins), and against one that plays at random. Legal moves alone win what the column of
step 0 shows. A finished run is not repeated.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from common import print_table, taught, written_to

import posttrain
from posttrain.report.read import read_run

MOST = 3
TRAINED = (5, 6, 7, 9, 10, 11, 13)  # stones at the beginning
HELD_OUT = (8, 12)
OPPONENTS = ("best", "random")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="models and runs are written into it")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--games", type=int, default=6000, help="random games that the model is taught with")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    seeds = [int(each) for each in arguments.seeds.split(",")]
    if not arguments.table:
        for seed in seeds:
            learn(arguments.folder, seed, arguments.steps, arguments.games, arguments.lr)
    every = max(arguments.steps // 4, 1)
    titles = [f"step {step}" for step in range(0, arguments.steps + 1, every)]
    print_table(["seed", "against", "measure", *titles], table(arguments.folder, seeds))


def learn(folder: Path, seed: int, steps: int, games: int, lr: float) -> None:
    place = folder / f"seed_{seed}"
    if (place / "done").exists():
        return
    measured = {"weight": 0, "validation_weight": 1}
    held_out = {"stones": list(HELD_OUT), "most": MOST, "instruction": "", "begins": "opponent"}
    written = {
        "run": {"name": "self_play", "folder": str(place), "seed": seed, "total_steps": steps},
        "model": {"path": str(beginner(folder, seed, games)), "compute_dtype": "float32"},
        "data": {"train_files": [], "prompts_per_step": 8, "max_prompt_tokens": 64},
        "environment": {
            "max_turns": 16,
            "train_episodes": 16384,
            "validation_episodes": 64,
            "workers": 32,
            "named": {
                "self": {
                    "name": "nim",
                    "settings": {"stones": list(TRAINED), "most": MOST, "instruction": "", "opponent": "policy"},
                    "validation_weight": 0,
                },
                **{each: {"name": "nim", "settings": {**held_out, "opponent": each}, **measured} for each in OPPONENTS},
            },
        },
        "rollout": {"samples_per_prompt": 48, "temperature": 1.0, "max_response_tokens": 3},
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "kl_coef": 0.0, "entropy_coef": 0.01},
        "policy": {
            "sequences_per_mini_batch": 384,
            "sequences_per_micro_batch_per_device": 128,
            "optimizer": {"lr": lr, "max_grad_norm": 1.0},
            "schedule": {"name": "constant"},
        },
        "validation": {"temperature": 1.0, "samples_per_prompt": 2, "every_steps": max(steps // 4, 1)},
        "checkpoint": {"at_end": False},
    }
    posttrain.train(written_to(place.with_suffix(".yaml"), written))
    (place / "done").touch()


def beginner(folder: Path, seed: int, games: int) -> Path:
    """Return a model that has read random games: it takes 1 to 3 stones, where so many are left, each as likely."""
    draws = random.Random(seed)
    return taught(folder / "beginner" / str(seed), seed, (game(draws) for _ in range(games)), layers=2, max_tokens=400)


def game(draws: random.Random) -> dict[str, object]:
    """A random game, as nim words it; all moves of the assistant are trained."""
    left = draws.randint(MOST, 14)
    seen = f"{left} left."
    if draws.random() < 0.5:
        left, seen = others(left, draws)
    messages = []
    while left:
        taken = draws.randint(1, min(MOST, left))
        messages += [{"role": "user", "content": seen}, {"role": "assistant", "content": str(taken)}]
        left -= taken
        if left:
            left, seen = others(left, draws)
    return {"messages": messages} if messages else game(draws)


def others(left: int, draws: random.Random) -> tuple[int, str]:
    """Take for the other side. Returns: the stones left, and what the player reads."""
    taken = draws.randint(1, min(MOST, left))
    return left - taken, f"I take {taken}. {left - taken} left."


def table(folder: Path, seeds: list[int]) -> list[list[str]]:
    rows = []
    for seed in seeds:
        if not (folder / f"seed_{seed}").is_dir():
            continue
        run = read_run(folder / f"seed_{seed}")
        for opponent in OPPONENTS:
            for name in ("success", "action_is_valid"):
                series = run.series(f"validation/{opponent}/environment/{name}")
                rows.append([str(seed), opponent, name, *(f"{value or 0.0:.3f}" for value in series.values())])
    return rows


if __name__ == "__main__":
    main()
