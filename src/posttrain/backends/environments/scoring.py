"""Scoring of a finished conversation by an environment: by its own ``score``, or by playing its episode with the turns that the
policy has taken."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.data.chat_api import content_of
from posttrain.interfaces.env import EnvAsk, EnvStart, EnvStep, EnvWithdrawn, FinishedConversation, Message


class OtherConversation(Exception):
    """The environment says or wants something else than stands in the conversation. The message names it."""


class Scorer:
    """An environment that scores one conversation. It is begun once, for the task that it sets or for the score.

    Args: env, an Env, an AskingEnv or a ScoringEnv; done waits for a value that may be awaited.
    """

    def __init__(self, env: Any, seed: int, done: Callable[[Any], Any]):
        self._env, self._seed, self._done = env, seed, done
        self._start: EnvStart | None = None
        self._events: queue.SimpleQueue[EnvAsk | EnvWithdrawn | EnvStep | Exception] = queue.SimpleQueue()
        self._first: EnvAsk | None = None  # turn that an AskingEnv waits for since it was begun

    @property
    def _asks(self) -> bool:
        return hasattr(self._env, "begin") and hasattr(self._env, "answer")

    def task(self) -> EnvStart:
        """Return the messages and tools that an episode begins with; none where the environment sets no task.

        Raises: OtherConversation where an AskingEnv begins with something else than a turn of the policy.
        """
        if self._start is None:
            if self._asks:
                self._env.begin(self._seed, self._events.put)
                event = self._events.get()
                if not isinstance(event, EnvAsk):
                    raise event if isinstance(event, Exception) else OtherConversation("it ends without any turn")
                self._first = event
                self._start = EnvStart(messages=_asked(event), tools=event.tools)
            elif hasattr(self._env, "reset"):
                self._start = _returned(self._done(self._env.reset(self._seed)), EnvStart, "reset")
            else:
                self._start = EnvStart(messages=())
        return self._start

    def score(self, conversation: FinishedConversation) -> dict[str, Any]:
        """Score the conversation. Returns: reward, stop and metrics, unchecked.

        Raises: OtherConversation; whatever the environment raises.
        """
        if callable(own := getattr(self._env, "score", None)):
            found = self._done(own(conversation))
            if not isinstance(found, Mapping):
                found = {"reward": found}
            return {"reward": found.get("reward"), "stop": "ended", "metrics": found.get("metrics") or {}}
        start = self.task()
        return self._answered(conversation) if self._first else self._stepped(start, conversation)

    def _stepped(self, start: EnvStart, conversation: FinishedConversation) -> dict[str, Any]:
        """Step an Env with the conversation's turns."""
        said, stop = start.messages, "ended"
        rewards, metrics = list[float](), dict[str, float]()
        for number, turn in enumerate(conversation.turns, 1):
            _compare(conversation, number, said)
            if turn.cut and callable(tell := getattr(self._env, "turn_was_cut", None)):
                tell()
            step: EnvStep = _returned(self._done(self._env.step(turn.action)), EnvStep, "step")
            if step.reward is not None:
                rewards.append(step.reward)
            for name, value in step.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value
            if step.done:
                stop = step.stop
                _check_end(conversation, number)
                break
            said = step.messages if step.conversation is None else step.conversation
        return {"reward": sum(rewards) if rewards else None, "stop": stop, "metrics": metrics}

    def _answered(self, conversation: FinishedConversation) -> dict[str, Any]:
        """Answer the turns that an AskingEnv asks for with those of the conversation."""
        event: EnvAsk | EnvWithdrawn | EnvStep | Exception = self._first or self._events.get()
        for number, turn in enumerate(conversation.turns, 1):
            if not isinstance(event, EnvAsk):
                break
            if not event.trained:
                raise OtherConversation("it asks for turns of another player, which the conversation does not hold")
            _compare(conversation, number, _asked(event))
            self._env.answer(event.turn, turn.action, cut=turn.cut, prompt_tokens=0, response_tokens=0)
            event = self._events.get()
            if isinstance(event, EnvStep):
                _check_end(conversation, number)
        if isinstance(event, Exception):
            raise event
        if not isinstance(event, EnvStep):
            what = "it asks for a further turn" if isinstance(event, EnvAsk) else "it withdraws a turn"
            raise OtherConversation(f"{what} after the {len(conversation.turns)} of the conversation")
        return {"reward": event.reward, "stop": event.stop or "ended", "metrics": event.metrics}


def _asked(event: EnvAsk) -> Sequence[Message]:
    """Return what the policy reads before a turn that an AskingEnv asks for; token ids are left out."""
    if event.prompt is None:
        return event.messages
    return [{"role": "user", "content": event.prompt}] if isinstance(event.prompt, str) else []


def _check_end(conversation: FinishedConversation, turns: int) -> None:
    if conversation.compared and turns < len(conversation.turns):
        raise OtherConversation(
            f"its episode is over after turn {turns}, and the conversation has {len(conversation.turns)}"
        )


def _compare(conversation: FinishedConversation, number: int, said: Sequence[Message]) -> None:
    """Raises: OtherConversation unless each text that the environment says before a turn is within a message that the policy read
    before it: programs may add instructions of their own."""
    if not conversation.compared:
        return
    read = [content_of(message) for message in conversation.turns[number - 1].read]
    for message in said:
        text = content_of(message).strip()
        if message.get("role") != "assistant" and not any(text in each for each in read):
            shown = text if len(text) <= 100 else f"{text[:100]}…"
            raise OtherConversation(
                f"before turn {number} it says {shown!r}, which no message there holds: the program must play what POST "
                "/conversations returns (or set compare_observations to false)"
            )


def _returned(value: Any, kind: type[Any], method: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{method} returned a {type(value).__name__} instead of an {kind.__name__}")
    return value
