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
        (["--lr", "1e-5"], "there is no option --lr; an override has no dashes: policy.optimizer.lr=1e-5; --help lists"),
        (["--lr=1e-5"], "there is no option --lr; an override has no dashes: policy.optimizer.lr=1e-5"),
        (["--learning-rate=1e-5"], "there is no option --learning-rate; an override has no dashes: policy.optimizer.lr=1e-5"),
        (["--rollout.temperature", "1"], "an override has no dashes: rollout.temperature=1"),
        (["--verbose"], "there is no option --verbose; --help lists the options"),
        (["loss.name=GRPO"], "GRPO is an advantage estimator, not a policy loss, at override loss.name=GRPO; use "
         "advantage.name=grpo loss.name=ppo_clip"),
        (["reward.terms=[{name: GSM8K}]"], "no reward called 'GSM8K', at override reward.terms=[{name: GSM8K}]; write gsm8k"),
        (["advantage.name=dapo"], "it is several settings here, at override advantage.name=dapo; use advantage.name=grpo"),
        (["loss.name=dr_grpo"], "use advantage.name=grpo advantage.normalize_by_std=false loss.name=ppo_clip"),
        (["advantage.name=ppo"], "use advantage.name=gae loss.name=ppo_clip"),
        (["learning_rate=1e-5"], "no key learning_rate, at override learning_rate=1e-5; did you mean policy.optimizer.lr?"),
        (["num_generations=4"], "did you mean rollout.samples_per_prompt?"),
        (["loss.beta=0.1"], "did you mean loss.kl_coef? (it weighs the KL to the reference)"),
        (["deepspeed=ds.json"], "did you mean policy.engine? (policy.engine=deepspeed, with its settings in policy.eng"),
        (["loss.name=rloo"], "use advantage.name=rloo loss.name=ppo_clip"),
        (["advantage.name=cispo"], "cispo is a policy loss, not an advantage estimator, at override advantage.name=cispo; use "
         "loss.name=cispo"),
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


def test_names_of_other_trainers_stand_for_keys_that_exist() -> None:
    from posttrain.config import RunConfig, SftConfig
    from posttrain.config.reading.familiar import KEYS, familiar_fix
    from posttrain.config.reading.keys import known_keys

    here = {**known_keys(RunConfig), **known_keys(SftConfig)}
    assert {name: key for name, text in KEYS.items() if (key := text.partition("; ")[0]) not in here} == {}
    assert not set(KEYS) & {key for key in here if "." not in key}, "a key of ours needs no translation"
    assert familiar_fix("train_batch_size", known_keys(SftConfig)) == "did you mean data.sequences_per_step?"


def test_recipes_are_settings_that_plan(tmp_path: Path) -> None:
    from posttrain.dialects import native
    from posttrain.plan.checks.names import RECIPES

    for recipe in RECIPES.values():
        assert native.read(None, [*GIVEN, *recipe.split()]).problems == (), recipe


def test_a_key_of_another_trainer_in_a_file_of_verl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key, means in {
        "num_generations": "actor_rollout_ref.rollout.n",
        "learning_rate": "actor_rollout_ref.actor.optim.lr",
    }.items():
        assert run(["--dialect", "verl", f"{key}=4"]) == 2
        assert f"there is no key {key} in verl 0.4 or later, at override {key}=4; did you mean {means}?" in " ".join(
            capsys.readouterr().err.split()
        )
