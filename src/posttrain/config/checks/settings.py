"""Keyword arguments that a configuration gives to something registered: unknown ones, missing ones and values of another type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from posttrain.errors import Problem, did_you_mean, nearest
from posttrain.settings import Setting


def setting_problems(
    who: str, known: Mapping[str, Setting], given: Mapping[str, Any], field: str, *, word: str = "setting"
) -> Iterator[Problem]:
    """Yield the problems of what is given to ``who``, whose settings are ``known``.

    Args: field is that of the mapping ``given``; word is what users call a setting there.
    """
    for name, value in given.items():
        if name not in known:
            what = f"{who} has no {word} {name!r} (known: {', '.join(known) or 'none'})"
            yield Problem(what, fix=did_you_mean(name, list(known), listed=True), field=f"{field}.{name}")
            continue
        try:
            known[name].checked(value)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            place = ".".join(map(str, [name, *(part for part in wrong["loc"] if part in _places(value))]))
            said = wrong["msg"][:1].lower() + wrong["msg"][1:]
            yield Problem(f"the {word} {place} of {who} is {_short(value)}: {said}", field=f"{field}.{name}")
    meant = {nearest(name, list(known)) for name in given if name not in known}
    for name, setting in known.items():
        if setting.required and name not in given and name not in meant:
            yield Problem(f"{who} needs the {word} {name!r}", fix=f"give {field}.{name}", field=field)


def _places(value: Any) -> list[Any]:
    """Keys of a mapping and indices of a list; pydantic's places also name the members of a union."""
    return list(value) if isinstance(value, Mapping) else [*range(len(value))] if isinstance(value, list) else []


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
