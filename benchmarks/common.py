"""What the benchmarks share: the demo model, a synthetic batch, a table."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path

import torch
import transformers
import yaml

import posttrain
from posttrain.models.tiny import write_tiny_model
from posttrain.records.batches import SequenceBatch, TrainBatch, TrainerLogprobs


def random_batch(groups: int, members: int, prompt: int, response: int, vocabulary: int) -> TrainBatch:
    """``groups`` prompts of ``prompt`` tokens, each with ``members`` responses of 1 to ``response`` tokens; seeded."""
    generator = torch.Generator().manual_seed(0)
    rows = groups * members
    lengths = torch.randint(1, response + 1, (rows,), generator=generator)
    prompts = torch.randint(0, vocabulary, (groups, prompt), generator=generator).repeat_interleave(members, dim=0)
    responses = torch.randint(0, vocabulary, (rows, response), generator=generator)
    mask = torch.arange(response) < lengths[:, None]
    sequences = SequenceBatch(
        tokens=torch.cat([prompts, responses], dim=1),
        prompt_lengths=torch.full((rows,), prompt),
        response_mask=mask,
        rollout_logprobs=torch.zeros(rows, response),
        group_index=torch.arange(groups).repeat_interleave(members),
        trajectory_index=torch.arange(rows),
        sample_ids=tuple(map(str, range(rows))),
    )
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, response) * mask
    return TrainBatch(
        sequences=sequences,
        scores=torch.zeros(rows),
        logprobs=TrainerLogprobs(),
        advantages=advantages,
        loss_mask=mask,
    )


def written_to(file: Path, config: Mapping[str, object]) -> Path:
    """Write a configuration. Returns: the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(config))
    return file


def taught(place: Path, seed: int, rows: Iterable[object], *, layers: int, max_tokens: int) -> Path:
    """A random model that has read these conversations in their order, which ``place`` keeps. Returns: its folder."""
    if (place / "model").is_dir():
        return place / "model"
    write_tiny_model(place / "random", seed=seed, layers=layers)
    (place / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    written = {
        "run": {"name": "beginner", "folder": str(place / "run"), "seed": seed, "total_epochs": 1},
        "model": {"path": str(place / "random"), "compute_dtype": "float32"},
        "data": {
            "train_files": [str(place / "rows.jsonl")],
            "sequences_per_step": 32,
            "max_tokens": max_tokens,
            "shuffle": False,
        },
        "policy": {
            "sequences_per_micro_batch_per_device": 32,
            "optimizer": {"lr": 3e-3},
            "schedule": {"name": "constant"},
        },
    }
    return posttrain.train(written_to(place / "beginner.yaml", written)).export(place / "model")


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table, under a line that says what it was measured on."""
    print(
        f"{date.today().isoformat()}, {platform.machine()} CPU, {torch.get_num_threads()} threads, "
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}\n"
    )
    print_rows(header, rows)


def print_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The table alone."""
    for row in [header, ["---"] * len(header), *rows]:
        print("| " + " | ".join(row) + " |")
