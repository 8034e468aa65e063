"""How many small programs per second run in boxes, next to plain Python processes without any protection.

    python benchmarks/boxes.py [--programs 400] [--rounds 3]

The program reads two numbers and prints their sum. Every run is a box of its own; several threads ask for boxes at once. The
median of the rounds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from common import median, print_table

from posttrain.sandbox.boxes import Program, run
from posttrain.sandbox.layers import probe
from posttrain.sandbox.walls import BoxLimits

SOURCE = "a, b = map(int, input().split())\nprint(a + b)"


def in_a_box(walls: Sequence[str]) -> Callable[[int], bool]:
    program = Program(source=SOURCE, stdin="1 2\n")
    return lambda _: run(program, BoxLimits(), walls).stdout == b"3\n"


def unprotected(_: int) -> bool:
    command = [sys.executable, "-I", "-S", "-c", SOURCE]
    return subprocess.run(command, input=b"1 2\n", capture_output=True, check=True).stdout == b"3\n"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--programs", type=int, default=400)
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    walls = probe().walls
    ways = [
        (f"all walls ({len(walls)})", in_a_box(walls)),
        ("Landlock and seccomp", in_a_box([name for name in ("landlock", "seccomp") if name in walls])),
        ("no box: a Python process each", unprotected),
    ]
    rows = []
    for name, way in ways:
        for threads in (1, 2):
            times = []
            for _ in range(given.rounds):
                with ThreadPoolExecutor(threads) as pool:
                    assert all(pool.map(way, range(threads)))  # what a first run starts
                    start = time.perf_counter()
                    assert all(pool.map(way, range(given.programs)))
                    times.append(time.perf_counter() - start)
            rows.append((name, str(threads), f"{given.programs / median(times):.0f}"))
    print_table(["box", "threads that ask", "programs/s"], rows)


if __name__ == "__main__":
    main()
