"""A resolved configuration is written so that it reads back equal; the schema for editors is current."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config import RunConfig
from posttrain.config.policy import OptimizerConfig
from posttrain.dialects.detect import detect, read_config
from posttrain.dialects.entries import ENTRIES
from posttrain.dialects.native import load
from posttrain.dialects.native.write import json_schema, to_yaml

ROOT = Path(__file__).parents[3]


def config(**sections: object) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "org/name"}, "data": {"train_files": ["a.parquet"]}, **sections})


def read_back(written: RunConfig, folder: Path) -> RunConfig:
    file = folder / "config.yaml"
    file.write_text(to_yaml(written), encoding="utf-8")
    return load(str(file)).config


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    written = config(
        policy={"optimizer": {"lr": 1e-6, "betas": [0.9, 0.95]}},
        reward={"terms": [{"name": "score", "path": "my.py", "options": {"a.b": [1, {"c": None}], "1e-6": "1e-6"}}]},
        rollout={"stop": ["\n\n", "yes", "010", "1e-6", "é: #", "${x}", "\\${x}", "a\\b", " "]},
    )
    assert read_back(written, tmp_path) == written


def test_it_is_complete_and_in_schema_order() -> None:
    written = yaml.safe_load(to_yaml(config()))
    assert list(written) == list(RunConfig.model_fields)
    assert list(written["policy"]["optimizer"]) == list(OptimizerConfig.model_fields)


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=12) | st.text(
    "\\${}: '\"#-?1e.\n", max_size=8
)


@settings(max_examples=8)
@given(
    stop=st.lists(texts.filter(lambda text: text != "???"), min_size=4, max_size=12)
)  # many at once: a file takes 0.2 s
def test_any_text_reads_back_equal(stop: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    written = config(rollout={"stop": stop})
    assert read_back(written, tmp_path_factory.mktemp("any_text")) == written


@pytest.mark.parametrize("entry", list(ENTRIES))
def test_the_schema_file_is_current(entry: str) -> None:
    name = ENTRIES[entry].schema_file
    stale = f"run: posttrain schema --entry {entry} > docs/{name}"
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == json_schema(ENTRIES[entry].root), stale


@pytest.mark.parametrize("entry", list(ENTRIES))
def test_the_schema_describes_every_key(entry: str) -> None:
    schema = json.loads(json_schema(ENTRIES[entry].root))
    for name, section in schema["$defs"].items():
        for key, described in section["properties"].items():
            assert described.get("description"), f"{name}.{key} has no docstring"


# Those of verl_tools are lists of tools and interactions, in verl's form.
EXAMPLES = [file for file in sorted((ROOT / "examples").rglob("*.yaml")) if file.parent.name != "verl_tools"]
OURS = [file for file in EXAMPLES if detect(str(file), []) == "native"]


@pytest.mark.parametrize("example", OURS, ids=lambda path: path.name)
def test_the_first_line_of_an_example_names_its_schema(example: Path) -> None:
    first = example.read_text(encoding="utf-8").splitlines()[0]
    place = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert place, first
    schema = json.loads((example.parent / place[1]).read_text(encoding="utf-8"))
    sections = set(yaml.safe_load(example.read_text(encoding="utf-8")))
    assert sections <= schema["properties"].keys()  # it is the schema of the entry that reads the file


@pytest.mark.parametrize(
    "example", [each for each in OURS if "given by run.sh" not in each.read_text("utf-8")], ids=lambda path: path.name
)
def test_examples_load_and_name_the_schema(example: Path) -> None:
    loaded = read_config(str(example), [], "native").runnable()
    assert loaded.warnings == ()
    first = example.read_text(encoding="utf-8").splitlines()[0]
    assert first.endswith(f"/docs/{ENTRIES[loaded.entry].schema_file}")


@pytest.mark.parametrize("entry", ["train", "sft"])
def test_the_schema_offers_the_options_of_every_training_engine(entry: str) -> None:
    definitions = json.loads(json_schema(ENTRIES[entry].root))["$defs"]
    policy = definitions["PolicyConfig" if entry == "train" else "SftPolicyConfig"]["properties"]["engine_options"]
    offered = [each["$ref"].rpartition("/")[2] for each in policy["anyOf"] if "$ref" in each]
    assert sorted(offered) == ["DeepspeedOptions", "FsdpOptions", "MegatronOptions"]
    assert "zero_optimization" in definitions["DeepspeedOptions"]["properties"]
