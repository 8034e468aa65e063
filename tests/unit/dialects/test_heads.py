"""Heads for several tokens ahead: left out where their loss does not reach the policy, else refused."""

from __future__ import annotations

import pytest

from posttrain.dialects.detect import read_config

VERL = "actor_rollout_ref.model.mtp"


@pytest.mark.parametrize(
    ("dialect", "section", "overrides", "refused"),
    [
        ("verl", f"{VERL}.enable_train", (f"++{VERL}.enable=True", f"++{VERL}.enable_rollout=True"), False),
        ("verl", f"{VERL}.enable_train",
         (f"++{VERL}.enable=True", f"++{VERL}.enable_train=True", f"++{VERL}.detach_encoder=True"), False),
        ("verl", f"{VERL}.enable_train", (f"++{VERL}.enable=True", f"++{VERL}.enable_train=True"), True),
        # off: nothing is trained
        ("verl", f"{VERL}.enable_train", (f"++{VERL}.enable_train=True",), False),
        ("skyrl", "trainer.mtp.enabled", ("trainer.mtp.enabled=true",), False),
        ("roll", "actor_train.mtp_training_mode", ("actor_train.mtp_training_mode=standalone", "pretrain=m"), False),
        ("roll", "actor_train.mtp_training_mode", ("actor_train.mtp_training_mode=joint", "pretrain=m"), True),
    ],
)  # fmt: skip
def test_heads(dialect: str, section: str, overrides: tuple[str, ...], refused: bool) -> None:
    loaded = read_config(None, overrides, dialect, skip_files=True)
    assert [problem.field for problem in loaded.problems if ".mtp" in problem.field] == [section] * refused
    switch = next((key for key in ("enable", "enabled") if any(f"mtp.{key}=" in text for text in overrides)), "")
    if not refused and (switch or dialect == "roll"):
        assert [
            each for each in loaded.ignored if each.key.endswith((f"mtp.{switch}", "mtp_training_mode")) and each.asks
        ]


def test_fine_tuning_leaves_them_out_too() -> None:
    heads = ("++model.mtp.enable=True", "++model.mtp.enable_train=True")
    base = ("data.train_files=x.parquet", "++model.path=m", "engine=megatron")
    alone = read_config(
        "sft_trainer_engine", [*base, *heads, "++model.mtp.detach_encoder=True"], "verl", skip_files=True
    )
    assert not [problem for problem in alone.problems if ".mtp" in problem.field]
    joint = read_config("sft_trainer_engine", [*base, *heads], "verl", skip_files=True)
    assert [problem.field for problem in joint.problems if ".mtp" in problem.field] == ["model.mtp.enable_train"]
