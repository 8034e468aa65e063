"""Existing agents as environments: a function or program that requests its turns from an OpenAI-compatible endpoint.

    agent (a process of its own) ──HTTP on loopback──▶ listener.py ──▶ Agent.step ──▶ the run's sampler

Every request of the agent is a turn of the episode: the policy's response is returned to the agent, and the next request is
the observation. A request that extends the previous conversation is appended to the sampled tokens; any other one (edited
history, a parallel conversation) begins a new training sample. Nothing is tokenised here.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.data.chat_api import added_messages, assistant_message
from posttrain.envs.agent.episode import AgentEpisode
from posttrain.envs.agent.listener import Listener, TurnRequest
from posttrain.envs.agent.process import AgentEnd, AgentProcess, start_command, start_function, with_result
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import Env, EnvSpec, EnvStart, EnvStep
from posttrain.registry import ENVS

__all__ = ["Agent", "AgentEpisode", "agent"]


class AgentFailed(Exception):
    """The agent ended without returning. The message describes how."""


@ENVS.register("agent")
def agent(
    spec: EnvSpec,
    *,
    function: str | None = None,
    command: Sequence[str] | None = None,
    any_sampling: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Env:
    """An agent that plays the episode of a row.

    Args: function, package.module:function or path/to/file.py:function, is called with an AgentEpisode and ``options`` as keyword
        arguments, in a process of its own, and returns a reward, or {"reward": ..., "metrics": {...}}, or None to leave it to the
        run's reward terms; it may be a coroutine function. command, a program and its arguments, finds the address and the
        token in OPENAI_BASE_URL and OPENAI_API_KEY, reads the row with GET $POSTTRAIN_URL/episode, which includes ``options``,
        and sends its reward with POST $POSTTRAIN_URL/result. any_sampling ignores temperature, top_p and seed of its requests:
        the run determines the sampling.
    Raises: ConfigError unless exactly one of function and command is given.
    """
    if (function is None) == (command is None):
        what = "an agent is a function or a command, and " + (
            "neither is given" if command is None else "both are given"
        )
        raise ConfigError(Problem(what, fix="give environment.settings.function, or environment.settings.command"))
    if command is not None and (isinstance(command, str) or not command):
        raise ConfigError(
            Problem("command must be a list: a program and its arguments", fix="write [python, agent.py]")
        )
    return Agent(spec, function, command, any_sampling=any_sampling, options=options or {})


class Agent:
    """One episode of an agent. Concurrent requests are answered one after the other."""

    def __init__(
        self,
        spec: EnvSpec,
        function: str | None,
        command: Sequence[str] | None,
        *,
        any_sampling: bool,
        options: Mapping[str, Any],
    ):
        self._spec = spec
        self._function = function
        self._command = command
        self._options = options
        self._events: queue.SimpleQueue[TurnRequest | AgentEnd] = queue.SimpleQueue()
        self._listener = Listener(self._events.put, any_sampling=any_sampling)
        self._process: AgentProcess | None = None
        self._current: TurnRequest | None = None  # the request that the policy is answering
        self._turns = 0
        self._refused = 0
        self._cut = False
        self._metrics: Mapping[str, float] = {}

    def reset(self, seed: int) -> EnvStart:
        """Start the agent. Raises: AgentFailed when it ends before its first request."""
        episode = AgentEpisode(
            base_url=f"{self._listener.url}/v1",
            api_key=self._listener.token,
            messages=self._spec.messages,
            row=self._spec.row,
            seed=seed,
            max_turns=self._spec.max_turns,
        )
        if self._function is not None:
            self._process = start_function(self._function, episode, self._options, self._listener)
        else:
            assert self._command is not None
            self._process = start_command(self._command, episode)
        self._listener.start(episode, self._options)
        self._process.watch(self._events.put)
        event = self._next()
        if isinstance(event, AgentEnd):
            raise AgentFailed(event.failure or "the agent ended without requesting a turn")
        self._current = event
        return EnvStart(messages=event.messages, tools=event.tools, max_response_tokens=event.max_tokens)

    def turn_was_cut(self) -> None:
        self._cut = True

    def step(self, action: str) -> EnvStep:
        """Answer the request, and wait for the next one. Raises: AgentFailed when the agent ended by an error or a signal, unless
        that was caused by the limit of turns."""
        assert self._current is not None
        self._turns += 1
        before, answer = (
            self._current,
            assistant_message(action, f"{self._turns}", with_tools=bool(self._current.tools)),
        )
        before.answer(answer, cut=self._cut)
        self._cut = False
        event = self._next()
        if isinstance(event, AgentEnd):
            return self._ended(event)
        self._current = event
        same_tools = list(event.tools) == list(before.tools)
        added = added_messages(before.messages, answer, event.messages) if same_tools else None
        if added is not None:
            return EnvStep(messages=added, max_response_tokens=event.max_tokens)
        return EnvStep(conversation=event.messages, tools=event.tools, max_response_tokens=event.max_tokens)

    def close(self) -> Mapping[str, float]:
        """End the agent and its child processes. Returns: its own metrics, and the number of turns."""
        if self._process is not None:
            self._process.kill()
        self._listener.close()
        return {**self._metrics, "num_actions": float(self._turns), "refused_turns": float(self._refused)}

    def _next(self) -> TurnRequest | AgentEnd:
        """Return the next request that may be answered, or the agent's end."""
        while True:
            event = self._events.get()
            if isinstance(event, TurnRequest) and self._turns == self._spec.max_turns:
                self._refused += 1
                event.refuse(f"all {self._turns} turns of this episode are used (environment.max_turns)")
            else:
                return event

    def _ended(self, end: AgentEnd) -> EnvStep:
        end = with_result(end, self._listener.result)
        if end.failure is not None:
            if self._refused:
                return EnvStep(done=True, stop="max_turns")
            raise AgentFailed(end.failure)
        self._metrics = end.metrics
        return EnvStep(done=True, stop="ended", reward=end.reward)
