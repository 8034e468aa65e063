"""Turns of an environment as rows of a batch: rewards on tokens, and the states that turns began in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher

import torch
from torch import Tensor

from posttrain.records.batches import ScoredBatch
from posttrain.records.samples import SampleRow, sample_rows
from posttrain.records.trajectories import Reward, ScoredGroup

STATE_TEXTS = "state_texts"  # an extra: B texts, of the state that each row's turn began in


def turn_rewards(rows: Sequence[SampleRow], width: int) -> Tensor | None:
    """[B, width] float32: an environment's rewards on the last sampled tokens of their turns, and the rest of a trajectory's
    reward on its last one. None where no turn has a reward."""
    if not any(turn.reward is not None for row in rows for turn in row.sample.turns):
        return None
    placed = torch.zeros(len(rows), width)
    rest = 0.0  # of the trajectory's reward, not on a token yet
    for index, row in enumerate(rows):
        if not isinstance(row.outcome, Reward):
            continue
        if not index or rows[index - 1].last:
            rest = row.outcome.value
        for turn in row.sample.turns if row.outcome.by_turn else ():
            if turn.reward is not None:
                placed[index, turn.end - 1] += turn.reward
                rest -= turn.reward
        if row.last and any(row.sample.sampled_mask):
            sampled = [place for place, own in enumerate(row.sample.sampled_mask) if own]
            # Floats that cancel leave dust, which would be a signal where a critic or a discount looks at single tokens.
            if abs(rest) > 1e-9 * (1.0 + abs(row.outcome.value)):
                placed[index, sampled[-1]] += rest
    return placed


def state_index(rows: Sequence[SampleRow]) -> Tensor | None:
    """[B] int64: a number for the state that each row's turn began in. None unless every row with turns has one of them, with
    a key."""
    with_turns = [row for row in rows if row.sample.turns]
    if not with_turns or any(len(row.sample.turns) > 1 or row.sample.turns[0].state_key is None for row in with_turns):
        return None
    keys: dict[str | None, int] = {}
    return torch.tensor(
        [keys.setdefault(row.sample.turns[0].state_key if row.sample.turns else None, len(keys)) for row in rows]
    )


def similar_states(rows: Sequence[SampleRow], least: float) -> Tensor | None:
    """[B] int64: as state_index, and equal within a group for the first state and those whose texts are at least so alike.

    By hand: "abcd", "abce" and "abxe" with 0.7: the second has 3 of 4 letters in common with the first (0.75), the third 2 (0.5).
    """
    exact = state_index(rows)
    if exact is None:
        return None
    firsts: list[tuple[int, str]] = []  # group and text of the first of every state
    found = []
    for row in rows:
        text = (row.sample.turns[0].state_key if row.sample.turns else None) or ""
        place = next(
            (
                number
                for number, (group, first) in enumerate(firsts)
                if group == row.group and (first == text or SequenceMatcher(None, text, first).ratio() >= least)
            ),
            len(firsts),
        )
        if place == len(firsts):
            firsts.append((row.group, text))
        found.append(place)
    return torch.tensor(found)


def with_turns_as_responses(
    batch: ScoredBatch, groups: Sequence[ScoredGroup], similar: float | None = None, *, texts: bool = False
) -> ScoredBatch:
    """The batch of these groups with every row as a trajectory of its own: its reward is that of its episode, less the penalties
    of its own turns. Estimators that look at the turns of an episode find the episode's index, the place in it, the turn's own
    reward and its penalties among the extras. ``similar``: as in similar_states; None compares equal states. ``texts`` adds those
    of the states.

    By hand: an episode with rewards 0 and 1, whose first turn has the penalty 0.1: the rows have 0.9 and 1.
    """
    rows, sequences = sample_rows(groups), batch.sequences
    penalties = torch.tensor([sum(turn.penalty for turn in row.sample.turns) for row in rows])
    own = torch.tensor([sum(turn.reward or 0.0 for turn in row.sample.turns) for row in rows])
    states = None if similar is None else similar_states(rows, similar)
    keys = tuple((row.sample.turns[0].state_key if row.sample.turns else None) or "" for row in rows) if texts else ()
    return replace(
        batch,
        sequences=replace(sequences, trajectory_index=torch.arange(len(rows))),
        rewards=torch.where(batch.valid, batch.rewards - penalties, batch.rewards),
        turn_rewards=None,
        extras={
            **batch.extras,
            **({} if states is None else {"state_index": states}),
            **({STATE_TEXTS: keys} if texts else {}),
            "trajectory_index": sequences.trajectory_index,
            "step_index": sequences.step_index,
            "step_rewards": own,
            "turn_penalties": penalties,
        },
    )
