"""Problems with teachers and divergences are reported at the key of verl or ROLL that is wrong, not at the switch beside it."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config.distillation import TeacherConfig
from posttrain.dialects import roll, skyrl, verl
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


SAMPLED = (
    "data.train_files=a.parquet",
    "actor_rollout_ref.model.path=m",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=2",
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "+distillation.enabled=true",
)
ONE = "+distillation.teacher_models={teacher_model: {model_path: x}}"
TWO = (
    "+distillation.teacher_models={a: {model_path: x, key: m, num_replicas: 1}, "
    "b: {model_path: y, key: c, num_replicas: 1, inference: {tensor_model_parallel_size: 2}}}"
)


def sampled(*overrides: str, here: bool = False) -> LoadedConfig[Any]:
    return read_dialect(verl.DIALECT, None, (*SAMPLED, *overrides), here=here)


def pool(nodes: int, per_node: int) -> tuple[str, str]:
    return f"+distillation.nnodes={nodes}", f"+distillation.n_gpus_per_node={per_node}"


def devices_of(loaded: LoadedConfig[Any]) -> dict[str, list[int] | None]:
    assert not loaded.problems
    return {name: each.devices for name, each in loaded.config.distillation.teachers.items()}


def test_verls_teachers_have_the_devices_of_their_pool() -> None:
    loaded = sampled(ONE, *pool(2, 2))  # 0 and 1 are the policy's
    assert devices_of(loaded) == {"teacher_model": [2, 3, 4, 5]}
    assert (loaded.config.policy.devices, loaded.config.placement.devices) == ([0, 1], 6)
    assert devices_of(sampled(TWO, *pool(1, 3))) == {"a": [2], "b": [3, 4]}  # 1 replica of 1 device, 1 of 2
    apart = ("actor_rollout_ref.rollout.nnodes=1", "+actor_rollout_ref.rollout.n_gpus_per_node=2")
    assert devices_of(sampled(ONE, *apart)) == {"teacher_model": [0, 1]}  # beside the policy, not the sampler
    assert devices_of(sampled(ONE)) == {"teacher_model": None}


@pytest.mark.parametrize(("own_pool", "devices"), [(True, [2, 3, 4, 5]), (False, None)])
def test_the_one_teacher_of_spring_2026(own_pool: bool, devices: list[int] | None) -> None:
    """verl between 0.7 and 0.8: distillation.teacher_model, whose pool is its own."""
    one = "+distillation.teacher_model"
    keys = (
        f"{one}.model_path=x",
        f"{one}.enable_resource_pool={own_pool}",
        f"{one}.nnodes=2",
        f"{one}.n_gpus_per_node=2",
    )
    loaded = sampled(*keys, f"{one}.inference.max_num_seqs=64")
    assert devices_of(loaded) == {"teacher_model": devices}
    assert loaded.config.distillation.teachers["teacher_model"].path == "x"
    (problem,) = sampled(*keys, f"{one}.modl_path=y").problems
    assert "a teacher has no key modl_path" in problem.what


def test_a_pool_that_teachers_do_not_fill_is_refused() -> None:
    (problem,) = sampled(TWO, *pool(1, 4)).problems
    assert problem.what.startswith("the teachers have 4 devices") and problem.what.endswith("are a 1, b 2")
    assert problem.where == "override +distillation.n_gpus_per_node=4"


def test_here_takes_the_devices_of_teachers() -> None:
    loaded = sampled(ONE, *pool(1, 2), here=True)
    assert devices_of(loaded) == {"teacher_model": None}
    assert any("distillation.teachers.teacher_model.devices: all" in text for text in loaded.changes)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("modl_path", "x", "a teacher has no key modl_path"),
        ("num_replicas", "-1", "must be int from 0 up to 10000 | null, not -1"),
        ("num_replicas", ".nan", "must be int from 0"),
        ("key", "[1]", "must be text | null, not [1]"),
        ("inference", "3", "must be section | null, not 3"),
    ],
)
def test_a_wrong_setting_of_a_teacher_is_named(key: str, value: str, said: str) -> None:
    (problem,) = sampled(ONE, f"++distillation.teacher_models.teacher_model.{key}={value}").problems
    assert said in problem.what and f"teacher_model.{key}" in problem.where


OPD = (
    "pretrain=m",
    "response_length=100",
    "student_train.data_args.file_name=a.jsonl",
    "is_pure_opd=true",
    "teacher.model_args.model_name_or_path=big",
    "student_train.strategy_args.strategy_name=fsdp2_train",
)


def opd(*overrides: str) -> LoadedConfig[Any]:
    return read_dialect(roll.DIALECT, None, (*OPD, *overrides))


def test_rolls_teachers_need_no_reward_and_have_their_own_devices() -> None:
    mapped = ("student_train.device_mapping=[0,1]", "student_infer.device_mapping=[0,1]")
    apart = opd(*mapped, "teacher.device_mapping=[2]", "teacher.infer_batch_size=4")
    assert devices_of(apart) == {"teacher": [2]}
    assert (apart.config.placement.devices, apart.config.policy.devices) == (3, [0, 1])
    assert apart.config.distillation.teachers["teacher"].sequences_per_micro_batch_per_device == 4
    assert apart.config.reward.terms == []
    assert devices_of(opd(*mapped)) == {"teacher": None}
    sampler = ("student_train.device_mapping=[0,1]", "student_infer.device_mapping=[2,3]")
    assert devices_of(opd(*sampler)) == {"teacher": [0, 1]}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("teacher.device_mapping=[0,0]", "names device 0 twice"),
        ("teacher.opd_kl_coef=text", "teacher.opd_kl_coef must be float | null, not 'text'"),
        ("teacher.tag_included=math", "teacher.tag_included must be list of text, not 'math'"),
        ("teacher.model_args.model_name_or_path=[]", "must be text | null, not []"),
        ("teacher.infer_batch_size=0", "must be at least 1, not 0"),
    ],
)
def test_a_wrong_setting_of_rolls_teacher_is_one_problem(wrong: str, said: str) -> None:
    (problem,) = opd(f"++{wrong}").problems
    assert said in problem.what and problem.where == f"override ++{wrong}"


def test_a_misspelt_setting_of_a_teacher_is_ignored_with_a_guess() -> None:
    (ignored,) = [one for one in opd("+teacher.opd_kl_coeff=0.5").ignored if one.key == "teacher.opd_kl_coeff"]
    assert ignored.reason == "an unknown key; did you mean opd_kl_coef?"


def test_a_teacher_of_texts_has_a_size_of_its_own() -> None:
    size = "teacher.training_args.per_device_train_batch_size"
    assert texts(f"{size}=3").config.distillation.teachers["teacher"].sequences_per_micro_batch_per_device == 3
    (problem,) = texts(f"{size}=0").problems
    assert problem.where == f"override {size}=0"
    assert not texts("teacher.strategy_args.strategy_name=megatron_infer").problems
    (problem,) = texts("logits_topk=1").problems
    assert problem.where == "override logits_topk=1"


def test_skyrls_teacher_has_the_place_of_its_reference() -> None:
    base = (
        "data.train_data=[a.parquet]",
        "trainer.policy.model.path=m",
        "trainer.ref.model.path=big",
        "trainer.algorithm.advantage_estimator=no_op",
        "trainer.algorithm.use_kl_in_reward=true",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.micro_forward_batch_size_per_gpu=3",
    )
    place = "trainer.placement"
    sizes = (f"{place}.policy_num_gpus_per_node=2", f"{place}.ref_num_gpus_per_node=2")

    def teacher(*overrides: str) -> TeacherConfig:
        loaded = read_dialect(skyrl.DIALECT, None, (*base, *sizes, *overrides))
        assert not [problem for problem in loaded.problems if "placement" in problem.field]
        return loaded.config.distillation.teachers["ref"]

    apart = f"{place}.colocate_all=false"
    assert teacher(apart, f"{place}.colocate_policy_ref=false").devices == [2, 3]
    assert teacher(apart, f"{place}.colocate_policy_ref=true").devices == [0, 1]
    engines = ("generator.num_inference_engines=2", "generator.inference_engine_tensor_parallel_size=1")
    together = teacher(f"{place}.colocate_all=true", *engines)
    assert (together.devices, together.sequences_per_micro_batch_per_device) == (None, 3)
