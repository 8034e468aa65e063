"""Worked solutions to the sums of a dataset, as conversations to learn: each line adds one number.

python worked_solutions.py TRAIN.parquet WORKED.jsonl
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pyarrow.parquet as pq


def worked(expression: str) -> str:
    """``5 + 6 - 3`` -> ``5 + 6 = 11. 11 - 3 = 8. The answer is 8.``"""
    first, *rest = re.findall(r"[+-]|\d+", expression)
    total, steps = int(first), []
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(number) if sign == "+" else total - int(number)
        steps.append(f"{total} {sign} {number} = {result}.")
        total = result
    return " ".join([*steps, f"The answer is {total}."])


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    lines = []
    for row in pq.read_table(source).to_pylist():
        solution = worked(json.loads(row["extra_info"]["entry"])["metadata"]["expression"])
        assert solution.endswith(f" {row['reward_model']['ground_truth']}."), (solution, row)
        lines.append(json.dumps({"messages": [*row["prompt"], {"role": "assistant", "content": solution}]}) + "\n")
    beside = target.with_suffix(".tmp")
    beside.write_text("".join(lines))
    beside.replace(target)  # it is there whole or not at all
    print(f"wrote {target}: {len(lines)} conversations")


if __name__ == "__main__":
    main()
