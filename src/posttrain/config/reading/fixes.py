"""The fix for a value of the wrong kind, by what its writer most likely meant."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, get_args

from pydantic.fields import FieldInfo

from posttrain.errors import nearest

# Values as other libraries spell them -> ours.
SPELLINGS = {
    "adam": "adamw",
    "adamw_torch": "adamw",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "gpu": "cuda",
    "constant_with_warmup": "constant",
    "wsd": "warmup_stable_decay",
}
# A bound that other libraries mark "none" with a number beyond.
BEYOND = {
    "rollout.top_k": "0 keeps every token",
    "validation.top_k": "0 keeps every token",
    "run.total_steps": "null means all steps of run.total_epochs",
    "checkpoint.every_steps": "null saves at the end alone",
    "validation.every_steps": "null validates before and after training alone",
    "checkpoint.keep_last": "null keeps all",
    "data.max_prompts": "null takes all",
    "validation.max_prompts": "null takes all",
}


def fix_of(
    key: str, kind: str, value: Any, field: FieldInfo | None, context: Mapping[str, Any], inside: Collection[str]
) -> str:
    """The fix for ``value``, which is not of the right kind; "" for a value that tells nothing.

    Args: ``kind`` is pydantic's error type, with its ``context``; ``inside`` lists the keys of a section.
    """
    if isinstance(value, str) and value.lower() in ("none", "nil", "null") and _may_be_null(field):
        return "write null"
    if kind in ("greater_than", "greater_than_equal") and key in BEYOND:
        return BEYOND[key]
    if re.fullmatch(r"reward\.terms(\.[0-9]+)?", key) and isinstance(value, str):
        term = f"{{path: {value}, name: NAME_OF_THE_FUNCTION}}" if value.endswith(".py") else f"{{name: {value}}}"
        written = f"[{term}]" if kind == "list_type" else term
        return f"write {written}, in quotes on the command line: '{key}={written}'"
    if kind in ("model_type", "dict_type"):
        return _section(key, value, inside)
    if kind.startswith(("int_", "float_")) and isinstance(value, str) and re.fullmatch(r"\d{1,3}([,_']\d{3})+", value):
        return f"write {re.sub('[^0-9]', '', value)}"
    if kind == "literal_error" and isinstance(value, str):
        return _literal(value, str(context["expected"]))
    if kind == "string_type" and isinstance(value, int | float) and not isinstance(value, bool):
        return f'put it in quotes: "{value!r}"'
    if kind == "list_type" and isinstance(value, str | int | float):
        return f"write [{value}]" if re.fullmatch(r"[\w./-]+", str(value)) else f"write [{value!r}]"
    if kind == "tuple_type" or (kind == "missing" and field is not None and isinstance(field.default, tuple)):
        return f"write {list(field.default)}, for example" if field is not None and field.default else ""
    return ""


def _may_be_null(field: FieldInfo | None) -> bool:
    return field is not None and type(None) in get_args(field.annotation)


def _section(key: str, value: Any, inside: Collection[str]) -> str:
    """A value in the place of a section is most likely one of the keys in it: its name, its path or its files."""
    if blank := missing_blank(value, inside):
        return blank
    if isinstance(value, str) and "name" in inside and not value.endswith(".py"):
        return f"did you mean {key}.name={value}?"
    if isinstance(value, str) and "terms" in inside:
        return f"did you mean '{key}.terms=[{{path: {value}, name: NAME_OF_THE_FUNCTION}}]'?"
    for name, written in (("path", value), ("train_files", f"[{value}]"), ("rank", 16)):
        if name in inside and (isinstance(value, str) or name == "rank"):
            return f"did you mean {key}.{name}={written}?"
    return ""


def missing_blank(value: Any, inside: Collection[str]) -> str:
    """The fix for ``path:model`` in the place of a section with a key path; "" for another value."""
    found = re.match(r"(\w+)[:\uff1a]\s*(\S.*)", value, re.S) if isinstance(value, str) else None
    if found is None or found[1] not in inside:
        return ""
    return f"put a colon and a blank after the key: {found[1]}: {found[2].splitlines()[0]}"


def _literal(value: str, expected: str) -> str:
    known = re.findall(r"'([^']*)'", expected)
    plain = value.lower().removeprefix("torch.").partition(":")[0]
    guess = SPELLINGS.get(plain, plain)
    found = guess if guess in known else nearest(plain, known)
    return f"did you mean {found}?" if found else ""
