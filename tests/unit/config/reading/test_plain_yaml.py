"""Documents of plain values: the same values as OmegaConf's, and None for everything that only OmegaConf reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from posttrain.config.reading.plain_yaml import plain_yaml

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").rglob("*.yaml"))
# fmt: off
SPELLINGS = [
    "1e-6", "1.5E3", "1_0e5", ".5e3", "-.inf", ".NaN", "0x1F", "0o17", "017", "0b1", "1:30", "1:30.5", "1.", "+1",
    "yes", "No", "on", "OFF", "y", "~", "null", "Null", "true", "False", "2024-01-02", "2024-01-02T03:04:05",
    "-", "=", "<<", "a:b", "http://x:1", "x#y", "${a.b}", "${oc.env:HOME}", "$x", "???", "'q'", '"1e-6"', "'${a}'",
]
# fmt: on
# Texts that YAML 1.1, YAML 1.2 and OmegaConf read as different things
SCALARS = st.one_of(
    st.from_regex(r"[-+]?[0-9_]{0,3}\.?[0-9_]{0,2}([eE][-+]?[0-9]{1,2})?", fullmatch=True),
    st.sampled_from(SPELLINGS),
    st.text("abc é01-_. ", max_size=5),
)


def as_omegaconf(text: str) -> Any:
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_examples_read_as_by_omegaconf(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert repr(plain_yaml(text)) == repr(as_omegaconf(text))


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(["a", "b", "c d"]), st.lists(SCALARS, min_size=1, max_size=3), min_size=1))
def test_scalars_read_as_by_omegaconf(tree: dict[str, list[str]]) -> None:
    """In block and flow style; None, which lets OmegaConf read or refuse the document, is never wrong."""
    block = "".join(f"{key}:\n" + "".join(f"  - {item}\n" for item in items) for key, items in tree.items())
    flow = "".join(f"{key}: [{', '.join(items)}]\n" for key, items in tree.items())
    for text in (block, flow):
        found = plain_yaml(text)
        if found is not None:
            assert repr(found) == repr(as_omegaconf(text)), text


@pytest.mark.parametrize(
    "text",
    [
        "a: [1",
        "1: x",
        "a: ${b:c}",
        "a: ${.b}",
        r"a: \${b}",
        "a: !!binary aGk=",
        "a: !!python/object/apply:os.getcwd []",
        "a: !mine 1",
        "just text",
        "[1, 2]",
        "",
    ],
)
def test_what_only_omegaconf_reads_is_left_to_it(text: str) -> None:
    assert plain_yaml(text) is None


def test_an_alias_is_a_value_of_its_own() -> None:
    found = plain_yaml("a: &x {b: [1]}\nc: *x\nd:\n  <<: *x\n  e: 1e-6\n")
    assert found == {"a": {"b": [1]}, "c": {"b": [1]}, "d": {"b": [1], "e": 1e-6}}
    assert found["a"] is not found["c"] and found["a"]["b"] is not found["d"]["b"]
