"""A whole GRPO step next to TRL's GRPOTrainer: same model, prompts, group size and token counts, turn by turn.

    python benchmarks/step.py --trl-python PATH [MODEL_FOLDER] [--rounds 3] [--preload LIBRARY]

PATH is a Python that has TRL (its own environment: pip install torch==2.13.0 trl). Each of the two runs as its user would run
it, and waits before every step for its turn, so that both meet the same machine. TRL is given bfloat16 weights, the micro-batches
in --micro, and as many threads. The optimizer of ours keeps float32 masters; TRL's updates the bfloat16 weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES, TOKENS = 8, 8, 64
REWARD = "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 7\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model folder; default: the demo's")
    parser.add_argument("--trl-python", default=os.environ.get("POSTTRAIN_TRL_PYTHON"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro", default="8,4", help="TRL's micro-batch sizes to try")
    parser.add_argument(
        "--our-micro", default="32", help="posttrain's micro-batch sizes to try, the first to compare with"
    )
    parser.add_argument("--preload", help="a library that every process loads first")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, _, micro = arguments.worker.partition(":")
        {"posttrain": ours, "trl": trl}[name](arguments.model, Path(arguments.folder), arguments.rounds + 1, int(micro))
        return
    from common import median, print_table

    from posttrain.models.smollm2 import smollm2_135m_instruct

    path = arguments.model or str(smollm2_135m_instruct())
    names = [f"posttrain:{micro}" for micro in arguments.our_micro.split(",")]
    if arguments.trl_python:
        names += [f"trl:{micro}" for micro in arguments.micro.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        workers = {name: Worker(name, path, Path(temporary) / name.replace(":", "_"), arguments) for name in names}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for round_number in range(arguments.rounds + 1):
            for name, worker in workers.items():
                step = worker.turn()
                if round_number:  # the first warms up
                    found[name].append(step)
        for worker in workers.values():
            worker.close()
    rows = []
    first = median([step["step_s"] for step in found[names[0]]])
    for name in names:
        step_s = median([step["step_s"] for step in found[name]])
        rollout_s = median([step["rollout_s"] for step in found[name]])
        rows.append(
            [
                name.replace(":", ", micro-batch "),
                f"{step_s:.1f}",
                f"{rollout_s:.1f}",
                f"{step_s - rollout_s:.1f}",
                f"{step_s / first:.2f}x",
                f"{min(s['step_s'] for s in found[name]):.1f}-{max(s['step_s'] for s in found[name]):.1f}",
            ]
        )
    print_table(["", "s per step", "sampling", "the rest", f"time / {names[0].split(':')[0]}'s", "best-worst"], rows)


class Worker:
    """A process that answers once it is ready, and then once per turn. ``files`` are put into its folder before it starts."""

    def __init__(
        self, name: str, path: str, folder: Path, arguments: argparse.Namespace, files: Mapping[str, str] | None = None
    ):
        folder.mkdir(parents=True)
        for file, text in (files or {}).items():
            (folder / file).write_text(text)
        python = arguments.trl_python if name.startswith("trl") else sys.executable
        environment = {"THP_MEM_ALLOC_ENABLE": "1", **os.environ}  # huge pages, which posttrain asks for, for both
        if arguments.preload:
            environment["LD_PRELOAD"] = arguments.preload
        command = [
            python,
            sys.argv[0],
            path,
            "--worker",
            name,
            "--folder",
            str(folder),
            "--rounds",
            str(arguments.rounds),
        ]
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.answer()  # it is ready

    def turn(self) -> dict[str, float]:
        """Let it make one step."""
        assert self.process.stdin
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, float]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("answer "):
                found: dict[str, float] = json.loads(line.removeprefix("answer "))
                return found
        raise SystemExit(f"the process of {self.name} ended")

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(timeout=120)


def say(answer: Mapping[str, float]) -> None:
    print("answer " + json.dumps(answer), flush=True)


def questions(steps: int) -> list[str]:
    draw = random.Random(0)
    return [
        f"Question {n}: what is {draw.randrange(10, 99)} plus {draw.randrange(10, 99)} times {draw.randrange(2, 9)}?"
        for n in range(PROMPTS * steps)
    ]


def ours(path: str, folder: Path, steps: int, micro: int) -> None:
    data, reward = folder / "train.jsonl", folder / "reward.py"
    rows = [
        {"prompt": [{"role": "user", "content": text}], "data_source": "made", "reward_model": {"ground_truth": ""}}
        for text in questions(steps)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.write_text(REWARD)
    from posttrain.cli.process import prepare
    from posttrain.config import RunConfig

    config = RunConfig.model_validate(
        {
            "run": {"folder": str(folder / "run"), "total_steps": steps},
            "model": {"path": path, "compute_dtype": "bfloat16"},
            "data": {"train_files": [str(data)], "prompts_per_step": PROMPTS, "max_prompt_tokens": 128},
            "rollout": {"samples_per_prompt": SAMPLES, "max_response_tokens": TOKENS, "ignore_eos": True},
            "reward": {"terms": [{"path": str(reward), "name": "score"}]},
            "policy": {"sequences_per_micro_batch_per_device": micro, "optimizer": {"lr": 1e-6}},
            "checkpoint": {"at_end": False},
            "validation": {"before_training": False},
            "tracking": {"trackers": ["turns"]},
        }
    )
    prepare(config)
    from posttrain.build.train import train_run
    from posttrain.registry import TRACKERS

    @TRACKERS.register("turns")
    class Turns:
        """A tracker that holds the run until it is its turn."""

        def begin(self, *_: object) -> None:
            say({})
            sys.stdin.readline()

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            say({"step_s": metrics["time/step_s"], "rollout_s": metrics["time/rollout_s"]})
            sys.stdin.readline()

        def ignore(self, *_: object, **__: object) -> None:
            """phase, advance, message, close"""

        phase = advance = message = close = ignore

    train_run(config)


def trl(path: str, folder: Path, steps: int, micro: int) -> None:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    clock = {"rollout_s": 0.0, "start": 0.0}

    class Turns(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            say({})

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            sys.stdin.readline()
            clock.update(rollout_s=0.0, start=time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            say({"step_s": time.perf_counter() - clock["start"], "rollout_s": clock["rollout_s"]})

    trainer = GRPOTrainer(
        model=path,
        reward_funcs=lambda completions, **_: [float(len(one[0]["content"]) % 7) for one in completions],
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": q}]} for q in questions(steps)]),
        args=GRPOConfig(
            output_dir=str(folder),
            model_init_kwargs={"dtype": "bfloat16"},
            bf16=True,
            use_cpu=True,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=PROMPTS * SAMPLES // micro,
            num_generations=SAMPLES,
            max_completion_length=TOKENS,
            generation_kwargs={"min_new_tokens": TOKENS},
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-6,
            gradient_checkpointing=False,
            max_steps=steps,
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        callbacks=[Turns()],
    )
    generate = trainer._generate

    def timed(*inputs: Any) -> Any:
        start = time.perf_counter()
        output = generate(*inputs)
        clock["rollout_s"] += time.perf_counter() - start
        return output

    trainer._generate = timed
    trainer.train()


if __name__ == "__main__":
    main()
