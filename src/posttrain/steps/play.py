"""Let the policy act in environments: many episodes at once, each at its own pace."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from posttrain.errors import DataError, UnreadImages
from posttrain.interfaces.env import (
    TEMPLATE,
    EnvAsk,
    EnvEvent,
    EnvFailed,
    EnvStart,
    EnvStep,
    EnvWithdrawn,
    TokenHost,
    TokenTaker,
)
from posttrain.interfaces.rollout_engine import OnGroup, OnTokens, Request, RequestStream, TurnSampler
from posttrain.interfaces.worlds import Worlds
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, TrajectoryGroup
from posttrain.steps.conversations import Conversations, with_options
from posttrain.steps.episode import Episode, EpisodeLost, reason_of
from posttrain.steps.watched import Watched

SAMPLE_S = 0.02  # of sampling, before environments are polled again
WAIT_S = 0.5  # of waiting for environments while nothing is sampled, before the caller may leave


def play(
    engine: TurnSampler,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    worlds: Worlds,
    on_tokens: OnTokens | None = None,
    on_group: OnGroup | None = None,
) -> list[TrajectoryGroup]:
    """``sampling.samples_per_prompt`` episodes per prompt. One group per prompt, in the order given; ``on_group`` gets each as
    soon as its last episode is over.

    While some environments answer, the sampler works on the turns of others; a turn joins what is being sampled. An
    episode depends on the prompt, its number, the seed and the policy, and not on which of them is quicker. One that fails (its
    environment, its template, its request) is a trajectory with the stop reason ``failed``; the others do not notice.

    With ``sampling.extra_episodes`` more episodes are begun for each prompt, and a group is complete with its first
    samples_per_prompt that do not fail: the rest are dropped, so speed decides which are trained on.
    """
    playing = _Playing(prompts, sampling, worlds, on_group)
    with engine.open_stream(sampling, on_tokens) as stream:
        try:
            playing.begin()
            while not playing.over:
                if on_tokens:
                    on_tokens(0)  # the caller may want to leave while only environments are at work
                for name, event in worlds.host.wait(0.0 if playing.asked else WAIT_S):
                    playing.take_event(name, event, stream)
                if playing.asked:
                    for response in stream.wait(SAMPLE_S):
                        playing.take_response(response, stream)
                    playing.report(stream)
        finally:
            if not playing.over:
                worlds.host.abandon()
    return playing.groups()


class _Playing:
    """All episodes of a call, and where each of them stands."""

    def __init__(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, worlds: Worlds, on_group: OnGroup | None
    ) -> None:
        self._prompts = prompts
        self._sampling = sampling
        self._worlds = worlds
        self._rules = replace(worlds.rules, max_response_tokens=sampling.max_response_tokens)
        self._on_group = on_group
        self._names = [
            [f"{prompt.prompt_id}/{number}" for number in range(sampling.samples_per_prompt + sampling.extra_episodes)]
            for prompt in prompts
        ]
        self._group_of = {name: index for index, names in enumerate(self._names) for name in names}
        self._episodes: dict[str, Episode | Conversations] = {}
        self._done: dict[str, Trajectory] = {}
        self._groups: dict[int, TrajectoryGroup] = {}
        self._left: set[str] = set()  # episodes that their group does without
        self._closing: set[str] = set()  # complete episodes whose environments are being closed
        self._watched = Watched(worlds.host)
        self.asked: dict[str, str] = {}  # request -> episode, of what is being sampled

    @property
    def over(self) -> bool:
        return len(self._done) + len(self._left) == len(self._group_of)

    def begin(self) -> None:
        for prompt, names in zip(self._prompts, self._names, strict=True):
            spec = replace(self._worlds.spec_of(prompt), sampling=self._sampling)
            seed = seed_of(prompt, self._sampling)
            for number, name in enumerate(names):
                self._episodes[name] = Episode(prompt, name, self._worlds.writer, self._rules)
                self._worlds.host.start(name, replace(spec, number=number), seed)

    def take_event(self, name: str, event: EnvEvent, stream: RequestStream) -> None:
        """An environment has answered, or asks for a turn."""
        if (
            name in self._done
            or name in self._left
            or (name in self._closing and isinstance(event, (EnvAsk, EnvWithdrawn, EnvStep)))
        ):
            return  # it was sent before the episode ended
        episode = self._episodes[name]
        try:
            # The episode is complete without the metrics that close returns.
            if isinstance(event, EnvFailed) and name in self._closing:
                self._end(name, episode.trajectory(close_failure=f"{event.reason}: {event.detail}"), stream)
            elif isinstance(event, EnvFailed):
                self._drop_asked(name, stream)
                self._end(name, episode.trajectory(lost=EpisodeLost(event.reason, event.detail)), stream)
            elif isinstance(event, Mapping):
                self._end(name, episode.trajectory(event), stream)
            elif isinstance(event, EnvStart) and isinstance(episode, Episode):
                self._ask(name, episode.begin(event), stream)
            elif isinstance(event, EnvStep) and isinstance(episode, Episode):
                self._ask(name, episode.answered(event), stream)
            elif isinstance(event, (EnvAsk, EnvWithdrawn, EnvStep)):
                self._converse(name, event, stream)
        except EpisodeLost as lost:
            self._lose(name, lost, stream)
        except UnreadImages:
            raise
        except DataError as error:
            self._lose(name, EpisodeLost(TEMPLATE, str(error)), stream)

    def _converse(self, name: str, event: EnvAsk | EnvWithdrawn | EnvStep, stream: RequestStream) -> None:
        """An environment that asks for turns by itself has done so, or withdraws one, or has ended."""
        talk = self._episodes[name]
        if not isinstance(talk, Conversations):
            talk = Conversations(talk.prompt, name, self._worlds.writer, self._rules)
            self._episodes[name] = talk
        host = self._worlds.host
        try:
            taken = talk.take(event)
        except (EpisodeLost, DataError) as error:
            if not isinstance(event, EnvAsk) or not isinstance(host, TokenHost):
                raise
            host.refuse(name, event.turn, reason_of(error))
            return
        self._cancel(taken.withdrawn, stream)
        if taken.request and isinstance(event, EnvAsk):
            self._ask(name, with_options(taken.request, event.options, self._sampling), stream)
            self._watched.add(taken.request.sample_id, name, event.turn)
        elif taken.over:
            self._ask(name, None, stream)

    def take_response(self, response: Trajectory, stream: RequestStream) -> None:
        """The policy has acted."""
        name = self.asked.pop(response.sample_id, None)
        if name is None:  # of an episode that was lost a moment ago
            return
        episode = self._episodes[name]
        cut, tokens = response.stop_reason is StopReason.LENGTH, len(response.token_ids)
        try:
            if isinstance(episode, Conversations):
                said = episode.sampled(response.sample_id, response)
                if isinstance(self._worlds.host, TokenTaker):
                    self._worlds.host.sampled(name, said.turn, response)
                self._worlds.host.answer(
                    name, said.turn, said.action, cut=cut, prompt_tokens=said.prompt_tokens, response_tokens=tokens
                )
            else:
                self._worlds.host.step(name, episode.sampled(response), cut)
        except EpisodeLost as lost:
            self._lose(name, lost, stream)

    def report(self, stream: RequestStream) -> None:
        """Give hosts the tokens of turns that are being sampled, where they want them."""
        self._watched.report(stream, self.asked)

    def groups(self) -> list[TrajectoryGroup]:
        return [self._groups[index] for index in range(len(self._prompts))]

    def _ask(self, name: str, request: Request | None, stream: RequestStream) -> None:
        if request is None:
            self._closing.add(name)
            self._worlds.host.finish(name)
            return
        self.asked[request.sample_id] = name
        stream.submit([request])

    def _lose(self, name: str, lost: EpisodeLost, stream: RequestStream) -> None:
        """The environment has nothing to do with it, and is closed; what it says to that changes nothing any more."""
        self._drop_asked(name, stream)
        self._end(name, self._episodes[name].trajectory(lost=lost), stream)
        self._worlds.host.drop(name, EnvFailed(*lost.args))

    def _drop_asked(self, name: str, stream: RequestStream) -> None:
        """Withdraw the turns of an episode that are still being sampled."""
        episode = self._episodes[name]
        self._cancel(episode.drop_pending() if isinstance(episode, Conversations) else (), stream)

    def _cancel(self, requests: Collection[str], stream: RequestStream) -> None:
        sampled = [request for request in requests if self.asked.pop(request, None) is not None]
        if sampled:
            stream.cancel(sampled)

    def _end(self, name: str, trajectory: Trajectory, stream: RequestStream) -> None:
        self._done[name] = trajectory
        index, wanted = self._group_of[name], self._sampling.samples_per_prompt
        ended = [each for each in self._names[index] if each in self._done]
        whole = [each for each in ended if self._done[each].stop_reason is not StopReason.FAILED]
        if len(whole) < wanted and len(ended) < len(self._names[index]):
            return
        failed = [each for each in ended if each not in whole]
        used = {*[*whole, *failed][:wanted]}
        for each in self._names[index]:
            if each not in self._done:
                self._leave(each, stream)
        group = TrajectoryGroup(
            prompt=self._prompts[index], trajectories=tuple(self._done[each] for each in ended if each in used)
        )
        self._groups[index] = group
        if self._on_group:
            self._on_group(group)

    def _leave(self, name: str, stream: RequestStream) -> None:
        """Drop an episode that its group does without, with the turns that are being sampled for it."""
        self._left.add(name)
        self._cancel([request for request, episode in self.asked.items() if episode == name], stream)
        self._worlds.host.drop(name)


def seed_of(prompt: Prompt, sampling: SamplingParams) -> int:
    """The seed of an environment, 0 to 2^31 - 1, the same for all episodes of a prompt: what the row says under ``seed``, or
    else one of the step and the prompt."""
    given = prompt.extra_info.get("seed")
    if isinstance(given, int) and not isinstance(given, bool):
        return given % 2**31
    return sampling.request_seed(prompt.prompt_id)
