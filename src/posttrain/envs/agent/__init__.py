"""Existing agents as environments: a function or program that requests its turns from an OpenAI-compatible endpoint.

    agent (a process of its own) ──HTTP on loopback──▶ listener.py ──▶ Agent ──▶ the run's sampler

Every request of the agent is a turn of the episode: the policy's response is returned to the agent, and the next request is
the observation. Requests do not wait for each other. One that extends a conversation of the episode, whichever was last, goes on
behind the tokens sampled there; any other one (edited history, a new conversation) begins a training sample of its own. A
request whose client disconnects (its time limit is over, and it tries again) does not count. Nothing is tokenised here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.envs.agent.episode import AgentEpisode
from posttrain.envs.agent.listener import Listener, run_sampling, turn_honours
from posttrain.envs.agent.process import AgentEnd, AgentRun, start_command, start_function, with_result
from posttrain.envs.agent.turn_requests import TurnRequest
from posttrain.envs.agent.turns import AskedTurns
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import AskingEnv, EnvAsk, EnvSpec, EnvStep, EnvWithdrawn
from posttrain.registry import ENVS

__all__ = ["Agent", "AgentEpisode", "agent"]


class AgentFailed(Exception):
    """The agent ended without returning. The message describes how."""


@ENVS.register("agent", asks=True)
def agent(
    spec: EnvSpec,
    *,
    function: str | None = None,
    command: Sequence[str] | None = None,
    any_sampling: bool = False,
    options: Mapping[str, Any] | None = None,
) -> AskingEnv:
    """An agent that plays the episode of a row.

    Args: function, package.module:function or path/to/file.py:function, is called with an AgentEpisode and ``options`` as keyword
        arguments, in a process of its own, and returns a reward, or {"reward": ..., "metrics": {...}}, or None to leave it to the
        run's reward terms; it may be a coroutine function. command, a program and its arguments, finds the address and the
        token in OPENAI_BASE_URL and OPENAI_API_KEY, reads the row with GET $POSTTRAIN_URL/episode, which includes ``options``,
        and sends its reward with POST $POSTTRAIN_URL/result. any_sampling ignores temperature, top_p, top_k, min_p and seed
        of its requests: the run determines the sampling.
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
    """One episode of an agent, as an AskingEnv: requests are turns, and several may wait at a time."""

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
        self._listener = Listener(
            self._requested,
            sampling=run_sampling(spec),
            honours=turn_honours(spec, any_sampling=any_sampling),
            form=spec.tool_call_form,
            on_gone=self._gone,
            reads=self.reads,
        )
        self._process: AgentRun | None = None
        self._emit: Callable[[EnvAsk | EnvWithdrawn | EnvStep | Exception], None] = lambda event: None
        self._turns = AskedTurns(spec, lambda event: self._emit(event))
        self._metrics: Mapping[str, float] = {}
        # Of turns that are answered next
        self._tokens: dict[str, tuple[Sequence[int], Sequence[float]]] = {}

    def begin(self, seed: int, emit: Callable[[EnvAsk | EnvWithdrawn | EnvStep | Exception], None]) -> None:
        """Start the agent."""
        self._emit = emit
        episode = AgentEpisode(
            base_url=f"{self._listener.url}/v1",
            api_key=self._listener.token,
            messages=self._spec.messages,
            row=self._spec.row,
            seed=seed,
            max_turns=self._spec.max_turns,
        )
        self._process = self.started(episode)
        self._listener.start(episode, self._options)
        self._process.watch(self._ended)

    def reads(self, body: Any) -> Any:
        """Return the body of a request as it is read."""
        return body

    def started(self, episode: AgentEpisode) -> AgentRun:
        """Start the agent's process."""
        if self._function is not None:
            return start_function(self._function, episode, self._options, self._listener)
        assert self._command is not None
        return start_command(self._command, episode)

    def answer(self, turn: str, action: str, *, cut: bool, prompt_tokens: int, response_tokens: int) -> None:
        """Answer a request, unless its client has gone."""
        tokens = self._tokens.pop(turn, None)
        self._turns.answer(
            turn, action, cut=cut, prompt_tokens=prompt_tokens, response_tokens=response_tokens, tokens=tokens
        )

    def sampled(self, turn: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Take the tokens of the turn that is answered next."""
        self._tokens[turn] = (token_ids, logprobs)

    def close(self) -> Mapping[str, float]:
        """End the agent and its child processes. Returns: its own metrics, and the numbers of turns, of requests beyond the limit
        of turns, and of requests that the agent abandoned."""
        with self._turns.lock:
            self._turns.over = True
        if self._process is not None:
            self._process.kill()
        self._listener.close()
        return {**self._metrics, **self._turns.counts()}

    def _requested(self, requests: Sequence[TurnRequest]) -> None:
        self._turns.requested(requests)

    def _gone(self, request: TurnRequest) -> None:
        self._turns.gone(request)

    def _ended(self, end: AgentEnd) -> None:
        """The agent has ended by itself: with a result, or with a failure, which the limit of turns may have caused."""
        turns = self._turns
        with turns.lock:
            if turns.over:
                return
            turns.over = True
            end = with_result(end, self._listener.result)
            if not turns.turns:
                self._emit(AgentFailed(end.failure or "the agent ended without requesting a turn"))
            elif end.failure is None:
                self._metrics = end.metrics
                learned = turns.without(end.left_out) if end.left_out else None
                self._emit(EnvStep(done=True, stop="ended", reward=end.reward, learned=learned))
            elif turns.refused:
                self._emit(EnvStep(done=True, stop="max_turns"))
            else:
                self._emit(AgentFailed(end.failure))
