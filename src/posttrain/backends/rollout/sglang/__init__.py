"""Sampling with SGLang's server through its native endpoints: started by the run in another Python, or running elsewhere.

Written against the documented API of SGLang 0.5: /generate, /update_weights_from_disk, /get_model_info, /get_weights_by_name,
/flush_cache, /release_memory_occupation, /resume_memory_occupation. Its log-probs include the temperature, but not the cuts
of top_k, top_p and min_p (the plan of a run reports that when cuts are set).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from posttrain.backends.serving.engine import ServedEngine
from posttrain.backends.serving.launch import Follower, LaunchedServer, arguments, free_port
from posttrain.backends.serving.protocol import SampledResponse, UnusableAnswer, exact, field_of
from posttrain.backends.serving.replicas import Replica, Replicas
from posttrain.backends.serving.settings import replicas_of
from posttrain.errors import MissingDependency, Problem, RunStopped
from posttrain.interfaces.rollout_engine import BroadcastPlan, SamplerPlan, Served
from posttrain.libraries.json_http import ANSWER, HttpFailure
from posttrain.models.weight_transfer import Manifest, WeightsDiffer, check_folder, read_folder, read_manifest
from posttrain.records.trajectories import SamplingParams
from posttrain.registry import ROLLOUT_ENGINES

if TYPE_CHECKING:
    import httpx2

STARTUP_S = 600.0
LOAD_S = 1800.0
PROBED_TENSORS = 3  # tensors read back after every sync
PROBED_ELEMENTS = 1 << 16  # longest first row of such a tensor
_NOT_ARGUMENTS = (
    "python", "startup_timeout_s", "api_key_env", "free_cache_engine", "layered_summon", "multi_stage_wake_up", "limit_images",
    "weight_sync_backend", "weight_transfer_threshold_cuda_ipc_GB", "swap_space",
    "override_existing_update_group", "remote_inference_engine_urls", "vllm_v1_disable_multiproc", "disable_log_stats",
    "disable_mm_preprocessor_cache",
)  # fmt: skip
_RENAMED = {
    "model_dtype": "dtype",
    "gpu_memory_utilization": "mem_fraction_static",
    "tensor_parallel_size": "tp_size",
    "inference_engine_pipeline_parallel_size": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "inference_engine_data_parallel_size": "dp_size",
    "inference_engine_expert_parallel_size": "ep_size",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "max_model_len": "context_length",
    "enforce_eager": "disable_cuda_graph",
}


class SglangProtocol:
    """Requests to /generate and their answers."""

    health_path = "/health"
    gives_prompt_logprobs = False

    def __init__(self, end_tokens: frozenset[int]):
        self._end_tokens = end_tokens
        self.expected: Served | None = None  # the weights that every answer must come from; None: none was sent yet

    def request(self, token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> tuple[str, dict[str, Any]]:
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._end_tokens)}
        more = dict(sampling.engine_sampling)
        if "min_tokens" in more:
            more["min_new_tokens"] = more.pop("min_tokens")
        if more.pop("include_stop_str_in_output", True) is not True:
            raise RunStopped(
                "engine_sampling.include_stop_str_in_output=false: stop texts are always kept in the response"
            )
        return "/generate", {
            "input_ids": list(token_ids),
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": sampling.max_response_tokens,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k or -1,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "stop": list(sampling.stop),
                "stop_token_ids": sorted(ends),
                "ignore_eos": sampling.ignore_eos,
                "skip_special_tokens": False,
                "no_stop_trim": True,
                "sampling_seed": seed,  # needs a server started with enable_deterministic_inference
                **more,
            },
        }

    def read(self, answer: Any) -> SampledResponse:
        """Parse an answer. Raises: UnusableAnswer, also for an answer computed with other weights than were sent."""
        meta = field_of(answer, "meta_info")
        found = field_of(meta, "weight_version")
        if self.expected is not None and found != version_text(self.expected):
            raise UnusableAnswer(
                f"a response comes from weight version {found}, but {version_text(self.expected)} was sent"
            )
        rows = field_of(meta, "output_token_logprobs")
        pairs = [row for row in rows if isinstance(row, list) and len(row) >= 2] if isinstance(rows, list) else None
        token_ids, logprobs = exact(
            "the answer of SGLang",
            None if pairs is None else [row[1] for row in pairs],
            None if pairs is None else [row[0] for row in pairs],
            fix="it must answer return_logprob with output_token_logprobs, as SGLang 0.5 does",
        )
        return SampledResponse(token_ids, logprobs, str(field_of(meta, "finish_reason", "type")))


class SglangEngine(ServedEngine):
    """See interfaces.rollout_engine.WeightTaker."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        plan: SamplerPlan,
        replicas: Replicas,
        server: LaunchedServer | None = None,
    ):
        self._words = SglangProtocol(plan.end_tokens)
        super().__init__(tokenizer, plan.end_tokens, replicas, self._words)
        self.note = plan.note
        self.server = server  # None: running elsewhere
        if server:
            replicas.last_words = server.last_lines
        # Only the cache: released weights come back as garbage, and validation may follow without a sync.
        self._frees = bool(plan.options.get("free_cache_engine", False))
        self._asleep = False

    def load_folder(self, folder: Path, announced: Served) -> list[tuple[str, Served]]:
        """Load weights. SGLang does not verify what it reads: the folder is checked before, and some tensors are read back."""
        try:
            manifest = read_manifest(folder, announced.content_hash)
            check_folder(folder, manifest)
        except WeightsDiffer as error:
            raise RunStopped(f"the weights for SGLang differ from those sent: {error}") from error

        async def load(client: httpx2.AsyncClient) -> list[tuple[str, Served]]:
            await self._wake(client)
            tell = self.replicas.tell_all
            body = {"model_path": str(folder), "weight_version": version_text(announced)}
            for replica, answer in await tell(client, "POST", "/update_weights_from_disk", body, timeout_s=LOAD_S):
                if field_of(answer, "success") is not True:
                    raise RunStopped(f"{replica} rejected the weights: {field_of(answer, 'message')}")
            for replica, _ in await tell(client, "GET", "/health", timeout_s=60):
                await self._flush(client, replica)
            for name, tensor in _probed(folder, manifest):
                await self._compare(client, name, tensor)
            answers = await tell(client, "GET", "/get_model_info", timeout_s=60)
            return [(str(replica), _served(str(replica), answer)) for replica, answer in answers]

        reports = self.control(load)
        self.content_hash = announced.content_hash
        self._words.expected = announced
        return reports

    def load_adapter(self, folder: Path, announced: Served) -> list[tuple[str, Served]]:
        raise RunStopped("rollout.engine=sglang loads whole weights only: use rollout.weight_sync=disk")

    def receive(self, manifest: str, announced: Served, group: BroadcastPlan) -> list[tuple[str, Served]]:
        raise RunStopped("rollout.engine=sglang loads weights from a folder: use rollout.weight_sync=disk")

    async def before_generate(self, client: httpx2.AsyncClient) -> None:
        await self._wake(client)

    async def after_generate(self, client: httpx2.AsyncClient) -> None:
        if self._frees:
            body = {"tags": ["kv_cache"]}
            await self.replicas.tell_all(client, "POST", "/release_memory_occupation", body, timeout_s=60)
            self._asleep = True

    async def _wake(self, client: httpx2.AsyncClient) -> None:
        if self._asleep:
            body = {"tags": ["kv_cache"]}
            await self.replicas.tell_all(client, "POST", "/resume_memory_occupation", body, timeout_s=60)
            self._asleep = False

    async def _flush(self, client: httpx2.AsyncClient, replica: Replica) -> None:
        """Flush the cache, which was computed with the old weights. The answer is a text, not JSON."""
        try:
            await self.replicas.ask_once(client, replica, "POST", "/flush_cache")
        except HttpFailure as failure:
            if failure.kind != ANSWER:
                raise RunStopped(f"the cache of old weights could not be flushed: {failure}") from None

    async def _compare(self, client: httpx2.AsyncClient, name: str, tensor: Tensor) -> None:
        """Compare the first row of a tensor with the server's. A name unknown to the server (tied, fused) is skipped."""
        body = {"name": name, "truncate_size": 1}
        for replica, answer in await self.replicas.tell_all(client, "POST", "/get_weights_by_name", body, timeout_s=60):
            if answer is None:
                continue
            row = torch.tensor(answer, dtype=torch.float32).flatten()
            wanted = tensor.flatten()[: row.numel()].float()
            if row.numel() == 0 or not torch.allclose(row, wanted, rtol=1e-2, atol=1e-6):
                raise RunStopped(f"{replica} holds another {name} than the one sent")

    def close(self) -> None:
        if self.server:
            self.server.close()


@ROLLOUT_ENGINES.register(
    "sglang",
    spans_nodes=True,
    lacks_options=("disable_log_stats", "disable_mm_preprocessor_cache", "limit_images", "swap_space", "VLLM_USE_V1"),
)
def start_sglang(plan: SamplerPlan, tokenizer: PreTrainedTokenizerBase) -> SglangEngine | Follower:
    """Connect to rollout.endpoints; without them, start a server with engine_options.python, or with this Python; of a
    copy over several machines, this machine's part of it.

    Raises: MissingDependency when SGLang is not installed; RunStopped when it does not start.
    """
    if plan.endpoints:
        return SglangEngine(tokenizer, plan, replicas_of(plan, plan.endpoints))
    python = plan.options.get("python")
    if python is None and find_spec("sglang") is None:
        fix = (
            "name a Python that has it (rollout.engine_options.python=/path/to/venv/bin/python) or servers "
            "(rollout.endpoints=[http://host:30000])"
        )
        what = "sglang is not installed in this Python (needed by rollout.engine=sglang)"
        raise MissingDependency(Problem(what, fix=fix, field="rollout.engine"))
    server = start_server(plan, str(python or sys.executable))
    if plan.span is not None and plan.span.rank > 0:
        return Follower(server)
    return SglangEngine(tokenizer, plan, replicas_of(plan, [server.url]), server)


def start_server(plan: SamplerPlan, python: str) -> LaunchedServer:
    """Start SGLang in a Python, as a server on this machine, and wait until it is ready; on a further machine of a copy that lies
    on several, start its processes there. Raises: RunStopped when it does not start."""
    port = free_port()
    words = arguments({**server_arguments(plan), "host": plan.host, "port": port}, off=None)
    command = [python, "-m", "sglang.launch_server", *words]
    server = LaunchedServer(command, port=port, name="SGLang's server", environment={}, host=plan.host)
    if plan.span is None or plan.span.rank == 0:
        server.wait_until_ready("/health", float(plan.options.get("startup_timeout_s") or STARTUP_S))
    return server


def server_arguments(plan: SamplerPlan) -> dict[str, Any]:
    """Return the arguments of sglang.launch_server: engine_options unchanged (attention_backend, mem_fraction_static, ...), over
    those from the rest of the configuration."""
    words: dict[str, Any] = {
        "model_path": plan.model_path,
        "tokenizer_path": plan.tokenizer_path,
        "json_model_override_args": dict(plan.config_overrides) or None,
        "dtype": plan.dtype,
        "random_seed": plan.seed,
        "trust_remote_code": plan.trust_remote_code,
        "context_length": plan.max_model_len,
        "max_running_requests": plan.max_concurrent_sequences,
        "chunked_prefill_size": plan.max_prefill_tokens,
        "tp_size": plan.tensor_parallel,
        "enable_memory_saver": bool(plan.options.get("free_cache_engine")) or None,
        "skip_server_warmup": True,
    }
    if plan.span is not None:
        meeting = f"{plan.span.address}:{plan.span.port}"
        words |= {"nnodes": plan.span.nodes, "node_rank": plan.span.rank, "dist_init_addr": meeting}
    for name, value in plan.options.items():
        if name in _NOT_ARGUMENTS or value is None:
            continue
        if name == "load_format":
            value = (
                "dummy"
                if value.startswith("dummy")
                else value
                if value not in ("hf", "dtensor", "megatron")
                else "auto"
            )
        elif name == "enable_chunked_prefill":
            name, value = "chunked_prefill_size", words["chunked_prefill_size"] if value else -1
        elif name == "enable_prefix_caching":
            name, value = "disable_radix_cache", not value
        words[_RENAMED.get(name, name)] = value
    return {name: value for name, value in words.items() if value is not None}


def version_text(served: Served) -> str:
    """Return the weight version sent to SGLang, which repeats it in every answer."""
    return f"{served.version}-{served.content_hash}"


def _served(name: str, answer: Any) -> Served:
    text = field_of(answer, "weight_version")
    version, _, content_hash = text.partition("-") if isinstance(text, str) else ("", "", "")
    if not version.isdecimal() or not content_hash:
        raise RunStopped(
            f"{name} does not report the weights it serves (weight_version {text!r}): use SGLang 0.5.2 or newer"
        )
    return Served(int(version), content_hash)


def _probed(folder: Path, manifest: Manifest) -> list[tuple[str, Tensor]]:
    """Choose some tensors, different ones for each version."""
    fit = [
        each.name
        for each in manifest.tensors
        if each.nbytes // max(each.shape[0] if each.shape else 1, 1) <= PROBED_ELEMENTS
    ]
    start = manifest.version * PROBED_TENSORS
    names = {fit[(start + step) % len(fit)] for step in range(min(PROBED_TENSORS, len(fit)))}
    found = ((name, tensor) for name, tensor in read_folder(folder, manifest) if name in names)
    return list(itertools.islice(found, len(names)))
