"""vLLM's OpenAI server: started by the run on this machine, or running elsewhere.

Needs vLLM 0.10.2 or newer for exact token ids (``return_token_ids``); weights are loaded with 0.32's ``reload_weights``. Servers
running elsewhere need VLLM_SERVER_DEV_MODE=1 and our worker extension (docs/rollout.md has the command).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

import posttrain
from posttrain.backends.rollout.vllm.experts import RUNNER, decoded, of_routed_layers
from posttrain.backends.rollout.vllm.options import engine_arguments, frees_cache
from posttrain.backends.serving.engine import ServedEngine
from posttrain.backends.serving.launch import LaunchedServer, arguments, free_port
from posttrain.backends.serving.protocol import SampledResponse, exact, field_of
from posttrain.backends.serving.replicas import Replica, Replicas
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import BroadcastPlan, SamplerPlan, Served
from posttrain.libraries.json_http import ANSWER, HttpFailure
from posttrain.records.trajectories import SamplingParams

if TYPE_CHECKING:
    import httpx2

EXTENSION = "posttrain.backends.serving.vllm_worker.WeightReceiver"
STARTUP_S = 600.0  # compiling and measuring memory take minutes for large models
LOAD_S = 1800.0  # for reading a large model from a slow disk
CPU_CACHE_GIB = "4"  # of keys and values; by default vLLM takes nine tenths of the machine's memory
_FIX = "use vLLM 0.10.2 or newer"


class VllmProtocol:
    """Completions API of vLLM's OpenAI server."""

    health_path = "/health"
    gives_prompt_logprobs = True

    def __init__(self, end_tokens: frozenset[int]):
        self._end_tokens = end_tokens
        self.model: str | None = None  # the adapter's name; None: the server's only model

    def request(self, token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> tuple[str, dict[str, Any]]:
        """Build a request. All parameters are explicit: the server's defaults would replace missing ones."""
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._end_tokens)}
        return "/v1/completions", {
            **({"model": self.model} if self.model else {}),
            "prompt": list(token_ids),
            "n": 1,
            "seed": seed,
            "max_tokens": sampling.max_response_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted(ends),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,  # a stop text may contain them
            "ignore_eos": sampling.ignore_eos,
            "logprobs": 0,  # of the sampled token only
            "return_token_ids": True,
            **({"prompt_logprobs": 0} if sampling.prompt_logprobs else {}),
            **sampling.engine_sampling,
        }

    def read(self, answer: Any) -> SampledResponse:
        choice = field_of(answer, "choices", 0)
        tokens, logprobs = exact(
            "the answer of vLLM",
            field_of(choice, "token_ids"),
            field_of(choice, "logprobs", "token_logprobs"),
            fix=_FIX,
        )
        return SampledResponse(
            tokens,
            logprobs,
            str(field_of(choice, "finish_reason")),
            _of_prompt(choice),
            decoded(field_of(choice, "routed_experts")),
        )


def _of_prompt(choice: Any) -> list[float]:
    """Return the log-probs of the prompt's tokens from the second on: at each position vLLM lists some tokens, by their ids."""
    places = field_of(choice, "prompt_logprobs") or []
    found = [
        field_of(place, str(token), "logprob")
        for place, token in zip(places, field_of(choice, "prompt_token_ids") or [], strict=False)
    ]
    return [float(value) for value in found[1:] if isinstance(value, int | float)]


class VllmServerEngine(ServedEngine):
    """See interfaces.rollout_engine.WeightTaker."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        plan: SamplerPlan,
        replicas: Replicas,
        server: LaunchedServer | None = None,
    ):
        self._words = VllmProtocol(plan.end_tokens)
        super().__init__(tokenizer, plan.end_tokens, replicas, self._words)
        self.note = plan.note
        self.server = server  # None: running elsewhere
        if server:
            replicas.last_words = server.last_lines
        self._expert_layers = plan.expert_layers
        self._frees = frees_cache(plan) and plan.cuda
        self._asleep = False

    def experts_of(self, sampled: SampledResponse, places: int) -> NDArray[np.int16] | None:
        return of_routed_layers(sampled.experts, places, self._expert_layers) if self._expert_layers else None

    def load_folder(self, folder: Path, announced: Served) -> list[tuple[str, Served]]:
        return self._take("posttrain_load", [str(folder), announced.content_hash], announced)

    def load_adapter(self, folder: Path, announced: Served) -> list[tuple[str, Served]]:
        name, older = f"policy-{announced.version}-{announced.content_hash[:8]}", self._words.model

        async def load(client: httpx2.AsyncClient) -> list[tuple[str, Served]]:
            await self._wake(client)
            reports = await self._call(client, "posttrain_adapter", [str(folder), announced.content_hash])
            for replica in self.replicas.current():
                await self._adapter(client, replica, "load", {"lora_name": name, "lora_path": str(folder)})
                if older:
                    await self._adapter(client, replica, "unload", {"lora_name": older})
            return reports

        reports = self.control(load)
        self.content_hash = announced.content_hash
        self._words.model = name
        return reports

    async def _adapter(self, client: httpx2.AsyncClient, replica: Replica, verb: str, body: dict[str, str]) -> None:
        try:
            async with asyncio.timeout(LOAD_S):
                await self.replicas.ask_once(client, replica, "POST", f"/v1/{verb}_lora_adapter", body)
        except TimeoutError:
            raise RunStopped(f"{replica} could not {verb} the adapter within {LOAD_S:g} s") from None
        except HttpFailure as failure:
            if failure.kind != ANSWER:  # the answer is a text
                hint = (
                    "it must be started with --enable-lora, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
                )
                raise RunStopped(
                    f"vLLM could not {verb} the adapter: {failure}; {hint}, or use whole weights (weight_sync=disk)"
                ) from None

    def receive(self, manifest: str, announced: Served, group: BroadcastPlan) -> list[tuple[str, Served]]:
        """Receive weights with one server; each of its workers is a rank, from the plan's first on."""
        words = [manifest, group.backend, group.address, str(group.port), str(group.first_rank), str(group.size)]
        return self._take("posttrain_receive", [*words, str(group.bucket_bytes), str(group.timeout_s)], announced)

    def _take(self, method: str, words: list[str], announced: Served) -> list[tuple[str, Served]]:
        async def take(client: httpx2.AsyncClient) -> list[tuple[str, Served]]:
            await self._wake(client)
            reports = await self._call(client, method, words)
            await self.replicas.tell_all(client, "POST", "/reset_prefix_cache", timeout_s=LOAD_S)
            return reports

        reports = self.control(take)
        self.content_hash = announced.content_hash
        return reports

    async def before_generate(self, client: httpx2.AsyncClient) -> None:
        """Check that every server serves the weights sent last: a restarted one does not."""
        await self._wake(client)
        if not self.content_hash:
            return
        for url, served in await self._call(client, "posttrain_served", []):
            if served != Served(self.version, self.content_hash):
                raise RunStopped(f"{url} serves {served}, but {Served(self.version, self.content_hash)} was sent to it")

    async def after_generate(self, client: httpx2.AsyncClient) -> None:
        if self._frees:
            await self.replicas.tell_all(client, "POST", "/sleep?level=1", timeout_s=LOAD_S)
            self._asleep = True

    async def _wake(self, client: httpx2.AsyncClient) -> None:
        if self._asleep:
            await self.replicas.tell_all(client, "POST", "/wake_up", timeout_s=LOAD_S)
            self._asleep = False

    async def _call(self, client: httpx2.AsyncClient, method: str, words: list[str]) -> list[tuple[str, Served]]:
        """Call a method of the workers of every server. Returns: their answers."""
        body = {"method": method, "args": words}
        try:
            answers = await self.replicas.tell_all(client, "POST", "/collective_rpc", body, timeout_s=LOAD_S)
        except RunStopped as error:
            hint = f"is it started with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {EXTENSION}?"
            raise RunStopped(f"vLLM could not do {method}: {error}; {hint}") from None
        reports = []
        for replica, answer in answers:
            results = field_of(answer, "results") or []
            if not results:
                raise RunStopped(f"{replica} gave no answer to {method}")
            reports += [(str(replica), _served(str(replica), result)) for result in results]
        return reports

    def close(self) -> None:
        if self.server:
            self.server.close()


def start_server(plan: SamplerPlan, python: str) -> LaunchedServer:
    """Start vLLM in another Python, as a server on loopback, and wait until it is ready; on a further machine of a copy that lies
    on several, start its processes there, which wait for the others.

    Raises: RunStopped with the end of its log when it does not start.
    """
    port = free_port()
    words = server_words(plan, port)
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **({} if plan.cuda else {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GIB)}),
        **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} if plan.adapter_rank else {}),
        **({"VLLM_HOST_IP": plan.span.host} if plan.span else {}),
        **(RUNNER if plan.expert_layers else {}),
        **environment_of(plan.options),
    }
    follows = plan.span is not None and plan.span.rank > 0
    program = ["vllm.entrypoints.cli.main", "serve"] if follows else ["vllm.entrypoints.openai.api_server"]
    command = [python, "-m", *program, *words, "--worker-extension-cls", EXTENSION]
    server = LaunchedServer(
        command,
        port=port,
        name="vLLM's server",
        environment=environment,
        importable=Path(posttrain.__file__).parent,  # for the worker extension
        host=plan.host,
    )
    if follows:
        return server
    server.wait_until_ready("/health", float(plan.options.get("startup_timeout_s") or STARTUP_S))
    return server


def server_words(plan: SamplerPlan, port: int) -> list[str]:
    """Return the server's command line."""
    settings = {**engine_arguments(plan), "host": plan.host, "port": port}
    if plan.span is not None:  # since vLLM 0.11.1, without Ray
        settings |= {
            "distributed_executor_backend": "mp",
            "nnodes": plan.span.nodes,
            "node_rank": plan.span.rank,
            "master_addr": plan.span.address,
            "master_port": plan.span.port,
            "headless": plan.span.rank > 0 or None,
        }
    if settings.get("disable_log_stats") is False:
        del settings["disable_log_stats"]  # the only flag without a --no- form
    return arguments(settings, off="no-")


def environment_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options that vLLM reads from its environment."""
    environment = {}
    if options.get("vllm_v1_disable_multiproc"):
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if (version := options.get("VLLM_USE_V1")) is not None:
        environment["VLLM_USE_V1"] = str(int(version))
    return environment


def _served(name: str, report: Any) -> Served:
    if error := field_of(report, "error"):
        raise RunStopped(f"{name} rejected the weights: {error}")
    version, content_hash = field_of(report, "version"), field_of(report, "content_hash")
    if type(version) is not int or not isinstance(content_hash, str):
        raise RunStopped(f"{name} does not report the weights it serves")
    return Served(version, content_hash)
