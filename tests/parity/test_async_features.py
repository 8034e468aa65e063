"""Every feature in every asynchronous mode: a request is planned and trained, or refused by plan with the reason and a fix."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from async_features import AGENT, FEATURES, MODES, Place
from test_apart_runs import Samplers, with_samplers
from test_async_runs import SECTIONS, STEPS, events
from test_runs import maker, metrics_of

from posttrain.asynchrony.ledger import Ledger
from posttrain.build.train import train_run
from posttrain.cli.plan import planned
from posttrain.cli.request import load_request
from posttrain.config import RunConfig
from posttrain.config.checks import asynchronous as checks
from posttrain.errors import RequestError

pytestmark = pytest.mark.slow

# What plan says of a feature that a mode cannot have.
REFUSED = {
    ("one_step", "keep_cache"): "keep has no meaning in one_step",
    ("one_step", "drop_refill"): "drop has no meaning in one_step",
    ("one_step", "drop_domains"): "drop has no meaning in one_step",
    ("one_step", "S=1.5"): "one_step trains on what the weights of one step before have sampled",
    ("one_step", "fraction_domains"): "one_step trains on what the weights of one step before have sampled",
    ("one_step", "running"): "max_running_groups = 3 has no meaning in one_step",
    ("one_step", "every_2"): "one_step gives the sampler new weights after every step",
    ("colocate", "every_2"): "colocate gives the sampler new weights after every step",
    **{(mode, "remax"): "remax compares rewards with that of a greedy response" for mode in MODES},
    **{(mode, "uncorrected"): "takes responses as if the weights at the start of the step" for mode in MODES},
    **{(mode, "curriculum"): "a curriculum looks at every step before it draws the next" for mode in MODES},
}
# Trained here in every mode, and the others where samplers work apart, which admits and takes at any instant.
EVERYWHERE = ("replace", "drop_groups", "critic", "lora", "images", "experts", "turns_in_processes")
TRAINED = [
    (mode, feature)
    for feature in FEATURES
    for mode in MODES
    if (mode, feature) not in REFUSED and (mode == "separate" or feature in EVERYWHERE)
]


def merged(sections: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(sections)
    for name, value in changes.items():
        inner = found.get(name)
        deep = isinstance(inner, Mapping) and isinstance(value, Mapping) and name != "rollout_correction"
        found[name] = merged(inner, value) if deep and isinstance(inner, Mapping) else value
    return found


def requested(mode: str, feature: str, place: Place, patch: pytest.MonkeyPatch) -> RunConfig:
    """Read and check the run as ``posttrain plan`` does; samplers apart are those of a test, in this process."""
    changes = merged(SECTIONS | {"asynchronous": MODES[mode]}, FEATURES[feature](place))
    make = maker(place.folder, place.model)
    with pytest.MonkeyPatch.context() as unread:
        unread.setattr(RunConfig, "model_validate", lambda sections: sections)
        sections = make("run", **changes)
    file = place.folder / "run.yaml"
    file.write_text(yaml.safe_dump(sections))
    if mode == "separate":
        patch.setattr(checks, "_placement_problems", lambda config: iter(()))
        with_samplers(patch, Samplers(2))
    loaded = load_request([str(file)], None, here=False)
    module, request, verdict = planned(loaded, look_at_files=True)
    assert verdict.trains and module.plan_text(request)
    return loaded.config


@pytest.fixture
def place(tmp_path: Path, tiny_llama: Path, tiny_scorer: Path) -> Place:
    return Place(tmp_path, tiny_llama, tiny_scorer)


@pytest.mark.parametrize(("mode", "feature"), REFUSED)
def test_a_feature_is_refused_with_reason_and_fix(
    mode: str, feature: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError) as refused:
        requested(mode, feature, place, monkeypatch)
    [problem] = refused.value.problems
    assert REFUSED[mode, feature] in problem.what and problem.fix and problem.field


@pytest.mark.parametrize(("mode", "feature"), TRAINED)
def test_a_feature_trains_within_the_bound(
    mode: str, feature: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = requested(mode, feature, place, monkeypatch)
    folder = train_run(config)
    log, lines = events(folder), metrics_of(folder)
    admitted = Counter(event["group"] for event in log if event["event"] == "admitted")
    gone = Counter(event["group"] for event in log if event["event"] in ("consumed", "filtered", "dropped"))
    assert max(gone.values()) == 1 and gone <= admitted
    assert config.asynchronous.on_stale == "drop" or gone == admitted
    bound = math.ceil(config.asynchronous.max_staleness_steps)
    assert max(event.get("staleness", 0) for event in log if event["event"] == "consumed") <= bound
    assert len([line for line in lines if "async/staleness_steps_max" in line]) == STEPS
    assert all(line.get("async/staleness_steps_max", 0) <= bound for line in lines)
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    consumed = Counter(event["step"] for event in log if event["event"] == "consumed")
    if config.group_filter.strategy in ("replace", "drop"):
        assert consumed.keys() == set(range(1, STEPS + 1)) and min(consumed.values()) < 2
    else:
        assert consumed == dict.fromkeys(range(1, STEPS + 1), config.data.prompts_per_step)


HELD_AGENT = (
    AGENT.split("def play")[0]
    + """
import pathlib, time

HERE = pathlib.Path(__file__).parent

def play(episode):
    said = ask(episode, [{"role": "user", "content": "go"}])
    try:
        (HERE / "held").touch(exist_ok=False)  # by the first of all episodes
    except FileExistsError:
        return float(len(said["content"]))
    end = time.monotonic() + 300
    while not (HERE / "dropped").exists():
        if time.monotonic() > end:
            raise RuntimeError("no group was dropped")
        time.sleep(0.01)
    return float(len(ask(episode, [{"role": "user", "content": "after the drop"}])["content"]))
"""
)


@pytest.mark.parametrize("mode", ["colocate", "separate"])
def test_the_episode_of_an_agent_whose_group_is_dropped_is_left(
    mode: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent holds its first episode, after a turn, until a group has been dropped: it is that episode's, its prompt is drawn
    again once, and the request that the agent makes afterwards is in no sample."""
    ended, drops = Ledger.end_step, list[int]()

    def end_step(ledger: Ledger, **given: Any) -> Any:
        gone = ended(ledger, **given)
        drops.extend(entry.serial for entry in gone)
        if gone:
            (place.folder / "dropped").touch()
        return gone

    monkeypatch.setattr(Ledger, "end_step", end_step)
    monkeypatch.setitem(
        FEATURES,
        "held_agent",
        lambda place: merged(
            FEATURES["agent"](place), {"asynchronous": {"on_stale": "drop", "max_staleness_steps": 1}}
        ),
    )
    (place.folder / "held_agent.py").write_text(HELD_AGENT)
    config = requested(mode, "held_agent", place, monkeypatch)
    settings = {**config.environment.settings, "function": f"{place.folder}/held_agent.py:play"}
    environment = config.environment.model_copy(update={"settings": settings})
    folder = train_run(config.model_copy(update={"environment": environment}))
    log = events(folder)
    assert drops and [event["group"] for event in log if event["event"] == "dropped"] == drops
    gone = Counter(event["group"] for event in log if event["event"] in ("consumed", "filtered", "dropped"))
    assert max(gone.values()) == 1
    [held] = [event for event in log if event["event"] == "dropped" and event["group"] == drops[0]]
    again = [event for event in log if event["event"] == "admitted" and event["prompt_id"] == held["prompt_id"]]
    assert [event["attempt"] for event in again][:2] == [0, 1]
    assert max(event["staleness"] for event in log if event["event"] == "consumed") <= 1
    samples = [json.loads(line) for file in folder.glob("samples/step_?.jsonl") for line in file.open()]
    assert len(samples) == STEPS * 2 * 3
    assert all("go" in str(row["prompt"]) for row in samples) and "after the drop" not in json.dumps(samples)
    assert metrics_of(folder)[-1]["async/dropped_groups"] == len(drops)
