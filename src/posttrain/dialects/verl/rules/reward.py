"""Scoring: the data source's scorer, a function of the user's, or a reward model."""

from __future__ import annotations

import re
from typing import Any

from posttrain.dialects.checkout_managers import CONFIG, MANAGERS, arguments_of, handed_to, manager_in_checkout
from posttrain.dialects.env_managers import plays_managers
from posttrain.dialects.own_scoring import adds_to_model, changed_manager, columns_of, manager_for_scores, program_term
from posttrain.dialects.reader import Reader
from posttrain.dialects.trees import NOTHING, value_at
from posttrain.dialects.verl.rules.batches import MOST_CHOSEN, per_device
from posttrain.dialects.verl.rules.layout import Layout
from posttrain.dialects.verl.rules.look import engine_options, get
from posttrain.dialects.verl.rules.managers import without_scores
from posttrain.dialects.verl.rules.names import ROLLOUT
from posttrain.dialects.verl.rules.prime import is_prime, process_reward
from posttrain.dialects.verl.rules.reward_server import judge_model, judge_section, served_model
from posttrain.dialects.verl.strategies import SHARDED
from posttrain.dialects.words import OUR_SECTION
from posttrain.errors import GUESS, ConfigError, nearest
from posttrain.user_files import parse_file, source_file
from posttrain.verl_rows import columns_read

_SHARDS = "reward_model.model.fsdp_config"
_FUNCTION = "custom_reward_function"
_MODEL = "reward_model"
_ARGUMENTS = f"{_MODEL}.reward_kwargs"  # of the reward manager
# Sections of the penalty for long responses; the last one belongs to a function, the others to the manager dapo
_OVERLONG = (f"{_ARGUMENTS}.overlong_buffer_cfg", f"{_MODEL}.overlong_buffer", f"{_FUNCTION}.overlong_buffer")
# Without any, for managers that ask the section itself whether it is on
_NO_BUFFER = {"enable": False, "len": 0, "penalty_factor": 0.0, "log": False}
PLAIN_MANAGER = "NaiveRewardManager"
_ADDRESS = "reward_router_address"  # verl's name of a parameter: HOST:PORT
_SERVED = "reward.reward_model"  # its later name, where it is served
# Versions that pass prompt and response in one text, special tokens kept, to reward functions.
WHOLE_SEQUENCE = ("0.1", "0.2")
RATE_LIMITED_TIMEOUT_S = 300.0  # of one call of the manager rate_limited
MANAGER_TIMEOUT_S = 1800.0  # of one call with all responses of a step


def reward(keys: Reader, layout: Layout, judge: str | None) -> tuple[dict[str, Any], str]:
    """The fields, and the name of the reward term; "" where a reward model scores alone.

    Args: judge, the result of ``served_judge``.
    """
    served = get(keys, f"{_SERVED}.enable", False)
    if plays_managers(keys):
        return without_scores(keys), ""
    if is_prime(keys):
        term = _term(keys)
        process = process_reward(keys, layout.devices)
        return {"reward.terms": [term]} | process | _overlong(keys) | _workers(keys), term["name"]
    if judge is not None:
        term = _term(keys) | ({"judge_tokenizer": judge} if judge else {})
        return {"reward.terms": [term]} | _overlong(keys) | _workers(keys), term["name"]
    if (section := judge_section(keys)) is not None:
        term = _term(keys) | {"judge_tokenizer": judge_model(keys, section)}
        asked = served_model(keys, section, layout.reward_model_devices)
        return {"reward.terms": [term]} | asked | _overlong(keys) | _workers(keys), term["name"]
    if keys[f"{_MODEL}.enable"] or served:
        keys.ignore(_FUNCTION, "the reward model's score takes the place of all others, as in verl")
        _reject_own_manager(keys)
        _sampled_judge(keys)
        return {"reward.terms": []} | _model(keys, layout) | _overlong(keys) | _workers(keys), ""
    for name in ("model", "strategy", "micro_batch_size", "micro_batch_size_per_gpu", "max_length", "truncation"):
        keys.ignore(f"{_MODEL}.{name}", "reward_model.enable is false")
    term = program_term(keys) or _term(keys)
    # A manager of the fork's own has a rule of its own; the plain one calls its functions in the place of dapo's
    of_length = _overlong(keys) if term.get("kind") is None or term["name"] == PLAIN_MANAGER else {}
    return {"reward.terms": [term]} | _columns(term) | of_length | _workers(keys, term), term["name"]


def _reject_own_manager(keys: Reader) -> None:
    """Reject a reward model beside a manager of the user's, which may make anything of its scores; verl's own return them."""
    manager = _manager(keys)
    if (found := adds_to_model(keys, manager)) is not None and found.owner not in keys.own_keys:
        what = f"{found.title}, the fork's own, does not return the scores of the reward model as verl's does"
        fix = f"use {_MODEL}.enable=False, or confirm that the reward model is to score alone: "
        keys.problem(what, key=f"{_MODEL}.enable", fix=f"{fix}+posttrain.own_keys=[{found.owner}]")
    if manager in MANAGERS:
        return
    near = nearest(manager, MANAGERS)
    what = f"{manager} is a reward manager of your own, and would have to be called with the scores of the reward model"
    fix = f"did you mean {near}?" if near else f"use {_MODEL}.reward_manager=naive, or {_MODEL}.enable=False"
    keys.problem(what, key=f"{_MODEL}.reward_manager", fix=fix)


def _columns(term: dict[str, Any]) -> dict[str, Any]:
    """The further columns of the data that a manager of the user's reads, as verl's batch has every column. A file that cannot
    be read is reported with the term."""
    if term.get("kind") == "program":
        return {"data.extra_columns": columns} if (columns := columns_of(term)) else {}
    if term.get("kind") != "manager":
        return {}
    try:
        columns = columns_read(parse_file(term["path"], source_file(term["path"])))
    except ConfigError:
        return {}
    return {"data.extra_columns": columns} if columns else {}


def _function_path(keys: Reader) -> str | None:
    """The file of the user's reward function, under either name of the key."""
    path = keys[f"{_FUNCTION}.path"] if keys.ledger.find(f"{_FUNCTION}.path") else None
    return path or get(keys, f"reward.{_FUNCTION}.path")


def served_judge(keys: Reader) -> str | None:
    """Let the rules that follow read no reward model where the user's function asks one at an address that the configuration
    gives it. verl starts that server and hands over its address; here it is started apart from the run.

    Returns: the model, whose tokenizer the function may take, "" for an unknown one; None where there is no such judge.
    """
    address = _arguments_of_function(keys).get(_ADDRESS)
    enabled = [at for at in (_MODEL, _SERVED) if get(keys, f"{at}.enable", False)]
    if not enabled or not _function_path(keys) or not isinstance(address, str):
        return None
    model = get(keys, f"{_SERVED}.model_path") or get(keys, f"{_MODEL}.model.path") or ""
    for section in enabled:
        for name in keys.section(section):
            if name not in ("enable", "reward_kwargs", "reward_manager", "num_workers", "overlong_buffer"):
                keys.ignore(f"{section}.{name}", f"the server at {address} has the reward model")
        keys.put(f"{section}.enable", False)
    return str(model)


def _arguments_of_function(keys: Reader) -> dict[str, Any]:
    """Further arguments of the user's function, under either name of the key."""
    return keys.section(f"{_FUNCTION}.reward_kwargs") | keys.section(f"reward.{_FUNCTION}.reward_kwargs")


def _sampled_judge(keys: Reader) -> None:
    """A head that scores does so alike in a server and in the run's own processes; a function that asks a server for the text
    of a judgement needs that server."""
    key = next((f"{at}.rollout" for at in (_MODEL, _SERVED) if keys.section(f"{at}.rollout")), None)
    if key is None and get(keys, f"{_SERVED}.enable", False):
        key = f"{_SERVED}.enable"
    if key is None:
        return
    if _function_path(keys):
        later = "reward." if get(keys, f"reward.{_FUNCTION}.path") else ""
        model = get(keys, f"{_SERVED}.model_path") or get(keys, f"{_MODEL}.model.path") or "MODEL"
        what = "a reward model that samples its judgement, which a function of yours reads, is not served by the run"
        fix = (
            f"serve it, as by vllm serve {model} --port 8000, and name its address: "
            f"++{later}{_FUNCTION}.reward_kwargs.{_ADDRESS}=127.0.0.1:8000"
        )
        keys.plan_only(what, key=key, fix=fix)
        for section in (_MODEL, _SERVED):
            for name in ("enable_resource_pool", "nnodes", "n_gpus_per_node"):
                keys.ignore(f"{section}.{name}", "the run does not serve the model")
    else:
        keys.warn(
            f"{key}: the reward model's head scores in the run's own processes, in micro-batches, not in a server"
        )


def _term(keys: Reader) -> dict[str, Any]:
    path, name, options = None, "compute_score", {}
    if keys.ledger.find(f"{_FUNCTION}.path"):
        path = keys[f"{_FUNCTION}.path"] or get(keys, f"reward.{_FUNCTION}.path")
        renamed = get(keys, f"reward.{_FUNCTION}.name")
        name = renamed if renamed is not None and not keys.written(f"{_FUNCTION}.name") else keys[f"{_FUNCTION}.name"]
        name = name or "compute_score"
        options = _arguments_of_function(keys)
    if path is not None:
        term = {"name": name, "path": path}
        if keys.ledger.version in WHOLE_SEQUENCE:
            term["reads"] = "sequence"
        if _manager(keys) == "prime":
            term["returns"] = "first"
        if _manager(keys) == "gdpo":
            term["extra_info"] = {"experiment_name": keys["trainer.experiment_name"]}
    else:
        term = {"name": "by_data_source" if name == "compute_score" else name}
    if own := _own_manager(keys, path, name, options):
        return own
    if _manager(keys) == "batch" and path is not None:
        keys.take_over(_ARGUMENTS)
        options = _further_arguments(keys) | options
    else:
        _check_arguments(keys)
    if _manager(keys) == "batch":
        term["batched"] = path is not None
        if path is None:
            what = f"the reward manager batch calls a function with lists, and {term['name']} scores one response at a time"
            fix = f"use {_MODEL}.reward_manager=naive, or name a function of yours with {_FUNCTION}.path"
            keys.problem(what, key=f"{_MODEL}.reward_manager", fix=fix)
    return term | ({"options": options} if options else {})


def _check_arguments(keys: Reader) -> None:
    """Report what verl's own managers do not take; their section of overlong responses has rows of its own."""
    dropped = {one.key for one in keys.own}
    known = [row.removeprefix(f"{_ARGUMENTS}.") for row in keys.ledger.by_name if row.startswith(f"{_ARGUMENTS}.")]
    for name in _further_arguments(keys).keys() - {"overlong_buffer_cfg"}:
        key = f"{_ARGUMENTS}.{name}"
        if key in dropped:
            continue
        if keys.of_checkout(key):
            keys.ignore(
                key, f"the checkout's own file has it, and verl's manager {_manager(keys)} takes no such argument"
            )
            continue
        what = f"verl's reward manager {_manager(keys)} takes no argument {name}"
        fix = f"+{_FUNCTION}.reward_kwargs.{name} gives it to a function of yours"
        if meant := nearest(name, known):
            fix = f"{GUESS} {_ARGUMENTS}.{meant}? If it is a function's, {fix}"
        keys.problem(what, key=key, fix=fix)


def _further_arguments(keys: Reader) -> dict[str, Any]:
    """Arguments of a manager that have no row of their own."""
    return {
        name: value
        for name, value in keys.section(_ARGUMENTS).items()
        if (row := keys.ledger.find(f"{_ARGUMENTS}.{name}")) is not None and row.name == f"{_ARGUMENTS}.**"
    }


def _manager(keys: Reader) -> str:
    renamed = get(keys, "reward.reward_manager.name", get(keys, "reward_manager.name"))
    written = keys.written(f"{_MODEL}.reward_manager")
    return str(renamed if renamed is not None and not written else keys[f"{_MODEL}.reward_manager"])


def _own_manager(keys: Reader, path: str | None, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the term of a manager that the user wrote: one of a file that is named, else a name that the file of the reward
    function or an imported module registers. Empty for verl's own."""
    written = manager = _manager(keys)
    handed: dict[str, Any] = {}
    section = next((at for at in ("reward.reward_manager", "reward_manager") if get(keys, f"{at}.module.path")), None)
    file = get(keys, f"{section}.module.path") if section else None
    if section:
        manager = get(keys, f"{section}.module.name") or manager
    elif manager in MANAGERS:
        if (own := _own_of_checkout(keys, manager, path)) is None:
            return {}
        file, manager = own
        handed = _handed_by_program(keys, manager, file)
    modules = get(keys, "actor_rollout_ref.model.external_lib", [])
    module = modules if isinstance(modules, str) else next(iter(modules), None)
    if file is None and (found := manager_in_checkout(manager)) is not None:
        file, manager = found
        handed = _handed_by_program(keys, manager, file)
    file = file or path or (f"pkg://{module}" if module else None)
    key = f"{_MODEL}.reward_manager"
    near = nearest(written, MANAGERS)
    if file is None or (near and section is None and abs(len(near) - len(manager)) < 2):
        what = f"{key} must be one of {', '.join(MANAGERS)}, or one of your own; no file that registers {manager!r} is named"
        fix = (
            "a manager of your own: name the file that holds it with +reward_manager.module.path=FILE and "
            "+reward_manager.module.name=CLASS, or the file that registers it with custom_reward_function.path"
        )
        fix = f"did you mean {near}?" if near else fix
        keys.problem(what, key=key, fix=fix)
        return {}
    given = keys.section(f"{_MODEL}.reward_kwargs")
    keys.take_over(f"{_MODEL}.reward_kwargs")
    settings = handed | {one: value for one, value in given.items() if one not in ("num_processes", "timeout")}
    _check_groups(keys, settings)
    if manager == PLAIN_MANAGER and written != "naive":
        settings = handed  # the arguments of the manager in whose place it stands
    elif written in MANAGERS and "overlong_buffer_cfg" in arguments_of(manager, file):
        section = next((at for at in _OVERLONG if get(keys, f"{at}.enable")), "")
        settings.setdefault("overlong_buffer_cfg", keys.section(section) if section else _NO_BUFFER)
        settings.setdefault("max_resp_len", keys[f"{ROLLOUT}.response_length"])
    term = {"name": manager, "path": file, "kind": "manager", "options": settings}
    if path is not None:
        term |= {"scores_with": f"{path}:{name}", "scores_with_options": options}
    elif keys.ledger.version in WHOLE_SEQUENCE:
        term["own_score"] = True
    return term


def _own_of_checkout(keys: Reader, manager: str, path: str | None) -> tuple[str, str] | None:
    """The file and the class of a manager with the name of one of verl's, where the fork in the current folder has changed it or
    the functions by data source behind it. None where both are verl's, or the user confirms that verl's are meant."""
    if (found := changed_manager(manager)) is not None:
        file, owner = found
        own = f"{owner} of {file}"
    elif path is None and manager != "batch" and (scores := manager_for_scores()) is not None:
        file, owner, names = scores
        own = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    else:
        return None
    if owner in keys.own_keys:
        keys.warn(f"rewards are those of verl's scorers, and not of {own}; confirmed by name ({owner})")
        return None
    keys.warn(f"rewards are the fork's own: {own}; +posttrain.own_keys=[{owner}] takes the built-in scorers")
    return file, owner


def _handed_by_program(keys: Reader, manager: str, file: str) -> dict[str, Any]:
    """The further arguments that the checkout's own program hands to its manager, with the values of this configuration."""
    found: dict[str, Any] = {}
    for each in handed_to(manager, file):
        value = value_at(keys.values, each.key) if each.key else NOTHING
        if value is NOTHING and each.key and (row := keys.ledger.find(each.key)) is not None and "*" not in row.name:
            value = keys[each.key]
        value = each.value if value is NOTHING else value
        if isinstance(value, str | int | float | None) or each.name == CONFIG:
            found[each.name] = value
        elif each.name not in keys.section(_ARGUMENTS):
            what = f"{each.where} hands {each.name}={each.text} to {manager}, which only that program computes"
            default = "" if each.needed else f"; null is what {manager} does without it"
            fix = f"give it: +{_ARGUMENTS}.{each.name}=VALUE{default}"
            if _manager(keys) not in MANAGERS:
                keys.problem(what, key=f"{_MODEL}.reward_manager", fix=fix)
                continue
            fix += f"; or confirm by name that the built-in scorers are meant: +posttrain.own_keys=[{manager}]"
            keys.plan_only(what, key=f"{_MODEL}.reward_manager", fix=fix)
    if CONFIG in arguments_of(manager, file) and CONFIG not in found:
        found[CONFIG] = {name: value for name, value in keys.values.items() if name != OUR_SECTION}
    return found


def _check_groups(keys: Reader, settings: dict[str, Any]) -> None:
    """Reject a manager of the user's that reads groups of another size than a prompt has responses (TTRL's votes)."""
    samples = keys[f"{ROLLOUT}.n"]
    for name, count in settings.items():
        if re.search(r"_per_prompt$", name) and isinstance(count, int) and count != samples:
            what = (
                f"the manager takes {name}={count}, and a prompt has {samples} responses: it would mix those of several"
            )
            fix = f"use {ROLLOUT}.n={count}, or {_ARGUMENTS}.{name}={samples}"
            keys.problem(what, key=f"{_ARGUMENTS}.{name}", fix=fix)


def _workers(keys: Reader, term: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the number of scoring processes, and their time limit."""
    names = (f"{_MODEL}.reward_kwargs.num_processes", "reward.num_workers", f"{_MODEL}.num_workers")
    count = next((found for name in names if (found := get(keys, name)) is not None), None)
    limit = get(keys, f"{_ARGUMENTS}.timeout", get(keys, f"{_ARGUMENTS}.compute_score_timeout"))
    if limit is None and (_manager(keys) not in MANAGERS or (term or {}).get("kind") is not None):
        limit = MANAGER_TIMEOUT_S
    if _manager(keys) == "rate_limited":
        count, limit = get(keys, "reward.max_concurrent", 1), get(keys, "reward.timeout", RATE_LIMITED_TIMEOUT_S)
    else:
        for name in ("max_concurrent", "timeout"):
            keys.ignore(f"reward.{name}", "the reward manager rate_limited reads it")
    fields = {"reward.workers": count, "reward.timeout_s": limit}
    return {name: value for name, value in fields.items() if value is not None}


def _model(keys: Reader, layout: Layout) -> dict[str, Any]:
    ours = "reward.model"
    by_tokens = get(keys, f"{_MODEL}.use_dynamic_bsz", False)
    # A server needs no size, and the choice is ours
    later = bool(get(keys, f"{_SERVED}.enable", False))
    served = bool(keys.section(f"{_MODEL}.rollout")) or later
    needed = not by_tokens and not served
    size = per_device(keys, f"{_MODEL}.micro_batch_size", layout.reward_model_devices, needed=needed)
    size = MOST_CHOSEN if size is None and served and not by_tokens else size
    fields = {
        f"{ours}.path": (get(keys, f"{_SERVED}.model_path") if later else None) or keys[f"{_MODEL}.model.path"],
        f"{ours}.own_template": keys[f"{_MODEL}.model.input_tokenizer"] is not None
        or get(keys, f"{_MODEL}.model.rm_tokenizer") is not None,
        f"{ours}.max_tokens": keys[f"{_MODEL}.max_length"],
        f"{ours}.trust_remote_code": get(keys, f"{_MODEL}.model.trust_remote_code", False),
        f"{ours}.truncation": get(keys, f"{_MODEL}.truncation", "left"),
        f"{ours}.config_overrides": keys.section(f"{_MODEL}.model.override_config"),
        f"{ours}.offload": get(keys, f"{_SHARDS}.param_offload", False),
    }
    if keys[f"{_MODEL}.strategy"] in SHARDED and layout.reward_model_devices > 1:
        fields |= {f"{ours}.engine": SHARDED[0]} | engine_options(keys, _SHARDS, f"{ours}.engine_options")
        if smallest := get(keys, f"{_SHARDS}.min_num_params"):  # the earlier name
            fields[f"{ours}.engine_options.wrap_policy.min_num_params"] = smallest
    else:
        for row in keys.ledger.rows:
            if row.name.startswith(f"{_SHARDS}.") and not row.name.endswith("param_offload"):
                keys.ignore(row.name, "every device has all of the reward model")
    return fields | ({f"{ours}.sequences_per_micro_batch_per_device": size} if size is not None else {})


def _overlong(keys: Reader) -> dict[str, Any]:
    """DAPO's penalty for long responses. Empty without."""
    manager = _manager(keys)
    section = next((place for place in _OVERLONG if get(keys, f"{place}.enable")), None)
    if section is None or (manager != "dapo" and section != _OVERLONG[-1]):
        off = "overlong_buffer.enable is not true" if manager == "dapo" else "read by reward_manager=dapo only"
        for place in _OVERLONG:
            keys.ignore(place, off)
        return {}
    response, length = keys[f"{ROLLOUT}.response_length"], get(keys, f"{section}.len")
    limit = get(keys, f"{_MODEL}.reward_kwargs.max_resp_len", response)
    if limit != response:
        key = f"{_MODEL}.reward_kwargs.max_resp_len"
        what = f"{key} is {limit}, and responses have up to {response} tokens"
        keys.problem(what, key=key, fix=f"use {key}={response}")
    if length is None:
        what = "the penalty for long responses needs the length of its buffer"
        keys.problem(what, key=f"{section}.enable", fix=f"give it, such as +{section}.len={max(1, response // 4)}")
        return {}
    factor = get(keys, f"{section}.penalty_factor", 1.0)
    return {"reward.overlong_buffer_tokens": length, "reward.overlong_penalty": factor}
