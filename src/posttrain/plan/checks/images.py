"""Rules for runs whose prompts hold images, which shows only when their data are read."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import RunConfig
from posttrain.config.roles import needs_values
from posttrain.errors import Problem
from posttrain.plan.engine import engine_plan, engine_that
from posttrain.registry import ROLLOUT_ENGINES


def image_problems(config: RunConfig) -> Iterator[Problem]:
    """Report settings that do not support prompts with images."""
    yield from sampler_problems(config.rollout.engine)
    if not engine_plan(config.policy.engine).reads_images:
        yield Problem(
            f"the training data hold images, which policy.engine={config.policy.engine} does not read",
            fix=f"use policy.engine={engine_that(lambda engine: engine.reads_images)}",
            field="policy.engine",
        )
    if config.environment.used:
        yield Problem(
            "the training data hold images, which are not given to environments of several turns",
            fix="use prompts without images, or no environment",
            field="environment",
        )
    if needs_values(config):
        yield Problem(
            f"the training data hold images, and {config.advantage.name} needs a critic, which reads text only",
            fix="use an estimator without a critic, such as advantage.name=grpo",
            field="advantage.name",
        )
    if config.reward.model is not None:
        yield Problem(
            "the training data hold images, and a reward model reads text only",
            fix="use reward.terms",
            field="reward.model.path",
        )
    if config.reward.judge is not None:
        yield Problem(
            "the training data hold images, and a judge reads text only",
            fix="use reward.terms",
            field="reward.judge.path",
        )
    if config.tracking.batches_every_steps:
        yield Problem(
            "the training data hold images, which recorded batches have no place for",
            fix="leave tracking.batches_every_steps out",
            field="tracking.batches_every_steps",
        )


def sampler_problems(engine: str) -> Iterator[Problem]:
    """Samplers that read text only."""
    readers = sorted(ROLLOUT_ENGINES.stating("reads_images"), reverse=True)
    if engine not in readers:
        yield Problem(
            f"the data hold images, which rollout.engine={engine} does not read",
            fix=f"use rollout.engine={' or '.join(readers)}",
            field="rollout.engine",
        )
