"""Seconds of a step as ``posttrain plan --on`` computes them, beside those that a run takes on this machine.

    python benchmarks/predicted.py [--model FOLDER] [--prompts 8] [--samples 8] [--response 64] [--steps 4]

The machine's peaks are measured first (a bfloat16 matrix product of 2048 x 2048, and a copy of 256 MB) and written into a
machine file; everything else is the plan's own default. All responses are of full length. Prints predicted and measured
seconds by part, the median of all steps but the first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from common import median, print_table
from transformers import AutoTokenizer

MEASURED = {"sampling": "time/rollout_s", "policy": "time/update_s", "reference log-probs": "time/logprobs_s"}
SIZE, COPIED = 2048, 256 * 10**6


def fastest(work: Callable[[], object], rounds: int = 10) -> float:
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def machine_file(folder: Path, threads: int) -> Path:
    """Measure this machine's peaks, as one device."""
    torch.set_num_threads(threads)
    left, right = torch.randn(SIZE, SIZE, dtype=torch.bfloat16), torch.randn(SIZE, SIZE, dtype=torch.bfloat16)
    product = fastest(lambda: left @ right)
    source = torch.zeros(COPIED // 4)
    target = torch.empty_like(source)
    copy = fastest(lambda: target.copy_(source))
    gb_s = 2 * COPIED / copy / 1e9  # read and written
    numbers = {
        "devices_per_node": 1,
        "tflops": round(2 * SIZE**3 / product / 1e12, 4),
        "memory_gib": 16,
        "memory_gb_s": round(gb_s, 2),
        "link_gb_s": round(gb_s, 2),
    }
    file = folder / "machine.yaml"
    file.write_text(yaml.safe_dump(numbers))
    return file


def rows(folder: Path, count: int, words: int) -> Path:
    file = folder / "prompts.jsonl"
    prompts = (
        {"prompt": f"{number} " + "one two three " * (words // 3), "ground_truth": "1"} for number in range(count)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return file


def longest(model: str, file: Path) -> int:
    """Count the tokens of the longest prompt in the model's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in file.read_text().splitlines()]
    return max(
        len(each) for each in tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    )


def posttrain(*words: str, threads: int) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "posttrain", *words],
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr or done.stdout)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="~/.cache/posttrain/SmolLM2-135M-Instruct")
    for name, default in (("prompts", 8), ("samples", 8), ("response", 64), ("words", 60), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine = machine_file(folder, asked.threads)
        model = str(Path(asked.model).expanduser())
        file = rows(folder, asked.prompts * asked.steps, asked.words)
        settings: dict[str, Any] = {
            "model.path": model,
            "data.max_prompt_tokens": longest(model, file),
            "rollout.max_response_tokens": asked.response,
            "model.compute_dtype": "bfloat16",
            "data.train_files": [str(file)],
            "data.prompts_per_step": asked.prompts,
            "rollout.samples_per_prompt": asked.samples,
            "rollout.ignore_eos": True,
            "rollout.max_concurrent_sequences": asked.prompts * asked.samples,
            "reward.terms": "[{name: exact_match}]",
            "loss.kl_coef": 0.01,
            "policy.sequences_per_micro_batch_per_device": 16,
            "run.folder": str(folder / "run"),
            "run.total_steps": asked.steps,
        }
        words = [f"{key}={value}" for key, value in settings.items()]
        predicted = json.loads(posttrain("plan", *words, "--on", str(machine), "--json", threads=asked.threads))
        posttrain("train", *words, threads=asked.threads)
        steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        print(machine.read_text())
        compare(predicted, [step for step in steps if "time/update_s" in step][1:])


def compare(predicted: dict[str, Any], steps: list[dict[str, float]]) -> None:
    table = []
    for part in predicted["parts"]:
        took = median([step.get(MEASURED.get(part["what"], ""), 0.0) for step in steps])
        said = part["computing"] + part["sending"]
        table.append([part["what"], f"{said:.2f}", f"{took:.2f}", f"{said / took:.2f}" if took else "-"])
    took = median([step["time/step_s"] for step in steps])
    table.append(["step", f"{predicted['seconds']:.2f}", f"{took:.2f}", f"{predicted['seconds'] / took:.2f}"])
    print_table(["part", "predicted, s", "measured, s", "predicted / measured"], table)


if __name__ == "__main__":
    main()
