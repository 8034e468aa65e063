"""Prompts of environments that need no dataset: an episode is a seed, and the environment begins the conversation."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.config.environment import EnvironmentConfig
from posttrain.records.prompts import Prompt

FIRST_TRAINING_SEED = 1_000_000  # seeds below it are for validation


def training_episodes(config: EnvironmentConfig) -> list[Prompt]:
    """Return ``config.train_episodes`` prompts."""
    weights = {name: each.weight for name, each in config.named.items()}
    return _episodes(config, weights, config.train_episodes or 0, FIRST_TRAINING_SEED, "train")


def validation_episodes(config: EnvironmentConfig) -> list[Prompt]:
    weights = {
        name: each.weight if each.validation_weight is None else each.validation_weight
        for name, each in config.named.items()
    }
    return _episodes(config, weights, config.validation_episodes or 0, 0, "validation")


def _episodes(
    config: EnvironmentConfig, weights: Mapping[str, float], count: int, first_seed: int, what: str
) -> list[Prompt]:
    """Alternate between the named environments by weight: after any number of episodes each has its share, to within one."""
    weights = weights or {"": 1.0}
    had = dict.fromkeys(weights, 0)
    prompts = []
    for number in range(count):
        name = max(weights, key=lambda each: weights[each] * (number + 1) / sum(weights.values()) - had[each])
        had[name] += 1
        prompts.append(
            Prompt(
                prompt_id=f"{what}:{number}",
                token_ids=(),
                text="",
                data_source=name or config.name or "",
                extra_info={"seed": first_seed + number, **({config.column: name} if name else {})},
            )
        )
    return prompts
