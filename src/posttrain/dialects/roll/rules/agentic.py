"""Agentic pipelines: trajectories in environments take the place of prompts and rewards."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.rules.batches import forward_only, trajectory_batches
from posttrain.dialects.roll.rules.environments import environment, samples_turns
from posttrain.dialects.roll.rules.look import count, plain, samples_only, text_none
from posttrain.dialects.roll.rules.managers import ENVIRONMENT as OWN_MANAGER
from posttrain.dialects.roll.rules.objective import generalised
from posttrain.dialects.roll.rules.placement import RollLayout
from posttrain.registry import ADVANTAGES

TRAIN, VAL = "train_env_manager", "val_env_manager"
GROUP = "traj_group_id"
_BY_TAG = "tags"
_GENERATING = "generating_args"
_NO_PROMPTS = "environments take the place of prompts"
_BY_STD = ("mean_std", "asym_clip")  # methods that divide by the standard deviation
_UNREAD = {
    "num_return_sequences_in_group": "train_env_manager.group_size says how many trajectories begin alike",
    "prompt_length": "a conversation may grow to sequence_length",
    "actor_train.data_args.file_name": _NO_PROMPTS,
    "actor_train.data_args.prompt": _NO_PROMPTS,
    "actor_train.data_args.messages": _NO_PROMPTS,
    "actor_train.data_args.tag": _NO_PROMPTS,
    "rewards": "environments give the rewards",
    "validation": "val_env_manager validates",
    **dict.fromkeys(
        ("difficulty_mask", "difficulty_low_threshold", "difficulty_high_threshold"),
        "read by RLVR alone: no group is left out by its mean score",
    ),
    "response_length": "max_new_tokens says how long a turn may be, and sequence_length a trajectory",
    **dict.fromkeys(
        ("val_prompt_length", "val_sequence_length"),
        "turns and trajectories of validation are as long as those of training",
    ),
    "norm_mean_type": "reward_normalization counts in agentic pipelines, in ROLL too",
    "norm_std_type": "reward_normalization counts in agentic pipelines, in ROLL too",
    "reward_norm": "reward_normalization counts in agentic pipelines, in ROLL too",
    "reward_shift": "reward_normalization counts in agentic pipelines, in ROLL too",
    "reward_scale": "reward_normalization counts in agentic pipelines, in ROLL too",
}


def agentic(keys: Reader, sizes: RollLayout, *, has_reference: bool) -> dict[str, Any]:
    """Environments, sizes, lengths, sampling and validation."""
    for key, reason in _UNREAD.items():
        keys.ignore(key, reason)
    validates = keys.written(VAL) and keys["eval_steps"] > 0 and not samples_only(keys)
    shares = {TRAIN: _shares(keys, TRAIN)} | ({VAL: _shares(keys, VAL)} if validates else {})
    tags = list(dict.fromkeys(tag for each in shares.values() for tag in each))
    named = _named(keys, tags, shares)
    fields: dict[str, Any] = {
        "data.train_files": [],
        "data.shuffle": False,  # every step has each tag's share
        "environment.named": named,
        "environment.statistics_by_name": _by_tag(keys) and not samples_only(keys),
        "environment.sample_per_turn": samples_turns(keys, [tag for tag in tags if tag in named]),
        "reward.terms": [],
        "reward.by_turn": keys["use_turn_scores"] or _by_step(keys["adv_estimator"]),
    }
    fields |= _sampling(keys, TRAIN, "rollout") | _lengths(keys, tags)
    if any(each["name"] == OWN_MANAGER for each in named.values()) and "environment.max_context_tokens" in fields:
        # It asks for what is left of sequence_length itself
        fields |= {"environment.max_context_tokens": None, "environment.max_sequence_tokens": keys["sequence_length"]}
    of_turns = bool(fields["environment.sample_per_turn"])
    fields |= _sizes(keys, sizes, of_turns=of_turns) | forward_only(keys, has_reference=has_reference)
    if samples_only(keys):
        return fields | _played_once(keys, fields)
    return fields | (_validation(keys) if validates else _without_validation(keys))


def _shares(keys: Reader, section: str) -> dict[str, int]:
    """Groups of each tag."""
    groups_key = f"{section}.env_groups" if keys.written(f"{section}.env_groups") else f"{section}.num_env_groups"
    parts_key = f"{section}.n_groups" if keys.written(f"{section}.n_groups") else f"{section}.num_groups_partition"
    tags, parts, groups = keys[f"{section}.tags"], keys[parts_key], count(keys, groups_key)
    if not keys.written(parts_key) and len(tags) == 1:
        parts = [groups]
    if len(parts) != len(tags):
        keys.problem(f"{section}.tags names {len(tags)} environments, and {parts_key} has {len(parts)} numbers", key=parts_key,
                     fix=f"give one number of groups per tag, {groups} together")  # fmt: skip
    elif keys.written(groups_key) and sum(parts) != groups:
        keys.problem(f"{parts_key} adds up to {sum(parts)}, and there are {groups} groups", key=parts_key,
                     fix=f"use parts that add up to {groups}, one per tag")  # fmt: skip
    return {tag: part for tag, part in zip(tags, parts, strict=False) if part > 0}


def _named(keys: Reader, tags: list[str], shares: dict[str, dict[str, int]]) -> dict[str, dict[str, Any]]:
    """environment.named, with what each tag has of the episodes of training and validation."""
    named = {}
    keys.origins["environment.named"] = "custom_envs"
    for tag in tags:
        found = environment(keys, tag)
        if found is None:
            continue
        penalty = keys[f"{TRAIN}.format_penalty"]
        if penalty and found["name"] in ("frozen_lake", "sokoban"):
            found["settings"].setdefault("format_penalty", penalty)
        found["weight"] = float(shares[TRAIN].get(tag, 0))
        if VAL in shares:
            found["validation_weight"] = float(shares[VAL].get(tag, 0))
        named[tag] = found
    return named


def _sampling(keys: Reader, section: str, ours: str) -> dict[str, Any]:
    """generating_args: those of actor_infer where they are written, for the managers too, as in ROLL."""
    own, shared = f"{section}.{_GENERATING}", f"actor_infer.{_GENERATING}"
    if keys.written(shared):
        keys.ignore(own, f"{shared} goes before it, in ROLL too")
        if ours == "rollout":
            return {}  # the rows of actor_infer decide them
        own = shared
    fields = plain(keys, section)
    if own == shared:
        fields = {f"validation.{name}": keys[f"{shared}.{name}"] for name in ("temperature", "top_p")} | {
            "validation.top_k": max(keys[f"{shared}.top_k"], 0),
            "validation.stop": keys[f"{shared}.stop_strings"] or [],
        }
    penalty = keys[f"{own}.repetition_penalty"]
    if penalty != 1:
        fields[f"{ours}.engine_sampling.repetition_penalty"] = penalty
    return fields


def _lengths(keys: Reader, tags: list[str]) -> dict[str, Any]:
    """Tokens of a turn and of an episode. ROLL cuts a turn where sequence_length ends; here no turn begins that may not fit."""
    section = "actor_infer" if keys.written(f"actor_infer.{_GENERATING}") else TRAIN
    key = f"{section}.{_GENERATING}.max_new_tokens"
    most, own = keys[key], {tag: keys[f"custom_envs.{tag}.max_tokens_per_step"] or None for tag in tags}
    endless = [tag for tag, tokens in own.items() if tokens is None]
    if most is None and (endless or not own):
        without = "".join(f", and custom_envs.{tag} has no max_tokens_per_step" for tag in endless[:1])
        keys.problem(f"nothing says how many tokens a turn may have: {key} is null{without}", key=key,
                     fix=f"use {key}=512, or another number of tokens")  # fmt: skip
        return {}
    by_tag = {tag: min(each for each in (most, tokens) if each is not None) for tag, tokens in own.items()}
    turn = max(by_tag.values(), default=most)
    if len(set(by_tag.values())) > 1:
        each = ", ".join(f"{tokens} ({tag})" for tag, tokens in by_tag.items())
        keys.warn(f"the environments allow turns of {each} tokens; here a turn of any of them may have {turn}")
    total = keys["sequence_length"]
    if total is None:
        keys.problem("sequence_length is not given", key="sequence_length", fix="use sequence_length=8192, or another number of "
                     "tokens for a whole trajectory")  # fmt: skip
        return {"rollout.max_response_tokens": turn}
    if total <= turn:
        keys.problem(f"sequence_length={total} leaves no room beside turns of {turn} tokens", key="sequence_length",
                     fix=f"use sequence_length={turn + 1024}, or shorter turns")  # fmt: skip
        total = turn + 1
    keys.origins |= dict.fromkeys(("environment.max_context_tokens", "data.max_prompt_tokens"), "sequence_length")
    return {
        "rollout.max_response_tokens": turn,
        "environment.max_context_tokens": total - turn,
        "data.max_prompt_tokens": total - turn,
    }


def _sizes(keys: Reader, sizes: RollLayout, *, of_turns: bool) -> dict[str, Any]:
    """rollout_batch_size counts trajectories."""
    size, step = count(keys, f"{TRAIN}.group_size"), count(keys, "rollout_batch_size")
    if step % size:
        keys.problem(f"rollout_batch_size={step} does not divide into groups: {size} trajectories at a time",
                     key="rollout_batch_size", fix=f"use rollout_batch_size={-(-step // size) * size}")  # fmt: skip
        step = -(-step // size) * size
    fields = {
        "data.prompts_per_step": step // size,
        "rollout.samples_per_prompt": size,
        "environment.extra_episodes": _redundant(keys),
        # No episode is repeated, as in ROLL.
        "environment.train_episodes": step // size * count(keys, "max_steps"),
    }
    return fields | trajectory_batches(keys, sizes, step, of_turns=of_turns)


def _redundant(keys: Reader) -> int:
    """Episodes of a group that are begun besides those it takes."""
    key = f"{TRAIN}.group_size_redundancy"
    if keys[key] < 0:
        keys.problem(f"{key} is {keys[key]}", key=key, fix="use 0, or a number of further trajectories per group")
        return 0
    keys.ignore(f"{VAL}.group_size_redundancy", "validation plays every episode to its end")
    return int(keys[key])


def _validation(keys: Reader) -> dict[str, Any]:
    size, groups = count(keys, f"{VAL}.group_size"), sum(_shares(keys, VAL).values())
    step = count(keys, "val_batch_size")
    if step % (size * max(groups, 1)):
        whole = size * groups
        keys.problem(f"val_batch_size={step} does not divide into groups: {whole} trajectories at a time", key="val_batch_size",
                     fix=f"use val_batch_size={-(-step // whole) * whole}")  # fmt: skip
    return _sampling(keys, VAL, "validation") | {
        "environment.validation_episodes": max(step // size, 1),
        "validation.samples_per_prompt": size,
        "validation.every_steps": keys["eval_steps"],
        "validation.before_training": True,
        "validation.after_training": False,
    }


def _played_once(keys: Reader, fields: dict[str, Any]) -> dict[str, Any]:
    """A pipeline without training: the episodes of all its steps, played as one validation."""
    for key in ("eval_steps", VAL, "val_batch_size"):
        keys.ignore(key, "the run trains nothing: its own episodes are the validation")
    shared = f"actor_infer.{_GENERATING}" if keys.written(f"actor_infer.{_GENERATING}") else f"{TRAIN}.{_GENERATING}"
    return {
        "validation.only": True,
        "validation.temperature": keys[f"{shared}.temperature"],
        "validation.top_p": keys[f"{shared}.top_p"],
        "validation.top_k": max(keys[f"{shared}.top_k"], 0),
        "validation.stop": keys[f"{shared}.stop_strings"] or [],
        "validation.samples_per_prompt": fields["rollout.samples_per_prompt"],
        "environment.validation_episodes": fields["environment.train_episodes"],
    }


def _without_validation(keys: Reader) -> dict[str, Any]:
    for key in ("eval_steps", VAL, "val_batch_size"):
        keys.ignore(key, f"there is no validation: eval_steps is not above 0, or {VAL} is not given")
    return {}


def advantage(keys: Reader) -> dict[str, Any]:
    """The estimator. grpo is reinforce on rewards normalised as reward_normalization says, as in ROLL."""
    name, (mean, std) = keys["adv_estimator"], _normalization(keys)
    if samples_only(keys):
        name, mean, std = "reinforce", "none", "none"
    clip, whiten = keys["reward_clip"] or None, keys["whiten_advantages"]
    fields: dict[str, Any] = {"advantage.clip": keys["advantage_clip"] or None, "advantage.whiten": whiten}
    for estimators, names in ((("gigpo",), ("episode_reward_weight", "step_reward_weight")),
                              (("gigpo", "step_reinforce"), ("step_reward_gamma",))):  # fmt: skip
        if name not in estimators:
            for key in names:
                keys.ignore(key, f"adv_estimator is {name}")
    if _by_step(name):
        fields["advantage.token_gamma"] = keys["gamma"]
        if keys["whiten_rewards"]:
            keys.problem(f"whiten_rewards=true is not supported with adv_estimator={name}, whose rewards are those of turns",
                         key="whiten_rewards", fix="use whiten_advantages=true", refused=True)  # fmt: skip
    if name == "gigpo":
        return fields | _gigpo(keys, mean, std) | {"advantage.total_clip": clip}
    if name == "step_reinforce":
        return fields | {
            "advantage.name": name,
            "advantage.step_gamma": keys["step_reward_gamma"],
            "advantage.returns_mean": mean,
            "advantage.returns_std": std,
            "advantage.returns_clip": clip,
        }
    if name == "gae":
        fields |= generalised(keys)
    else:
        fields["advantage.name"] = "agentic_reinforce" if name == "agentic_reinforce" else "reinforce"
    return fields | {
        "reward.normalize_mean": mean,
        "reward.normalize_std": std,
        "reward.clip": clip,
        "advantage.gamma": keys["gamma"],
        "advantage.whiten_rewards": keys["whiten_rewards"],
    }


def _gigpo(keys: Reader, mean: str, std: str) -> dict[str, Any]:
    """Trajectories are compared as reward_normalization says, and steps from one state of a group by its method alone, as in
    ROLL."""
    method = keys["reward_normalization.method"]
    if method == "identity":
        keys.warn(
            "gigpo takes the returns of steps as they are, without comparing them, because reward_normalization.method is "
            "identity, as in ROLL; method: mean_std compares those from one state, as in its paper"
        )
    by_std = method in _BY_STD
    return {
        "advantage.name": "gigpo",
        "advantage.normalize_by_std": by_std,
        "advantage.episode_mean": mean,
        "advantage.episode_std": None if (std == "group") == by_std and std != "batch" else std,
        "advantage.compare_steps": method != "identity",
        "advantage.step_gamma": keys["step_reward_gamma"],
        "advantage.episode_weight": keys["episode_reward_weight"],
        "advantage.step_weight": keys["step_reward_weight"],
    }


def _normalization(keys: Reader) -> tuple[str, str]:
    """reward.normalize_mean and reward.normalize_std."""
    at = "reward_normalization"
    grouping, method = keys[f"{at}.grouping"], keys[f"{at}.method"]
    mean, std = text_none(keys[f"{at}.norm_mean_type"]), text_none(keys[f"{at}.norm_std_type"])
    level = "batch" if grouping == "batch" else "group"
    if mean is None and std is None:
        mean = level if method != "identity" else None
        std = level if method in _BY_STD else None
    elif keys["adv_estimator"] != "gigpo":  # there it still decides about steps
        keys.ignore(f"{at}.method", "norm_mean_type and norm_std_type go before it, in ROLL too")
    if "group" in (mean, std) and grouping == _BY_TAG:
        return _over_tags(keys, mean, std)
    if "group" in (mean, std) and grouping not in (GROUP, "state"):
        what = f"{at}.grouping={grouping} is not supported: rewards are compared over the step, a tag or a group"
        keys.problem(what, key=f"{at}.grouping", fix=f"use batch, {_BY_TAG} or {GROUP}", refused=True)
    if method == "asym_clip" and (mean or std):
        keys.warn(
            "reward_normalization.method=asym_clip is mean_std, as in ROLL of 2026; in mid-2025 it also cut to -1 and 3"
        )
    return mean or "none", std or "none"


def _over_tags(keys: Reader, mean: str | None, std: str | None) -> tuple[str, str]:
    """Statistics over the trajectories of a tag: those of the step here, with environment.statistics_by_name."""
    at = "reward_normalization.grouping"
    if "batch" in (mean, std):
        keys.problem(f"{at}={_BY_TAG} is not supported beside statistics over the batch", key=at,
                     fix=f"use norm_mean_type and norm_std_type: group, or {at}={GROUP}", refused=True)  # fmt: skip
    for key in ("whiten_advantages", "whiten_rewards"):
        if keys[key]:
            keys.problem(f"{at}={_BY_TAG} is not supported with {key}, which is over the whole step", key=at,
                         fix=f"use {key}=false, or {at}={GROUP}", refused=True)  # fmt: skip
    if _by_step(keys["adv_estimator"]):
        keys.problem(f"{at}={_BY_TAG} is not supported with adv_estimator={keys['adv_estimator']}", key=at,
                     fix=f"use {at}=batch, or {GROUP}", refused=True)  # fmt: skip
    return ("batch" if mean else "none"), ("batch" if std else "none")


def _by_tag(keys: Reader) -> bool:
    """Return True when rewards are normalised over the trajectories of each tag."""
    at = "reward_normalization"
    levels = [text_none(keys[f"{at}.{name}"]) for name in ("norm_mean_type", "norm_std_type")]
    normalises = "group" in levels or (levels == [None, None] and keys[f"{at}.method"] != "identity")
    return bool(keys[f"{at}.grouping"] == _BY_TAG and normalises)


def _by_step(estimator: str) -> bool:
    """Tell whether an estimator, which has the same name here, looks at every turn as a row of its own."""
    return "trajectory_index" in ADVANTAGES.inputs(estimator)
