"""A loader whose order is chosen by a user's own sampler class, which lives in the child process of ``own_rows``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from posttrain.errors import ConfigError, Problem, RunStopped
from posttrain.processes.child import Child, ChildFailed
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Reward, ScoredGroup

FIELD = "data.sampler_class_name"


class SamplerLoader:
    """A PromptLoader over the row numbers that a sampler gives. Rows that do not fill the last step of an epoch are left out.

    A prompt that stands in a step twice gets a name of its own the second time.

    Args: ``name`` is the class's, for messages; ``pad_id`` fills up the tensors that a curriculum is shown.
    Raises: ConfigError when there are fewer rows than a step needs, or the sampler fails.
    """

    def __init__(self, prompts: Sequence[Prompt], per_step: int, child: Child, *, name: str, pad_id: int = 0):
        self._prompts, self._per_step, self._child, self._name, self._pad_id = prompts, per_step, child, name, pad_id
        self._numbers = {prompt.prompt_id: number for number, prompt in enumerate(prompts)}
        about = self._call("describe", None, ConfigError)
        self.rows = len(prompts) if about["length"] is None else int(about["length"])
        if self.rows < per_step:
            what = f"a step needs {per_step} prompts, and an epoch of {name} has {self.rows}"
            raise ConfigError(Problem(what, fix=f"use at most {self.rows}", field="data.prompts_per_step"))
        self._learns, self._keeps_state = bool(about["learns"]), bool(about["state"])
        self._epoch = self._step = 0
        self._draws: list[list[int]] = []  # [rows requested, times], in order

    @property
    def steps_per_epoch(self) -> int:
        return self.rows // self._per_step

    @property
    def epochs(self) -> float:
        """Return the number of passes over the sampler, a fraction."""
        return self._epoch + min(self._step / self.steps_per_epoch, 1.0)

    def next(self, domains: Collection[str] | None = None) -> list[Prompt]:
        """Return the prompts of the next step. Raises: RunStopped when the sampler fails or gives too few rows."""
        drawn = self._draw()
        if len(drawn) < self._per_step:
            self._epoch, self._step = self._epoch + 1, 0
            drawn = self._draw()
        if len(drawn) < self._per_step:
            raise RunStopped(f"{self._name} gives {len(drawn)} rows, and a step needs {self._per_step}")
        wrong = next((number for number in drawn if not 0 <= number < len(self._prompts)), None)
        if wrong is not None:
            raise RunStopped(f"{self._name} gives row {wrong}, and there are {len(self._prompts)} rows, counted from 0")
        self._step += 1
        seen: Counter[int] = Counter()
        chosen = []
        for number in drawn:
            seen[number] += 1
            prompt = self._prompts[number]
            again = f"{prompt.prompt_id}#{seen[number]}"
            chosen.append(prompt if seen[number] == 1 else replace(prompt, prompt_id=again))
        return chosen

    def learned(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Hand the step's responses and scores to the sampler's ``update``, where it has one.

        Raises: RunStopped when it fails.
        """
        if self._learns:
            self._call("learn", self._batch(groups), RunStopped)
        return {}

    def state(self) -> dict[str, Any]:
        """Return the position, with the state of a sampler that gives one."""
        return {
            "epoch": self._epoch,
            "step": self._step,
            "draws": self._draws,
            "state": self._call("state", None, RunStopped),
            "prompts": len(self._prompts),
            "prompts_per_step": self._per_step,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly after ``state``: by the sampler's own state, else by drawing again all that was drawn.

        Raises: ConfigError when that is not possible.
        """
        now = {"prompts": len(self._prompts), "prompts_per_step": self._per_step}
        for name, value in now.items():
            if state.get(name) != value:
                what = f"the saved position is of {name} = {state.get(name)}, and this run has {value}"
                raise ConfigError(Problem(what, fix="use the files and sizes the run began with", field=FIELD))
        if self._learns and not self._keeps_state:
            what = f"{self._name} learns from scores and has no state that was saved, so the run cannot resume"
            fix = "give it the methods state_dict and load_state_dict, and start a new run"
            raise ConfigError(Problem(what, fix=fix, field=FIELD))
        if not self._call("restore", {"draws": state["draws"], "state": state["state"]}, ConfigError):
            what = f"{self._name} draws other rows than it did before, so the run cannot resume where it was"
            fix = "give it a seed of its own, or the methods state_dict and load_state_dict, and start a new run"
            raise ConfigError(Problem(what, fix=fix, field=FIELD))
        self._epoch, self._step = int(state["epoch"]), int(state["step"])
        self._draws = [list(each) for each in state["draws"]]

    def _draw(self) -> list[int]:
        if self._draws and self._draws[-1][0] == self._per_step:
            self._draws[-1][1] += 1
        else:
            self._draws.append([self._per_step, 1])
        drawn: list[int] = self._call("draw", self._per_step, RunStopped)
        return drawn

    def _batch(self, groups: Sequence[ScoredGroup]) -> dict[str, Any]:
        """Return the valid responses of a step as lists, a value per response."""
        rows = [
            (group.group.prompt, trajectory, outcome)
            for group in groups
            for trajectory, outcome in group.pairs
            if isinstance(outcome, Reward)
        ]
        numbers = [self._number(prompt.prompt_id) for prompt, _, _ in rows]
        return {
            "pad_id": self._pad_id,
            "prompt_ids": [list(prompt.token_ids) for prompt, _, _ in rows],
            "response_ids": [list(trajectory.token_ids) for _, trajectory, _ in rows],
            "response_mask": [
                [int(one) for one in trajectory.response_mask] or [1] * len(trajectory.token_ids)
                for _, trajectory, _ in rows
            ],
            "score": [outcome.value for _, _, outcome in rows],
            "objects": {
                "row": numbers,
                "index": [
                    prompt.extra_info.get("index", number) for (prompt, _, _), number in zip(rows, numbers, strict=True)
                ],
                "uid": [prompt.prompt_id for prompt, _, _ in rows],
                "data_source": [prompt.data_source for prompt, _, _ in rows],
                "reward_model": [{"ground_truth": prompt.ground_truth} for prompt, _, _ in rows],
                "extra_info": [dict(prompt.extra_info) for prompt, _, _ in rows],
            },
        }

    def _number(self, prompt_id: str) -> int:
        found = self._numbers.get(prompt_id)
        return self._numbers[prompt_id.rpartition("#")[0]] if found is None else found

    def _call(self, name: str, value: Any, error: type[ConfigError] | type[RunStopped]) -> Any:
        try:
            return self._child.call({name: value})
        except ChildFailed as failed:
            said = f"{self._name}: {failed}"
            raise (error(Problem(said, field=FIELD)) if error is ConfigError else RunStopped(said)) from failed
