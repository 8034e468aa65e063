"""Features of a run, each as the sections that it changes in the runs of test_async_runs, for every asynchronous mode."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.data.shapes import Difficulty, write_shapes
from posttrain.models.tiny import write_tiny_model
from posttrain.models.tiny_vision import write_tiny_vision_model

Sections = dict[str, Any]

MODES: dict[str, Sections] = {
    "one_step": {"mode": "one_step"},
    "colocate": {"mode": "colocate", "max_staleness_steps": 2},
    "separate": {"mode": "separate", "max_staleness_steps": 2},
}

WORLD = """
from posttrain.interfaces.env import EnvStart, EnvStep

class Guess:
    def __init__(self, spec):
        self.turn = 0

    def reset(self, seed):
        self.turns = 1 + seed % 3
        return EnvStart(messages=[{"role": "user", "content": f"go {seed % 7}"}])

    def step(self, action):
        self.turn += 1
        return EnvStep(
            messages=[{"role": "user", "content": "on"}], reward=len(action) / 10, done=self.turn == self.turns
        )

    def close(self):
        return {"turns": float(self.turn)}
"""

AGENT = '''
import json, urllib.request

def ask(episode, messages):
    headers = {"Authorization": "Bearer " + episode.api_key}
    body = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(episode.base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]

def play(episode):
    """Ask once or twice, by the seed."""
    said = ask(episode, [{"role": "user", "content": "go"}])
    if episode.seed % 2:
        said = ask(episode, [{"role": "user", "content": "Shorter: " + said["content"][:3]}])
    return float(len(said["content"]))
'''


class Place(NamedTuple):
    """Folders and models that features are made of."""

    folder: Path
    model: Path
    scorer: Path


def _played(place: Place, environment: Sections, **more: Any) -> Sections:
    return {
        "data": {"train_files": [], "validation_files": [], "prompts_per_step": 2},
        "reward": {"terms": []},
        "environment": {"train_episodes": 10, "validation_episodes": 2, **environment},
        **more,
    }


def _world(place: Place) -> Sections:
    (place.folder / "world.py").write_text(WORLD)
    return _played(place, {"name": f"{place.folder}/world.py:Guess", "workers": 0})


def _world_processes(place: Place) -> Sections:
    sections = _world(place)
    sections["environment"]["workers"] = 6
    return sections


def _agent(place: Place) -> Sections:
    (place.folder / "agent.py").write_text(AGENT)
    settings = {"function": f"{place.folder}/agent.py:play"}
    return _played(place, {"name": "agent", "settings": settings, "workers": 6, "timeout_s": 60})


def _domains(place: Place) -> Sections:
    rows = [{"data_source": ("even", "odd")[n % 2], "prompt": f"{n}=", "answer": str(n)} for n in range(12)]
    (place.folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    domains = {
        "even": {"sources": ["even"], "prompts_per_step": 2},
        "odd": {"sources": ["odd"], "prompts_per_step": 1, "group_filter": {"strategy": "refill", "above_std": 0.3}},
    }
    return {
        "data": {"train_files": [str(place.folder / "mixed.jsonl")], "prompts_per_step": 3, "domains": domains},
        "group_filter": {"max_batches": 50},
        "policy": {"sequences_per_mini_batch": 9},
    }


def _images(place: Place) -> Sections:
    model, folder = place.folder / "vision", place.folder / "shapes"
    if not model.exists():
        write_tiny_vision_model(model, "qwen2_vl")
        write_shapes(
            folder, train_rows=8, validation_rows=2, seed=1, difficulty=Difficulty(max_shapes=4, kinds=1, size=24)
        )
    train, validation = sorted(folder.glob("*train*.parquet")), sorted(folder.glob("*valid*.parquet"))
    return {
        "model": {"path": str(model)},
        "data": {"train_files": [str(train[0])], "validation_files": [str(validation[0])]},
        "rollout": {"samples_per_prompt": 3, "max_response_tokens": 6},
    }


def _experts(place: Place) -> Sections:
    model = place.folder / "experts"
    if not model.exists():
        write_tiny_model(model, "qwen3_moe")
    return {
        "model": {"path": str(model)},
        "rollout": {"samples_per_prompt": 3, "max_response_tokens": 12, "routing_replay": True},
    }


def _teacher(place: Place) -> Path:
    folder = place.folder / "teacher"
    return folder if folder.exists() else write_tiny_model(folder, "llama", seed=7)


def _taught(name: str, enters: str) -> Callable[[Place], Sections]:
    return lambda place: {
        "distillation": {
            "teachers": {"other": {"path": str(_teacher(place))}},
            "divergence": {"name": name},
            "enters": enters,
        }
    }


def _plain(**sections: Any) -> Callable[[Place], Sections]:
    return lambda place: sections


def _bound(**changes: Any) -> Callable[[Place], Sections]:
    return _plain(asynchronous=changes)


WEIGHTS = {"weights": "token"}
GAE = {"name": "gae"}
FEATURES: dict[str, Callable[[Place], Sections]] = {
    "replace": _plain(group_filter={"strategy": "replace", "above_std": 0.3, "max_batches": 50}),
    "drop_groups": _plain(group_filter={"strategy": "drop", "above_std": 0.3}),
    "overlong": _plain(
        reward={"overlong_buffer_tokens": 8, "zero_unless_stopped": True}, loss={"mask_truncated": True}
    ),
    "turns_in_processes": _world_processes,
    "agent": _agent,
    "reward_model": lambda place: {"reward": {"model": {"path": str(place.scorer), "weight": 0.5}}},
    "critic": _plain(advantage=GAE, critic={"warmup_steps": 1, "optimizer": {"lr": 1e-3}}),
    "lora": _plain(policy={"lora": {"rank": 2}}),
    "domains": _domains,
    "kl_in_reward": _plain(reward={"kl": {"coef": 0.02, "target": 0.1}}, loss={"kl_coef": 0.0}),
    "taught_advantage": _taught("sampled_kl", "advantage"),
    "images": _images,
    "experts": _experts,
    "remax": _plain(advantage={"name": "remax"}),
    "loglinear": _plain(loss={"rollout_correction": WEIGHTS | {"proximal": "loglinear"}}),
    "m2po": _plain(loss={"rollout_correction": WEIGHTS | {"reject": ["step_m2"], "reject_bounds": ["0.04"]}}),
    "uncorrected": _plain(loss={"rollout_correction": {}}),
    "keep_cache": _bound(cache_on_new_weights="keep"),
    "S=1.5": _bound(max_staleness_steps=1.5),
    "running": _bound(max_running_groups=3),
    "every_2": _bound(sync_every_steps=2),
    "drop_refill": _plain(
        asynchronous={"on_stale": "drop"},
        group_filter={"strategy": "refill", "above_std": 0.3, "max_batches": 50},
    ),
    "drop_domains": lambda place: _domains(place) | {"asynchronous": {"on_stale": "drop"}},
    "fraction_domains": lambda place: _domains(place) | {"asynchronous": {"max_staleness_steps": 1.5}},
    "curriculum": _plain(data={"curriculum": {}}),
}
