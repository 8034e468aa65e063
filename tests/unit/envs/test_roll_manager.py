"""An environment manager written for ROLL: its own loop plays, and its requests are turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from driven import RAY, Driven
from posttrain.envs.agent import AgentFailed
from posttrain.envs.agent.bridged import bridge_of
from posttrain.envs.roll_manager import BRIDGE, PYTHON, roll_manager
from posttrain.envs.roll_manager.bridge import answer_of, number_of
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvAsk, EnvSpec, EnvStep
from posttrain.plan.environments.roll_manager import roll_manager as problems_of
from posttrain.records.trajectories import SamplingParams

pytestmark = pytest.mark.usefixtures("warm_children")

# The parts of ROLL that a manager meets, with the interfaces of October 2025.
PROTOCOL = """
class Columns:
    # That of August 2026 is no mapping
    def __init__(self, values):
        self.get, self.keys, self.items = values.get, values.keys, values.items
    def __getitem__(self, name):
        raise KeyError(f"Key '{name}' not found in batch or remote_batch")

class DataProto:
    def __init__(self, batch=None, non_tensor_batch=None, meta_info=None):
        self.batch, self.meta_info = batch, meta_info or {}
        self.non_tensor_batch = Columns(non_tensor_batch or {"text": ["a"]})
"""
TENSORDICT = """
class TensorDict(dict):
    def __init__(self, values, batch_size):
        super().__init__(values)
        self.batch_size = (batch_size,)
"""
DACITE = "def from_dict(made, values): return made(values)"
CONFIG = """
from types import SimpleNamespace

class AgenticConfig:
    def __init__(self, values):
        assert values["actor_infer"]["strategy_args"] == {"strategy_name": "vllm"}, values
        self.sequence_length = values["sequence_length"]
        for name, tag in (("train_env_manager", "words"), ("val_env_manager", "held")):
            config = {"tag": tag, "group_id": 3, "env_id": 7, "group_seed": 99,
                      "max_env_step_concurrent": 4, "mode": values["mode"]}
            setattr(self, name, SimpleNamespace(env_configs={0: {7: config}}, llm_proxy="policy"))
"""
PROXIES = """
from .base_llm_proxy import BaseLLMProxy, LLM_PROXY_REGISTRY

def create_llm_proxy(generate_scheduler, llm_proxy_config, tokenizer, env):
    return LLM_PROXY_REGISTRY[llm_proxy_config](generate_scheduler, llm_proxy_config, tokenizer, env)
"""
BASE_PROXY = """
LLM_PROXY_REGISTRY = {}

class BaseLLMProxy:
    def __init__(self, generate_scheduler, llm_proxy_config, tokenizer, env):
        self.tokenizer = tokenizer
"""
MANAGER = """
import ray, torch
from tensordict import TensorDict
from roll.pipeline.agentic.llm_proxy import create_llm_proxy
from roll.distributed.scheduler.protocol import DataProto

made = 0

class Manager:
    def __init__(self, worker_config, pipeline_config, env_config, tokenizer, generate_scheduler, output_queue, thread_lock,
                 mode="train"):
        global made
        made += 1
        assert made <= 2 and env_config["max_env_step_concurrent"] == 0 and env_config["group_seed"] == 0
        self.config, self.tokenizer, self.queue, self.mode = env_config, tokenizer, output_queue, mode
        self.scheduler = generate_scheduler
        self.proxy = create_llm_proxy(generate_scheduler, worker_config.llm_proxy, tokenizer, None)
        print("managers print")

    def asked(self, ids, tokens=5):
        rows = {"input_ids": torch.tensor([[0, *ids]]), "attention_mask": torch.tensor([[0] + [1] * len(ids)])}
        data = DataProto(batch=TensorDict(rows, batch_size=1), meta_info={"src_rank": 0})
        how = {"max_new_tokens": tokens, "stop_strings": ["!"]}
        if self.config["mode"] == "pool":
            data.meta_info["lora_name"] = None
        if self.config["mode"] == "scheduler":  # as before ROLL had proxies
            data.meta_info["generation_config"] = how
            out = ray.get(self.scheduler.generate_one_request.remote(data=data))
        else:
            out = self.proxy.generate(messages=[], lm_input=data, generation_config=how)
        said = out.batch["responses"][0].tolist()
        assert out.batch["infer_logprobs"][0][-len(said):].tolist() == [-1.0] * len(said) and "src_rank" not in out.meta_info
        assert out.batch["input_ids"][0].tolist() == ids + said and out.batch["prompt_mask"][0].sum() == len(ids)
        return said

    def run_rollout_loop(self, data):
        self.running = True
        seed = data.meta_info["seed"] + self.config["group_seed"]
        episode = ray.get(self.queue.get_episode_id.remote(self.config["group_id"]))
        while self.running:
            rollout = self.played(seed + episode)
            ray.get(self.queue.put.remote(self.config["group_id"], episode, 0, rollout))
            episode = ray.get(self.queue.get_episode_id.remote(self.config["group_id"]))
        assert episode is None
        ray.get(self.queue.put.remote(self.config["group_id"], episode, 0, None))

    def played(self, seed):
        start = [65, 65 + seed % 7]
        first = self.asked(start)
        helper = self.asked([90]) if self.config["mode"] == "helper" else None
        ids = start + first + [46]
        last = self.asked(ids)
        tokens, masks = ids + last, [0, 0] + [1] * len(first) + [0] + [1] * len(last)
        if self.config["mode"] == "masked":
            masks = [0] * len(masks)
        scores = [0.0] * (len(tokens) - 1) + [0.25 if self.mode == "train" else 0.75]
        rows = {"input_ids": tokens + [0], "attention_mask": [1] * len(tokens) + [0], "response_mask": masks + [0],
                "scores": scores + [0.0]}
        metrics = {"env/words/success": [1, 0], "env/num": 2, "env/words/name": "x"}
        rows = {name: torch.tensor([row]) for name, row in rows.items()}
        return DataProto(batch=TensorDict(rows, 1), non_tensor_batch={"episode_scores": [9.0]}, meta_info={"metrics": metrics})
"""
# Letters for tokens
TRANSFORMERS = """
class AutoTokenizer:
    pad_token = eos_token = "!"
    @classmethod
    def from_pretrained(cls, path, padding_side):
        assert path == "m"
        return cls()
    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Driven]]:
    site, checkout = tmp_path / "site", tmp_path / "checkout"
    for name, text in (("ray", RAY), ("transformers", TRANSFORMERS), ("tensordict", TENSORDICT), ("dacite", DACITE)):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text(text)
    agentic = checkout / "roll/pipeline/agentic"
    for name, text in {
        "roll/distributed/scheduler/protocol.py": PROTOCOL,
        "roll/pipeline/agentic/agentic_config.py": CONFIG,
        "roll/pipeline/agentic/llm_proxy/__init__.py": PROXIES,
        "roll/pipeline/agentic/llm_proxy/base_llm_proxy.py": BASE_PROXY,
        "roll/pipeline/agentic/env_manager/mine.py": MANAGER,
    }.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert agentic.is_dir()
    running: list[Driven] = []

    def start(mode: str, seed: int = 1_000_003) -> Driven:
        spec = EnvSpec(name="roll_manager", sampling=SamplingParams(max_response_tokens=64), honours=["stop"])
        tag = "words" if seed >= 1_000_000 else "held"
        manager = "roll.pipeline.agentic.env_manager.mine.Manager"
        values = {"sequence_length": 100, "mode": mode}
        env = roll_manager(
            spec, folder=str(checkout), manager=manager, tag=tag, values=values, model="m", python=str(python)
        )
        running.append(Driven(env, seed))
        return running[-1]

    yield start
    for each in running:
        each.env.close()
    bridge_of(str(python), BRIDGE, "ROLL").kill()


def played(play: Driven) -> EnvStep:
    """Answer two turns of one sample: CD behind the prompt, EF behind a full stop."""
    first = play.next()
    assert isinstance(first, EnvAsk) and first.max_response_tokens == 5
    play.answer(first, "CD", 67, 68)
    second = play.next()
    assert (second.line, second.prompt) == (first.line, (46,))
    play.answer(second, "EF", 69, 70)
    end = play.next()
    assert isinstance(end, EnvStep) and end.done
    return end


@pytest.mark.parametrize("mode", ["proxy", "scheduler"])
def test_its_requests_are_turns_of_one_sample(started: Callable[..., Driven], mode: str) -> None:
    """The score of its row is the reward, 0.25 in training and 0.75 in validation. A manager is made once for each of these."""
    for seed, reward in ((1_000_003, 0.25), (1_000_003, 0.25), (5, 0.75)):
        play = started(mode, seed)
        assert played(play).reward == reward
        counts = {"num_actions": 2, "refused_turns": 0, "abandoned_turns": 0}
        own = {"success": 0.5, "num": 2.0} if seed >= 1_000_000 else {"words/success": 0.5, "num": 2.0}
        assert play.env.close() == own | counts


def test_the_seed_is_the_episodes_own(started: Callable[..., Driven]) -> None:
    """1,000,003 % 7 = 4 begins with A and E."""
    assert started("proxy").next().prompt == (65, 65 + 1_000_003 % 7)


def test_a_request_that_its_rollout_does_not_hold_is_not_trained(started: Callable[..., Driven]) -> None:
    play = started("helper")
    lines = []
    for said in ("CD", "XY", "EF"):
        asked = play.next()
        lines.append(asked.line)
        play.answer(asked, said, *map(ord, said))
    end = play.next()
    agent, helper, again = lines
    assert agent == again != helper and end.learned == {agent: None}


def test_other_weights_and_masked_episodes_fail(started: Callable[..., Driven]) -> None:
    with pytest.raises(AgentFailed, match="other weights"):
        started("pool").next()
    play = started("masked")
    for said in ("CD", "EF"):
        play.answer(play.next(), said, *map(ord, said))
    with pytest.raises(AgentFailed, match="masks the whole trajectory"):
        play.next()


def test_rows_of_turns_have_the_score_of_their_episode() -> None:
    rows = [([1, 2, 3], [False, False, True], 0.5), ([1, 9, 4], [False, True, True], 0.0)]
    found = answer_of([{"rows": rows, "scores": [2.0, 2.0], "metrics": {}}], "words")
    assert found["reward"] == 2.0
    assert found["rows"] == ([[1, 2], [1]], [[3], [9, 4]], [[True], [True, True]])
    assert "without episode_scores" in answer_of([{"rows": rows, "scores": None, "metrics": {}}], "words")["failure"]
    assert "no rollout" in answer_of([], "words")["failure"]


@pytest.mark.parametrize(
    ("value", "number"),
    [(2, 2.0), ([1, 2], 1.5), (True, 1.0), ("x", None), ([], None), (float("nan"), None), (float("inf"), None)],
)
def test_metrics_are_numbers(value: Any, number: float | None) -> None:
    assert number_of(value) == number


def test_its_python_and_its_checkout_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    spec = EnvSpec(name="roll_manager", sampling=SamplingParams(max_response_tokens=64))
    with pytest.raises(ConfigError, match=PYTHON):
        roll_manager(spec, folder=str(tmp_path), manager="m.M", tag="words", values={}, model="m")
    said = [str(each) for each in problems_of({"folder": str(tmp_path)}, "environment.settings")]
    assert len(said) == 2 and PYTHON in said[0] and "there is no package roll" in said[1]
    (tmp_path / "roll").mkdir()
    assert not list(problems_of({"folder": str(tmp_path), "python": sys.executable}, "environment.settings"))
