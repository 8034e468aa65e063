"""Weights from a trainer's worker to a sampler's worker: one tensor at a time, in flat buckets, and through shared memory.

    python benchmarks/weight_sync.py [MODEL_FOLDER] [--samplers 1] [--rounds 3] [--bucket-mib 64]

The workers are those of a run (placement.runtime=ray) on this machine's CPU, and so is the code that is timed: digests of every
tensor are taken where it leaves and where it arrives, and compared. The last row is one pass of digests, which each way makes on
both sides.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from common import median, print_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model folder; default: the demo's")
    parser.add_argument("--samplers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bucket-mib", type=int, default=64)
    arguments = parser.parse_args()

    from posttrain.backends.runtime.ray.sync import Way, by_broadcast, through_shared_memory
    from posttrain.config import RunConfig
    from posttrain.models.loading import load_tokenizer
    from posttrain.models.smollm2 import smollm2_135m_instruct
    from posttrain.models.weight_transfer import Manifest
    from posttrain.plan.batch import plan_batches
    from posttrain.registry import RUNTIMES

    samplers = list(range(1, 1 + arguments.samplers))
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig.model_validate(
            {
                "run": {"folder": folder, "total_steps": 1},
                "model": {"path": arguments.model or str(smollm2_135m_instruct())},
                "data": {"train_files": ["none"], "prompts_per_step": 2},
                "policy": {"devices": [0]},
                "rollout": {"devices": samplers, "weight_bucket_mib": arguments.bucket_mib},
                "reward": {"terms": [{"name": "gsm8k"}]},
                "placement": {"runtime": "ray", "device": "cpu", "devices": 1 + len(samplers), "cpu_threads": 1},
            }
        )
        batches, problems = plan_batches(config, 2)
        if batches is None:
            sys.exit("\n".join(map(str, problems)))
        with closing(RUNTIMES.get("ray")().start(config, batches, load_tokenizer(config.model))) as roles:
            trainers, members = roles.policy.workers, roles.rollout.workers.members
            tensors = Manifest.from_json(trainers.call("sender.manifest", 0)).tensors
            single = Way(bucket_bytes=1, folder=Path(folder))
            flat = Way(bucket_bytes=arguments.bucket_mib << 20, folder=Path(folder))
            ways: dict[str, Callable[[], Any]] = {
                "gloo, a tensor at a time": lambda: by_broadcast(trainers, members, 0, single),
                f"gloo, buckets of {arguments.bucket_mib} MiB": lambda: by_broadcast(trainers, members, 0, flat),
                "shared memory, a tensor at a time": lambda: through_shared_memory(trainers, members, 0, single),
                f"shared memory, buckets of {arguments.bucket_mib} MiB": lambda: through_shared_memory(
                    trainers, members, 0, flat
                ),
                "digests alone, one side": lambda: trainers.call("sender.manifest", 0),
            }
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(arguments.rounds + 1):
                for name, way in ways.items():
                    begun = time.perf_counter()
                    way()
                    if number:  # the first round warms up
                        seconds[name].append(time.perf_counter() - begun)
    size = sum(each.nbytes for each in tensors)
    print(f"{len(tensors)} tensors, {size / 1e6:.0f} MB in {config.model.compute_dtype}, {len(samplers)} sampler(s)\n")
    rows = [(name, f"{median(found):.2f}", f"{size / median(found) / 1e9:.2f}") for name, found in seconds.items()]
    print_table(("way", "seconds", "GB/s"), rows)


if __name__ == "__main__":
    main()
