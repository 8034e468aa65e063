"""One episode played by hand: a person or a script takes the policy's turns, or the model does, and all of it is shown.

The episode is played by ``steps.play``, as in training; only the sampler is another one, and both sides are watched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from posttrain.interfaces.env import EnvEvent, EnvFailed, EnvHost, EnvSpec
from posttrain.interfaces.rollout_engine import OnTokens, Request, RequestStream, TurnSampler
from posttrain.interfaces.worlds import Worlds
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, TrajectoryGroup
from posttrain.steps.play import play

LEFT = "player_left"  # failure reason of an episode whose player takes no more turns


class Watch(Protocol):
    """Shows an episode while it is played."""

    def asked(self, request: Request) -> None:
        """A turn begins: ``request`` holds all tokens that the policy reads."""
        ...

    def said(self, response: Trajectory) -> None:
        """The turn is over."""
        ...

    def answered(self, event: EnvEvent) -> None:
        """The environment has begun, answered, ended or failed."""
        ...


def play_by_hand(
    prompt: Prompt, worlds: Worlds, player: TurnSampler, sampling: SamplingParams, watch: Watch
) -> TrajectoryGroup:
    """Play one episode. Returns: a group of one trajectory."""
    watched = replace(worlds, host=WatchedHost(worlds.host, watch))
    [group] = play(
        WatchedSampler(player, watch), [prompt], replace(sampling, samples_per_prompt=1, extra_episodes=0), watched
    )
    return group


# Returns the text of a turn of at most so many tokens; None: the player takes no more turns.
ReadTurn = Callable[[int], str | None]


@dataclass(frozen=True, slots=True)
class TypedTurns:
    """A sampler whose turns are texts that somebody writes.

    Args: tokens_of turns a text into token ids; end_token closes a turn that fits its limit.
    """

    read: ReadTurn
    tokens_of: Callable[[str], Sequence[int]]
    end_token: int | None

    def open_stream(self, sampling: SamplingParams, on_tokens: OnTokens | None = None) -> RequestStream:
        return _TypedStream(self)


class _TypedStream:
    def __init__(self, turns: TypedTurns):
        self._turns = turns
        self._waiting: deque[Request] = deque()

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)

    def wait(self, timeout_s: float) -> list[Trajectory]:
        if not self._waiting:
            return []
        request = self._waiting.popleft()
        text = self._turns.read(request.max_response_tokens)
        return [_response(request, text, self._turns)]

    def cancel(self, sample_ids: Collection[str]) -> None:
        self._waiting = deque(each for each in self._waiting if each.sample_id not in sample_ids)

    def close(self) -> None:
        self._waiting.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _response(request: Request, text: str | None, turns: TypedTurns) -> Trajectory:
    """Build the response of a typed turn, cut at the limit as a sampler cuts it."""
    ids = [] if text is None else [*turns.tokens_of(text)]
    if turns.end_token is not None:
        ids.append(turns.end_token)
    cut = len(ids) > request.max_response_tokens
    ids = ids[: request.max_response_tokens]
    stop = StopReason.FAILED if text is None else StopReason.LENGTH if cut else StopReason.EOS
    return Trajectory(
        sample_id=request.sample_id,
        token_ids=() if text is None else tuple(ids),
        logprobs=() if text is None else (0.0,) * len(ids),
        text=text or "",
        stop_reason=stop,
        policy_version=0,
        failure_reason=LEFT if text is None else "",
        failure="the player takes no more turns" if text is None else "",
    )


@dataclass(frozen=True, slots=True)
class WatchedSampler:
    """A sampler whose turns are shown."""

    sampler: TurnSampler
    watch: Watch

    def open_stream(self, sampling: SamplingParams, on_tokens: OnTokens | None = None) -> RequestStream:
        return _WatchedStream(self.sampler.open_stream(sampling, on_tokens), self.watch)


class _WatchedStream:
    def __init__(self, stream: RequestStream, watch: Watch):
        self._stream = stream
        self._watch = watch

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._watch.asked(request)
        self._stream.submit(requests)

    def wait(self, timeout_s: float) -> list[Trajectory]:
        responses = self._stream.wait(timeout_s)
        for response in responses:
            self._watch.said(response)
        return responses

    def cancel(self, sample_ids: Collection[str]) -> None:
        self._stream.cancel(sample_ids)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class WatchedHost:
    """A host whose events are shown."""

    def __init__(self, host: EnvHost, watch: Watch):
        self._host = host
        self._watch = watch

    def load(self, names: Sequence[str]) -> dict[str, str]:
        return self._host.load(names)

    def start(self, episode: str, spec: EnvSpec, seed: int, saved: Any = None) -> None:
        self._host.start(episode, spec, seed, saved)

    def step(self, episode: str, action: str, cut: bool = False) -> None:
        self._host.step(episode, action, cut)

    def answer(
        self, episode: str, turn: str, action: str, *, cut: bool, prompt_tokens: int, response_tokens: int
    ) -> None:
        self._host.answer(episode, turn, action, cut=cut, prompt_tokens=prompt_tokens, response_tokens=response_tokens)

    def finish(self, episode: str) -> None:
        self._host.finish(episode)

    def drop(self, episode: str, failed: EnvFailed | None = None) -> None:
        self._host.drop(episode, failed)

    def wait(self, timeout_s: float) -> list[tuple[str, EnvEvent]]:
        events = self._host.wait(timeout_s)
        for _, event in events:
            self._watch.answered(event)
        return events

    def abandon(self) -> None:
        self._host.abandon()

    def close(self) -> None:
        self._host.close()
