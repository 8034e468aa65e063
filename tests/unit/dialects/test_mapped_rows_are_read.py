"""A row that says mapped has a reader: some file outside of config and dialects names the field, or the option, that it sets."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

import posttrain
from posttrain.dialects.detect import load_dialect, read_config
from posttrain.registry import ROLLOUT_ENGINES

SOURCE = Path(posttrain.__file__).parent
# Sections whose entries go to a library by their names, which no file here need say. Where an engine drops one, the second test
# looks for its reader.
HANDED_ON = ("engine_options", "engine_sampling")
SERVERS = ("vllm", "sglang")


@cache
def _text(*, of_backends: str = "") -> str:
    """The source outside of config and dialects, or of one sampler."""
    if of_backends:
        files = sorted((SOURCE / "backends" / "rollout" / of_backends).rglob("*.py"))
    else:
        files = [
            file for file in SOURCE.rglob("*.py") if file.relative_to(SOURCE).parts[0] not in ("config", "dialects")
        ]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@cache
def _names() -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z_]\w*", _text()))


@pytest.mark.parametrize("dialect", ["verl", "skyrl", "roll"])
def test_every_mapped_field_is_named_where_something_is_done(dialect: str) -> None:
    unread = {
        f"{row.name} -> {field}"
        for row in load_dialect(dialect).ledger.rows
        if row.status == "mapped"
        for field in row.fields
        if not any(part in field.split(".") for part in HANDED_ON) and _last(field) not in _names()
    }
    assert unread == set()


def _last(field: str) -> str:
    return [part for part in field.split(".") if not part.isdecimal()][-1]


def _dropped(engine: str) -> set[str]:
    """The options that a server's arguments leave out."""
    found = re.search(r"NOT_ARGUMENTS = \(([^)]*)\)", _text(of_backends=engine))
    assert found is not None
    return set(re.findall(r'"(\w+)"', found[1]))


@pytest.mark.parametrize("engine", SERVERS)
def test_an_option_that_is_no_argument_is_read_elsewhere_or_reported(engine: str) -> None:
    lists = re.compile(r"NOT_ARGUMENTS = \([^)]*\)|lacks_options=\([^)]*\)")
    text = lists.sub("", _text())
    lacking = set(ROLLOUT_ENGINES.facts(engine).lacks_options)
    mapped = {
        _last(field)
        for dialect in ("verl", "skyrl", "roll")
        for row in load_dialect(dialect).ledger.rows
        if row.status == "mapped"
        for field in row.fields
        if field.startswith("rollout.engine_options.")
    }
    silent = {name for name in _dropped(engine) & mapped - lacking if f'"{name}"' not in text}
    assert silent == set()


@pytest.mark.parametrize(
    ("override", "engine", "reports"),
    [
        ("disable_log_stats=False", "sglang", True),
        ("disable_log_stats=False", "vllm", False),
        ("layered_summon=True load_format=auto", "vllm", True),
        ("multi_stage_wake_up=True", "sglang", True),
    ],
)
def test_options_without_effect_are_reported(override: str, engine: str, reports: bool) -> None:
    rollout = "actor_rollout_ref.rollout"
    sizes = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8", "critic.ppo_micro_batch_size_per_gpu=8")
    words = [
        f"{rollout}.{word}" for word in (*override.split(), f"name={engine}", "log_prob_micro_batch_size_per_gpu=8")
    ]
    loaded = read_config(None, [*sizes, *words], "verl")
    key = f"{rollout}.{override.partition('=')[0]}"
    assert [one.key for one in loaded.ignored if one.asks and one.key == key] == [key] * reports
    assert key.rpartition(".")[2] in loaded.config.rollout.engine_options or reports


TRAINING = ("policy", "critic", "reference")
READERS = ("plan", "build", "backends", "models")


@pytest.mark.parametrize("dialect", ["verl", "skyrl", "roll"])
def test_an_option_of_a_training_engine_is_named_by_its_plan_or_its_engine(dialect: str) -> None:
    """Their options go through a plan of their own, which names every one; a library is handed none that is not named there."""
    files = [file for place in READERS for file in (SOURCE / place).rglob("*.py")]
    named = frozenset(re.findall(r"[A-Za-z_]\w*", "\n".join(file.read_text(encoding="utf-8") for file in files)))
    unread = {
        f"{row.name} -> {field}"
        for row in load_dialect(dialect).ledger.rows
        if row.status == "mapped"
        for field in row.fields
        if field.split(".")[0] in TRAINING and "engine_options" in field and _last(field) not in named
    }
    assert unread == set()
