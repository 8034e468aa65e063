"""What a step costs besides its models: the real loop, stages, rewards, records and files, with engines that compute nothing.

    python benchmarks/controller.py [--samples 1000,10000,100000] [--tokens 128] [--steps 3] [--reward own|gsm8k]

Every size is a process of its own on one device: groups of 8, responses of 1 to --tokens tokens (null_engines.py). Seconds are of
the driver, median of the steps after the first, by phase; sampling is making the tokens and handing complete groups to the
rewards. CPU seconds are of the driver's process alone: on a machine with other work they say more than seconds. Memory is what
the peak grows by after the start.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from step import REWARD

GROUP = 8
PHASES = ("rollout", "reward", "update", "outside of these", "step", "CPU of the driver")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", default="1000,10000,100000", help="per step")
    parser.add_argument("--tokens", type=int, default=128, help="of the longest response")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--reward", choices=("own", "gsm8k"), default="own")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run(arguments.worker, arguments.folder, arguments)
        return
    found = {}
    for samples in map(int, arguments.samples.split(",")):
        with tempfile.TemporaryDirectory() as temporary:
            given = ["--tokens", str(arguments.tokens), "--steps", str(arguments.steps), "--reward", arguments.reward]
            command = [sys.executable, __file__, "--worker", str(samples), "--folder", temporary, *given]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found[samples] = json.loads((Path(temporary) / "found.json").read_text())
    tell(found)


def tell(found: dict[int, dict[str, Any]]) -> None:
    from common import print_table

    rows = []
    for name in PHASES:
        seconds = {samples: each["seconds"][name] for samples, each in found.items()}
        rows.append([name, *(f"{spent:.3f} ({1e6 * spent / samples:.0f})" for samples, spent in seconds.items())])
    memory = {samples: each["memory_mib"] for samples, each in found.items()}
    rows.append(["memory, MiB (KiB a sample)", *(f"{mib:.0f} ({1024 * mib / n:.1f})" for n, mib in memory.items())])
    print_table(["seconds (µs a sample)", *(f"{samples:,} samples" for samples in found)], rows)


def run(samples: int, folder: Path, arguments: argparse.Namespace) -> None:
    """A run of a few steps; what it measured goes to folder/found.json."""
    from posttrain.models.tiny import write_tiny_model

    prompts = samples // GROUP
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {number} + 7?"}],
            "data_source": "openai/gsm8k",
            "reward_model": {"ground_truth": str(number + 7)},
        }
        for number in range(prompts)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    model = write_tiny_model(folder / "tiny")
    sections: dict[str, Any] = {
        "run": {"folder": str(folder / "run"), "total_steps": arguments.steps},
        "model": {"path": str(model), "compute_dtype": "float32", "external_modules": ["null_engines"]},
        "data": {"train_files": [str(folder / "train.jsonl")], "prompts_per_step": prompts, "max_prompt_tokens": 64},
        "rollout": {"engine": "null", "samples_per_prompt": GROUP, "max_response_tokens": arguments.tokens},
        "reward": {"terms": [{"path": str(folder / "reward.py"), "name": "score"}]},
        "policy": {"engine": "null", "sequences_per_micro_batch_per_device": 64},
        "checkpoint": {"at_end": False},
    }
    if arguments.reward == "gsm8k":
        sections["reward"] = {"terms": [{"name": "gsm8k"}]}
    from posttrain.cli.process import prepare
    from posttrain.config import RunConfig
    from posttrain.registry import plug_in

    plug_in(["null_engines"])
    config = RunConfig.model_validate(sections)
    prepare(config)
    from posttrain.build.train import train_run
    from posttrain.loops import rl_sync

    before: list[int] = []
    cpu: list[float] = []  # seconds at the start of each step
    first = rl_sync.sample_groups

    def begun(*given: Any, **how: Any) -> Any:
        before.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        cpu.append(time.process_time())
        return first(*given, **how)

    rl_sync.sample_groups = begun
    train_run(config)
    cpu.append(time.process_time())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [step for step in steps if "time/step_s" in step][1:]
    seconds = {
        name: median(step[f"time/{name}_s"] for step in measured) for name in ("rollout", "reward", "update", "step")
    }
    phases = seconds["rollout"] + seconds["reward"] + seconds["update"]
    found = {
        "seconds": seconds
        | {
            "outside of these": seconds["step"] - phases,
            "CPU of the driver": median(end - start for start, end in pairwise(cpu[1:])),
        },
        "memory_mib": (peak - before[0]) / 1024,
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
