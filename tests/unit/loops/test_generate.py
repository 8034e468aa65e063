"""Generation part by part with a scripted engine: what a kill or a signal loses, and that the rest is the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from posttrain.errors import RunInterrupted, RunStopped
from posttrain.interfaces.rollout_engine import OnGroup, OnTokens
from posttrain.loops import generate
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, TrajectoryGroup
from posttrain.run.parts import Parts
from posttrain.run.stopping import StopSignal

PROMPTS = [Prompt(prompt_id=f"p:{row}", token_ids=(1,), text="q", data_source="t") for row in range(7)]
SAMPLING = SamplingParams(samples_per_prompt=2, max_response_tokens=4, seed=3)


class Scripted:
    """Answers a prompt with its place among those it came with, so that another lot gives another text."""

    version = 0

    def __init__(self, dies_at: str = "", stops_at: str = "", fails_at: Sequence[str] = ()):
        self.asked: list[list[str]] = []
        self._dies_at, self._stops_at, self._fails_at = dies_at, stops_at, fails_at

    def weights_changed(self, version: int) -> None: ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        on_group: OnGroup | None = None,
    ) -> list[TrajectoryGroup]:
        names = [prompt.prompt_id for prompt in prompts]
        self.asked.append(names)
        groups = []
        for place, prompt in enumerate(prompts):
            if prompt.prompt_id == self._dies_at:
                raise KeyboardInterrupt
            if prompt.prompt_id == self._stops_at:
                os.kill(os.getpid(), signal.SIGTERM)
            assert on_tokens is not None
            on_tokens(5)
            fails = prompt.prompt_id in self._fails_at
            responses = tuple(
                Trajectory(
                    sample_id=f"{prompt.prompt_id}/{number}",
                    token_ids=() if fails else (1,),
                    logprobs=() if fails else (0.0,),
                    text="" if fails else f"{prompt.prompt_id} as {place} of {len(prompts)}, {number}",
                    stop_reason=StopReason.FAILED if fails else StopReason.EOS,
                    policy_version=0,
                    failure="the server said 503" if fails else "",
                )
                for number in range(sampling.samples_per_prompt)
            )
            groups.append(TrajectoryGroup(prompt=prompt, trajectories=responses))
        return groups


def made(folder: Path) -> Parts:
    found = Parts(folder / "out.parquet", {"a": 1}, column="responses", rows=7, rows_per_part=3)
    found.begin()
    return found


def sample(folder: Path, engine: Scripted) -> list[tuple[int, int]]:
    """What on_work was told."""
    told: list[tuple[int, int]] = []
    with StopSignal() as stop:
        generate.run(
            engine, PROMPTS, SAMPLING, made(folder), stop=stop, on_work=lambda rows, tokens: told.append((rows, tokens))
        )
    return told


def written(folder: Path) -> bytes:
    made(folder).finish(pa.table({"row": range(7)}))
    return (folder / "out.parquet").read_bytes()


def test_rows_and_tokens_are_told(tmp_path: Path) -> None:
    told = sample(tmp_path, Scripted())
    assert [rows for rows, _ in told if rows] == [3, 3, 1]
    assert sum(tokens for _, tokens in told) == 35


def test_wherever_it_is_broken_off_the_file_is_the_same(tmp_path: Path) -> None:
    sample(tmp_path / "whole", Scripted())
    whole = written(tmp_path / "whole")
    for row in range(7):
        folder = tmp_path / str(row)
        with pytest.raises(KeyboardInterrupt):
            sample(folder, Scripted(dies_at=f"p:{row}"))
        assert len(made(folder).missing()) == 3 - row // 3
        again = Scripted()
        sample(folder, again)
        # only the parts that were not done are asked for, each whole
        assert again.asked == [
            [f"p:{r}" for r in range(start, min(start + 3, 7))] for start in range(row // 3 * 3, 7, 3)
        ]
        assert written(folder) == whole


def test_a_signal_stops_it_within_a_part_and_says_what_is_done(tmp_path: Path) -> None:
    with pytest.raises(
        RunInterrupted, match=r"stopped by SIGTERM; 3 of 7 rows are done and kept in .*out.parquet.parts"
    ):
        sample(tmp_path, Scripted(stops_at="p:4"))
    assert made(tmp_path).missing() == [1, 2]


def test_a_part_with_a_failed_response_is_not_kept_and_sampled_again(tmp_path: Path) -> None:
    sample(tmp_path / "whole", Scripted())
    folder = tmp_path / "failed"
    with pytest.raises(
        RunStopped, match=r"2 responses failed, the first of them p:4/0: the server said 503. 4 of 7 rows"
    ):
        sample(folder, Scripted(fails_at=["p:4"]))
    again = Scripted()
    sample(folder, again)
    assert again.asked == [["p:3", "p:4", "p:5"]]
    assert written(folder) == written(tmp_path / "whole")


def test_a_server_that_is_gone_is_not_asked_for_every_row(tmp_path: Path) -> None:
    engine = Scripted(fails_at=[prompt.prompt_id for prompt in PROMPTS])
    prompts = PROMPTS * 10
    parts = Parts(tmp_path / "out.parquet", {"a": 1}, column="responses", rows=70, rows_per_part=7)
    parts.begin()
    with StopSignal() as stop, pytest.raises(RunStopped, match=r"42 responses failed.* 0 of 70 rows are done"):
        generate.run(engine, prompts, SAMPLING, parts, stop=stop, on_work=lambda rows, tokens: None)
    assert len(engine.asked) == 3
