"""Choice of the rewards that may run in the training process, from their registered facts."""

from __future__ import annotations

from posttrain.config.reward import RewardConfig, RewardTerm
from posttrain.facts import RewardFacts
from posttrain.registry import REWARDS

WORKER_FIELDS = ("workers", "timeout_s", "memory_gib")  # of RewardConfig, without effect where no worker is needed


def facts_of(term: RewardTerm) -> RewardFacts:
    """The facts of a term's built-in reward; the defaults for a function of the user's own."""
    return RewardFacts() if term.path is not None else REWARDS.facts(term.name)


def runs_here(config: RewardConfig) -> bool:
    """Tell whether no term needs a worker. Terms that query a server do not count."""
    facts = [facts_of(term) for term in config.terms]
    return all(each.quick for each in facts if not each.queries_server)


def runs_code(config: RewardConfig) -> bool:
    """Tell whether a term may run code that a model wrote."""
    return any(facts_of(term).runs_code for term in config.terms)
