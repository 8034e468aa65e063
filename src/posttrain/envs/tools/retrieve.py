"""Search by a retrieval server of the user's, in the manner of Search-R1."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.tool import KEEPS_NOTHING, Tool, ToolFailed, parameters
from posttrain.libraries.json_http import HttpFailure, ask, open_client
from posttrain.registry import TOOLS
from posttrain.settings import Positive, PositiveInt

_LARGEST_BYTES = 16 << 20


@TOOLS.register("retrieve")
def retrieve(
    *, url: str, results: PositiveInt = 3, max_characters: PositiveInt = 1000, timeout_s: Positive = 30.0
) -> Tool:
    """A tool that asks a server for the passages that match a query.

    The server takes {"queries": [text], "topk": number, "return_scores": true} and answers {"result": [[passage, ...]]}, in which
    a passage is a text, or a mapping with ``contents`` or ``text``, in ``document`` or not.

    Args: url, results per query, max_characters shown of each, timeout_s of a request.
    Raises: ConfigError.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(Problem(f"url is {url!r}", fix="such as http://127.0.0.1:8000/retrieve"))
    return Tool(
        name="search",
        description="Finds passages of a collection of texts that fit a query.",
        parameters=parameters(query=("string", "the question, or words that the passage should hold")),
        run=partial(_find, url=url, results=results, max_characters=max_characters, timeout_s=timeout_s),
        **KEEPS_NOTHING,
    )


def _find(arguments: Mapping[str, Any], *, url: str, results: int, max_characters: int, timeout_s: float) -> str:
    """Raises: ToolFailed when the server does not answer, or answers something else."""
    query = {"queries": [str(arguments["query"])], "topk": results, "return_scores": True}
    try:
        answer = asyncio.run(_asked(url, query, timeout_s))
        passages = [_text(each) for each in answer["result"][0]]
    except (HttpFailure, TimeoutError) as error:
        raise ToolFailed(f"the search failed: {error or 'no answer in time'}") from error
    except (KeyError, IndexError, TypeError) as error:
        raise ToolFailed("the search failed: the server's answer holds no list of passages in result") from error
    if not passages:
        return "Nothing was found."
    return "\n\n".join(f"[{rank}] {text[:max_characters]}" for rank, text in enumerate(passages, start=1))


async def _asked(url: str, query: Mapping[str, Any], timeout_s: float) -> Any:
    async with open_client({}, connections=1) as client, asyncio.timeout(timeout_s):
        return await ask(client, "POST", url, json.dumps(query).encode(), name=url, largest_bytes=_LARGEST_BYTES)


def _text(passage: Any) -> str:
    if isinstance(passage, str):
        return passage
    inner = passage.get("document", passage)
    return inner if isinstance(inner, str) else str(inner["contents"] if "contents" in inner else inner["text"])
