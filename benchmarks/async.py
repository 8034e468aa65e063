"""Asynchronous runs beside the synchronous one: seconds of a step, samples per hour, and the bound that the phases allow.

    python benchmarks/async.py [MODEL_FOLDER] [--case environments,ragged] [--steps 8] [--rounds 1]

environments: episodes of two turns whose environments sleep for log-normal times (sigma 1.0), in processes of their own; S = 1.
ragged: responses that end at one of so many tokens, so that lengths are ragged; one device; S = 1.
Both runs of a case take turns, round after round, on the same prompts; the first step is left out. The bound is the synchronous
step over the longer of two times: everything but generation, and generation spread over S + 1 steps. ``ragged`` prints the
ceiling that its lengths allow instead: the passes of a step in which all slots are full would be its only ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES = 16, 2
WORLD = """
import random, time
from posttrain.interfaces.env import EnvStart, EnvStep

class Slow:
    def __init__(self, spec, median_s=0.1, sigma=1.0):
        self.turn, self.median_s, self.sigma = 0, median_s, sigma

    def reset(self, seed):
        self.random = random.Random(f"{seed}/{time.time_ns()}")
        return EnvStart(messages=[{"role": "user", "content": f"go {seed % 9}"}])

    def step(self, action):
        self.turn += 1
        time.sleep(self.median_s * self.random.lognormvariate(0.0, self.sigma))
        return EnvStep(messages=[{"role": "user", "content": "on"}], reward=len(action) % 5 / 5, done=self.turn == 2)

    def close(self):
        return {}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model folder; default: a tiny one, made here")
    parser.add_argument("--case", default="environments,ragged")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    from common import median, print_table

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = arguments.model or tiny_model(place)
        for case in arguments.case.split(","):
            found: dict[str, list[dict[str, float]]] = {"off": [], "colocate": []}
            for number in range(arguments.rounds):
                for mode, means in found.items():
                    means.append(run(case, mode, model, place / f"{case}_{mode}_{number}", arguments.steps))
            plain, ahead = (
                {name: median([each[name] for each in found[mode]]) for name in found[mode][0]} for mode in found
            )
            ceiling = bound(plain) if case == "environments" else plain["ceiling"]
            gain = plain["step"] / ahead["step"]
            rows.append(
                [
                    case,
                    f"{plain['rollout']:.2f} : {plain['step'] - plain['rollout']:.2f}",
                    f"{plain['step']:.2f}",
                    f"{ahead['step']:.2f}",
                    f"{3600 * PROMPTS * SAMPLES / plain['step']:,.0f}",
                    f"{3600 * PROMPTS * SAMPLES / ahead['step']:,.0f}",
                    f"{gain:.2f}",
                    f"{ceiling:.2f}",
                    f"{ahead['stale']:.2f}",
                ]
            )
    header = [
        "case",
        "generation : rest, s",
        "synchronous step, s",
        "colocate step, s",
        "samples/h",
        "samples/h, colocate",
    ]
    print_table([*header, "times as fast", "bound", "mean staleness, steps"], rows)


def bound(plain: dict[str, float]) -> float:
    """The gain when generation is spread over two steps and overlaps with all else."""
    return plain["step"] / max(plain["step"] - plain["rollout"], plain["rollout"] / 2)


def tiny_model(place: Path) -> str:
    from posttrain.models.tiny import write_tiny_model

    write_tiny_model(place / "tiny")
    return str(place / "tiny")


def run(case: str, mode: str, model: str, folder: Path, steps: int) -> dict[str, float]:
    """Means over the steps of a run but the first, in seconds."""
    from posttrain.build.train import train_run
    from posttrain.config import RunConfig

    sections: dict[str, Any] = {
        "model": {"path": model, "compute_dtype": "float32"},
        "run": {"folder": str(folder), "total_steps": steps},
        "policy": {"sequences_per_mini_batch": PROMPTS * SAMPLES, "sequences_per_micro_batch_per_device": 8},
        "loss": {"rollout_correction": {"weights": "token"}},
        "validation": {"before_training": False, "after_training": False},
        "checkpoint": {"at_end": False},
        "tracking": {"trackers": []},
        "asynchronous": {"mode": mode},
    }
    if case == "environments":
        world = folder.parent / "world.py"
        world.write_text(WORLD)
        sections |= {
            "data": {"train_files": [], "prompts_per_step": PROMPTS},
            "rollout": {"samples_per_prompt": SAMPLES, "max_response_tokens": 8},
            "environment": {
                "name": f"{world}:Slow",
                "train_episodes": 4 * PROMPTS,
                "workers": 2 * PROMPTS * SAMPLES,
                "timeout_s": 60.0,
            },
        }
    else:
        rows = folder.parent / "rows.jsonl"
        prompts = [{"prompt": f"{number} and {number}", "answer": "1"} for number in range(4 * PROMPTS)]
        rows.write_text("".join(json.dumps(row) + "\n" for row in prompts))
        sections |= {
            "data": {"train_files": [str(rows)], "prompts_per_step": PROMPTS},
            "reward": {"terms": [{"name": "length", "options": {"max_characters": 40, "ramp_characters": 40}}]},
            "rollout": {
                "samples_per_prompt": SAMPLES,
                "max_response_tokens": 256,
                "stop_token_ids": list(range(0, 256, 8)),
            },
        }
    train_run(RunConfig.model_validate(sections))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    mean = {
        name: sum(line.get(name, 0.0) for line in lines) / len(lines) for name in {n for line in lines for n in line}
    }
    step, rollout = mean["time/step_s"], mean.get("time/rollout_s", 0.0)
    # A step's passes are as many as its longest response has tokens; with full slots the mean length would do.
    saved = rollout * (1 - mean["response/length_mean"] / mean["response/length_max"])
    return {
        "step": step,
        "rollout": rollout,
        "ceiling": step / (step - saved),
        "stale": mean.get("async/staleness_steps_mean", 0.0),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
