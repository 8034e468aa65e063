"""Preferences become a reward model, the reward model trains a policy by PPO, and held-out prompts show what that gained.

    python examples/reward_model_to_ppo.py OUT [--seeds 1,2,3] [--model FOLDER] [--steps 30]

1. Pairs: two made texts to a prompt, of which the one with the greater share of digits is the better one.
2. Fine-tuning on the texts of both sides: the policy that everything below starts from.
3. A reward model (`posttrain tune` with method reward_model), exported as a sequence classification model.
4. PPO with a critic, whose reward is that model (`reward.model.path`), less a KL penalty to the policy of step 2 (`reward.kl`).
5. Responses to held-out prompts, before and after: the reward model's score, and the share of digits, the rule behind the pairs,
   which neither PPO nor its reward model was shown.

Without --model the model is a random one of two layers, and a seed takes a minute on a CPU. A finished run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from posttrain.api.runs import Run
from posttrain.build.sft import sft_run
from posttrain.build.train import train_run
from posttrain.build.tune import tune_run
from posttrain.config import RunConfig, SftConfig, TuneConfig
from posttrain.models.tiny import write_tiny_model
from posttrain.run.export import export_checkpoint

DIGITS, LETTERS = "0123456789", "abcdefghijklmnopqrstuvwxyz ,.?!ABCDEFGH"
LENGTH = 12  # characters of a made text, and tokens of a response
KL_COEF = 0.02  # score lost per nat; without it a seed found texts of few digits that the reward model scores high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--model", type=Path, help="a causal language model; give --lr with it, such as 1e-5")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--pairs", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30, help="steps of PPO")
    arguments = parser.parse_args()
    print("| seed | held-out pairs ordered rightly | score of held-out responses | share of digits in them |")
    print("| --- | --- | --- | --- |")
    for seed in map(int, arguments.seeds.split(",")):
        folder = arguments.out / f"seed_{seed}"
        write_pairs(folder, seed, arguments.pairs)
        model = fine_tuned(folder, arguments.model or write_tiny_model(folder / "model", seed=seed), seed, arguments.lr)
        ordered = reward_model(folder, model, seed, arguments.lr)
        before, after = ppo(folder, model, seed, arguments.steps, arguments.lr)
        gains = [f"{before[name]:.3f} → {after[name]:.3f}" for name in ("score", "digits")]
        print(f"| {seed} | {ordered:.3f} | {gains[0]} | {gains[1]} |", flush=True)


def write_pairs(folder: Path, seed: int, pairs: int) -> None:
    """Write pairs to train on and held-out ones, and the texts of the former, each alone."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = ([made_pair(draw) for _ in range(count)] for count in (pairs, 128))
    texts = [{"prompt": pair["prompt"], "response": pair[side]} for pair in train for side in ("chosen", "rejected")]
    for name, rows in (("train_pairs", train), ("held_out_pairs", held_out), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def fine_tuned(folder: Path, model: Path, seed: int, lr: float) -> Path:
    """Teach the model to write texts of both kinds. Returns: its export, ``folder/start``."""
    config = SftConfig.model_validate(
        {
            "run": {"name": "sft", "folder": str(folder / "sft_run"), "seed": seed},
            "model": {"path": str(model), "compute_dtype": "float32"},
            "data": {"train_files": str(folder / "texts.jsonl"), "sequences_per_step": 32},
            "policy": {"optimizer": {"lr": lr}, "sequences_per_micro_batch_per_device": 32},
            "tracking": {"trackers": []},
        }
    )
    run = sft_run(config)
    if not (folder / "start").exists():
        export_checkpoint(run, folder / "start")
    return folder / "start"


def reward_model(folder: Path, model: Path, seed: int, lr: float) -> float:
    """Train it, and export it to ``folder/reward``. Returns: the share of held-out pairs that it orders rightly."""
    config = TuneConfig.model_validate(
        {
            "run": {"name": "reward_model", "folder": str(folder / "reward_run"), "seed": seed},
            "model": {"path": str(model), "compute_dtype": "float32"},
            "data": {
                "train_files": str(folder / "train_pairs.jsonl"),
                "validation_files": str(folder / "held_out_pairs.jsonl"),
                "sequences_per_step": 64,
            },
            "method": {"name": "reward_model", "center_coef": 0.01},
            "policy": {"optimizer": {"lr": lr}, "sequences_per_micro_batch_per_device": 64},
            "tracking": {"trackers": []},
        }
    )
    run = Run(tune_run(config))
    if not (folder / "reward").exists():
        export_checkpoint(run.folder, folder / "reward")
    return last(run.metric("validation/accuracy"))


def ppo(folder: Path, model: Path, seed: int, steps: int, lr: float) -> tuple[dict[str, float], dict[str, float]]:
    """Train the policy by the reward model. Returns: the held-out responses before and after."""
    prompts = [{"prompt": f"say {number}", "data_source": "made", "answer": ""} for number in range(320)]
    random.Random(seed).shuffle(prompts)
    for name, rows in (("train", prompts[:256]), ("held_out", prompts[256:])):
        (folder / f"{name}_prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Four updates a step, of a quarter of its responses each
    update = {"optimizer": {"lr": lr}, "sequences_per_mini_batch": 32, "sequences_per_micro_batch_per_device": 32}
    config = RunConfig.model_validate(
        {
            "run": {"name": "ppo", "folder": str(folder / "ppo_run"), "seed": seed, "total_steps": steps},
            "model": {"path": str(model), "compute_dtype": "float32"},
            "data": {
                "train_files": str(folder / "train_prompts.jsonl"),
                "validation_files": str(folder / "held_out_prompts.jsonl"),
                "prompts_per_step": 32,
                "max_prompt_tokens": 64,
            },
            "rollout": {"samples_per_prompt": 4, "max_response_tokens": LENGTH},
            # The penalty keeps the policy near texts like those that the reward model was trained on
            "reward": {"terms": [], "model": {"path": str(folder / "reward")}, "kl": {"coef": KL_COEF}},
            "advantage": {"name": "gae"},
            "policy": update,
            "critic": update,
            "validation": {"temperature": 1.0},
            "tracking": {"trackers": []},
        }
    )
    run = Run(train_run(config))
    measured: list[dict[str, float]] = []
    for step in (0, steps):
        samples: list[dict[str, Any]] = run.validation_samples(step)
        scores = [float(sample["reward"]) for sample in samples]
        digits = [share_of_digits(sample["response"]) for sample in samples]
        measured.append({"score": sum(scores) / len(scores), "digits": sum(digits) / len(digits)})
    return measured[0], measured[1]


def made_pair(draw: random.Random) -> dict[str, str]:
    """Two texts of digits and other signs, in two different shares."""
    length = draw.randint(4, LENGTH)
    few, many = sorted(draw.sample(range(length + 1), 2))
    texts = {"chosen": text_with(draw, many, length), "rejected": text_with(draw, few, length)}
    return {"prompt": f"say {draw.randrange(320)}", **texts}


def text_with(draw: random.Random, digits: int, length: int) -> str:
    signs = [draw.choice(DIGITS) for _ in range(digits)] + [draw.choice(LETTERS) for _ in range(length - digits)]
    draw.shuffle(signs)
    return "".join(signs)


def share_of_digits(text: str) -> float:
    return sum(sign in DIGITS for sign in text) / max(len(text), 1)


def last(series: dict[int, float | None]) -> float:
    return series[max(series)] or 0.0


if __name__ == "__main__":
    main()
