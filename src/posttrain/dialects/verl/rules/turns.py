"""Conversations of several turns: tools and interactions, from the files that verl's keys name to environments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yaml import YAMLError

from posttrain.config.environment import SINGLE_TURN
from posttrain.data.tool_forms import DEFAULT as DEFAULT_FORM
from posttrain.dialects.env_managers import plays_managers
from posttrain.dialects.own_values import is_left_out, way_on_without
from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.agent_loops import LOOPS, has_loops, loops_of
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.names import AGENT, ROLLOUT, TURNS
from posttrain.errors import did_you_mean
from posttrain.libraries import yaml_text
from posttrain.registry import TOOL_FORMS, is_installed

TOOL_FILE = f"{TURNS}.tool_config_path"
FUNCTION_FILE = f"{TURNS}.function_tool_path"
INTERACTION_FILE = f"{TURNS}.interaction_config_path"
# verl's own classes that are built in here, so that verl need not be there.
TOOLS = {
    "verl.tools.gsm8k_tool.Gsm8kTool": "gsm8k",
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": "python",
}
INTERACTIONS = {"verl.interactions.gsm8k_interaction.Gsm8kInteraction": "gsm8k"}
_CUT = {"left": "end", "right": "start", "middle": "middle"}
_SINGLE, _TOOLS = "single_turn_agent", "tool_agent"
_READ_BY_TURNS = (
    "max_turns", "max_assistant_turns", "max_user_turns", "tool_config_path", "function_tool_path", "interaction_config_path",
    "max_parallel_calls", "max_tool_response_length", "tool_response_truncate_side", "use_inference_chat_template", "format",
)  # fmt: skip


def turns(keys: Reader) -> dict[str, Any]:
    """The environments of a run with several turns, and a server class of the user's; nothing for a run without."""
    if not keys.ledger.find(f"{TURNS}.enable"):  # verl 0.2
        return {}
    return _server(keys) | _environments(keys)


def _server(keys: Reader) -> dict[str, Any]:
    section = f"{AGENT}.custom_async_server"
    path, name = keys[f"{section}.path"], keys[f"{section}.name"]
    if path is None and name is None:
        return {}
    if path is None or name is None:
        given, other = ("name", "path") if path is None else ("path", "name")
        what = f"{section}.{given} is given without its {other}"
        keys.problem(what, key=f"{section}.{given}", fix=f"give {section}.{other} too")
        return {}
    if get(keys, f"{ROLLOUT}.mode") != "async":
        keys.ignore(section, f"read with {ROLLOUT}.mode=async only")
        return {}
    return {"rollout.engine": "http", "rollout.engine_options.server": f"{path}:{name}"}


def _environments(keys: Reader) -> dict[str, Any]:
    enabled = keys[f"{TURNS}.enable"]
    has_tools = keys[TOOL_FILE] is not None or keys[FUNCTION_FILE] is not None
    loops = has_loops(keys)
    by_row = get(keys, f"{ROLLOUT}.mode") == "async" and (has_tools or loops)
    if plays_managers(keys):
        # The fork's own classes play, with what its env section says
        for name in _READ_BY_TURNS:
            keys.ignore(f"{TURNS}.{name}", "the environment managers of the checkout play the episodes")
        return {}
    form = _form(keys)
    if not enabled and not by_row:
        for name in _READ_BY_TURNS:
            keys.ignore(f"{TURNS}.{name}", "multi_turn.enable is false")
        keys.ignore(f"{AGENT}.default_agent_loop", "there are no agents without tools, or without mode=async")
        return {}
    if not has_tools and not loops and keys[INTERACTION_FILE] is None:
        keys.problem(
            "a conversation of several turns needs tools or another side",
            key=f"{TURNS}.enable",
            fix=f"give {TOOL_FILE}, {FUNCTION_FILE} or {INTERACTION_FILE}",
        )
        return {}
    response = keys[f"{ROLLOUT}.response_length"]
    fields = {
        "environment.max_turns": _most_turns(keys),
        "environment.max_trajectory_tokens": response,
        "environment.max_sequence_tokens": get(
            keys, f"{ROLLOUT}.max_model_len", keys["data.max_prompt_length"] + response
        ),
        "environment.tool_call_form": form,
        "environment.changed_history": "split" if keys[f"{TURNS}.use_inference_chat_template"] else "append",
    }
    if loops:
        fields["environment.max_turns"] = None
    if loops and not has_tools:
        # A loop cuts its own output, and may have conversations beside it
        fields["environment.max_trajectory_tokens"] = None
    keys.origins["environment.named"] = LOOPS if keys.ledger.find(LOOPS) is not None else TOOL_FILE
    if by_row:
        keys.ignore(
            f"{TURNS}.enable", "with mode=async, and tools or agent loops, a row's agent_name decides, as in verl"
        )
    fields |= _by_row(keys, has_tools=has_tools, loops=loops) if by_row else _everywhere(keys)
    # What is missing in a file that cannot be read is no problem of its own
    return {} if any(_is_wrong(keys, key) for key in (LOOPS, TOOL_FILE, INTERACTION_FILE)) else fields


def _is_wrong(keys: Reader, key: str) -> bool:
    return any(problem.field == key for problem in keys.problems)


def _say_where(keys: Reader, section: str, settings: Mapping[str, Any]) -> None:
    """Record which keys an environment's settings come from, for messages about them."""
    at = f"{section}.settings"
    last = len(settings.get("tools", [])) - 1
    keys.origins |= {f"{at}.tools": TOOL_FILE, f"{at}.interactions": INTERACTION_FILE}
    if keys[FUNCTION_FILE] is not None:
        keys.origins[f"{at}.tools.{last}"] = FUNCTION_FILE


def _form(keys: Reader) -> str:
    """The form of tool calls; newer versions of verl have the names of model families, some with their number."""
    asked = str(keys[f"{TURNS}.format"])
    word = asked.lower().replace("-", "_")
    found = [DEFAULT_FORM] if word in ("chatml", "qwen") else []
    found += [form for form in TOOL_FORMS.names() if word.startswith(form)]
    key = f"{TURNS}.format"
    if not found and not is_left_out(keys, key, asked, DEFAULT_FORM):
        known = ", ".join(["hermes", *(form for form in TOOL_FORMS.names() if form != "hermes")])
        what = f"tool calls are read in the form {known}, and not {asked!r}"
        own = way_on_without(keys, key, asked, DEFAULT_FORM)
        keys.problem(what, key=key, fix=own or "use the form that the model's chat template writes")
    return found[0] if found else DEFAULT_FORM


def _everywhere(keys: Reader) -> dict[str, Any]:
    """Every row is played with all there is."""
    keys.ignore(f"{AGENT}.default_agent_loop", "read with mode=async and a tool_config_path only")
    name, settings = _played(keys)
    _say_where(keys, "environment", settings)
    return {"environment.name": name} | {f"environment.settings.{key}": value for key, value in settings.items()}


def _by_row(keys: Reader, *, has_tools: bool, loops: bool) -> dict[str, Any]:
    """verl's agents: a row is played by the one that it names in its column agent_name."""
    default = get(keys, f"{AGENT}.default_agent_loop")
    if default is None:
        rows = (
            "by the agent that their column agent_name names"
            if loops
            else "with tools where agent_name says tool_agent"
        )
        those = "NAME plays those" if loops else "tool_agent plays those with tools"
        keys.warn(
            f"with mode=async, rows are played {rows}, as in verl; +{AGENT}.default_agent_loop={those} that say nothing"
        )
    known: dict[str, dict[str, Any]] = {_SINGLE: {"name": SINGLE_TURN}}
    if has_tools or keys[INTERACTION_FILE] is not None:
        name, settings = _played(keys)
        _say_where(keys, f"environment.named.{_TOOLS}", settings)
        most = _most_turns(keys) if loops else None  # loops end by themselves
        known[_TOOLS] = {"name": name, "settings": settings} | ({"max_turns": most} if most else {})
    if loops and not _not_opened(keys, LOOPS):
        entries = _file(keys, LOOPS, keys[LOOPS])
        for name, made in (loops_of(keys, entries) if entries is not None else {}).items():
            if isinstance(made, str) and made not in known:
                what = f"{keys[LOOPS]}: {name} is verl's loop with tools, and the run has none"
                keys.problem(what, key=LOOPS, fix=f"give {TOOL_FILE} or {FUNCTION_FILE}")
                continue
            known[name] = known[made] if isinstance(made, str) else made
    fields: dict[str, Any] = {
        "environment.column": "agent_name",
        "environment.named": known,
        "environment.name": SINGLE_TURN,
        "data.extra_columns": ["agent_name"],
    }
    unread = loops and (keys.skip_files or _is_wrong(keys, LOOPS))
    if default is not None and default not in known and not unread:
        fix = did_you_mean(default, known) or f"name one of {', '.join(known)}, or list it in {LOOPS}"
        keys.problem(f"there is no agent {default!r}", key=f"{AGENT}.default_agent_loop", fix=fix)
    elif default in known:
        fields["environment.name"] = known[default]["name"]
        fields |= {f"environment.settings.{key}": value for key, value in known[default].get("settings", {}).items()}
    return fields


def _played(keys: Reader) -> tuple[str, dict[str, Any]]:
    """The environment and its settings."""
    settings: dict[str, Any] = {
        "max_calls_per_turn": keys[f"{TURNS}.max_parallel_calls"],
        "max_result_characters": keys[f"{TURNS}.max_tool_response_length"],
        "cut": _CUT[keys[f"{TURNS}.tool_response_truncate_side"]],
    }
    if keys[TOOL_FILE] is not None:
        settings["tools"] = [] if _not_opened(keys, TOOL_FILE) else _tools(keys)
    if keys[FUNCTION_FILE] is not None:
        settings["tools"] = [*settings.get("tools", []), {"name": "functions", "file": keys[FUNCTION_FILE]}]
    if keys[INTERACTION_FILE] is None:
        return "tools", settings
    interactions = [] if _not_opened(keys, INTERACTION_FILE) else _interactions(keys)
    return "interaction", settings | {"interactions": interactions}


def _not_opened(keys: Reader, key: str) -> bool:
    """Report a file that is not to be opened; its entries are none then."""
    if keys.skip_files:
        keys.warn(f"{key}: {keys[key]} is not opened (--skip-files); its entries are not checked")
    return keys.skip_files


def _most_turns(keys: Reader) -> int | None:
    """Return the model's maximum turns: one more than the other side's."""
    limits = [keys[f"{TURNS}.max_assistant_turns"], keys[f"{TURNS}.max_turns"]]
    if (others := keys[f"{TURNS}.max_user_turns"]) is not None:
        limits.append(others + 1)
    return min((limit for limit in limits if limit is not None), default=None)


def _tools(keys: Reader) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for entry in _listed(keys, TOOL_FILE, "tools"):
        name, config = entry["class_name"], entry.get("config") or {}
        schema = entry.get("tool_schema")
        offered = {"schema": schema} if schema else {}
        if config.get("type") == "mcp":
            found += _servers(keys, entry, config)
        elif TOOLS.get(name) == "python":
            limit = config.get("default_timeout")
            found.append({"name": "python", **({"timeout_s": limit} if limit else {}), **offered})
            keys.warn(
                f"{TOOL_FILE}: {name} runs programs in boxes on this machine; of its config default_timeout is read"
            )
        elif name in TOOLS:
            found.append({"name": TOOLS[name], **offered})
        elif _there(keys, TOOL_FILE, name, TOOLS):
            found.append({"name": "verl", "class_name": name, "config": config, "tool_schema": schema})
    if not found and not any(problem.field == TOOL_FILE for problem in keys.problems):
        keys.problem(f"{keys[TOOL_FILE]} holds no tool", key=TOOL_FILE, fix="list some below tools:")
    return found


def _servers(keys: Reader, entry: Mapping[str, Any], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tools of MCP servers, from the JSON file that such an entry names."""
    mcp = entry.get("mcp") or {}
    path = mcp.get("mcp_servers_config_path")
    read = _file(keys, TOOL_FILE, path) if isinstance(path, str) else None
    servers = read.get("mcpServers") if isinstance(read, dict) else None
    if not isinstance(servers, dict) or not servers:
        what = f"{keys[TOOL_FILE]}: the tool of type mcp names no servers"
        keys.problem(what, key=TOOL_FILE, fix='give mcp.mcp_servers_config_path, a file {"mcpServers": {...}}')
        return []
    more: dict[str, Any] = {}
    if config.get("timeout"):
        more["timeout_s"] = config["timeout"]
    if mcp.get("tool_selected_list"):
        more["only"] = mcp["tool_selected_list"]
    found = []
    for server in servers.values():
        if "url" in server:
            found.append({"name": "mcp", "url": server["url"], **more})
            if server.get("auth_token"):
                keys.warn(
                    f"{path}: a token in a file ends up in the run folder; the tool mcp takes it from an environment variable "
                    "(token_env), and this one is left out"
                )
        else:
            command = [str(server.get("command", "")), *map(str, server.get("args") or [])]
            found.append({"name": "mcp", "command": command, "env": server.get("env") or {}, **more})
    return found


def _interactions(keys: Reader) -> list[dict[str, Any]]:
    found = []
    for entry in _listed(keys, INTERACTION_FILE, "interaction"):
        name = entry["class_name"]
        ours = INTERACTIONS.get(name)
        if ours is not None or _there(keys, INTERACTION_FILE, name, INTERACTIONS):
            # verl names one without a name by its class: Gsm8kInteraction is gsm8k.
            called = entry.get("name") or name.rpartition(".")[2].removesuffix("Interaction").lower()
            found.append({"name": called, "class_name": ours or name, "config": entry.get("config") or {}})
    return found


def _listed(keys: Reader, key: str, below: str) -> list[dict[str, Any]]:
    """The entries of a file, each with a class; what is wrong with it is reported."""
    read = _file(keys, key, keys[key])
    if read is None:
        return []
    entries = read.get(below) if isinstance(read, dict) else None
    if not isinstance(entries, list):
        keys.problem(f"{keys[key]} has no list {below}", key=key, fix=f"write {below}: [{{class_name: ...}}]")
        return []
    good = []
    for place, entry in enumerate(entries):
        if isinstance(entry, dict) and isinstance(entry.get("class_name"), str):
            good.append(entry)
        else:
            keys.problem(f"{keys[key]}: {below}[{place}] has no class_name", key=key, fix="name a class: package.Class")
    return good


def _file(keys: Reader, key: str, path: str) -> Any:
    """Read a YAML or JSON file; None, reported, when it cannot be read."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        yaml_text.check(text)
        return OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    except (OSError, UnicodeDecodeError) as error:
        keys.problem(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", key=key)
    except (YAMLError, OmegaConfBaseException) as error:
        keys.problem(f"{path} is no YAML that can be used: {' '.join(str(error).split())[:200]}", key=key)
    return None


def _there(keys: Reader, key: str, name: str, built_in: Mapping[str, str]) -> bool:
    """Return True when a class can exist: verl's own need verl."""
    if not name.startswith("verl.") or is_installed("verl"):
        return True
    what = f"{keys[key]} asks for {name}, and verl is not installed"
    fix = f"install it, write a class of your own, or use one that is built in here ({', '.join(built_in)})"
    keys.problem(what, key=key, fix=fix)
    return False
