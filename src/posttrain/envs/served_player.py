"""A player whose turns an OpenAI-compatible server takes: a frozen model, or any other one, as the other side of a game."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.errors import ConfigError, Problem, did_you_mean
from posttrain.interfaces.env import Message
from posttrain.libraries.json_http import HttpFailure, ask, is_url, open_client, wait_s

_LARGEST_BYTES = 1 << 24
_TRIES = 3
_OPTIONS: Mapping[str, type | tuple[type, ...]] = {
    "url": str,
    "model": str,
    "token_env": str,
    "timeout_s": (int, float),
    "max_tokens": int,
    "temperature": (int, float),
}


class PlayerFailed(Exception):
    """The server gave no turn. The message says why."""


@dataclass(frozen=True, slots=True)
class ServedPlayer:
    url: str  # of the API, such as http://127.0.0.1:8000/v1
    model: str = ""  # "": the server's only one, by its name at /models
    token_env: str = ""  # environment variable with the bearer token
    timeout_s: float = 60.0  # of a turn, all tries together
    max_tokens: int = 64
    temperature: float = 1.0

    def turn(self, messages: Sequence[Message], seed: int) -> str:
        """Take a turn. Equal messages and seeds give equal turns, as far as the server keeps that. Raises: PlayerFailed."""
        try:
            return asyncio.run(self._turn(messages, seed))
        except (HttpFailure, TimeoutError) as error:
            raise PlayerFailed(f"the opponent at {self.url} gave no turn: {error or 'no answer in time'}") from None
        except (KeyError, IndexError, TypeError):
            raise PlayerFailed(f"the answer of {self.url} holds no choices[0].message.content") from None

    async def _turn(self, messages: Sequence[Message], seed: int) -> str:
        token = os.environ.get(self.token_env, "") if self.token_env else ""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with open_client(headers, connections=1) as client, asyncio.timeout(self.timeout_s):
            models = {} if self.model else await self._asked(client, "GET", "models")
            body = {
                "model": self.model or models["data"][0]["id"],
                "messages": list(messages),
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "seed": seed,
            }
            answer = await self._asked(client, "POST", "chat/completions", json.dumps(body).encode())
        text = answer["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise TypeError
        return text

    async def _asked(self, client: Any, method: str, path: str, body: bytes | None = None) -> Any:
        address = f"{self.url.rstrip('/')}/{path}"
        for attempt in range(_TRIES):
            try:
                return await ask(client, method, address, body, name=self.url, largest_bytes=_LARGEST_BYTES)
            except HttpFailure as failure:
                if not failure.passing or attempt + 1 == _TRIES:
                    raise
                await asyncio.sleep(max(wait_s(body or b"", attempt), failure.after_s))
        raise AssertionError("the last try returns or raises")


def served_player(options: Mapping[str, Any] | None, field: str) -> ServedPlayer:
    """Build a player from settings. ``field``: their name in errors. Raises: ConfigError."""
    given = dict(options or {})
    for name, value in given.items():
        if name not in _OPTIONS:
            fix = did_you_mean(name, list(_OPTIONS), listed=True)
            raise ConfigError(Problem(f"{field} has no option {name!r}", fix=fix, field=f"{field}.{name}"))
        if not isinstance(value, _OPTIONS[name]) or isinstance(value, bool):
            fix = "a text" if _OPTIONS[name] is str else "a number"
            raise ConfigError(Problem(f"{field}.{name} is {value!r}", fix=f"write {fix}", field=f"{field}.{name}"))
    url = given.get("url", "")
    if not url.startswith(("http://", "https://")) or not is_url(url):
        what = f"{field}.url is {url!r}" if url else f"a served opponent needs {field}.url"
        raise ConfigError(Problem(what, fix="such as http://127.0.0.1:8000/v1", field=f"{field}.url"))
    for name in ("timeout_s", "max_tokens"):
        if given.get(name, 1) <= 0:
            raise ConfigError(Problem(f"{field}.{name} is {given[name]}", fix="above 0", field=f"{field}.{name}"))
    if given.get("temperature", 0) < 0:
        raise ConfigError(Problem(f"{field}.temperature is {given['temperature']}", fix="0 or more", field=field))
    return ServedPlayer(**given)
