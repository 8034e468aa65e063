"""CPU seconds of starts: commands to their end, `posttrain train` to its first sampled token, a worker of Ray to its answer.

    python benchmarks/start.py [--rounds 5] [--against CHECKOUT] [--only plan,train] [--model FOLDER]

Each is a process of its own, with warm files and bytecode: user and system time of all its threads, the median after one turn
that does not count. With --against every turn also runs the package of another checkout, right before, so that the ratio holds
on a machine with other work. The model is the demo's, which `posttrain demo` downloads, and so is the run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from common import median, print_table, written_to

ROOT = Path(__file__).resolve().parents[1]
MAIN = "from posttrain.cli.start import main; main()"
PLANS = {
    "native": "examples/grpo_chain_sum.yaml",
    "native, three overrides": "examples/grpo_chain_sum.yaml run.seed=2 policy.optimizer.lr=1e-6 tracking.trackers=[jsonl]",
    "native, SFT": "examples/sft_chain_sum.yaml",
    "verl": "examples/verl_ppo.yaml",
    "ROLL": "examples/roll_rlvr.yaml",
    "SkyRL, keys": "--dialect skyrl trainer.policy.model.path=m data.train_data=['a.parquet'] generator.backend=native",
}
# Prints the CPU seconds of a worker when it answers
WORKER = """
import os
from posttrain.backends.runtime.ray.cluster import Cluster, worker_environment
from posttrain.backends.runtime.ray.worker import Worker
cluster = Cluster(None, workers=1, object_store_bytes=80 << 20, start_timeout_s=300.0)
try:
    group = cluster.reserve([[{"CPU": 1.0}]], 60.0)[0]
    place = {"group": group, "bundle": 0, "cpus": 1, "gpus": 0, "environment": worker_environment(1, False)}
    handle = cluster.spawn(Worker, ("worker", cluster.node, "127.0.0.1"), **place)
    process = cluster.started(handle, "worker", 120.0)
    fields = open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()
    print((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
finally:
    cluster.close()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout, such as a git worktree of an earlier commit")
    parser.add_argument("--only", default="", help="of: commands, plan, train, worker")
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    sources = [ROOT, *([arguments.against.resolve()] if arguments.against else [])][::-1]
    only = set(filter(None, arguments.only.split(","))) or {"commands", "plan", "train", "worker"}
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for name, command in commands(Path(temporary), only, arguments.model).items():
            seconds: list[list[float]] = [[] for _ in sources]
            for turn in range(arguments.rounds + 1):
                for source, found in zip(sources, seconds, strict=True):
                    took = cpu_seconds(command, source, name == "a worker of Ray")
                    found += [took] if turn else []
            typical = [median(found) for found in seconds]
            rows.append([name, *(f"{each:.2f}" for each in typical), f"{typical[-1] / typical[0]:.2f}"])
    before = ["before"] if arguments.against else []
    print_table(["start of", *before, "CPU s", "ratio"], rows)


def commands(folder: Path, only: set[str], model: Path | None) -> dict[str, list[str]]:
    """The commands to time, by name."""
    python = [sys.executable, "-c"]
    found: dict[str, list[str]] = {}
    if "commands" in only:
        found |= {f"posttrain {each}": [*python, MAIN, each] for each in ("--help", "version", "doctor")}
    if "plan" in only:
        for name, words in PLANS.items():
            found[f"plan --skip-files, {name}"] = [*python, MAIN, "plan", *words.split(), "--skip-files"]
    if "train" in only:
        found["train, to the first token"] = [*python, MAIN, "train", str(demo_like(folder, model))]
    if "worker" in only:
        found["a worker of Ray"] = [*python, WORKER]
    return found


def demo_like(folder: Path, model: Path | None) -> Path:
    """The file of a run like the demo's, without validation, that ends at its first token."""
    from posttrain.data.arithmetic import Arithmetic, write_arithmetic
    from posttrain.models.smollm2 import smollm2_135m_instruct

    write_arithmetic(folder / "data", Arithmetic(task="sums"), train_rows=120, validation_rows=80, seed=1)
    return written_to(
        folder / "run.yaml",
        {
            "run": {"name": "start", "folder": str(folder / "run"), "seed": 1, "total_steps": 1},
            "model": {
                "path": str(model or smollm2_135m_instruct()),
                "compute_dtype": "bfloat16",
                "external_modules": ["first_token"],
            },
            "data": {
                "train_files": [str(folder / "data/train.parquet")],
                "prompts_per_step": 8,
                "max_prompt_tokens": 128,
            },
            "rollout": {"samples_per_prompt": 8, "temperature": 0.7, "max_response_tokens": 24},
            "reward": {"terms": [{"name": "exact_match", "options": {"extract": "last_number"}}]},
            "policy": {"sequences_per_micro_batch_per_device": 64, "optimizer": {"lr": 1e-5}},
        },
    )


def cpu_seconds(command: list[str], source: Path, prints: bool) -> float:
    """The CPU seconds of a process with the package of a checkout.

    Args: ``prints`` where the command measures another process, and prints its seconds.
    """
    if command[-1].endswith("run.yaml"):
        shutil.rmtree(Path(command[-1]).parent / "run", ignore_errors=True)
    path = os.pathsep.join([str(source / "src"), str(ROOT / "benchmarks")])
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    read, write = os.pipe()
    process = os.posix_spawn(
        command[0],
        command,
        environment | {"PYTHONPATH": path},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, write, 1),
            (os.POSIX_SPAWN_CLOSE, read),
        ],
    )
    os.close(write)
    with os.fdopen(read) as printed:
        text = printed.read()
    _, status, used = os.wait4(process, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 2):  # 2: a plan of what this machine lacks
        raise SystemExit(f"{' '.join(command)[:200]} ended with {os.waitstatus_to_exitcode(status)}")
    return float(text.split()[-1]) if prints else used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
