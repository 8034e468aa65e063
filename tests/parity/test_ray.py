"""A run whose models live in workers gives the numbers of a run in one process: samples, rewards, losses, gradients, weights.

float32: to 1e-5 of a number's size; below 1e-6 numbers are the rounding of others (the gap between sampler and trainer).
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from ray_runs import assert_same, config, metrics_of
from safetensors.torch import load_file

from posttrain.build.train import train_run

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

SHARDED = {"policy": {"engine": "fsdp"}, "placement": {"devices": 2}}
# What is different from a run in one process, by name: changes of sections.
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "one rank": {},
    "two ranks that share sequences, the reference's parts on the CPU": {
        "policy": {"engine": "fsdp", "sequence_parallel": 2},
        "reference": {"engine_options": {"param_offload": True}},
        "placement": {"devices": 2},
    },
    "two ranks on two nodes, sampling where they train": SHARDED | {"placement": {"devices": 2, "nodes": 2}},
    "three ranks with uneven shares: 4 sequences of a mini-batch, 8 of a step": {
        "policy": {"engine": "fsdp", "uneven_shares": True},
        "placement": {"devices": 3},
    },
    "two ranks, two samplers elsewhere, through shared memory": {
        "policy": {"engine": "fsdp", "devices": [0, 1]},
        "reference": {"devices": [0, 1]},
        "rollout": {"devices": [2, 3], "weight_bucket_mib": 1},
        "placement": {"devices": 4},
    },
    "one rank, a sampler and two references elsewhere, by broadcast": {
        "policy": {"devices": [0]},
        "reference": {"devices": [1, 2]},
        "rollout": {"devices": [1], "weight_sync": "collective"},
        "placement": {"devices": 3},
    },
}


@pytest.fixture(autouse=True)
def all_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also tensors as small as these, which would travel with their record."""
    monkeypatch.setattr("posttrain.backends.runtime.ray.shelf.SMALLEST", 1)


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    return train_run(config(folder, tiny_llama, "run", {"tracking": {"batches_every_steps": 1}}))


def token_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of samples/step_1.tokens.jsonl, without the texts of tokens before them."""
    lines = (folder / "samples" / "step_1.tokens.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_of_a_run_in_one_process(
    way: str, address: str, in_process: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    changes = WAYS[way]
    changes = changes | {"placement": changes.get("placement", {}) | _ray(address)}
    folder = train_run(config(tmp_path, tiny_llama, "run", changes | {"tracking": {"batches_every_steps": 1}}))
    assert_same(folder, in_process)
    mine, theirs = (load_file(each / "batches" / "step_1.safetensors") for each in (folder, in_process))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=1e-5, equal_nan=True)
    for here, there in zip(token_rows(folder), token_rows(in_process), strict=True):
        assert here.keys() == there.keys() and here["token_ids"] == there["token_ids"]
        for name in ("rollout_logprobs", "advantages", "ref_gap"):  # in the file with 4 digits
            np.testing.assert_allclose(here[name], there[name], rtol=1e-3, atol=2e-4, err_msg=name)
    workers = json.loads((folder / "workers" / "workers.json").read_text())
    assert len({worker["node"] for worker in workers.values()}) == changes["placement"].get("nodes", 1)


def test_a_run_goes_on_with_another_number_of_ranks(
    address: str, in_process: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    """A step in one process, one on two ranks, and one in one process again: as if nothing had changed."""
    ray = SHARDED | {"placement": SHARDED["placement"] | _ray(address)}
    for steps, changes in enumerate([{}, ray, {}], start=1):
        folder = train_run(config(tmp_path, tiny_llama, "run", changes, steps=steps), allow_config_change=True)
    assert_same(folder, in_process)


def test_a_critic_and_a_reward_model_of_a_run_in_one_process(
    address: str, tmp_path: Path, tiny_llama: Path, tiny_scorer: Path
) -> None:
    """PPO: on one rank, on two that hold all roles and share out the reward model's weights too, and on two of three, with
    a critic on the third beside one of two copies of the reward model."""
    ppo: dict[str, dict[str, Any]] = {
        "advantage": {"name": "gae", "gae_lambda": 0.9},
        "critic": {"sequences_per_mini_batch": 4, "optimizer": {"lr": 3e-3}},
        "reward": {"terms": [], "model": {"path": str(tiny_scorer)}, "kl": {"coef": 0.01}},
        "policy": {"shuffle": True, "shuffle_seed": 3},
    }
    alone = train_run(config(tmp_path, tiny_llama, "alone", ppo))
    apart = {"devices": [0, 1]}
    ways: dict[str, dict[str, dict[str, Any]]] = {
        "one rank": {},
        "two ranks": {
            "policy": {"engine": "fsdp"},
            "critic": {"engine": "fsdp"},
            "reward": {
                "model": {"path": str(tiny_scorer), "engine": "fsdp", "sequences_per_micro_batch_per_device": 3}
            },
            "placement": {"devices": 2},
        },
        "apart": {
            "policy": {"engine": "fsdp"} | apart,
            "reference": apart,
            "rollout": apart,
            "critic": {"devices": [2]},
            "reward": {"model": {"path": str(tiny_scorer), "devices": [1, 2]}},
            "placement": {"devices": 3},
        },
    }
    for name, way in ways.items():
        changes = {section: ppo.get(section, {}) | way.get(section, {}) for section in ppo.keys() | way.keys()}
        changes["placement"] = changes.get("placement", {}) | _ray(address)
        found = train_run(config(tmp_path, tiny_llama, name.replace(" ", "_"), changes))
        # The critic learns at 3e-3, and Adam makes steps of nearly that size of gradients that are little but rounding.
        assert_same(found, alone, roles=("policy", "critic"), weights_to=3e-5)


def test_conversations_have_the_same_numbers(address: str, tmp_path: Path, tiny_llama: Path) -> None:
    """Turns of episodes are requests that come while others are sampled, in two workers."""
    game = {
        "data": {"train_files": []},
        "reward": {"terms": []},
        "environment": {
            "name": "guess_number",
            "settings": {"low": 1, "high": 4},
            "max_turns": 3,
            "train_episodes": 8,
            "validation_episodes": 1,
            "workers": 0,
        },
    }
    alone = train_run(config(tmp_path, tiny_llama, "alone", game))
    two = game | SHARDED | {"placement": SHARDED["placement"] | _ray(address)}
    assert_same(train_run(config(tmp_path, tiny_llama, "run", two)), alone)


OWN_DISTRIBUTIONS = """
import json, urllib.request

def plays(episode):
    '''Two turns: one warmer than the run, one within a schema and colder.'''
    messages = [{"role": "user", "content": "say"}]
    schema = {"type": "json_schema", "json_schema": {"name": "number", "schema": {"enum": [17, 4, "red"]}}}
    for own in ({"temperature": 1.6}, {"temperature": 0.5, "response_format": schema}):
        body = json.dumps({"model": "policy", "messages": messages, **own}).encode()
        headers = {"Authorization": "Bearer " + episode.api_key, "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(episode.base_url + "/chat/completions", body, headers)) as said:
            message = json.load(said)["choices"][0]["message"]
        messages += [message, {"role": "user", "content": "more"}]
    assert message["content"] in ("17", "4", '"red"'), message
    return len(message["content"]) / 5
"""


def test_distributions_of_their_own_have_the_same_numbers(address: str, tmp_path: Path, tiny_llama: Path) -> None:
    """Turns of an agent that are drawn warmer, or within a grammar, are trained as they were drawn, in two workers as in one."""
    pytest.importorskip("llguidance")
    (tmp_path / "agent.py").write_text(OWN_DISTRIBUTIONS)
    agent = {
        "data": {"train_files": []},
        "reward": {"terms": []},
        "environment": {
            "name": "agent",
            "settings": {"function": f"{tmp_path / 'agent.py'}:plays"},
            "train_episodes": 8,
            "workers": 2,
        },
        "rollout": {"temperature": 0.9, "max_response_tokens": 12},
    }
    alone = train_run(config(tmp_path, tiny_llama, "alone", agent, steps=2))
    two = agent | SHARDED | {"placement": SHARDED["placement"] | _ray(address)}
    found = train_run(config(tmp_path, tiny_llama, "run", two, steps=2))
    assert_same(found, alone)
    assert max(line["gap/max"] for line in metrics_of(found)) < 1e-4  # sampler and trainer agree on the distributions


def _ray(address: str) -> dict[str, Any]:
    return {"runtime": "ray", "ray_address": address}


def test_what_a_sampler_made_outlives_it(address: str) -> None:
    """Arrays beside a message are the driver's: too large to travel with it, they are read after their process was killed."""
    import ray

    from posttrain.backends.runtime.ray.cluster import Cluster, RayArray, WorkerDied

    class Source:
        def made(self) -> tuple[int, tuple[NDArray[np.int64], ...]]:
            return os.getpid(), (np.arange(100_000), np.full(100_000, 3))

    cluster = Cluster(address, workers=1, object_store_bytes=0, start_timeout_s=60.0)
    try:
        source = ray.remote(Source).remote()
        pid, beside = cluster.call_for_two(source, "made")
        os.kill(cluster.value(pid, 60.0), signal.SIGKILL)
        with pytest.raises(WorkerDied):
            cluster.value(cluster.call(source, "made"), 60.0)
        assert RayArray(beside, 0).read().sum() == 99_999 * 50_000
        assert RayArray(beside, 1).read().sum() == 300_000
    finally:
        cluster.close()
