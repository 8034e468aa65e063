"""``colocate`` with workers of Ray: the run of one process on one worker, equal to itself and to the synchronous loop on two, and
without loss over a kill."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ray_runs import config, count_reads, lines_of
from test_async_runs import RAGGED, assert_each_group_is_trained_once, at_update, events, without
from test_runs import PowerCut, comparable

from posttrain.build.train import train_run
from posttrain.config import RunConfig

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

STEPS = 4
COLOCATE: dict[str, Any] = {"mode": "colocate", "max_staleness_steps": 2}
TWO: dict[str, dict[str, Any]] = {"policy": {"engine": "fsdp"}, "placement": {"devices": 2, "runtime": "ray"}}
HIDDEN = ("async/", "step/sampled_tokens")


def asked(folder: Path, model: Path, name: str, address: str | None, **changes: dict[str, Any]) -> RunConfig:
    """Steps of four groups of three ragged responses; without an address in one process, and else on one worker."""
    sections: dict[str, dict[str, Any]] = {
        "asynchronous": COLOCATE,
        "rollout": RAGGED,
        "data": {"prompts_per_step": 4},
        "policy": {"sequences_per_mini_batch": 6},
        "loss": {"kl_coef": 0.01, "rollout_correction": {"weights": "token"}},
        "checkpoint": {"every_steps": 2},
    }
    placement = changes.get("placement", {}) | ({} if address is None else {"runtime": "ray", "ray_address": address})
    merged = {each: sections.get(each, {}) | changes.get(each, {}) for each in sections | changes.keys()}
    return config(folder, model, name, merged | {"placement": placement}, steps=STEPS)


def results(folder: Path) -> dict[str, bytes]:
    """Everything that is equal in two runs that are the same."""
    final = folder / f"checkpoints/global_step_{STEPS}/policy"
    found = {path.name: path.read_bytes() for path in sorted(final.glob("*.safetensors"))}
    return found | {f"samples {n}": (folder / f"samples/step_{n}.jsonl").read_bytes() for n in range(1, STEPS + 1)}


def assert_equal(found: Path, expected: Path, *hidden: str) -> None:
    assert results(found) == results(expected)
    assert without(comparable(found), *hidden) == without(comparable(expected), *hidden)
    if not hidden:
        assert (found / "schedule.jsonl").read_bytes() == (expected / "schedule.jsonl").read_bytes()


@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_one_worker_makes_the_run_of_one_process(address: str, tmp_path: Path, tiny_llama: Path, cache: str) -> None:
    mode = {"asynchronous": COLOCATE | {"cache_on_new_weights": cache}}
    alone = train_run(asked(tmp_path, tiny_llama, "alone", None, **mode))
    remote = train_run(asked(tmp_path, tiny_llama, "remote", address, **mode))
    assert_equal(remote, alone)
    assert any(event["event"] == "cut" and event["token"] > 0 for event in events(remote))


@pytest.fixture(scope="module")
def straight(address: str, tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """An undisturbed run on two workers. Do not write into it."""
    return train_run(asked(tmp_path_factory.mktemp("two"), tiny_llama, "straight", address, **TWO))


def test_two_workers_make_the_same_run_twice(address: str, straight: Path, tmp_path: Path, tiny_llama: Path) -> None:
    """I6, on two workers; and responses are cut, of both, and continued under newer weights."""
    again = train_run(asked(tmp_path, tiny_llama, "again", address, **TWO))
    assert_equal(again, straight)
    log = events(straight)
    assert_each_group_is_trained_once(straight)
    assert Counter(event["step"] for event in log if event["event"] == "consumed") == dict.fromkeys(
        range(1, STEPS + 1), 4
    )
    assert sum(event["event"] == "cut" and event["token"] > 0 for event in log) > 4
    assert 0 < max(line["async/staleness_steps_max"] for line in lines_of(straight)) <= 2
    lines = lines_of(straight)
    trained = sum(line["response/length_mean"] * 12 for line in lines)
    assert sum(line["step/sampled_tokens"] for line in lines) == pytest.approx(trained)


def test_a_replay_on_two_workers_is_the_same_run(
    address: str, straight: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    """I5: the workers get the same requests at the same passes."""
    again = train_run(asked(tmp_path, tiny_llama, "replay", address, **TWO), replay=straight)
    assert results(again) == results(straight) and comparable(again) == comparable(straight)


def test_without_staleness_two_workers_make_the_synchronous_run(address: str, tmp_path: Path, tiny_llama: Path) -> None:
    """I3, on two workers."""
    off = TWO | {"asynchronous": {"mode": "off"}}
    none = TWO | {"asynchronous": {"mode": "colocate", "max_staleness_steps": 0}}
    plain = train_run(asked(tmp_path, tiny_llama, "plain", address, **off))
    assert_equal(train_run(asked(tmp_path, tiny_llama, "ahead", address, **none)), plain, *HIDDEN)


def test_a_run_on_two_workers_that_died_resumes_with_its_prefixes(
    address: str, straight: Path, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I2 and I11: dead in step 4, after the checkpoint of step 2, which holds unfinished responses."""
    died = asked(tmp_path, tiny_llama, "died", address, **TWO)
    with monkeypatch.context() as patch:
        at_update(patch, 4)
        with pytest.raises(PowerCut):
            train_run(died)
    saved = json.loads((Path(died.folder) / "checkpoints/global_step_2/ahead.json").read_text())
    assert any(len(begun["token_ids"]) for begun in saved["begun"].values())
    assert_equal(train_run(died), straight)


GAME: dict[str, dict[str, Any]] = {
    "data": {"train_files": [], "prompts_per_step": 4},
    "reward": {"terms": []},
    "environment": {
        "name": "guess_number",
        "settings": {"low": 1, "high": 4},
        "max_turns": 3,
        "train_episodes": 8,
        "validation_episodes": 2,
        "workers": 0,
    },
    "validation": {"every_steps": 3, "before_training": False, "after_training": False},
}


def test_episodes_on_one_worker_and_on_two(address: str, tmp_path: Path, tiny_llama: Path) -> None:
    """Turns that are cut continue in the next step; one worker plays as one process does, and two play the same twice."""
    alone = train_run(asked(tmp_path, tiny_llama, "alone", None, **GAME))
    assert_equal(train_run(asked(tmp_path, tiny_llama, "one", address, **GAME)), alone)
    two = [train_run(asked(tmp_path, tiny_llama, f"two{n}", address, **(GAME | TWO))) for n in range(2)]
    assert_equal(*two)
    assert_each_group_is_trained_once(two[0])
    assert any(event["event"] == "cut" and event["token"] > 0 for event in events(two[0]))


def test_the_driver_looks_into_no_response(
    address: str, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and log-probs go from the workers that sample to those that train, also those of responses that are cut."""
    plain = TWO | {"checkpoint": {"every_steps": None, "at_end": False}}
    reads = count_reads(monkeypatch)
    found = train_run(asked(tmp_path, tiny_llama, "unread", address, **plain))
    assert any(event["event"] == "cut" and event["token"] > 0 for event in events(found))
    assert reads == []
