"""Servers of a language model for reward functions, which ask it by the server's own API."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from posttrain.backends.rollout.sglang import start_server as start_sglang_server
from posttrain.backends.rollout.vllm.server import start_server as start_vllm_server
from posttrain.backends.serving.launch import LaunchedServer
from posttrain.backends.serving.start import absolute
from posttrain.config import RunConfig
from posttrain.config.served_model import ServedModelConfig
from posttrain.errors import MissingDependency, Problem
from posttrain.interfaces.rollout_engine import SamplerPlan

STARTS = {"vllm": start_vllm_server, "sglang": start_sglang_server}


def start_reward_server(config: RunConfig, served: ServedModelConfig, *, cuda: bool, host: str) -> LaunchedServer:
    """Start one copy and wait until it is ready. Args: host, the address that it listens at.

    Raises: MissingDependency when no Python has the server; RunStopped when it does not start.
    """
    python = served.engine_options.get("python")
    if python is None and find_spec(served.engine) is None:
        fix = "name a Python that has it (reward.served.engine_options.python=/path/to/venv/bin/python)"
        what = f"{served.engine} is not installed in this Python (needed by reward.served.engine={served.engine})"
        raise MissingDependency(Problem(what, fix=fix, field="reward.served.engine"))
    path = absolute(served.path)
    names = {"served_model_name": list(dict.fromkeys([served.path, path]))} if served.engine == "vllm" else {}
    plan = SamplerPlan(
        model_path=path,
        tokenizer_path=path,
        trust_remote_code=served.trust_remote_code,
        dtype=config.model.compute_dtype,
        cuda=cuda,
        seed=config.run.seed,
        end_tokens=frozenset(),
        max_model_len=served.max_tokens,
        max_concurrent_sequences=served.max_concurrent_sequences,
        max_prefill_tokens=served.max_prefill_tokens,
        tensor_parallel=served.tensor_parallel,
        host=host,
        options=names | served.engine_options,
    )
    return STARTS[served.engine](plan, str(python or sys.executable))
