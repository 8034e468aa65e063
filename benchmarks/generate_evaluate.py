"""posttrain generate and posttrain evaluate on 2,000 rows: rows, tokens and responses per second, and what a part costs.

    python benchmarks/generate_evaluate.py [--rows 2000] [--samples 4] [--model FOLDER]

Without --model it is the tiny random model (two layers of width 32), with which everything but the model is measured: reading,
templating, the sampler's bookkeeping, durable parts, scoring, bootstrap, files. Each command is a process of its own, so its
start (imports, loading) is in the first column and told apart in the second. ``parts of 1`` saves after every row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from common import print_table

from posttrain.models.tiny import write_tiny_model


def write_prompts(path: Path, rows: int) -> None:
    """Sums with their results, in verl's schema."""
    table = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {row} + {row % 7}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(row + row % 7)},
            "extra_info": {"index": row},
        }
        for row in range(rows)
    ]
    pq.write_table(pa.Table.from_pylist(table), path)


def run(*arguments: str) -> float:
    """Seconds that a command takes."""
    start = time.perf_counter()
    code = "from posttrain.cli.start import main; main()"
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def generation(folder: Path, model: str, samples: int, tokens: int, part: int, rows: int) -> list[str]:
    out = folder / f"out_{part}_{rows}.parquet"
    return [
        "generate",
        f"model.path={model}",
        "model.compute_dtype=float32",
        f"data.files={folder / 'prompts.parquet'}",
        f"data.max_prompts={rows}",
        f"output.file={out}",
        f"output.rows_per_part={part}",
        f"rollout.samples_per_prompt={samples}",
        f"rollout.max_response_tokens={tokens}",
        "rollout.ignore_eos=true",
    ]


def rates(seconds: float, start: float, rows: int, samples: int, tokens: int) -> list[str]:
    """The cells of a line. Work that takes less than a tenth of the command's start cannot be told from it."""
    work = seconds - start
    if work < 0.1 * start:
        return [f"{seconds:.1f} s", "too few rows to tell", "", "", ""]
    counts = [rows, rows * samples, *([rows * samples * tokens] if tokens else [])]
    cells = [f"{count / work:,.0f}" for count in counts]
    return [f"{seconds:.1f} s", f"{work:.1f} s", *cells, *[""] * (3 - len(cells))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="of every response")
    parser.add_argument("--parts", type=int, nargs="+", default=[256, 64, 1], help="rows that are saved together")
    parser.add_argument("--draws", type=int, nargs="+", default=[1000, 0], help="of the bootstrap")
    parser.add_argument("--model", help="folder of a model; the tiny one when not given")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = asked.model or str(write_tiny_model(folder / "model"))
        write_prompts(folder / "prompts.parquet", asked.rows)
        start = run(*generation(folder, model, asked.samples, asked.tokens, 1, 1))  # one row: the rest is the start
        rows = []
        for part in asked.parts:
            seconds = run(*generation(folder, model, asked.samples, asked.tokens, part, asked.rows))
            rows.append([f"generate, parts of {part}", *rates(seconds, start, asked.rows, asked.samples, asked.tokens)])
        out = folder / f"out_{asked.parts[0]}_{asked.rows}.parquet"
        for draws in asked.draws:
            evaluation = ["evaluate", f"output.folder={folder / 'e'}", f"metrics.bootstrap_draws={draws}"]
            start = run(*evaluation, f"data.files={folder / 'out_1_1.parquet'}")
            seconds = run(*evaluation, f"data.files={out}")
            told = json.loads((folder / "e" / "results.json").read_text())["sources"]["openai/gsm8k"]
            assert told["responses"] == asked.rows * asked.samples
            rows.append([f"evaluate, {draws} bootstrap draws", *rates(seconds, start, asked.rows, asked.samples, 0)])
        print_table(["command", "whole", "without its start", "rows/s", "responses/s", "tokens/s"], rows)


if __name__ == "__main__":
    main()
