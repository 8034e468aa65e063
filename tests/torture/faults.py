"""Every process of a run with workers of Ray is killed or stopped at any instant, and what is promised then is looked at.

What is promised (docs/cluster.md): a worker that holds state is named within ten seconds, the run ends with exit code 3 and the
last good checkpoint, and started again it comes to what it would have come to. A sampler is named and replaced, and the run
comes to the same end; so it does when the server beside a sampler is hit. A reward worker and an environment are replaced, and
the run goes on; the process that forks environments is named, and the run ends. A driver that is stopped goes on where it was;
one that is killed leaves no process.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from cluster import (
    END_S,
    NAMED_S,
    START_S,
    Run,
    Sections,
    command,
    descendants,
    finish,
    held_by,
    left_behind,
    start,
    wait_until,
    worker_pid,
)
from runs import result
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from posttrain.models.tiny import draw_weights

Signal = signal.Signals
STEPS = 6  # of a trial
TOKENS = 100  # of a response
STOPPED_S = 5.0  # of a driver: longer than a worker may be silent

STAND_IN = Path(__file__).parents[1] / "parity/vllm_stand_in.py"


def games(folder: Path, model: Path) -> Sections:
    return {
        "data": {"train_files": [], "validation_files": []},
        "reward": {"terms": []},
        "environment": {
            "name": "guess_number",
            "settings": {"low": 1, "high": 4},
            "max_turns": 3,
            "train_episodes": 10,
            "workers": 2,
            "timeout_s": 4.0,
        },
    }


def scored(folder: Path, model: Path) -> Sections:
    """A critic and a reward model on devices of their own."""
    if not (folder / "scores").exists():
        scorer = AutoModelForSequenceClassification.from_config(
            AutoConfig.from_pretrained(model, num_labels=1), dtype=torch.float32
        )
        draw_weights(scorer, 3)
        scorer.save_pretrained(folder / "scores")
        AutoTokenizer.from_pretrained(model).save_pretrained(folder / "scores")
    return {
        "advantage": {"name": "gae", "gae_lambda": 0.9},
        "policy": {"devices": [0]},
        "reference": {"devices": [0]},
        "rollout": {"devices": [0]},
        "critic": {"devices": [1], "sequences_per_mini_batch": 2, "optimizer": {"lr": 3e-3}},
        "reward": {"terms": [], "model": {"path": str(folder / "scores"), "devices": [2]}},
        "placement": {"devices": 3},
    }


def served(folder: Path, model: Path) -> Sections:
    """A sampler that is a server beside its worker."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} {folder} "$@"\n')
    python.chmod(0o755)
    return {"rollout": {"engine": "vllm", "devices": [1], "engine_options": {"python": str(python)}}}


@dataclass(frozen=True)
class Kind:
    """A process to lose, and what is to come of it."""

    layout: str  # of cluster.LAYOUTS
    victims: Callable[[Run], list[int]]
    code: int = 0  # of the run's end
    name: str = ""  # pattern of the line that names it; "": it has no line
    exact: bool = (
        False  # the run comes to the same end as one that was left alone, after another start when it has ended
    )
    extra: Callable[[Path, Path], Sections] = lambda folder, model: {}


def below(words: str, *, children: bool = False) -> Callable[[Run], list[int]]:
    """Processes of a run whose command line holds some words; or what they have forked."""

    def found(run: Run) -> list[int]:
        chosen = {pid for pid in descendants(run.process.pid) if words in command(pid)}
        forked = {below for pid in chosen for below in descendants(pid)}
        return sorted(chosen & forked if children else chosen - forked)

    return found


def named(role: str) -> Callable[[Run], list[int]]:
    return lambda run: worker_pid(run, role)


LOST = r"\[{} rank \d\] (has died|is stopped)"
KINDS: dict[str, Kind] = {
    "trainer": Kind("trainer", named("trainer"), code=3, name=LOST.format("trainer"), exact=True),
    "sampler": Kind("rollout", named("rollout"), name=LOST.format("rollout"), exact=True),
    "server": Kind("rollout", below("vllm_stand_in.py"), name=LOST.format("rollout"), exact=True, extra=served),
    "critic": Kind("scored", named("critic"), code=3, name=LOST.format("critic"), exact=True, extra=scored),
    "reward model": Kind("scored", named("reward model"), code=3, name=LOST.format("reward model"), extra=scored),
    "reward worker": Kind("one", below("processes.keeper", children=True)),
    "reward keeper": Kind("one", below("processes.keeper")),
    "environment": Kind("one", below("environments.server", children=True), extra=games),
    "environment host": Kind(
        "one",
        below("environments.server"),
        code=3,
        name=r"the process that starts environments \(process \d+\) (has ended|is stopped)",
        extra=games,
    ),
    "driver": Kind("trainer", lambda run: [run.process.pid]),
}


def lose(
    folder: Path, model: Path, kind: str, how: Signal, name: str, after: float, *, compare: bool = True
) -> list[str]:
    """One trial: what is wrong after a process was hit so many steps later than the second; with ``compare`` also at the end
    of the run, which is started again when it has ended."""
    promised = KINDS[kind]
    run = begin(folder, model, kind, name)
    try:
        wait_until(lambda: run.steps() >= 2, run, START_S)
        time.sleep(after * run.step_s())
        pids = descendants(run.process.pid)
        segments = held_by([run.process.pid, *pids])
        if not (victims := promised.victims(run)):
            return ["there is no such process"]
        victim = random.Random(name).choice(victims)
        os.kill(victim, how)
        if kind == "driver":
            return driver_hit(run, pids, how, segments)
        wrong = []
        if promised.name:
            took = run.wait_for(promised.name, END_S)
            wrong += [] if took <= NAMED_S else [f"named after {took:.1f} s"]
        pids += descendants(run.process.pid)
        code = run.process.wait(START_S)
        wrong += [] if code == promised.code else [f"exit code {code}, not {promised.code}: {run.text()[-800:]}"]
        if promised.code == 3:
            text = " ".join(run.text().split())
            wrong += [] if "Last good checkpoint: global_step_" in text else ["no checkpoint is named"]
            wrong += [] if f"(process {victim}" in text else ["its pid is not named"]
        wrong += [f"left behind: {each}" for each in left_behind(pids, run.temporary, segments)]
    finally:
        finish(run)
    return wrong + (goes_on(folder, model, kind, name) if compare and promised.exact else [])


def begin(folder: Path, model: Path, kind: str, name: str) -> Run:
    extra = KINDS[kind].extra(folder, model)
    return start(folder, model, KINDS[kind].layout, name, steps=STEPS, tokens=TOKENS, extra=extra)


def driver_hit(run: Run, pids: list[int], how: Signal, segments: set[str]) -> list[str]:
    """A stopped driver goes on; a killed one's workers end, and only files stay: nobody is left to delete them."""
    if how is signal.SIGSTOP:
        time.sleep(STOPPED_S)
        os.kill(run.process.pid, signal.SIGCONT)
        code = run.process.wait(START_S)
        return [] if code == 0 else [f"exit code {code}: {run.text()[-800:]}"]
    run.process.wait(END_S)
    # Ray's agents look for their parent now and then.
    left = left_behind(pids, run.temporary, segments, timeout_s=90.0)
    return [f"left behind: {each}" for each in left if not each.startswith(str(run.temporary))]


def goes_on(folder: Path, model: Path, kind: str, name: str) -> list[str]:
    """Start the run again where it has ended, and compare it with one that was left alone."""
    wrong = []
    if KINDS[kind].code:
        run = begin(folder, model, kind, name)
        try:
            if code := run.process.wait(START_S):
                return [f"started again, it ends with exit code {code}: {run.text()[-800:]}"]
        finally:
            finish(run)
    straight = folder / f"straight-{kind}"
    if not straight.exists():
        run = begin(folder, model, kind, straight.name)
        try:
            if code := run.process.wait(START_S):
                return [f"a run that is left alone ends with exit code {code}: {run.text()[-800:]}"]
        finally:
            finish(run)
    one, other = result(folder / name), result(straight)
    return wrong + [
        f"differs: {part}" for part in sorted(one.keys() | other.keys()) if one.get(part) != other.get(part)
    ]


def sweep(folder: Path, model: Path, trials: int, seed: int = 0) -> list[str]:
    """Every kind with both signals in turn, at random instants. Returns what was wrong, a line per finding."""
    chance = random.Random(seed)
    cases = [(kind, how) for how in (signal.SIGKILL, signal.SIGSTOP) for kind in KINDS]
    found = []
    for trial in range(trials):
        kind, how = cases[(trial + seed) % len(cases)]
        name = re.sub(r"\W", "_", f"trial{trial}_{kind}_{how.name}")
        begun = time.monotonic()
        wrong = lose(folder, model, kind, how, name, chance.uniform(0.0, 2.0))  # of its six steps
        print(f"{name}: {wrong or 'as promised'} ({time.monotonic() - begun:.0f} s)", flush=True)
        found += [f"{name}: {each}" for each in wrong]
        shutil.rmtree(folder / name, ignore_errors=True)
    return found
