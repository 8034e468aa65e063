"""The conversations of one episode whose environment asks for turns by itself: several at a time, each with its own tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from posttrain.errors import DataError
from posttrain.interfaces.env import EnvAsk, EnvStart, EnvStep, EnvWithdrawn, TurnOptions
from posttrain.interfaces.rollout_engine import Request
from posttrain.interfaces.worlds import EpisodeRules, TurnWriter
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory
from posttrain.steps.episode import Episode, EpisodeLost, trajectory_of


@dataclass(frozen=True, slots=True)
class RequestedTurn:
    """A requested turn, and its conversation before it."""

    line: int
    request: Request
    before: Episode | None  # None: the turn begins the conversation
    options: TurnOptions


@dataclass(frozen=True, slots=True)
class Taken:
    """The consequences of an event: a request to sample, requests that are no longer wanted, the end of the episode."""

    request: Request | None = None
    withdrawn: tuple[str, ...] = ()
    over: bool = False


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """The policy's answer to a turn, for the environment."""

    turn: str
    action: str
    prompt_tokens: int


@dataclass(slots=True)
class Conversations:
    """The state of one episode: an ``Episode`` per conversation (``EnvAsk.line``), with limits for all of them together."""

    prompt: Prompt
    sample_id: str
    writer: TurnWriter
    rules: EpisodeRules
    lines: dict[int, Episode] = field(default_factory=dict)  # that with the newest turn comes last
    untrained: set[int] = field(default_factory=set)  # conversations of other players
    # By the environment's names of turns: the newest of each conversation.
    asked: dict[str, RequestedTurn] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)  # those among them that have no answer
    names: set[str] = field(default_factory=set)  # of all requests but those that were withdrawn
    stop_reason: StopReason = StopReason.EOS
    env_stop: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    def take(self, event: EnvAsk | EnvWithdrawn | EnvStep) -> Taken:
        """Take in what the environment says.

        Raises: EpisodeLost when there is no room for the very first turn, or a history changes that may not; DataError when
            the template refuses the messages.
        """
        if isinstance(event, EnvAsk):
            request = self._ask(event)
            return Taken(request, over=request is None, withdrawn=() if request else self.drop_pending())
        if isinstance(event, EnvWithdrawn):
            return Taken(withdrawn=(self._withdraw(event.turn),))
        withdrawn = self.drop_pending()
        self.env_stop = event.stop
        self.metrics |= event.metrics
        if event.learned is not None:
            self.untrained |= self.lines.keys() - event.learned.keys()
            for number, marks in event.learned.items():
                if marks is not None:
                    self.lines[number].keep_trained(marks)
        if (trained := self._trained()) and (turns := trained[-1].turns):
            if event.keeps is not None:
                trained[-1].cut_to(event.keeps)
            turns[-1] = replace(turns[-1], reward=event.reward)
        return Taken(over=True, withdrawn=withdrawn)

    def sampled(self, request: str, response: Trajectory) -> SampledAnswer:
        """Take in the policy's answer to a request, given by its name. Raises: EpisodeLost when the sampler failed."""
        turn = next(turn for turn, each in self.asked.items() if each.request.sample_id == request)
        self.pending.discard(turn)
        asked = self.asked[turn]
        line = self.lines.pop(asked.line)
        self.lines[asked.line] = line
        self.stop_reason = response.stop_reason
        return SampledAnswer(turn, line.sampled(response), len(asked.request.token_ids))

    def options_of(self, request: str) -> TurnOptions:
        """Return the options of the turn whose request has this name."""
        return next(each.options for each in self.asked.values() if each.request.sample_id == request)

    def drop_pending(self) -> tuple[str, ...]:
        """Withdraw the turns that have no answer. Returns: the names of their requests."""
        return tuple(self._withdraw(turn) for turn in sorted(self.pending))

    def _ask(self, asked: EnvAsk) -> Request | None:
        """Return the request for a turn; None when there is no room for it."""
        line = self.lines.get(asked.line)
        before = None if line is None else _copy(line)
        if line is None:
            rules = replace(self.rules, max_turns=None)  # the environment counts those of all conversations
            line = Episode(self.prompt, self.sample_id, self.writer, rules)
        line.used_elsewhere = sum(each.used for each in self.lines.values() if each is not line)
        try:
            request = self._requested(line, asked, first=before is None)
        except (EpisodeLost, DataError):
            if before is not None:
                self.lines[asked.line] = before  # a host may refuse the turn, and the conversation is as before
            raise
        if request is None:
            self.stop_reason = StopReason.LENGTH
            return None
        request = replace(request, sample_id=self._name(request), conversation=f"{self.sample_id}/{asked.line}")
        self.lines[asked.line] = line
        if not asked.trained:
            self.untrained.add(asked.line)
        self.names.add(request.sample_id)
        self.asked = {turn: each for turn, each in self.asked.items() if each.line != asked.line}
        self.asked[asked.turn] = RequestedTurn(asked.line, request, before, asked.options)
        self.pending.add(asked.turn)
        return request

    def _withdraw(self, turn: str) -> str:
        """Undo a turn, sampled or not: it is neither trained nor counted. Returns: the name of its request."""
        asked = self.asked.pop(turn)
        self.pending.discard(turn)
        self.names.discard(asked.request.sample_id)
        if asked.before is None:
            del self.lines[asked.line]
        else:
            self.lines[asked.line] = asked.before
        return asked.request.sample_id

    def trajectory(
        self,
        metrics: Mapping[str, float] | None = None,
        lost: EpisodeLost | None = None,
        close_failure: str = "",
    ) -> Trajectory:
        """The samples of all conversations as one trajectory, the one with the newest turn last; as ``Episode.trajectory``."""
        samples = [sample for line in self._trained() for sample in line.samples() if sample.turns]
        named = [replace(sample, sample_id=f"{self.sample_id}#{place}") for place, sample in enumerate(samples)]
        return trajectory_of(
            named or Episode(self.prompt, self.sample_id, self.writer, self.rules).samples(),
            reward_of=self.rules.reward_of,
            sample_id=self.sample_id,
            stop_reason=self.stop_reason,
            env_stop=self.env_stop,
            metrics={**self.metrics, **(metrics or {})},
            lost=lost,
            close_failure=close_failure,
        )

    def _trained(self) -> list[Episode]:
        """The conversations that are trained, that with the newest turn last."""
        return [line for number, line in self.lines.items() if number not in self.untrained]

    def _requested(self, line: Episode, asked: EnvAsk, *, first: bool) -> Request | None:
        raw, most = asked.prompt, asked.max_response_tokens
        if not first:
            if raw is not None:
                return line.followed_raw(raw, most, asked.keeps)
            return line.answered(EnvStep(messages=asked.messages, max_response_tokens=most))
        try:
            if raw is not None:
                return line.begin_raw(raw, most)
            return line.begin(EnvStart(messages=asked.messages, tools=asked.tools, max_response_tokens=most))
        except EpisodeLost:
            if any(each.count for each in self.lines.values()):
                return None
            raise

    def _name(self, request: Request) -> str:
        """A turn's random numbers depend on what it reads, not on which conversation is quicker; equal prompts are numbered."""
        read = ",".join(map(str, request.token_ids))
        name = f"{self.sample_id}@{hashlib.blake2b(read.encode(), digest_size=8).hexdigest()}"
        number = 0
        while (numbered := f"{name}.{number}" if number else name) in self.names:
            number += 1
        return numbered


def with_options(request: Request, options: TurnOptions, sampling: SamplingParams) -> Request:
    """Return the request of a turn with its options. ``sampling``: that of turns without any."""
    if options == TurnOptions():
        return request
    if options.seed is not None:
        request = replace(request, seed=options.seed, draws_as=options.draws_as)
    own = sampling.stopping_at(options.stop)
    if options.temperature not in (None, sampling.temperature):
        assert options.temperature is not None
        own = replace(own, temperature=options.temperature, first_token_temperature=None, first_token_top_k=0)
    return replace(
        request,
        sampling=request.sampling if own == sampling else own,
        top_logprobs=options.top_logprobs,
        prompt_logprobs=options.prompt_logprobs,
        grammar=options.grammar,
    )


def _copy(line: Episode) -> Episode:
    return replace(
        line,
        messages=list(line.messages),
        ids=list(line.ids),
        logprobs=list(line.logprobs),
        mask=list(line.mask),
        own_draws=list(line.own_draws),
        turns=list(line.turns),
        earlier=list(line.earlier),
        metrics=dict(line.metrics),
    )
