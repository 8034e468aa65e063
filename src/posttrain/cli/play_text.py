"""Text and JSON of an episode that is played by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import typer

from posttrain.cli.viewer.words import visible
from posttrain.config import RunConfig
from posttrain.interfaces.env import EnvAsk, EnvEvent, EnvFailed, EnvStep, EnvWithdrawn
from posttrain.interfaces.rollout_engine import Request
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Reward, ScoredGroup, Trajectory

if TYPE_CHECKING:
    from posttrain.build.play import Decoder

OPEN, CLOSE = "«", "»"  # around trained tokens


class PlayText:
    """A Watch that prints each turn as it is played.

    Args: typed, a person types the turns and sees them already; quiet prints nothing.
    """

    decoder: Decoder

    def __init__(self, *, typed: bool, quiet: bool):
        self._typed = typed
        self._quiet = quiet
        self._read: list[_Read] = []  # of each conversation
        self._last: dict[str, tuple[int, ...]] = {}  # of turns that are being taken
        self._turns = 0
        self._text = ""  # of the last turn
        self._cuts = False  # the environment has taken less of a turn than was said

    def begin(self, config: RunConfig, prompt: Prompt, decoder: Decoder) -> PlayText:
        self.decoder = decoder
        environment = config.environment
        row = prompt.extra_info.get(environment.column) if environment.named else None
        self._print(f"{row or environment.name}, {prompt.prompt_id}")
        return self

    def asked(self, request: Request) -> None:
        self._turns += 1
        ids = request.token_ids
        before = max((each for each in self._read if ids[: len(each.ids)] == each.ids), key=len, default=None)
        kept = len(before.ids) if before else 0
        if before is None and self._cuts:
            before = max((each for each in self._read if each.begins(ids)), key=len, default=None)
            kept = _shared(before.ids, ids) if before else 0
        self._cuts = False
        begins = "" if before or self._turns == 1 else "; a new training sample begins"
        if before:
            self._read.remove(before)
            if kept < len(before.ids):
                begins = (
                    f"; the environment has kept {kept - before.read} of the {len(before.ids) - before.read} sampled"
                )
        self._print(f"--- turn {self._turns}: the policy reads {len(ids) - kept} more of {len(ids)} tokens{begins}")
        self._print(self.decoder.whole(ids[kept:]))
        self._last[request.sample_id] = ids

    def said(self, response: Trajectory) -> None:
        before = self._last.pop(response.sample_id, ())
        self._read.append(_Read((*before, *response.token_ids), len(before)))
        self._text = response.text
        if response.failure_reason:
            return
        self._print(f"--- it says, in {len(response.token_ids)} tokens ({response.stop_reason})")
        if not self._typed:
            self._print(self.decoder.whole(response.token_ids))

    def answered(self, event: EnvEvent) -> None:
        if isinstance(event, EnvFailed):
            self._print(f"--- the environment has failed: {event.reason}: {event.detail}")
        elif isinstance(event, EnvWithdrawn):
            self._print("--- the agent has abandoned a turn, which does not count")
        elif isinstance(event, EnvAsk):
            self._cuts |= event.keeps is not None
        elif isinstance(event, EnvStep):
            # Another action than a part of what was said would begin a new sample
            self._cuts = event.action is not None and self._text.startswith(event.action)
            reward = "no reward" if event.reward is None else f"reward {event.reward:g}"
            end = f", the end: {event.stop}" if event.stop else ", the end"
            self._print(f"--- the environment: {reward}{end if event.done else ''}")
            for message in event.messages if event.done else ():
                self._print(f"{message.get('role')}: {message.get('content')}")

    def _print(self, text: str) -> None:
        if not self._quiet:
            typer.echo(visible(text))


@dataclass(frozen=True, slots=True)
class _Read:
    """The tokens of a conversation after a turn. Args: read, how many of them came before the turn."""

    ids: tuple[int, ...]
    read: int

    def __len__(self) -> int:
        return len(self.ids)

    def begins(self, ids: tuple[int, ...]) -> bool:
        """True where ``ids`` begins with what was read and the first token of the turn, at least."""
        return ids[: self.read + 1] == self.ids[: self.read + 1]


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens that two sequences begin with alike."""
    return next(
        (place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first)
    )


def summary(played: ScoredGroup, decoder: Decoder, *, tokens: bool) -> str:
    """Format the end of an episode: its reward, and the training samples that it makes."""
    [(trajectory, outcome)] = played.pairs
    lines = ["=== the episode"]
    if isinstance(outcome, Reward):
        terms = ", ".join(f"{name} {value:g}" for name, value in outcome.terms)
        lines.append(f"reward {outcome.value:g}{f' ({terms})' if terms else ''}")
    else:
        lines.append(f"no reward: {outcome.reason}: {outcome.detail}")
    if trajectory.env_stop:
        lines.append(f"ended by the environment: {trajectory.env_stop}")
    lines += [f"{name} {value:g}" for name, value in trajectory.env_metrics]
    if trajectory.close_failure:
        lines.append(f"closing the environment failed: {trajectory.close_failure}")
    for number, sample in enumerate(trajectory.samples, 1):
        prompt = _prompt_ids(played, sample)
        lines.append(
            f"=== training sample {number} of {len(trajectory.samples)}: {len(prompt)} tokens of prompt, "
            f"{sum(sample.sampled_mask)} trained tokens between {OPEN} and {CLOSE}, "
            f"{len(sample.token_ids) - sum(sample.sampled_mask)} that are only read"
        )
        lines += _token_lines(sample, decoder) if tokens else [decoder.whole(prompt) + _marked(sample, decoder)]
    return "\n".join(lines)


def as_json(played: ScoredGroup, decoder: Decoder) -> str:
    """The episode as one JSON object."""
    [(trajectory, outcome)] = played.pairs
    reward = isinstance(outcome, Reward)
    found: dict[str, Any] = {
        "prompt_id": played.group.prompt.prompt_id,
        "reward": outcome.value if isinstance(outcome, Reward) else None,
        "reward_terms": dict(outcome.terms) if isinstance(outcome, Reward) else {},
        "invalid": None if reward else {"reason": outcome.reason, "detail": outcome.detail},  # type: ignore[union-attr]
        "stop_reason": str(trajectory.stop_reason),
        "environment": {"stop": trajectory.env_stop, "metrics": dict(trajectory.env_metrics)},
        "failure": trajectory.failure,
        "samples": [_sample(played, sample, decoder) for sample in trajectory.samples],
    }
    return json.dumps(found, indent=1)


def _sample(played: ScoredGroup, sample: Trajectory, decoder: Decoder) -> Mapping[str, Any]:
    prompt = _prompt_ids(played, sample)
    return {
        "prompt_ids": list(prompt),
        "prompt": decoder.whole(prompt),
        "token_ids": list(sample.token_ids),
        "tokens": decoder.each(sample.token_ids),
        "mask": [int(trained) for trained in sample.sampled_mask],
        "logprobs": list(sample.logprobs),
        "turns": [
            {
                "start": turn.start,
                "end": turn.end,
                "text": turn.text,
                "reward": turn.reward,
                "observation": turn.observation,
            }
            for turn in sample.turns
        ],
    }


def _prompt_ids(played: ScoredGroup, sample: Trajectory) -> Sequence[int]:
    return played.group.prompt.token_ids if sample.prompt_token_ids is None else sample.prompt_token_ids


def _marked(sample: Trajectory, decoder: Decoder) -> str:
    """The text of a sample's response, with marks around what is trained."""
    text, place = "", 0
    for trained, run in groupby(sample.sampled_mask):
        count = len(list(run))
        part = decoder.whole(sample.token_ids[place : place + count])
        text += f"{OPEN}{part}{CLOSE}" if trained else part
        place += count
    return text


def _token_lines(sample: Trajectory, decoder: Decoder) -> list[str]:
    """A line per token: its place, its mask, its id, its log-prob and its text; with the reward of the turn that it ends."""
    rewards = {turn.end - 1: turn.reward for turn in sample.turns if turn.reward is not None}
    lines = ["place  mask      id   log-prob  text"]
    values = zip(sample.token_ids, sample.sampled_mask, sample.logprobs, decoder.each(sample.token_ids), strict=True)
    for place, (token, trained, logprob, text) in enumerate(values):
        reward = f"  reward {rewards[place]:g}" if place in rewards else ""
        lines.append(f"{place:5}  {int(trained):4}  {token:6}  {logprob:9.4f}  {text!r}{reward}")
    return lines
