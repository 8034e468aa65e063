"""Rules about teachers: each refusal with its key and its way out, each setting without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.config import RunConfig, SftConfig
from posttrain.plan.checks.distillation import distillation_problems, distillation_warnings

HERE = {"one": {"path": "teacher"}}
SERVED = {"one": {"endpoints": ["http://x:1"]}}


def rl(distillation: dict[str, Any], **sections: Any) -> RunConfig:
    given = {"model": {"path": "x"}, "data": {"train_files": ["x"]}, "distillation": {"teachers": HERE} | distillation}
    return RunConfig.model_validate(given | sections)


def texts(distillation: dict[str, Any]) -> SftConfig:
    given = {"model": {"path": "x"}, "data": {"train_files": ["x"]}, "distillation": {"teachers": HERE} | distillation}
    return SftConfig.model_validate(given)


def divergence(name: str, **settings: Any) -> dict[str, Any]:
    return {"divergence": {"name": name, **settings}}


PROBLEMS = [
    (rl(divergence("kl")), "there is no divergence called 'kl'", "distillation.divergence.name"),
    (rl({"teachers": {"one": {}}}), "neither a model nor a server", "distillation.teachers.one.path"),
    (
        rl({"teachers": {"one": {"path": "t", "coef": 0}}}),
        "nothing is learned from them",
        "distillation.teachers.one.coef",
    ),
    (
        rl(divergence("reverse_kl") | {"teachers": SERVED}),
        "a server gives a teacher's most likely tokens",
        "distillation.teachers.one.endpoints",
    ),
    (
        rl({"teachers": SERVED}, rollout={"temperature": 0.7}),
        "a server reports log-probs at temperature 1, and the teacher's is 0.7",
        "distillation.teachers.one.endpoints",
    ),
    (
        rl({"enters": "loss", **divergence("sampled_kl", estimator="k1")}),
        "the gradient of k1 does not depend on the teacher",
        "distillation.enters",
    ),
    (rl({}, loss={"name": "cross_entropy"}), "cross_entropy does not read advantages", "distillation.enters"),
    (
        rl(divergence("reverse_kl"), policy={"engine": "megatron"}),
        "no process of policy.engine=megatron has one",
        "distillation.divergence.name",
    ),
    (
        texts({"top_k": 1, "top_k_rest": "renormalize"}),
        "one token, renormalized, has probability 1 in student and teacher",
        "distillation.top_k",
    ),
    (texts(divergence("sampled_kl")), "these texts were not sampled by it", "distillation.divergence.name"),
    (
        texts({"teachers": {"one": {"path": "t", "data_sources": ["math"]}}}),
        "texts have no data source",
        "distillation.teachers.one.data_sources",
    ),
    (
        rl(divergence("reverse_kl") | {"teachers": {"one": {"path": "t", "devices": [1]}}}, placement={"devices": 2}),
        "is on other devices than the policy",
        "distillation.teachers.one.devices",
    ),
]


@pytest.mark.parametrize(("config", "said", "field"), PROBLEMS, ids=[said for _, said, _ in PROBLEMS])
def test_refused_with_its_key_and_a_way_out(config: RunConfig | SftConfig, said: str, field: str) -> None:
    found = [problem for problem in distillation_problems(config) if said in problem.what]
    assert [problem.field for problem in found] == [field]
    assert found[0].fix or "(known: " in found[0].what


def test_a_top_k_above_the_vocabulary_of_student_or_teacher(tiny_llama: Path) -> None:
    student = rl({"top_k": 1000, **divergence("forward_kl")}, model={"path": str(tiny_llama)})
    teacher = rl({"teachers": {"one": {"path": str(tiny_llama)}}, "top_k": 1000, **divergence("forward_kl")})
    for config, key in ((student, "model.path"), (teacher, "distillation.teachers.one.path")):
        (problem,) = [each for each in distillation_problems(config) if "top_k is 1000" in each.what]
        assert key in problem.what and problem.field == "distillation.top_k"


def test_rewards_that_choose_rows_are_refused_where_only_teachers_are_learned_from() -> None:
    for sections, field in (
        ({"group_filter": {"strategy": "refill"}}, "group_filter.strategy"),
        ({"resampling": {"weights": "power"}}, "resampling.weights"),
    ):
        assert field in [each.field for each in distillation_problems(rl({}, **sections))], field
        assert field not in [each.field for each in distillation_problems(rl({"with_rewards": True}, **sections))]


@pytest.mark.parametrize(
    "config",
    [
        rl({}),
        rl(
            divergence("forward_kl") | {"enters": "loss", "top_k": 20, "teachers": SERVED}, rollout={"temperature": 1.0}
        ),
        rl({"enters": "loss", **divergence("sampled_kl", estimator="k3+")}),
        texts({}),
        rl({"teachers": {}, "top_k": 5}),
    ],
)
def test_sound_ones_have_no_problem(config: RunConfig | SftConfig) -> None:
    assert list(distillation_problems(config)) == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (rl({"teachers": {}, "top_k": 5, "coef": 2.0}), "distillation.top_k, distillation.coef have no effect"),
        (rl({"top_k": 5}), "distillation.top_k has no effect: sampled_kl reads log-probs of the sampled tokens alone"),
        (rl(divergence("reverse_kl") | {"top_k_rest": "drop"}), "distillation.top_k is null"),
        (rl(divergence("reverse_kl", skew=0.3)), "distillation.divergence.skew: no effect, reverse_kl does not use it"),
        (
            rl(divergence("reverse_kl") | {"teachers": {"one": {"path": "t", "offload": True}}}),
            "the teacher is needed in every micro-batch",
        ),
        (
            rl({"teachers": {"one": {"path": "t", "timeout_s": 5}}}),
            "one.timeout_s has no effect: it names no endpoints",
        ),
        (rl({"teachers": {"one": SERVED["one"] | {"offload": True}}}), "one.offload has no effect: it is in servers"),
        (rl({}, advantage={"name": "rloo"}), "advantage has no effect: only teachers are learned from"),
        (rl({"enters": "loss", **divergence("reverse_kl")}, loss={"name": "gspo"}), "loss.name has no effect"),
        (rl({}, reward={"kl": {"coef": 0.1}}), "reward.kl.coef has no effect"),
    ],
)
def test_settings_without_effect_are_reported(config: RunConfig, said: str) -> None:
    assert any(said in warning for warning in distillation_warnings(config)), list(distillation_warnings(config))


def test_nothing_is_said_of_usual_settings() -> None:
    assert not list(distillation_warnings(rl({}))) and not list(distillation_warnings(rl({"teachers": {}})))
