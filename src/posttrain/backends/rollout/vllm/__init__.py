"""Sampling with vLLM: in this process, in a server that the run starts in another Python, or in servers running elsewhere."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from transformers import PreTrainedTokenizerBase

from posttrain.backends.rollout.vllm.server import VllmServerEngine, start_server
from posttrain.backends.serving.launch import Follower
from posttrain.backends.serving.settings import replicas_of
from posttrain.errors import ConfigError, MissingDependency, Problem
from posttrain.interfaces.rollout_engine import SamplerPlan, WeightTaker
from posttrain.registry import ROLLOUT_ENGINES


@ROLLOUT_ENGINES.register(
    "vllm", most_temperature=2.0, spans_nodes=True, receives_broadcasts=True, records_experts=True, reads_images=True
)
def start_vllm(plan: SamplerPlan, tokenizer: PreTrainedTokenizerBase) -> WeightTaker | Follower:
    """Connect to rollout.endpoints; or start a server with engine_options.python; or else load vLLM in this process.
    Of a copy over several machines, start this machine's part of the server.

    Raises: ConfigError; MissingDependency when vLLM is not installed; RunStopped when it does not start.
    """
    if plan.options.get("sleep_level") not in (None, 1):
        what = "sleep_level 2 discards the weights, and validation after a step would sample without any"
        field = "rollout.engine_options.sleep_level"
        raise ConfigError(Problem(what, fix="use 1, which keeps them in host memory", field=field))
    if plan.expert_layers and not plan.cuda and not plan.endpoints:
        what = "vLLM reports the experts of its tokens on GPUs alone (its second model runner takes Triton)"
        field = "rollout.routing_replay"
        raise ConfigError(Problem(what, fix="use rollout.engine=native, which records them anywhere", field=field))
    if plan.endpoints:
        return VllmServerEngine(tokenizer, plan, replicas_of(plan, plan.endpoints))
    python = plan.options.get("python")
    if python is None and plan.span is not None and find_spec("vllm") is not None:
        python = sys.executable  # processes on several machines are servers
    if python:
        server = start_server(plan, str(python))
        if plan.span is not None and plan.span.rank > 0:
            return Follower(server)
        return VllmServerEngine(tokenizer, plan, replicas_of(plan, [server.url]), server)
    if find_spec("vllm") is None:
        fix = (
            "name a Python that has it (rollout.engine_options.python=/path/to/venv/bin/python) or servers "
            "(rollout.endpoints=[http://host:8000]); or pip install 'posttrain[vllm]'"
        )
        what = "vllm is not installed in this Python (needed by rollout.engine=vllm)"
        raise MissingDependency(Problem(what, fix=fix, field="rollout.engine"))
    from posttrain.backends.rollout.vllm.in_process import VllmInProcessEngine

    return VllmInProcessEngine(tokenizer, plan)


__all__ = ["start_vllm"]
