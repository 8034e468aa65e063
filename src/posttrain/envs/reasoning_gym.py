"""Tasks of reasoning-gym as an environment: a task drawn by the episode's seed, scored by the library's own verifier."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Unpack

from posttrain.config.environment import TextGameWording
from posttrain.envs.questions import BOXED
from posttrain.envs.text_game import Played, TextGame
from posttrain.interfaces.env import Env, EnvSpec
from posttrain.libraries import reasoning_gym as library
from posttrain.registry import ENVS


@ENVS.register("reasoning_gym")
def reasoning_gym(
    spec: EnvSpec, *, task: str, options: Mapping[str, Any] | None = None, **wording: Unpack[TextGameWording]
) -> Env:
    r"""One task and one answer in \\boxed{...}; the reward is the verifier's score, usually 0 to 1.

    Args: task, a name such as letter_counting; options of its generator; wording is TextGame's, with 1 turn by default.
    Raises: ConfigError for an unknown task or option, or a task whose verifier evaluates text; MissingDependency.
    """
    library.check_installed("the environment reasoning_gym")
    library.check_scorable(task)
    library.generator(task, seed=0, size=1, options=options or {})  # report invalid options now
    usual: TextGameWording = {"action_pattern": BOXED}
    return TextGame(spec, ReasoningTask(task, options or {}), usual_turns=1, **(usual | wording))


class ReasoningTask:
    """A task as a game of one move."""

    actions: tuple[str, ...] = ()
    instruction = ""

    def __init__(self, task: str, options: Mapping[str, Any]):
        self._task = task
        self._options = options

    def begin(self, seed: int) -> str:
        self._entry = next(library.entries(self._task, seed=seed, options=self._options))
        return str(self._entry["question"])

    def act(self, action: str | None) -> Played:
        if action is None:
            return Played(seen="", reward=0.0, done=True, effective=False)
        score = library.verify(self._task, json.dumps(dict(self._options)), action, self._entry)
        return Played(seen="", reward=score, done=True, success=score >= 1.0)

    def state(self) -> str:
        return str(self._entry["question"])
