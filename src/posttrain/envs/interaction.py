"""Multi-turn conversations in verl's form: a class of the user's replies to the model until it ends the conversation.

The class has ``start_interaction``, ``generate_response`` (which returns True at the end, the reply, a score and further
information) and ``finalize_interaction``, of which only the second is required; they may be coroutine functions. One with
``state(instance_id)``, which returns a JSON value, and ``restore(instance_id, state)`` can be saved between turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from posttrain.envs.tools import WithTools, tools_of
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import Env, EnvSpec, EnvStart, EnvStep, Message
from posttrain.libraries.own_code import Calls, load
from posttrain.libraries.verl import modules as verl_modules
from posttrain.registry import ENVS
from posttrain.rewards.scorers.gsm8k import extract
from posttrain.settings import NonNegativeInt, PositiveInt


@ENVS.register("interaction")
def interaction(
    spec: EnvSpec,
    *,
    interactions: Sequence[Mapping[str, Any]],
    tools: Sequence[str | Mapping[str, Any]] = (),
    max_calls_per_turn: NonNegativeInt | None = None,
    max_result_characters: PositiveInt = 2000,
    cut: Literal["end", "start", "middle"] = "end",
) -> Env:
    """The row's conversation, with replies from the interaction that the row's ``interaction_kwargs`` name, and from tools that
    the model calls. A row without interaction_kwargs ends with the first reply that calls no tool.

    Args: interactions, mappings of name, class_name (package.module.Class, path/to/file.py:Class, or gsm8k, which is built in)
        and config; the others as in the environment tools.
    Raises: ConfigError when the row names an unknown interaction, or a class does not exist.
    """
    wanted = spec.row.get("interaction_kwargs") or None
    other = None
    if wanted is not None:
        known = {str(one.get("name") or one.get("class_name")): one for one in interactions}
        name = str(wanted.get("name") or next(iter(known), ""))
        if name not in known:
            what = f"the row names the interaction {name!r} (known: {', '.join(known) or 'none'})"
            raise ConfigError(Problem(what, fix="name it in environment.settings.interactions"))
        other = _made(known[name])
    with_tools = WithTools(
        spec,
        tools_of(tools) if tools else [],
        max_calls_per_turn=max_calls_per_turn,
        max_calls=None,
        max_result_characters=max_result_characters,
        cut=cut,
        role="tool",
        rewards=(0.0, 0.0),
    )
    return Talk(spec, with_tools, other, wanted or {}, with_calls=bool(tools))


class Talk:
    """One conversation with an interaction, and with tools."""

    def __init__(
        self, spec: EnvSpec, tools: WithTools, other: Any, arguments: Mapping[str, Any], *, with_calls: bool
    ) -> None:
        self._messages: list[Message] = list(spec.messages)
        self._tools = tools
        self._other = other
        self._arguments = {name: value for name, value in arguments.items() if name != "name" and value is not None}
        self._with_calls = with_calls
        self._calls = Calls()
        self._score: float | None = None
        self._turns = 0

    def reset(self, seed: int) -> EnvStart:
        self._start()
        return self._tools.reset(seed)

    def _start(self) -> None:
        if self._other is not None and hasattr(self._other, "start_interaction"):
            self._calls.call(self._other.start_interaction, "episode", **self._arguments)

    def state(self) -> Any:
        """Return the conversation, and the states of the tools and of the interaction; None where one cannot be saved."""
        tools, other = self._tools.state(), None
        if self._other is not None:
            if not all(callable(getattr(self._other, name, None)) for name in ("state", "restore")):
                return None
            other = self._calls.call(self._other.state, "episode")
        if tools is None:
            return None
        return {
            "messages": self._messages,
            "turns": self._turns,
            "score": self._score,
            "tools": tools,
            "interaction": other,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue: the interaction is started as before, and then takes its state."""
        self._start()
        self._tools.restore(state["tools"])
        self._messages, self._turns, self._score = list(state["messages"]), state["turns"], state["score"]
        if self._other is not None:
            self._calls.call(self._other.restore, "episode", state["interaction"])

    def step(self, action: str) -> EnvStep:
        self._turns += 1
        self._messages.append({"role": "assistant", "content": action})
        if self._other is None or (self._with_calls and self._tools.calls_in(action)):
            answered = self._tools.step(action)
            self._messages += answered.messages
            return answered
        over, text, score, *_ = self._calls.call(
            self._other.generate_response, "episode", list(self._messages), **self._arguments
        )
        self._score = float(score)
        if over:
            return EnvStep(done=True, stop="ended")
        answer = {"role": "user", "content": str(text)}
        self._messages.append(answer)
        return EnvStep(messages=[answer])

    def close(self) -> Mapping[str, float]:
        """Return metrics of the tools, and the interaction's last score, which only the run's reward terms turn into a reward."""
        try:
            if self._other is not None and hasattr(self._other, "finalize_interaction"):
                self._calls.call(self._other.finalize_interaction, "episode")
        finally:
            self._calls.close()
        told = {**self._tools.close(), "num_actions": float(self._turns)}
        return told if self._score is None else {**told, "interaction_score": self._score}


class Gsm8k:
    """verl's Gsm8kInteraction: rejects a wrong answer to a GSM8K question, and ends with a right one."""

    def __init__(self, config: Mapping[str, Any]):
        self._reference = ""

    def start_interaction(self, instance: str, ground_truth: Any = None, **_: Any) -> None:
        self._reference = str(ground_truth)

    def state(self, instance: str) -> None:
        """Return no state: the reference is the row's."""

    def restore(self, instance: str, state: None) -> None: ...

    def generate_response(self, instance: str, messages: Sequence[Message], **_: Any) -> tuple[bool, str, float, Any]:
        said = str(messages[-1]["content"])
        answer = extract(said if said.startswith("#### ") else f"#### {said}", "strict", "last")
        if answer == self._reference:
            return True, "Your response is correct!", 1.0, {}
        return False, "Your response is incorrect! You need to reflect on your answer and try again.", 0.0, {}


def _made(one: Mapping[str, Any]) -> Any:
    name = str(one.get("class_name") or "")
    verl_modules.provide()
    built = Gsm8k if name == "gsm8k" else load(name)
    return built(dict(one.get("config") or {}))
