"""What a step costs besides its models: the real loop, stages, rewards, records and files, with engines that compute nothing.

    python benchmarks/controller.py [--samples 1000,10000,100000] [--tokens 128] [--steps 3] [--reward own|gsm8k] [--workers 0]
        [--samplers 0] [--light 0] [--critic] [--kl] [--asynchronous separate] [--batches] [--held 100,500]

Every size is a process of its own: groups of 8, responses of 1 to --tokens tokens (null_engines.py), on one device, or with
--workers 1,8,64 under Ray with so many ranks of the policy, which also sample unless there are --samplers. --light N: all ranks
but the first load no torch and read no batch (light_ranks.py), N of them in a process, so that a machine can hold many. Bytes and
messages are what the first step brings to the driver and sends from it (traffic.py); it is not timed. Calls are of single
workers; each is also polled, twice a second or less often. --profile FILE keeps a profile of the driver, in its CPU seconds.
Seconds are of the driver, median of the steps after the first, by phase; sampling is making the tokens and handing complete
groups to the rewards. CPU seconds are of the driver's process alone: on a machine with other work they say more than seconds,
and those without rollout, log-probs and update are a step besides its models. Memory is what the peak grows by after the start.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from held import Held
from light_ranks import use_light_ranks
from step import REWARD
from traffic import Traffic

GROUP = 8
# Phases that are besides the point of docs/benchmarks.md's floor
MODELS = ("rollout", "logprobs", "values", "critic_update", "update")
PHASES = ("reward", *MODELS, "outside of these", "step", "CPU of the driver")
BESIDES, USER = "CPU besides rollout and update", "of it in user mode"
GROWTH = "memory, last tenth of the steps above the second"
CALLS, POLLS = "calls of workers in a step", "polls of workers in that step"
HELD = "held"
START, START_CPU = "start of all workers, s", "CPU of the workers until then, s"
Size = tuple[int, int]  # samples and ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", default="1000,10000,100000", help="per step")
    parser.add_argument("--tokens", type=int, default=128, help="of the longest response")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--reward", choices=("own", "gsm8k"), default="own")
    parser.add_argument("--workers", default="0", help="ranks under Ray; 0: one device, in one process")
    parser.add_argument(
        "--light", type=int, default=0, help="of the ranks but the first, in one process; 0: all are real"
    )
    parser.add_argument("--samplers", type=int, default=0, help="samplers on devices of their own, beside the ranks")
    parser.add_argument("--critic", action="store_true", help="PPO: values, and generalised advantages of them")
    parser.add_argument(
        "--asynchronous", choices=("off", "colocate", "separate"), default="off", help="sample ahead, at most one step"
    )
    parser.add_argument("--kl", action="store_true", help="a reference, and a KL to it in the reward")
    parser.add_argument("--batches", action="store_true", help="write the tensors of every step, too")
    parser.add_argument("--held", default="", help="steps before which everything that the driver holds is counted")
    parser.add_argument("--updates", type=int, default=1, help="per step; more than one needs old log-probs")
    parser.add_argument("--profile", type=Path, help="a file for the profile of the driver, as cProfile writes it")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of the process of one size
    arguments = parser.parse_args()
    if arguments.folder:
        run(int(arguments.samples), arguments.folder, arguments)
        return
    found: dict[Size, dict[str, Any]] = {}
    sizes = product(map(int, arguments.samples.split(",")), map(int, arguments.workers.split(",")))
    for samples, workers in sizes:
        with tempfile.TemporaryDirectory() as temporary:
            command = [
                sys.executable,
                *sys.argv,
                "--samples",
                str(samples),
                "--workers",
                str(workers),
                "--folder",
                temporary,
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found[samples, workers] = json.loads((Path(temporary) / "found.json").read_text())
    tell(found)


def tell(found: dict[Size, dict[str, Any]]) -> None:
    from common import print_table

    def row(title: str, text: Callable[[dict[str, Any], int], str]) -> list[str]:
        return [title, *(text(each, samples) for (samples, _), each in found.items())]

    def spent(name: str) -> list[str]:
        return row(name, lambda each, n: f"{each['seconds'][name]:.3f} ({1e6 * each['seconds'][name] / n:.0f})")

    def mib(name: str) -> list[str]:
        return row(f"{name}, MiB (KiB a sample)", lambda each, n: f"{each[name]:.0f} ({1024 * each[name] / n:.2f})")

    rows = [spent(name) for name in (*PHASES, BESIDES, USER)] + [mib("memory"), mib(GROWTH)]
    for number, title in enumerate(Held.TITLES):
        rows += [
            row(
                f"{title}, before step {step}",
                lambda each, n, step=step, number=number: f"{each[HELD][step][number]:,.0f}",
            )
            for step in next(iter(found.values()))[HELD]
        ]
    if any(workers for _, workers in found):
        rows += [mib("to the driver"), mib("from the driver")]
        rows += [
            row(name, lambda each, n, name=name: f"{each[name]:,.1f}") for name in (CALLS, POLLS, START, START_CPU)
        ]
    sizes = [f"{samples:,} samples" + (f", {workers} ranks" if workers else "") for samples, workers in found]
    print_table(["seconds (µs a sample)", *sizes], rows)


def sections_of(samples: int, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the data, the reward and the model of a run into a folder. Returns: its configuration, by section."""
    from posttrain.libraries.importing import importing

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
        "tracking": {"batches_every_steps": 1 if getattr(arguments, "batches", False) else None},
    }
    if arguments.critic:
        sections["critic"] = {"engine": "null", "sequences_per_micro_batch_per_device": 64}
        sections["critic"] |= (
            {"sequences_per_mini_batch": samples // arguments.updates} if arguments.updates > 1 else {}
        )
        sections["advantage"] = {"name": "gae"}
    if arguments.kl:
        sections["reward"]["kl"] = {"coef": 0.01}
    if getattr(arguments, "asynchronous", "off") != "off":
        sections["asynchronous"] = {"mode": arguments.asynchronous}
        sections["loss"] = {"rollout_correction": {"weights": "token"}}
    workers = int(arguments.workers)
    if workers:
        devices = list(range(workers + arguments.samplers))
        sections["placement"] = {"devices": len(devices), "runtime": "ray", "device": "cpu"}
        if arguments.samplers:
            sections["policy"]["devices"] = devices[:workers]
            sections["rollout"]["devices"] = devices[workers:]
    if arguments.reward == "gsm8k":
        sections["reward"]["terms"] = [{"name": "gsm8k"}]
    return sections


def run(samples: int, folder: Path, arguments: argparse.Namespace) -> None:
    """A run of a few steps; what it measured goes to folder/found.json."""
    sections, workers = sections_of(samples, folder, arguments), int(arguments.workers)
    from posttrain.cli.process import prepare
    from posttrain.config import RunConfig
    from posttrain.libraries.importing import importing

    with importing():  # as the command line does
        from posttrain.registry import plug_in

        plug_in(["null_engines"])
        config = RunConfig.model_validate(sections)
        prepare(config)
        from posttrain.build.train import train_run
        from posttrain.loops import rl_sync
        from posttrain.run.clock import Clock
        from posttrain.steps.ahead import Ahead
        from posttrain.steps.apart import Apart

    traffic, starting = Traffic(), dict[str, float]()
    if workers:
        if arguments.light:
            use_light_ranks(arguments.light)
        traffic.listen()
        time_start(starting)
    before: list[int] = []
    held: list[float] = []  # MiB in memory at the start of each step
    counted: dict[str, Held] = {}  # by the number of the step that begins
    cpu: list[float] = []  # seconds at the start of each step
    besides: list[Cpu] = []  # the same, without the phases of models
    source: Any = {"off": rl_sync, "colocate": Ahead, "separate": Apart}[arguments.asynchronous]
    asked = "sample_groups" if arguments.asynchronous == "off" else "sample"
    first, phase = getattr(source, asked), Clock.phase
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
        held.append(mib_in_memory())
        if str(len(held)) in arguments.held.split(","):
            counted[str(len(held))] = Held.now()
        cpu.append(time.process_time())
        besides.append(Cpu.now().less(in_models))
        traffic.step += 1
        return first(*given, **how)

    setattr(source, asked, begun)
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
    timed = ("rollout", "reward", "logprobs", "values", "critic_update", "update", "step")
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
        GROWTH: growth(held),
        HELD: counted,
        **({CALLS: traffic.calls, POLLS: traffic.polls, **starting, **traffic.mib()} if workers else {}),
    }
    (folder / "found.json").write_text(json.dumps(found))


def time_start(found: dict[str, float]) -> None:
    """Measure the start of the workers, up to where all answer; their models are loaded after that."""
    from posttrain.backends.runtime.ray.start import _Start

    launch, arrived = _Start._launch, _Start._arrived
    begun: list[float] = []

    def timed_launch(*given: Any) -> Any:
        begun.append(time.monotonic())
        return launch(*given)

    def timed_arrived(*given: Any) -> Any:
        members = arrived(*given)
        found[START] = time.monotonic() - begun[0]
        processes = {member.process.pid for member in members}
        found[START_CPU] = found.get(START_CPU, 0.0) + sum(map(cpu_of, processes))
        return members

    _Start._launch, _Start._arrived = timed_launch, timed_arrived  # type: ignore[method-assign]


def mib_in_memory() -> float:
    """Memory that this process has at the moment, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(held: list[float]) -> float:
    """MiB by which the last tenth of the steps has more than the second one; of few steps, the last more than the first."""
    tenth = len(held) // 10
    return median(held[-tenth:]) - median(held[tenth : 2 * tenth]) if tenth else held[-1] - held[0]


def cpu_of(pid: int) -> float:
    """CPU seconds of another process."""
    *_, numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return sum(map(int, numbers.split()[11:13])) / os.sysconf("SC_CLK_TCK")


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


if __name__ == "__main__":
    main()
