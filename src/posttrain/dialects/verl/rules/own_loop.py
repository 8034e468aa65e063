"""A fork's class that plays the episodes (the environment verl_loop): its settings, and what stands for its keys."""

from __future__ import annotations

from typing import Any

from posttrain.checkout_files import parsed
from posttrain.dialects.own_episodes import loop_of, values_of
from posttrain.dialects.reader import Reader
from posttrain.dialects.trees import value_at
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.names import MODEL, ROLLOUT
from posttrain.dialects.words import OUR_SECTION
from posttrain.verl_episodes import EpisodeLoop, EpisodeReward
from posttrain.verl_rows import columns_read

_CHATS = {"trust_remote_code": f"{MODEL}.trust_remote_code", "chat_template": f"{MODEL}.custom_chat_template"}


def repeats(keys: Reader) -> int:
    """Return the repetitions of a prompt by keys of the trainer's own loop (n_agent); 1 without such a key."""
    found = loop_of(keys)
    count = 1
    for key in found[0].copies if found is not None else ():
        value = value_at(keys.values, key)
        if key != f"{ROLLOUT}.n" and isinstance(value, int) and value > 1:
            count *= value
    return count


def repeat_prompts(keys: Reader) -> None:
    """Let the rules that follow read the repetitions of a prompt as responses to it."""
    if (count := repeats(keys)) > 1:
        keys.put(f"{ROLLOUT}.n", count * keys[f"{ROLLOUT}.n"])


def own_loop(keys: Reader) -> dict[str, Any]:
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
        if value := get(keys, key):
            fields[f"environment.settings.model.{name}"] = value
    if scores is not None:
        fields["reward.terms"] = []
        keys.warn(f"rewards are those of {scores.name}, as {scores.site.file} passes it to its trainer")
    if loop.guard and value_at(keys.values, loop.guard) is False:
        what = f"{loop.guard}=false: the trainer lets the sampler answer alone, and {loop.name} plays no episodes"
        fix = "give the keys to verl's own loop: posttrain plan --dialect verl KEY=VALUE ..."
        keys.problem(what, key=loop.guard, fix=fix)
    if loop.masking and value_at(keys.values, loop.masking) is False:
        what = (
            f"{loop.masking}=false trains on what the class writes into the conversation, too, which is not supported"
        )
        keys.plan_only(what, key=loop.masking, fix=f"use {loop.masking}=true: the policy's own tokens alone")
    return fields


def _config(keys: Reader, loop: EpisodeLoop, scores: EpisodeReward | None) -> dict[str, Any]:
    """The values that the expressions read, as a tree; what is lacking is reported."""
    sites = [(loop.name, site) for site in loop.sites] + ([(scores.name, scores.site)] if scores is not None else [])
    if any("" in site.keys for _, site in sites):
        return {name: value for name, value in keys.values.items() if name != OUR_SECTION}
    return values_of(keys, sites)


def _columns(loop: EpisodeLoop, scores: EpisodeReward | None) -> list[str]:
    """The columns of the data that the class and the reward function read."""
    files = [loop.file, *([scores.site.file] if scores is not None else [])]
    trees = [tree for file in files if (tree := parsed(file)) is not None]
    return list(dict.fromkeys(name for tree in trees for name in columns_read(tree)))
