"""Responses in a folder: written once, read afterwards, refused where they do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.errors import RequestError, RunStopped
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, TrajectoryGroup, VersionSpan
from posttrain.run.kept_responses import KeptResponses, check_folder

SAMPLING = SamplingParams(samples_per_prompt=2, max_response_tokens=4, stop=("\n",), seed=3)
PROMPTS = [Prompt(prompt_id=f"p:{n}", token_ids=(1, n), text="x", data_source="s") for n in range(2)]
ROLES = SimpleNamespace()


def sampled(roles, prompts, sampling, on_tokens=None, on_group=None) -> list[TrajectoryGroup]:
    """Two responses per prompt, the second one failed; log-probs that JSON must not round."""
    return [
        TrajectoryGroup(
            prompt=prompt,
            trajectories=(
                Trajectory(
                    sample_id=f"{prompt.prompt_id}/0",
                    token_ids=(5, 6),
                    logprobs=(-1 / 3, -0.1),
                    text="é",
                    stop_reason=StopReason.EOS,
                    policy_version=2,
                    version_spans=(VersionSpan(0, 2), VersionSpan(1, 3)),
                ),
                Trajectory(
                    sample_id=f"{prompt.prompt_id}/1",
                    token_ids=(),
                    logprobs=(),
                    text="",
                    stop_reason=StopReason.FAILED,
                    policy_version=2,
                    failure="late",
                    failure_reason="timeout",
                ),
            ),
        )
        for prompt in prompts
    ]


def never(*_: object, **__: object) -> list[TrajectoryGroup]:
    raise AssertionError("sampled although the responses are there")


def kept(folder: Path, model: str = "m") -> KeptResponses:
    return KeptResponses(folder=folder, model=model, say=lambda text: None)


def test_what_was_sampled_is_read_exactly_and_scored_as_if_sampled(tmp_path: Path) -> None:
    first = kept(tmp_path).of_step(4, sampled)(ROLES, PROMPTS, SAMPLING)
    begun: list[TrajectoryGroup] = []
    counted: list[int] = []
    # Another seed is no other distribution
    again = kept(tmp_path).of_step(4, never)(ROLES, PROMPTS, replace(SAMPLING, seed=9), counted.append, begun.append)
    assert again == first == begun
    assert counted == [2, 2] and [path.name for path in tmp_path.iterdir()] == ["step_4.jsonl"]


def test_every_batch_of_a_step_has_its_file_and_other_steps_are_sampled(tmp_path: Path) -> None:
    store = kept(tmp_path)
    collect = store.of_step(1, sampled)
    collect(ROLES, PROMPTS[:1], SAMPLING)
    collect(ROLES, PROMPTS[1:], SAMPLING)
    store.of_step(2, sampled)(ROLES, PROMPTS, SAMPLING)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1.jsonl", "step_1_batch_2.jsonl", "step_2.jsonl"]
    collect = kept(tmp_path).of_step(1, never)
    read = [group.prompt.prompt_id for part in (PROMPTS[:1], PROMPTS[1:]) for group in collect(ROLES, part, SAMPLING)]
    assert read == ["p:0", "p:1"]


def test_steps_that_are_not_listed_are_sampled_and_not_kept(tmp_path: Path) -> None:
    store = KeptResponses(folder=tmp_path, model="m", say=lambda text: None, steps=[2])
    assert store.of_step(1, sampled) is sampled
    store.of_step(2, sampled)(ROLES, PROMPTS, SAMPLING)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2.jsonl"]


@pytest.mark.parametrize(
    ("prompts", "sampling", "model", "message"),
    [
        (PROMPTS[:1], SAMPLING, "m", "it holds 2 prompts, and the step has 1"),
        (PROMPTS[::-1], SAMPLING, "m", "it holds responses to p:0 in place of p:1"),
        ([replace(PROMPTS[0], token_ids=(9,)), PROMPTS[1]], SAMPLING, "m", "it holds responses to other tokens of p:0"),
        (PROMPTS, replace(SAMPLING, temperature=0.5), "m", "temperature was 1.0, and is 0.5"),
        (PROMPTS, replace(SAMPLING, samples_per_prompt=3), "m", "samples_per_prompt was 2, and is 3"),
        (PROMPTS, SAMPLING, "other", "model was 'm', and is 'other'"),
    ],
)
def test_what_does_not_fit_is_refused_and_named(
    tmp_path: Path, prompts: list[Prompt], sampling: SamplingParams, model: str, message: str
) -> None:
    kept(tmp_path).of_step(1, sampled)(ROLES, PROMPTS, SAMPLING)
    with pytest.raises(RunStopped, match=r"step_1.jsonl does not fit this run: " + message):
        kept(tmp_path, model).of_step(1, never)(ROLES, prompts, sampling)


@pytest.mark.parametrize("text", ["", "{", '{"model": 1}\n{"prompt_id": "p:0"}\n', "[1]\n[2]\n"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "step_1.jsonl").write_text(text)
    with pytest.raises(RunStopped, match=r"step_1.jsonl cannot be read .* delete it"):
        kept(tmp_path).of_step(1, never)(ROLES, PROMPTS, SAMPLING)


def test_the_first_line_says_what_the_responses_are_of(tmp_path: Path) -> None:
    kept(tmp_path).of_step(1, sampled)(ROLES, PROMPTS, SAMPLING)
    header = json.loads((tmp_path / "step_1.jsonl").read_text().splitlines()[0])
    assert (header["model"], header["stop"], header["max_response_tokens"]) == ("m", ["\n"], 4) and "seed" not in header


def test_verls_own_file_is_refused(tmp_path: Path) -> None:
    """Its name is that of the folder here."""
    (tmp_path / "__GBS8__N4").write_bytes(b"\x80\x04")
    with pytest.raises(RequestError, match="is a file, such as verl writes with pickle"):
        check_folder(tmp_path / "__GBS8__N4")
    check_folder(tmp_path)
    check_folder(tmp_path / "new")
