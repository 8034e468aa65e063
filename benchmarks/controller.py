"""What a step costs besides its models: the real loop, stages, rewards, records and files, with engines that compute nothing.

    python benchmarks/controller.py [--samples 1000,10000,100000] [--tokens 128] [--steps 3] [--reward own|gsm8k] [--workers 0]
        [--samplers 0]

Every size is a process of its own: groups of 8, responses of 1 to --tokens tokens (null_engines.py), on one device, or with
--workers under Ray with so many ranks of the policy, which also sample unless there are --samplers. Messages are what the first
step brings to the driver and sends from it (serialized, without the frames of the protocol); it is not timed. --profile FILE
keeps a profile of the driver, in its CPU seconds. Seconds are of the driver, median of the steps after the first, by phase;
sampling is making the tokens and handing complete groups to the rewards. CPU seconds are of the driver's process alone: on a
machine with other work they say more than seconds, and those without rollout, log-probs and update are a step besides its
models. Memory is what the peak grows by after the start.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from weakref import WeakSet

from step import REWARD

GROUP = 8
PHASES = ("rollout", "reward", "logprobs", "update", "outside of these", "step", "CPU of the driver")
MODELS = ("rollout", "logprobs", "update")  # phases that are besides the point of docs/benchmarks.md's floor
BESIDES, USER = "CPU besides rollout and update", "of it in user mode"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", default="1000,10000,100000", help="per step")
    parser.add_argument("--tokens", type=int, default=128, help="of the longest response")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--reward", choices=("own", "gsm8k"), default="own")
    parser.add_argument("--workers", type=int, default=0, help="ranks under Ray; 0: one device, in one process")
    parser.add_argument("--samplers", type=int, default=0, help="samplers on devices of their own, beside the ranks")
    parser.add_argument("--updates", type=int, default=1, help="per step; more than one needs old log-probs")
    parser.add_argument("--profile", type=Path, help="a file for the profile of the driver, as cProfile writes it")
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
            given += ["--workers", str(arguments.workers), "--updates", str(arguments.updates)]
            given += ["--samplers", str(arguments.samplers)]
            given += ["--profile", str(arguments.profile)] if arguments.profile else []
            command = [sys.executable, __file__, "--worker", str(samples), "--folder", temporary, *given]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found[samples] = json.loads((Path(temporary) / "found.json").read_text())
    tell(found)


def tell(found: dict[int, dict[str, Any]]) -> None:
    from common import print_table

    rows = []
    for name in (*PHASES, BESIDES, USER):
        seconds = {samples: each["seconds"][name] for samples, each in found.items()}
        rows.append([name, *(f"{spent:.3f} ({1e6 * spent / samples:.0f})" for samples, spent in seconds.items())])
    for what in ("memory", "to the driver", "from the driver"):
        mib = {samples: each[what] for samples, each in found.items() if what in each}
        if mib:
            rows.append([f"{what}, MiB (KiB a sample)", *(f"{m:.0f} ({1024 * m / n:.2f})" for n, m in mib.items())])
    print_table(["seconds (µs a sample)", *(f"{samples:,} samples" for samples in found)], rows)


def run(samples: int, folder: Path, arguments: argparse.Namespace) -> None:
    """A run of a few steps; what it measured goes to folder/found.json."""
    from posttrain.cli.process import importing

    with importing():
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
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 1 << 16}))
    sections: dict[str, Any] = {
        "run": {"folder": str(folder / "run"), "total_steps": arguments.steps},
        "model": {"path": str(model), "compute_dtype": "float32", "external_modules": ["null_engines"]},
        "data": {"train_files": [str(folder / "train.jsonl")], "prompts_per_step": prompts, "max_prompt_tokens": 64},
        "rollout": {"engine": "null", "samples_per_prompt": GROUP, "max_response_tokens": arguments.tokens},
        "reward": {"terms": [{"path": str(folder / "reward.py"), "name": "score"}]},
        "policy": {"engine": "null", "sequences_per_micro_batch_per_device": 64}
        | ({"sequences_per_mini_batch": samples // arguments.updates} if arguments.updates > 1 else {}),
        "checkpoint": {"at_end": False},
    }
    if arguments.workers:
        devices = list(range(arguments.workers + arguments.samplers))
        sections["placement"] = {"devices": len(devices), "runtime": "ray", "device": "cpu"}
        if arguments.samplers:
            sections["policy"]["devices"] = devices[: arguments.workers]
            sections["rollout"]["devices"] = devices[arguments.workers :]
    if arguments.reward == "gsm8k":
        sections["reward"] = {"terms": [{"name": "gsm8k"}]}
    from posttrain.cli.process import importing, prepare
    from posttrain.config import RunConfig

    with importing():  # as the command line does
        from posttrain.registry import plug_in

        plug_in(["null_engines"])
        config = RunConfig.model_validate(sections)
        prepare(config)
        from posttrain.build.train import train_run
        from posttrain.loops import rl_sync
        from posttrain.run.clock import Clock

    traffic = Traffic()
    if arguments.workers:
        traffic.listen()
    before: list[int] = []
    cpu: list[float] = []  # seconds at the start of each step
    besides: list[Cpu] = []  # the same, without the phases of models
    first, phase = rl_sync.sample_groups, Clock.phase
    in_models = Cpu(0.0, 0.0)

    @contextmanager
    def counted_phase(clock: Any, name: str, *given: Any, **how: Any) -> Iterator[None]:
        nonlocal in_models
        began = Cpu.now()
        with phase(clock, name, *given, **how):
            yield
        if name in MODELS:
            in_models = in_models.plus(Cpu.now().less(began))

    Clock.phase = counted_phase  # type: ignore[method-assign]

    def begun(*given: Any, **how: Any) -> Any:
        before.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        cpu.append(time.process_time())
        besides.append(Cpu.now().less(in_models))
        traffic.step += 1
        return first(*given, **how)

    rl_sync.sample_groups = begun
    if arguments.profile:
        profile = cProfile.Profile(time.process_time)
        profile.runcall(train_run, config)
        profile.dump_stats(arguments.profile)
    else:
        train_run(config)
    cpu.append(time.process_time())
    besides.append(Cpu.now().less(in_models))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [step for step in steps if "time/step_s" in step][1:]
    timed = ("rollout", "reward", "logprobs", "update", "step")
    seconds = {name: median(step.get(f"time/{name}_s", 0.0) for step in measured) for name in timed}
    phases = sum(seconds.values()) - seconds["step"]
    found = {
        "seconds": seconds
        | {
            "outside of these": seconds["step"] - phases,
            "CPU of the driver": median(end - start for start, end in pairwise(cpu[1:])),
            BESIDES: median(sum(end.less(start)) for start, end in pairwise(besides[1:])),
            USER: median(end.less(start).user for start, end in pairwise(besides[1:])),
        },
        "memory": (peak - before[0]) / 1024,
    } | traffic.mib()
    (folder / "found.json").write_text(json.dumps(found))


class Cpu(NamedTuple):
    """CPU seconds of this process."""

    user: float
    system: float

    @classmethod
    def now(cls) -> Cpu:
        return cls(*os.times()[:2])

    def plus(self, other: Cpu) -> Cpu:
        return Cpu(self.user + other.user, self.system + other.system)

    def less(self, other: Cpu) -> Cpu:
        return Cpu(self.user - other.user, self.system - other.system)


class Traffic:
    """The bytes of values that pass between the driver and its workers in the first step."""

    def __init__(self) -> None:
        self.step = 0
        self.bytes = {"to the driver": 0, "from the driver": 0}
        self._read: WeakSet[Any] = WeakSet()  # arrays that the driver has fetched, which it does once

    def mib(self) -> dict[str, float]:
        return {way: count / 2**20 for way, count in self.bytes.items() if count}

    def listen(self) -> None:
        """Count what the runtime puts, sends and receives."""
        from posttrain.backends.runtime.ray.cluster import Cluster, RayArray

        call, put, value, read = Cluster.call, Cluster.put, Cluster.value, RayArray.read

        def counted_call(cluster: Any, handle: Any, method: str, *arguments: Any) -> Any:
            self._count("from the driver", arguments)
            return call(cluster, handle, method, *arguments)

        def counted_put(cluster: Any, given: Any) -> Any:
            self._count("from the driver", given)
            return put(cluster, given)

        def counted_value(cluster: Any, promise: Any, timeout_s: float) -> Any:
            found = value(cluster, promise, timeout_s)
            self._count("to the driver", found)
            return found

        def counted_read(array: Any) -> Any:
            if array not in self._read:
                self._read.add(array)
                self._count("to the driver", read(array))
            return read(array)

        RayArray.read = counted_read  # type: ignore[method-assign]
        if call_for_two := getattr(Cluster, "call_for_two", None):  # versions before have none

            def counted_call_for_two(cluster: Any, handle: Any, method: str, *arguments: Any) -> Any:
                self._count("from the driver", arguments)
                return call_for_two(cluster, handle, method, *arguments)

            Cluster.call_for_two = counted_call_for_two  # type: ignore[method-assign]
        Cluster.call, Cluster.put, Cluster.value = counted_call, counted_put, counted_value  # type: ignore[method-assign]

    def _count(self, way: str, value: Any) -> None:
        if self.step == 1:
            from ray._private.worker import global_worker

            self.bytes[way] += global_worker.get_serialization_context().serialize(value).total_bytes


if __name__ == "__main__":
    main()
