"""Asynchronous runs beside the synchronous one: seconds and sampler passes of a step, samples per hour, and what limits them.

    python benchmarks/async.py [MODEL_FOLDER] [--case environments,resets,ragged,one_step] [--staleness 1,2,4] [--steps 10]
        [--rounds 1]

environments: episodes of one turn whose environments answer after log-normal times (sigma 1.0), asleep in processes of their own.
With --update-s the update of every step sleeps besides, as if another device trained: nothing is then limited by this machine.
resets: the same times, before the first turn; those of six steps are prepared ahead (asynchronous.prepared_groups).
ragged: responses of log-normal lengths (sigma 0.8) on one device, with as many slots as a step has responses.
one_step: the episodes of environments, with a sampler of its own in a worker of Ray. Its column "in one run" is what its phases
take together, one after the other, over the step that they took side by side: it compares no two runs.
Runs of a case take turns, round after round, with the same prompts, lengths and latencies; the first step is left out, but for
ragged, whose runs sample and train the same in all steps together and begin with a step that is not counted.

With T_g and T_t, the seconds that the synchronous step generates and does everything else, three columns say what could be:
- two times: (T_g + T_t) / max(T_t, T_g / (S + 1)), as if nothing had to wait for new weights;
- bound: a group that is started with the weights of a step must be sampled before S more steps have been trained, so S + 1 steps
  last at least as long as its longest sample and S updates. With equal times that is step >= (T_g + S T_t) / (S + 1), so less
  than S + 1 times; the column takes the times of each step as they were drawn. What happens before the first token has no
  version, so of resets only T_t is left;
- least of one_step: the mean over its own steps of max(T_g, T_t), which none can go below;
- ceiling of ragged: all passes of the step with full slots. Its bound is the passes of the longest response over S + 1 steps.
  The column "allowed" is the same in seconds: (T_g + T_t) / (G + T_t), and how much of that gain was reached. G is what no
  schedule spares: each prompt is prefilled once, each token costs a row, and the fewest passes, those with full slots or the
  longest responses over S + 1 steps, cost what a pass without rows does. Seconds of passes and rows are a line through the passes
  of the synchronous run. Recomputing unfinished responses with new weights is not in it: --keep-cache also runs without that
  (asynchronous.cache_on_new_weights: keep).

--cpu-seconds counts the processor's time of this process in the place of seconds, with one thread: what a case of one process
(ragged) takes on a machine that does nothing else. Seconds of a machine with other work cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import linear_regression, mean
from types import SimpleNamespace
from typing import Any, NamedTuple

PROMPTS, SAMPLES = 8, 2
MEDIAN_TOKENS, MOST_TOKENS = 16, 160
WORLD = """
import random, time
from posttrain.interfaces.env import EnvStart, EnvStep

class Slow:
    def __init__(self, spec, median_s=0.4, sigma=1.0, resets=False):
        self.median_s, self.sigma, self.resets = median_s, sigma, resets

    def reset(self, seed):
        self.seconds = self.median_s * random.Random(seed).lognormvariate(0.0, self.sigma)
        time.sleep(self.seconds if self.resets else 0.0)
        return EnvStart(messages=[{"role": "user", "content": f"go {seed % 9}"}])

    def step(self, action):
        time.sleep(0.0 if self.resets else self.seconds)
        return EnvStep(messages=[], reward=len(action) % 5 / 5, done=True)

    def close(self):
        return {"seconds": self.seconds}
"""


@dataclass(frozen=True)
class Found:
    """Means over the steps of a run."""

    step_s: float
    rollout_s: float  # outside of which all of a synchronous step is T_t
    passes: float  # of the sampler
    prefills: float  # of these
    prefilled: float  # tokens
    full_passes: float  # that the same tokens need with full slots
    prefill_s: float  # seconds of the prefills
    pass_s: float  # seconds of another pass without any row, and
    row_s: float  # of a row of it
    stale: float  # steps
    trainer_waited: float  # share of the step
    longest: list[float]  # seconds of the slowest environment of each step
    waited_s: float = 0.0  # of the step, in which the trainer waited for a sampler beside it
    least_s: float = 0.0  # the longer of sampling and all else, which may go on beside it


class Kind(NamedTuple):
    """A run of a case."""

    bound: int  # on staleness; 0: synchronous
    keeps: bool = False  # the caches of responses that newer weights continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model folder; default: a tiny one, made here")
    parser.add_argument("--case", default="environments,resets,ragged")
    parser.add_argument("--staleness", default="1,2,4")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--median-s", type=float, default=0.4, help="environments: median of their answers")
    parser.add_argument("--update-s", type=float, default=1.4, help="environments: every update sleeps besides")
    parser.add_argument("--cpu-seconds", action="store_true", help="the processor's time, with one thread")
    parser.add_argument("--keep-cache", action="store_true", help="ragged: also with caches of older weights")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the passes")
    arguments = parser.parse_args()
    from common import print_rows, print_table

    if arguments.cpu_seconds:
        count_cpu_seconds()
    bounds = [0, *(int(each) for each in arguments.staleness.split(","))]
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = arguments.model or tiny_model(place)
        for case in arguments.case.split(","):
            kinds = [Kind(bound) for bound in bounds if case != "one_step" or bound < 2]
            if case == "ragged":
                kinds += [Kind(bound, keeps=True) for bound in bounds if bound and arguments.keep_cache]
                once = argparse.Namespace(**{**vars(arguments), "steps": 1})
                with Simulated(case, 0.0) as passes:
                    run(case, kinds[0], model, place / "warm", once, passes)
            found: dict[Kind, list[Found]] = {kind: [] for kind in kinds}
            for number in range(arguments.rounds):
                for kind in kinds if number % 2 == 0 else reversed(kinds):
                    where = place / f"{case}_{kind.bound}_{kind.keeps}_{number}"
                    with Simulated(case, arguments.update_s if case != "ragged" else 0.0) as passes:
                        found[kind].append(run(case, kind, model, where, arguments, passes))
            tables.append(rows_of(case, {kind: middle(runs) for kind, runs in found.items()}))
    for number, (header, rows) in enumerate(tables):
        (print_rows if number else print_table)(header, rows)
        print()


def middle(runs: list[Found]) -> Found:
    return sorted(runs, key=lambda run: run.step_s)[len(runs) // 2]


def rows_of(case: str, found: dict[Kind, Found]) -> tuple[list[str], list[list[str]]]:
    if case == "one_step":
        return rows_beside({kind.bound: each for kind, each in found.items()})
    plain = found[Kind(0)]
    rest = plain.step_s - plain.rollout_s
    header = ["case", "S", "T_g : T_t, s", "step, s", "samples/h", "times as fast"]
    more = (
        ["two times", "bound"]
        if case != "ragged"
        else ["passes (prefills)", "prefilled", "times fewer", "bound", "ceiling", "allowed"]
    )
    rows = []
    for (bound, keeps), run in found.items():
        gain = plain.step_s / run.step_s
        row = [
            case,
            f"{bound}, kept caches" if keeps else str(bound),
            f"{run.rollout_s:.2f} : {run.step_s - run.rollout_s:.2f}",
            f"{run.step_s:.2f}",
        ]
        row += [f"{3600 * PROMPTS * SAMPLES / run.step_s:,.0f}", f"{gain:.2f}"]
        if case != "ragged":
            times = plain.step_s / max(rest, plain.rollout_s / (bound + 1))
            least = rest if case == "resets" and bound else least_step_s(plain.longest, rest, bound)
            most = plain.step_s / least
            row += [f"{times:.2f}", f"{most:.2f} ({100 * gain / most:.0f} %)"]
        else:
            fewer, ceiling = plain.passes / run.passes, plain.passes / plain.full_passes
            row += [
                f"{run.passes:.1f} ({run.prefills:.1f})",
                f"{run.prefilled:.0f}",
                f"{fewer:.2f}",
                f"{min(bound + 1.0, ceiling):.2f}",
                f"{ceiling:.2f}",
                allowed(gain, plain, bound) if bound else "",
            ]
        rows.append([*row, f"{run.stale:.2f}", f"{100 * run.trainer_waited:.0f} %" if bound else ""])
    return [*header, *more, "mean staleness", "trainer waited"], rows


def allowed(gain: float, plain: Found, bound: int) -> str:
    """The gain of a step that prefills prompts once and makes the fewest passes; and the share of it that was reached."""
    passes = max(plain.full_passes, (plain.passes - plain.prefills) / (bound + 1))
    rows = plain.full_passes * PROMPTS * SAMPLES
    sampling_s = plain.prefill_s + passes * plain.pass_s + rows * plain.row_s
    most = plain.step_s / (sampling_s + plain.step_s - plain.rollout_s)
    return f"{most:.2f} ({100 * (gain - 1) / (most - 1):.0f} %)"


def count_cpu_seconds() -> None:
    """Have the clock of a step count the processor's time of this process."""
    import torch

    from posttrain.run import clock

    torch.set_num_threads(1)
    clock.time = SimpleNamespace(perf_counter=time.process_time, time=time.time)  # type: ignore[assignment]


def rows_beside(found: dict[int, Found]) -> tuple[list[str], list[list[str]]]:
    header = [
        "case",
        "S",
        "T_g : T_t, s",
        "step, s",
        "samples/h",
        "times as fast",
        "in one run",
        "least, s",
        "mean staleness",
    ]
    rows = []
    for bound, run in found.items():
        rest = run.step_s - (run.waited_s if bound else run.rollout_s)
        rows.append(
            [
                "one_step",
                str(bound),
                f"{run.rollout_s:.2f} : {rest:.2f}",
                f"{run.step_s:.2f}",
                f"{3600 * PROMPTS * SAMPLES / run.step_s:,.0f}",
                f"{found[0].step_s / run.step_s:.2f}",
                f"{(run.rollout_s + rest) / run.step_s:.2f}",
                f"{run.least_s if bound else run.rollout_s + rest:.2f}",
                f"{run.stale:.2f}",
            ]
        )
    return header, rows


def tiny_model(place: Path) -> str:
    from posttrain.models.tiny import write_tiny_model

    write_tiny_model(place / "tiny")
    return str(place / "tiny")


class Simulated:
    """Lengths that are drawn, an update that sleeps, and a count of the sampler's passes."""

    def __init__(self, case: str, update_s: float):
        self.case, self.update_s, self.passes, self.prefills, self.prefilled = case, update_s, 0, 0, 0
        self.prefill_s = 0.0
        self.decodes: list[tuple[int, float]] = []  # rows and seconds of passes that only decode

    def __enter__(self) -> Simulated:
        from posttrain.backends.rollout.native.stream import NativeStream
        from posttrain.backends.rollout.native.token_pass import TokenPass
        from posttrain.run import clock
        from posttrain.steps import rl_step

        self.saved = NativeStream.add, NativeStream.step, TokenPass.prefill, rl_step.update_models
        add, step, prefill, update = self.saved

        def drawn(stream: NativeStream, request: Any) -> Any:
            draw = random.Random(f"{request.seed or stream.sampling.seed}/{request.draw_name}")
            length = round(MEDIAN_TOKENS * draw.lognormvariate(0.0, 0.8))
            return add(stream, replace(request, max_response_tokens=min(max(length, 1), MOST_TOKENS)))

        def counted(stream: NativeStream) -> Any:
            self.passes += 1
            prefills, rows, began = self.prefills, len(stream._active), clock.time.perf_counter()
            ended = step(stream)
            seconds = clock.time.perf_counter() - began
            if self.prefills == prefills:
                self.decodes.append((rows, seconds))
            else:
                self.prefill_s += seconds
            return ended

        def prefilled(token_pass: TokenPass, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
            self.prefills += 1
            self.prefilled += inputs["input_ids"].numel()
            return prefill(token_pass, inputs, *rest, **named)

        def slow(*given: Any) -> Any:
            time.sleep(self.update_s)
            return update(*given)

        if self.case == "ragged":
            NativeStream.add = drawn  # type: ignore[method-assign]
        NativeStream.step, TokenPass.prefill = counted, prefilled  # type: ignore[method-assign]
        rl_step.update_models = slow  # type: ignore[assignment]
        return self

    def __exit__(self, *exception: object) -> None:
        from posttrain.backends.rollout.native.stream import NativeStream
        from posttrain.backends.rollout.native.token_pass import TokenPass
        from posttrain.steps import rl_step

        add, step, prefill, update = self.saved
        NativeStream.add, NativeStream.step, TokenPass.prefill = add, step, prefill  # type: ignore[method-assign]
        rl_step.update_models = update


def run(case: str, kind: Kind, model: str, folder: Path, given: argparse.Namespace, counted: Simulated) -> Found:
    from posttrain.build.train import train_run
    from posttrain.config import RunConfig

    bound = kind.bound
    sections: dict[str, Any] = {
        "model": {"path": model, "compute_dtype": given.dtype},
        "run": {"folder": str(folder), "total_steps": given.steps},
        "policy": {
            "sequences_per_mini_batch": PROMPTS * SAMPLES,
            "sequences_per_micro_batch_per_device": PROMPTS * SAMPLES,
        },
        # A step of tiny products gains nothing from a second thread.
        "placement": {"device": "cpu", **({"cpu_threads": 1} if case != "ragged" or given.cpu_seconds else {})},
        "loss": {"rollout_correction": {"weights": "token"}},
        "validation": {"before_training": False, "after_training": False},
        "checkpoint": {"at_end": False},
        "tracking": {"trackers": []},
        "asynchronous": {"mode": "colocate", "max_staleness_steps": bound} if bound else {},
    }
    if kind.keeps:
        sections["asynchronous"]["cache_on_new_weights"] = "keep"
    if case == "one_step":
        sections["placement"] = {"device": "cpu", "cpu_threads": 1, "devices": 2, "runtime": "ray"}
        sections["policy"]["devices"] = [0]
        sections["asynchronous"] = {"mode": "one_step"} if bound else {}
    prepared = 6 * PROMPTS if case == "resets" and bound else 0
    if prepared:
        sections["asynchronous"]["prepared_groups"] = prepared
    if case != "ragged":
        world = folder.parent / "world.py"
        world.write_text(WORLD)
        sections |= {
            "data": {"train_files": [], "prompts_per_step": PROMPTS},
            "rollout": {"samples_per_prompt": SAMPLES, "max_response_tokens": 4}
            | ({"devices": [1]} if case == "one_step" else {}),
            "environment": {
                "name": f"{world}:Slow",
                "train_episodes": 4 * PROMPTS,
                "workers": ((bound + 1) * PROMPTS + prepared) * SAMPLES,
                "timeout_s": 60.0,
                "settings": {"median_s": given.median_s, "resets": case == "resets"},
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
                "max_response_tokens": MOST_TOKENS,
                "ignore_eos": True,
                "max_concurrent_sequences": PROMPTS * SAMPLES,
            },
        }
    train_run(RunConfig.model_validate(sections))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # With equal samples: the first steps fill what is ahead, and the last ones use it up. In the first, processes start.
    kept = lines if case == "ragged" else lines[1:]

    def average(name: str) -> float:
        return sum(line.get(name, 0.0) for line in kept) / len(kept)

    pass_s, row_s = line_through(counted.decodes)
    return Found(
        step_s=average("time/step_s"),
        rollout_s=average("time/rollout_s"),
        passes=counted.passes / len(lines),
        prefills=counted.prefills / len(lines),
        prefilled=counted.prefilled / len(lines),
        full_passes=sum(rows for rows, _ in counted.decodes) / (PROMPTS * SAMPLES) / len(lines),
        prefill_s=counted.prefill_s / len(lines),
        pass_s=pass_s,
        row_s=row_s,
        stale=average("async/staleness_steps_mean"),
        trainer_waited=average("time/trainer_waited_share"),
        waited_s=average("time/sampler_wait_s"),
        least_s=sum(longer_s(line) for line in kept) / len(kept),
        longest=[] if case == "ragged" else [slowest(folder, step) for step in range(1, given.steps + 1)],
    )


def line_through(decodes: list[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of a pass without rows and of a row, by least squares; of one number of rows, all are the pass's."""
    if len({rows for rows, _ in decodes}) < 2:
        return (mean(seconds for _, seconds in decodes) if decodes else 0.0), 0.0
    slope, intercept = linear_regression(*zip(*decodes, strict=True))
    return intercept, slope


def longer_s(line: dict[str, float]) -> float:
    """Seconds of sampling in a step, or of all else but waiting for it, whichever are more."""
    return max(line.get("time/rollout_s", 0.0), line["time/step_s"] - line.get("time/sampler_wait_s", 0.0))


def slowest(folder: Path, step: int) -> float:
    """Seconds of the slowest environment of a step."""
    rows = (folder / f"samples/step_{step}.jsonl").read_text().splitlines()
    return max(json.loads(row)["environment"]["metrics"]["seconds"] for row in rows)


def least_step_s(longest: list[float], rest_s: float, bound: int) -> float:
    """Seconds of a step, by the mean after the first, that no schedule within the bound goes below, when every step begins the
    groups of another: the step S later ends no earlier than the slowest of them. Waiting as late as possible is best, because
    what a step waits counts for all groups under way."""
    waits: list[float] = []
    for seconds in longest[bound + 1 :]:  # the first step begins S + 1 steps' groups, whose waits may be its own
        before = sum(waits[len(waits) - bound :]) if bound else 0.0
        waits.append(max(seconds - bound * rest_s - before, 0.0))
    return rest_s + sum(waits) / max(len(longest) - 1, 1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
