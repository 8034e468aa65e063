"""Rules between the keys of tuning."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config.roles import reference_is_policy, releases_reference
from posttrain.config.tune import TuneConfig, TuneDataConfig, TuneReferenceConfig
from posttrain.errors import Problem
from posttrain.plan.checks import sft
from posttrain.plan.engine import engine_plan, engine_that
from posttrain.plan.tune import whole_pairs
from posttrain.registry import TUNE_METHODS

# Settings of supervised fine-tuning that no preference is read with.
OF_TEXTS = (
    "messages_column",
    "train_on",
    "enable_thinking_column",
    "tokenize_workers",
)

WEIGHTS = ("desirable_weight", "undesirable_weight")  # of the two kinds of single completions


def check(config: TuneConfig) -> list[Problem]:
    """Everything wrong with a configuration whose keys are right one by one."""
    return [*sft.check(config), *_method_problems(config), *_reference_problems(config)]


def unsupported(config: TuneConfig) -> list[Problem]:
    """Report valid settings that are planned but not built yet."""
    return [*sft.unsupported(config), *_engines(config)]


def warnings_of(config: TuneConfig) -> list[str]:
    """Report settings that have no effect, in sentences."""
    return [*sft.warnings_of(config), *_data_warnings(config), *_reference_warnings(config)]


def _method_problems(config: TuneConfig) -> Iterator[Problem]:
    method = config.method
    if config.distillation.used:
        what = "preferences are learned without teachers"
        fix = "learn from teachers on texts with posttrain sft, or leave distillation.teachers out"
        yield Problem(what, fix=fix, field="distillation.teachers")
    if not method.is_known:
        if method.path is None:
            yield TUNE_METHODS.problem(method.name, "method.name")
        else:
            yield Problem(f"{method.path} has no function {method.name}", field="method.name")
        return
    if method.labelled and not any(method.settings.get(name, 1.0) for name in WEIGHTS):
        what = f"method.{WEIGHTS[0]} and method.{WEIGHTS[1]} are 0, so nothing is learned"
        yield Problem(what, fix="give one of them a weight", field=f"method.{WEIGHTS[0]}")
    if method.labelled and method.needs_kl and config.data.sequences_per_step < 2:
        what = f"{method.name} compares a completion with those of other prompts, and a step has one sequence"
        yield Problem(what, fix="use data.sequences_per_step=2 or more", field="data.sequences_per_step")


def _reference_problems(config: TuneConfig) -> Iterator[Problem]:
    method, columns = config.method, config.data.reference_columns
    if columns is not None:
        wanted = 2 if method.paired else 1
        field = "data.reference_columns"
        if not method.needs_reference:
            yield Problem(f"{method.name} has no reference", fix=f"remove {field}", field=field)
        elif method.needs_kl:
            what = f"{method.name} estimates a KL on completions of other prompts, which no column holds"
            yield Problem(what, fix=f"remove {field}, or use method.reference_point=zero", field=field)
        elif len(columns) != wanted:
            what = f"{field} names {len(columns)} column{'s' * (len(columns) > 1)}, and a row has {wanted} completions"
            yield Problem(what, fix="name one for each completion", field=field)
    if config.reference.precompute and config.runs_reference and method.needs_kl:
        what = f"{method.name} estimates a KL on completions of other prompts in every step"
        fix = "use reference.precompute=false, or method.reference_point=zero"
        yield Problem(what, fix=fix, field="reference.precompute")


def _engines(config: TuneConfig) -> Iterator[Problem]:
    plan = engine_plan(config.policy.engine)
    if config.method.scored and not plan.learns_scores:
        what = f"policy.engine={plan.name} does not train reward models yet"
        other = engine_that(lambda engine: engine.shares_out and engine.learns_scores)
        yield Problem(what, fix=f"use policy.engine={other}", field="policy.engine")


def image_problems(config: TuneConfig) -> Iterator[Problem]:
    """Report settings that do not support prompts with images, which shows only when the data are read."""
    if not engine_plan(config.policy.engine).reads_images:
        yield Problem(
            f"the training data hold images, which policy.engine={config.policy.engine} does not read",
            fix=f"use policy.engine={engine_that(lambda engine: engine.reads_images)}",
            field="policy.engine",
        )


def _data_warnings(config: TuneConfig) -> Iterator[str]:
    data, method = config.data, config.method
    for name in OF_TEXTS:
        if getattr(data, name) != TuneDataConfig.model_fields[name].default:
            yield f"data.{name} has no effect: {method.name} reads prompts with their completions"
    own = data.dataset_class_file is not None  # prompt_column and others: sft.warnings_of
    for name in ("chosen_column", "rejected_column", "query_column", "system_column"):
        if own and getattr(data, name) is not None:
            yield f"data.{name} has no effect: a dataset class of your own reads the files"
    for name, read in (
        ("chosen_column", own or not method.labelled or data.label_column is None),
        ("rejected_column", own or not method.labelled or data.label_column is None),
        ("label_column", method.labelled),
        ("response_column", method.labelled),
        ("margin_column", "margins" in method.about.inputs),
    ):
        if getattr(data, name) is not None and not read:
            yield f"data.{name} has no effect: {method.name} does not read it"
    shape = method.settings.get("loss", "sigmoid")
    if method.settings.get("label_smoothing") and shape not in ("sigmoid", "robust"):
        yield f"method.label_smoothing has no effect: method.loss={shape} has no labels to smooth"
    for name, value in method.unread.items():
        yield f"method.{name}={value} has no effect: {method.name} has no such setting"
    micro = config.policy.sequences_per_micro_batch_per_device
    if method.paired and config.policy.max_tokens_per_micro_batch is None and micro % 2:
        given = "policy.sequences_per_micro_batch_per_device"
        yield f"{given} is {micro}: no micro-batch divides a pair, so they hold {whole_pairs(micro)} sequences"


def _reference_warnings(config: TuneConfig) -> Iterator[str]:
    reference = config.reference
    if config.runs_reference:
        adapted = reference_is_policy(config)
        if reference.offload and (adapted or releases_reference(config)):
            why = "it is the policy without its adapter" if adapted else "it is not there while the policy trains"
            yield f"reference.offload has no effect: {why}"
        return
    why = (
        "data.reference_columns hold its log-probs"
        if config.method.needs_reference
        else (f"{config.method.name} has no reference")
    )
    for name, field in TuneReferenceConfig.model_fields.items():
        if getattr(reference, name) != field.default:
            yield f"reference.{name} has no effect: {why}"
