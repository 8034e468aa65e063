"""A fork's changes of verl's advantages, losses and updates are named where the launch computes with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from posttrain import verl_updates
from posttrain.checkout_files import parsed
from posttrain.cli.request import load_request
from posttrain.dialects.trees import NOTHING
from posttrain.verl_scoring import DIGITS, digest_of
from posttrain.verl_updates import ACTORS, ALGORITHMS, TRAINER, Changed, changed_updates, functions

ALGOS = """
def agg_loss(losses, mask):
    return losses.mean()
def compute_grpo_outcome_advantage(rewards, index):
    return rewards - 1
def compute_gae_advantage_return(rewards, values):
    return rewards - values
def compute_policy_loss(old, new, clip=0.2):
    return old - new
def compute_policy_loss_gspo(old, new):
    return old + new
def helper(x):
    return x
"""
ACTOR = """
class DataParallelPPOActor:
    def update_policy(self, data):
        return data
    def name(self):
        return 1
"""


def checkout(folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]) -> None:
    """A checkout whose files are verl's, but for these replacements in them."""
    known = set()
    for file, text in (
        (ALGORITHMS, ALGOS),
        (ACTORS["fsdp"], ACTOR),
        (TRAINER, "def apply_kl_penalty(data):\n    return 1\n"),
    ):
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        source = parsed(path)
        assert source is not None
        known |= {digest_of(node) for _, node in functions(source)}
        for old, new in changes.items():
            text = text.replace(old, new)
        path.write_text(text)
    monkeypatch.setattr(verl_updates, "_known", lambda: frozenset(known))


def found(folder: Path) -> dict[str, list[str]]:
    return {file: [each.name for each in changed] for file, changed in changed_updates(folder).items()}


def test_a_checkout_of_verl_has_changed_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout(tmp_path, monkeypatch, {})
    assert found(tmp_path) == {}


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("rewards - 1", "rewards - 2", {ALGORITHMS: ["compute_grpo_outcome_advantage"]}),
        ("clip=0.2", "clip=0.3", {ALGORITHMS: ["compute_policy_loss"]}),
        ("return data", "return data + 1", {ACTORS["fsdp"]: ["DataParallelPPOActor.update_policy"]}),
        ("data):\n    return 1", "data):\n    return 2", {TRAINER: ["apply_kl_penalty"]}),
        ("return x", "return x + 1", {}),  # nothing computes with it by itself
        ("    return rewards - 1", "    # more\n    return rewards - 1", {}),
    ],
)
def test_a_change_of_what_is_computed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, names: dict[str, list[str]]
) -> None:
    checkout(tmp_path, monkeypatch, {old: new})
    assert found(tmp_path) == names


KEYS = {
    "estimator": "algorithm.adv_estimator",
    "mode": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "strategy": "actor_rollout_ref.actor.strategy",
    "in_loss": "actor_rollout_ref.actor.use_kl_loss",
    "in_reward": "algorithm.use_kl_in_reward",
}


@pytest.mark.parametrize(
    ("name", "file", "values", "used"),
    [
        ("compute_grpo_outcome_advantage", ALGORITHMS, {"estimator": "grpo"}, True),
        ("compute_grpo_outcome_advantage", ALGORITHMS, {"estimator": "gae"}, False),
        ("compute_gae_advantage_return", ALGORITHMS, {"estimator": "gae"}, True),
        (
            "compute_reinforce_plus_plus_baseline_outcome_advantage",
            ALGORITHMS,
            {"estimator": "reinforce_plus_plus"},
            False,
        ),
        ("compute_mine_outcome_advantage", ALGORITHMS, {"estimator": "mine"}, False),  # called as it is
        ("compute_policy_loss", ALGORITHMS, {}, True),
        ("compute_policy_loss", ALGORITHMS, {"mode": "gspo"}, False),
        ("compute_policy_loss_vanilla", ALGORITHMS, {"mode": "vanilla"}, True),
        ("compute_policy_loss_gspo", ALGORITHMS, {"mode": "gspo"}, True),
        ("compute_policy_loss_gspo", ALGORITHMS, {"mode": "vanilla"}, False),
        ("agg_loss", ALGORITHMS, {}, True),
        ("kl_penalty", ALGORITHMS, {"in_loss": False, "in_reward": False}, False),
        ("kl_penalty", ALGORITHMS, {"in_loss": True, "in_reward": False}, True),
        ("apply_kl_penalty", TRAINER, {"in_reward": False}, False),
        ("apply_kl_penalty", TRAINER, {}, True),
        ("compute_value_loss", ALGORITHMS, {"estimator": "grpo"}, False),
        ("A.update_policy", ACTORS["fsdp"], {"strategy": "fsdp2"}, True),
        ("A.update_policy", ACTORS["fsdp"], {"strategy": "megatron"}, False),
        ("A.update_policy", ACTORS["megatron"], {"strategy": "megatron"}, True),
    ],
)
def test_it_counts_where_the_launch_computes_with_it(name: str, file: str, values: dict[str, Any], used: bool) -> None:
    given = {KEYS[key]: value for key, value in values.items()}
    assert Changed(name=name, file=file, line=1).may_happen(lambda key: given.get(key, NOTHING)) is used


def test_a_run_needs_it_confirmed_by_the_files_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout(tmp_path, monkeypatch, {"rewards - 1": "rewards - 2", "rewards - values": "values"})
    (tmp_path / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4\n"
    )
    monkeypatch.chdir(tmp_path)
    (asked,) = load_request(["run.sh"], None, skip_files=True).unsupported
    assert asked.field == "core_algos" and asked.fix.endswith("+posttrain.own_keys=[core_algos]")
    assert "verl/trainer/ppo/core_algos.py: compute_grpo_outcome_advantage (line 4); no version" in asked.what
    confirmed = load_request(["run.sh", "+posttrain.own_keys=[core_algos]"], None, skip_files=True)
    assert not confirmed.unsupported and any("confirmed by name (core_algos)" in each for each in confirmed.warnings)


def test_the_table_is_a_sorted_list_of_digests() -> None:
    text = json.loads(Path(verl_updates.__file__).with_suffix(".json").read_text())["digests"]
    digests = re.findall(rf"[0-9a-f]{{{DIGITS}}}", text)
    assert "".join(digests) == text and digests == sorted(set(digests)) and len(digests) > 2000
