"""Rules about teachers: where they are, what the divergence can read, and settings without effect."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import RunConfig, SftConfig, TrainingConfig
from posttrain.config.algorithm import AdvantageConfig
from posttrain.config.base import Section
from posttrain.config.distillation import QUEUE, ROLE, DistillationConfig, OnPolicyDistillationConfig, TeacherConfig
from posttrain.config.roles import teachers_of
from posttrain.errors import Problem, RequestError
from posttrain.plan.engine import engine_plan, engine_that, is_split_as_policy, teacher_engine
from posttrain.plan.model_shape import read_shape
from posttrain.plan.roles import place
from posttrain.registry import DIVERGENCES

AT = "distillation"
OF_DISTRIBUTIONS = ("top_k", "temperature", "min_logprob")  # read by divergences over the vocabulary alone

# Settings of a teacher in servers alone
OF_SERVED = ("served_model", "api_key_variable", "timeout_s")
# Settings of a teacher that the run loads
OF_LOADED = ("devices", "offload", "engine_options", "max_tokens_per_micro_batch")


def distillation_problems(config: TrainingConfig) -> Iterator[Problem]:
    """Yield what is wrong with the teachers of a run."""
    section = config.distillation
    if not section.used:
        return
    yield from _divergence_problems(section)
    for name, teacher in section.teachers.items():
        yield from _teacher_problems(config, f"{AT}.teachers.{name}", teacher)
    if all(teacher.coef == 0 for teacher in section.teachers.values()):
        first = next(iter(section.teachers))
        what = "every teacher has the weight 0, so nothing is learned from them"
        yield Problem(what, fix="give one of them a weight", field=f"{AT}.teachers.{first}.coef")
    yield from _top_k_problems(config)
    yield from _engine_problems(config)
    if isinstance(section, OnPolicyDistillationConfig):
        yield from _on_policy_problems(config, section)
    elif section.of_sampled_tokens:
        what = (
            f"{section.divergence.name} reads tokens that the student sampled, and these texts were not sampled by it"
        )
        yield Problem(what, fix=f"use {AT}.divergence.name=forward_kl", field=f"{AT}.divergence.name")


def _divergence_problems(section: DistillationConfig) -> Iterator[Problem]:
    chosen = section.divergence
    if section.top_k == 1 and section.top_k_rest == "renormalize" and not section.of_sampled_tokens:
        what = "one token, renormalized, has probability 1 in student and teacher, so nothing is learned"
        yield Problem(what, fix=f"use {AT}.top_k=2 or more, or {AT}.top_k_rest=bucket", field=f"{AT}.top_k")
    if chosen.path is None and chosen.name not in DIVERGENCES.names():
        yield DIVERGENCES.problem(chosen.name, f"{AT}.divergence.name")
        return
    try:
        about = DIVERGENCES.describe(chosen.name, chosen.path)
    except RequestError as error:
        yield from error.problems
        return
    for name, setting in about.settings.items():
        if setting.required and name not in chosen.settings:
            field = f"{AT}.divergence.{name}"
            yield Problem(
                f"{chosen.name} needs {field}", fix=f"give it, such as {field}={setting.example()}", field=field
            )


def _teacher_problems(config: TrainingConfig, at: str, teacher: TeacherConfig) -> Iterator[Problem]:
    if teacher.path is None and not teacher.endpoints:
        yield Problem("the teacher has neither a model nor a server", fix=f"give {at}.path", field=f"{at}.path")
    if teacher.data_sources and isinstance(config, SftConfig):
        what = "texts have no data source, so a teacher cannot have some of them"
        yield Problem(what, fix=f"leave {at}.data_sources out", field=f"{at}.data_sources")
    if not teacher.endpoints:
        return
    section = config.distillation
    if teacher.queued:
        yield from _queue_problems(section, at, teacher)
    if section.beside_the_student:
        what = "a server gives a teacher's most likely tokens, and the divergence compares the whole vocabulary"
        fix = f"use {AT}.top_k=20, or {AT}.divergence.name=sampled_kl"
        yield Problem(what, fix=fix, field=f"{at}.endpoints")
    sampling = config.rollout.temperature if isinstance(config, RunConfig) else 1.0
    given = section.temperature if section.temperature is not None and not section.of_sampled_tokens else sampling
    if given * section.teacher_temperature != 1:
        what = (
            f"a server reports log-probs at temperature 1, and the teacher's is {given * section.teacher_temperature:g}"
        )
        fix = f"use {AT}.teacher_temperature={1 / given:g}, or load the teacher here ({at}.path without endpoints)"
        yield Problem(what, fix=fix, field=f"{at}.endpoints")


def _queue_problems(section: DistillationConfig, at: str, teacher: TeacherConfig) -> Iterator[Problem]:
    """Report what servers of verl's recipe gkd cannot give."""
    others = [url for url in teacher.endpoints if not url.startswith(QUEUE)]
    if others:
        what = f"{at}.endpoints holds addresses of two kinds of servers, {QUEUE}... and {others[0]}"
        yield Problem(what, fix="keep one kind, or make two teachers of them", field=f"{at}.endpoints")
    if section.of_sampled_tokens:
        what = f"a server at {QUEUE} gives a teacher's most likely tokens, and {section.divergence.name} reads the sampled ones"
        fix = f"use {AT}.divergence.name=forward_kl with {AT}.top_k=256"
        yield Problem(what, fix=fix, field=f"{AT}.divergence.name")


def _top_k_problems(config: TrainingConfig) -> Iterator[Problem]:
    section = config.distillation
    if section.top_k is None or section.of_sampled_tokens:
        return
    models = {"model.path": config.model.path}
    models |= {f"{AT}.teachers.{name}.path": each.path for name, each in section.teachers.items() if each.path}
    for field, path in models.items():
        shape = read_shape(path)
        if shape is not None and section.top_k > shape.vocabulary:
            what = (
                f"{AT}.top_k is {section.top_k}, and the vocabulary of {path} ({field}) has {shape.vocabulary} tokens"
            )
            yield Problem(what, fix=f"use at most {AT}.top_k={shape.vocabulary}", field=f"{AT}.top_k")
            return


def _engine_problems(config: TrainingConfig) -> Iterator[Problem]:
    section, engine = config.distillation, config.policy.engine
    if section.beside_the_student and not engine_plan(engine).has_full_logits:
        other = engine_that(lambda plan: plan.shares_out and plan.has_full_logits)
        what = f"{AT}.divergence.name={section.divergence.name} compares whole distributions, and no process of policy.engine="
        what += f"{engine} has one"
        fix = f"compare the teacher's most likely tokens ({AT}.top_k=64), or use policy.engine={other}"
        yield Problem(what, fix=fix, field=f"{AT}.divergence.name")
    plan, _ = place(config)
    policy = plan.role("policy") if plan else None
    if plan is None or policy is None or not section.beside_the_student:
        return
    for role in plan.roles:
        if role.role.startswith("teacher ") and role.devices != policy.devices:
            field = f"{AT}.teachers.{role.role.removeprefix('teacher ')}.devices"
            what = f"the {role.role} is compared over the whole vocabulary, and is on other devices than the policy"
            fix = f"use the policy's devices, or compare its most likely tokens ({AT}.top_k=64)"
            yield Problem(what, fix=fix, field=field)


def _on_policy_problems(config: TrainingConfig, section: OnPolicyDistillationConfig) -> Iterator[Problem]:
    assert isinstance(config, RunConfig)
    estimator = section.divergence.settings.get("estimator")
    if section.enters == "loss" and section.divergence.name == "sampled_kl" and estimator == "k1":
        what = "the gradient of k1 does not depend on the teacher: as a loss it teaches nothing"
        fix = f"use {AT}.enters=advantage, or {AT}.divergence.estimator=k1+"
        yield Problem(what, fix=fix, field=f"{AT}.enters")
    if section.enters == "advantage" and "advantages" not in config.loss.about.inputs and config.loss.is_known:
        what = f"{AT}.enters=advantage has no effect: {config.loss.name} does not read advantages"
        yield Problem(what, fix=f"use {AT}.enters=loss, or another loss", field=f"{AT}.enters")
    if section.alone and config.resampling.weights != "none":
        what = "responses are drawn again by their rewards, and only teachers are learned from"
        fix = f"use resampling.weights=none, or {AT}.with_rewards=true"
        yield Problem(what, fix=fix, field="resampling.weights")
    if section.alone and config.group_filter.strategy != "none":
        what = "groups are filtered by rewards, and only teachers are learned from"
        fix = f"use group_filter.strategy=none, or {AT}.with_rewards=true"
        yield Problem(what, fix=fix, field="group_filter.strategy")


def distillation_warnings(config: TrainingConfig) -> Iterator[str]:
    """Report settings of teachers that have no effect, in sentences."""
    section = config.distillation
    default = type(section)()
    if not section.used:
        changed = [f"{AT}.{name}" for name in type(section).model_fields if _differs(section, default, name)]
        if changed:
            yield f"{', '.join(changed)} {'have' if len(changed) > 1 else 'has'} no effect: {AT}.teachers names none"
        return
    if section.of_sampled_tokens:
        for name in OF_DISTRIBUTIONS:
            if getattr(section, name) is not None:
                yield f"{AT}.{name} has no effect: {section.divergence.name} reads log-probs of the sampled tokens alone"
    if section.top_k is None and section.top_k_rest != default.top_k_rest:
        yield f"{AT}.top_k_rest has no effect: {AT}.top_k is null"
    for name, teacher in section.teachers.items():
        if teacher.offload and section.beside_the_student:
            yield f"{AT}.teachers.{name}.offload has no effect: the teacher is needed in every micro-batch"
        yield from _split_warnings(config, name)
        unread, why = (OF_LOADED, "it is in servers") if teacher.endpoints else (OF_SERVED, "it names no endpoints")
        for key in unread:
            if getattr(teacher, key) != TeacherConfig.model_fields[key].default:
                yield f"{AT}.teachers.{name}.{key} has no effect: {why}"
    if section.divergence.unread and section.divergence.is_known:
        names = ", ".join(f"{AT}.divergence.{name}" for name in section.divergence.unread)
        yield f"{names}: no effect, {section.divergence.name} does not use it"
    if isinstance(section, OnPolicyDistillationConfig) and isinstance(config, RunConfig):
        yield from _on_policy_warnings(config, section)


def _split_warnings(config: TrainingConfig, name: str) -> Iterator[str]:
    role = f"{ROLE}{name}"
    if role in teachers_of(config) and not is_split_as_policy(config, role):
        count = len(config.distillation.teachers[name].devices or ())
        over = "whole" if count == 1 else f"sharded over them by {teacher_engine(config, role)}"
        where = f"on {count} device{'s' * (count > 1)} of its own"
        yield f"the teacher {name} is {where}, too few for the policy's split: it is {over}"


def _on_policy_warnings(config: RunConfig, section: OnPolicyDistillationConfig) -> Iterator[str]:
    if not section.alone:
        return
    if config.advantage != AdvantageConfig():
        yield f"advantage has no effect: only teachers are learned from ({AT}.with_rewards=true adds rewards)"
    if section.enters == "loss" and config.loss.name != type(config.loss).model_fields["name"].default:
        yield f"loss.name has no effect: the divergence from teachers is the loss ({AT}.enters)"
    if config.reward.kl.coef:
        yield "reward.kl.coef has no effect: only teachers are learned from"


def _differs(section: Section, default: Section, name: str) -> bool:
    return bool(getattr(section, name) != getattr(default, name))
