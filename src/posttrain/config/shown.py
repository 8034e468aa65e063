"""A configuration as it may be shown and saved: what came from the environment by its reference, secrets not at all.

``${oc.env:NAME}`` stays so in config.yaml, on trackers and on the terminal; whoever reads it resolves it again. A secret that was
typed into a file or onto the command line becomes a reference too, to a variable named after its key: the run that typed it
resumes as it was started, and a run from the saved file asks for the variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.config.base import Section
from posttrain.config.reading.sources import child

_WORD = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_ALWAYS = frozenset(
    {"apikey", "authorization", "bearer", "credential", "passphrase", "passwd", "password", "pwd", "secret"}
)
# Words before "key" and "token" that make them something else.
_NO_KEY = frozenset({
    "answer", "audio", "cache", "column", "data", "env", "field", "fn", "foreign", "group", "image", "input", "label", "message",
    "messages", "metric", "output", "primary", "prompt", "public", "query", "question", "response", "reward", "row",
    "score", "solution", "sort", "source", "state", "target", "text", "thinking", "tools", "truth", "video",
})  # fmt: skip
_NO_TOKEN = frozenset({
    "action", "audio", "bos", "boundary", "cls", "end", "eos", "first", "image", "last", "mask", "max", "min", "new",
    "next", "observation", "pad", "per", "sep", "special", "start", "stop", "think", "tool", "unk", "video",
})  # fmt: skip


def is_secret(name: str) -> bool:
    """Return True when a value under this name is taken for a secret: api_key, hfToken, but not prompt_key or eos_token."""
    words = [word.lower() for word in _WORD.split(name) if word]
    if not words:
        return False
    last, before = words[-1].removesuffix("s"), words[-2] if len(words) > 1 else ""
    if last in _ALWAYS:
        return True
    return (last == "key" and before not in _NO_KEY) or (last == "token" and before not in _NO_TOKEN)


def shown(config: Section) -> dict[str, Any]:
    """Return the configuration as plain values for eyes and files. A reference is a text ``${oc.env:…}``."""
    return _shown(config.model_dump(mode="json"), config, "", config, secret=False)


def hidden_texts(config: Section) -> list[str]:
    """The texts in a configuration that ``shown`` replaces, the longest first."""
    return sorted({value for _, value, _ in _hidden(config) if isinstance(value, str) and value}, key=len, reverse=True)


def secret_warnings(config: Section) -> list[str]:
    """Name the fields that hold a secret in plain text, and the reference that is saved instead of each."""
    known = {reference for _, _, reference in config.references()}
    return [
        f"{field} holds a secret in plain text; {safe} is saved and shown instead: write that, and set the variable"
        for field, _, safe in _hidden(config)
        if safe not in known
    ]


def _hidden(config: Section) -> Iterator[tuple[str, Any, Any]]:
    """The values that ``shown`` replaces: field, value, and what is shown."""
    plain = config.model_dump(mode="json")
    return _differing(plain, _shown(plain, config, "", config, secret=False), "")


def _shown(value: Any, root: Section, path: str, declared: Any, *, secret: bool) -> Any:
    """Args: ``declared`` is the section or value that was dumped: names that a section declares are never secrets."""
    if isinstance(value, Mapping):
        of_schema = isinstance(declared, Section)
        return {
            name: _shown(
                inner,
                root,
                child(path, name),
                getattr(declared, str(name), None) if of_schema else _item(declared, name),
                secret=not of_schema and (secret or is_secret(str(name))),
            )
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [
            _shown(inner, root, child(path, place), _item(declared, place), secret=secret)
            for place, inner in enumerate(value)
        ]
    if not isinstance(value, str) or not value:
        return value
    for key, resolved, reference in root.references():
        if resolved == value and key in ("", path):
            return reference
        if key == "" and resolved in value:  # joined with something by a dialect's rule
            return value.replace(resolved, reference)
    if secret:
        return "${oc.env:" + re.sub(r"\W", "_", path).upper() + "}"
    return value


def _item(value: Any, key: Any) -> Any:
    try:
        return value[key]
    except (TypeError, LookupError):
        return None


def _differing(value: Any, safe: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value, safe
    for name, inner in items or ():
        if inner != safe[name]:
            yield from _differing(inner, safe[name], child(path, name))
