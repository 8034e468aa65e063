"""Sampling parameters of a request: taken, or compared with those of the endpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from posttrain.data.chat_api import is_count
from posttrain.records.trajectories import SamplingParams

ALL_TOKENS = (0, -1)  # values of top_k that exclude no token
# Logits divided by less would not be finite in float32.
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-6, 1e6
_MOST_STOPS, _LONGEST_STOP = 64, 1024  # stop texts of a request, and characters of one


@dataclass(frozen=True, slots=True, kw_only=True)
class Honours:
    """Parameters of requests that an endpoint and its sampler honour; the others are refused, or ignored."""

    distributions: frozenset[str] = frozenset()  # its parameters of a request by which the sampler draws
    greedy: bool = True  # among these a temperature of 0
    stops: bool = False  # and ends at its stop texts
    seeds: bool = False  # and draws by its seed
    tops: bool = False  # and reports the likeliest tokens
    echoes: bool = False  # and the log-probs of its prompt
    grammars: bool = False  # and keeps a response within a grammar
    scores: bool = True  # a request may want no new token, but its prompt's log-probs (echo)
    caps_tokens: bool = False  # a max_tokens above the endpoint's limit is lowered to it
    # Parameters that have no effect, by the user's wish.
    ignored: frozenset[str] = frozenset()
    ignored_by: str = "endpoint.any_sampling"  # the setting that has them ignored
    most_answers: int = 64  # to each prompt
    most_prompts: int = 256
    # Why an answer is kept within no grammar
    no_grammars: str = "is for samplers that keep a response within a grammar: rollout.engine native"


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
    "min_p": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
}
DISTRIBUTION = frozenset(_RULES)  # parameters of the distribution that tokens are drawn from


def value_problems(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for every sampling parameter whose value is not possible."""
    for name, (allowed, wanted) in _RULES.items():
        if body.get(name) is not None and not allowed(body[name]):
            yield f"{name} is {json.dumps(body[name])[:60]}; use {wanted}"
    seed = body.get("seed")
    if seed is not None and (type(seed) is not int or abs(seed) >= 2**63):
        yield f"seed is {json.dumps(seed)[:60]}; use a whole number of 64 bits"
    stop = body.get("stop")
    if stop is None:
        return
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        yield f"stop is {json.dumps(stop)[:60]}; use a text, or a list of texts"
    elif "" in texts:
        yield "stop holds an empty text, which every response contains; leave it out"
    elif len(texts) > _MOST_STOPS or any(len(one) > _LONGEST_STOP for one in texts):
        yield f"stop holds {len(texts)} texts; use up to {_MOST_STOPS}, of up to {_LONGEST_STOP} characters"


def stops_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the stop texts of a request without problems."""
    stop = body.get("stop") or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def difference_problems(body: Mapping[str, Any], sampling: SamplingParams, honours: Honours) -> Iterator[str]:
    """Yield a problem for every sampling parameter that differs from the endpoint's and is neither honoured nor ignored."""
    trained = not honours.greedy and "temperature" in honours.distributions - honours.ignored
    if trained and body.get("temperature") == 0 != sampling.temperature:
        yield (
            "temperature is 0, which draws the likeliest token without chance: its log-probs are of no distribution that "
            "could be trained; use one above 0"
        )
    for name in _RULES.keys() - honours.distributions:
        asked, ours = body.get(name), getattr(sampling, name)
        same = asked == ours or (name == "top_k" and asked in ALL_TOKENS and ours == 0)
        if asked is not None and not same and name not in honours.ignored:
            yield (
                f"{name} is {json.dumps(asked)[:60]}, and this endpoint samples with {ours:g} (rollout.{name}); leave it out, "
                f"or have it ignored ({honours.ignored_by}=true)"
            )
    if not honours.stops and "stop" not in honours.ignored and any(one not in sampling.stop for one in stops_of(body)):
        yield f"stop is {json.dumps(body['stop'])[:60]}, and this endpoint stops at {list(sampling.stop)} (rollout.stop)"


def own_sampling(body: Mapping[str, Any], sampling: SamplingParams, honours: Honours) -> SamplingParams | None:
    """Return the sampling parameters of a request without problems; None where it asks for none but the endpoint's.

    What a request leaves out is the endpoint's, and its stop texts are added to the endpoint's. A temperature or top_k of its
    own is that of all tokens, the first one included.
    """
    found: dict[str, Any] = {}
    for name in honours.distributions - honours.ignored:
        if body.get(name) is not None:
            found[name] = body[name]
    if "top_k" in found:
        found["top_k"] = max(found["top_k"], 0)
    if "temperature" in found or "top_k" in found:
        found |= {"first_token_temperature": None, "first_token_top_k": 0}
    stops = stops_of(body) if honours.stops and "stop" not in honours.ignored else ()
    own = replace(sampling, **found).stopping_at(stops)
    return None if own == sampling else own


def before_stop(text: str, stops: tuple[str, ...]) -> str:
    """Return the text before the first of the stop texts."""
    places = [place for one in stops if (place := text.find(one)) >= 0]
    return text[: min(places)] if places else text
