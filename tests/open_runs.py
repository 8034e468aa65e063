"""A step of an open run, with a sampler of fixed answers, and the calls of a program that plays it."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import pytest

from posttrain.backends.environments.open.host import OpenHost
from posttrain.backends.environments.open.http import OpenServer, TokenTexts
from posttrain.data.openai_api.own_sampling import Honours
from posttrain.data.raw_prompts import raw_prompt_ids
from posttrain.data.turns import TemplateTurns
from posttrain.envs.agent.listener import RUN_HONOURS
from posttrain.interfaces.env import EnvSpec
from posttrain.interfaces.rollout_engine import Request
from posttrain.interfaces.worlds import EpisodeRules, Worlds
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, TrajectoryGroup
from posttrain.steps.play import play
from toy import ids, toy_tokenizer

TOKENIZER = toy_tokenizer()


@dataclass
class Sampler:
    """Says "xN", N the number of the request, and ends its turn."""

    asked: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)

    def open_stream(self, sampling: SamplingParams, on_tokens: object = None) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def submit(self, requests: Sequence[Request]) -> None:
        self.asked += requests
        self.waiting += requests

    def cancel(self, sample_ids: Collection[str]) -> None:
        self.waiting = [each for each in self.waiting if each.sample_id not in sample_ids]

    def wait(self, timeout_s: float) -> list[Trajectory]:
        waiting, self.waiting = self.waiting, []
        found = []
        for request in waiting:
            token_ids = ids(f"x{self.asked.index(request)}$")
            found.append(
                Trajectory(
                    sample_id=request.sample_id,
                    token_ids=token_ids,
                    logprobs=(-0.5,) * len(token_ids),
                    text="",
                    stop_reason=StopReason.EOS,
                    policy_version=7,
                )
            )
        return found


class Run:
    """A step of a run that is open: two prompts, ``samples`` episodes each."""

    def __init__(
        self, samples: int = 2, prompts: int = 2, rows: bool = False, spec: EnvSpec | None = None, **more: Any
    ):
        """Args: spec, of an environment that scores conversations; more, arguments of OpenHost."""
        given = {"conversation_timeout_s": 20.0, "group_timeout_s": 20.0, "wait_s": 10.0, **more}
        self.spec = spec
        self.host = OpenHost(has_rows=rows, group_size=samples, decode=_decoded, **given)
        self.server = OpenServer(
            self.host,
            "127.0.0.1",
            0,
            token="secret",
            sampling=SamplingParams(max_response_tokens=9),
            honours=Honours(stops=True, seeds=True, tops=True, echoes=True, **RUN_HONOURS),
            tokens=TokenTexts(
                text_of=lambda token: chr(token),
                decode=_decoded,
                encode=partial(raw_prompt_ids, TOKENIZER),
            ),
        )
        self.sampler = Sampler()
        self.groups: list[TrajectoryGroup] = []
        asked = ({"role": "user", "content": "Q"},) if rows else ()
        self._prompts = [
            Prompt(prompt_id=f"p{n}", token_ids=(), text="", data_source="", messages=asked) for n in range(prompts)
        ]
        self._samples = samples
        self._thread: threading.Thread | None = None
        self.options: dict[str, Any] = {}  # of the chat template

    def begin(self) -> None:
        def step() -> None:
            rules = EpisodeRules(max_response_tokens=9, max_context_tokens=500)
            spec = EnvSpec(name="open", messages=self._prompts[0].messages, row={"ground_truth": "no", "level": 1})
            worlds = Worlds(self.host, TemplateTurns(TOKENIZER, self.options), rules, lambda prompt: self.spec or spec)
            sampling = SamplingParams(samples_per_prompt=self._samples, max_response_tokens=9)
            self.groups = play(self.sampler, self._prompts, sampling, worlds)

        self._thread = threading.Thread(target=step, daemon=True)
        self._thread.start()

    def end(self) -> list[TrajectoryGroup]:
        assert self._thread is not None
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.groups

    def call(self, path: str, body: Any = None, token: str = "secret", **headers: str) -> dict[str, Any]:
        data = None if body is None else (body if isinstance(body, str) else json.dumps(body)).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.server.url + path, data, {"Authorization": f"Bearer {token}", **named})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def chat(self, *texts: str, **headers: str) -> dict[str, Any]:
        """A conversation: texts of the user, with the answers between them."""
        messages = [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)]
        return self.call("/v1/chat/completions", {"messages": messages, "logprobs": True}, **headers)

    def reward(self, conversation: str, reward: float | None, **more: Any) -> dict[str, Any]:
        return self.call("/rewards", {"conversation": conversation, "reward": reward, **more})

    def fails(self, path: str, body: Any, **headers: str) -> tuple[int, str]:
        with pytest.raises(urllib.error.HTTPError) as raised:
            self.call(path, body, **headers)
        return raised.value.code, json.load(raised.value)["error"]["message"]


def said(answer: dict[str, Any]) -> str:
    """Return the text of a chat's answer."""
    return str(answer["choices"][0]["message"]["content"])


def _decoded(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(token_ids), skip_special_tokens=True))
