"""Alarms: none in recorded runs that went well, and each one at most 3 steps after its fault is planted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.run.health import SILENCE, WATCHED, WATCHED_SFT, Health

# The demo (GRPO, SmolLM2-135M, 40 steps) with three seeds, as it ran: held-out accuracy 0.46 -> 0.80, 0.46 -> 0.82, 0.48 -> 0.82.
RECORDED: list[dict[str, list[float]]] = json.loads((Path(__file__).parent / "data/demo_runs.json").read_text())
IDS = ["a", "b", "c", "d"]


def steps_of(run: dict[str, list[float]]) -> list[dict[str, float]]:
    """The recorded metrics, beside a reward that rises from 0.45 to 0.8 with a step's noise, and few cut responses."""
    length = len(run["gap/mean"])
    beside = [
        {"reward/mean": 0.45 + 0.35 * step / length + 0.05 * (-1) ** step, "response/truncated_share": 0.02}
        for step in range(length)
    ]
    return [{name: values[index] for name, values in run.items()} | beside[index] for index in range(length)]


@pytest.mark.parametrize("run", RECORDED)
def test_a_run_that_goes_well_raises_no_alarm(run: dict[str, list[float]]) -> None:
    health = Health()
    assert [alarm for step, metrics in enumerate(steps_of(run), 1) for alarm in health.look(step, metrics, IDS)] == []


def test_a_gap_names_the_cuts_of_the_sampler_first() -> None:
    """ROLL's defaults (top_p 0.7, top_k 50) alone make a gap of 0.8 on a random model."""
    [alarm] = Health().look(1, {"gap/mean": 0.8}, IDS)
    assert "Usual causes: rollout.top_k, top_p or min_p, whose cuts only the sampler's log-probs have; " in alarm


# What a fault does to the metrics from the step on in which it is planted, and what is said.
FAULTS = {
    "stale weights": ({"gap/mean": 0.4}, "sampler and trainer disagree: gap/mean is 0.4, and was about 0.0"),
    "learning rate x 1000, collapse": (
        {"policy/entropy": 0.004, "reward/mean": 0.4},
        "the policy has stopped exploring: policy/entropy is 0.004",
    ),
    "learning rate x 1000, noise": ({"policy/entropy": 9.5}, "the policy is coming apart: policy/entropy is 9.5"),
    "reward always 1": ({"group/no_signal_share": 1.0}, "no group has had a signal for 3 steps"),
    "too many updates": ({"policy/clip_fraction": 0.7}, "most of the update is clipped: policy/clip_fraction is 0.7"),
    "length pays": ({"response/length_mean": 40.0}, "responses are getting much longer: response/length_mean is 40"),
    "template without its end": ({"response/length_mean": 2.0}, "responses are getting much shorter"),
    "one answer for all": ({"response/most_common_share": 0.9}, "most prompts get the same answer"),
    "template without the question": ({"prompt/distinct_share": 0.25}, "different prompts read the same"),
    "reward lost": ({"reward/mean": 0.0}, "the reward has fallen: reward/mean is 0, and was about 0."),
    "end token lost": ({"response/truncated_share": 1.0}, "many responses are cut at the token limit"),
    "close raises": ({"episode/close_failed": 1.0}, "environments fail when they are closed; their episodes are kept"),
    "slow sampler": ({"async/late_share": 0.8}, "steps wait for groups at the bound on staleness"),
    "data too old": (
        {"async/effective_token_share": 0.1},
        "the sampled tokens say little about the policy that learns",
    ),
    "ahead for nothing": (
        {"async/at_bound_share": 1.0},
        "nearly all groups are as old as the bound allows when they are trained",
    ),
    "nothing to overlap": ({"time/trainer_waited_share": 0.95}, "the trainer waits for groups nearly all the time"),
    "nothing to sample": ({"time/samplers_waited_share": 0.95}, "samplers wait nearly all the time"),
    "gradient": ({"policy/grad_norm": 60.0}, "the gradient has jumped: policy/grad_norm is 60, and was about 2."),
}


# Steps after which those are told that are one only when they last; the others within three.
LASTING = {"ahead for nothing": 8, "nothing to overlap": 5, "nothing to sample": 5}


@pytest.mark.parametrize("planted_at", [2, 20])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_told_in_time(fault: str, planted_at: int) -> None:
    changes, said = FAULTS[fault]
    if planted_at == 2 and fault in ("reward lost", "end token lost"):
        planted_at = 3  # two steps must show first what is usual
    health, alarms = Health(), []
    last = planted_at + LASTING.get(fault, 3) - 1
    for step, metrics in enumerate(steps_of(RECORDED[1])[:last], 1):
        alarms += health.look(step, metrics | (changes if step >= planted_at else {}), IDS)
    [alarm] = alarms
    assert planted_at <= int(alarm.split()[1].rstrip(":")) <= last
    assert fault not in LASTING or int(alarm.split()[1].rstrip(":")) == last
    assert said in alarm and "Usual causes: " in alarm
    assert alarm.endswith(f"Look at a, b, c in samples/step_{alarm.split()[1].rstrip(':')}.jsonl")


def test_an_alarm_that_stays_is_told_again_after_a_while() -> None:
    health = Health()
    told = [step for step in range(1, 60) if health.look(step, {"policy/clip_fraction": 0.9}, IDS)]
    assert told == [1, 1 + SILENCE, 1 + 2 * SILENCE]


def test_every_rule_has_a_fault_that_raises_it() -> None:
    assert {watched.what for watched in WATCHED} == {
        watched.what for watched in WATCHED if any(watched.what in said for _, said in FAULTS.values())
    }
    assert len({watched.what for watched in WATCHED}) == len(WATCHED) == len(FAULTS)


def test_a_solved_task_is_no_lack_of_exploration() -> None:
    """The reward goes from 0.02 to 0.99 in 12 steps, the entropy from 1.2 to 0.005, and the last groups have no signal."""
    rewards = [0.02, 0.05, 0.1, 0.3, 0.5, 0.7, 0.85, 0.93, 0.97, 0.99, 0.99, 0.99]
    entropies = [1.2, 1.1, 1.0, 0.8, 0.4, 0.2, 0.08, 0.03, 0.02, 0.01, 0.006, 0.005]
    health, alarms = Health(), []
    for step, (reward, entropy) in enumerate(zip(rewards, entropies, strict=True), 1):
        alarms += health.look(step, {"reward/mean": reward, "policy/entropy": entropy}, IDS)
    assert alarms == []


def test_a_collapse_after_learning_is_one() -> None:
    """The same entropy while the reward is lost."""
    health = Health()
    for step, reward in enumerate([0.1, 0.2, 0.4, 0.5, 0.5], 1):
        assert health.look(step, {"reward/mean": reward, "policy/entropy": 0.8}, IDS) == []
    said = health.look(6, {"reward/mean": 0.0, "policy/entropy": 0.004}, IDS)
    assert [text.split(": ")[1] for text in said] == ["the reward has fallen", "the policy has stopped exploring"]
    assert all("a learning rate that is too high" in text for text in said)


def test_a_rate_ten_times_too_high_is_reported_when_it_happens() -> None:
    """As measured: the gradient is 7 times the first at step 2, and the reward 0 from step 4 on."""
    health = Health()
    rows = [(0.3, 1.1), (0.31, 7.9), (0.28, 5.0), (0.0, 0.4), (0.0, 0.0), (0.0, 0.0)]
    said = [
        health.look(
            step, {"reward/mean": reward, "policy/grad_norm": norm, "group/no_signal_share": float(step > 3)}, IDS
        )
        for step, (reward, norm) in enumerate(rows, 1)
    ]
    assert [len(alarms) for alarms in said] == [0, 1, 0, 1, 0, 1]
    assert "the gradient has jumped" in said[1][0] and "the reward has fallen" in said[3][0]
    assert "no group has had a signal" in said[5][0] and "a learning rate that is too high" in said[5][0]


def test_responses_that_are_all_cut_from_a_step_on() -> None:
    health = Health()
    told = [
        step
        for step in range(1, 8)
        if health.look(step, {"reward/mean": 0.0, "response/truncated_share": 1.0 if step >= 3 else 0.1}, IDS)
    ]
    assert told == [3]


def test_responses_that_are_all_cut_from_the_first_step_on() -> None:
    """There is nothing to compare with: nearly all in three steps is enough."""
    health = Health()
    told = [health.look(step, {"response/truncated_share": 0.98}, IDS) for step in range(1, 6)]
    assert [len(each) for each in told] == [0, 0, 1, 0, 0]
    assert "many responses are cut at the token limit: response/truncated_share is 0.98. Usual" in told[2][0]
    health = Health()
    assert not any(health.look(step, {"response/truncated_share": 0.9}, IDS) for step in range(1, 30))


def test_a_step_without_a_metric_is_passed_over() -> None:
    assert Health().look(1, {}, []) == []


# Loss, gradient norm and learned tokens of a healthy beginning of supervised fine-tuning, and what a fault changes.
LEARNING = [(2.1, 3.0, 500.0), (1.9, 2.6, 540.0), (1.95, 4.1, 480.0), (1.7, 2.2, 510.0), (1.6, 9.0, 90.0)]
SFT_FAULTS = {
    "the loss has jumped": {"policy/loss": 5.0},
    "the gradient has jumped": {"policy/grad_norm": 30.0},
    "next to nothing is there to be learned": {"data/learned_tokens": 0.0},
}


def learning(changes: dict[str, float]) -> list[str]:
    """The alarms of five healthy steps and one with changes."""
    health, alarms = Health(WATCHED_SFT), []
    names = ("policy/loss", "policy/grad_norm", "data/learned_tokens")
    for step, values in enumerate([*LEARNING, LEARNING[-1]], 1):
        metrics = dict(zip(names, values, strict=True)) | (changes if step > len(LEARNING) else {})
        alarms += health.look(step, metrics, IDS, place="the training files")
    return alarms


@pytest.mark.parametrize("said", SFT_FAULTS)
def test_faults_of_supervised_fine_tuning_are_told_at_once(said: str) -> None:
    [alarm] = learning(SFT_FAULTS[said])
    assert alarm.startswith(f"step 6: {said}: ") and alarm.endswith("Look at a, b, c in the training files")


def test_supervised_fine_tuning_that_goes_well_raises_no_alarm() -> None:
    assert learning({}) == []
    assert {watched.what for watched in WATCHED_SFT} == set(SFT_FAULTS)


def test_the_first_gradient_after_steps_without_signal_is_no_jump() -> None:
    health = Health()
    norms = [3.5, 3.1, 3.6, *([0.0] * 12), 2.7]
    assert [
        alarm for step, norm in enumerate(norms) for alarm in health.look(step, {"policy/grad_norm": norm}, IDS)
    ] == []
    assert len(health.look(99, {"policy/grad_norm": 60.0}, IDS)) == 1


def test_responses_without_a_reward_are_told_once_in_a_while() -> None:
    health = Health()
    invalid = "2 of 8 responses have no valid reward and are left out (exception 2):\n  a/0 and 1 more: exception: f: r.py:2: odd"
    told = [health.look(step, {}, ["a"], invalid=invalid) for step in range(1, 25)]
    assert [step for step, alarms in enumerate(told, 1) if alarms] == [1, 21]
    assert told[0] == [f"step 1: {invalid}"]
    assert Health().look(1, {}, ["a"]) == []
