"""Options of libraries below sections that take any name: misspellings are noticed, and so are values of another type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.config.reading.references import value_holders
from posttrain.dialects import option_names
from posttrain.dialects.detect import read_config
from posttrain.dialects.likeness import short_of
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.option_names import options_of, type_of_option
from posttrain.dialects.value_types import fits, parse_type

REF = "actor_rollout_ref.ref.megatron"
KWARGS = "trainer.policy.megatron_config.optimizer_config_kwargs"


def load(dialect: str, *arguments: str, here: bool = False) -> LoadedConfig:
    return read_config(None, list(arguments), dialect, here=here, skip_files=True)


def test_every_type_is_one() -> None:
    lists = json.loads(Path(option_names.__file__).with_suffix(".json").read_text(encoding="utf-8"))
    for options in lists.values():
        assert all(fits(None, parse_type(text)) for text in options.values())


def test_an_option_of_two_libraries_with_two_types_is_of_either() -> None:
    both = options_of("generator.engine_init_kwargs")
    assert both["max_num_seqs"] == "int | null" and both["mem_fraction_static"] == "float | null"
    # vLLM takes several, SGLang one
    assert both["served_model_name"] == "text | list of text | null"
    assert options_of("actor_rollout_ref.model.my_arguments") == {}
    # 0 and 1 are numbers and truth values
    assert fits(1, type_of_option("x.engine_kwargs.vllm.enforce_eager", 1))
    assert not fits("often", type_of_option("x.engine_kwargs.vllm.enforce_eager", "often"))


@pytest.mark.parametrize(
    ("dialect", "written", "meant"),
    [
        ("verl", "+actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_batched_tokenss=8192", "max_num_batched_tokens"),
        ("verl", "+actor_rollout_ref.rollout.engine_kwargs.sglang.attenton_backend=fa3", "attention_backend"),
        ("verl", "+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cdagraph_mode=FULL", "cudagraph_mode"),
        ("verl", "+actor_rollout_ref.model.override_config.attn-implementation=eager", "attn_implementation"),
        ("verl", "+actor_rollout_ref.actor.torchtitan.atttn_type=flex", "attn_type"),
        ("verl", "+critic.megatron.optimizer-offload=true", "optimizer_offload"),
        ("verl", f"+{REF}.oaram_offload=true", "param_offload"),
        ("verl", "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layesr=1", "recompute_num_layers"),
        ("verl", "+global_profiler.profile_continuos_steps=true", "profile_continuous_steps"),
        ("verl", "+actor_rollout_ref.actor.profiler.tool_config.torch.step_strat=1", "step_start"),
        ("verl", "+actor_rollout_ref.rollout.prometheus.prot=9090", "port"),
        ("skyrl", "+generator.engine_init_kwargs.max_nnum_seqs=8", "max_num_seqs"),
        ("skyrl", "+generator.chat_template_kwargs.enable_thinkin=false", "enable_thinking"),
        ("skyrl", "+generator.sampling_params.additional_kwargs.top_kk=3", "top_k"),
        ("skyrl", "+trainer.policy.model_config_kwargs.rope_teta=1e6", "rope_theta"),
        ("roll", "+actor_train.strategy_args.strategy_config.wrap_policy.wra_pembeddings=true", "wrap_embeddings"),
        # Without its last word, and with two wrong letters
        ("skyrl", f"+{KWARGS}.overlap_cpu_optimizer_d2h=true", "overlap_cpu_optimizer_d2h_h2d"),
        ("verl", "+critic.megatron.tensor_model_parralel_size=2", "tensor_model_parallel_size"),
    ],
)  # fmt: skip
def test_a_slip_in_an_option_of_a_library_is_named(dialect: str, written: str, meant: str) -> None:
    key = written.lstrip("+").partition("=")[0]
    told = [text for text in load(dialect, written).warnings if text.startswith(f"{key} is not known")]
    assert len(told) == 1 and told[0].endswith(f"did you mean {key.rpartition('.')[0]}.{meant}?"), told


def test_a_name_that_says_less_than_another_is_no_slip_of_it() -> None:
    """overlap_param_gather is Megatron's own, beside overlap_param_gather_with_optimizer_step; a_b is too short to say which."""
    assert not short_of("x.tp_comm_split", "x.tp_comm_overlap_ag")
    assert not short_of("x.max_size", "x.max_size_mb")
    assert not short_of("x.expert_parallel_size", "x.tensor_parallel_size")
    assert not short_of("x.use_fused_norm", "y.use_fused_norm_rope")
    assert load("verl", "+critic.megatron.tensor_model_parallel_size=2").warnings == ()


@pytest.mark.parametrize(
    ("dialect", "written", "wanted"),
    [
        ("verl", f"+{REF}.tensor_model_parallel_size=few", "int from 1 | null, not 'few'"),
        ("verl", f"+{REF}.expert_model_parallel_size=-7", "int from 1 | null, not -7"),
        ("verl", "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1.5", "int | null, not 1.5"),
        ("verl", "+actor_rollout_ref.rollout.engine_kwargs.vllm.enforce_eager=[1]", "bool | null, not a list of 1"),
        ("verl", "+reward_model.rollout.response_length=few", "int from 1 | null, not 'few'"),
        ("verl", "+global_profiler.profile_continuous_steps=[1,2]", "bool | null, not a list of 2"),
        ("verl", "+global_profiler.global_tool_config.torch_memory.stack_depth=deep", "int from 1 | null, not 'deep'"),
        ("verl", "+transfer_queue.backend.SimpleStorage.total_storage_size=big", "int | null, not 'big'"),
        ("skyrl", "+trainer.policy.model_config_kwargs.hidden_size=wide", "int | null, not 'wide'"),
    ],
)  # fmt: skip
def test_an_option_of_another_type_is_refused_by_name(dialect: str, written: str, wanted: str) -> None:
    key = written.lstrip("+").partition("=")[0]
    assert [one.what for one in load(dialect, written).problems if one.field == key] == [f"{key} must be {wanted}"]


def test_an_unknown_option_is_the_librarys() -> None:
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm.of_next_year"
    loaded = load("verl", f"+{key}=3")
    assert not [text for text in [*loaded.warnings, *map(str, loaded.problems)] if key in text]


def test_options_that_here_does_without_are_looked_at() -> None:
    """--here trains with the local engine, and the file is wrong all the same."""
    wrong = "+trainer.policy.megatron_config.expert_model_parallel_size={a: 1}"
    [problem] = load("skyrl", "trainer.strategy=megatron", wrong, here=True).problems
    assert "expert_model_parallel_size must be" in problem.what
    assert load("skyrl", "trainer.strategy=megatron", wrong.replace("{a: 1}", "8"), here=True).problems == ()


def test_a_section_in_the_place_of_an_option_is_refused_once() -> None:
    key = f"{REF}.context_parallel_size"
    said = [one.what for one in load("verl", f"+{key}={{a: 1, b: 2}}").problems if key in one.what]
    assert said == [f"{key} must be int from 1 | null, not a section"]


def test_a_wrong_option_of_the_engine_is_reported_once_and_where_it_is_written() -> None:
    key = "trainer.policy.megatron_config.expert_tensor_parallel_size"
    found = load("skyrl", "trainer.strategy=megatron", f"+{key}=1.5", here=True).problems
    assert [(one.field, one.what) for one in found] == [(key, f"{key} must be int from 1 | null, not 1.5")]


def test_a_wrong_value_comes_without_misspellings_that_change_nothing() -> None:
    given = ("+max_stepz=3", "rollout_batch_size=few")
    assert [one.field for one in load("roll", *given).problems if one.field in ("max_stepz", "rollout_batch_size")] == [
        "rollout_batch_size"
    ]


def test_a_section_in_the_place_of_a_number_is_reported_at_the_key_that_holds_it() -> None:
    assert value_holders({"a": {"n": {"x": 1}}, "b": "${a.n}"}) == {"b": "a.n"}


@pytest.mark.parametrize("key", ["trainer.save_freq", "trainer.test_freq"])
def test_numbers_below_minus_one_are_never_as_in_verl_and_reported(key: str) -> None:
    read = {number: load("verl", f"{key}={number}") for number in (-1, -7)}
    assert read[-7].config == read[-1].config and read[-7].problems == read[-1].problems
    assert [text for text in read[-7].warnings if text not in read[-1].warnings] == [
        f"{key}=-7 counts as never, as in verl; -1 is the usual word"
    ]


def test_a_misspelt_key_that_must_be_given_is_reported_alone(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    rest = "data: {train_files: [a.jsonl]}\nrun: {total_steps: 1}\nreward: {terms: [{name: gsm8k}]}\n"
    file.write_text("model: {paths: model}\n" + rest)
    [problem] = read_config(str(file), [], "native").problems
    assert problem.what == "there is no key model.paths" and "did you mean model.path?" in problem.fix
