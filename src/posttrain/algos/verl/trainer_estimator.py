"""An advantage estimator inside the trainer of a fork of verl, evaluated in a process of its own.

    trainer  EstimatorInTrainer  ──a step's rows──▶  child  opened: the statements of the fork's loop, then its compute_advantage

Rows are turns of episodes, in order. Tensors cross as bytes, everything else as JSON.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import torch
from omegaconf import OmegaConf
from torch import Tensor

from posttrain.errors import ConfigError, Problem, RequestError
from posttrain.libraries.verl.parts import Checkout, Values
from posttrain.libraries.verl.protocol import DataProto, Tensors
from posttrain.processes.child import Child, ChildFailed
from posttrain.verl_advantages import FUNCTION, checkout_of, find_in_trainer
from posttrain.verl_functions import TOKENS, VerlFunction

FACTORY = "posttrain.algos.verl.trainer_estimator:opened"
LOAD_S, CALL_S = 300.0, 1800.0
_FIELD = "advantage.name"


class EstimatorInTrainer:
    """The estimator, called with our inputs in the order of its description."""

    def __init__(self, file: Path, name: str, described: VerlFunction):
        self._file, self._name, self._described = file, name, described

    def __call__(self, *inputs: Any, config: Mapping[str, Any] | None = None) -> tuple[Tensor, Tensor]:
        """Advantages and returns [B, T], 0 on rows without a valid reward and behind the mask; such rows are not shown to it.

        Args: config, the values that the fork's trainer reads from its configuration.

        Raises: RequestError when it fails or returns something else.
        """
        ours = dict(zip(self._described.our_inputs, inputs, strict=True))
        valid, mask = ours["valid"], ours["response_mask"]
        empty = torch.zeros(mask.shape, dtype=torch.float32)
        if not valid.any():
            return empty, empty.clone()
        rows = valid.nonzero().flatten().tolist()
        call = {name: ours[name][valid].tolist() for name in ("group_index", "trajectory_index", "step_index")}
        call |= {name: _packed(ours[name][valid].float()) for name in ("step_rewards", "turn_penalties")}
        call |= {"states": [ours["state_texts"][row] for row in rows], "shape": [len(rows), mask.shape[1]]}
        call |= {"mask": _packed(mask[valid].float()), "rewards": _packed(ours["token_rewards"][valid].float())}
        if TOKENS in ours:
            call["tokens"] = _packed(ours[TOKENS][valid].float())
        try:
            child = _child(str(self._file), self._name, json.dumps(config or {}, sort_keys=True))
            answer = child.call(call)
        except ChildFailed as error:
            what = f"{FUNCTION} of {self._file} failed for {self._name}: {error}"
            raise RequestError(Problem(what, field=_FIELD)) from error
        placed = []
        for part in (answer["advantages"], answer["returns"]):
            whole = empty.clone()
            whole[valid] = torch.where(mask[valid], _unpacked(part, call["shape"]), 0.0)
            placed.append(whole)
        return placed[0], placed[1]


@lru_cache(maxsize=1)
def _child(file: str, name: str, config: str) -> Child:
    setup = {"file": file, "name": name, "config": json.loads(config)}
    try:
        return Child(FACTORY, setup, load_s=LOAD_S, call_s=CALL_S)
    except ConfigError as error:
        raise ConfigError([Problem(each.what, fix=each.fix, field=_FIELD) for each in error.problems]) from error


def opened(setup: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Load the trainer's function with what it calls, in the child. Returns: the handler of a step's rows.

    Raises: ConfigError for what cannot be imported.
    """
    file = Path(setup["file"])
    found = find_in_trainer(file, setup["name"])
    assert found is not None, f"{file} has no estimator {setup['name']}"
    sys.breakpointhook = _no_debugger
    checkout = Checkout(checkout_of(file))
    compute = checkout.name(file, FUNCTION)
    trainer = _Trainer(setup["config"])
    settings = [one for one in found.call.keywords if one.arg is not None and ast.unparse(one.value) != found.batch]

    def answer(call: Mapping[str, Any]) -> dict[str, Any]:
        batch = _batch(call)
        values = Values(checkout, found.site, {"self": trainer, found.batch: batch})
        if found.prepared:
            values.run(found.prepared)
        if found.penalizes_steps and "step_rewards" in batch.batch:
            batch.batch["step_rewards"] -= _unpacked(call["turn_penalties"], [len(batch)])
        given = {str(one.arg): values.evaluated(one.value) for one in settings}
        result = compute(batch, **given)
        shape = tuple(call["shape"])
        parts = {}
        for name in ("advantages", "returns"):
            part = result.batch[name]
            if not isinstance(part, Tensor) or tuple(part.shape) != shape:
                raise ValueError(f"{name} are no tensor {list(shape)}")
            parts[name] = _packed(part.float())
        return parts

    return answer


class _Trainer:
    """The trainer, as far as the statements read it."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = OmegaConf.create(dict(config))


def _batch(call: Mapping[str, Any]) -> DataProto:
    """The rows in the fork's fields."""
    shape = call["shape"]
    mask, rewards = _unpacked(call["mask"], shape), _unpacked(call["rewards"], shape)
    lengths = (mask * torch.arange(1, shape[1] + 1)).amax(dim=1, keepdim=True)
    there = (torch.arange(shape[1]) < lengths).long()
    responses = _unpacked(call["tokens"], shape).long() if "tokens" in call else torch.zeros(shape, dtype=torch.long)
    prompts = torch.zeros(shape[0], 1, dtype=torch.long)
    steps = numpy.frombuffer(call["step_rewards"], dtype=numpy.float32)
    episodes = numpy.asarray(call["trajectory_index"])
    sums, counts = (
        {one: float(value) for one, value in zip(numpy.unique(episodes), each, strict=True)}
        for each in _per_episode(episodes, steps)
    )
    penalties = numpy.frombuffer(call["turn_penalties"], dtype=numpy.float32)
    objects: dict[str, Sequence[Any]] = {
        "uid": [f"group-{each:08d}" for each in call["group_index"]],
        "traj_uid": [f"episode-{each:08d}" for each in call["trajectory_index"]],
        "anchor_obs": call["states"],
    }
    batch = DataProto.from_dict({}, objects)
    batch.batch = Tensors(
        prompts=prompts,
        responses=responses,
        input_ids=torch.cat([prompts, responses], dim=1),
        attention_mask=torch.cat([torch.ones_like(prompts), there], dim=1),
        response_mask=mask,
        token_level_scores=rewards,
        token_level_rewards=rewards.clone(),
    )
    batch.non_tensor_batch |= {
        "rewards": steps.copy(),
        "episode_rewards": numpy.array([sums[each] for each in episodes], dtype=numpy.float32),
        "episode_lengths": numpy.array([counts[each] for each in episodes], dtype=numpy.float32),
        "active_masks": numpy.ones(len(steps), dtype=bool),
        "is_action_valid": penalties == 0,
    }
    return batch


def _per_episode(episodes: Any, steps: Any) -> tuple[Any, Any]:
    """The sum of the rewards, and the number of the turns, of each episode, in the order of their numbers."""
    _, places = numpy.unique(episodes, return_inverse=True)
    return numpy.bincount(places, weights=steps), numpy.bincount(places)


def _packed(values: Tensor) -> bytes:
    return values.contiguous().numpy().tobytes()


def _unpacked(data: bytes, shape: Sequence[int]) -> Tensor:
    return torch.from_numpy(numpy.frombuffer(data, dtype=numpy.float32).reshape(*shape).copy())


def _no_debugger(*_: Any, **__: Any) -> None:
    """``breakpoint()`` of a fork's code is a no-op: the process has no terminal."""
