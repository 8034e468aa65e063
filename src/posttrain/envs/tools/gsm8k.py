"""Checks an answer to a GSM8K question: verl's Gsm8kTool, with which a model may try answers before it gives one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.interfaces.tool import Tool, parameters
from posttrain.registry import TOOLS
from posttrain.rewards.scorers.gsm8k import extract


@TOOLS.register("gsm8k")
def gsm8k() -> Tool:
    """A tool that compares the last number of an answer with the row's ``ground_truth``."""
    checked = _Checked()
    return Tool(
        name="calc_gsm8k_reward",
        description="Calculates the reward of an answer to a GSM8K question: 1.0 if it is right, 0.0 if it is not.",
        parameters=parameters(answer=("string", "the answer, a number, such as 72")),
        run=checked.run,
        begin=checked.begin,
        close=checked.close,
        state=checked.state,
        restore=checked.restore,
    )


class _Checked:
    """The reference of an episode, and the reward of the last answer."""

    def __init__(self) -> None:
        self._reference = ""
        self._reward = 0.0

    def begin(self, row: Mapping[str, Any]) -> None:
        """Store the reference. Raises: ValueError when the row has none."""
        if row.get("ground_truth") is None:
            raise ValueError("the tool gsm8k needs the row's reference answer, and it has none")
        self._reference = str(row["ground_truth"])

    def run(self, arguments: Mapping[str, Any]) -> str:
        answer = str(arguments["answer"])
        written = answer if answer.startswith("#### ") else f"#### {answer}"
        self._reward = float(extract(written, "flexible", "last") == self._reference)
        return f"Current parsed answer={answer!r} reward={self._reward}"

    def state(self) -> float:
        return self._reward

    def restore(self, state: float) -> None:
        self._reward = state

    def close(self) -> Mapping[str, float]:
        return {"tool_reward/gsm8k": self._reward}
