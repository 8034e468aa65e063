# ruff: noqa: E501  # messages stand as they are printed, in one line
"""The machinery of the dialects, on a small invented one: what its rows and rules promise holds for every dialect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from posttrain.dialects.detect import read_config
from posttrain.dialects.ledger import Ledger
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reader import Dialect, Reader
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.tables import key_of
from posttrain.dialects.value_types import fits, parse_type, type_text
from posttrain.errors import ConfigError

TABLE = """[
{"key": "model.name", "type": "text", "default": "small", "meaning": "The model.", "field": "model.path"},
{"key": "data.files", "type": "list of text", "default": ["a.parquet"], "meaning": "Files.", "field": "data.train_files"},
{"key": "data.batch", "type": "int", "default": 16, "meaning": "Prompts per step.", "field": "data.prompts_per_step", "rule": true},
{"key": "opt.lr", "type": "float", "default": 1e-6, "meaning": "Peak learning rate.", "field": "policy.optimizer.lr"},
{"key": "opt.mini", "type": "int", "default": 16, "meaning": "Prompts per update.",
 "field": "policy.sequences_per_mini_batch", "rule": true, "change": "prompts x n"},
{"key": "gen.n", "type": "int", "default": "${opt.copies}", "meaning": "Samples per prompt.", "field": "rollout.samples_per_prompt"},
{"key": "gen.engine", "type": "one of native, vllm", "default": "native", "earlier": {"1": "vllm"}, "meaning": "Sampler.",
 "field": "rollout.engine"},
{"key": "gen.eager", "type": "bool", "default": true, "meaning": "No graphs.", "field": "rollout.engine_options.eager"},
{"key": "gen.top_k", "type": "int", "default": -1, "meaning": "Top k; -1 keeps all.",
 "field": "rollout.top_k", "convert": "at_least_zero", "change": "-1 is 0"},
{"key": "gen.devices", "type": "int", "default": 1, "meaning": "Devices.", "field": "placement.devices"},
{"key": "log", "type": "list of text", "default": ["console"], "meaning": "Trackers.", "field": "tracking.trackers"},
{"key": "opt.copies", "type": "int", "default": 4, "meaning": "Copies.", "ignored": "a helper of other keys"},
{"key": "cache.folder", "type": "text | null", "default": null, "meaning": "Folder of the cache.", "ignored": "there is no cache"},
{"key": "data.lie", "type": "bool", "default": false, "meaning": "Lie about the data.", "refused": "it would be untrue"},
{"key": "gen.images", "type": "bool", "default": false, "meaning": "Images.", "planned": "images in prompts"},
{"key": "gen.wait_s", "type": "int", "default": 300, "meaning": "Seconds to wait.", "planned": "a cluster", "cluster": true},
{"key": "opt.seed", "type": "int | null", "since": "2", "meaning": "Seed.", "field": "run.seed"},
{"key": "gen.sampling.**", "type": "section", "meaning": "Further sampling parameters.", "field": "rollout.engine_sampling", "rule": true},
{"key": "jobs.*.name", "type": "text", "meaning": "Name of a job.", "ignored": "jobs have no names here"}
]"""
ROWS = tuple(key_of(row) for row in json.loads(TABLE))


def rules(keys: Reader) -> dict[str, Any]:
    mini, batch, n = keys["opt.mini"], keys["data.batch"], keys["gen.n"]
    if batch % mini:
        keys.problem(f"{batch} prompts do not split into mini-batches of {mini}", key="opt.mini", fix=f"use {batch}")
        return {"data.prompts_per_step": batch}
    fields = {"data.prompts_per_step": batch, "policy.sequences_per_mini_batch": mini * n}
    if keys.section("gen.sampling"):
        fields["rollout.engine_sampling"] = keys.section("gen.sampling")
    return fields


TOY = Dialect(name="toy", ledger=Ledger("toy", "2", ROWS, ("1", "2")), rules={"train": rules})
LENIENT = Dialect(name="toy", ledger=TOY.ledger, rules={"train": rules}, unknown_keys="warn")


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., LoadedConfig]:
    def read(text: str = "", *overrides: str, dialect: Dialect = TOY, **options: Any) -> LoadedConfig:
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return read_dialect(dialect, str(file) if text else None, overrides, **options)

    return read


def said(loaded: LoadedConfig, folder: Path) -> list[str]:
    return [str(problem).replace(f"{folder}/", "") for problem in loaded.problems]


def test_defaults_of_the_peer_reach_our_fields(load) -> None:
    config = load("", "opt.lr=1e-5").config
    assert (config.model.path, config.data.train_files, config.policy.optimizer.lr) == ("small", ["a.parquet"], 1e-5)
    assert config.rollout.samples_per_prompt == 4  # gen.n refers to opt.copies
    assert config.policy.sequences_per_mini_batch == 16 * 4
    assert config.rollout.top_k == 0


def test_the_file_is_laid_on_the_defaults_and_references_follow_it(load) -> None:
    config = load("opt: {copies: 2, mini: 8}\ndata: {batch: 16}\n").config
    assert config.rollout.samples_per_prompt == 2
    assert config.policy.sequences_per_mini_batch == 8 * 2


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        ("opt:\n  lrr: 1\n", "", "there is no key opt.lrr in toy 2, at run.yaml:2 opt.lrr; did you mean opt.lr?"),
        ("opt:\n  lr: fast\n", "", "opt.lr must be float, not 'fast', at run.yaml:2 opt.lr"),
        ("gen: {n: 2.5}\n", "", "gen.n must be int, not 2.5, at run.yaml:1 gen.n"),
        ("gen: {n: true}\n", "", "gen.n must be int, not true, at run.yaml:1 gen.n"),
        ("data: {files: x.parquet}\n", "", "data.files must be list of text, not 'x.parquet', at run.yaml:1 data.files; write [x.parquet]"),
        ("gen: {engine: vlm}\n", "", "gen.engine must be one of native, vllm, not 'vlm', at run.yaml:1 gen.engine; did you mean vllm?"),
        ("opt:\n  mini: 3\n", "", "16 prompts do not split into mini-batches of 3, at run.yaml:2 opt.mini; use 16"),
        ("data: {lie: true}\n", "", "data.lie is refused: it would be untrue, at run.yaml:1 data.lie"),
        ("opt: {lr: -1}\n", "", "lr must be above 0, not -1, at run.yaml:1 opt.lr"),
        ("log: [consol]\n", "", "there is no tracker called 'consol' (known: console, jsonl, mlflow, swanlab, tensorboard, wandb), at run.yaml:1 log; did you mean console?"),
        ("opt: {lr: 1}\n", "opt.lrs=1", "there is no key opt.lrs in toy 2, at override opt.lrs=1; did you mean opt.lr?"),
        ("opt: {lr: 1}\n", "+opt.lrs=1", "there is no key opt.lrs in toy 2, at override +opt.lrs=1; did you mean opt.lr?"),
        ("opt: {lr: 1}\n", "opt.seed=1", "opt.seed is not in the own file of toy 2, at override opt.seed=1; a key that is not there yet needs a +: +opt.seed=1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place_and_a_fix(load, tmp_path, text, override, message) -> None:
    try:
        found = said(load(text, *([override] if override else [])), tmp_path)
    except ConfigError as error:
        found = [str(problem) for problem in error.problems]
    assert found == [message]


def test_all_problems_come_at_once(load, tmp_path) -> None:
    found = said(load("opt: {lr: fast, lrr: 1, mini: 3}\ndata: {lie: true}\n"), tmp_path)
    assert [text.split()[0] for text in found] == ["opt.lr", "there", "16", "data.lie"]


def test_planned_keys_are_told_and_leave_a_plan_possible(load) -> None:
    loaded = load("gen: {images: true}\n")
    assert not loaded.problems
    assert [str(problem).split(", at")[0] for problem in loaded.unsupported] == [
        "gen.images is planned: images in prompts"
    ]
    with pytest.raises(ConfigError, match="planned"):
        loaded.runnable()
    assert not load("gen: {images: false}\n").unsupported


def test_here_does_without_the_cluster_and_says_so(load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.dialects.here.is_installed", lambda library: library != "wandb")
    text = "gen: {devices: 8, engine: vllm, wait_s: 5, eager: false, n: 4}\nlog: [console, mlflow, wandb]\n"
    there, here = load(text), load(text, here=True)
    assert there.config.placement.devices == 8 and there.config.rollout.engine_options == {"eager": False}
    assert len(there.unsupported) == 2  # wait_s, and vllm, which is not installed
    assert not here.unsupported
    assert (here.config.placement.devices, here.config.rollout.engine, here.config.rollout.engine_options) == (
        1,
        "native",
        {},
    )
    assert here.config.policy.sequences_per_mini_batch == there.config.policy.sequences_per_mini_batch
    assert here.changes == (
        "gen.devices: 1 instead of 8",
        "gen.engine: native instead of vllm",
        "log: without wandb, which is not installed; metrics.jsonl is written in any case",
    )
    assert here.config.tracking.trackers == ["console", "mlflow"]
    assert [one.key for one in here.ignored] == ["gen.wait_s", "gen.eager"]


def test_engine_options_that_the_engine_does_not_have_are_dropped_aloud(load) -> None:
    loaded = load("gen: {eager: false}\n")
    assert loaded.config.rollout.engine_options == {}
    assert [(one.key, one.reason) for one in loaded.ignored] == [("gen.eager", "the native engine has no such setting")]
    assert not load("opt: {lr: 1}\n").ignored  # nobody wrote it


def test_ignored_keys_are_listed_and_those_left_at_their_default_are_marked(load) -> None:
    loaded = load("cache: {folder: x}\nopt: {copies: 4}\njobs: {train: {name: y}}\n")
    assert [(one.key, one.asks) for one in loaded.ignored] == [
        ("cache.folder", True),
        ("opt.copies", False),
        ("jobs.train.name", True),
    ]


def test_our_own_fields_can_be_set_from_any_dialect(load, tmp_path) -> None:
    assert load("posttrain: {run: {total_steps: 3}}\n").config.run.total_steps == 3
    assert load("", "+posttrain.run.total_steps=3").config.run.total_steps == 3
    found = said(load("posttrain:\n  run: {total_stepss: 3}\n"), tmp_path)
    assert found == [
        "there is no key run.total_stepss, at run.yaml:2 posttrain.run.total_stepss; did you mean run.total_steps?"
    ]


def test_a_lenient_dialect_warns_of_unknown_keys(load) -> None:
    loaded = load("opt: {lrr: 1}\n", dialect=LENIENT)
    assert not loaded.problems
    [warning] = loaded.warnings
    assert "there is no key opt.lrr" in warning and "did you mean opt.lr?" in warning


def test_an_earlier_version_has_its_defaults_and_lacks_later_keys(load, tmp_path) -> None:
    assert load("", "opt.lr=1", version="1").config.rollout.engine == "vllm"
    assert said(load("opt: {seed: 1}\n", version="1"), tmp_path) == [
        "there is no key opt.seed in toy 1: it came with toy 2, at run.yaml:1 opt.seed; --dialect toy@2"
    ]
    assert load("opt: {seed: 7}\n").config.run.seed == 7


def test_free_sections_take_any_name(load) -> None:
    loaded = load("gen: {engine: vllm}\n", "+gen.sampling.repetition_penalty=1.1")
    assert not loaded.problems
    assert loaded.config.rollout.engine_sampling == {"repetition_penalty": 1.1}


def test_warnings_are_about_what_the_user_wrote(load) -> None:
    """A default of the peer's that has no effect here is not the user's doing."""
    kind = {"key": "kl.kind", "type": "text", "default": "k1", "meaning": "KL.", "field": "loss.kl_estimator"}
    dialect = Dialect(
        name="toy",
        ledger=Ledger("toy", "", (*ROWS, key_of(kind)), ()),
        rules={"train": rules},
    )
    assert load("", "opt.lr=1", dialect=dialect).warnings == ()
    assert load("kl: {kind: k2}\n", dialect=dialect).warnings == ("kl.kind has no effect: loss.kl_coef is 0",)


@pytest.mark.parametrize(
    ("type", "text", "good", "bad"),
    [
        (int, "int", [0, -3], [True, 1.0, "1", None]),
        (float, "float", [0, 1.5], [True, "1.5", None]),
        (bool, "bool", [True], [1, "true", None]),
        (int | None, "int | null", [None, 3], [2.5]),
        (list[str], "list of text", [[], ["a"]], ["a", [1]]),
        (Literal["a", 1, True], "one of a, 1, true", ["a", 1, True], ["b", 2, False]),
        (str | list[str], "text | list of text", ["a", ["b"]], [1, [2]]),
        (dict, "section", [{}, {"a": 1}], [[], None]),
        (Any, "any", [None, 1, "a"], []),
    ],
)
def test_types(type: Any, text: str, good: list[Any], bad: list[Any]) -> None:
    assert type_text(type) == text
    assert "1" in text or parse_type(text) == type  # tables name texts only
    assert all(fits(value, type) for value in good)
    assert not any(fits(value, type) for value in bad)


def test_two_rows_for_one_key_are_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match=r"two rows for opt\.lr"):
        Ledger("toy", "", (ROWS[3], ROWS[3]), ())


def test_a_key_that_a_file_leaves_open_takes_the_default_with_a_note(tmp_path: Path) -> None:
    """verl's later files leave the sampler open, which earlier ones named."""
    file = tmp_path / "run.yaml"
    file.write_text("actor_rollout_ref:\n  rollout:\n    name: ???\n")
    loaded = read_config(str(file), [], "verl")
    assert loaded.config.rollout.engine == "vllm"
    assert any("rollout.name is left open (???) and takes 'vllm'" in text for text in loaded.warnings)
    assert read_config(str(file), ["actor_rollout_ref.rollout.name=hf"], "verl").config.rollout.engine == "hf"


def test_a_wrong_value_is_reported_once_where_it_is_written_and_not_at_references_to_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "actor_rollout_ref:\n"
        "  actor: {use_dynamic_bsz: maybe, ppo_micro_batch_size_per_gpu: 1}\n"
        "  rollout:\n"
        "    log_prob_micro_batch_size_per_gpu: -7\n"
        "    log_prob_use_dynamic_bsz: ${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}\n"
        '  ref: {log_prob_micro_batch_size_per_gpu: "${actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu}"}\n'
        "  model: {path: m}\n"
        "data: {train_files: [a.parquet], val_files: [a.parquet]}\n"
        "algorithm: {adv_estimator: grpo}\n"
        'critic: {use_dynamic_bsz: "${actor_rollout_ref.rollout.log_prob_use_dynamic_bsz}"}\n'
    )
    loaded = read_config(str(file), [], "verl", here=True, skip_files=True)
    assert [(each.field, each.where.partition(" ")[0].rpartition(":")[2]) for each in loaded.problems] == [
        ("actor_rollout_ref.actor.use_dynamic_bsz", "2"),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", "4"),
    ]
