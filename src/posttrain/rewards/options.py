"""Checks of a reward's options, and the settings common to all rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from posttrain.errors import ConfigError, Problem, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWide:
    """Settings of the reward section for rewards that run code, passed to their factory as ``run_wide``."""

    allow_unboxed_code: bool = False
    timeout_s: float = 10.0  # per response
    memory_gib: float = 2.0  # per response, child processes included


# Share of reward.timeout_s that a reward gives to the programs it runs, so that a hanging program fails before the reward does.
OWN_SHARE = 0.8


def too_slow(option: str, total_s: float, run_wide: RunWide) -> list[Problem]:
    """Return a problem when programs may run for ``total_s`` per response, and scoring a response may not take that long."""
    if total_s < run_wide.timeout_s:
        return []
    what = f"{option} lets programs run for {total_s:g} s, and scoring a response may take {run_wide.timeout_s:g} s: one that "
    fix = f"use a smaller {option}, or a longer reward.timeout_s"
    return [Problem(f"{what}hangs would count as not scored instead of as failed", fix=fix, field=f"options.{option}")]


def too_large(option: str, mib: int, run_wide: RunWide) -> list[Problem]:
    """Return a problem when a program may use more memory than scoring a response may."""
    most = run_wide.memory_gib * 1024
    if mib < most:
        return []
    what = f"{option} lets a program take {mib} MiB, and scoring a response may take {most:g} MiB (reward.memory_gib): one that "
    fix = f"use a smaller {option}, or more reward.memory_gib"
    return [
        Problem(f"{what}takes more would count as not scored instead of as failed", fix=fix, field=f"options.{option}")
    ]


def check_choice(option: str, value: Any, choices: Any) -> None:
    """Raises: ConfigError unless ``value`` is one of the choices of the Literal type ``choices``."""
    known = get_args(choices)
    if value not in known:
        what = f"{option} is {value!r} (known: {', '.join(known)})"
        raise ConfigError(Problem(what, fix=did_you_mean(str(value), known, listed=True), field=f"options.{option}"))
