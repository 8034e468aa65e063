"""Every table of keys keeps to its schema; and the schema sees each kind of slip, with the file and the line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.reading.sources import same_branch
from posttrain.dialects.layout import layout
from posttrain.dialects.ledger import ABSENT
from posttrain.dialects.tables import Tables

from .examples import PEERS, examples, tables_of
from .table_schema import complaints

ROW: dict[str, Any] = {"key": "opt.lr", "type": "float", "default": 1e-6, "meaning": "peak learning rate",
                       "field": "policy.optimizer.lr", "example": "1e-5", "expected": {"policy.optimizer.lr": 1e-5}}  # fmt: skip


@pytest.mark.parametrize("dialect", PEERS)
def test_every_row_keeps_to_the_schema(dialect: str) -> None:
    assert complaints(tables_of(dialect)) == []


def test_every_field_of_verls_keys_has_an_example() -> None:
    """A key that decides several fields expects each of them; sections stand for what lies in them."""
    expected: dict[tuple[str, str], set[str]] = {}
    for example in examples("verl"):
        expected.setdefault((example.entry, example.key), set()).update(example.expected)
    for row in tables_of("verl").ledger().rows:
        seen = expected.get((row.entry, row.name), set())
        missing = [field for field in row.fields if not any(same_branch(one, field) for one in seen)]
        assert missing in ([], ["reward.model.path"]), row.name


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    """The tables of a dialect with one table, written by ``write``."""
    (tmp_path / "toy" / "keys" / "templates").mkdir(parents=True)
    (tmp_path / "toy" / "contexts.json").write_text('{"bases": {"train": []}, "contexts": {"two": ["devices=2"]}}')
    return Tables(folder=tmp_path / "toy" / "keys", dialect="toy", version="2", versions=("1", "2"), names=("opt",))


def write(tables: Tables, *rows: dict[str, Any], template: list[dict[str, Any]] | None = None) -> None:
    (tables.folder / "opt.json").write_text(layout([{"about": "Keys of opt."}, *rows]))
    if template is not None:
        (tables.folder / "templates" / "role.json").write_text(layout(template))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"meening": "x"}, "unknown column meening"),
        ({"type": "number"}, "'number' is not a type"),
        ({"type": "null | float | null"}, "is written"),
        ({"default": "fast"}, "the default, 'fast', is not float"),
        ({"earlier": {"1": "fast"}}, "the default of 1, 'fast', is not float"),
        ({"earlier": {"3": 1.0}}, "there is no version 3 (known: 1, 2, later)"),
        ({"since": "3"}, "there is no version 3"),
        ({"entry": "paint"}, "there is no entry point paint"),
        ({"meaning": ""}, "needs a meaning of one line"),
        ({"field": None}, "needs one of the columns field, ignored, refused, planned, and has none"),
        ({"ignored": "no"}, "and has field, ignored"),
        ({"field": None, "ignored": ""}, "ignored is empty"),
        ({"field": None, "ignored": "no"}, "example is for mapped keys"),
        ({"field": "policy.optimizer.rate"}, "policy.optimizer.rate is no field of a configuration of reinforcement learning"),
        ({"rule": "batches"}, "rule is true or 'if used'"),
        ({"convert": "upside_down"}, "there is no converter 'upside_down'"),
        ({"example": None}, "a mapped key needs an example, or no_example with the reason"),
        ({"example": 1e-5}, "an example is a text"),
        ({"expected": {}}, "comes with what is expected"),
        ({"expected": {"run.seed": 1}}, "no example expects one of its fields (policy.optimizer.lr)"),
        ({"given": ["three"]}, "there is no context three"),
        ({"further": [{"example": "1", "expects": 1, "expected": {"policy.optimizer.lr": 1.0}}]}, "unknown column expects in"),
    ],
)  # fmt: skip
def test_a_slip_is_reported_with_its_line(tables: Tables, change: dict[str, Any], complaint: str) -> None:
    row = {name: value for name, value in (ROW | change).items() if value is not None}
    text = layout([{"about": "Keys of opt."}, {**ROW, "key": "opt.first"}]).removesuffix("\n]\n")
    (tables.folder / "opt.json").write_text(f"{text},\n{json.dumps(row)}\n]\n")
    found = [one for one in complaints(tables) if "standard layout" not in one]
    assert found and all(one.startswith("toy/keys/opt.json:7 opt.lr: ") for one in found)
    assert any(complaint in one for one in found), found


def test_two_rows_for_a_key_are_both_named(tables: Tables) -> None:
    write(tables, ROW, ROW)
    assert complaints(tables) == ["opt.json:7 opt.lr: has a row at opt.json:3 already"]


def test_what_is_no_json_is_reported_with_its_line(tables: Tables) -> None:
    (tables.folder / "opt.json").write_text('[\n{"about": "x"},\n{"key": "a" "b"}\n]\n')
    assert complaints(tables)[0].startswith("opt.json:3 is not JSON")


def test_another_layout_is_reported_with_its_first_line(tables: Tables) -> None:
    (tables.folder / "opt.json").write_text(json.dumps([{"about": "Keys of opt."}, ROW]))
    assert complaints(tables) == ["toy/keys/opt.json:1 is not in the standard layout: run make format"]


def test_a_table_that_nobody_reads_is_reported(tables: Tables) -> None:
    write(tables, ROW)
    (tables.folder / "lost.json").write_text("[]")
    assert complaints(tables) == ["lost.json: no such table is named in ledger.py"]


TEMPLATE: list[dict[str, Any]] = [
    {"key": "<section>.lr", "type": "float", "default": 1.0, "meaning": "peak learning rate of the <role>",
     "field": "<role>.optimizer.lr", "example": "3", "expected": {"<role>.optimizer.lr": 3.0},
     "in": {"critic": {"default": {"absent": True}}}},
    {"key": "<section>.clip", "only": ["critic"], "type": "float", "default": 0.5, "meaning": "limit",
     "field": "critic.value_clip", "example": "1", "given": ["two"], "expected": {"critic.value_clip": 1.0}},
    {"key": "<section>.name", "for": ["actor"], "type": "text", "meaning": "name", "field": "run.name", "example": "x",
     "expected": {"run.name": "x"}},
]  # fmt: skip
ACTOR = {"use": "role", "as": "actor", "section": "actor", "role": "policy", "otherwise": "it has none"}
CRITIC = {
    "use": "role",
    "as": "critic",
    "section": "critic",
    "role": "critic",
    "otherwise": "it has none",
    "given": ["two"],
}


def test_a_template_is_filled_in_for_each_role(tables: Tables) -> None:
    write(tables, ACTOR, CRITIC, template=TEMPLATE)
    assert complaints(tables) == []
    rows = {row.name: row for row in tables.ledger().rows}
    assert list(rows) == ["actor.lr", "actor.name", "critic.lr", "critic.clip", "critic.name"]
    assert (rows["actor.lr"].fields, rows["actor.lr"].default) == (("policy.optimizer.lr",), 1.0)
    assert (rows["critic.lr"].meaning, rows["critic.lr"].default) == ("peak learning rate of the critic", ABSENT)
    assert (rows["critic.name"].status, rows["critic.name"].reason) == ("ignored", "it has none")
    given = [row.get("given") for row in tables.rows("opt", examples=True)]
    assert given == [[], [], ["two"], ["two", "two"], None]


@pytest.mark.parametrize(
    ("use", "complaint"),
    [
        ({**ACTOR, "use": "rolls"}, "toy/keys/opt.json:3 rolls: there is no template rolls"),
        ({**ACTOR, "role": 3}, "toy/keys/opt.json:3 role: unknown columns: role"),
        ({**ACTOR, "except": ["<section>.rate"]}, "except names <section>.rate, which role.json does not have"),
        ({name: text for name, text in ACTOR.items() if name != "role"}, "<role> of <section>.lr is not given"),
    ],
)
def test_a_slip_in_the_use_of_a_template_is_reported(tables: Tables, use: dict[str, Any], complaint: str) -> None:
    write(tables, use, template=TEMPLATE)
    assert any(complaint in one for one in complaints(tables)), complaints(tables)


def test_a_later_name_is_like_the_earlier_one_but_null(tables: Tables) -> None:
    write(tables, ROW, {"key": "opt.rate", "same_as": "opt.lr", "since": "later"})
    assert complaints(tables) == []
    first, later = tables.ledger().rows
    assert later == replace(first, name="opt.rate", type=float | None, default=None, by_rule=True, since="later",
                            note="The later name of opt.lr; writing both is an error.", same_as="opt.lr")  # fmt: skip
