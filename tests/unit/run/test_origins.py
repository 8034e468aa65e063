"""run.json says who started a run, without secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.config import RunConfig
from posttrain.run.origins import command_text
from posttrain.run.run_folder import RunFolder


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["/usr/bin/posttrain", "train", "run.yaml", "a.lr=1e-5"], "posttrain train run.yaml a.lr=1e-5"),
        (["posttrain", "reward.terms.0.options.api_key=sk-123"], "posttrain 'reward.terms.0.options.api_key=***'"),
        (
            ["posttrain", "+tracking.wandbToken=abc", "x.password=p"],
            "posttrain '+tracking.wandbToken=***' 'x.password=***'",
        ),
        (["/lib/posttrain/__main__.py", "sft", "a b.yaml"], "posttrain sft 'a b.yaml'"),
        (["posttrain", "--token", "abc", "--here"], "posttrain --token '***' --here"),
        (["posttrain", "--api-key=abc"], "posttrain '--api-key=***'"),
        (["posttrain", "a.api_key=${oc.env:KEY}"], "posttrain 'a.api_key=${oc.env:KEY}'"),
        (["posttrain", "data.prompt_key=question"], "posttrain data.prompt_key=question"),
        (["posttrain", "terms=[{options: {key: hidden}}]"], "posttrain 'terms=[{options: {key: ***}}]'"),
    ],
)
def test_a_command_is_kept_without_its_secrets(arguments: list[str], text: str) -> None:
    assert command_text(arguments, ["hidden"]) == text


def test_every_start_is_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terms = [{"name": "exact_match", "options": {"api_key": "sk-typed"}}]
    tree = {"model": {"path": "a"}, "data": {"train_files": "b"}, "run": {"folder": str(tmp_path)}}
    config = RunConfig.model_validate(tree | {"reward": {"terms": terms}})
    for first_step in (1, 4):
        monkeypatch.setattr("sys.argv", ["posttrain", "train", f"run.yaml{first_step}", "terms=[{api_key: sk-typed}]"])
        folder = RunFolder(config)
        folder.begin(first_step=first_step, total_steps=9, device="cpu")
        folder.end("done")
    text = (tmp_path / "run.json").read_text()
    about = json.loads(text)
    assert [start["command"].split()[2] for start in about["starts"]] == ["run.yaml1", "run.yaml4"]
    assert about["command"] == about["starts"][1]["command"] and about["host"] == about["starts"][1]["host"]
    assert about["ended"] >= about["starts"][1]["time"] and about["starts"][0]["host"]
    assert "sk-typed" not in text
