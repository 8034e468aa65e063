"""What the start of a run sees of its data: how many prompts it will use, and tasks that nothing scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.request import TrainRequest, read_request
from posttrain.errors import RequestError


def read(folder: Path, *overrides: str, source: str = "openai/gsm8k", reward: str = "by_data_source") -> TrainRequest:
    rows: list[dict[str, Any]] = [
        {"prompt": f"{i}?", "data_source": source, "reward_model": {"ground_truth": str(i)}} for i in range(20)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(
        f"model: {{path: org/name}}\ndata: {{train_files: {folder}/a.jsonl}}\n"
        f"run: {{folder: {folder}/out}}\nreward: {{terms: [{{name: {reward}}}]}}\n"
    )
    return read_request([str(folder / "run.yaml"), *overrides], None, look_at_files=True)


def test_max_prompts_counts(tmp_path: Path) -> None:
    assert read(tmp_path).training_prompts == 20
    cut = read(tmp_path, "data.max_prompts=17")
    assert (cut.training_prompts, cut.batches.steps_per_epoch) == (17, 2)  # 17 // 8
    assert read(tmp_path, "data.max_prompts=100").training_prompts == 20
    with pytest.raises(RequestError, match="hold 5 prompts, fewer than the 8 of one step"):
        read(tmp_path, "data.max_prompts=5")


def test_a_task_that_nothing_scores_stops_the_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        read(tmp_path, source="openai/gsm9k")
    assert "no scorer for data source 'openai/gsm9k'" in str(caught.value)
    assert "run.yaml:4" in str(caught.value)
    assert read(tmp_path, source="openai/gsm9k", reward="gsm8k").training_prompts == 20  # every source is meant


def test_rows_of_no_domain_need_no_reward_and_a_domain_needs_rows(tmp_path: Path) -> None:
    """Rows of chat are never drawn, so that nothing has to score them."""
    length = "run.total_steps=2"
    read(tmp_path, source="chat", reward="gsm8k")
    (tmp_path / "b.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace("chat", "openai/gsm8k"))
    files = f"data.train_files=[{tmp_path}/a.jsonl,{tmp_path}/b.jsonl]"
    scored = "reward.terms=[{name: gsm8k, data_sources: [openai/gsm8k]}]"
    domain = "data.domains={math: {sources: [openai/gsm8k], prompts_per_step: 8}}"
    assert read(tmp_path, files, scored, domain, length, source="chat").training_prompts == 40
    with pytest.raises(RequestError, match="no reward term counts for data source 'chat'"):
        read(tmp_path, files, scored, length, source="chat")
    with pytest.raises(RequestError) as caught:
        read(tmp_path, files, scored, domain.replace("gsm8k]", "gsm9k]"), length, source="chat")
    assert "the domain math has no row: no training file holds a data source openai/gsm9k" in str(caught.value)
    assert "did you mean openai/gsm8k?" in str(caught.value)
