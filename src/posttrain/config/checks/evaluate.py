"""Rules between the keys of an EvaluateConfig. Nothing here looks at a file."""

from __future__ import annotations

from posttrain.config.evaluate import EvaluateConfig, MetricsConfig, ScoringConfig
from posttrain.config.judge import judge_field
from posttrain.config.reward_placement import WORKER_FIELDS, runs_code, runs_here
from posttrain.errors import Problem
from posttrain.registry import REWARDS

# What shapes the rewards of training; a score is the terms' sum.
SHAPING = (
    "overlong_buffer_tokens",
    "overlong_penalty",
    "zero_unless_stopped",
    "normalize_mean",
    "normalize_std",
    "clip",
    "kl",
    "process",
)


def check(config: EvaluateConfig) -> list[Problem]:
    """Everything wrong with a configuration whose keys are right one by one."""
    problems, terms = [], config.reward.terms
    if not config.data.files:
        fix = "write data.files: [FILE, ...]"
        problems.append(Problem("there is no file with responses", fix=fix, field="data.files"))
    if not terms:
        fix = "add one, such as reward.terms=[{name: by_data_source}]"
        problems.append(Problem("there is nothing to score responses by", fix=fix, field="reward.terms"))
    for index, term in enumerate(terms):
        if term.path is None and term.name not in REWARDS.names():
            problems.append(REWARDS.problem(term.name, f"reward.terms.{index}.name"))
        if term.batched and term.path is None:
            problems.append(
                Problem(
                    f"{term.name} scores one response at a time: batched is for a function of your own",
                    fix="leave batched out, or name the function's file with path",
                    field=f"reward.terms.{index}.batched",
                )
            )
    return problems


def warnings_of(config: EvaluateConfig) -> list[str]:
    """Report settings that have no effect, in sentences."""
    reward, metrics, default = config.reward, config.metrics, ScoringConfig()
    found = [
        f"reward.{name} has no effect: it shapes the rewards of training, and an evaluation reports scores"
        for name in SHAPING
        if getattr(reward, name) != getattr(default, name)
    ]
    if runs_here(reward):
        found += [
            f"reward.{name} has no effect: these rewards are scored in this process (docs/rewards.md)"
            for name in WORKER_FIELDS
            if getattr(reward, name) != getattr(default, name)
        ]
    if reward.allow_unboxed_code and not runs_code(reward):
        may = ", ".join(REWARDS.stating("runs_code"))
        found.append(f"reward.allow_unboxed_code has no effect: no term runs code ({may} may)")
    if metrics.bootstrap_draws == 0 and metrics.confidence != MetricsConfig().confidence:
        found.append("metrics.confidence has no effect: metrics.bootstrap_draws is 0")
    return found


def unsupported(config: EvaluateConfig) -> list[Problem]:
    """Report valid settings that are planned but not built yet."""
    found = []
    if config.reward.model is not None:
        what = "scoring responses of a file by a reward model is planned"
        found.append(
            Problem(what, fix="use reward terms, or a server that serves the model: http", field="reward.model")
        )
    if config.reward.served is not None:
        what = "serving a model for functions that score responses of a file is planned"
        fix = "serve it apart, and give the functions its address (options of the term)"
        found.append(Problem(what, fix=fix, field="reward.served"))
    for name in config.reward.judges:
        what = "grading responses of a file by a judge of the run's own is planned"
        found.append(Problem(what, fix="serve the judge (posttrain serve), and use llm_judge", field=judge_field(name)))
    return found
