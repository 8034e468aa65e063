"""Checks of a reward's options."""

from __future__ import annotations

from typing import Any, get_args

from posttrain.errors import ConfigError, Problem, did_you_mean


def check_choice(option: str, value: Any, choices: Any) -> None:
    """Raises ConfigError unless ``value`` is one of the words of the Literal type ``choices``."""
    known = get_args(choices)
    if value not in known:
        what = f"{option} is {value!r} (known: {', '.join(known)})"
        raise ConfigError(Problem(what, fix=did_you_mean(str(value), known, listed=True), field=f"options.{option}"))
