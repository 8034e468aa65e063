"""A reward's options: checks, and what is said once for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from posttrain.errors import ConfigError, Problem, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWide:
    """What the reward section says for all terms, for rewards that run code: they take it as ``run_wide``."""

    allow_unboxed_code: bool = False
    timeout_s: float = 10.0  # for scoring one response
    memory_gib: float = 2.0  # of one response, with all that scoring it starts


# Of reward.timeout_s, what a reward that runs code takes for the programs: when they hang they fail before it does.
OWN_SHARE = 0.8


def too_slow(option: str, total_s: float, run_wide: RunWide) -> list[Problem]:
    """A problem when programs may take ``total_s`` for a response, and scoring it may not."""
    if total_s < run_wide.timeout_s:
        return []
    what = f"{option} lets programs run for {total_s:g} s, and scoring a response may take {run_wide.timeout_s:g} s: one that "
    fix = f"use a smaller {option}, or a longer reward.timeout_s"
    return [Problem(f"{what}hangs would count as not scored instead of as failed", fix=fix, field=f"options.{option}")]


def too_large(option: str, mib: int, run_wide: RunWide) -> list[Problem]:
    """A problem when a program may take more memory than scoring the response may."""
    most = run_wide.memory_gib * 1024
    if mib < most:
        return []
    what = f"{option} lets a program take {mib} MiB, and scoring a response may take {most:g} MiB (reward.memory_gib): one that "
    fix = f"use a smaller {option}, or more reward.memory_gib"
    return [
        Problem(f"{what}takes more would count as not scored instead of as failed", fix=fix, field=f"options.{option}")
    ]


def check_choice(option: str, value: Any, choices: Any) -> None:
    """Raises ConfigError unless ``value`` is one of the words of the Literal type ``choices``."""
    known = get_args(choices)
    if value not in known:
        what = f"{option} is {value!r} (known: {', '.join(known)})"
        raise ConfigError(Problem(what, fix=did_you_mean(str(value), known, listed=True), field=f"options.{option}"))
