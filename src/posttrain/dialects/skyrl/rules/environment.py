"""Environments that are played turn by turn, and the keys that only these read."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.skyrl.rules.look import get
from posttrain.dialects.trees import value_at
from posttrain.dialects.words import OUR_SECTION
from posttrain.errors import did_you_mean
from posttrain.libraries.skyrl_names import ROWS, RUN_CODE, SHIPPED, of_checkout

CLASS = "environment.env_class"
SECTION = "environment.skyrl_gym"
ENDPOINT = "generator.enable_http_endpoint"
_ENDPOINT_KEYS = ("generator.http_endpoint_host", "generator.http_endpoint_port")
_ONE_TURN = "a conversation of one turn is scored, not played"
VERIFIERS, PROGRAM = "verifiers", "skyrl_program"
STEPWISE = "trainer.step_wise_training"  # since 2026 generator.step_wise_trajectories
_RENDERED_AGAIN = "generator.retokenize_chat_history"  # of its first generator with a sample per turn
_OURS = "posttrain.environment"
_LIMIT_OF = "generator.rate_limit"
_TURN_KEYS = (
    "generator.use_conversation_multi_turn",
    "generator.append_eos_token_after_stop_str_in_multi_turn",
    STEPWISE,
    _RENDERED_AGAIN,
    "generator.merge_stepwise_output",
    f"{_LIMIT_OF}.enabled",
    f"{_LIMIT_OF}.max_concurrency",
    f"{SECTION}.max_env_workers",
)


def program_reads_rows(keys: Reader) -> bool:
    """Return True when a program's own dataset reads the rows: of folders of tasks, say."""
    return bool(value_at(keys.values, f"{OUR_SECTION}.data.dataset_class_name") == ROWS)


def plays(keys: Reader) -> bool:
    """Return True when episodes are played in environments of the package. Single-turn conversations are scored by reward terms,
    which need no package and run model-written code in a sandbox."""
    name = keys[CLASS] or ""
    only_played = name in ("gsm8k_multi_turn", "searchcode") or ":" in name or name in of_checkout()
    return keys["generator.max_turns"] > 1 or only_played or keys.written(_OURS)


def environment(keys: Reader) -> dict[str, Any]:
    """Return the environments and their settings."""
    # An environment of our own section asks its own address, as the verifiers program asks the endpoint
    if get(keys, ENDPOINT) and not keys.written(f"{_OURS}.name"):
        return _open_run(keys)
    for key in _ENDPOINT_KEYS:
        keys.ignore(key, f"{ENDPOINT} is false" if not get(keys, ENDPOINT) else f"{_OURS}.name says what is played")
    if not plays(keys):
        for key in (*_TURN_KEYS, f"{SECTION}.search"):
            keys.ignore(key, _ONE_TURN)
        return {}
    turns = keys["generator.max_turns"]
    if keys["generator.batched"] and turns > 1:
        written = "" if keys.written("generator.batched") else ", its default of June 2025,"
        keys.warn(
            f"generator.batched=true{written} makes SkyRL step environments once, whatever generator.max_turns is; here "
            f"up to {turns} turns are played (as with generator.batched=false in SkyRL)"
        )
    messages = get(keys, "generator.use_conversation_multi_turn")
    own_template = get(keys, "generator.chat_template.name_or_path") is not None
    fields: dict[str, Any] = {
        "environment.max_turns": turns,
        "environment.end_at_max_turns": False,
        "environment.conversation": "messages" if messages else "one_message",
        "environment.max_context_tokens": keys["generator.max_input_length"],
        "environment.sample_per_turn": get(keys, STEPWISE),
        "environment.workers": _at_once(keys),
    }
    if messages:
        closes = get(keys, "generator.append_eos_token_after_stop_str_in_multi_turn")
        fields["environment.close_turns"] = closes
        rendered_again = own_template or bool(get(keys, _RENDERED_AGAIN))
        fields["environment.changed_history"] = "split" if rendered_again else "append"
    else:
        reason = "use_conversation_multi_turn is false: a stop text is followed by the observation"
        keys.ignore("generator.append_eos_token_after_stop_str_in_multi_turn", reason)
    fields |= _merged(keys)
    if get(keys, STEPWISE):  # advantages are of the last row's reward there, and so are scores of validation
        fields["environment.reward_of"] = "last_sample"
    elif own_template and messages:
        fields["environment.reward_of"] = "last_turn"
    if not keys.written("posttrain.reward.terms"):
        fields["reward.terms"] = []
    if keys.written(f"{_OURS}.name") and keys[f"{_OURS}.name"] == PROGRAM:
        return fields | _program(keys)
    if keys.written(f"{_OURS}.name"):
        return fields | _verifiers(keys, fields)
    return fields | _package(keys)


def _verifiers(keys: Reader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an environment of the package verifiers, whose id is the class as ``owner/name@version``; none for
    another that our own section names."""
    if keys[f"{_OURS}.name"] != VERIFIERS or keys.written(f"{_OURS}.settings.env"):
        keys.ignore(CLASS, f"{_OURS}.name says what is played")
        return {}
    keys.ignore("generator.max_turns", "the environment of verifiers ends its episodes itself")
    name = keys[CLASS].rpartition("/")[2].partition("@")[0]
    return {"environment.settings.env": name, "environment.max_turns": None, "environment.conversation": "messages"}


def _program(keys: Reader) -> dict[str, Any]:
    """Return the fields of a program's own generator, which builds its configuration of the overrides as they were written."""
    keys.ignore("generator.max_turns", "the program's own generator reads it, and ends its episodes itself")
    keys.warn(
        f"the generator of {value_at(keys.values, f'{_OURS}.settings.file')} plays the episodes, in a Python that has SkyRL "
        "(docs/environments.md)"
    )
    mark = "override "
    written = [place.text for key, place in keys.sources.places.items() if not f"{key}.".startswith(f"{OUR_SECTION}.")]
    arguments = list(dict.fromkeys(text.removeprefix(mark) for text in written if text.startswith(mark)))
    fields: dict[str, Any] = {
        "environment.settings.env_class": keys[CLASS],
        "environment.settings.arguments": arguments,
        "environment.max_turns": None,
        "environment.conversation": "messages",
    }
    if program_reads_rows(keys):
        program = {name: value_at(keys.values, f"{_OURS}.settings.{name}") for name in ("file", "folder", "python")}
        named = {name: value for name, value in program.items() if isinstance(value, str)}
        fields["data.dataset_class_options"] = {**named, "arguments": arguments}
    return fields


def _merged(keys: Reader) -> dict[str, Any]:
    """Return the fields of turns that are joined to one sample as far as each begins with what was before it."""
    key = "generator.merge_stepwise_output"
    if not get(keys, key):
        return {}
    if not get(keys, STEPWISE):
        what = f"{key} joins the samples of turns, and generator.step_wise_trajectories is false"
        keys.problem(what, key=key, fix="use generator.step_wise_trajectories=true, or leave it out")
    return {"environment.sample_per_turn": False, "environment.changed_history": "split"}


def _at_once(keys: Reader) -> int | None:
    """Return the episodes that are played at once."""
    workers, limit = get(keys, f"{SECTION}.max_env_workers"), get(keys, f"{_LIMIT_OF}.max_concurrency")
    if not get(keys, f"{_LIMIT_OF}.enabled"):
        keys.ignore(f"{_LIMIT_OF}.max_concurrency", f"{_LIMIT_OF}.enabled is not true")
        return workers
    return min((count for count in (workers, limit) if count), default=None)


def _open_run(keys: Reader) -> dict[str, Any]:
    """Return the environment that programs outside play; one turn of ``env_class`` scores those that send no reward."""
    for key in (*_TURN_KEYS, f"{SECTION}.search"):
        keys.ignore(key, "programs outside have the conversations")
    return {
        "environment.name": "open",
        "environment.settings.host": get(keys, _ENDPOINT_KEYS[0]),
        "environment.settings.port": get(keys, _ENDPOINT_KEYS[1]),
        "environment.max_context_tokens": keys["generator.max_input_length"],
    }


def _package(keys: Reader) -> dict[str, Any]:
    """The environment of skyrl-gym, and what is written for it and for those that rows name."""
    name = keys[CLASS]
    if name is None:
        names_none(keys)
        return {}
    _check_class(keys, name)
    keys.origins["environment.settings.env_class"] = CLASS
    fields: dict[str, Any] = {"environment.name": "skyrl_gym", "environment.settings.env_class": name}
    for other, where in of_checkout().items():  # rows may name each of them
        if not keys.written(f"{_OURS}.settings.register.{other}"):
            fields[f"environment.settings.register.{other}"] = where
    if name in of_checkout():
        keys.warn(f"{name} is yours: {of_checkout()[name]}")
    for other, config in keys.section(SECTION).items():
        if isinstance(config, dict):
            for option, value in config.items():
                # The adapter of the package knows the defaults.
                if keys.written(f"{SECTION}.{other}.{option}"):
                    fields[f"environment.settings.configs.{other}.{option}"] = value
    return fields


def names_none(keys: Reader) -> None:
    """Report that a null stands where an environment must: its rows' own are not read where they are the only ones."""
    what = (
        f"{CLASS} is null, which goes with a program whose own generator plays: nothing says what scores the responses"
    )
    keys.problem(what, key=CLASS, fix=f"name the environment of your rows, such as {CLASS}=gsm8k")


def _check_class(keys: Reader, name: str) -> None:
    allowed = f"{_OURS}.settings.allow_unboxed_code"
    if name in RUN_CODE and not keys.written(allowed):
        what = f"the environment {name} runs code that the model writes, without a box around it"
        keys.problem(
            what, key=CLASS, fix=f"accept it with +{allowed}=true, or play one turn of lcb (generator.max_turns=1)"
        )
    registered = keys.section(f"{_OURS}.settings.register")
    known = list(dict.fromkeys([*SHIPPED, *of_checkout(), *registered]))
    if name in known or ":" in name:
        return
    own = f"name the class of your own: {CLASS}=package.module:Class, or +{_OURS}.settings.register.{name}=package.module:Class"
    what = f"skyrl-gym has no environment {name!r} (it has: {', '.join(known)})"
    keys.problem(what, key=CLASS, fix=did_you_mean(name, known, listed=True) or own)
