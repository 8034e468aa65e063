"""Responses of a run's steps in a folder, to train on them again without sampling: ``FOLDER/step_N.jsonl``, a line per prompt.

The first line describes the step: the model and the distribution that its responses were drawn from. A step that samples several
batches has ``step_N_batch_K.jsonl`` for the further ones. Where groups are sampled one by one, ahead of the steps that train
them, ``group_N.jsonl`` has those of the N-th that was admitted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import Problem, RequestError, RunStopped
from posttrain.interfaces.roles import Roles
from posttrain.interfaces.rollout_engine import OnGroup, OnTokens
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, TrajectoryGroup, VersionSpan
from posttrain.run.durable import write_durably

# The settings that responses depend on, but for their seed.
DRAWN_WITH = (
    *("samples_per_prompt", "max_response_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "stop_token_ids"),
    *("ignore_eos", "first_token_temperature", "first_token_top_k", "engine_sampling"),
)
_FIELDS = (
    "sample_id",
    "token_ids",
    "logprobs",
    "text",
    "policy_version",
    "prompt_logprobs",
    "failure",
    "failure_reason",
)

Collect = Callable[..., list[TrajectoryGroup]]


@dataclass(slots=True, kw_only=True)
class KeptResponses:
    """The folder ``rollout.replay_folder``. Steps that it holds are not sampled; all others are, and are written to it."""

    folder: Path
    model: str  # as the configuration names it
    say: Callable[[str], None]
    steps: Sequence[int] | None = None  # or groups: all others are sampled and not kept; None: every one
    read_batches: int = 0  # instead of being sampled
    _batches: dict[int, int] = field(default_factory=dict)  # so far, by step

    def of_step(self, step: int, collect: Collect) -> Collect:
        """Return ``collect`` of one step: the same arguments and results."""
        if self.steps is not None and step not in self.steps:
            return collect

        def kept(
            roles: Roles,
            prompts: Sequence[Prompt],
            sampling: SamplingParams,
            on_tokens: OnTokens | None = None,
            on_group: OnGroup | None = None,
        ) -> list[TrajectoryGroup]:
            path = self._next_file(step)
            if not path.exists():
                groups = collect(roles, prompts, sampling, on_tokens, on_group)
                write_groups(path, groups, self._described(sampling))
                return groups
            groups = read_groups(path, prompts, self._described(sampling))
            if not self.read_batches:
                self.say(f"responses are read from {path} and the files beside it, instead of being sampled")
            self.read_batches += 1
            for group in groups:
                if on_tokens:
                    on_tokens(sum(len(one.token_ids) for one in group.trajectories))
                if on_group:
                    on_group(group)
            return groups

        return kept

    def read_group(self, number: int, prompt: Prompt, sampling: SamplingParams) -> TrajectoryGroup | None:
        """Return the kept responses of the ``number``-th group, from 1; None where it is to be sampled.

        Raises: RunStopped as ``read_groups``.
        """
        path = self._file_of(number)
        if path is None or not path.exists():
            return None
        return read_groups(path, [prompt], self._described(sampling))[0]

    def write_group(self, number: int, group: TrajectoryGroup, sampling: SamplingParams) -> None:
        """Keep the responses of a group, unless they were read. Raises: RunStopped where the disk does not take them."""
        path = self._file_of(number)
        if path is not None and not path.exists():
            write_groups(path, [group], self._described(sampling))

    def announce_groups(self) -> None:
        """Say that groups are read, where there are any."""
        there = sum(1 for _ in self.folder.glob("group_*.jsonl"))
        if there:
            self.say(f"responses of {there} groups are in {self.folder}: they are read instead of being sampled")

    def _file_of(self, number: int) -> Path | None:
        return self.folder / f"group_{number}.jsonl" if self.steps is None or number in self.steps else None

    def _next_file(self, step: int) -> Path:
        number = self._batches[step] = self._batches.get(step, 0) + 1
        return self.folder / (f"step_{step}.jsonl" if number == 1 else f"step_{step}_batch_{number}.jsonl")

    def _described(self, sampling: SamplingParams) -> dict[str, Any]:
        settings = {name: getattr(sampling, name) for name in DRAWN_WITH}
        return json.loads(json.dumps({"model": self.model} | settings, default=dict))


def check_folder(folder: Path) -> None:
    """Raises: RequestError where the path is no folder, as the pickled file that verl itself writes."""
    if folder.exists() and not folder.is_dir():
        raise RequestError(
            [
                Problem(
                    f"{folder} is a file, such as verl writes with pickle, which could run any code and is not loaded",
                    fix="name another folder; the first run samples its responses and writes them there",
                    field="rollout.replay_folder",
                )
            ]
        )


def write_groups(path: Path, groups: Sequence[TrajectoryGroup], described: Mapping[str, Any]) -> None:
    """Write a batch of groups, whole or not at all. Raises: RunStopped where the disk does not take it."""
    lines = [
        json.dumps(described, ensure_ascii=False),
        *(json.dumps(_row(group), ensure_ascii=False) for group in groups),
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise RunStopped(f"responses cannot be kept: {error}") from error


def read_groups(path: Path, prompts: Sequence[Prompt], described: Mapping[str, Any]) -> list[TrajectoryGroup]:
    """The groups of a file, with these prompts.

    Raises: RunStopped where the file is damaged, or holds responses of another model, to other prompts, or drawn with other
        settings: the message names the first difference.
    """
    try:
        header, *rows = (json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1])
        groups = [_group(row, prompt) for row, prompt in zip(rows, prompts, strict=False)]
        named = [(row["prompt_id"], tuple(row["prompt_token_ids"])) for row in rows]
        before = dict(header)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunStopped(f"{path} cannot be read ({error}); delete it, and its step is sampled again") from error
    for name, value in described.items():
        if before.get(name) != value:
            raise _unfit(path, f"{name} was {before.get(name)!r}, and is {value!r}")
    if len(rows) != len(prompts):
        raise _unfit(path, f"it holds {len(rows)} prompts, and the step has {len(prompts)}")
    for (prompt_id, tokens), prompt in zip(named, prompts, strict=True):
        if tokens != prompt.token_ids:
            same = "other tokens of " if prompt_id == prompt.prompt_id else f"{prompt_id} in place of "
            raise _unfit(path, f"it holds responses to {same}{prompt.prompt_id}")
    return groups


def _unfit(path: Path, what: str) -> RunStopped:
    return RunStopped(
        f"{path} does not fit this run: {what}; use another rollout.replay_folder, or the settings it was made with"
    )


def _row(group: TrajectoryGroup) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "prompt_id": prompt.prompt_id,
        "prompt_token_ids": prompt.token_ids,
        "responses": [
            {name: getattr(one, name) for name in _FIELDS}
            | {"token_ids": tuple(one.token_ids), "logprobs": tuple(one.logprobs)}
            | {"stop_reason": str(one.stop_reason), "version_spans": one.version_spans}
            for one in group.trajectories
        ],
    }


def _group(row: Mapping[str, Any], prompt: Prompt) -> TrajectoryGroup:
    return TrajectoryGroup(prompt=prompt, trajectories=tuple(_trajectory(one) for one in row["responses"]))


def _trajectory(saved: Mapping[str, Any]) -> Trajectory:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value := saved[name], list) else value for name in _FIELDS
    }
    return Trajectory(
        **values,
        stop_reason=StopReason(saved["stop_reason"]),
        version_spans=tuple(VersionSpan(*span) for span in saved["version_spans"]),
    )
