"""One conversation of the policy with an environment, from its first prompt to a trajectory. Nothing here waits for anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from posttrain.data.chat_api import content_of
from posttrain.data.tool_forms.written import assistant
from posttrain.interfaces.env import TOO_LONG, EnvStart, EnvStep, Message, Tool
from posttrain.interfaces.rollout_engine import Request
from posttrain.interfaces.worlds import EpisodeRules, RewardOf, SampledTurn, TurnWriter
from posttrain.records.images import PromptImages
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import OwnDraws, StopReason, Trajectory, Turn, VersionSpan

HISTORY_CHANGED = "history_changed"  # reasons of episodes that are lost; the environment's own are the host's
EMPTY = "empty_response"
IMAGE_TOKEN = "image_token"


class EpisodeLost(Exception):
    """An episode that cannot be continued. ``args`` are a reason to count by and a sentence."""


def reason_of(error: Exception) -> str:
    """The sentence that says why a turn cannot be sampled."""
    return str(error.args[1] if isinstance(error, EpisodeLost) else error)


@dataclass(slots=True)
class Episode:
    """The state of one episode: ``begin``, then ``sampled`` and ``answered`` in turn, until one of them says that it is over.

    ``ids`` is what the model has read and written behind ``prompt_ids`` since the present sample began; ``ids[:sealed]`` ends
    with the last sampled token.
    """

    prompt: Prompt
    sample_id: str
    writer: TurnWriter
    rules: EpisodeRules
    messages: list[Message] = field(default_factory=list)
    tools: Sequence[Tool] = ()
    state_key: str | None = None
    prompt_ids: tuple[int, ...] = ()
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    sealed: int = 0
    used: int = 0  # tokens of all samples, observations included
    used_elsewhere: int = 0  # the same of other conversations of the episode
    own_draws: list[OwnDraws] = field(default_factory=list)  # of the present sample
    turns: list[Turn] = field(default_factory=list)  # of the present sample
    earlier: list[Trajectory] = field(default_factory=list)
    count: int = 0  # turns that were sampled, in all samples
    last: Trajectory | None = None  # what the sampler gave in the turn that waits for an answer
    shown: PromptImages | None = None  # images that the newest request holds
    read: PromptImages | None = None  # those that the newest turn has read
    first_images: int = 0  # of the present sample's prompt
    stop_reason: StopReason = StopReason.EOS
    env_stop: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    def begin(self, start: EnvStart) -> Request:
        """The first turn. Raises: EpisodeLost when there is no room for it; DataError when the template refuses it."""
        self.messages, self.tools, self.state_key = list(start.messages), start.tools, start.state_key
        rows_own = not start.tools and [*map(dict, self.messages)] == [*map(dict, self.prompt.messages)]
        if rows_own and self.prompt.token_ids:  # tokenised already, and cut as in the data section
            self.prompt_ids = self.prompt.token_ids
        else:
            self.prompt_ids = self.writer.begin(self.messages, self.tools)
        return self._first(start.max_response_tokens)

    def _first(self, wanted: int | None) -> Request:
        request = self._ask(wanted)
        if request is None:
            limit = self.rules.max_context_tokens
            raise EpisodeLost(TOO_LONG, f"the first prompt has {len(self.prompt_ids)} tokens, and {limit} are allowed")
        return request

    def begin_raw(self, prompt: str | tuple[int, ...], max_response_tokens: int | None) -> Request:
        """The first turn, after a prompt that no template renders. Raises: as ``begin``."""
        self.prompt_ids = self.writer.raw_ids(prompt, begins=True)
        return self._first(max_response_tokens)

    def followed_raw(
        self, rest: str | tuple[int, ...], max_response_tokens: int | None, keeps: int | None = None
    ) -> Request | None:
        """Take in what follows a turn, as text or tokens; ``keeps``: as ``EnvAsk.keeps``. Returns the next turn; None when there
        is no room for it.

        Raises: DataError for what is no token.
        """
        if keeps is not None:
            self.cut_to(keeps)
        following = self.writer.raw_ids(rest, begins=False)
        self.turns[-1] = replace(self.turns[-1], observation=self.writer.text_of(following))
        self._observe(following)
        return self._next(max_response_tokens)

    def sampled(self, response: Trajectory) -> str:
        """Take in what the policy did. Returns the action. Raises: EpisodeLost when the sampler failed."""
        if response.stop_reason is StopReason.FAILED:
            raise EpisodeLost(response.failure_reason, response.failure)
        if not response.token_ids:
            raise EpisodeLost(EMPTY, "the sampler gave no token")
        if self.shown and self.writer.holds_image_token(response.token_ids):
            raise EpisodeLost(IMAGE_TOKEN, "the model wrote a token that stands for an image")
        self.last = response
        self.read = self.shown
        self.count += 1
        self.stop_reason = response.stop_reason
        start = len(self.ids)
        self.ids += response.token_ids
        self.logprobs += response.logprobs
        self.mask += [True] * len(response.token_ids)
        self.own_draws += [
            each._replace(first_token=start + each.first_token, end=start + each.end) for each in response.own_draws
        ]
        self.used += len(response.token_ids)
        self.sealed = len(self.ids)
        self.turns.append(
            Turn(
                start=start,
                end=self.sealed,
                text=self.writer.text_of(response.token_ids),
                stop_reason=response.stop_reason,
                policy_version=response.policy_version,
                version_spans=tuple(
                    VersionSpan(start + span.first_token, span.version) for span in response.version_spans
                ),
                state_key=self.state_key,
            )
        )
        return self.turns[-1].text

    def answered(self, step: EnvStep) -> Request | None:
        """Take in what the environment answered. Returns the next turn; None when the episode is over.

        Raises: EpisodeLost where the history may not change and does; DataError when the template refuses the answer.
        """
        assert self.last is not None
        turn = self.turns[-1]
        action = turn.text if step.action is None else step.action
        shown = step.messages if step.conversation is None else step.conversation
        observation = "\n".join(content_of(message) for message in shown)
        self.turns[-1] = replace(turn, text=action, reward=step.reward, penalty=step.penalty, observation=observation)
        self.state_key = step.state_key
        for name, value in step.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        if step.done or self.count == self.rules.max_turns:
            self.env_stop = step.stop if step.done else "max_turns"
            return None
        history, self.messages = self.messages, [*self.messages, assistant(action), *step.messages]
        if step.conversation is not None:
            self.messages = list(step.conversation)
            self.tools = self.tools if step.tools is None else step.tools
            self._new_sample(self.writer.begin(self.messages, self.tools))
        elif not turn.text.startswith(action):  # the model did not write what stands in the history
            self._may_change("the environment took another action than the one that was sampled")
            self._new_sample(self.writer.begin(self.messages, self.tools))
        else:
            self._go_on(turn, action, history, step.messages)
        return self._next(step.max_response_tokens)

    def _next(self, wanted: int | None) -> Request | None:
        request = self._ask(wanted)
        if request is None:
            self.stop_reason = StopReason.LENGTH
        return request

    def _go_on(self, turn: Turn, action: str, history: Sequence[Message], observations: Sequence[Message]) -> None:
        """The turn's tokens stay, and what comes between it and the next turn is written behind them."""
        assert self.last is not None
        ended = self.last.stop_reason is StopReason.EOS
        sampled = SampledTurn(tuple(self.ids[turn.start : turn.end]), action, ended)
        following, unchanged = self.writer.follow(history, sampled, observations, self.tools)
        if not unchanged and self.rules.changed_history != "append":
            self._may_change("the chat template wrote earlier turns in another way than before")
            self._new_sample(self.writer.begin(self.messages, self.tools))
            return
        if not following.kept:
            self._may_change("the environment took less of the action than its first token")
            self._new_sample(self.writer.begin(self.messages, self.tools))
            return
        self._keep(following.kept)
        self._observe(following.token_ids)

    def cut_to(self, count: int) -> None:
        """Drop the tokens of the last turn behind its first ``count``: its environment took no more of it."""
        self._keep(count)
        turn = self.turns[-1]
        self.turns[-1] = replace(turn, text=self.writer.text_of(self.ids[turn.start : turn.end]))

    def keep_trained(self, marks: Sequence[bool]) -> None:
        """Leave tokens of the present sample out of training: those without a mark."""
        self.mask = [own and mark for own, mark in zip(self.mask, [*marks, *[False] * len(self.mask)], strict=False)]

    def _keep(self, count: int) -> None:
        turn = self.turns[-1]
        self.sealed = min(turn.start + count, turn.end)
        self.turns[-1] = replace(turn, end=self.sealed)
        del self.ids[self.sealed :], self.logprobs[self.sealed :], self.mask[self.sealed :]

    def _observe(self, token_ids: Sequence[int]) -> None:
        """Write tokens that the policy has not sampled behind its turn."""
        self.ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.mask += [False] * len(token_ids)
        self.used += len(token_ids)
        if self.rules.sample_per_turn:
            self._new_sample((*self.prompt_ids, *self.ids))

    def trajectory(
        self,
        metrics: Mapping[str, float] | None = None,
        lost: EpisodeLost | None = None,
        close_failure: str = "",
    ) -> Trajectory:
        """The samples to train on, as one trajectory; with ``lost``, a failed one.

        Args: metrics that the environment gave when it was closed; they come before sums over steps of the same name;
            close_failure, the error that closing it raised instead.
        """
        self.metrics |= metrics or {}
        return trajectory_of(
            self.samples(),
            reward_of=self.rules.reward_of,
            sample_id=self.sample_id,
            stop_reason=self.stop_reason,
            env_stop=self.env_stop,
            metrics=self.metrics,
            lost=lost,
            close_failure=close_failure,
        )

    def samples(self) -> list[Trajectory]:
        """The samples so far, oldest first; at least one."""
        samples = list(self.earlier)
        if self.turns or not samples:  # otherwise a sample was begun for a turn that never came
            samples.append(self._sample(self.sample_id))
        return samples

    def _ask(self, wanted: int | None) -> Request | None:
        """The request for the next turn, of at most ``wanted`` tokens; None when there is no room for it."""
        context = (*self.prompt_ids, *self.ids)
        room = min(self.rules.max_response_tokens, wanted or self.rules.max_response_tokens)
        if self.rules.max_sequence_tokens is not None:
            room = min(room, self.rules.max_sequence_tokens - len(context))
        if self.rules.max_trajectory_tokens is not None:
            room = min(room, self.rules.max_trajectory_tokens - self.used - self.used_elsewhere)
        if len(context) > self.rules.max_context_tokens or room <= 0:
            return None
        self.shown = self.writer.images_of(self.messages)
        if not self.turns:
            self.first_images = len(self.shown.files) if self.shown else 0
        # Its random numbers are its own
        name = f"{self.sample_id}@{self.count}" if self.count else self.sample_id
        return Request(name, context, room, images=self.shown, conversation=self.sample_id)

    def _may_change(self, what: str) -> None:
        if self.rules.changed_history == "refuse":
            raise EpisodeLost(HISTORY_CHANGED, f"after turn {self.count} {what}")

    def _new_sample(self, prompt_ids: tuple[int, ...]) -> None:
        self.earlier.append(self._sample(f"{self.sample_id}#{len(self.earlier)}"))
        self.prompt_ids, self.turns, self.sealed = prompt_ids, [], 0
        self.ids, self.logprobs, self.mask, self.own_draws = [], [], [], []

    def _sample(self, name: str) -> Trajectory:
        """The present sample, up to its last sampled token: observations after it are dropped."""
        ids = tuple(self.ids[: self.sealed])
        rows_own = self.prompt_ids == self.prompt.token_ids
        return Trajectory(
            sample_id=name,
            token_ids=ids,
            logprobs=tuple(self.logprobs[: self.sealed]),
            text=self.writer.text_of(ids),
            stop_reason=self.stop_reason,
            policy_version=min((turn.policy_version for turn in self.turns), default=0),
            response_mask=tuple(self.mask[: self.sealed]),
            prompt_token_ids=None if rows_own else self.prompt_ids,
            prompt_text="" if rows_own else self.writer.text_of(self.prompt_ids),
            version_spans=version_spans(self.turns),
            own_draws=tuple(kept for each in self.own_draws if (kept := each.between(0, self.sealed))),
            turns=tuple(self.turns),
            images=replace(self.read, in_prompt=self.first_images) if self.read and self.turns else None,
        )


def trajectory_of(
    samples: Sequence[Trajectory],
    *,
    reward_of: RewardOf = "episode",
    sample_id: str,
    stop_reason: StopReason,
    env_stop: str,
    metrics: Mapping[str, float],
    lost: EpisodeLost | None,
    close_failure: str,
) -> Trajectory:
    """The samples of an episode as one trajectory, with the rewards that count; with ``lost``, a failed one."""
    samples = _counted(samples, reward_of)
    turns = [turn for sample in samples for turn in sample.turns]
    rewards = [turn.reward for turn in turns if turn.reward is not None]
    reason, detail = lost.args if lost else ("", "")
    return replace(
        samples[-1],
        sample_id=sample_id,
        text=samples[0].text if len(samples) == 1 else _transcript(turns),
        earlier=tuple(samples[:-1]),
        stop_reason=StopReason.FAILED if lost else stop_reason,
        failure=detail,
        failure_reason=reason,
        policy_version=min((turn.policy_version for turn in turns), default=0),
        env_reward=sum(rewards) if rewards else None,
        env_stop=env_stop,
        env_metrics=tuple(sorted(metrics.items())),
        close_failure=close_failure,
    )


def _counted(samples: Sequence[Trajectory], reward_of: RewardOf) -> Sequence[Trajectory]:
    """The samples with the rewards of turns that do not count as zeros."""
    if reward_of == "episode":
        return samples
    *before, last = samples
    counting = 1 if reward_of == "last_turn" else len(last.turns)
    rest = len(last.turns) - counting
    return [*map(_unrewarded, before), replace(last, turns=(*_zeros(last.turns[:rest]), *last.turns[rest:]))]


def _unrewarded(sample: Trajectory) -> Trajectory:
    return replace(sample, turns=_zeros(sample.turns))


def _zeros(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    return tuple(turn if turn.reward is None else replace(turn, reward=0.0) for turn in turns)


def version_spans(turns: Sequence[Turn]) -> tuple[VersionSpan, ...]:
    """The spans of a sample whose turns were sampled with different weights; (): with the same."""
    spans = [
        span
        for turn in turns
        for span in turn.version_spans or (VersionSpan(turn.start, turn.policy_version),)
        if span.first_token < turn.end
    ]
    changes = [span for before, span in pairwise(spans) if span.version != before.version]
    return (spans[0], *changes) if changes else ()


def _transcript(turns: Sequence[Turn]) -> str:
    """The actions of all turns and the answers in between: the text of an episode whose samples are not one text."""
    *before, last = turns
    return "\n".join([text for turn in before for text in (turn.text, turn.observation)] + [last.text])
