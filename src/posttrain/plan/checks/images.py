"""Rules for runs with images: in prompts, which shows only when their data are read, and from environments."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import RunConfig
from posttrain.config.judge import judge_field
from posttrain.config.roles import needs_values, shares_weights
from posttrain.config.rollout import RolloutConfig
from posttrain.errors import Problem
from posttrain.plan.engine import engine_plan, engine_that
from posttrain.registry import ROLLOUT_ENGINES

SHOWN = "environments show pictures"


def image_problems(config: RunConfig) -> Iterator[Problem]:
    """Report settings that do not support prompts with images."""
    yield from _engine_problems(config, "the training data hold images")
    if config.environment.used:
        yield Problem(
            "the training data hold images, which are not given to environments of several turns",
            fix="use prompts without images, or no environment",
            field="environment",
        )
    yield from _reader_problems(config, "the training data hold images")


def shows_pictures(config: RunConfig) -> bool:
    """Return True when an environment of the run shows images by a setting that is known before it runs."""
    chosen = [config.environment.settings, *(each.settings for each in config.environment.named.values())]
    return any(settings.get("pictures") is True for settings in chosen)


def picture_problems(config: RunConfig) -> Iterator[Problem]:
    """Report settings that do not support environments with pictures."""
    if not shows_pictures(config):
        return
    if config.environment.conversation == "one_message":
        what = "environments show pictures, which have no place in one message of the assistant"
        yield Problem(what, fix="use environment.conversation=messages", field="environment.conversation")
    yield from _reader_problems(config, SHOWN)


def unread_pictures(config: RunConfig) -> Iterator[Problem]:
    """Report engines that do not read the pictures of environments."""
    if shows_pictures(config):
        yield from _engine_problems(config, SHOWN)


def _engine_problems(config: RunConfig, what: str) -> Iterator[Problem]:
    yield from sampler_problems(config.rollout, what)
    if not engine_plan(config.policy.engine).reads_images:
        yield Problem(
            f"{what}, which policy.engine={config.policy.engine} does not read",
            fix=f"use policy.engine={engine_that(lambda engine: engine.reads_images)}",
            field="policy.engine",
        )


def _reader_problems(config: RunConfig, what: str) -> Iterator[Problem]:
    """Report roles and records that hold text only."""
    if needs_values(config) and not engine_plan(config.critic.engine).reads_images:
        yield Problem(
            f"{what}, which critic.engine={config.critic.engine} does not read",
            fix=f"use critic.engine={engine_that(lambda engine: engine.reads_images)}, or an estimator without a critic",
            field="critic.engine",
        )
    if config.reward.model is not None and config.reward.model.own_template:
        yield Problem(
            f"{what}, and a reward model with a chat template of its own reads text only",
            fix="use reward.model.own_template=false, so that it reads the policy's tokens and images",
            field="reward.model.own_template",
        )
    if config.reward.model is not None and not engine_plan(config.reward.model.engine).reads_images:
        yield Problem(
            f"{what}, which reward.model.engine={config.reward.model.engine} does not read",
            fix=f"use reward.model.engine={engine_that(lambda engine: engine.reads_images)}",
            field="reward.model.engine",
        )
    for name in config.reward.judges:
        yield Problem(
            f"{what}, and a judge reads text only",
            fix="use reward.terms",
            field=f"{judge_field(name)}.path",
        )
    if config.tracking.batches_every_steps:
        yield Problem(
            f"{what}, which recorded batches have no place for",
            fix="leave tracking.batches_every_steps out",
            field="tracking.batches_every_steps",
        )


def sampler_problems(rollout: RolloutConfig, what: str = "the data hold images") -> Iterator[Problem]:
    """Samplers that read text only."""
    engine = rollout.engine
    readers = sorted(ROLLOUT_ENGINES.stating("reads_images"), key=lambda name: (name != "native", name))
    if engine not in readers:
        yield Problem(
            f"{what}, which rollout.engine={engine} does not read",
            fix=f"use rollout.engine={', '.join(readers[:-1])} or {readers[-1]}",
            field="rollout.engine",
        )
    elif not shares_weights(engine) and (rollout.endpoints or rollout.engine_options.get("python")):
        where = "endpoints" if rollout.endpoints else "engine_options.python"
        yield Problem(
            f"{what}, and a server of {engine} takes token ids without images",
            fix=f"leave rollout.{where} out, so that {engine} runs in the trainer's Python; or use rollout.engine=native",
            field=f"rollout.{where}",
        )
