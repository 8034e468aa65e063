"""Environments in the form of the package verifiers, one of each kind, as its documentation builds them."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


def load_environment(kind: str = "single", right: float = 1.0):
    rows = Dataset.from_list([{"question": f"Say {word}.", "answer": word} for word in ("red", "blue")])
    held_out = Dataset.from_list([{"question": "Say green.", "answer": "green"}])
    rubric = vf.Rubric(funcs=[lambda completion, answer, **_: right * (answer in str(completion[-1]["content"]))])
    rubric.add_metric(spoken)
    given = {"dataset": rows, "eval_dataset": held_out, "rubric": rubric}
    match kind:
        case "single":
            return vf.SingleTurnEnv(system_prompt="You obey.", **given)
        case "multi":
            return Twice(max_turns=3, **given)
        case "tool":
            return vf.ToolEnv(tools=[shout], max_turns=3, **given)
    return Purse(max_turns=4, **given)


def spoken(completion, **_) -> float:
    return float(sum(message["role"] == "assistant" for message in completion))


def shout(word: str) -> str:
    """Say a word loudly.

    Args:
        word: the word
    """
    return word.upper() + "!"


class Twice(vf.MultiTurnEnv):
    """The word must be said twice."""

    async def env_response(self, messages, state, **_):
        state["said"] = state.get("said", 0) + (state["answer"] in messages[-1]["content"])
        return [{"role": "user", "content": "Again." if state["said"] else "No."}]

    @vf.stop
    async def said_twice(self, state) -> bool:
        return state.get("said", 0) >= 2


class Purse(vf.StatefulToolEnv):
    """A tool with a state that the model does not see."""

    def __init__(self, **given):
        super().__init__(**given)
        self.add_tool(self.take, args_to_skip=["purse"])

    def update_tool_args(self, tool_name, tool_args, messages, state, **_):
        return {**tool_args, "purse": state.setdefault("purse", [3])}

    async def take(self, coins: int, purse: list) -> str:
        """Take coins.

        Args:
            coins: how many
        """
        purse[0] -= coins
        return f"{purse[0]} left"
