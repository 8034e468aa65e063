"""RUN_DIR/batches/step_N.safetensors: the tensors of a step, exactly as they were, to look at and to learn from again.

Names begin with ``sampled.`` (the scored batch, before anything was computed from it) or ``trained.`` (advantages, loss_mask and
returns, as the update read them; everything before these under ``trained.sequences.``). Values that are no tensors stand in the
file's metadata, as JSON: ``sampled.sample_ids``, and the names in ``sampled.reward_terms``. Values that the step did not have
are absent. Nothing in the file is executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from posttrain.errors import Problem, RequestError
from posttrain.interfaces.row_work import RowWork, in_this_process
from posttrain.records.batches import ScoredBatch, SequenceBatch, ShapedBatch, TrainBatch
from posttrain.run.tensor_files import write_tensors

SEQUENCES = ("tokens", "prompt_lengths", "response_mask", "rollout_logprobs", "group_index")
EXTRAS = ("state_index", "greedy_rewards", "sum_pi_squared", "process_rewards")


def batch_path(run_folder: Path, step: int) -> Path:
    return run_folder / "batches" / f"step_{step}.safetensors"


def save_step(
    path: Path,
    scored: ScoredBatch,
    shaped: ShapedBatch,
    train: TrainBatch,
    over_rows: RowWork = in_this_process,
) -> None:
    """Write a step, whole or not at all. Args: over_rows, the processes that hold the rows, which write them (tensor_files).

    Raises: RunStopped naming the file when it cannot be written.
    """
    values = {f"sampled.{name}": value for name, value in _scored_values(scored).items()}
    values |= {f"trained.sequences.{name}": value for name, value in _shaped_values(shaped, train).items()}
    values |= {
        "trained.advantages": train.advantages,
        "trained.loss_mask": train.loss_mask,
        "trained.returns": train.critic.returns if train.critic else None,
    }
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    texts = {name: json.dumps(each) for name, each in values.items() if each is not None and name not in tensors}
    write_tensors(path, tensors, texts, over_rows)


def load_scored(path: Path) -> ScoredBatch:
    """The responses and rewards of a step, as they were sampled and scored.

    Raises: RequestError when the file is not there or is not one of these.
    """
    if not path.is_file():
        there = sorted(int(file.stem.removeprefix("step_")) for file in path.parent.glob("step_*.safetensors"))
        have = f"there are steps {', '.join(map(str, there[:20]))}" if there else "the run wrote none"
        fix = "steps are recorded with tracking.batches_every_steps=1"
        raise RequestError(Problem(f"there is no recorded batch {path} ({have})", fix=fix))
    values: dict[str, Any] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name, text in (file.metadata() or {}).items():
                values[name] = json.loads(text)
            for name in file.keys():  # noqa: SIM118  # no mapping: it has keys() alone
                values[name] = file.get_tensor(name)
        found = {name.removeprefix("sampled."): value for name, value in values.items() if name.startswith("sampled.")}
        return _scored_batch(found)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        fix = "make the step again with the version that is to read it"
        raise RequestError(Problem(f"{path} is not a recorded batch of this version: {error}", fix=fix)) from error


def _scored_values(scored: ScoredBatch) -> dict[str, Any]:
    """The names in a file, and what stands under them."""
    batch, by_turn = scored.sequences, scored.turn_rewards
    return {
        **{name: getattr(batch, name) for name in (*SEQUENCES, "trajectory_index")},
        "sample_ids": list(batch.sample_ids),
        "rewards": scored.rewards,
        "scores": scored.rewards,
        "valid": scored.valid,
        "trained": scored.trained,
        "reward_terms": list(scored.reward_terms),  # their order; also where there are none
        **{f"reward_terms.{name}": tensor for name, tensor in scored.reward_terms.items()},
        "token_rewards": by_turn,
        "part_index": scored.part_index,
        "weights": scored.weights,
        "step_rewards": None if by_turn is None else by_turn.sum(dim=1),
        **scored.extras,
    }


def _shaped_values(shaped: ShapedBatch, train: TrainBatch) -> dict[str, Any]:
    return {
        **_scored_values(shaped.scored),
        "rewards": shaped.rewards,
        "token_rewards": shaped.token_rewards,
        "old_logprobs": shaped.logprobs.old,
        "ref_logprobs": shaped.logprobs.ref,
        "importance_weights": shaped.logprobs.importance_weights,
        "rejected": shaped.logprobs.rejected,
        "entropies": shaped.logprobs.entropies,
        "values": train.critic.values if train.critic else None,
    }


def _scored_batch(values: Mapping[str, Any]) -> ScoredBatch:
    count = len(values["tokens"])
    return ScoredBatch(
        sequences=SequenceBatch(
            **{name: values[name] for name in SEQUENCES},
            trajectory_index=values.get("trajectory_index", torch.arange(count)),
            sample_ids=tuple(values["sample_ids"]),
        ),
        rewards=values["rewards"],
        valid=values["valid"],
        trained=values.get("trained", torch.ones(count, dtype=torch.bool)),
        reward_terms={name: values[f"reward_terms.{name}"] for name in values.get("reward_terms", [])},
        turn_rewards=values.get("token_rewards"),
        part_index=values.get("part_index"),
        weights=values.get("weights"),
        extras={name: values[name] for name in EXTRAS if name in values},
    )
