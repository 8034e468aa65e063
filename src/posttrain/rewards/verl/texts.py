r"""Stand-ins for the helpers of ``verl.utils.reward_score`` and ``verl.utils.ray_utils`` that reward functions import."""

from __future__ import annotations

import asyncio

from posttrain.rewards.scorers.math_dapo import normalize
from posttrain.rewards.spans import last_boxed

normalize_final_answer = normalize
_COMMANDS = (r"\boxed", r"\fbox")


def last_boxed_only_string(string: str) -> str | None:
    r"""The last \boxed{...}, else the last \fbox{...}, with its command; None without one."""
    for command in _COMMANDS:
        content = last_boxed(string, command=command)
        if content is not None:
            return f"{command}{{{content}}}"
    return None


def remove_boxed(s: str) -> str:
    r"""The content of \boxed{...}, or what follows "\boxed ".

    Raises: ValueError for another text, which a reward function counts as no answer.
    """
    if s.startswith(r"\boxed "):
        return s[len(r"\boxed ") :]
    if not (s.startswith(r"\boxed{") and s.endswith("}")):
        raise ValueError(f"{s!r} is no \\boxed{{...}}")
    return s[len(r"\boxed{") : -1]


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The running event loop, or a new one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.new_event_loop()
