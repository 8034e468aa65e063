"""A fork's class that plays the episodes (the environment verl_loop): what it reads of the configuration, and what stands for it."""

from __future__ import annotations

from typing import Any

from posttrain.checkout_files import parsed
from posttrain.dialects.own_episodes import loop_of
from posttrain.dialects.reader import Reader
from posttrain.dialects.trees import NOTHING, nested, value_at
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.names import ACTOR, MODEL, ROLLOUT
from posttrain.dialects.words import OUR_SECTION
from posttrain.verl_episodes import EpisodeLoop, EpisodeReward
from posttrain.verl_rows import columns_read

_CHATS = {"trust_remote_code": f"{MODEL}.trust_remote_code", "chat_template": f"{MODEL}.custom_chat_template"}


def repeat_prompts(keys: Reader) -> None:
    """Let the rules that follow read the product of all keys by which the trainer repeats a prompt as the responses to it."""
    found = loop_of(keys)
    usual = f"{ROLLOUT}.n"
    count = 1
    for key in found[0].copies if found is not None else ():
        value = value_at(keys.values, key)
        if key != usual and isinstance(value, int) and value > 0:
            count *= value
    if count > 1:
        keys.put(usual, count * keys[usual])


def own_loop(keys: Reader, *, has_critic: bool) -> dict[str, Any]:
    """The fields of a run whose episodes such a class plays; nothing for another run."""
    found = loop_of(keys)
    if found is None:
        return {}
    loop, scores = found
    fields: dict[str, Any] = {
        "environment.settings.config": _config(keys, loop, scores),
        "environment.settings.model.path": keys[f"{MODEL}.path"],
        "environment.max_turns": None,
        "environment.max_context_tokens": keys["data.max_prompt_length"],
        "rollout.samples_per_prompt": keys[f"{ROLLOUT}.n"],
        "rollout.stop": list(loop.stops),
        "data.extra_columns": _columns(loop, scores),
    }
    for name, key in _CHATS.items():
        if (value := get(keys, key)) is not None:
            fields[f"environment.settings.model.{name}"] = value
    if scores is not None:
        fields["reward.terms"] = []
        keys.warn(f"rewards are those of {scores.name}, as {scores.site.file} passes it to its trainer")
    # Its mini-batches are counted in responses
    usual = keys[f"{ROLLOUT}.n"]
    for role, section in (("policy", ACTOR), ("critic", "critic")):
        key = f"{section}.ppo_mini_batch_size"
        if (role == "policy" or has_critic) and _repeats(keys, loop) and isinstance(keys[key], int):
            fields[f"{role}.sequences_per_mini_batch"] = keys[key] * usual // _repeats(keys, loop)
    if loop.masking and value_at(keys.values, loop.masking) is False:
        what = f"{loop.masking}=false trains on what the class writes into the conversation, too, which is not supported"
        keys.plan_only(what, key=loop.masking, fix=f"use {loop.masking}=true: the policy's own tokens alone")
    return fields


def _repeats(keys: Reader, loop: EpisodeLoop) -> int:
    """How often the trainer repeats a prompt by keys of its own; 0 without such a key."""
    count = 0
    for key in loop.copies:
        value = value_at(keys.values, key)
        if key != f"{ROLLOUT}.n" and isinstance(value, int) and value > 0:
            count = max(count, 1) * value
    return count


def _config(keys: Reader, loop: EpisodeLoop, scores: EpisodeReward | None) -> dict[str, Any]:
    """The values that the expressions read, as a tree; what is lacking is reported."""
    sites = [loop.site] + ([scores.site] if scores is not None else [])
    if any("" in site.keys for site in sites):
        return {name: value for name, value in keys.values.items() if name != OUR_SECTION}
    found: dict[str, Any] = {}
    for site in sites:
        for key in sorted(site.keys):
            value = value_at(keys.values, key)
            row = keys.ledger.find(key)
            if value is NOTHING and row is not None:
                value = keys[key]
            if value is not NOTHING:
                found[key] = value
            elif key not in site.optional:
                what = f"{loop.name} is built with {key}, which the configuration does not have"
                keys.problem(what, key=key, fix=f"add {key}=VALUE")
    return nested(found)


def _columns(loop: EpisodeLoop, scores: EpisodeReward | None) -> list[str]:
    """The columns of the data that the class and the reward function read."""
    files = [loop.file, *([scores.site.file] if scores is not None else [])]
    trees = [tree for file in files if (tree := parsed(file)) is not None]
    return list(dict.fromkeys(name for tree in trees for name in columns_read(tree)))
