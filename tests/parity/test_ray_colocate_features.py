"""Features of ``colocate`` on two workers of Ray: a critic, domains, a filter that refills. Within the bound, each group once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from async_features import FEATURES, Place
from ray_runs import lines_of
from test_async_runs import assert_counts_hold, events
from test_ray_colocate import STEPS, TWO, asked

from posttrain.build.train import train_run

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("feature", ["critic", "domains", "refill"])
def test_a_feature_trains_on_two_workers(address: str, tmp_path: Path, tiny_llama: Path, feature: str) -> None:
    sections = {"group_filter": {"strategy": "refill", "above_std": 0.3, "max_batches": 50}}
    if feature != "refill":
        sections = FEATURES[feature](Place(tmp_path, tiny_llama, tmp_path))
    policy = sections.pop("policy", {})
    sections |= {"placement": TWO["placement"], "policy": policy | {"engine": "fsdp"}}
    if feature == "critic":
        sections["critic"] |= {"engine": "fsdp", "sequences_per_mini_batch": 6}
    if feature == "domains":  # of 4 and 2 groups: sequences that two workers share
        for name, share in (("even", 4), ("odd", 2)):
            sections["data"]["domains"][name]["prompts_per_step"] = share
        sections["data"]["prompts_per_step"] = 6
        sections["policy"]["sequences_per_mini_batch"] = 18
    run = asked(tmp_path, tiny_llama, feature, address, **sections)
    folder = train_run(run)
    log, lines = events(folder), lines_of(folder)
    assert_counts_hold(log)
    consumed = Counter(event["step"] for event in log if event["event"] == "consumed")
    assert consumed == dict.fromkeys(range(1, STEPS + 1), run.data.prompts_per_step)
    assert 0 < max(event["staleness"] for event in log if event["event"] == "consumed") <= 2
    assert any(event["event"] == "filtered" for event in log) == (feature != "critic")
    if feature == "critic":
        assert all("critic/loss" in line for line in lines)
    if feature == "domains":
        assert {(line["domain/even/prompts"], line["domain/odd/prompts"]) for line in lines} == {(4.0, 2.0)}
