"""Agent loops of the user's own, from the file of agent_loop_config_path to environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.config.reading.interpolations import merged
from posttrain.dialects.ledger import ABSENT
from posttrain.dialects.reader import HYDRA_CLASS, Reader
from posttrain.dialects.trees import nested
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.names import AGENT, MODEL, ROLLOUT
from posttrain.dialects.words import OUR_SECTION

LOOPS = f"{AGENT}.agent_loop_config_path"
# verl's own loops, which are built in here
OWN = {
    "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop": "single_turn_agent",
    "verl.experimental.agent_loop.SingleTurnAgentLoop": "single_turn_agent",
    "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop": "tool_agent",
    "verl.experimental.agent_loop.ToolAgentLoop": "tool_agent",
}
_CHATS = {"trust_remote_code": f"{MODEL}.trust_remote_code", "chat_template": f"{MODEL}.custom_chat_template"}
_READ = ("actor_rollout_ref", "data", "trainer", "algorithm", "reward", "reward_model", "custom_reward_function")


def has_loops(keys: Reader) -> bool:
    """Tell whether the run has a file of agent loops, which verl reads where it samples asynchronously."""
    if keys.ledger.find(LOOPS) is None or keys[LOOPS] is None:
        return False
    if get(keys, f"{ROLLOUT}.mode") != "async":
        keys.ignore(LOOPS, f"read with {ROLLOUT}.mode=async only")
        return False
    return True


def loops_of(keys: Reader, entries: Any) -> dict[str, dict[str, Any] | str]:
    """Return the environments of a file's entries by their names in the data; of verl's own loops, their names in verl. What is
    wrong with an entry is reported."""
    found: dict[str, dict[str, Any] | str] = {}
    if not isinstance(entries, list):
        fix = "write - name: NAME and _target_: package.module.Class"
        keys.problem(f"{keys[LOOPS]} is no list of agent loops", key=LOOPS, fix=fix)
        return found
    for place, entry in enumerate(entries):
        lacks = [name for name in ("name", HYDRA_CLASS) if not isinstance(entry, dict) or not entry.get(name)]
        if lacks:
            what = f"{keys[LOOPS]}: entry {place} has no {' and no '.join(lacks)}"
            keys.problem(what, key=LOOPS, fix="give it a name, and a class: package.module.Class")
            continue
        name, target = str(entry["name"]), str(entry[HYDRA_CLASS])
        found[name] = OWN.get(target) or _environment(keys, target, entry)
    return found


def _environment(keys: Reader, target: str, entry: dict[str, Any]) -> dict[str, Any]:
    model = {"path": keys[f"{MODEL}.path"]} | {name: value for name, key in _CHATS.items() if (value := get(keys, key))}
    arguments = {name: value for name, value in entry.items() if name != "name" and not name.startswith("_")}
    settings = {"class_name": target, "model": model, "config": configuration(keys)}
    if any(Path(target.partition(".")[0]).with_suffix(suffix).exists() for suffix in ("", ".py")):
        settings["root"] = "."  # verl runs in the folder of its checkout, from which Python imports
    return {"name": "agent_loop", "settings": settings | ({"arguments": arguments} if arguments else {})}


def configuration(keys: Reader) -> dict[str, Any]:
    """The configuration that a class of verl's reads: what is written, and the defaults of the rest."""
    names = {row.name for row in keys.ledger.rows}
    sections = {name[:place] for name in names for place in range(len(name)) if name[place] == "."}
    defaults = {
        row.name: keys[row.name]
        for row in keys.ledger.rows
        if row.default is not ABSENT
        and "*" not in row.name
        and row.name not in sections
        and row.name.partition(".")[0] in _READ
    }
    known = {name.partition(".")[0] for name in names} - {*_READ}
    written = {name: value for name, value in keys.values.items() if name not in known and name != OUR_SECTION}
    return merged(nested(defaults), written)
