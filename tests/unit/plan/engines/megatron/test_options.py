"""What megatron's engine options mean, in the words of three dialects; which models go with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.plan.engines.megatron.experts import ExpertSettings
from posttrain.plan.engines.megatron.models import model_problems, options_without_experts, unsupported
from posttrain.plan.engines.megatron.options import MegatronSettings, megatron_settings, virtual_stages

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
}


MIXED = LLAMA | {
    "model_type": "qwen3_moe",
    "intermediate_size": 97,  # of no layer
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}


def settings(**options: Any) -> MegatronSettings:
    found, problems, _ = megatron_settings(options)
    assert not problems, problems
    return found


def test_without_options_tokens_are_shared_and_nothing_else_is_said() -> None:
    assert megatron_settings({}) == (MegatronSettings(), [], [])
    assert MegatronSettings().sequence_parallel and MegatronSettings().recompute == {}


@pytest.mark.parametrize("section", ["override_transformer_config", "additional_configs", "transformer_config_kwargs"])
def test_recomputing_is_read_where_a_dialect_writes_it(section: str) -> None:
    whole = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    wanted = {"granularity": "full", "method": "block", "num_layers": 2}
    assert settings(**whole).recompute == wanted
    assert settings(**{section: whole}).recompute == wanted


def test_recomputing_in_full_has_defaults() -> None:
    found = settings(recompute_granularity="full").recompute
    assert found == {"granularity": "full", "method": "uniform", "num_layers": 1}
    assert settings(recompute_granularity="selective").recompute["modules"] == ["core_attn"]


def test_an_uneven_pipeline_is_handed_on() -> None:
    found = settings(num_layers_in_first_pipeline_stage=1, account_for_loss_in_pipeline_split=False)
    assert found.split == {"num_layers_in_first_pipeline_stage": 1}


def test_the_optimizer_can_be_shared_out() -> None:
    assert settings(use_distributed_optimizer=True).distributed_optimizer
    assert not settings().distributed_optimizer


def test_the_optimizer_can_rest_and_tokens_can_stay() -> None:
    found = settings(optimizer_offload=True, sequence_parallel=False)
    assert found.optimizer_offload and not found.sequence_parallel
    assert settings(offload_after_step=True).optimizer_offload  # SkyRL's word


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_distributed_optimiser": True}, "megatron has no option use_distributed_optimiser"),
        ({"override_transformer_config": {"num_lyers": 2}}, "megatron has no option num_lyers"),
        ({"additional_configs": 3}, "additional_configs must be a section of key: value lines, not 3"),
        ({"recompute_granularity": "half"}, "recompute_granularity must be full or selective, not 'half'"),
        (
            {"recompute_granularity": "full", "recompute_method": "some"},
            "recompute_method must be uniform or block, not 'some'",
        ),
        (
            {"recompute_granularity": "full", "recompute_num_layers": -1},
            "recompute_num_layers must be at least 1, not -1",
        ),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe_acts"]}, "recompute_modules names moe_acts"),
        ({"expert_model_parallel_size": 0}, "expert_model_parallel_size must be at least 1, not 0"),
        ({"expert_tensor_parallel_size": "all"}, "expert_tensor_parallel_size must be a whole number, not 'all'"),
        ({"moe_token_dispatcher_type": "hops"}, "moe_token_dispatcher_type=hops takes kernels"),
        ({"moe_router_dtype": "float16"}, "moe_router_dtype must be fp32 or fp64, not 'float16'"),
        (
            {"virtual_pipeline_model_parallel_size": 0},
            "virtual_pipeline_model_parallel_size must be at least 1, not 0",
        ),
        (
            {"num_layers_per_virtual_pipeline_stage": "two"},
            "num_layers_per_virtual_pipeline_stage must be a whole number, not 'two'",
        ),
        (
            {"num_layers_per_virtual_pipeline_stage": 1, "virtual_pipeline_model_parallel_size": 2},
            "both say how many layers a stage has at a time",
        ),
        (
            {"num_layers_per_virtual_pipeline_stage": 1, "num_layers_in_first_pipeline_stage": 2},
            "both say how many layers a stage has at a time",
        ),
        ({"dsa_indexer_loss_coeff": 0.01}, "the indexer of sparse attention has no loss of its own here"),
        ({"override_transformer_config": {"hidden_dropout": 0.1}}, "nothing is dropped out here"),
    ],
)
def test_what_is_wrong(options: dict[str, Any], said: str) -> None:
    (problem,) = megatron_settings(options)[1]
    assert said in problem.what and problem.field.startswith("policy.engine_options.")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"moe_expert_capacity_factor": 1.2}, "none is dropped"),
        ({"moe_permute_fusion": True}, "without the kernels of Transformer Engine"),
        ({"moe_token_dispatcher_type": "flex"}, "tokens travel by alltoall, to the same experts"),
        ({"use_remove_padding": False, "use_flash_attn": True}, "without the kernels of Transformer Engine"),
        ({"use_megatron_fsdp": True}, "where weights lie between layers changes no number"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "tokens go where the model's own router sends them"),
        (
            {"recompute_granularity": "full", "moe_layer_recompute": True},
            "recompute_granularity=full recomputes experts",
        ),
        (
            {"override_transformer_config": {"apply_rope_fusion": True}},
            "override_transformer_config.apply_rope_fusion has no",
        ),
        ({"param_offload": True}, "weights and gradients stay where they are"),
        (
            {"override_transformer_config": {"dsa_indexer_loss_coeff": 0.0, "dsa_indexer_use_sparse_loss": True}},
            "dsa_indexer_loss_coeff is 0",
        ),
        ({"pipeline_num_transformer_layers": [[6], [8]]}, "which stage holds a layer changes no number"),
        ({"override_transformer_config": {"use_ascend_gdn": True, "attention_dropout": 0.0}}, "without the kernels"),
        ({"recompute_num_layers": 2}, "recompute_num_layers has no effect: recompute_granularity is null"),
    ],
)
def test_what_has_no_effect_is_told(options: dict[str, Any], said: str) -> None:
    _, problems, told = megatron_settings(options)
    assert not problems and len(told) == 1 and said in told[0]
    assert megatron_settings(dict.fromkeys(options))[2] == []  # null asks for nothing


def test_losses_of_routers() -> None:
    given = {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001}
    found = settings(additional_configs=given).experts
    assert (found.balance, found.small_logits) == (0.01, 0.001)
    for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss", ["none", "aux_loss"]):
        assert settings(**given, moe_router_load_balancing_type=kind).experts == found
    for kind in ("none", "sinkhorn", ["none"]):
        read, problems, told = megatron_settings(given | {"moe_router_load_balancing_type": kind})
        assert not problems and (read.experts.balance, read.experts.small_logits) == (0.0, 0.001)
        assert told[0] == (
            "policy.engine_options.moe_aux_loss_coeff has no effect: "
            "policy.engine_options.moe_router_load_balancing_type asks for no loss"
        )
        assert len(told) == 1 + (kind == "sinkhorn")
    wrong = {"moe_aux_loss_coeff": -1, "moe_z_loss_coeff": -1, "moe_router_load_balancing_type": "aux_los"}
    assert [problem.field.rpartition(".")[2] for problem in megatron_settings(wrong)[1]] == [*wrong]


def test_options_of_experts() -> None:
    found = settings(
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
        freeze_moe_router=True,
        override_transformer_config={"moe_router_dtype": "fp64", "moe_token_dispatcher_type": "allgather"},
        additional_configs={"moe_grouped_gemm": True},
    ).experts
    assert found == ExpertSettings(
        parallel=4, tensor=1, dispatcher="allgather", grouped=True, router_dtype="fp64", freeze_router=True
    )
    assert found.split(2) == (4, 1)
    assert ExpertSettings(parallel=4).split(2) == (4, 2)  # an expert is shared as other matrices are


def test_layers_of_experts_can_be_recomputed() -> None:
    assert settings(moe_layer_recompute=True).recompute == {"granularity": "selective", "modules": ["moe"]}
    both = settings(moe_layer_recompute=True, recompute_granularity="selective").recompute
    assert both["modules"] == ["core_attn", "moe"]


def test_options_of_experts_have_no_effect_without_any(tmp_path: Path) -> None:
    asked = {"moe_grouped_gemm": True, "freeze_moe_router": False, "moe_aux_loss_coeff": 0.1, "moe_router_dtype": None}
    assert options_without_experts(asked, "x") == []  # a hub id: not known
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert options_without_experts(asked, str(tmp_path)) == [
        f"policy.engine_options.{name} has no effect: the model has no experts"
        for name in ("moe_grouped_gemm", "moe_aux_loss_coeff")
    ]
    (tmp_path / "config.json").write_text(json.dumps(MIXED))
    assert options_without_experts(asked, str(tmp_path)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"model_type": "qwen2", "use_sliding_window": False}, None),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 6}, None),
        ({"rope_parameters": {"rope_type": "llama3"}}, None),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 4096}, "window"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "window"),
        ({"model_type": "gemma2"}, "gemma2 is not among llama, mistral, qwen2, qwen3"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, None),
        ({"model_type": "mixtral", "num_local_experts": 8}, None),
        ({"model_type": "mixtral", "num_local_experts": 8, "sliding_window": 4096}, "window"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 8}, "deepseek_v3 is not among"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "dynamic"}}, "scaled by dynamic"),
        ({"partial_rotary_factor": 0.5}, "a part of each head"),
    ],
)
def test_models(changes: dict[str, Any], said: str | None) -> None:
    found = unsupported(LLAMA | changes)
    assert found is None if said is None else found is not None and said in found


def problems_of(folder: Path, *, tensor: int = 1, pipeline: int = 1, **options: Any) -> list[str]:
    found = model_problems(str(folder), role="policy", tensor=tensor, pipeline=pipeline, settings=settings(**options))
    return [str(problem) for problem in found]


def test_sizes_must_go_with_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert (
        problems_of(tmp_path, tensor=2, pipeline=3) == problems_of(tmp_path, tensor=8) == []
    )  # 8: two ranks for a head
    (wrong,) = problems_of(tmp_path, tensor=5)
    assert "an MLP of width 96, which 5 devices cannot hold in equal parts (96 / 5 = 19.2)" in wrong
    assert "use policy.tensor_parallel=4" in wrong
    (wrong,) = problems_of(tmp_path, tensor=3)
    assert "4 key/value heads, which 3 devices" in wrong and "use policy.tensor_parallel=2" in wrong
    (wrong,) = problems_of(tmp_path, pipeline=4)
    assert "6 layers, which 4 stages cannot share so (6; 6 / 4 = 1.5)" in wrong and "pipeline_parallel=3" in wrong


def test_unequal_stages(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    first, last = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
    assert problems_of(tmp_path, pipeline=4, **{first: 3}) == []  # 6 - 3 = 3 for 3
    assert problems_of(tmp_path, pipeline=2, **{first: 2, last: 4}) == []
    # With embedding and loss 8 over 4.
    both = {f"account_for_{what}_in_pipeline_split": True for what in ("embedding", "loss")}
    assert problems_of(tmp_path, pipeline=4, **both) == []
    (wrong,) = problems_of(tmp_path, pipeline=4, **{first: 2, last: 1})
    assert "(6 - 2 - 1 = 3 are left for 2)" in wrong
    (wrong,) = problems_of(tmp_path, pipeline=2, account_for_loss_in_pipeline_split=True)
    assert "(6 + 1 = 7; 7 / 2 = 3.5)" in wrong
    assert problems_of(tmp_path, pipeline=2, **{first: 1, last: 4}) != []  # 1 is left for none


@pytest.mark.parametrize(
    ("options", "pipeline", "stretches"),
    [
        ({}, 2, 1),
        ({"virtual_pipeline_model_parallel_size": 4}, 2, 4),
        ({"virtual_pipeline_model_parallel_size": 4}, 1, 1),  # no stages, nothing virtual about them
        ({"additional_configs": {"num_layers_per_virtual_pipeline_stage": 2}}, 2, 3),  # 12 / 2 / 2
        # 12 and the embedding and the loss are 14: 7 in a stage, one at a time
        (
            {
                "num_layers_per_virtual_pipeline_stage": 1,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            2,
            7,
        ),
    ],
)
def test_virtual_stages(options: dict[str, Any], pipeline: int, stretches: int) -> None:
    assert virtual_stages(settings(**options), layers=12, pipeline=pipeline) == stretches


def test_virtual_stages_must_be_equal(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    virtual, layers = "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"
    assert problems_of(tmp_path, pipeline=2, **{virtual: 3}) == problems_of(tmp_path, pipeline=3, **{layers: 2}) == []
    assert problems_of(tmp_path, pipeline=1, **{virtual: 5}) == []
    (wrong,) = problems_of(tmp_path, pipeline=2, **{virtual: 2})
    assert "(3 in a stage, in 2 virtual stages: 3 / 2 = 1.5)" in wrong
    assert "use policy.engine_options.virtual_pipeline_model_parallel_size=3, or a number that divides it" in wrong
    (wrong,) = problems_of(tmp_path, pipeline=2, **{layers: 2})
    assert "(3 in a stage, in stretches of 2: 3 / 2 = 1.5)" in wrong
    uneven = {virtual: 2, "num_layers_in_first_pipeline_stage": 2}
    assert problems_of(tmp_path, pipeline=2, **uneven) == []  # 2 and 4
    (wrong,) = problems_of(tmp_path, pipeline=2, **{virtual: 2, "num_layers_in_first_pipeline_stage": 3})
    assert "(3 in a stage, in 2 virtual stages: 3 / 2 = 1.5)" in wrong


def test_a_model_of_another_kind_is_refused_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA | {"model_type": "gemma3_text"}}))
    (wrong,) = problems_of(tmp_path)
    assert "gemma3_text is not among" in wrong and "use policy.engine=fsdp" in wrong
    assert problems_of(tmp_path / "nowhere") == []  # a hub id, or told elsewhere


def test_sizes_must_go_with_the_experts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXED))
    over, one_over, dispatcher = (
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "moe_token_dispatcher_type",
    )
    assert problems_of(tmp_path, tensor=4, **{over: 3}) == problems_of(tmp_path, pipeline=3, **{over: 6}) == []
    (wrong,) = problems_of(tmp_path, **{over: 4})
    assert "6 experts, which 4 devices cannot hold in equal parts (6 / 4 = 1.5)" in wrong and f"{over}=3" in wrong
    (wrong,) = problems_of(tmp_path, **{one_over: 3})
    assert "experts of width 20, which 3 devices" in wrong and f"use policy.engine_options.{one_over}=2" in wrong
    (wrong,) = problems_of(tmp_path, tensor=2, sequence_parallel=False)
    assert "share tokens, too" in wrong and "use policy.engine_options.sequence_parallel=true" in wrong
    (wrong,) = problems_of(tmp_path, pipeline=2, **{dispatcher: "allgather"})
    assert "takes rows of one length" in wrong and f"use policy.engine_options.{dispatcher}=alltoall" in wrong
    assert problems_of(tmp_path, **{dispatcher: "allgather", over: 2}) == []
    # Where some layers have no experts, their MLP is shared out; a shared expert is, too.
    (tmp_path / "config.json").write_text(json.dumps(MIXED | {"mlp_only_layers": [0]}))
    (wrong,) = problems_of(tmp_path, tensor=2)
    assert "an MLP of width 97" in wrong
    (tmp_path / "config.json").write_text(json.dumps(MIXED | {"shared_expert_intermediate_size": 21}))
    (wrong,) = problems_of(tmp_path, tensor=2)
    assert "a shared expert of width 21, which 2 devices" in wrong
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (wrong,) = problems_of(tmp_path, **{over: 2})
    assert "has no experts for 2 devices to share" in wrong


def test_parts_of_experts_are_recomputed_with_them_and_kept_without() -> None:
    def of(*modules: str) -> tuple[Any, list[str]]:
        settings, problems, warnings = megatron_settings(
            {"recompute_granularity": "selective", "recompute_modules": list(modules)}
        )
        assert problems == []
        return settings.recompute["modules"], warnings

    assert of("core_attn", "moe_act", "moe") == (["core_attn", "moe"], [])
    modules, (said,) = of("moe_act")
    assert modules == ["core_attn"] and "moe_act is not recomputed alone" in said
