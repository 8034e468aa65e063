"""Interpolations: what OmegaConf gives for a whole configuration, also where it is shown only a part of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posttrain.config.reading.interpolations import resolve
from posttrain.config.reading.sources import SourceMap
from posttrain.errors import ConfigError

NAMES = ["a", "b", "c", "d-e", "f.g"]
TEXTS = [
    "plain",
    "${a}",
    "${a.b}",
    "x ${b} and ${c}",
    "${.b}",
    "${..a}",
    "${a.${b}}",
    "${d-e}",
    "${a[0]}",
    "${oc.env:HOME}",
    "${oc.env:NOT_SET_ANYWHERE,${c}}",
    "${oc.select:a.b,3}",
    r"\${a}",
    "a $ and { }",
    "${a}/${oc.env:HOME}",
    "${c",
    "???",
    r"back\\slash ${b}",
]
LEAVES = st.one_of(st.sampled_from(TEXTS), st.integers(), st.none(), st.booleans(), st.floats(allow_nan=False))
TREES = st.dictionaries(
    st.sampled_from(NAMES),
    st.recursive(
        LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_size=5,
)


@settings(max_examples=50)
@given(TREES)
def test_a_part_of_a_configuration_resolves_as_the_whole(tree: dict[str, Any]) -> None:
    try:
        expected = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except (OmegaConfBaseException, RecursionError):
        with pytest.raises((ConfigError, RecursionError)):
            resolve(tree, SourceMap(None, {}))
    else:
        assert resolve(tree, SourceMap(None, {})) == expected


def test_only_what_interpolations_touch_is_given_to_omegaconf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_HERE", "x")
    tree = {"a": {"b": 1, "c": 2}, "d": {"e": "${a.b}", "f": "${oc.env:SET_HERE,y}"}, "g": {"h": 5}}
    seen: list[Any] = []
    create = OmegaConf.create
    monkeypatch.setattr(OmegaConf, "create", lambda values: seen.append(values) or create(values))
    assert resolve(tree, SourceMap(None, {})) == {"a": {"b": 1, "c": 2}, "d": {"e": 1, "f": "x"}, "g": {"h": 5}}
    assert seen == [{"a": {"b": 1}, "d": {"e": "${a.b}", "f": "${oc.env:SET_HERE,y}"}}]


def test_plain_references_are_followed_without_omegaconf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_HERE", "1e-6")  # a text, as OmegaConf has it
    monkeypatch.setattr(OmegaConf, "create", lambda values: pytest.fail(f"OmegaConf reads {values}"))
    tree = {
        "a": {"b": [1, "${c}"], "d": None},
        "c": True,
        "e": "${a.b}",
        "f": "${a.d}",
        "g": "${c}-${oc.env:SET_HERE}",
        "h": "${g}",
    }
    found = resolve(tree, SourceMap(None, {}))
    expected = {"a": {"b": [1, True], "d": None}, "c": True, "e": [1, True], "f": None}
    assert found == expected | {"g": "True-1e-6", "h": "True-1e-6"}
    assert found["e"] is not found["a"]["b"]
