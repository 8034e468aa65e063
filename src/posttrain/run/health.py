"""Alarms of a run while there is time: metrics that leave the range of the last steps, with the usual causes."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

WINDOW = 10  # steps that a value is compared with
SILENCE = 20  # steps before the same alarm is raised again
GRADIENT = "policy/grad_norm"
REWARD = "reward/mean"
NO_SIGNAL = "group/no_signal_share"
_INVALID = "responses without a valid reward"
FEW = 3  # steps whose mean reward says where a run began, and where it is

# The step's value, those of the steps before (oldest first), and whether it is alarming.
Rule = Callable[[float, Sequence[float]], bool]


@dataclass(frozen=True, slots=True)
class Watched:
    """A metric, the rule that finds it alarming, and the usual causes."""

    metric: str
    alarming: Rule
    what: str
    causes: str
    # A policy that gets better at its task writes fewer different answers: no alarm while the reward is near its best.
    unless_improving: bool = False


def _above(factor: float, floor: float, always: float = math.inf, enough: int = 1) -> Rule:
    """More than ``factor`` times the median of before, and than ``floor``, with ``enough`` steps before; or more than
    ``always``, whatever was before."""

    def rule(value: float, before: Sequence[float]) -> bool:
        return value > always or (len(before) >= enough and value > floor and value > factor * median(before))

    return rule


def _below(factor: float, always: float = -math.inf) -> Rule:
    """Less than ``factor`` times the median of before, or than ``always``."""
    return lambda value, before: value < always or (len(before) > 0 and value < factor * median(before))


def _fallen(share: float, noise: float) -> Rule:
    """Below the median of before by more than ``share`` of its size and by more than ``noise`` times the mean change from one
    step to the next, with two steps before."""

    def rule(value: float, before: Sequence[float]) -> bool:
        if len(before) < 2:
            return False
        usual = median(before)
        change = sum(abs(one - other) for one, other in pairwise(before)) / (len(before) - 1)
        return usual - value > max(share * abs(usual), noise * change, 0.02)

    return rule


def _in_a_row(steps: int, at_least: float) -> Rule:
    return lambda value, before: len(before) >= steps - 1 and min([value, *list(before)[1 - steps :]]) >= at_least


def _either(*rules: Rule) -> Rule:
    return lambda value, before: any(rule(value, before) for rule in rules)


RATE = "a learning rate that is too high"

WATCHED = (
    Watched("gap/mean", _above(3, 0.1, always=0.5), "sampler and trainer disagree",
            "rollout.top_k, top_p or min_p, whose cuts only the sampler's log-probs have; the sampler has other weights than the "
            "trainer, another temperature or another precision; a prompt template that differs between the two"),
    Watched(REWARD, _fallen(0.5, 3), "the reward has fallen",
            f"{RATE}, an update from a broken batch, a reward or a grader that fails since then"),
    Watched("policy/entropy", _below(0.2, always=0.01), "the policy has stopped exploring",
            f"{RATE}, a lower temperature, a reward that one answer satisfies; or the task is solved",
            unless_improving=True),
    Watched("policy/entropy", _above(2.5, 1.0, always=6.0), "the policy is coming apart",
            f"{RATE}, an entropy bonus that is too large"),
    Watched(NO_SIGNAL, _in_a_row(3, 1.0), "no group has had a signal for 3 steps",
            "a reward that is always the same, an answer that is not found in the response, prompts that are all "
            f"too easy or too hard, {RATE}"),
    Watched("policy/clip_fraction", _above(0, 0.5, always=0.5), "most of the update is clipped",
            f"too many updates per step, {RATE}, a sampler with older weights"),
    Watched("response/length_mean", _above(2, 16), "responses are getting much longer",
            "a reward that pays for length, an end token that is no longer written, a chat template without its end"),
    Watched("response/length_mean", _below(0.4), "responses are getting much shorter",
            "a reward that pays for brevity or for nothing, a stop text that appears early"),
    Watched("response/truncated_share", _either(_above(2, 0.3, enough=2), _in_a_row(3, 0.95)),
            "many responses are cut at the token limit",
            "a limit that is too low for the task, an end token that is no longer written (chat template, "
            f"generation_config.json), a reward that pays for length, {RATE}"),
    Watched("response/most_common_share", _above(0, 0.6, always=0.6), "most prompts get the same answer",
            f"a reward that one answer satisfies, {RATE}, a prompt that is cut or empty"),
    Watched(GRADIENT, _above(6, 1.0), "the gradient has jumped",
            f"{RATE}, a few very long or very unlikely responses, a loss summed over tokens"),
    Watched("prompt/distinct_share", _below(0, always=0.5), "different prompts read the same",
            "a chat template that leaves the message out, a column with the same text in every row, a cut that takes away the "
            "question"),
    Watched("episode/close_failed", _above(0, 0, always=0), "environments fail when they are closed; their episodes are kept",
            "an error in close(), which is close_failure of their samples; their own metrics are lost"),
    Watched("async/late_share", _in_a_row(3, 0.5), "steps wait for groups at the bound on staleness",
            "sampling is slower than training for this bound (asynchronous.max_staleness_steps): the trainer starves; a sampler "
            "or environments that have slowed down; a few responses that are much longer than the others"),
    Watched("async/at_bound_share", _in_a_row(8, 0.9), "nearly all groups are as old as the bound allows when they are trained",
            "groups wait while others are trained: with fewer ahead (asynchronous.max_staleness_steps, max_running_groups) the "
            "same speed trains fresher data; or a sampler that is slow for this bound, where async/late_share is high too"),
    Watched("time/trainer_waited_share", _in_a_row(5, 0.9), "the trainer waits for groups nearly all the time",
            "sampling takes much longer than training: on one device there is next to nothing to overlap, so more devices for "
            "sampling, faster environments or shorter responses; a sampler that hangs"),
    Watched("time/samplers_waited_share", _in_a_row(5, 0.9), "samplers wait nearly all the time",
            "training takes much longer than sampling: fewer samplers, or devices of theirs for the trainer (on the same devices "
            "there is next to nothing to overlap); environments or graders that are much slower than sampling: more of them at a "
            "time (environment.workers)"),
    Watched("async/effective_token_share", _below(0, always=0.3), "the sampled tokens say little about the policy that learns",
            f"data that is too old for these updates (asynchronous.max_staleness_steps), {RATE}, a sampler whose log-probs are "
            "those of another distribution"),
)  # fmt: skip

# Supervised fine-tuning.
WATCHED_SFT = (
    Watched("policy/loss", _above(2, 0.5, enough=3), "the loss has jumped",
            f"{RATE}, rows of another kind or language, texts that are damaged"),
    Watched(GRADIENT, _above(6, 1.0, enough=3), "the gradient has jumped",
            f"{RATE}, a few very long or very unlikely texts"),
    Watched("data/learned_tokens", _below(0.1, always=1), "next to nothing is there to be learned",
            "rows without an assistant's message, a chat template whose assistant part is not found, texts that are cut before "
            "the response begins"),
)  # fmt: skip


class Health:
    """Compares every step of a run with the last ones. A resumed run starts with an empty memory."""

    def __init__(self, watched: Sequence[Watched] = WATCHED) -> None:
        self._watched = watched
        self._before: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._raised: dict[str, int] = {}
        self._first_rewards: list[float] = []
        self._rewards: deque[float] = deque(maxlen=FEW)
        self._best = -math.inf

    def look(
        self,
        step: int,
        metrics: Mapping[str, float],
        sample_ids: Sequence[str],
        place: str | None = None,
        invalid: str = "",
    ) -> list[str]:
        """Return the alarms about this step, a sentence each.

        Args: its metrics; ids of some of its samples, those first that a person should look at; and the file that holds
            them, by default the step's samples; and its responses without a valid reward, with their reasons.
        """
        place = place or f"samples/step_{step}.jsonl"
        improving = self._improving(metrics.get(REWARD))
        alarms = []
        if invalid and self._is_due(step, _INVALID):
            alarms.append(f"step {step}: {invalid}")
        for watched in self._watched:
            value = metrics.get(watched.metric)
            alarming = value is not None and watched.alarming(value, self._before[watched.metric])
            alarming = alarming and not (watched.unless_improving and improving)
            if value is not None and alarming and self._is_due(step, watched.what):
                alarms.append(
                    f"step {step}: {watched.what}: {watched.metric} is {value:.4g}{self._usual(watched.metric, value)}. "
                    f"Usual causes: {watched.causes}. Look at {', '.join(sample_ids[:3])} in {place}"
                )
        for name in {watched.metric for watched in self._watched} & set(metrics):
            if name != GRADIENT or metrics[name]:  # steps without signal have none: the next one's is no jump
                self._before[name].append(metrics[name])
        return alarms

    def _is_due(self, step: int, what: str) -> bool:
        """Return True where an alarm has not been raised for SILENCE steps, and take it as raised."""
        if step - self._raised.get(what, -SILENCE) < SILENCE:
            return False
        self._raised[what] = step
        return True

    def _improving(self, reward: float | None) -> bool:
        """Return True when the mean reward of the last steps is above that of the first ones and keeps most of the best rise."""
        if reward is None:
            return False
        self._rewards.append(reward)
        if len(self._first_rewards) < FEW:
            self._first_rewards.append(reward)
        if self._first_rewards == list(self._rewards):  # the first steps are the last ones
            return False
        first, now = mean(self._first_rewards), mean(self._rewards)
        self._best = max(self._best, now)
        return now - first > 0.1 * max(abs(first), abs(now)) and now - first >= 0.7 * (self._best - first)

    def _usual(self, metric: str, value: float) -> str:
        """Return what the metric was before; nothing where it has not changed."""
        before = self._before[metric]
        usual = median(before) if before else value
        return "" if abs(value - usual) <= 0.05 * abs(value) else f", and was about {usual:.4g}"
