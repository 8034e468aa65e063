"""A checkpoint of a model that processes share: gathered and written by the first, and by every process its own part.

    python benchmarks/checkpoint.py [MODEL_FOLDER] [--ranks 2] [--rounds 3] [--engine fsdp|megatron]

Weights and averages after an update. "Meeting" is what all processes do together before anything can be written, which training
waits for; writing may go on beside the next step. Memory is how far the peak of a process is above what it held before.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import median, print_table

WAYS = {"gathered": False, "by every process its own part": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model folder; default: the demo's")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", choices=("fsdp", "megatron"), default="fsdp")
    arguments = parser.parse_args()

    from posttrain.models.smollm2 import smollm2_135m_instruct

    model = arguments.model or str(smollm2_135m_instruct())
    with tempfile.TemporaryDirectory() as folder:
        # Spawned: each process measures its own memory.
        mp.spawn(process, (arguments.ranks, arguments.rounds, arguments.engine, model, folder), nprocs=arguments.ranks)
        found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(arguments.ranks)]
    rows = []
    for way in WAYS:
        first = found[0][way]
        times = [median([values[kind] for values in first]) for kind in ("meeting", "writing")]
        peaks = [f"{max(values['peak'] for values in each[way]) / 2**20:,.0f}" for each in found]
        rows.append((way, *(f"{seconds:.2f}" for seconds in times), *peaks))
    peaks_of = [f"process {rank}: MiB more" for rank in range(arguments.ranks)]
    print(f"{arguments.engine}, {arguments.ranks} processes, {found[0]['bytes'] / 1e6:,.0f} MB\n")
    print_table(("way", "meeting, s", "writing, s", *peaks_of), rows)


def process(rank: int, ranks: int, rounds: int, engine_name: str, model: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    engine = make_engine(engine_name, model, ranks)
    for weight in engine._masters.parameters.values():
        weight.grad = torch.zeros_like(weight)
    engine.optimizer_step()
    found: dict[str, Any] = {way: [] for way in WAYS} | {"bytes": engine.saved_bytes()}
    for number in range(rounds):
        for way, sharded in WAYS.items():
            place = Path(folder) / f"{number}"
            if rank == 0:
                place.mkdir()
            dist.barrier()
            before = begin_peak()
            begun = time.perf_counter()
            write = engine.writer(sharded=sharded)
            dist.barrier()
            met = time.perf_counter()
            write(place)
            dist.barrier()
            values = {"meeting": met - begun, "writing": time.perf_counter() - met, "peak": peak() - before}
            found[way].append(values)
            del write
            if rank == 0:
                shutil.rmtree(place)
            dist.barrier()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def make_engine(name: str, model: str, ranks: int) -> Any:
    from posttrain.config.model import ModelConfig
    from posttrain.config.policy import OptimizerConfig
    from posttrain.models.loading import load_causal_lm, load_tokenizer

    sharding: Any
    kind: Any
    if name == "fsdp":
        from posttrain.backends.train.fsdp import FsdpTrainEngine
        from posttrain.backends.train.fsdp.sharding import FsdpSharding

        kind, sharding = FsdpTrainEngine, FsdpSharding("cpu", param_dtype=torch.float32)
    else:
        from posttrain.backends.train.megatron import MegatronTrainEngine
        from posttrain.backends.train.megatron.sharding import MegatronSharding

        kind, sharding = MegatronTrainEngine, MegatronSharding(torch.device("cpu"), pipeline=ranks)
    return kind(
        load_causal_lm(model, dtype=torch.float32),
        load_tokenizer(ModelConfig(path=model)),
        optimizer=OptimizerConfig(lr=1e-6),
        learning_rate_factor=lambda update: 1.0,
        sequences_per_micro_batch=1,
        sequences_per_scoring_batch=1,
        sharding=sharding,
    )


def begin_peak() -> int:
    """Forget the peak so far. Returns the bytes that are held."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def peak() -> int:
    return memory("VmHWM")


def memory(name: str) -> int:
    """Of this process, in bytes, as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


if __name__ == "__main__":
    main()
