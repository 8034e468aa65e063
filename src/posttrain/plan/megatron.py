"""How the engine megatron shares a model out: ``engine_options`` of the policy, in the words of Megatron and of the dialects.

Read here once, torch-free, so that a plan can be checked and priced; the engine takes the result. Sizes of the groups are the
policy's own fields (tensor_parallel, pipeline_parallel, sequence_parallel), and are no options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import Problem, did_you_mean
from posttrain.plan.experts import (
    EXPERT_OPTIONS,
    EXPERTS_OVER,
    EXPERTS_WITHOUT_EFFECT,
    ONE_EXPERT_OVER,
    RECOMPUTED_LAYER,
    ExpertSettings,
    expert_settings,
)

RECOMPUTED = ("core_attn", "mlp", "moe")  # modules that can be recomputed one by one
_NO_KERNELS = "layers are computed by megatron-core's own modules, without the kernels of Transformer Engine and Apex"
_OWN_FILES = "weights come from and go to Hugging Face folders, which every engine reads"
_STAYS = "weights and gradients stay where they are between phases"
_MESSAGES = "messages between devices are sent when they are due, and waited for"
# What a dialect has a setting for, and is otherwise here: name -> what happens instead.
WITHOUT_EFFECT = {
    "overlap_grad_reduce": _MESSAGES,
    "overlap_param_gather": _MESSAGES,
    "overlap_p2p_comm": _MESSAGES,
    "variable_seq_lengths": "rows may have any length anyhow",
    "deallocate_pipeline_outputs": "what a stage has sent is freed with its backward pass",
    **dict.fromkeys(
        (
            "bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "masked_softmax_fusion",
            "gradient_accumulation_fusion", "persist_layer_norm", "attention_backend", "cross_entropy_loss_fusion",
        ),
        _NO_KERNELS,
    ),
    **EXPERTS_WITHOUT_EFFECT,
    **dict.fromkeys(("param_offload", "grad_offload"), _STAYS),
    **dict.fromkeys(
        (
            "use_mbridge", "vanilla_mbridge", "use_dist_checkpointing", "dist_checkpointing_path",
            "dist_checkpointing_prefix", "load_weight", "dist_ckpt_optim_fully_reshardable",
        ),
        _OWN_FILES,
    ),
    "seed": "nothing is drawn: weights are loaded, and nothing is dropped out",
    "dtype": "model.compute_dtype says it",
    "extra": "Megatron's engine here reads none",
    **dict.fromkeys(
        ("ddp_config", "override_ddp_config"), "gradients are added up at the update, without Megatron's wrapper"
    ),
    "optimizer_config_kwargs": "policy.optimizer says it",
    "model_config_kwargs": "the model is built from its config.json, changed by model.config_overrides",
    "empty_cuda_cache": "memory is kept for the next micro-batch",
    "torch_profiler_config": "the section profiling says it",
    "override_mcore_model_config": "the model is built from its config.json",
}  # fmt: skip
SPLIT = (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip
_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
CHUNKS, _LAYERS_PER_CHUNK = "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"
# Sections with further fields of Megatron's configuration: verl's, ROLL's, SkyRL's.
NESTED = ("override_transformer_config", "additional_configs", "transformer_config_kwargs")
DISTRIBUTED = "use_distributed_optimizer"
_OFFLOADS = ("optimizer_offload", "offload_after_step")
KNOWN = (
    "sequence_parallel", DISTRIBUTED, *_OFFLOADS, *_RECOMPUTE, *SPLIT, CHUNKS, _LAYERS_PER_CHUNK, *EXPERT_OPTIONS,
    *WITHOUT_EFFECT,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronSettings:
    """How layers are shared out and computed."""

    # Tensor-parallel ranks share out the tokens outside of the layers' matrices, too; the same numbers in less memory.
    sequence_parallel: bool = True
    # granularity, method, num_layers, modules of Megatron's recompute_*; empty: as model.gradient_checkpointing says
    recompute: Mapping[str, Any] = field(default_factory=dict)
    # Megatron's settings of an uneven pipeline, by their names; empty: as many layers in every stage
    split: Mapping[str, Any] = field(default_factory=dict)
    # Virtual stages: every stage has so many stretches of layers that are not neighbours (arXiv:2104.04473, section 2.2),
    # or stretches of so many layers; 1 and None: one stretch. Nothing virtual about a pipeline of one stage.
    virtual: int = 1
    layers_per_virtual_stage: int | None = None
    optimizer_offload: bool = False  # the optimizer's averages in CPU memory between updates
    distributed_optimizer: bool = False  # copies share out the optimizer's averages of what they all hold
    experts: ExpertSettings = field(default_factory=ExpertSettings)

    @property
    def interleaved(self) -> bool:
        """Whether a pipeline's stages may have more than one stretch of layers."""
        return self.virtual > 1 or self.layers_per_virtual_stage is not None


def megatron_settings(
    options: Mapping[str, Any], *, role: str = "policy"
) -> tuple[MegatronSettings, list[Problem], list[str]]:
    """The settings; what is wrong with the options; and what of them has no effect, in sentences."""
    at = f"{role}.engine_options"
    told: list[str] = []
    problems = [
        Problem(f"{at}.{name} holds settings, and is {options[name]!r}", field=f"{at}.{name}")
        for name in NESTED
        if options.get(name) is not None and not isinstance(options[name], Mapping)
    ]
    flat = flat_options(options, at)
    for name, (where, value) in flat.items():
        if name not in KNOWN:
            fix = did_you_mean(name, KNOWN, listed=True)
            problems.append(Problem(f"megatron has no option {name}", fix=fix, field=where))
        elif name in WITHOUT_EFFECT and value:
            told.append(f"{where} has no effect: {WITHOUT_EFFECT[name]}")
    given = {name: value for name, (_, value) in flat.items() if value is not None}
    wheres = {name: where for name, (where, _) in flat.items()}
    if _LAYERS_PER_CHUNK in given and (other := next((o for o in (CHUNKS, *SPLIT[:2]) if o in given), None)):
        what = f"{_LAYERS_PER_CHUNK} and {other} both say how many layers a stage has at a time"
        fix = f"remove {wheres[_LAYERS_PER_CHUNK]}" + ("" if other == CHUNKS else f", and use {CHUNKS}")
        problems.append(Problem(what, fix=fix, field=wheres[_LAYERS_PER_CHUNK]))
    sizes = {name: _count(name, "of devices", given, wheres, problems) for name in (EXPERTS_OVER, ONE_EXPERT_OVER)}
    return (
        MegatronSettings(
            sequence_parallel=bool(given.get("sequence_parallel", True)),
            recompute=_recompute(given, wheres, problems, told),
            split={name: given[name] for name in SPLIT if given.get(name)},
            virtual=_count(CHUNKS, "of virtual stages", given, wheres, problems) or 1,
            layers_per_virtual_stage=_count(_LAYERS_PER_CHUNK, "of layers", given, wheres, problems),
            optimizer_offload=any(given.get(name) for name in _OFFLOADS),
            distributed_optimizer=bool(given.get(DISTRIBUTED)),
            experts=expert_settings(given, wheres, problems, sizes),
        ),
        problems,
        told,
    )


def virtual_options(options: Mapping[str, Any], *, role: str = "policy") -> list[str]:
    """Where virtual stages are asked for."""
    flat = flat_options(options, f"{role}.engine_options")
    return [where for name, (where, value) in flat.items() if name in (CHUNKS, _LAYERS_PER_CHUNK) and value is not None]


def flat_options(options: Mapping[str, Any], at: str) -> dict[str, tuple[str, Any]]:
    """Every option by its name, wherever it stands: where that is, and its value."""
    found = {name: (f"{at}.{name}", value) for name, value in options.items() if name not in NESTED}
    for name in NESTED:
        if isinstance(inside := options.get(name), Mapping):
            found |= {inner: (f"{at}.{name}.{inner}", value) for inner, value in inside.items()}
    return found


def _count(
    name: str, of: str, given: Mapping[str, Any], wheres: Mapping[str, str], problems: list[Problem]
) -> int | None:
    value = given.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    problems.append(Problem(f"{name}={value!r} is no number {of}", fix=f"use {wheres[name]}=2", field=wheres[name]))
    return None


def virtual_stages(settings: MegatronSettings, *, layers: int, pipeline: int) -> int:
    """Stretches of layers that each of ``pipeline`` stages has, of a model with so many layers; 1: they are all neighbours.

    Sizes that do not divide are for megatron_models.model_problems to say.
    """
    if pipeline == 1:
        return 1
    if settings.layers_per_virtual_stage is None:
        return settings.virtual
    counted = layers + len([name for name in SPLIT[2:] if name in settings.split])
    return max(1, counted // pipeline // settings.layers_per_virtual_stage)


def _recompute(
    given: Mapping[str, Any], wheres: Mapping[str, str], problems: list[Problem], told: list[str]
) -> dict[str, Any]:
    granularity = given.get("recompute_granularity")
    with_experts = bool(given.get(RECOMPUTED_LAYER))
    if granularity is None and with_experts:
        return {"granularity": "selective", "modules": ["moe"]}
    if granularity is None:
        others = [wheres[name] for name in _RECOMPUTE[1:] if given.get(name) not in (None, [], ["core_attn"])]
        told += [f"{where} has no effect: recompute_granularity is null" for where in others]
        return {}
    if granularity == "full":
        method, layers = given.get("recompute_method") or "uniform", given.get("recompute_num_layers") or 1
        if method not in ("uniform", "block"):
            what, where = f"recompute_method={method}: no such method", wheres["recompute_method"]
            problems.append(Problem(what, fix="use uniform or block", field=where))
        if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
            what, where = f"recompute_num_layers={layers!r} is no number of layers", wheres["recompute_num_layers"]
            problems.append(Problem(what, fix=f"use {where}=1", field=where))
        if with_experts:
            told.append(f"{wheres[RECOMPUTED_LAYER]} has no effect: recompute_granularity=full recomputes experts, too")
        return {"granularity": "full", "method": method, "num_layers": layers}
    if granularity != "selective":
        where = wheres["recompute_granularity"]
        what = f"recompute_granularity={granularity}: no such granularity"
        problems.append(Problem(what, fix="use full, selective or null", field=where))
        return {}
    modules = given.get("recompute_modules") or ["core_attn"]
    wrong = [module for module in modules if module not in RECOMPUTED]
    if wrong:
        what = f"recompute_modules names {wrong[0]}, which is not among {', '.join(RECOMPUTED)}"
        problems.append(Problem(what, fix="use recompute_granularity=full", field=wheres["recompute_modules"]))
    added = ["moe"] if with_experts and "moe" not in modules else []
    return {"granularity": "selective", "modules": [*modules, *added]}
