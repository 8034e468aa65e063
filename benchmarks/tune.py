"""Preferences, reward models and distillation next to TRL's trainers: same model, token ids and settings, turn by turn.

    python benchmarks/tune.py --trl-python PATH [MODEL_FOLDER] [--methods dpo,kto] [--rounds 4] [--preload LIBRARY]

PATH is a Python that has TRL (its own environment: pip install torch==2.13.0 trl). Beside posttrain's DPO, KTO, reward model
and distillation of texts run TRL's DPOTrainer, KTOTrainer, RewardTrainer and GKDTrainer. Each runs as its user would run it,
and waits before every update for its turn, so that all meet the same machine. TRL reads the token ids that posttrain made of
the rows, in the same order. It runs in both ways that its users have: float32 weights with bfloat16 arithmetic, which is what
posttrain does, and bfloat16 weights, which round small updates away. Where a loss depends on the micro-batch in TRL (the KL of
KTO), its micro-batch is the whole step.

Rows: prompts and completions of log-normal lengths (sigma 0.8, --words their median); good completions are written in other words
than bad ones. The teacher is the model with seeded noise on its matrices, the reward model's head is a seeded normal one. The
second table compares losses step by step; posttrain in float32 runs first, alone: the distance of the bfloat16 run from it is
the noise of bfloat16 on this curve. CPU seconds are those of all threads; they are steadier beside other processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from step import Worker, say

GOOD = "the sum of two numbers is more than either when both are above zero"
BAD = "green water over seven hills runs down and never asks who owns any stone"
METHODS = ("dpo", "kto", "reward_model", "distill")
PAIRED = ("dpo", "reward_model")
LR, MAX_TOKENS = 1e-5, 1024
OWN, EXACT = "posttrain:bfloat16", "posttrain:float32"
LABELS = {
    EXACT: "posttrain, float32",
    OWN: "posttrain",
    "trl:float32": "trl, float32 weights",
    "trl:bfloat16": "trl, bfloat16 weights",
}
PAD = "<|endoftext|>"  # not the end token: transformers reads a classifier's score before the padding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model folder; default: the demo's")
    parser.add_argument("--trl-python", default=os.environ.get("POSTTRAIN_TRL_PYTHON"))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=16, help="sequences of an update; a pair is two")
    parser.add_argument("--words", type=float, default=50.0, help="median words of a prompt, and of a completion")
    parser.add_argument("--micro", type=int, default=8, help="sequences of a micro-batch, in both")
    parser.add_argument("--ways", default=",".join(LABELS), help="what runs; posttrain:bfloat16 is always among them")
    parser.add_argument("--preload", help="a library that every process loads first")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        who, _, dtype = arguments.worker.partition(":")
        folder = Path(arguments.folder)
        run = json.loads((folder / "run.json").read_text())
        {"posttrain": ours, "trl": trl}[who](arguments.model, folder, run, dtype)
        return
    from common import print_rows

    from posttrain.models.smollm2 import smollm2_135m_instruct

    path = arguments.model or str(smollm2_135m_instruct())
    speed, curves = [], []
    for method in arguments.methods.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            found = measure(method, path, Path(temporary), arguments)
        speed += speed_rows(method, found)
        curves += curve_rows(method, found)
    header = [
        "",
        "s per update",
        "tokens/s",
        "time / posttrain's",
        "lowest-highest",
        "CPU s per update",
        "CPU s / posttrain's",
    ]
    print_rows(header, speed)
    print()
    steps = [f"step {number + 1}" for number in range(arguments.rounds + 1)]
    print_rows(["loss", *steps, "largest difference", "of posttrain's from its float32"], curves)


def measure(method: str, path: str, folder: Path, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Run all ways of a method. Returns: by name the answers of every round, the first of which warms up."""
    steps = arguments.rounds + 1
    start = prepared_models(method, path, folder)
    rows = written_rows(method, folder, arguments.sequences * steps, arguments.words)
    run = {"method": method, "steps": steps, "sequences": arguments.sequences, "micro": arguments.micro}
    run |= {"teacher": str(folder / "teacher"), "data": str(rows)}
    run["ids"] = token_ids(ours_config(start, folder, run, "float32"), method)
    files = {"run.json": json.dumps(run)}
    found: dict[str, list[dict[str, float]]] = {}

    def turns(names: list[str]) -> None:
        workers = {}
        for name in names:
            workers[name] = Worker(name, start, folder / name.replace(":", "_"), arguments, files)
            found[name] = []
        for _ in range(steps):
            for name, worker in workers.items():
                found[name].append(worker.turn())
        for worker in workers.values():
            worker.close()

    ways = arguments.ways.split(",")
    if EXACT in ways:
        turns([EXACT])
    turns([OWN, *(way for way in ways if way.startswith("trl:") and arguments.trl_python)])
    return found


def speed_rows(method: str, found: Mapping[str, list[dict[str, float]]]) -> list[list[str]]:
    from common import median

    table = []
    for name in found:
        if name == EXACT:  # it had the machine to itself
            continue
        cells = []
        for clock in ("step_s", "cpu_s"):
            own = [step[clock] for step in found[OWN][1:]]
            seconds = [step[clock] for step in found[name][1:]]
            ratios = sorted(theirs / mine for mine, theirs in zip(own, seconds, strict=True))
            cells.append((f"{median(seconds):.2f}", f"{median(ratios):.2f}x", f"{ratios[0]:.2f}-{ratios[-1]:.2f}x"))
        tokens = [step["tokens"] for step in found[OWN][1:]]
        rates = [count / step["step_s"] for count, step in zip(tokens, found[name][1:], strict=True)]
        (shown, ratio, spread), (cpu_s, cpu_ratio, _) = cells
        table.append([f"{method}, {LABELS[name]}", shown, f"{median(rates):.0f}", ratio, spread, cpu_s, cpu_ratio])
    return table


def curve_rows(method: str, found: Mapping[str, list[dict[str, float]]]) -> list[list[str]]:
    losses = {name: [step["loss"] for step in steps] for name, steps in found.items()}

    def apart(one: str, other: str) -> str:
        return f"{max(abs(a - b) for a, b in zip(losses[one], losses[other], strict=True)):.4f}"

    table = []
    for name, values in losses.items():
        shown = [f"{method}, {LABELS[name]}", *(f"{value:.4f}" for value in values)]
        noise = apart(OWN, EXACT) if name == OWN and EXACT in losses else ""
        table.append([*shown, "" if name in (OWN, EXACT) else apart(OWN, name), noise])
    return table


def written_rows(method: str, folder: Path, sequences: int, median_words: float) -> Path:
    """Write seeded rows as a user has them. Returns: the file."""
    draw = random.Random(0)

    def text(words: str) -> str:
        count = max(2, min(300, round(median_words * draw.lognormvariate(0.0, 0.8))))
        return " ".join(draw.choice(words.split()) for _ in range(count))

    rows: list[dict[str, object]] = []
    for number in range(sequences // (2 if method in PAIRED else 1)):
        prompt = f"{number}: {text(f'{GOOD} {BAD}')}?"
        if method in PAIRED:
            rows.append({"prompt": prompt, "chosen": text(GOOD), "rejected": text(BAD)})
        elif method == "kto":
            rows.append({"prompt": prompt, "completion": text((GOOD, BAD)[number % 2]), "label": number % 2 == 0})
        else:
            rows.append({"prompt": prompt, "response": text(GOOD)})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def prepared_models(method: str, path: str, folder: Path) -> str:
    """Write the teacher or the reward model's start, where the method has one. Returns: the folder that training starts from."""
    if method not in ("reward_model", "distill"):
        return path
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    generator = torch.Generator().manual_seed(0)
    kind = AutoModelForSequenceClassification if method == "reward_model" else AutoModelForCausalLM
    more = {"num_labels": 1} if method == "reward_model" else {}
    model = kind.from_pretrained(path, dtype=torch.float32, **more)
    tokenizer = AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        if method == "reward_model":
            model.score.weight.copy_(0.02 * torch.randn(model.score.weight.shape, generator=generator))
            tokenizer.pad_token = PAD
            model.config.pad_token_id = tokenizer.pad_token_id
        else:
            for weight in model.model.layers.parameters():
                if weight.ndim == 2:
                    weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=generator))
    place = folder / ("start" if method == "reward_model" else "teacher")
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place) if method == "reward_model" else path


def ours_config(path: str, folder: Path, run: Mapping[str, Any], dtype: str) -> Any:
    from posttrain.config import SftConfig, TuneConfig

    method = run["method"]
    sections: dict[str, Any] = {
        "run": {"folder": str(folder / "run"), "total_steps": run["steps"]},
        "model": {"path": path, "compute_dtype": dtype},
        "data": {
            "train_files": [run["data"]],
            "sequences_per_step": run["sequences"],
            "max_tokens": MAX_TOKENS,
            "shuffle": False,
        },
        "policy": {
            "sequences_per_micro_batch_per_device": run["micro"],
            "optimizer": {"lr": LR, "weight_decay": 0.0},
            "schedule": {"name": "constant"},
        },
        "checkpoint": {"at_end": False},
        "tracking": {"trackers": ["turns"]},
    }
    if method == "distill":
        divergence = {"name": "jensen_shannon", "beta": 0.5}
        sections["distillation"] = {"teachers": {"one": {"path": run["teacher"]}}, "divergence": divergence}
        return SftConfig.model_validate(sections)
    return TuneConfig.model_validate(sections | {"method": {"name": method}})


def token_ids(config: Any, method: str) -> list[dict[str, Any]]:
    """Return what posttrain makes of the rows: token ids, and where completions begin."""
    from posttrain.data.preferences import load_preferences
    from posttrain.data.sft import load_texts
    from posttrain.models.loading import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    if method == "distill":
        texts = load_texts(config.data.train_files, config.data, tokenizer, what="training").texts
        sides, labels = [[text] for text in texts], [True] * len(texts)
    else:
        rows = load_preferences(config.data.train_files, config, tokenizer, what="training").rows
        sides, labels = [list(row.sides) for row in rows], [row.desirable for row in rows]
    found = []
    for texts, label in zip(sides, labels, strict=True):
        start = int(texts[0].learned.argmax())
        completions = [text.token_ids[start:].tolist() for text in texts]
        found.append({"prompt": texts[0].token_ids[:start].tolist(), "completions": completions, "label": label})
    return found


def ours(path: str, folder: Path, run: Mapping[str, Any], dtype: str) -> None:
    from posttrain.cli.process import prepare

    config = ours_config(path, folder, run, dtype)
    prepare(config)
    from posttrain.build.sft import sft_run
    from posttrain.build.tune import tune_run
    from posttrain.registry import TRACKERS

    loss = "distillation/divergence" if run["method"] == "distill" else "policy/loss"

    @TRACKERS.register("turns")
    class Turns:
        """A tracker that holds the run until it is its turn."""

        start = 0.0

        def begin(self, *_: object) -> None:
            say({})
            self.wait()

        def wait(self) -> None:
            sys.stdin.readline()
            self.start = time.process_time()

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            answer = {"step_s": metrics["time/step_s"], "tokens": metrics["data/tokens"], "loss": metrics[loss]}
            say(answer | {"cpu_s": time.process_time() - self.start})
            self.wait()

        def ignore(self, *_: object, **__: object) -> None:
            """phase, advance, message, close"""

        phase = advance = message = close = ignore

    (sft_run if run["method"] == "distill" else tune_run)(config)


def trl(path: str, folder: Path, run: Mapping[str, Any], dtype: str) -> None:
    from tune_trl import train

    train(path, folder, run, dtype, learning_rate=LR, pad=PAD, max_tokens=MAX_TOKENS)


if __name__ == "__main__":
    main()
