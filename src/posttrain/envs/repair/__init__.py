"""Repair of a small repository: find the bug that makes tests fail, and mend it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from posttrain.data.episodes import FIRST_TRAINING_SEED
from posttrain.envs.repair.checkout import Box, Checkout
from posttrain.envs.repair.made import drawn
from posttrain.envs.repair.mutations import KINDS
from posttrain.envs.repair.tasks import Kind, RepairTask, tasks_of
from posttrain.envs.tools import WithTools
from posttrain.errors import ConfigError, Problem, did_you_mean
from posttrain.interfaces.env import Env, EnvSpec, EnvStart, EnvStep, Tool
from posttrain.registry import ENVS
from posttrain.sandbox.layers import walls_for
from posttrain.sandbox.walls import BoxLimits
from posttrain.settings import NonNegativeInt, Positive, PositiveInt

_ASKED = (
    "Some tests of this repository fail, because there is a bug in it. Find it and mend it with the tools, so that these tests "
    "and others of the same functions pass. The tests cannot be changed. When you are done, answer without a call."
)


@ENVS.register("repair")
def repair(
    spec: EnvSpec,
    *,
    tasks: str | None = None,
    kinds: Sequence[Kind] = KINDS,
    max_turns: PositiveInt | None = None,
    show_failures: bool = True,
    share_reward: bool = False,
    call_reward: float = 0.0,
    failed_call_reward: float = 0.0,
    max_calls: NonNegativeInt | None = None,
    max_result_characters: PositiveInt = 4000,
    role: Literal["tool", "user"] = "tool",
    system: str | None = None,
    instruction: str = _ASKED,
    timeout_s: Positive = 5.0,
    memory_mib: PositiveInt = 512,
    allow_unboxed: bool = False,
) -> Env:
    """A repository with a bug, and tools to list, read, edit and write its files and to run its tests, in a box. Reward 1 when
    all tests pass in the end, those that the policy cannot read too; else 0.

    Args: tasks, a JSONL file of tasks of your own; without it, bugs of the given kinds in built-in repositories, drawn by the
        seed, with other repositories in validation than in training; max_turns, 12 by default; show_failures begins with what
        the tests say; share_reward gives instead the share of the failing tests that was mended, less what was broken, and not
        below 0; call_reward, failed_call_reward, max_calls, max_result_characters and role as the environment tools has them
        (with the role user the tools stand in the first message, in the form of hermes);
        timeout_s and memory_mib of one run of all tests; allow_unboxed runs them with the rights of this user on a machine
        without a sandbox.
    Raises: ConfigError, also on a machine without a sandbox.
    """
    if role not in ("tool", "user"):
        raise ConfigError(Problem(f"role is {role!r}", fix="use tool or user", field="role"))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        what = f"there is no kind of bug {unknown[0]!r}" if unknown else "kinds is empty"
        fix = did_you_mean(unknown[0], list(KINDS), listed=True) if unknown else f"use some of {', '.join(KINDS)}"
        raise ConfigError(Problem(what, fix=fix, field="kinds"))
    walls = walls_for("the environment repair", allow_unboxed=allow_unboxed)
    own = tasks_of(tasks) if tasks else ()
    return Repair(
        spec,
        own,
        tuple(kinds),
        Box(BoxLimits(timeout_s=timeout_s, memory_bytes=memory_mib << 20), tuple(walls)),
        max_turns=min((turns for turns in (max_turns, spec.max_turns) if turns), default=12),
        wording=(system, instruction, show_failures),
        share_reward=share_reward,
        calls={
            "max_calls": max_calls,
            "max_result_characters": max_result_characters,
            "role": role,
            "rewards": (call_reward, failed_call_reward),
        },
    )


class Repair:
    """One episode."""

    def __init__(
        self,
        spec: EnvSpec,
        own: Sequence[RepairTask],
        kinds: tuple[Kind, ...],
        box: Box,
        *,
        max_turns: int,
        wording: tuple[str | None, str, bool],
        share_reward: bool,
        calls: Mapping[str, Any],
    ):
        self._spec, self._own, self._kinds, self._box = spec, own, kinds, box
        self._max_turns = max_turns
        self._system, self._instruction, self._show_failures = wording
        self._share_reward = share_reward
        self._limits = calls
        self._seed = self._turns = 0
        self._begun, self._mended, self._share = False, False, 0.0

    def reset(self, seed: int) -> EnvStart:
        self._begin(seed)
        self._before = self._checkout.shares()[0]
        parts = [self._instruction, self._task.description]
        if self._show_failures:
            parts.append(self._checkout.report())
            self._checkout.runs = 0
        system = [{"role": "system", "content": self._system}] if self._system else []
        start = self._calls.reset(seed)
        if self._limits["role"] == "user":
            parts.insert(1, offered(start.tools))
        messages = [*system, {"role": "user", "content": "\n\n".join(part for part in parts if part)}]
        return EnvStart(messages=messages, tools=() if self._limits["role"] == "user" else start.tools)

    def step(self, action: str) -> EnvStep:
        self._turns += 1
        step = self._calls.step(action)
        if not step.done and self._turns < self._max_turns:
            return step
        self._share, self._mended = self._checkout.shares()
        reward = float(self._mended)
        if self._share_reward:
            reward = max(self._share - self._before, 0.0) / (1.0 - self._before) if self._before < 1 else 1.0
        stop = "solved" if self._mended else "max_turns" if not step.done else "lost"
        return EnvStep(reward=reward + (step.reward or 0.0), done=True, stop=stop)

    def close(self) -> Mapping[str, float]:
        """Return success, the share of all tests that pass in the end, and the numbers of turns, edits, runs of tests, calls."""
        if not self._begun:
            return {}
        return {
            **self._calls.close(),
            "success": float(self._mended),
            "tests_passed": self._share,
            "edits": float(self._checkout.edits),
            "test_runs": float(self._checkout.runs),
        }

    def state(self) -> Any:
        """Return the seed, the files as they are, and the counts."""
        checkout = self._checkout
        return {
            "seed": self._seed,
            "before": self._before,
            "files": dict(checkout.files),
            "counts": [self._turns, checkout.edits, checkout.runs, *self._calls.counts],
        }

    def restore(self, state: Any) -> None:
        self._begin(state["seed"])
        self._calls.reset(self._seed)
        self._before = state["before"]
        self._checkout.files = dict(state["files"])
        self._turns, self._checkout.edits, self._checkout.runs, *counts = state["counts"]
        self._calls.counts = tuple(counts)

    def _begin(self, seed: int) -> None:
        self._seed, self._begun = seed, True
        self._task = self._own_task(seed) if self._own else drawn(seed, self._kinds, self._box)
        self._checkout = Checkout(self._task, self._box)
        self._calls = WithTools(
            EnvSpec(name=self._spec.name, row=self._spec.row, tool_call_form=self._spec.tool_call_form),
            self._checkout.tools(),
            max_calls_per_turn=None,
            cut="middle",
            **self._limits,
        )

    def _own_task(self, seed: int) -> RepairTask:
        """Return a row drawn by the seed in training, and the rows in order in validation."""
        if seed >= FIRST_TRAINING_SEED:
            return random.Random(f"repair/{seed}").choice(self._own)
        return self._own[seed % len(self._own)]


def offered(tools: Sequence[Tool]) -> str:
    """Describe tools in words, with the form of a call, for chat templates that know no tools."""
    lines = [
        f"{function['name']}({', '.join(function['parameters']['properties'])}): {function['description']}"
        for function in (tool["function"] for tool in tools)
    ]
    form = '<tool_call>{"name": "read_file", "arguments": {"path": "..."}}</tool_call>'
    return "\n".join(["The tools:", *lines, f"A call is written {form}."])
