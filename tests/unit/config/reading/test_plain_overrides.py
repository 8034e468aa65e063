"""Plain overrides: what Hydra's parser reads, and None for everything else."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import example, given, settings
from hypothesis import strategies as st

from posttrain.config.reading.plain_overrides import plain_override

ACTIONS = {"": "set", "+": "add", "++": "force"}
# fmt: off
SPELLINGS = [
    "true", "False", "NULL", "null", "nan", "-inf", "Inf", "a.b", "a-b", "/x/y_z.1", "~/x", "x@y", "1x", "0x1", "1_0", "007",
    "e5", "_", "-", ".", "$x", "${a}", "a:b", "%s", "é", "'a b'", '"1"', r"'a\'b'", "''", "'${a}'", "a b", " a", "a ", "f(x)",
    "{a:1}", "[1]",
]
# fmt: on
SCALARS = st.one_of(
    st.from_regex(r"[-+]?[0-9_]{0,3}\.?[0-9_]{0,2}([eE][-+]?[0-9]{0,2})?", fullmatch=True),
    st.sampled_from(SPELLINGS),
    st.text("aZ_0.-/1e+", max_size=6),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3).map(lambda items: f"[{','.join(items)}]"))
KEYS = st.sampled_from(["a", "a.b", "a.0.b", "a.00", "a/b", "a@b", "a.", "_x.y1", "1a", "a.-b", "é", ""])


def by_hydra(text: str) -> Any:
    parsed = OverridesParser.create().parse_overrides([text])[0]
    assert not parsed.is_sweep_override() and not parsed.is_delete() and parsed.package is None
    action = "add" if parsed.is_add() else "force" if parsed.is_force_add() else "set"
    return parsed.key_or_group, action, parsed.value()


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(["", "+", "++", "~"]), KEYS, VALUES)
@example("", "a.b", "[a,]")
@example("", "a.b", "[,a]")
@example("", "a.b", "")
@example("++", "a.b", "1.")
@example("", "a.b", "1e5")
@example("", "a.b", "['x,y',z]")
def test_read_as_by_hydra(plus: str, key: str, value: str) -> None:
    """None, which lets Hydra read or refuse the override, is never wrong."""
    text = f"{plus}{key}={value}"
    found = plain_override(text)
    if found is not None:
        assert repr(found) == repr(by_hydra(text)), text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1", 1),
        ("a.b=-0.5", -0.5),
        ("a.b=1e-6", 1e-6),
        ("a.b=True", True),
        ("a.b=null", None),
        ("a.b=", ""),
        ("a.b=runs/x-1/model.pt", "runs/x-1/model.pt"),
        ("a.b=[console,'my run',2]", ["console", "my run", 2]),
        ("a.b=[]", []),
    ],
)
def test_what_most_overrides_are_is_plain(text: str, value: Any) -> None:
    assert plain_override(text) == ("a.b", "set", value) == by_hydra(text)


@pytest.mark.parametrize(
    "text", ["a=1,2", "a=choice(1,2)", "a={b:1}", "~a", "a", "a=~/x", "a=x y", "a=${b}", "a='", "a=[1"]
)
def test_what_only_hydra_reads_is_left_to_it(text: str) -> None:
    assert plain_override(text) is None


def test_the_comparison_sees_a_refusal() -> None:
    with pytest.raises(HydraException):
        by_hydra("a=[,a]")
