"""Rotary positions of a model, changed by a run: the keys rope_theta and rope_scaling, as configurations have long had them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from posttrain.errors import ModelError, Problem, did_you_mean

KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section")  # by another kind of scaling
FULL = "full_attention"
_PLAIN = ("default", "mrope")  # mrope: Qwen2-VL's name for positions in three parts, without scaling


def has_rope(config: PretrainedConfig) -> bool:
    """Tell if the model has rotary positions that a run can change."""
    return isinstance(getattr(config.get_text_config(), "rope_parameters", None), Mapping)


def override_rope(config: PretrainedConfig, name: str, value: Any, field: str) -> None:
    """Set the rotary positions of a model's configuration. Where its layers differ, those of full attention change.

    Args: name, one of KEYS; value: the base (rope_theta), or a mapping with ``rope_type`` (or ``type``) and what that kind
        takes; None: no scaling. A mapping without a kind changes single values of what the model has.
    Raises: ModelError for a base, a kind or a factor that is none, or a kind that lacks a value.
    """
    text = config.get_text_config()
    kinds = text.nested_rope_parameter_keys(text.rope_parameters)  # of layers, where they differ
    if not kinds:
        text.rope_parameters = _changed(text.rope_parameters, name, value, field)
    else:
        by_kind = value if isinstance(value, Mapping) and set(value) <= set(kinds) else {FULL: value}
        if unknown := by_kind.keys() - set(kinds):
            what = f"the model has no layers {unknown.pop()!r} (known: {', '.join(kinds)})"
            raise ModelError(Problem(what, field=f"{field}.{name}"))
        changed = {kind: _changed(text.rope_parameters[kind] or {}, name, by_kind[kind], field) for kind in by_kind}
        text.rope_parameters = {**text.rope_parameters, **changed}
    text.standardize_rope_params()
    try:
        text.validate_rope()
    except (KeyError, ValueError) as error:
        raise ModelError(Problem(f"{name} of the model: {error.args[0]}", field=f"{field}.{name}")) from error


def rope_for_servers(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields that describe a model's rotary positions. The last is transformers 5's, where setting one of the others
    replaces it or does nothing; versions before read the others, which cannot tell layers of several kinds apart."""
    text = config.get_text_config()
    whole = text.rope_parameters
    flat = whole.get(FULL, {}) if text.nested_rope_parameter_keys(whole) else whole
    scaling = None if flat.get("rope_type", "default") == "default" else dict(flat)
    return {"rope_theta": flat.get("rope_theta"), "rope_scaling": scaling, "rope_parameters": whole}


def _changed(old: Mapping[str, Any], name: str, value: Any, field: str) -> dict[str, Any]:
    plain = {key: each for key, each in old.items() if key in _KEPT} | {"rope_type": "default"}
    if name == "rope_theta":
        found = {**old, "rope_theta": value}
    elif value is None:
        found = plain
    elif isinstance(value, Mapping):
        given = {"rope_type" if key == "type" else key: each for key, each in value.items()}
        found = {**(plain if "rope_type" in given else old), **given}
    else:
        fix = "write a mapping, such as {rope_type: yarn, factor: 4.0}"
        raise ModelError(Problem(f"{name} is {value!r}, not a mapping", fix=fix, field=f"{field}.{name}"))
    _check(found, field)
    return found


def _check(rope: dict[str, Any], field: str) -> None:
    kind, known = rope.get("rope_type", "default"), [*ROPE_INIT_FUNCTIONS, *_PLAIN]
    if kind not in known:
        what = f"rope_type is {kind!r} (known: {', '.join(sorted(set(known)))})"
        raise ModelError(Problem(what, fix=did_you_mean(str(kind), known), field=f"{field}.rope_scaling"))
    if kind in _PLAIN:
        rope["rope_type"] = "default"
    for name, least in (("rope_theta", 0), ("factor", 1)):
        value: Any = rope.get(name)
        if value is None:  # as longrope's factor may be
            continue
        if isinstance(value, str):  # YAML reads 1e6 as a text
            with suppress(ValueError):
                value = rope[name] = float(value)
        good = isinstance(value, int | float) and not isinstance(value, bool) and value < float("inf")
        if not good or value < least or value == 0:
            wanted = "at least 1" if least else "above 0"
            what = f"{name} of the rotary positions is {value!r}; it must be a number {wanted}"
            key = "rope_scaling.factor" if name == "factor" else name
            raise ModelError(Problem(what, field=f"{field}.{key}"))
