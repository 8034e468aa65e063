"""Sampling parameters of a request: taken, or compared with those of the endpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from posttrain.data.chat_api import is_count
from posttrain.records.trajectories import SamplingParams

ALL_TOKENS = (0, -1)  # values of top_k that exclude no token
# Logits divided by less would not be finite in float32.
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-6, 1e6


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (
        lambda value: _is_number(value) and (value == 0 or _LEAST_TEMPERATURE <= value <= _MOST_TEMPERATURE),
        f"0 (greedy), or a number from {_LEAST_TEMPERATURE:g} to {_MOST_TEMPERATURE:g}",
    ),
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0 and up to 1"),
    "top_k": (
        lambda value: is_count(value) or (type(value) is int and value in ALL_TOKENS),
        "a whole number of at least 1, or 0 for all tokens",
    ),
}


def value_problems(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for every sampling parameter whose value is not possible."""
    for name, (allowed, wanted) in _RULES.items():
        if body.get(name) is not None and not allowed(body[name]):
            yield f"{name} is {json.dumps(body[name])[:60]}; use {wanted}"
    stop = body.get("stop")
    if stop is None:
        return
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        yield f"stop is {json.dumps(stop)[:60]}; use a text, or a list of texts"
    elif "" in texts:
        yield "stop holds an empty text, which every response contains; leave it out"


def stops_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the stop texts of a request without problems."""
    stop = body.get("stop") or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def difference_problems(body: Mapping[str, Any], sampling: SamplingParams) -> Iterator[str]:
    """Yield a problem for every sampling parameter that differs from the endpoint's, for samplers with one distribution."""
    for name in _RULES:
        asked, ours = body.get(name), getattr(sampling, name)
        same = asked == ours or (name == "top_k" and asked in ALL_TOKENS and ours == 0)
        if asked is not None and not same:
            yield (
                f"{name} is {json.dumps(asked)[:60]}, and this endpoint samples with {ours:g} (rollout.{name}); leave it out, "
                "or start it with endpoint.any_sampling=true"
            )
    if any(one not in sampling.stop for one in stops_of(body)):
        yield f"stop is {json.dumps(body['stop'])[:60]}, and this endpoint stops at {list(sampling.stop)} (rollout.stop)"


def own_sampling(body: Mapping[str, Any], sampling: SamplingParams) -> SamplingParams | None:
    """Return the sampling parameters of a request without problems; None where it asks for none but the endpoint's.

    What a request leaves out is the endpoint's, and its stop texts are added to the endpoint's. A temperature or top_k of its
    own is that of all tokens, the first one included.
    """
    found = {name: body[name] for name in _RULES if body.get(name) is not None}
    if "top_k" in found:
        found["top_k"] = max(found["top_k"], 0)
    if "temperature" in found or "top_k" in found:
        found |= {"first_token_temperature": None, "first_token_top_k": 0}
    stop = (*sampling.stop, *(one for one in dict.fromkeys(stops_of(body)) if one not in sampling.stop))
    own = replace(sampling, **found, stop=stop)
    return None if own == sampling else own


def before_stop(text: str, stops: tuple[str, ...]) -> str:
    """Return the text before the first of the stop texts."""
    places = [place for one in stops if (place := text.find(one)) >= 0]
    return text[: min(places)] if places else text
