"""Log-prob and entropy of drawn tokens, forward and backward: fused against plain, in time and peak memory.

    python benchmarks/scoring.py [--tokens 4096] [--rounds 3]

Every number comes from a process of its own, so that one cannot profit from the memory another holds; the two ways take
turns. Peak memory is the process's largest resident set (Linux with glibc: VmHWM, set back once the inputs are there)
above what it held with the inputs; the gradients that come out are part of it. Plain is what the model's own forward pass
and the formulas do: logits in the compute dtype, log_softmax in float32.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import median, print_table
from torch import Tensor

from posttrain.algos.fused_scoring import Head, TokenScores, score_logits, score_tokens
from posttrain.cli.process import keep_memory
from posttrain.models.loading import DTYPES

HIDDEN, VOCABULARY = 576, 49152  # of SmolLM2-135M
TEMPERATURE = 0.8
ENTROPY = ("value", "gradient")


def plain(hidden: Tensor, head: Tensor, targets: Tensor, entropy_gradient: bool) -> TokenScores:
    return score_logits(hidden @ head.T, targets, temperature=TEMPERATURE, entropy_gradient=entropy_gradient)


def fused(hidden: Tensor, head: Tensor, targets: Tensor, entropy_gradient: bool) -> TokenScores:
    return score_tokens(hidden, Head(weight=head), targets, temperature=TEMPERATURE, entropy_gradient=entropy_gradient)


WAYS: dict[str, Callable[..., TokenScores]] = {"plain": plain, "fused": fused}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--entropy", nargs="+", choices=ENTROPY, default=list(ENTROPY), help="its value, or its gradient too"
    )
    parser.add_argument("--one", nargs=3, metavar=("WAY", "DTYPE", "ENTROPY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        way, dtype, entropy = arguments.one
        print(*measure(WAYS[way], DTYPES[dtype], entropy == "gradient", arguments.tokens))
        return
    rows = []
    for dtype in arguments.dtypes:
        for entropy in arguments.entropy:
            runs: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
            for _ in range(arguments.rounds):
                for way in WAYS:
                    command = [
                        sys.executable,
                        __file__,
                        "--tokens",
                        str(arguments.tokens),
                        "--one",
                        way,
                        dtype,
                        entropy,
                    ]
                    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                    seconds, mib = map(float, output.split())
                    runs[way].append((seconds, mib))
            seconds = {way: median([run[0] for run in runs[way]]) for way in WAYS}
            mib = {way: median([run[1] for run in runs[way]]) for way in WAYS}
            rows.append(
                [
                    f"{dtype}, entropy's {entropy}",
                    f"{mib['plain']:.0f}",
                    f"{mib['fused']:.0f}",
                    f"{mib['plain'] / mib['fused']:.1f}",
                    f"{seconds['plain']:.2f}",
                    f"{seconds['fused']:.2f}",
                    f"{seconds['plain'] / seconds['fused']:.2f}",
                ]
            )
    header = ["", "plain, MiB", "fused, MiB", "ratio", "plain, s", "fused, s", "ratio"]
    print_table(header, rows)


def measure(way: Callable[..., TokenScores], dtype: torch.dtype, entropy: bool, tokens: int) -> tuple[float, float]:
    """Seconds (median of three, after one to warm up) and peak MiB of forward and backward."""
    keep_memory()
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN).to(dtype).requires_grad_()
    head = (torch.randn(VOCABULARY, HIDDEN) / 12).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (tokens,))
    weights = torch.randn(tokens)
    warm_up = way(hidden[:64], head, targets[:64], entropy)  # libraries make their kernels and buffers
    warm_up.logprobs.sum().backward()
    hidden.grad = head.grad = None
    del warm_up
    ctypes.CDLL(None).malloc_trim(0)  # what is free is given back, so that it counts when it is used again
    before = resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        scores = way(hidden, head, targets, entropy)
        loss = (scores.logprobs * weights).sum() + (scores.entropy.sum() if entropy else 0)
        loss.backward()
        seconds.append(time.perf_counter() - start)
        hidden.grad = head.grad = None
        del scores, loss
    return median(seconds[1:]), resident_mib("VmHWM") - before


def resident_mib(name: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
