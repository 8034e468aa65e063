"""`make torture`: every sweep in full, a line each, and a summary. Exits 1 when anything was lost or differed.

Options: --kills N random kills of a save (200), --stride N every N-th system call only (1), --seed N.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process that has started threads must not fork

import failing
import killing
import torch
from runs import PPO, result, tiny_run
from transformers.utils.logging import disable_progress_bar

from posttrain.build.train import train_run
from posttrain.models.tiny import write_tiny_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", "llama")
        tallies = saves(killing.Work(model, Path(folder) / "work"), options)
        tallies += sweeps(killing.Work(model, Path(folder) / "background", background=True), options)
        different = [
            name for name, changes in (("GRPO", {}), ("PPO", PPO)) if not same_after_kills(Path(folder), name, changes)
        ]
    failures = [failure for tally in tallies for failure in tally.failures]
    for failure in failures[:5]:
        print(failure, file=sys.stderr)
    trials = sum(tally.trials for tally in tallies)
    verdict = (
        f"{len(failures)} trials and {len(different)} runs FAILED" if failures or different else "nothing was lost"
    )
    print(f"torture: {trials} trials, 2 runs killed 10 times each, {time.monotonic() - start:.0f} s: {verdict}")
    return int(bool(failures or different))


def sweeps(work: killing.Work, options: argparse.Namespace) -> list[killing.Tally]:
    """Kills and failing disks at every place of a save."""
    tallies = [told(killing.random_kills(work, options.kills, options.seed)), told(killing.operation_kills(work))]
    tallies += [told(failing.failing_operations(work, code)[0]) for code in (errno.EIO, errno.ENOSPC)]
    if shutil.which("strace"):
        tallies.append(told(killing.strace_kills(work, stride=options.stride)))
        tallies.append(told(failing.failing_calls(work, errno.EIO, stride=options.stride)))
    else:
        print("SIGKILL and EIO at every system call: LEFT OUT, strace is not installed (apt-get install strace)")
    return tallies


def saves(work: killing.Work, options: argparse.Namespace) -> list[killing.Tally]:
    tallies = sweeps(work, options)
    disk = work.folder / "disk"
    disk.mkdir()
    if failing.can_mount():
        tallies += [told(failing.full_disks(work, disk, looks=looks)) for looks in (True, False)]
    else:
        print("disk full at ten sizes: LEFT OUT, it needs the right to mount a small file system (run it as root)")
    tallies.append(told(failing.two_trainers(work.folder / "trainers", 20)))
    return tallies


def told(tally: killing.Tally) -> killing.Tally:
    print(tally.line(), flush=True)
    return tally


def same_after_kills(folder: Path, name: str, changes: dict[str, dict[str, object]]) -> bool:
    straight = train_run(tiny_run(folder, folder / "model", f"{name}_straight", steps=30, **changes))
    config = tiny_run(folder, folder / "model", f"{name}_killed", steps=30, **changes)
    killed = folder / f"{name}_killed"
    hit = killing.run_with_kills(lambda: train_run(config), killed, straight, kills=10)
    ours, theirs = result(killed), result(straight)
    differing = sorted(path for path in ours | theirs if ours.get(path) != theirs.get(path))
    same = not differing
    verdict = (
        "metrics, samples and checkpoints as the uninterrupted run's" if same else f"FAILED: {differing[:3]} differ"
    )
    print(f"a {name} run killed at 10 random instants ({hit} hit it alive): {verdict}", flush=True)
    return same


if __name__ == "__main__":
    sys.exit(main())
