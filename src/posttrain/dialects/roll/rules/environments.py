"""Translation of ROLL's custom_envs to our environments: names, settings, symbols, words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.rules.forks import of_fork
from posttrain.dialects.roll.rules.look import count
from posttrain.dialects.roll.rules.managers import has_manager, own_manager
from posttrain.dialects.roll.rules.worlds import WRAPPED, world
from posttrain.errors import did_you_mean, nearest
from posttrain.registry import ENVS

TRAJECTORIES = "roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager"
STEPS = "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager"
# The same conversation, held by a client of its own.
PROXIED = "roll.pipeline.agentic.env_manager.proxy_env_manager.ProxyEnvManager"
GAME_RUNNER = "roll.pipeline.agentic.agent_runner.gem_runner.GEMRunner"
# The same conversation, whose observations may be pictures, between two templates of its own.
PICTURED = "roll.pipeline.agentic.env_manager.vl_traj_env_manager.VLTrajEnvManager"
# A turn's prompt is the conversation before it.
CONCATENATED = "roll.pipeline.agentic.env_manager.step_concat_env_manager.StepConcatEnvManager"
# Of ROLL, and not here; worlds.py has those with another name here.
ROLLS = (
    "sokoban_mcp", "sokoban_tool_call", "roll_code", "deepeyes", "rock_tb_native_env", "openreward_env", "atropos_env",
    "bandit", "countdown", "metamathqa", "alfworld",
)  # fmt: skip
# Sokoban in a container, and Sokoban that writes its messages itself: the same game here, in a process of its own.
NATIVE_SOKOBAN, NATIVE_STEPS = "sokoban_native_env", "agent_native_env_manager.AgentNativeStepEnvManager"
_SOKOBANS = {
    "sokoban_sandbox": "the game is played here, without a container",
    NATIVE_SOKOBAN: "its messages are those of sokoban here, and not of agent_template, as in ROLL",
}
_CELL_PIXELS = {"sokoban": 16, "frozen_lake": 64}  # of gym_sokoban's and gymnasium's pictures
_FAMILIES = ("game:", "code:", "eval:", "vision:")  # of GEM
_OF_YOUR_OWN = "one of your own is env_type: FILE.py:Class, with reset and step (docs/environments.md)"
_STAND_IN = "frozen_lake"  # for planned ones, so that sizes, devices and turns are still checked
# ROLL's numbers, in the order of our names.
_LAKE_MOVES = ("Left", "Down", "Right", "Up")
_STORE_MOVES = ("Up", "Down", "Left", "Right")
_LAKE_SYMBOLS = ("player", "ice", "hole", "goal", "fallen", "arrived")
_STORE_SYMBOLS = ("wall", "floor", "target", "box on target", "box", "player", "player on target")
# Of env_config, ours by theirs. What stands in neither table goes on to gymnasium in ROLL, and is ignored here.
_GAME = {"format_penalty": "format_penalty", "action_pattern": "action_pattern", "env_instruction": "instruction"}
_LAKE = {**_GAME, "size": "size", "p": "ice_share", "is_slippery": "slippery", "map_seed": "map_seed"}
_STORE = {**_GAME, "num_boxes": "boxes", "search_depth": "pulls", "dim_x": "rows", "dim_y": "columns"}
# Of the environment itself.
_TEXTS = {
    "agent_system_template": "system",
    "agent_template": "template",
    "env_instruction": "instruction",
    "reward_template": "reward_template",
    "user_prompt_format": "answer_format",
}
_STEP_FIELDS = ("env_instruction", "history", "current_observation", "step_count", "current_step")
_SAID_ELSEWHERE = ("max_steps", "grid_vocab", "action_lookup", "grid_lookup", "dim_room", "render_mode", "seed")


def environment(keys: Reader, tag: str) -> dict[str, Any] | None:
    """name, settings and max_turns of the environment of a tag; None when it is not there."""
    at = f"custom_envs.{tag}"
    if not isinstance(keys.section("custom_envs").get(tag), dict):
        known = list(keys.section("custom_envs"))
        keys.problem(f"there is no environment {tag} in custom_envs", key=at if keys.written(at) else "custom_envs",
                     fix=did_you_mean(tag, known) or "add it")  # fmt: skip
        return None
    kind = keys[f"{at}.env_type"]
    if kind is None:
        keys.problem(f"{at} has no env_type", key=at, fix="give it one, such as env_type: frozen_lake")
        return None
    config = keys[f"{at}.env_config"] or {}
    manager = str(keys[f"{at}.env_manager_cls"] or TRAJECTORIES)
    if not _is_played(keys, at) and (played := own_manager(keys, tag, manager)):
        return played | {"max_turns": _turns(keys, at)}
    if how := _SOKOBANS.get(kind):
        keys.warn(f"{at}.env_type={kind} is sokoban: {how}")
    wording = {} if kind == NATIVE_SOKOBAN else _TEXTS
    kind = "sokoban" if kind in _SOKOBANS else kind
    other = world(keys, at, str(kind), config)
    if (
        other is None
        and kind in ROLLS
        and keys[f"{at}.env_manager_cls"] != PICTURED
        and (played := own_manager(keys, tag, manager))
    ):
        return played | {"max_turns": _turns(keys, at)}
    if other is None and (kind in ROLLS or str(kind).startswith(_FAMILIES)):
        keys.plan_only(f"{at}.env_type={kind} is planned, and the plan counts episodes of {_STAND_IN} in its place",
                       key=f"{at}.env_type",
                       fix="use frozen_lake or sokoban, or an environment of your own: file.py:Class")  # fmt: skip
        return {"name": _STAND_IN, "settings": {}, "max_turns": _turns(keys, at)}
    if other is None and kind not in ENVS.names() and ":" not in str(kind):
        other = of_fork(keys, str(kind), config)
    if other is None and kind not in ENVS.names() and ":" not in str(kind):
        known = [*ENVS.names(), "webshop", *ROLLS]
        what = f"there is no environment {kind} (known: {', '.join(known)})"
        fix = did_you_mean(str(kind), known, listed=True) or _OF_YOUR_OWN
        # Once, whatever the number of its tags
        if all(problem.what != what for problem in keys.problems):
            keys.problem(what, key=f"{at}.env_type", fix=fix)
        return None
    kind, settings = other or (kind, _settings(keys, at, kind, config))
    _say_where(keys, tag, kind, config)
    for name, ours in wording.items():
        if (text := keys[f"{at}.{name}"]) is not None:
            settings[ours] = text
    settings |= _around(keys, at)
    settings |= _step_texts(keys, at) if "template" in settings else {}
    _unread_tools(keys, at, kind)
    tokens = keys[f"{at}.max_tokens_per_step"] or keys[f"{at}.max_tokens"]
    if tokens is not None and "template" in settings:
        settings["max_response_tokens"] = tokens
    return {"name": kind, "settings": settings, "max_turns": _turns(keys, at)}


def _is_played(keys: Reader, at: str) -> bool:
    """Return True when the manager of a tag is one whose conversations are held here."""
    name = keys[f"{at}.env_manager_cls"] or TRAJECTORIES
    native = keys[f"{at}.env_type"] == NATIVE_SOKOBAN and name.endswith(NATIVE_STEPS)
    return native or name in (TRAJECTORIES, STEPS, CONCATENATED, PROXIED, PICTURED)


def _unread_tools(keys: Reader, at: str, kind: str) -> None:
    """Refuse tools around games, and agents that run them."""
    if keys[f"{at}.tool_wrapper"] and kind != "questions":
        keys.problem(f"{at}.tool_wrapper is supported around questions (roll_math, roll_qa) only", key=f"{at}.tool_wrapper",
                     fix="remove it", refused=True)  # fmt: skip
    runner = keys[f"{at}.agent_runner_cls"]
    if runner not in (None, "", GAME_RUNNER):
        keys.problem(f"{at}.agent_runner_cls={runner} is an agent of ROLL's own program", key=f"{at}.agent_runner_cls",
                     fix=f"use {GAME_RUNNER} for games; agents of your own run in the environment agent (docs/environments.md)",
                     refused=True)  # fmt: skip


def _turns(keys: Reader, at: str) -> int:
    """Return the turns of an episode."""
    turns = keys[f"{at}.max_steps"] or keys[f"{at}.max_steps_per_traj"] or keys[f"{at}.max_actions_per_traj"]
    turns = turns or (keys[f"{at}.env_config"] or {}).get("max_steps")
    found: int = turns or count(keys, "max_steps_per_traj")
    return found


def _step_texts(keys: Reader, at: str) -> dict[str, Any]:
    """Settings for the forms of agent_template: of 2025, whose turns count from 0, and of the step manager, whose turns are
    conversations of their own with the last history_length - 1 turns in {history}."""
    template = str(keys[f"{at}.agent_template"] or "")
    found: dict[str, Any] = {"first_turn": 0} if "{state}" in template else {}
    if keys[f"{at}.env_manager_cls"] == STEPS and any(f"{{{name}}}" in template for name in _STEP_FIELDS):
        length = keys[f"{at}.history_length"]
        found |= {"turns_apart": True, "history_turns": max((length or 1) - 1, 0)}
    return found


def _around(keys: Reader, at: str) -> dict[str, Any]:
    """Return the template of the manager of pictures: texts before and behind an observation."""
    before, behind = (keys[f"{at}.{name}"] for name in ("pre_step_template", "next_step_template"))
    if keys[f"{at}.env_manager_cls"] == PICTURED:
        return {"template": f"{before or ''}{{observation}}{behind or ''}"}
    for name in ("pre_step_template", "next_step_template"):
        keys.ignore(f"{at}.{name}", f"read with env_manager_cls={PICTURED} only")
    return {}


def samples_turns(keys: Reader, tags: list[str]) -> bool:
    """Return True when a training sample is a turn, which all tags must agree on."""
    managers = {}
    for tag in tags:
        key = f"custom_envs.{tag}.env_manager_cls"
        name = keys[key] or TRAJECTORIES
        managers[tag] = name
        if keys[f"custom_envs.{tag}.env_type"] == NATIVE_SOKOBAN and name.endswith(NATIVE_STEPS):
            managers[tag] = CONCATENATED
        elif not _is_played(keys, f"custom_envs.{tag}") and not has_manager(keys, tag):
            keys.plan_only(f"{key}={name} is planned", key=key, fix=f"use {TRAJECTORIES} or {STEPS}")
    of_turns = [name.endswith(("StepEnvManager", "StepConcatEnvManager")) for name in managers.values()]
    if any(of_turns) and not all(of_turns):
        last = tags[-1]
        keys.problem(f"the environments have different managers: {' and '.join(dict.fromkeys(managers.values()))}",
                     key=f"custom_envs.{last}.env_manager_cls", fix="use one for all of them")  # fmt: skip
    return any(of_turns)


def _settings(keys: Reader, at: str, kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """env_config by our names; that of environments that are not ROLL's goes on as it is."""
    tables = {"frozen_lake": _LAKE, "sokoban": _STORE}
    if kind not in tables:
        return dict(config)
    table, settings = tables[kind], dict[str, Any]()
    for name, value in config.items():
        if name in table:
            if value is not None:
                settings[table[name]] = value
        elif name not in _SAID_ELSEWHERE:
            _unknown(keys, f"{at}.env_config", name, kind, [*table, *_SAID_ELSEWHERE])
    if kind == "sokoban":
        settings |= _room(keys, at, config)
    settings |= _pictures(keys, at, config, kind)
    symbols = _LAKE_SYMBOLS if kind == "frozen_lake" else _STORE_SYMBOLS
    if lookup := config.get("grid_lookup"):
        settings["symbols"] = _by_number(keys, f"{at}.env_config.grid_lookup", lookup, symbols)
    if lookup := config.get("action_lookup"):
        settings["action_words"] = _words(keys, f"{at}.env_config.action_lookup", lookup, kind)
    return settings


def _unknown(keys: Reader, section: str, name: str, kind: str, known: list[str]) -> None:
    """A name that resembles a known one is a slip; ROLL hands any other one on to gymnasium."""
    key = f"{section}.{name}"
    if near := nearest(name, known):
        keys.problem(f"{kind} has no {name!r} in env_config", key=key, fix=f"did you mean {near}?")
    else:
        keys.warn(f"{key} is not known to {kind} here, and has no effect")


def _say_where(keys: Reader, tag: str, kind: str, config: Mapping[str, Any]) -> None:
    """Record which of the user's keys the settings come from, for messages about them."""
    at, ours = f"custom_envs.{tag}", f"environment.named.{tag}"
    keys.origins |= {f"{ours}.name": f"{at}.env_type", f"{ours}.settings": f"{at}.env_config", ours: at}
    table = {"frozen_lake": _LAKE, "sokoban": _STORE}.get(kind, {})
    for name in config:
        keys.origins[f"{ours}.settings.{table.get(name, name)}"] = f"{at}.env_config.{name}"
    for name, setting in _TEXTS.items():
        if keys.written(f"{at}.{name}"):
            keys.origins[f"{ours}.settings.{setting}"] = f"{at}.{name}"
    if keys[f"{at}.tool_wrapper"]:
        keys.origins |= {f"{ours}.settings.{setting}": f"{at}.tool_wrapper.{name}" for setting, name in WRAPPED.items()}


def _room(keys: Reader, at: str, config: Mapping[str, Any]) -> dict[str, Any]:
    room = config.get("dim_room")
    if room is None:
        # ROLL's default.
        return {} if {"dim_x", "dim_y"} & set(config) else {"rows": 10, "columns": 10}
    if not isinstance(room, list) or len(room) != 2:
        keys.problem(
            f"{at}.env_config.dim_room is {room!r}", key=f"{at}.env_config", fix="write [rows, columns], such as [6, 6]"
        )
        return {}
    return {"rows": room[0], "columns": room[1]}


def _pictures(keys: Reader, at: str, config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the settings of render_mode: text, or pictures in the size of the peer's."""
    mode, key = config.get("render_mode", "text"), f"{at}.env_config.render_mode"
    if mode in ("text", None):
        return {}
    if mode != "rgb_array":
        keys.problem(f"{key} is {mode!r}", key=key, fix="use text, or rgb_array for pictures")
        return {}
    if keys[f"{at}.env_manager_cls"] != PICTURED:
        keys.problem(f"{key}=rgb_array shows pictures, which {keys[f'{at}.env_manager_cls'] or TRAJECTORIES} takes for text",
                     key=key, fix=f"use {at}.env_manager_cls={PICTURED}, or render_mode: text")  # fmt: skip
    return {"pictures": True, "pixels_per_cell": _CELL_PIXELS[kind]}


def _by_number(keys: Reader, key: str, lookup: Any, names: tuple[str, ...]) -> dict[str, str]:
    """{0: "P", ...} -> {"player": "P", ...}"""
    found = {}
    for number, sign in lookup.items() if isinstance(lookup, Mapping) else ():
        if not str(number).isdecimal() or int(number) >= len(names):
            keys.problem(f"{key} has {number!r}, and symbols have the numbers 0 to {len(names) - 1}", key=key)
        else:
            found[names[int(number)]] = str(sign)
    return found


def _words(keys: Reader, key: str, lookup: Any, kind: str) -> dict[str, str]:
    """{"Left": 0, ...} -> {"Left": "Left", ...}; numbers from 1 in Sokoban, and in FrozenLake's of mid-2025."""
    names = _LAKE_MOVES if kind == "frozen_lake" else _STORE_MOVES
    numbers = list(lookup.values()) if isinstance(lookup, Mapping) else []
    first = 1 if kind == "sokoban" or (numbers and 0 not in numbers) else 0
    found = {}
    for word, number in lookup.items() if isinstance(lookup, Mapping) else ():
        if not isinstance(number, int) or not first <= number < first + len(names):
            keys.problem(f"{key} has {word}: {number!r}, and actions have the numbers {first} to {first + len(names) - 1}",
                         key=key)  # fmt: skip
        else:
            found[names[number - first]] = str(word)
    return {name: word for name, word in found.items() if name != word}
