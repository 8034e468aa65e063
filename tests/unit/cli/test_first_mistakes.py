"""What a first configuration gets wrong: the message names what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli.app import main

GIVEN = ["model.path=m", "data.train_files=[a.parquet]"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["reward.terms=my_rewards.py"], "write [{path: my_rewards.py, name: NAME_OF_THE_FUNCTION}]"),
        (["reward.terms=[my_rewards.py]"], "write {path: my_rewards.py, name: NAME_OF_THE_FUNCTION}"),
        (["reward.terms=gsm8k"], "write [{name: gsm8k}]"),
        (["reward.terms=[gsm8k]"], "write {name: gsm8k}"),
        (["loss.name=grpo"], "grpo is an advantage estimator, not a policy loss, at override loss.name=grpo; use "
         "advantage.name=grpo loss.name=ppo_clip"),
        (["--lr", "1e-5"], "there is no option --lr; an override has no dashes: lr=1e-5; --help lists the options"),
        (["--lr=1e-5"], "there is no option --lr; an override has no dashes: lr=1e-5"),
        (["--verbose"], "there is no option --verbose; --help lists the options"),
        (["loss.name=rloo"], "use advantage.name=rloo loss.name=ppo_clip"),
        (["advantage.name=cispo"], "cispo is a policy loss, not an advantage estimator, at override advantage.name=cispo; use "
         "loss.name=cispo"),
        (["data.train_files=openai/gsm8k"], "data sets of the hub are not read by their names yet, at override "
         "data.train_files=openai/gsm8k; download it, and name its parquet"),
    ],
)  # fmt: skip
def test_the_fix_is_named(
    overrides: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*GIVEN, *overrides]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_one_mistake_is_one_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"prompt": "?", "ground_truth": "1"}\n')
    assert run(["model.path=null", "data.train_files=[a.jsonl]"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "path must be text, not null" in err
    assert "problems" not in err and "run.folder" not in err


def run(arguments: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr("sys.argv", ["posttrain", "plan", *arguments])
        main()
    return int(ended.value.code or 0)
