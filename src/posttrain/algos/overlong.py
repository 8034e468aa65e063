"""Reward lost by responses that come close to the length limit."""

from __future__ import annotations


def overlong_penalty(response_tokens: int, *, max_response_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """Penalty added to the reward: 0 up to max_response_tokens - buffer_tokens, then falling linearly to -penalty at the
    limit.

    Args: all counts in tokens, 1 <= buffer_tokens < max_response_tokens; penalty >= 0 in reward units.
    Returns: a number in [-penalty, 0].
    Source: arXiv:2503.14476 (DAPO), equation 13, where penalty is 1.
    """
    beyond = response_tokens - (max_response_tokens - buffer_tokens)
    return -penalty * beyond / buffer_tokens if beyond > 0 else 0.0
