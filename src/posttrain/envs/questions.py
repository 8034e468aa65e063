"""Questions of a dataset as an environment: a row drawn by the episode's seed, answered in a box or between tags, with tools if
wanted."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Unpack

from posttrain.config.environment import TextGameWording
from posttrain.data.record_files import read_records
from posttrain.envs.text_game import Played, TextGame
from posttrain.envs.tools import WithTools, tools_of
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import Env, EnvSpec, EnvStart, EnvStep
from posttrain.libraries import math_verify
from posttrain.registry import ENVS
from posttrain.rewards.latex_text import same_latex
from posttrain.settings import NonNegativeInt

# The last box, with braces two deep inside.
BOXED = r".*\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
_TRAINING_SEEDS = 1_000_000  # and up; validation has the seeds below


@ENVS.register("questions")
def questions(
    spec: EnvSpec,
    *,
    file: str,
    question_column: str = "question",
    answer_column: str = "answer",
    grader: Literal["math", "text"] = "math",
    tools: Sequence[str | Mapping[str, Any]] = (),
    max_calls: NonNegativeInt | None = None,
    call_reward: float = 0.0,
    failed_call_reward: float = 0.0,
    **wording: Unpack[TextGameWording],
) -> Env:
    """A question of a dataset: reward 1 for the right answer, else 0, which ends the episode.

    Training draws rows by the episode's seed; validation takes them in order. An answer is the last \\boxed{...} (another
    action_pattern finds others).

    Args: file, of parquet, JSON, JSONL or CSV; the columns of questions and references (a list of them: any is right); grader
        math compares expressions, text compares words, without case, articles and punctuation; tools, as the environment tools
        has them, with max_calls, call_reward and failed_call_reward; wording is TextGame's, with 1 turn by default, and 10 with
        tools.
    Raises: ConfigError, or DataError for a file that cannot be read.
    """
    rows = _rows(file, question_column, answer_column)
    usual: TextGameWording = {"action_pattern": BOXED}
    game = Questions(rows, grader)
    asked = TextGame(spec, game, usual_turns=1, **(usual | {**wording, "max_turns": 1}))
    if not tools:
        return asked
    calls = (call_reward, failed_call_reward)
    turns = min((each for each in (wording.get("max_turns"), spec.max_turns) if each), default=10)
    return AskedWithTools(spec, asked, tools_of(tools), turns=turns, max_calls=max_calls, rewards=calls)


class Questions:
    """A question as a game of one move."""

    actions: tuple[str, ...] = ()
    instruction = ""

    def __init__(self, rows: Sequence[tuple[str, tuple[str, ...]]], grader: str):
        self._rows = rows
        self._right = _same_expression if grader == "math" else _same_words

    def begin(self, seed: int) -> str:
        drawn = random.Random(f"questions/{seed}").randrange(len(self._rows))
        self._question, self._references = self._rows[drawn if seed >= _TRAINING_SEEDS else seed % len(self._rows)]
        return self._question

    def act(self, action: str | None) -> Played:
        right = action is not None and any(self._right(reference, action) for reference in self._references)
        return Played(seen="", reward=float(right), done=True, success=right, effective=action is not None)

    def state(self) -> str:
        return self._question


class AskedWithTools:
    """A question that the model may call tools for; its answer without a call is graded."""

    def __init__(
        self,
        spec: EnvSpec,
        asked: Env,
        tools: Sequence[Any],
        *,
        turns: int,
        max_calls: int | None,
        rewards: tuple[float, float],
    ):
        self._spec = spec
        self._asked = asked
        self._tools = tools
        self._limits: dict[str, Any] = {"max_calls": max_calls, "rewards": rewards}
        self._turns = turns

    def reset(self, seed: int) -> EnvStart:
        self._seed = seed
        start = self._asked.reset(seed)
        assert isinstance(start, EnvStart), "the question is no coroutine"
        spec = EnvSpec(name=self._spec.name, messages=start.messages, row=self._spec.row, max_turns=self._turns)
        self._calls = WithTools(
            spec,
            self._tools,
            max_calls_per_turn=None,
            max_result_characters=2000,
            cut="end",
            role="tool",
            **self._limits,
        )
        return self._calls.reset(seed)

    def step(self, action: str) -> EnvStep:
        step = self._calls.step(action)
        if not step.done:
            return step
        if step.stop == "max_turns":
            return EnvStep(reward=0.0, done=True, stop="max_turns")
        graded = self._asked.step(action)
        assert isinstance(graded, EnvStep), "the question is no coroutine"
        return graded

    def state(self) -> Any:
        """Return the seed, which draws the question, and the calls so far; None where a tool cannot be saved."""
        calls = self._calls.state()
        return None if calls is None else {"seed": self._seed, "calls": calls}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.reset(state["seed"])
        self._calls.restore(state["calls"])

    def close(self) -> Mapping[str, float]:
        return {**self._asked.close(), **self._calls.close()}


@lru_cache(maxsize=8)
def _rows(file: str, question: str, answer: str) -> Sequence[tuple[str, tuple[str, ...]]]:
    """Read the questions and references of a file, once per process. Raises: ConfigError, DataError."""
    path = Path(file).expanduser()
    if not path.is_file():
        fix = "name a parquet, JSON, JSONL or CSV file (a dataset of the hub: download one of its files)"
        raise ConfigError(Problem(f"there is no file {file}", fix=fix, field="file"))
    rows = []
    for number, record in enumerate(read_records(path)):
        missing = next((column for column in (question, answer) if record.get(column) is None), None)
        if missing is not None:
            what = f"row {number} of {path.name} has no {missing!r} (it has {', '.join(map(str, record))})"
            field = "question_column" if missing == question else "answer_column"
            raise ConfigError(Problem(what, fix=f"name another column with {field}", field=field))
        given = record[answer]
        references = tuple(map(str, given)) if isinstance(given, list | tuple) else (str(given),)
        rows.append((str(record[question]), references))
    if not rows:
        raise ConfigError(Problem(f"{path.name} has no row", fix="name a file with questions", field="file"))
    return tuple(rows)


def _same_expression(reference: str, answer: str) -> bool:
    if same_latex(answer, reference):
        return True
    wanted, found = math_verify.parse(f"${reference}$"), math_verify.parse(f"${answer}$")
    return wanted is not None and found is not None and math_verify.same(wanted, found)


def _same_words(reference: str, answer: str) -> bool:
    return _words(reference) == _words(answer)


def _words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles, as SQuAD normalises answers."""
    return [word for word in re.sub(r"[^\w\s]", " ", text.lower()).split() if word not in ("a", "an", "the")]
