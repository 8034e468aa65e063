"""A server class of the user's: started by the run, sent weights, sampled from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from posttrain.backends.serving.start import make_sampler
from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.errors import ConfigError, RunStopped
from posttrain.interfaces.rollout_engine import Request, Served
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason

SERVER = '''
import asyncio

class Server:
    """Counts up from its last prompt token, one token more than the version of its weights."""

    def __init__(self, config):
        assert config["dtype"] == "float32" and config["gentle"] is True, config
        self.version, self.most = 0, config["max_model_len"]

    async def load_weights(self, folder, version):
        self.version = version

    async def generate(self, prompt_ids, sampling_params, request_id):
        await asyncio.sleep(0.01)
        last = prompt_ids[-1]
        if last == 66:
            raise KeyError("not this one")
        if last == 67:
            return [1, 2]  # without log-probs
        ids = [last + 1 + place for place in range(min(self.version + 1, sampling_params["max_tokens"]))]
        return {"token_ids": ids, "log_probs": [-0.5] * len(ids)}

class Broken:
    def __init__(self, config):
        raise ValueError("no weights in here")
'''
SAMPLING = SamplingParams(max_response_tokens=4, samples_per_prompt=2, temperature=0.7)


def prompt(text: str) -> Prompt:
    return Prompt(prompt_id=text, token_ids=tuple(text.encode()), text=text, data_source="t")


def start(folder: Path, served_model: Path, name: str = "Server", **settings: Any) -> Any:
    (folder / "own.py").write_text(SERVER)
    options = {"server": f"{folder}/own.py:{name}", "gentle": True}
    rollout = RolloutConfig(engine="http", engine_options=options, retries=0, **settings)
    config = ModelConfig(path=str(served_model), compute_dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(served_model)
    cpu = torch.device("cpu")

    def no_model() -> Any:
        raise AssertionError("the server has a copy of its own")

    return make_sampler(rollout, config, no_model, tokenizer, device=cpu, seed=0, max_prompt_tokens=64)


def test_it_samples_and_takes_weights(served_model: Path, tmp_path: Path) -> None:
    engine = start(tmp_path, served_model)
    try:
        announced = Served(2, "hash")
        assert [report for _, report in engine.load_folder(tmp_path, announced)] == [announced]
        engine.weights_changed(2)
        [group] = engine.generate([prompt("A")], SAMPLING)  # A is token 65
        for response in group.trajectories:
            assert (response.token_ids, response.logprobs) == ((66, 67, 68), (-0.5,) * 3)
            assert (response.stop_reason, response.policy_version) == (StopReason.EOS, 2)
        with engine.open_stream(SAMPLING) as stream:
            stream.submit([Request("a", (80,), 2), Request("b", (66,), 2)])
            ended = {one.sample_id: one for _ in range(2) for one in stream.wait(30.0)}
        assert (ended["a"].token_ids, ended["a"].stop_reason) == ((81, 82), StopReason.LENGTH)
        # what it cannot do costs the response alone, and its own words are told
        assert ended["b"].stop_reason is StopReason.FAILED and "KeyError: 'not this one'" in ended["b"].failure
        with pytest.raises(RunStopped, match="log-probs"):
            engine.generate([prompt("C")], SAMPLING)
        process = engine.server.process
    finally:
        engine.server.close()
    assert process.poll() is not None


def test_one_that_does_not_start_says_why(served_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="ValueError: no weights in here"):
        start(tmp_path, served_model, "Broken")


def test_it_is_started_by_the_run(served_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is started by the run"):
        start(tmp_path, served_model, endpoints=["http://127.0.0.1:9"])
