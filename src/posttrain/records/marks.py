"""The mark of a group: a short digest of all that training depends on, to tell whether a replayed run has the same samples."""

from __future__ import annotations

import hashlib

import numpy as np

from posttrain.records.stored_rows import digest_of, digest_of_logprobs
from posttrain.records.trajectories import Invalid, Outcome, ScoredGroup, Trajectory

BYTES = 9  # of a mark; those of earlier versions, which were made of the tokens themselves, have 8


def mark_of(scored: ScoredGroup) -> str:
    """Return 18 hexadecimal digits of the tokens, log-probs, distributions and versions of every response of a group, of the
    bounds, rewards and states of its turns, and of its outcomes.

    Texts, times and an environment's metrics do not count: nothing is learned from them.
    """
    digest = hashlib.blake2b(digest_size=BYTES)
    for trajectory, outcome in scored.pairs:
        for sample in (*trajectory.earlier, trajectory):
            _add_sample(digest, sample)
        digest.update(_of_outcome(outcome).encode())
    return digest.hexdigest()


def _add_sample(digest: hashlib.blake2b, sample: Trajectory) -> None:
    digest.update(f"{len(sample.token_ids)} {len(sample.logprobs)}".encode())
    digest.update(digest_of(sample.token_ids))  # of rows in a store they are known
    digest.update(digest_of_logprobs(sample.logprobs))
    rows = (
        np.asarray(sample.response_mask, np.bool_),
        np.asarray(sample.prompt_token_ids or (), np.int64),
        np.asarray(sample.spans, np.int64),
    )
    for row in rows:
        digest.update(f"{row.shape}".encode())  # the same numbers, divided otherwise, are other samples
        digest.update(row.tobytes())
    turns = [(turn.start, turn.end, turn.reward, turn.state_key) for turn in sample.turns]
    digest.update(f"{sample.stop_reason} {sample.env_reward!r} {turns!r} {sample.own_draws!r}".encode())


def _of_outcome(outcome: Outcome) -> str:
    if isinstance(outcome, Invalid):
        return f"invalid {outcome.reason}"
    return f"{outcome.value!r} {outcome.terms!r}"
