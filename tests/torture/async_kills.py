"""Asynchronous runs that are killed by SIGKILL at random instants and started again, and what their records and files say then.

    python tests/torture/async_kills.py [--kills 170] [--ray-kills 30] [--seed 0]

``colocate`` and ``one_step`` decide by passes and by steps: metrics, samples and every checkpoint, ``ahead.json`` too, have the
bytes of a run that was left alone, and so has schedule.jsonl. Most kills are of runs in one process, which is forked after torch
is imported; the others are of the drivers of runs with workers of Ray. There ``separate``, with a sampler of its own, decides
when responses end, so only its records are looked at, as are those of a run whose environments are processes. In each of them
what was admitted is what was consumed, filtered or dropped, each group once; a step's samples are those of the groups that it
consumed; no more groups are ahead than the bound allows, and none is older; and episodes have all of their turns, each once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process that has started threads must not fork

import killing
import torch
from cluster import END_S, START_S, finish, start
from runs import result, tiny_run
from transformers.utils.logging import disable_progress_bar

from posttrain.build.train import train_run
from posttrain.models.tiny import write_tiny_model

Sections = dict[str, dict[str, Any]]
CORRECTED = {"kl_coef": 0.01, "rollout_correction": {"weights": "token"}}
# Responses of 1 to 24 tokens, some of which are unfinished in every checkpoint.
RAGGED = {"stop_token_ids": list(range(0, 256, 8)), "max_response_tokens": 24}
REFILL = {"strategy": "refill", "above_std": 0.3, "max_batches": 50}
COLOCATE = {"mode": "colocate", "max_staleness_steps": 2}
# Episodes of several turns, which are saved between turns and in the middle of one.
ENVIRONMENTS = Path(__file__).parents[1] / "unit/steps/counting_env.py"
TURNS: Sections = {"rollout": RAGGED | {"max_response_tokens": 8}, "reward": {"terms": []}, "asynchronous": COLOCATE}
GROUPS = 2  # of a step
KINDS: dict[str, Sections] = {
    "colocate": {"asynchronous": COLOCATE},
    "colocate, refilled": {"asynchronous": COLOCATE, "group_filter": REFILL},
    "colocate, dropping": {"asynchronous": COLOCATE | {"max_staleness_steps": 1, "on_stale": "drop"}},
    "colocate, in turns": {**TURNS, "environment": {"name": f"{ENVIRONMENTS}:Counting", "workers": 0}},
    "colocate, two players": {**TURNS, "environment": {"name": f"{ENVIRONMENTS}:Asking", "workers": 2}},
    "one_step": {"asynchronous": {"mode": "one_step"}},
    "one_step, refilled": {"asynchronous": {"mode": "one_step"}, "group_filter": REFILL},
}
TIMED = {"colocate, two players"}  # environments in processes answer when they answer: no two runs are equal
UNDER_RAY: dict[str, tuple[str, dict[str, Any]]] = {  # by mode, a layout of cluster.py and the section asynchronous
    "separate": ("rollout", {"mode": "separate", "max_staleness_steps": 2}),
    "one_step": ("rollout", {"mode": "one_step"}),
    "colocate": ("trainer", COLOCATE),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=170, help="in one process, over all kinds of runs")
    parser.add_argument("--ray-kills", type=int, default=30, help="of drivers, over all modes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    began, hits, wrong = time.monotonic(), 0, []
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", "llama")
        for number, kind in enumerate(KINDS):
            kills = options.kills // len(KINDS) + (number < options.kills % len(KINDS))
            hit, problems = in_one_process(Path(folder), model, kind, kills=kills, seed=options.seed)
            hits, wrong = hits + hit, wrong + [f"{kind}: {each}" for each in problems]
            print(
                f"{kind}: {hit} of {kills} kills hit a living run; {'; '.join(problems) or 'as left alone'}", flush=True
            )
        for number, mode in enumerate(UNDER_RAY):
            kills = options.ray_kills // len(UNDER_RAY) + (number < options.ray_kills % len(UNDER_RAY))
            if not kills:
                continue
            hit, problems = under_ray(Path(folder), model, mode, kills=kills, seed=options.seed)
            hits, wrong = hits + hit, wrong + [f"{mode} under Ray: {each}" for each in problems]
            said = "; ".join(problems) or ("no group lost" if mode == "separate" else "as left alone")
            print(f"{mode} under Ray: {hit} of {kills} kills hit a living run; {said}", flush=True)
    verdict = f"{len(wrong)} problems" if wrong else "nothing was lost or trained twice"
    print(f"{hits} kills, {time.monotonic() - began:.0f} s: {verdict}")
    return int(bool(wrong))


def in_one_process(folder: Path, model: Path, kind: str, *, kills: int, seed: int = 0) -> tuple[int, list[str]]:
    """Kill a run so many times. Returns: the kills that hit it alive, and what is wrong with it at its end."""
    steps = 6 + 2 * kills
    name = kind.replace(", ", "_")
    sections = {"rollout": RAGGED, "loss": CORRECTED} | KINDS[kind]
    straight, config = (
        tiny_run(folder, model, f"{name}_{which}", steps=steps, **sections) for which in ("whole", "killed")
    )
    _, status = os.waitpid(killing.forked(lambda: train_run(straight)), 0)
    assert status == 0, "the run fails without any kill"
    whole, killed = Path(straight.folder), Path(config.folder)
    hit = killing.run_with_kills(lambda: train_run(config), killed, whole, kills=kills, seed=seed)
    bound = int(config.asynchronous.max_staleness_steps)
    compared = [] if kind in TIMED else differences(killed, whole)
    return hit, compared + record_problems(killed, steps, bound) + episode_problems(killed, steps)


def differences(killed: Path, whole: Path) -> list[str]:
    """Compare the results and the schedules of two runs."""
    ours, theirs = result(killed), result(whole)
    differing = sorted(path for path in ours | theirs if ours.get(path) != theirs.get(path))
    problems = [f"{', '.join(differing[:3])} differ"] if differing else []
    if (killed / "schedule.jsonl").read_bytes() != (whole / "schedule.jsonl").read_bytes():
        problems.append("schedule.jsonl differs")
    return problems


def under_ray(folder: Path, model: Path, mode: str, *, kills: int, seed: int = 0) -> tuple[int, list[str]]:
    """Kill the driver of a run with workers so many times. Returns: as ``in_one_process``."""
    steps, draw, hit = 6 + 2 * kills, random.Random(seed), 0
    layout, asynchronous = UNDER_RAY[mode]
    extra: Sections = {"asynchronous": asynchronous, "loss": CORRECTED}
    extra["rollout"] = {"stop_token_ids": RAGGED["stop_token_ids"]}
    whole, killed = f"{mode}_under_ray_whole", f"{mode}_under_ray"
    if mode != "separate":
        run = start(folder, model, layout, whole, steps=steps, tokens=24, extra=extra)
        try:
            assert run.process.wait(START_S) == 0, run.text()
        finally:
            finish(run)
    for left in range(kills, -1, -1):
        run = start(folder, model, layout, killed, steps=steps, tokens=24, extra=extra)
        try:
            if not left:
                assert run.process.wait(START_S) == 0, run.text()
                break
            done, until = run.steps() + draw.randint(1, 2), time.monotonic() + START_S
            while run.steps() < done and run.process.poll() is None:
                assert time.monotonic() < until, run.text()
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.5))
            hit += run.process.poll() is None
            run.process.kill()
            run.process.wait(END_S)
        finally:
            finish(run)
    compared = [] if mode == "separate" else differences(folder / killed, folder / whole)
    return hit, compared + record_problems(folder / killed, steps, asynchronous.get("max_staleness_steps", 1))


def record_problems(folder: Path, steps: int, bound: int) -> list[str]:
    """Check schedule.jsonl and the samples of a run of so many steps, whose groups may be ``bound`` steps stale."""
    events = [json.loads(line) for line in (folder / "schedule.jsonl").read_text().splitlines()]
    pending: set[int] = set()
    gone: Counter[int] = Counter()
    trained: dict[int, list[str]] = {}
    problems = []
    for event in events:
        match event["event"]:
            case "admitted":
                pending.add(event["group"])
            case "consumed" | "filtered" | "dropped":
                if event["group"] not in pending:
                    problems.append(f"group {event['group']} is {event['event']}, and was not ahead")
                pending.discard(event["group"])
                gone[event["group"]] += 1
        if event["event"] == "consumed":
            trained.setdefault(event["step"], []).append(event["prompt_id"])
            if event["staleness"] > bound:
                problems.append(f"group {event['group']} was {event['staleness']} steps stale")
        if len(pending) > (bound + 1) * GROUPS:
            problems.append(f"{len(pending)} groups are ahead in step {event['step']}")
    admitted = [event["group"] for event in events if event["event"] == "admitted"]
    if sorted(admitted) != sorted([*gone.elements(), *pending]) or sorted(admitted) != list(range(len(admitted))):
        problems.append("what was consumed, filtered or dropped is not what was admitted")
    for step in range(1, steps + 1):
        rows = [json.loads(row) for row in (folder / f"samples/step_{step}.jsonl").read_text().splitlines()]
        sampled = Counter(row["prompt_id"] for row in rows)
        prompts = Counter(trained.get(step, []))
        each = len(rows) // max(len(trained.get(step, [])), 1)
        if prompts.total() != GROUPS or sampled != Counter({name: each * count for name, count in prompts.items()}):
            problems.append(f"the samples of step {step} are not those of the groups that it consumed")
    return problems


def episode_problems(folder: Path, steps: int) -> list[str]:
    """Check that every episode of counting_env.py has its three turns of the policy."""
    problems = []
    for step in range(1, steps + 1):
        for row in map(json.loads, (folder / f"samples/step_{step}.jsonl").read_text().splitlines()):
            if "environment" in row and len(row["turns"]) != 3:
                problems.append(
                    f"the episode of {row['sample_id']} has {len(row['turns'])} turns: {row['environment']}"
                )
    return problems


if __name__ == "__main__":
    sys.exit(main())
