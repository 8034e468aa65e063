"""skyrl-gym's text2sql with the model's SQL in boxes: its own code runs it in its process, on databases that it may change."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pandas  # type: ignore[import-untyped]
from skyrl_gym.envs.sql.env import SQLEnv
from skyrl_gym.tools import SQLCodeExecutorToolGroup
from skyrl_gym.tools.core import tool

from posttrain.rewards.scorers.text2sql import solution
from posttrain.sandbox.boxes import BoxRun
from posttrain.sandbox.layers import walls_for
from posttrain.sandbox.queries import all_rows, rows_of
from posttrain.sandbox.walls import BoxLimits

# As in the package: of a question while the episode goes on, and of each of the two queries that are compared.
QUESTION_S, COMPARED_S = 5.0, 30.0
LONGEST, LINES = 9000, 50  # characters of an answer that is shown whole; lines of a longer one


def box_queries(env: SQLEnv, *, allow_unboxed: bool) -> None:
    """Have every query of this environment run in a box. Raises: ConfigError when this machine cannot box it in."""
    walls = walls_for("the environment text2sql", allow_unboxed=allow_unboxed)
    file = Path(env.db_file).resolve()

    def ask(query: str, timeout_s: float) -> BoxRun:
        return all_rows(file, query, BoxLimits(timeout_s=timeout_s), walls)

    env.tool_group = BoxedQueries(env.db_path, ask)
    env.init_tool_groups([env.tool_group])
    env._get_reward = partial(_reward, env, ask)


class BoxedQueries(SQLCodeExecutorToolGroup):
    """The package's tool, whose answers are worded as there."""

    def __init__(self, folder: str, ask: Any):
        self._ask = ask
        super().__init__(db_file_path=folder)

    @tool
    def sql(self, db_id: str, sql: str | None, turns_left: int, timeout: float = QUESTION_S) -> str:
        if sql is None:
            told = (
                "Your previous action is invalid. Follow the format of outputting thinking process and sql tool, "
                "and try again."
            )
        else:
            told = _told(self._ask(sql, timeout), sql, Path(self.db_path, db_id, f"{db_id}.sqlite"))
        reminder = f"<reminder>You have {turns_left} turns left to complete the task.</reminder>"
        return f"\n\n<observation>{told}\n{reminder}</observation>\n\n"


def _told(done: BoxRun, query: str, file: Path) -> str:
    """The rows of a query as a table, or its error."""
    if done.ended == "timeout":
        return f"SQL Timeout:\n{query}"
    if not done.finished:
        kind, _, reason = done.why().partition(": ")
        return f"Error executing SQL: {reason if kind.startswith('sqlite3.') else done.why()}, db file: {file}"
    try:
        table = pandas.DataFrame(rows_of(done))
    except ValueError as error:
        return f"Error executing SQL: {error}, db file: {file}"
    text: str = table.to_string(index=False)
    if len(text) > LONGEST:
        shown = table.head(LINES).to_string(index=False)
        return f"Truncated to {LINES} lines since returned response too long: {shown}"
    return text


def _reward(env: SQLEnv, ask: Any, action: str, done: bool) -> float:
    """The package's reward: -1 when the conversation has the wrong format, else 1 for the reference's rows, 0 for others."""
    if not done:
        return 0
    query = solution("".join(message["content"] for message in env.chat_history))
    if query is None:
        return -1.0
    found, wanted = ask(query, COMPARED_S), ask(env.gold_sql, COMPARED_S)
    try:
        return float(found.finished and wanted.finished and rows_of(found) == rows_of(wanted))
    except ValueError:
        return 0.0
