"""Sampling from any server with OpenAI's completions API that returns token ids and log-probs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from posttrain.backends.serving.engine import ServedEngine
from posttrain.backends.serving.launch import LaunchedServer, free_port
from posttrain.backends.serving.protocol import SampledResponse, UnusableAnswer, exact, field_of
from posttrain.backends.serving.settings import replicas_of
from posttrain.errors import ConfigError, Problem, RunStopped
from posttrain.interfaces.rollout_engine import BroadcastPlan, SamplerPlan, Served
from posttrain.records.trajectories import SamplingParams
from posttrain.registry import ROLLOUT_ENGINES

if TYPE_CHECKING:
    import httpx2

START_S = 600.0  # a user's class may load a large model when it is constructed
LOAD_S = 1800.0  # for a server that reads a large model from a slow disk
_FIX = (
    "the server must take token ids as the prompt of /v1/completions and return token_ids (return_token_ids) or tokens like "
    "token_id:123 (return_tokens_as_token_ids) with their log-probs, as vLLM does"
)


class CompletionsProtocol:
    """OpenAI's /v1/completions with vLLM's extensions; parameters with default values are omitted, as some servers reject
    unknown ones."""

    gives_prompt_logprobs = False

    def __init__(self, model: str | None, health_path: str = "/health"):
        self.model = model
        self.health_path = health_path

    def request(self, token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(token_ids),
            "n": 1,
            "seed": seed,
            "max_tokens": sampling.max_response_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if sampling.stop:
            body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
        more: tuple[tuple[str, Any, Any], ...] = (
            ("top_k", sampling.top_k, 0),
            ("min_p", sampling.min_p, 0.0),
            ("stop_token_ids", list(sampling.stop_token_ids), []),
            ("ignore_eos", sampling.ignore_eos, False),
        )
        for name, value, usual in more:
            if value != usual:
                body[name] = value
        return "/v1/completions", body | dict(sampling.engine_sampling)

    def read(self, answer: Any) -> SampledResponse:
        choice = field_of(answer, "choices", 0)
        spelled = field_of(choice, "logprobs", "tokens")
        tokens = field_of(choice, "token_ids")
        if tokens is None and isinstance(spelled, list):
            tokens = [_token_id(word) for word in spelled]
        logprobs = field_of(choice, "logprobs", "token_logprobs")
        token_ids, values = exact("the answer of the sampler", tokens, logprobs, fix=_FIX)
        return SampledResponse(token_ids, values, str(field_of(choice, "finish_reason")))


class HttpEngine(ServedEngine):
    """See interfaces.rollout_engine.WeightTaker.

    New weights are loaded by a server with an address for that (engine_options.update_path): it receives ``{"model_path",
    "version", "content_hash"}`` and must answer with the version and hash that it then serves.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, plan: SamplerPlan, protocol: CompletionsProtocol):
        super().__init__(tokenizer, plan.end_tokens, replicas_of(plan, plan.endpoints, protocol.health_path), protocol)
        self.note = plan.note
        self.server: LaunchedServer | None = None  # ended with this object
        self._protocol = protocol
        self._update_path = plan.options.get("update_path")
        self._served_path = plan.options.get("served_path")
        self._reports_processed = plan.options.get("logprobs", "raw") == "processed"

    def load_folder(self, folder: Path, announced: Served) -> list[tuple[str, Served]]:
        if not self._update_path:
            raise RunStopped(
                "the servers of rollout.engine=http have no address for new weights: name it "
                "(rollout.engine_options.update_path), or use vllm or sglang with rollout.endpoints"
            )
        body = {"model_path": str(folder), "version": announced.version, "content_hash": announced.content_hash}

        async def load(client: httpx2.AsyncClient) -> list[tuple[str, Served]]:
            answers = await self.replicas.tell_all(client, "POST", str(self._update_path), body, timeout_s=LOAD_S)
            return [(str(replica), _served(str(replica), answer)) for replica, answer in answers]

        reports = self.control(load)
        self.content_hash = announced.content_hash
        return reports

    def load_adapter(self, folder: Path, announced: Served) -> list[tuple[str, Served]]:
        raise RunStopped("rollout.engine=http loads whole weights only: use rollout.weight_sync=disk")

    def receive(self, manifest: str, announced: Served, group: BroadcastPlan) -> list[tuple[str, Served]]:
        raise RunStopped("rollout.engine=http cannot join a process group: use rollout.weight_sync=disk")

    async def before_generate(self, client: httpx2.AsyncClient) -> None:
        if self._protocol.model is None:
            (_, models), *_ = await self.replicas.tell_all(client, "GET", "/v1/models", timeout_s=30)
            self._protocol.model = field_of(models, "data", 0, "id")
            if not isinstance(self._protocol.model, str):
                raise RunStopped("/v1/models names no model: set rollout.engine_options.model")
        if self._served_path and self.content_hash:
            expected = Served(self.version, self.content_hash)
            for replica, answer in await self.replicas.tell_all(client, "GET", str(self._served_path), timeout_s=30):
                if (served := _served(str(replica), answer)) != expected:
                    raise RunStopped(f"{replica} serves {served}, and {expected} was sent to it")

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises: UnusableAnswer when the server reports log-probs of another distribution than the sampled one."""
        super().check_sampling(sampling)
        plain = sampling.temperature in (0.0, 1.0) and sampling.top_p == 1 and not sampling.top_k and not sampling.min_p
        plain = plain and not sampling.has_own_first
        if not plain and not self._reports_processed:
            raise UnusableAnswer(
                "log-probs of the raw logits are not those of the sampled distribution with this temperature, top_k, "
                "top_p or min_p: start the server with --logprobs-mode processed_logprobs and set "
                "rollout.engine_options.logprobs=processed, or sample with temperature 1 and no cuts"
            )


@ROLLOUT_ENGINES.register("http")
def start_http(plan: SamplerPlan, tokenizer: PreTrainedTokenizerBase) -> HttpEngine:
    """Start the engine. Raises: ConfigError without endpoints, or for unknown options; RunStopped when a user's own server does
    not start."""
    if plan.options.get("server"):
        return _own(plan, tokenizer)
    known = ("model", "update_path", "served_path", "health_path", "logprobs", "api_key_env")
    problems = [
        Problem(
            f"rollout.engine=http has no option {name}",
            fix=f"known: {', '.join(known)}",
            field="rollout.engine_options",
        )
        for name in plan.options
        if name not in known
    ]
    if not plan.endpoints:
        fix = "rollout.endpoints=[http://host:8000]"
        problems.append(Problem("rollout.engine=http needs servers", fix=fix, field="rollout.endpoints"))
    if problems:
        raise ConfigError(problems)
    health = str(plan.options.get("health_path", "/health"))
    return HttpEngine(tokenizer, plan, CompletionsProtocol(plan.options.get("model"), health))


def _own(plan: SamplerPlan, tokenizer: PreTrainedTokenizerBase) -> HttpEngine:
    """Start a user's class in a process of its own (own_server.py); it receives all options but its place."""
    if plan.endpoints:
        what = "rollout.engine_options.server is started by the run, but rollout.endpoints are running servers"
        raise ConfigError(Problem(what, fix="use one of them", field="rollout.endpoints"))
    options = dict(plan.options)
    path, colon, name = str(options.pop("server")).rpartition(":")
    where = f"{Path(path).expanduser().absolute()}:{name}" if path.endswith(".py") else f"{path}{colon}{name}"
    config = options | {
        "model_path": plan.model_path,
        "tokenizer_path": plan.tokenizer_path,
        "dtype": options.get("dtype") or plan.dtype,
        "seed": plan.seed,
        "max_model_len": options.get("max_model_len") or plan.max_model_len,
        "end_token_ids": sorted(plan.end_tokens),
    }
    port = free_port()
    server = LaunchedServer(
        [sys.executable, "-m", "posttrain.backends.rollout.http.own_server", str(port), where, json.dumps(config)],
        port=port,
        name=f"the server {name}",
        environment={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    server.wait_until_ready("/health", START_S)
    known = {"update_path": "/update", "served_path": "/served", "logprobs": "processed"}
    engine = HttpEngine(tokenizer, replace(plan, endpoints=(server.url,), options=known), CompletionsProtocol("own"))
    engine.server = server
    return engine


def _token_id(word: Any) -> int | None:
    """Parse 123 from "token_id:123"; None for other texts."""
    if isinstance(word, str) and word.startswith("token_id:") and word[9:].isdecimal():
        return int(word[9:])
    return None


def _served(name: str, answer: Any) -> Served:
    version, content_hash = field_of(answer, "version"), field_of(answer, "content_hash")
    if type(version) is not int or not isinstance(content_hash, str):
        raise RunStopped(f"{name} does not report the weights it serves (version and content_hash)")
    return Served(version, content_hash)
