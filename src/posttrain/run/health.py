"""Says that something is wrong with a run while there is time: metrics that leave what they were in the last steps."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

WINDOW = 10  # steps that a value is compared with
SILENCE = 20  # steps before the same alarm is told again
GRADIENT = "policy/grad_norm"

# The step's value, those of the steps before (oldest first), and whether it is alarming.
Rule = Callable[[float, Sequence[float]], bool]


@dataclass(frozen=True, slots=True)
class Watched:
    """A metric, what is alarming about it, and what usually causes that."""

    metric: str
    alarming: Rule
    what: str
    causes: str


def _above(factor: float, floor: float, always: float = math.inf, enough: int = 1) -> Rule:
    """More than ``factor`` times the median of before, and than ``floor``, with ``enough`` steps before; or more than
    ``always``, whatever was before."""

    def rule(value: float, before: Sequence[float]) -> bool:
        return value > always or (len(before) >= enough and value > floor and value > factor * median(before))

    return rule


def _below(factor: float, always: float = -math.inf) -> Rule:
    """Less than ``factor`` times the median of before, or than ``always``."""
    return lambda value, before: value < always or (len(before) > 0 and value < factor * median(before))


def _in_a_row(steps: int, at_least: float) -> Rule:
    return lambda value, before: len(before) >= steps - 1 and min([value, *list(before)[1 - steps :]]) >= at_least


WATCHED = (
    Watched("gap/mean", _above(3, 0.1, always=0.5), "sampler and trainer disagree",
            "the sampler has other weights than the trainer, another temperature or another precision; a prompt template that "
            "differs between the two"),
    Watched("policy/entropy", _below(0.2, always=0.01), "the policy has stopped exploring",
            "a learning rate that is too high, a lower temperature, a reward that one answer satisfies"),
    Watched("policy/entropy", _above(2.5, 1.0, always=6.0), "the policy is coming apart",
            "a learning rate that is too high, an entropy bonus that is too large"),
    Watched("group/no_signal_share", _in_a_row(3, 1.0), "no group has had a signal for 3 steps",
            "a reward that is always the same, an answer that is not found in the response, prompts that are all "
            "too easy or too hard"),
    Watched("policy/clip_fraction", _above(0, 0.5, always=0.5), "most of the update is clipped",
            "too many updates per step, a learning rate that is too high, a sampler with older weights"),
    Watched("response/length_mean", _above(2, 16), "responses are getting much longer",
            "a reward that pays for length, an end token that is no longer written, a chat template without its end"),
    Watched("response/length_mean", _below(0.4), "responses are getting much shorter",
            "a reward that pays for brevity or for nothing, a stop text that appears early"),
    Watched("response/most_common_share", _above(0, 0.6, always=0.6), "most prompts get the same answer",
            "a reward that one answer satisfies, a learning rate that is too high, a prompt that is cut or empty"),
    Watched(GRADIENT, _above(6, 1.0, enough=3), "the gradient has jumped",
            "a learning rate that is too high, a few very long or very unlikely responses, a loss summed over tokens"),
    Watched("prompt/distinct_share", _below(0, always=0.5), "different prompts read the same",
            "a chat template that leaves the message out, a column with the same text in every row, a cut that takes away the "
            "question"),
)  # fmt: skip

# The same of supervised fine-tuning.
WATCHED_SFT = (
    Watched("policy/loss", _above(2, 0.5, enough=3), "the loss has jumped",
            "a learning rate that is too high, rows of another kind or language, texts that are damaged"),
    Watched(GRADIENT, _above(6, 1.0, enough=3), "the gradient has jumped",
            "a learning rate that is too high, a few very long or very unlikely texts"),
    Watched("data/learned_tokens", _below(0.1, always=1), "next to nothing is there to be learned",
            "rows without an assistant's message, a chat template whose assistant part is not found, texts that are cut before "
            "the response begins"),
)  # fmt: skip


class Health:
    """Looks at every step of a run. It remembers the last steps only: a run that goes on starts with an empty memory."""

    def __init__(self, watched: Sequence[Watched] = WATCHED) -> None:
        self._watched = watched
        self._before: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._told: dict[str, int] = {}

    def look(
        self, step: int, metrics: Mapping[str, float], sample_ids: Sequence[str], place: str | None = None
    ) -> list[str]:
        """Alarms about this step, a sentence each.

        Args: its metrics; ids of some of its samples, those first that a person should look at, and where these are to be
            found: by default in the step's samples.
        """
        place = place or f"samples/step_{step}.jsonl"
        alarms = []
        for watched in self._watched:
            value = metrics.get(watched.metric)
            alarming = value is not None and watched.alarming(value, self._before[watched.metric])
            if alarming and step - self._told.get(watched.what, -SILENCE) >= SILENCE:
                self._told[watched.what] = step
                alarms.append(
                    f"step {step}: {watched.what}: {watched.metric} is {value:.4g}{self._usual(watched.metric)}. Usual causes: "
                    f"{watched.causes}. Look at {', '.join(sample_ids[:3])} in {place}"
                )
        for name in {watched.metric for watched in self._watched} & set(metrics):
            if name != GRADIENT or metrics[name]:  # steps without signal have none: the next one's is no jump
                self._before[name].append(metrics[name])
        return alarms

    def _usual(self, metric: str) -> str:
        before = self._before[metric]
        return f", and was about {median(before):.4g}" if before else ""
