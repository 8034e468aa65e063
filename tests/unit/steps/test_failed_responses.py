"""A request that failed is data: it goes through the step, and no number of the step comes from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batches import train_batch
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.loops.rl_sync import invalid_message
from posttrain.models.loading import load_causal_lm
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Reward, ScoredGroup, StopReason, Trajectory, TrajectoryGroup
from posttrain.run.samples import write_samples
from posttrain.steps.assemble import assemble
from posttrain.steps.measure import length_metrics, reward_metrics
from posttrain.steps.score import TooManyInvalid, score


def response(number: int, token_ids: tuple[int, ...]) -> Trajectory:
    return Trajectory(
        sample_id=f"p:0/{number}",
        token_ids=token_ids,
        logprobs=(-1.0,) * len(token_ids),
        text="x" * len(token_ids),
        stop_reason=StopReason.LENGTH if token_ids else StopReason.FAILED,
        policy_version=0,
        failure="" if token_ids else "no response within 1 s",
    )


PROMPT = Prompt(prompt_id="p:0", token_ids=(5, 6), text="", data_source="t")
GROUP = TrajectoryGroup(prompt=PROMPT, trajectories=(response(0, (7, 8)), response(1, ()), response(2, (9,))))


class Generous:
    """Scores every text 1, the empty one too."""

    def score(self, groups: list[TrajectoryGroup]) -> list[tuple[Reward, ...]]:
        return [tuple(Reward(1.0) for _ in group.trajectories) for group in groups]


def scored() -> list[ScoredGroup]:
    return score([GROUP], Generous())  # type: ignore[arg-type]


def test_it_is_never_scored_and_counts_among_the_invalid() -> None:
    [group] = scored()
    assert group.outcomes == (Reward(1.0), Invalid("not_sampled", "no response within 1 s"), Reward(1.0))
    assert reward_metrics([group])["reward/invalid/not_sampled"] == pytest.approx(1 / 3)
    assert length_metrics([group])["response/length_mean"] == 1.0  # (2 + 0 + 1) / 3
    with pytest.raises(TooManyInvalid, match="not_sampled 1"):
        score([GROUP], Generous(), max_invalid_share=0.3)  # type: ignore[arg-type]


def test_a_step_that_goes_on_tells_which_failed_and_why() -> None:
    assert invalid_message(scored()) == (
        "1 of 3 responses have no valid reward and are left out (not_sampled 1):\n  p:0/1: not_sampled: no response within 1 s"
    )
    assert invalid_message([]) == ""


def test_it_has_no_part_in_the_batch_and_the_log_probs(tiny_llama: Path, tmp_path: Path) -> None:
    batch = assemble(scored())
    sequences = batch.sequences
    assert sequences.response_mask.tolist() == [[True, True], [False, False], [True, False]]
    assert batch.valid.tolist() == [True, False, True]
    model = load_causal_lm(str(tiny_llama), dtype=torch.float32)
    with_it = LocalTrainEngine.scorer(model, 8).logprobs(sequences, 1.0)
    without = [t for t in GROUP.trajectories if t.token_ids]
    group = TrajectoryGroup(prompt=PROMPT, trajectories=tuple(without))
    alone = LocalTrainEngine.scorer(model, 8).logprobs(assemble(score([group], Generous())).sequences, 1.0)  # type: ignore[arg-type]
    torch.testing.assert_close(with_it[[0, 2]], alone, rtol=0, atol=1e-6)
    assert with_it[1].tolist() == [0.0, 0.0]
    write_samples(tmp_path / "samples.jsonl", 1, scored(), train_batch(sequences))
    assert '"stop_reason": "failed"' in (tmp_path / "samples.jsonl").read_text()
