"""No secret is shown or saved: references to the environment stay references, typed secrets become some."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.cli.plan_plain import plan_json, plan_text
from posttrain.config.reading.compose import read_saved
from posttrain.config.shown import is_secret, shown
from posttrain.dialects.detect import read_config
from posttrain.dialects.entries import TRAIN
from posttrain.dialects.native.write import to_yaml

SECRET = "hunter2-from-the-environment"
FILE = """
model: {path: "${oc.env:MODEL_PATH}"}
data: {train_files: [a.parquet]}
run: {name: "n-${oc.env:JUDGE_KEY}", folder: "runs/${run.name}"}
reward:
  terms:
    - name: f
      path: my.py
      options:
        api_key: ${oc.env:JUDGE_KEY}
        again: ${reward.terms.0.options.api_key}
        all: {inner: "Bearer ${oc.env:JUDGE_KEY}"}
        copied: ${reward.terms.0.options.all}
        plain: "\\\\${oc.env:JUDGE_KEY}"
        size: 5
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    monkeypatch.setenv("MODEL_PATH", "m")
    (tmp_path / "run.yaml").write_text(FILE)
    return str(tmp_path / "run.yaml")


def test_a_reference_stays_a_reference_and_reads_back_equal(file: str, tmp_path: Path) -> None:
    loaded = read_config(file, [], None, entry=TRAIN)
    assert loaded.problems == ()
    options = loaded.config.reward.terms[0].options
    assert (options["api_key"], options["again"], options["copied"]["inner"]) == (SECRET, SECRET, f"Bearer {SECRET}")
    written = to_yaml(loaded.config)
    for text in (written, plan_text(loaded), plan_json(loaded), json.dumps(shown(loaded.config))):
        assert SECRET not in text
        assert text.count("${oc.env:JUDGE_KEY}") >= 6
    saved = tmp_path / "config.yaml"
    saved.write_text(written)
    again = read_config(str(saved), [], "native", entry=TRAIN)
    assert again.config.model_dump() == loaded.config.model_dump()
    assert to_yaml(again.config) == written
    assert again.config.reward.terms[0].options["plain"] == "${oc.env:JUDGE_KEY}"


def test_a_typed_secret_becomes_a_reference_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    term = "{name: f, path: my.py, options: {api_key: typed-in, headers: {Authorization: [typed-too]}, prompt_key: q}}"
    given = ["model.path=m", "data.train_files=[a.parquet]", f"reward.terms=[{term}]"]
    loaded = read_config(None, given, "native", entry=TRAIN)
    assert loaded.config.reward.terms[0].options["api_key"] == "typed-in"
    warned = "\n".join(loaded.warnings)
    assert "options.api_key holds a secret in plain text; ${oc.env:REWARD_TERMS_0_OPTIONS_API_KEY} is saved" in warned
    written = to_yaml(loaded.config)
    for text in (written, plan_text(loaded), plan_json(loaded), warned):
        assert "typed" not in text
    assert "prompt_key: q" in written
    saved = tmp_path / "config.yaml"
    saved.write_text(written)
    values, sections = read_saved(str(saved))  # of a tracker's process: without the variables
    assert values["reward"]["terms"][0]["options"]["api_key"] == "${oc.env:REWARD_TERMS_0_OPTIONS_API_KEY}"
    assert set(sections) == {"run", "tracking"}
    monkeypatch.setenv("REWARD_TERMS_0_OPTIONS_API_KEY", "typed-in")
    monkeypatch.setenv("REWARD_TERMS_0_OPTIONS_HEADERS_AUTHORIZATION_0", "typed-too")
    again = read_config(str(saved), [], "native", entry=TRAIN)
    assert again.config.model_dump() == loaded.config.model_dump()


def test_other_dialects_keep_references_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_TITLE", SECRET)
    given = [
        "trainer.experiment_name=${oc.env:RUN_TITLE}",
        "data.train_files=a.parquet",
        "actor_rollout_ref.model.path=m",
    ]
    loaded = read_config(None, given, "verl", entry=TRAIN)
    assert SECRET in loaded.config.run.name
    assert SECRET not in to_yaml(loaded.config)
    assert "${oc.env:RUN_TITLE}" in shown(loaded.config)["run"]["name"]


SECRETS = [
    *(
        "key",
        "token",
        "secret",
        "password",
        "api_key",
        "apikey",
        "apiKey",
        "API-KEY",
        "hf_token",
        "passwd",
        "judge_api_keys",
    ),
    *("clientSecret", "Authorization", "aws_secret_access_key", "WANDB_API_KEY"),
]
OTHERS = [
    *(
        "prompt_key",
        "reward_fn_key",
        "enable_thinking_key",
        "audio_key",
        "eos_token",
        "pad_token",
        "max_tokens",
        "api_key_env",
        "token_file",
        "keyboard",
        "keys_of",
        "reward_keys",
    ),
    *("sort_key", "secretary", "", "tokens_per_second", "tool_key_path"),
]


def test_which_names_hold_secrets() -> None:
    assert [name for name in SECRETS if not is_secret(name)] == []
    assert [name for name in OTHERS if is_secret(name)] == []
