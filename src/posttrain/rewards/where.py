"""Which rewards may run in the process that trains."""

from __future__ import annotations

from posttrain.config.reward import RewardConfig
from posttrain.rewards.sources import ASK_A_SERVER

# Rules of this package whose time is linear in the length of the response, whatever it says
# (tests/unit/rewards/test_nasty_inputs.py), and that call no library. All else runs in workers.
QUICK = frozenset(
    {
        "crossthinkqa",
        "exact_match",
        "format",
        "geo3k",
        "gsm8k",
        "length",
        "math",
        "math_dapo",
        "multiple_choice",
        "prime_math",
        "repetition",
        "search",
    }
)


WORKER_FIELDS = ("workers", "timeout_s", "memory_gib")  # of RewardConfig, without effect where no worker is needed


def runs_here(config: RewardConfig) -> bool:
    """Whether no term needs a worker. Terms that ask a server do not count."""
    own = [term for term in config.terms if term.path is not None or term.name not in ASK_A_SERVER]
    return all(term.path is None and term.name in QUICK for term in own)
