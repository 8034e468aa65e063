"""generation.yaml and evaluation.yaml of verl as a whole; single keys are tested by the examples of their rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from posttrain.dialects.detect import read_config
from posttrain.dialects.entries import ENTRIES, EVALUATE, GENERATE
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.verl import DIALECT
from posttrain.errors import ConfigError

DOCUMENTS = Path(__file__).parent / "verl_documents"
ONE_DEVICE = ("rollout.name=native", "trainer.n_gpus_per_node=1")


@cache
def read(entry: str, *overrides: str, version: str = "") -> LoadedConfig[Any]:
    return read_dialect(DIALECT, None, list(overrides), entry=ENTRIES[entry], version=version)


def test_nothing_is_planned_but_other_samplers() -> None:
    for entry in ("generate", "evaluate"):
        assert [row.name for row in DIALECT.ledger.of(entry).rows if row.status == "planned"] == []
    assert read("generate", *ONE_DEVICE).unsupported == ()
    assert read("generate", *ONE_DEVICE, "trainer.n_gpus_per_node=2").unsupported == ()
    assert read("generate", *ONE_DEVICE, "trainer.nnodes=2").unsupported == ()


def test_without_a_function_the_data_source_chooses_the_scorer() -> None:
    for version in ("", "0.2"):
        [term] = read("evaluate", version=version).config.reward.terms
        assert (term.name, term.path) == ("by_data_source", None)


def test_the_page_as_it_stands_loads() -> None:
    loaded = read_config(str(DOCUMENTS / "evaluation_0.4.yaml"), [], None, entry=EVALUATE)
    assert (loaded.problems, loaded.unsupported) == ((), ())
    assert loaded.config.data.files == ["/tmp/math_Qwen2-7B-Instruct.parquet"]
    assert loaded.config.data.prompt_column is None  # a file without prompts can be scored
    assert loaded.config.data.ground_truth_column == "reward_model.ground_truth"


def test_the_made_up_page_is_answered_with_the_real_keys() -> None:
    loaded = read_config(str(DOCUMENTS / "made_up_0.4_zh.yaml"), [], None, entry=EVALUATE)
    told = {problem.field: str(problem) for problem in loaded.problems}
    assert "The keys of evaluation.yaml are data.path, data.prompt_key" in told["evaluation.metrics"]
    assert "the key is data.response_key" in told["数据.响应键"]


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (
            ("rollout.temperature=0",),
            "rollout.temperature",
            "at temperature 0 the 5 responses to a prompt would all be",
        ),
        (("rollout.dtype=int8",), "rollout.dtype", "rollout.dtype must be one of"),
        (("rollout.n=4",), "rollout.n", "the responses per prompt are data.n_samples"),
        (("data.output_path=hdfs://x/y.parquet",), "data.output_path", "is not on this machine"),
        (("data.output_path=y.json",), "data.output_path", "its name must end in .parquet"),
        (("data.n_samples=0",), "data.n_samples", "must be at least 1, not 0"),
        (("data.batchsize=8",), "data.batchsize", "did you mean data.batch_size?"),
        (("data.path=a.parquet", "data.output_path=a.parquet"), "data.output_path", "is read and written"),
    ],
)
def test_what_cannot_be_generated(overrides: tuple[str, ...], key: str, says: str) -> None:
    try:
        problems = [str(problem) for problem in read("generate", *ONE_DEVICE, *overrides).problems]
    except ConfigError as error:
        problems = [str(problem) for problem in error.problems]
    assert len(problems) == 1
    assert says in problems[0]
    assert key in problems[0] or key == "rollout.temperature"


def test_a_configuration_for_another_command_is_sent_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is an evaluation configuration: posttrain evaluate"):
        read_config(str(DOCUMENTS / "evaluation_0.4.yaml"), [], None, entry=GENERATE)
    file = tmp_path / "g.yaml"
    file.write_text("data: {path: a.parquet, n_samples: 2, output_path: b.parquet}\nmodel: {path: m}\n")
    assert read_config(str(file), [], None).entry == "generate"
    with pytest.raises(ConfigError, match="this is a generation configuration: posttrain generate"):
        read_config(str(file), [], None, entry=EVALUATE)
