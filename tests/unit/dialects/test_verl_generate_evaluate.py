"""generation.yaml and evaluation.yaml of verl: every mapped key changes our configuration in the stated way."""

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
VLLM = ("rollout.name=vllm",)

Case = tuple[str, str, tuple[str, ...], str, Any]  # key, override, what it needs around it, our field, its value then

GENERATION: list[Case] = [
    # 2 machines of 4 devices
    ("trainer.nnodes", "trainer.nnodes=2", ("trainer.n_gpus_per_node=4",), "placement.devices", 8),
    ("trainer.nnodes", "trainer.nnodes=2", ("trainer.n_gpus_per_node=4",), "placement.nodes", 2),
    ("trainer.n_gpus_per_node", "trainer.n_gpus_per_node=4", (), "placement.devices", 4),
    ("trainer.device", "trainer.device=cpu", (), "placement.device", "cpu"),
    ("data.path", "data.path=a.parquet", (), "data.files", ["a.parquet"]),
    ("data.prompt_key", "data.prompt_key=question", (), "data.prompt_column", "question"),
    ("data.n_samples", "data.n_samples=3", (), "rollout.samples_per_prompt", 3),
    ("data.output_path", "data.output_path=b.parquet", (), "output.file", "b.parquet"),
    ("data.batch_size", "data.batch_size=16", (), "output.rows_per_part", 16),
    ("model.path", "model.path=some/model", (), "model.path", "some/model"),
    ("model.external_lib", "model.external_lib=mine", (), "model.external_modules", ["mine"]),
    ("model.trust_remote_code", "+model.trust_remote_code=True", (), "model.trust_remote_code", True),
    ("rollout.name", "rollout.name=sglang", (), "rollout.engine", "sglang"),
    ("rollout.temperature", "rollout.temperature=0.5", (), "rollout.temperature", 0.5),
    ("rollout.do_sample", "rollout.do_sample=False", ("data.n_samples=1",), "rollout.temperature", 0.0),
    ("rollout.top_k", "rollout.top_k=-1", (), "rollout.top_k", 0),
    ("rollout.top_p", "rollout.top_p=0.9", (), "rollout.top_p", 0.9),
    ("rollout.prompt_length", "rollout.prompt_length=99", (), "data.max_prompt_tokens", 99),
    ("rollout.response_length", "rollout.response_length=99", (), "rollout.max_response_tokens", 99),
    ("rollout.dtype", "rollout.dtype=fp32", (), "model.compute_dtype", "float32"),
    ("rollout.ignore_eos", "rollout.ignore_eos=True", (), "rollout.ignore_eos", True),
    ("rollout.tensor_model_parallel_size", "rollout.tensor_model_parallel_size=2", VLLM, "rollout.tensor_parallel", 2),
    *(
        (f"rollout.{name}", f"rollout.{name}={text}", VLLM, f"rollout.engine_options.{name}", value)
        for name, text, value in (
            ("gpu_memory_utilization", "0.8", 0.8),
            ("enforce_eager", "False", False),
            ("free_cache_engine", "False", False),
            ("load_format", "safetensors", "safetensors"),
            ("max_num_batched_tokens", "4096", 4096),
            ("max_model_len", "2048", 2048),
            ("max_num_seqs", "64", 64),
            ("disable_log_stats", "False", False),
            ("enable_chunked_prefill", "False", False),
        )
    ),
]
EVALUATION: list[Case] = [
    ("data.path", "data.path=a.parquet", (), "data.files", ["a.parquet"]),
    ("data.prompt_key", "data.prompt_key=question", (), "data.prompt_column", "question"),
    ("data.response_key", "data.response_key=said", (), "data.response_column", "said"),
    ("data.data_source_key", "data.data_source_key=task", (), "data.data_source_column", "task"),
    ("data.reward_model_key", "data.reward_model_key=rm", (), "data.ground_truth_column", "rm.ground_truth"),
    ("custom_reward_function.path", "custom_reward_function.path=my.py", (), "reward.terms.0.path", "my.py"),
    (
        "custom_reward_function.name",
        "custom_reward_function.name=f",
        ("custom_reward_function.path=my.py",),
        "reward.terms.0.name",
        "f",
    ),
    (
        "custom_reward_function.reward_kwargs.**",
        "+custom_reward_function.reward_kwargs.bonus=0.5",
        ("custom_reward_function.path=my.py",),
        "reward.terms.0.options.bonus",
        0.5,
    ),
]
CASES = [
    *((GENERATE.name, (*ONE_DEVICE, *case[2]), case) for case in GENERATION),
    *((EVALUATE.name, case[2], case) for case in EVALUATION),
]


@cache
def read(entry: str, *overrides: str, version: str = "") -> LoadedConfig[Any]:
    return read_dialect(DIALECT, None, list(overrides), entry=ENTRIES[entry], version=version)


def value(config: Any, field: str) -> Any:
    node = config
    for part in field.split("."):
        if isinstance(node, list):
            node = node[int(part)]
        else:
            node = node.get(part) if isinstance(node, dict) else getattr(node, part, None)
    return node


@pytest.mark.parametrize("entry", ["generate", "evaluate"])
def test_every_mapped_key_and_field_has_a_case(entry: str) -> None:
    cases = GENERATION if entry == "generate" else EVALUATION
    rows = [row for row in DIALECT.ledger.of(entry).rows if row.status == "mapped"]
    assert {row.name for row in rows} == {key for key, *_ in cases}
    for row in rows:
        fields = {field for key, _, _, field, _ in cases if key == row.name}
        assert all(any(field == one or field.startswith(f"{one}.") for field in fields) for one in row.fields), row.name


@pytest.mark.parametrize(
    ("entry", "around", "case"), CASES, ids=lambda one: f"{one[0]}-{one[3]}" if len(one) == 5 else ""
)
def test_a_key_changes_its_field(entry: str, around: tuple[str, ...], case: Case) -> None:
    _, override, _, field, expected = case
    before, after = read(entry, *around), read(entry, *around, override)
    assert not after.problems
    assert value(after.config, field) == expected
    assert value(before.config, field) != expected


def test_nothing_is_planned_but_other_samplers_and_devices() -> None:
    for entry in ("generate", "evaluate"):
        assert [row.name for row in DIALECT.ledger.of(entry).rows if row.status == "planned"] == []
    assert read("generate", *ONE_DEVICE).unsupported == ()
    assert [problem.field for problem in read("generate", "trainer.n_gpus_per_node=2").unsupported][-1:] == [
        "trainer.n_gpus_per_node"
    ]


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
        (("rollout.dtype=float16",), "rollout.dtype", "models are not run in float16 here"),
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
