"""The update, one way next to another, on one machine in one run: what packing, shared prompts, fused scoring, checkpointing,
precision, adapters and compiling cost and save, and how much of the machine's matrix peak the update reaches.

python benchmarks/train.py [MODEL_FOLDER] [--rounds 3] [--only packed shared scoring checkpointing dtype layers kernels ...]

Every row is a process of its own, so that its peak memory is its own (the largest resident set, above that of the loaded
model with its optimizer). Within a comparison the rows take turns, round after round, and the median of each counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace

import torch
from common import median, print_table
from updates import PPO_CLIP, Way, flops, groups_batch, make_engine, matrix_peak, ragged_batch

from posttrain.cli.process import keep_memory, prepare_cpu
from posttrain.models.cpu_products import choose_float32_products
from posttrain.models.loading import DTYPES, load_model_config
from posttrain.models.smollm2 import smollm2_135m_instruct

# Comparison -> (its batch, what every way has in common, the ways: the first is what the others are compared with).
COMPARISONS: dict[str, tuple[str, Way, dict[str, Way]]] = {
    "packed": (
        "ragged",
        {"share_prompts": False},
        {"padded": {"padded": True}, "packed": {}, "packed, by tokens": {"max_tokens": 2048}},
    ),
    "shared": ("groups", {}, {"prompts repeated": {"share_prompts": False}, "prompts shared": {"share_prompts": True}}),
    "scoring": ("ragged", {}, {"plain scoring": {"whole_logits": True}, "fused scoring": {}}),
    "checkpointing": ("ragged", {}, {"activations kept": {}, "recomputed": {"gradient_checkpointing": True}}),
    "dtype": (
        "ragged",
        {},
        {
            "float32": {"dtype": "float32"},
            "bfloat16, float32 masters": {},
            "bfloat16, bfloat16 masters": {"master_dtype": "bfloat16"},
        },
    ),
    "layers": ("ragged", {}, {"as transformers has them": {"plain_layers": True}, "in fewer operations": {}}),
    "kernels": ("ragged", {}, {"without kernels": {"without_kernels": True}, "compiled kernels": {}}),
    "equal": (
        "groups",
        {"equal": 4},
        {"a backward pass for all rows": {"every_backward": True}, "none for equal rewards": {}},
    ),
    "lora": ("ragged", {}, {"all weights": {}, "LoRA of rank 16": {"lora": 16}}),
    "compile": ("ragged", {}, {"as it is": {}, "compiled": {"compile_layers": True}}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model folder; default: the demo's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=[*COMPARISONS, "peak"], help="default: all but compile")
    parser.add_argument("--sequences", type=int, default=64, help="of the ragged batch")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(json.loads(arguments.serve))
        return
    prepare_cpu()  # for the processes started from here, which inherit it
    path = arguments.model or str(smollm2_135m_instruct())
    chosen = arguments.only if arguments.only is not None else [*(set(COMPARISONS) - {"compile"}), "peak"]
    common = {"path": path, "sequences": arguments.sequences, "micro": arguments.micro_batch}
    header = ["way", "update, s", "faster than the first", "tokens/s", "peak above the model, MiB", "of the first"]
    for name in (name for name in COMPARISONS if name in chosen):  # each is printed when it is done
        batch, shared, ways = COMPARISONS[name]
        print_table(header, compare({**common, "batch": batch, **shared}, ways, arguments.rounds))
        print(flush=True)
    if "peak" in chosen:
        print_table(["", "bfloat16", "float32"], peak_rows(common, arguments.rounds))


def compare(common: Way, ways: dict[str, Way], rounds: int) -> list[list[str]]:
    """One row per way. Each has its process, and they take turns."""
    workers = {name: Worker({**common, **way}) for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for round_number in range(rounds + 1):
            for name, worker in workers.items():
                taken = worker.ask()
                worker.last = taken
                if round_number:  # the first round warms up, and compiles
                    seconds[name].append(taken["seconds"])
    finally:
        for worker in workers.values():
            worker.close()
    first = next(iter(ways))
    base, base_memory = median(seconds[first]), workers[first].last["mib"]
    rows = []
    for name, worker in workers.items():
        took, memory = median(seconds[name]), worker.last["mib"]
        rows.append(
            [
                name,
                f"{took:.2f}",
                "" if name == first else f"{base / took:.2f}",
                f"{worker.last['tokens'] / took:.0f}",
                f"{memory:.0f}",
                "" if name == first else f"{memory / max(base_memory, 1):.2f}",
            ]
        )
    return rows


class Worker:
    """A process that makes one update whenever it is asked."""

    def __init__(self, way: Way):
        command = [sys.executable, __file__, "--serve", json.dumps(way)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.last: dict[str, float] = {}

    def ask(self) -> dict[str, float]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a benchmark process ended; its error is above")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def serve(way: Way) -> None:
    """The worker: builds an engine, then an update per line of input."""
    keep_memory()
    engine, model = make_engine(way)
    vocabulary = model.config.vocab_size
    batch = ragged_batch(way["sequences"], vocabulary) if way["batch"] == "ragged" else groups_batch(vocabulary)
    if equal := way.get("equal"):  # the first groups have equal rewards
        batch = replace(batch, advantages=batch.advantages * (batch.sequences.group_index >= equal)[:, None])
    for weight in engine._masters.parameters.values():  # gradients and averages are there from the start
        weight.grad = torch.zeros_like(weight)
    engine.optimizer_step()
    held = resident_mib()
    tokens = int((batch.sequences.prompt_lengths + batch.sequences.response_lengths).sum())
    for _ in sys.stdin:
        start = time.perf_counter()
        engine.forward_backward(batch, PPO_CLIP, batch.counts())
        engine.optimizer_step()
        seconds = time.perf_counter() - start
        answer = {"seconds": seconds, "tokens": tokens, "mib": resident_mib() - held, "flops": flops(model, batch)}
        print(json.dumps(answer), flush=True)


def resident_mib() -> float:
    """The largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_rows(common: Way, rounds: int) -> list[list[str]]:
    """The update's share of what plain matrix products of the model's own shapes reach on this machine: by torch's own choice of
    library, and by ours for float32 (model.fast_float32)."""
    config = load_model_config(common["path"])
    own = {name: matrix_peak(config, DTYPES[name]) for name in ("bfloat16", "float32")}
    choose_float32_products()
    peak = {name: matrix_peak(config, DTYPES[name]) for name in own}
    update = {}
    for name in own:
        worker = Worker({**common, "batch": "groups", "dtype": name})
        rates = []
        try:
            for _ in range(rounds + 1):
                found = worker.ask()
                rates.append(found["flops"] / found["seconds"])
        finally:
            worker.close()
        update[name] = median(rates[1:])

    def rates_row(what: str, rates: dict[str, float]) -> list[str]:
        return [what, *(f"{rate / 1e9:.0f} GFLOP/s" for rate in rates.values())]

    def shares(what: str, of: dict[str, float]) -> list[str]:
        return [what, *(f"{100 * update[name] / of[name]:.0f} %" for name in update)]

    return [
        rates_row("matrix products of an MLP's shape, as torch has them", own),
        rates_row("the same as the update has them", peak),
        rates_row("update (8 x 8, prompt 256, response 64)", update),
        shares("of torch's products", own),
        shares("of the update's own products", peak),
    ]


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
