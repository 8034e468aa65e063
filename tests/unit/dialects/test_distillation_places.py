"""Problems with teachers and divergences are reported at the key of verl or ROLL that is wrong, not at the switch beside it."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.dialects import roll, verl
from posttrain.dialects.entries import SFT
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect

TEXTS = ("pretrain=m", "sequence_length=512", "sft_train.data_args.file_name=a.jsonl", "teacher_pretrain=big")


def texts(*overrides: str) -> LoadedConfig[Any]:
    return read_dialect(roll.DIALECT, None, (*TEXTS, *overrides), entry=SFT)


@pytest.mark.parametrize(
    ("objective", "key", "value"),
    [("skewed_forward_kl", "skew_lambda", "1.5"), ("adaptive_kl", "adaptive_kl_alpha", "7.0")],
)
def test_a_wrong_setting_of_a_divergence_is_reported_at_its_own_key(objective: str, key: str, value: str) -> None:
    [problem] = texts(f"kd_objective={objective}", f"{key}={value}").problems
    assert problem.where == f"override {key}={value}"


def test_settings_of_other_divergences_are_reported_as_ignored() -> None:
    loaded = texts("kd_objective=forward_kl", "skew_lambda=0.3", "adaptive_kl_alpha=0.3")
    assert {one.key: one.reason for one in loaded.ignored if one.key in ("skew_lambda", "adaptive_kl_alpha")} == {
        "skew_lambda": "kd_objective=forward_kl does not read it",
        "adaptive_kl_alpha": "kd_objective=forward_kl does not read it",
    }


def test_each_of_several_teachers_has_a_place_of_its_own() -> None:
    models = "+distillation.teacher_models"
    loaded = read_dialect(
        verl.DIALECT, None, ("+distillation.enabled=true", f"{models}.a.model_path=x", f"{models}.b.model_path=y")
    )
    found = {problem.what.split()[2]: problem.where for problem in loaded.problems if "one of several" in problem.what}
    assert found == {name: f"override {models}.{name}.model_path={path}" for name, path in (("a", "x"), ("b", "y"))}


def test_teachers_that_are_no_section_are_one_problem() -> None:
    loaded = read_dialect(verl.DIALECT, None, ("+distillation.enabled=true", "+distillation.teacher_models=3"))
    assert [each.where for each in loaded.problems if each.field.startswith("distillation")] == [
        "override +distillation.teacher_models=3"
    ]
