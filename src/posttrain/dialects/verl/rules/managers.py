"""The keys of forks whose trainer plays episodes with environment managers: verl-agent, and what grew from it.

A step of such a fork has data.train_batch_size starts with env.rollout.n episodes each; every turn is a response, with the
rewards of its whole episode less a penalty of its own where its action was invalid.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from posttrain.data.columns import ALL
from posttrain.dialects.env_managers import COEFFICIENT, PENALIZES, SETTINGS, own, plays_managers
from posttrain.dialects.plugged import own_path
from posttrain.dialects.reader import Reader
from posttrain.dialects.scripts.own_managers import class_of
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.names import ROLLOUT
from posttrain.registry import ADVANTAGES
from posttrain.verl_advantages import VALIDITY

_STEP_S = 600.0  # of one turn of all episodes of a group
_MEMORY_GIB = 64.0  # of a process with all copies of a group
_MODES = {"mean_norm": False, "mean_std_norm": True}
_GIGPO = "algorithm.gigpo"
_COPIES = "env.rollout.n"
_UNGROUPED = -1  # of _COPIES: every start has one episode, and all of a step the same group
_WITHOUT_GROUPS = ("gae", "reinforce_plus_plus")  # estimators that compare no responses


def set_group(keys: Reader) -> None:
    """Let the rules that follow read the episodes of a start as the responses of a prompt."""
    if not plays_managers(keys):
        return
    if keys[f"{ROLLOUT}.n"] != 1:
        what = f"{ROLLOUT}.n is {keys[f'{ROLLOUT}.n']}, and such a fork has env.rollout.n episodes of every start"
        keys.problem(what, key=f"{ROLLOUT}.n", fix=f"use {ROLLOUT}.n=1 with env.rollout.n")
    if not isinstance(own(keys, _COPIES, 1), int):
        keys.problem(f"{_COPIES} is {own(keys, _COPIES)!r} instead of a number", key=_COPIES, fix=f"use {_COPIES}=8")
    keys.put(f"{ROLLOUT}.n", _copies(keys))
    if own(keys, _COPIES, 1) == _UNGROUPED and keys["algorithm.adv_estimator"] not in _WITHOUT_GROUPS:
        estimator = keys["algorithm.adv_estimator"]
        what = f"{_COPIES} is {_UNGROUPED}, with which {estimator} compares all turns of a step, of whatever starts"
        keys.problem(what, key=_COPIES, fix=f"use {_COPIES}=8, or algorithm.adv_estimator=gae")


def _copies(keys: Reader) -> int:
    """Episodes of a start; one where the fork makes no groups."""
    count = own(keys, _COPIES, 1)
    return count if isinstance(count, int) and count != _UNGROUPED else 1


def without_scores(keys: Reader) -> dict[str, Any]:
    """The fields of the reward: the environment's alone."""
    manager = get(keys, "reward_model.reward_manager", "episode")
    if manager != "episode" and keys.written("reward_model.reward_manager"):
        what = f"the rewards are those of the environments, as the manager episode gives them, and {manager} may change them"
        keys.plan_only(what, key="reward_model.reward_manager", fix="use reward_model.reward_manager=episode")
    if keys["reward_model.enable"]:
        what = "a reward model beside environment managers is planned"
        keys.plan_only(what, key="reward_model.enable", fix="use reward_model.enable=False")
    for section in ("reward_model", "custom_reward_function"):
        if keys.ledger.is_section(section):
            keys.ignore(section, "the environments give the rewards")
    return {"reward.terms": []}


def managers(keys: Reader) -> dict[str, Any]:
    """The environment and the estimator; nothing for other launches."""
    if not plays_managers(keys):
        return {}
    file = Path(str(own(keys, f"{SETTINGS}.file")))
    name = str(own(keys, "env.env_name", ""))
    found = class_of(file, name)
    who = (
        f"{found[0]} (line {found[1]} of {file})"
        if found
        else f"what {own(keys, f'{SETTINGS}.function')} of {file} makes"
    )
    keys.warn(f"the episodes are played by {who}, for env.env_name={name}")
    if keys["data.truncation"] != "error":
        keys.warn(
            f"data.truncation={keys['data.truncation']}: a turn whose prompt has more than data.max_prompt_length tokens ends "
            "its episode; the fork cuts it"
        )
    penalty = own(keys, COEFFICIENT, 0.0) if own(keys, PENALIZES, True) else 0.0
    fields: dict[str, Any] = {
        "rollout.samples_per_prompt": _copies(keys),
        "environment.max_turns": own(keys, "env.max_steps"),
        "environment.sample_per_turn": True,
        "environment.turn_is_response": True,
        "environment.max_context_tokens": keys["data.max_prompt_length"],
        "environment.timeout_s": _STEP_S,
        "environment.memory_gib": _MEMORY_GIB,
        "environment.settings.config": _read_sections(keys, file),
        "environment.settings.invalid_action_penalty": penalty,
        "data.extra_columns": [ALL],
        # The managers give the pictures; those of the rows only say that there are some
        "data.image_column": None,
    }
    if _is_in_trainer(keys, penalty):
        # It reads the keys themselves
        fields["advantage.gamma"] = 1.0
    return fields | (_gigpo(keys) if keys["algorithm.adv_estimator"] == "gigpo" else {})


def _is_in_trainer(keys: Reader, penalty: Any) -> bool:
    """Return True for an estimator inside the fork's trainer; what it cannot have here is reported."""
    name = keys["algorithm.adv_estimator"]
    path = None if ADVANTAGES.is_built_in(name) else own_path(keys, "advantage.name", name)
    theirs = ADVANTAGES.written_for_verl(name, path) if path else None
    found = theirs.in_trainer if theirs is not None else None
    for key, line in found.others.items() if found is not None else ():
        if own(keys, key, False):
            what = f"with {key} the trainer computes the advantages of {name} in its loop (line {line} of {path})"
            keys.problem(what, key=key, fix=f"use {key}=False")
    if found is not None and VALIDITY in found.reads and not penalty:
        what = f"{name} (line {found.line} of {path}) reads {VALIDITY}, which a run here knows by the penalty of a turn"
        keys.problem(what, key=COEFFICIENT, fix=f"use {COEFFICIENT} above 0, such as 0.1, with {PENALIZES}=True")
    return found is not None


def _gigpo(keys: Reader) -> dict[str, Any]:
    mode = own(keys, f"{_GIGPO}.mode", "mean_norm")
    if mode not in _MODES:
        what = f"{_GIGPO}.mode is mean_norm or mean_std_norm, and not {mode}"
        keys.problem(what, key=f"{_GIGPO}.mode", fix=f"use {_GIGPO}.mode=mean_std_norm")
    fields: dict[str, Any] = {}
    if own(keys, f"{_GIGPO}.enable_similarity", False):
        fields["environment.similar_states"] = own(keys, f"{_GIGPO}.similarity_thresh", 0.95)
    return fields | {
        "advantage.gamma": 1.0,  # the discount is that of steps
        "advantage.step_gamma": keys["algorithm.gamma"],
        "advantage.step_weight": own(keys, f"{_GIGPO}.step_advantage_w", 1.0),
        "advantage.normalize_by_std": _MODES.get(mode, True),
        "advantage.episodes_by_step": True,
    }


def _read_sections(keys: Reader, file: Path) -> dict[str, Any]:
    """The sections of the configuration that the files of the environments name: ``config.env``, ``config.data``."""
    names = {"env", "data"}
    for each in sorted(file.parent.rglob("*.py")) if file.is_file() else ():
        names |= set(re.findall(r"\bconfig\.([a-z_]\w*)", each.read_text("utf-8", errors="replace")))
    return {name: keys.section(name) for name in sorted(names) if keys.section(name)}
