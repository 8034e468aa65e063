"""YAML and ``${...}`` that are not plain, read by OmegaConf, and the problems of those that lead nowhere. The one file
here that imports it, when such a configuration is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from omegaconf import Container, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from posttrain.config.reading import hydra
from posttrain.config.reading.broken_yaml import yaml_problem
from posttrain.config.reading.sources import Place, SourceMap, child
from posttrain.errors import ConfigError, Problem, nearest


def parse(text: str, path: str, places: dict[str, Place]) -> dict[str, Any]:
    """Parse a file's text; its ``${...}`` stay. Raises: ConfigError for broken YAML and values of other types."""
    try:
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(yaml_problem(error, path)) from None
    except OmegaConfBaseException as error:
        raise ConfigError(_problem(error, SourceMap(path, places))) from None
    assert isinstance(values, dict)  # places_of_yaml has refused everything else
    return values  # type: ignore[return-value]  # keys that are not text are for the dialect to refuse


def resolve_all(values: dict[str, Any], sources: SourceMap) -> dict[str, Any]:
    """Follow every ``${...}``. Raises: ConfigError with all that lead nowhere, and every value that is yet to be given (???)."""
    hydra.register_resolvers()
    try:
        config = OmegaConf.create(values)
    except OmegaConfBaseException as error:
        raise ConfigError(_problem(error, sources)) from None
    try:
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:  # the first of them; looking for all takes as long again
        raise ConfigError(list(_unresolvable(config, "", sources)) or _problem(error, sources)) from None
    assert isinstance(resolved, dict)
    return resolved  # type: ignore[return-value]


def _unresolvable(node: Container, path: str, sources: SourceMap) -> Iterator[Problem]:
    keys: Sequence[Any] = list(node.keys()) if isinstance(node, DictConfig) else range(len(node))  # type: ignore[arg-type]
    for key in keys:
        name = child(path, key)
        if OmegaConf.is_interpolation(node, key):
            try:
                node[key]
            except OmegaConfBaseException as error:
                written = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index]
                what, fix = _interpolation_error(str(written), error, sources)
                yield Problem(what, where=sources.where(name), fix=fix)
        elif OmegaConf.is_missing(node, key):
            yield Problem(f"{name} must be given: ??? stands in its place", where=sources.where(name))
        elif isinstance(node[key], DictConfig | ListConfig):
            yield from _unresolvable(node[key], name, sources)


def _interpolation_error(written: str, error: Exception, sources: SourceMap) -> tuple[str, str]:
    """Describe the problem of an interpolation, and its fix."""
    reason = str(error).splitlines()[0]
    if match := re.search(r"Environment variable '(.+?)' not found", reason):
        name = match[1]
        return (
            f"the environment variable {name} is not set ({written})",
            f"set it, or give a default: ${{oc.env:{name},...}}",
        )
    if match := re.search(r"Interpolation key '(.+?)' not found", reason):
        guess = nearest(match[1], [place for place in sources.places if not match[1].startswith(f"{place}.")])
        fix = "only keys that are written can be referred to, not defaults"
        if guess:
            place = sources.places[guess].text
            fix = f"did you mean ${{{guess}}}? Or is {guess} ({place}) meant to be {match[1]}?"
        return f"{written} refers to {match[1]}, which is not written anywhere", fix
    if match := re.search(r"Unsupported interpolation type (\S+)", reason):
        return f"{written} asks for a resolver {match[1]!r} that does not exist", "oc.env, oc.select, now and ${key} do"
    if "Recursive interpolation" in reason:
        return f"{written} leads back to itself", "write a value in the place of one of the references"
    return f"{written} cannot be resolved: {reason}", ""


def _problem(error: OmegaConfBaseException, sources: SourceMap) -> Problem:
    """Describe an error that OmegaConf raises at once: a ``${`` that is not closed, a value of an unsupported type."""
    key = re.sub(r"\[(\d+)\]", r".\1", error.full_key or "")
    if isinstance(error, GrammarParseError):
        found = re.search(r"input '(.+)'", str(error))
        what = f"{key} holds {found[1] if found else 'a text with ${'}, which cannot be read as a reference"
        fix = "close it with }, or write \\${ for the plain characters"
        return Problem(what, where=sources.where(key), fix=fix)
    return Problem(str(error).splitlines()[0], where=sources.where(key) if key else sources.file or "")
