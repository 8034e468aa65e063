"""The rewards of a run, in the words of its plan."""

from __future__ import annotations

from posttrain.config import RunConfig
from posttrain.config.environment import SINGLE_TURN


def reward_text(config: RunConfig) -> str:
    """Describe what a response is rewarded for: terms, models, environments, and how the sum is shaped."""
    terms = [
        (f"{term.weight:g} x " if term.weight != 1 else "") + (f"{term.name} ({term.path})" if term.path else term.name)
        for term in config.reward.terms
    ]
    reward = config.reward
    if reward.model is not None:
        weight = f"{reward.model.weight:g} x " if reward.model.weight != 1 else ""
        terms.append(f"{weight}the score of {reward.model.path}")
    if reward.served is not None:
        asked = f"{reward.served.path}, served by {reward.served.engine}"
        terms = [f"{terms[0]}, which asks {asked}", *terms[1:]] if terms else terms
    for judge in reward.judges.values():
        weight = f"{judge.weight:g} x " if judge.weight != 1 else ""
        of = f" (of {', '.join(judge.data_sources)})" if judge.data_sources else ""
        terms.append(f"{weight}the verdict of {judge.path}{of}")
    if config.environment.used and config.environment.name != SINGLE_TURN:
        terms.insert(0, "what the environments give")
    text = " + ".join(terms)
    if reward.overlong_buffer_tokens is not None:
        text += f"\n{'':<11}- up to {reward.overlong_penalty:g} in the last {reward.overlong_buffer_tokens} tokens"
    if reward.zero_unless_stopped:
        text += f"\n{'':<11}0 for what did not end by itself"
    if reward.normalize_mean != "none":
        text += f"\n{'':<11}minus the mean of the {_of(reward.normalize_mean)}"
    if reward.normalize_std != "none":
        text += f"\n{'':<11}over the standard deviation of the {_of(reward.normalize_std)}"
    if reward.clip is not None:
        text += f"\n{'':<11}cut to +-{reward.clip:g}"
    if reward.kl.coef:
        steered = f", steered towards {reward.kl.target:g} nats" if reward.kl.target is not None else ""
        text += f"\n{'':<11}- {reward.kl.coef:g} x KL ({reward.kl.estimator}) on every token{steered}"
    return text


def _of(part: str) -> str:
    return {"group": "group", "batch": "step", "running": "run so far"}[part]
