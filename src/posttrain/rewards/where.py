"""Choice of the rewards that may run in the training process."""

from __future__ import annotations

from posttrain.config.reward import RewardConfig
from posttrain.rewards.sources import ASK_A_SERVER

# Rules of this package that take time linear in the length of any response
# (tests/unit/rewards/test_nasty_inputs.py) and call no library. All others run in workers.
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
    """Return True when no term needs a worker. Terms that query a server do not count."""
    own = [term for term in config.terms if term.path is not None or term.name not in ASK_A_SERVER]
    return all(term.path is None and term.name in QUICK for term in own)
