"""A score from the user's own server, over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.reward import NotScored, RewardFn
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.answer_cache import Cache
from posttrain.rewards.http import ANSWER, headers_of, make_server
from posttrain.rewards.options import check_choice
from posttrain.rewards.score import LARGEST
from posttrain.rewards.server_reward import ServerReward


@REWARDS.register("http", queries_server=True)
def http(
    *,
    url: str = "",
    headers_from_env: Mapping[str, str] | None = None,
    field: str = "score",
    timeout_s: float = 30.0,
    retries: int = 3,
    concurrency: int = 8,
    batch: int = 1,
    cache: Cache = "run",
    proxy_from_env: bool = False,
) -> RewardFn:
    """A reward that posts {data_source, prompt, response, ground_truth, extra_info} as JSON and reads a number.

    Args: ``headers_from_env`` maps names of headers to the environment variables that hold their values; ``field`` locates the
        number, keys joined by dots, empty for an answer that is the number; ``timeout_s`` per request, retries and waits
        included; ``concurrency`` simultaneous requests; ``batch`` responses per request: above 1, requests and answers are
        lists.
    Raises: ConfigError.
    """
    check_choice("cache", cache, Cache)
    if batch < 1:
        raise ConfigError(Problem(f"batch is {batch}", fix="1 or more", field="options.batch"))
    server = make_server(
        url,
        headers_of(headers_from_env),
        timeout_s=timeout_s,
        retries=retries,
        concurrency=concurrency,
        proxy_from_env=proxy_from_env,
        url_option="url",
    )
    read = partial(number_at, field=field)
    return ServerReward(server, question=_question, read=read, rule=f"field {field}", batch=batch, cache=cache)


def _question(prompt: Prompt, response: str) -> dict[str, Any]:
    return {
        "data_source": prompt.data_source,
        "prompt": prompt.text,
        "response": response,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
    }


def number_at(answer: Any, field: str) -> float:
    """Read the number at a field of a JSON value. Raises: NotScored."""
    for key in field.split(".") if field else ():
        if not isinstance(answer, Mapping) or key not in answer:
            raise NotScored(ANSWER, f"the answer has no field {field!r}")
        answer = answer[key]
    if not isinstance(answer, (int, float)):  # True and False count as 1 and 0
        place = f"{field!r} of the answer" if field else "the answer"
        raise NotScored(ANSWER, f"{place} is no number but a {type(answer).__name__}")
    if not abs(answer) <= LARGEST:
        raise NotScored(ANSWER, "the number in the answer is too large")
    return float(answer)
