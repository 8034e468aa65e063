"""Options of the engine megatron, in the words of Megatron and of the dialects.

They are read here once, so that a plan can be checked and priced; the engine takes the settings. Sizes of the groups are the
role's own fields (tensor_parallel, pipeline_parallel, sequence_parallel), and are no options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Strict

from posttrain.errors import Problem
from posttrain.plan.engines.megatron.experts import (
    BALANCE,
    DISPATCHER,
    FLEX,
    KIND,
    RECOMPUTED_LAYER,
    SINKHORN,
    WHERE_THEY_GO,
    ExpertOptions,
    ExpertSettings,
    balances_none,
    expert_settings,
)
from posttrain.plan.options import Reading, ignored, ignored_options, option, read_options

RECOMPUTED = ("core_attn", "mlp", "moe")  # modules that can be recomputed one by one
_IN_EXPERTS = ("moe_act", "shared_experts")  # parts of a layer's experts, recomputed with them
_KEPT = ("layernorm", "mla_up_proj", *_IN_EXPERTS)  # small beside these: their activations are kept
SPLIT = (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip
_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
CHUNKS, _LAYERS_PER_CHUNK = "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"
# Sections with further fields of Megatron's configuration: verl's, ROLL's, SkyRL's.
NESTED = ("override_transformer_config", "additional_configs", "transformer_config_kwargs")
DISTRIBUTED = "use_distributed_optimizer"
_NO_KERNELS = "layers are computed by megatron-core's own modules, without the kernels of Transformer Engine and Apex"
_NO_8_BITS = "products are computed in model.compute_dtype, which is more exact"
_OWN_FILES = "weights come from and go to Hugging Face folders, which every engine reads"
_STAYS = "weights and gradients stay where they are between phases"
_MESSAGES = "messages between devices are sent when they are due, and waited for"
_MODEL = "the model is built from its config.json"
_STAGES = (
    "which stage holds a layer changes no number; num_layers_in_first_pipeline_stage and its like move layers here"
)
_ADDED_UP = "gradients are added up at the update, without Megatron's wrapper"
# Options that may be 0 alone, and why
_NONE_OF_IT = {
    "dsa_indexer_loss_coeff": "the indexer of sparse attention has no loss of its own here",
    "attention_dropout": "nothing is dropped out here, so that a token's log-prob is the same in every pass",
    "hidden_dropout": "nothing is dropped out here, so that a token's log-prob is the same in every pass",
}
Count = Annotated[int, Strict()] | None


class TransformerOptions(ExpertOptions):
    """Options that may stand among the others or in a dialect's section for Megatron's configuration."""

    sequence_parallel: bool = True
    """Tensor-parallel devices share the tokens outside of the layers' matrices, too; the same numbers in less memory."""
    use_distributed_optimizer: bool = False
    """Copies share out the optimizer's averages of what they all hold."""
    optimizer_offload: bool = False
    """Keep the optimizer's averages in CPU memory between updates (verl's word)."""
    offload_after_step: bool = False
    """Keep the optimizer's averages in CPU memory between updates (SkyRL's word)."""
    recompute_granularity: Literal["full", "selective"] | None = option(None, fix="use full, selective or null")
    """Recompute activations of whole layers or of chosen modules; null: as model.gradient_checkpointing says."""
    recompute_method: Literal["uniform", "block"] | None = option(None, fix="use uniform or block")
    """full: which layers are recomputed together."""
    recompute_num_layers: Count = option(None, ge=1, fix="use 1")
    """full: layers that are recomputed together."""
    recompute_modules: list[str] | None = None
    """selective: modules that are recomputed: core_attn, mlp, moe."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first stage; null: as many as the others have."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last stage; null: as many as the others have."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the loss as a layer of the last stage."""
    virtual_pipeline_model_parallel_size: Count = option(None, ge=1, fix="use 2")
    """Stretches of layers that each stage has (virtual stages, arXiv:2104.04473)."""
    num_layers_per_virtual_pipeline_stage: Count = option(None, ge=1, fix="use 2")
    """Layers of a virtual stage, instead of their number."""
    overlap_grad_reduce: Any = ignored(_MESSAGES)
    overlap_param_gather: Any = ignored(_MESSAGES)
    overlap_p2p_comm: Any = ignored(_MESSAGES)
    variable_seq_lengths: Any = ignored("rows may have any length anyhow")
    deallocate_pipeline_outputs: Any = ignored("what a stage has sent is freed with its backward pass")
    bias_activation_fusion: Any = ignored(_NO_KERNELS)
    bias_dropout_fusion: Any = ignored(_NO_KERNELS)
    apply_rope_fusion: Any = ignored(_NO_KERNELS)
    masked_softmax_fusion: Any = ignored(_NO_KERNELS)
    gradient_accumulation_fusion: Any = ignored(_NO_KERNELS)
    persist_layer_norm: Any = ignored(_NO_KERNELS)
    attention_backend: Any = ignored(_NO_KERNELS)
    cross_entropy_loss_fusion: Any = ignored(_NO_KERNELS)
    param_offload: Any = ignored(_STAYS)
    grad_offload: Any = ignored(_STAYS)
    use_mbridge: Any = ignored(_OWN_FILES)
    vanilla_mbridge: Any = ignored(_OWN_FILES)
    use_dist_checkpointing: Any = ignored(_OWN_FILES)
    dist_checkpointing_path: Any = ignored(_OWN_FILES)
    dist_checkpointing_prefix: Any = ignored(_OWN_FILES)
    load_weight: Any = ignored(_OWN_FILES)
    dist_ckpt_optim_fully_reshardable: Any = ignored(_OWN_FILES)
    seed: Any = ignored("nothing is drawn: weights are loaded, and nothing is dropped out")
    dtype: Any = ignored("model.compute_dtype says it")
    extra: Any = ignored("Megatron's engine here reads none")
    ddp_config: Any = ignored(_ADDED_UP)
    override_ddp_config: Any = ignored(_ADDED_UP)
    optimizer_config_kwargs: Any = ignored("policy.optimizer says it")
    model_config_kwargs: Any = ignored("the model is built from its config.json, changed by model.config_overrides")
    empty_cuda_cache: Any = ignored("memory is kept for the next micro-batch")
    torch_profiler_config: Any = ignored("the section profiling says it")
    override_mcore_model_config: Any = ignored(_MODEL)
    multi_latent_attention: Any = ignored(_MODEL)
    multi_head_latent_attention: Any = ignored(_MODEL)
    normalization: Any = ignored(_MODEL)
    swiglu: Any = ignored(_MODEL)
    distrib_optim_fully_reshardable_mem_efficient: Any = ignored(_OWN_FILES)
    use_megatron_fsdp: Any = ignored("where weights lie between layers changes no number")
    dynamic_context_parallel: Any = ignored("all sequences are split over the same devices, with the same numbers")
    max_seqlen_per_dp_cp_rank: Any = ignored("all sequences are split over the same devices, with the same numbers")
    sequence_packing_scheduler: Any = ignored("all sequences are split over the same devices, with the same numbers")
    cp_partition_mode: Any = ignored("all sequences are split over the same devices, with the same numbers")
    context_parallel_algo: Any = ignored(_MESSAGES)
    pipeline_num_transformer_layers: Any = ignored(_STAGES)
    pipeline_model_parallel_layout: Any = ignored(_STAGES)
    tensor_model_parallel_size: Any = ignored("tensor_parallel says it")
    pipeline_model_parallel_size: Any = ignored("pipeline_parallel says it")
    entropy_from_logits_with_chunking: Any = ignored("entropy is computed in chunks anyhow")
    entropy_from_logits_chunk_size: Any = ignored("entropy is computed in chunks of a size of its own")
    forward_only: Any = ignored("a role that is not trained has no gradients anyhow")
    use_remove_padding: Any = ignored("rows are packed, and hold no padding")
    pad_bshd_to_minibatch_max: Any = ignored("rows are packed, and hold no padding")
    pad_to_length: Any = ignored("rows are packed, and hold no padding")
    pad_to_length_bucket: Any = ignored("rows are packed, and hold no padding")
    context_parallel_size: Any = ignored("sequence_parallel says it")
    seq_length: Any = ignored("rows may have any length anyhow")
    swap_optimizer: Any = ignored(_STAYS)
    use_flash_attn: Any = ignored(_NO_KERNELS)
    use_fused_swiglu: Any = ignored(_NO_KERNELS)
    use_fused_rmsnorm: Any = ignored(_NO_KERNELS)
    use_naive_l2norm: Any = ignored(_NO_KERNELS)
    use_fused_rotary_pos_emb: Any = ignored(_NO_KERNELS)
    use_fused_mhc: Any = ignored(_NO_KERNELS)
    use_triton_gdn: Any = ignored(_NO_KERNELS)
    use_ascend_gdn: Any = ignored(_NO_KERNELS)
    use_arbitrary_attention_mask: Any = ignored(_NO_KERNELS)
    apply_dsa_kernel_fusion: Any = ignored(_NO_KERNELS)
    dsa_indexer_loss_coeff: float = option(0.0, ge=0.0, fix="use 0")
    """Weight of the loss that teaches the indexer of sparse attention (DeepSeek V3.2 and V4) which tokens to read: 0 alone, as
    no such loss is computed."""
    dsa_indexer_use_sparse_loss: Any = ignored("dsa_indexer_loss_coeff is 0: there is no such loss")
    attention_dropout: float = option(0.0, ge=0.0, fix="use 0")
    """Share of attention weights that are dropped out: 0 alone."""
    hidden_dropout: float = option(0.0, ge=0.0, fix="use 0")
    """Share of activations that are dropped out: 0 alone."""
    fp8: Any = ignored(_NO_8_BITS)
    fp8_recipe: Any = ignored(_NO_8_BITS)
    fp8_param: Any = ignored(_NO_8_BITS)
    fp8_param_gather: Any = ignored(_NO_8_BITS)


class MegatronOptions(TransformerOptions):
    """Options of the training engine megatron."""

    override_transformer_config: TransformerOptions | None = option(None, fix="write settings below it")
    """verl's section for further fields of Megatron's configuration."""
    additional_configs: TransformerOptions | None = option(None, fix="write settings below it")
    """ROLL's section for further fields of Megatron's configuration."""
    transformer_config_kwargs: TransformerOptions | None = option(None, fix="write settings below it")
    """SkyRL's section for further fields of Megatron's configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronSettings:
    """Split of layers over devices, and their computation."""

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
        """Tell whether a pipeline's stages may have more than one stretch of layers."""
        return self.virtual > 1 or self.layers_per_virtual_stage is not None


def megatron_settings(options: Mapping[str, Any], *, role: str = "policy") -> Reading[MegatronSettings]:
    """Read a role's options."""
    at = f"{role}.engine_options"
    read, problems = read_options(MegatronOptions, options, at=at, engine="megatron")
    given = _written(read)
    warnings = list(ignored_options(read, at=at, role=role))
    for name in NESTED:
        section = getattr(read, name)
        if section is not None:
            given |= _written(section)
            warnings += ignored_options(section, at=f"{at}.{name}", role=role)
    wheres = {name: where for name, (where, _) in flat_options(options, at).items()}
    if _LAYERS_PER_CHUNK in given and (other := next((o for o in (CHUNKS, *SPLIT[:2]) if o in given), None)):
        what = f"{_LAYERS_PER_CHUNK} and {other} both say how many layers a stage has at a time"
        fix = f"remove {wheres[_LAYERS_PER_CHUNK]}" + ("" if other == CHUNKS else f", and use {CHUNKS}")
        problems.append(Problem(what, fix=fix, field=wheres[_LAYERS_PER_CHUNK]))
    for name, why in _NONE_OF_IT.items():
        if given.get(name):
            problems.append(Problem(f"{name}={given[name]:g}: {why}", fix=f"use {name}=0", field=wheres[name]))
    if given.get(DISPATCHER) == FLEX:
        warnings.append(f"{wheres[DISPATCHER]}={FLEX} has no effect: tokens travel by alltoall, to the same experts")
    if given.get(BALANCE) and balances_none(given):
        warnings.append(f"{wheres[BALANCE]} has no effect: {wheres[KIND]} asks for no loss")
    if SINKHORN in (given.get(KIND) or ()):
        warnings.append(f"{wheres[KIND]}: {SINKHORN} has no effect: {WHERE_THEY_GO}")
    settings = MegatronSettings(
        sequence_parallel=given.get("sequence_parallel", True),
        recompute=_recompute(given, wheres, problems, warnings),
        split={name: given[name] for name in SPLIT if given.get(name)},
        virtual=given.get(CHUNKS, 1),
        layers_per_virtual_stage=given.get(_LAYERS_PER_CHUNK),
        optimizer_offload=bool(given.get("optimizer_offload") or given.get("offload_after_step")),
        distributed_optimizer=given.get(DISTRIBUTED, False),
        experts=expert_settings(given, wheres, problems),
    )
    return Reading(settings, problems, warnings)


def _written(section: TransformerOptions) -> dict[str, Any]:
    """Return the options that were written, by name."""
    return {name: getattr(section, name) for name in section.model_fields_set if name not in NESTED}


def virtual_options(options: Mapping[str, Any], *, role: str = "policy") -> list[str]:
    """Return the options that ask for virtual stages, by their places."""
    flat = flat_options(options, f"{role}.engine_options")
    return [where for name, (where, value) in flat.items() if name in (CHUNKS, _LAYERS_PER_CHUNK) and value is not None]


def flat_options(options: Mapping[str, Any], at: str) -> dict[str, tuple[str, Any]]:
    """Return every option by its name, whatever section it stands in: its place and its value."""
    found = {name: (f"{at}.{name}", value) for name, value in options.items() if name not in NESTED}
    for name in NESTED:
        if isinstance(inside := options.get(name), Mapping):
            found |= {inner: (f"{at}.{name}.{inner}", value) for inner, value in inside.items()}
    return found


def virtual_stages(settings: MegatronSettings, *, layers: int, pipeline: int) -> int:
    """Count the stretches of layers that each of ``pipeline`` stages has; 1: its layers are all neighbours.

    Sizes that do not divide are reported by models.model_problems.
    """
    if pipeline == 1:
        return 1
    if settings.layers_per_virtual_stage is None:
        return settings.virtual
    counted = layers + len([name for name in SPLIT[2:] if name in settings.split])
    return max(1, counted // pipeline // settings.layers_per_virtual_stage)


def _recompute(
    given: Mapping[str, Any], wheres: Mapping[str, str], problems: list[Problem], warnings: list[str]
) -> dict[str, Any]:
    granularity = given.get("recompute_granularity")
    with_experts = bool(given.get(RECOMPUTED_LAYER))
    if granularity is None and with_experts:
        return {"granularity": "selective", "modules": ["moe"]}
    if granularity is None:
        others = [wheres[name] for name in _RECOMPUTE[1:] if given.get(name) not in (None, [], ["core_attn"])]
        warnings += [f"{where} has no effect: recompute_granularity is null" for where in others]
        return {}
    if granularity == "full":
        method, layers = given.get("recompute_method") or "uniform", given.get("recompute_num_layers") or 1
        if with_experts:
            warnings.append(
                f"{wheres[RECOMPUTED_LAYER]} has no effect: recompute_granularity=full recomputes experts, too"
            )
        return {"granularity": "full", "method": method, "num_layers": layers}
    modules = given.get("recompute_modules") or ["core_attn"]
    with_theirs = _IN_EXPERTS if "moe" in modules else ()
    for module in [module for module in modules if module in _KEPT and module not in with_theirs]:
        warnings.append(
            f"{wheres['recompute_modules']}: {module} is not recomputed alone; its activations are kept, which takes memory"
        )
    modules = [module for module in modules if module not in _KEPT] or ["core_attn"]
    wrong = [module for module in modules if module not in RECOMPUTED]
    if wrong:
        what = f"recompute_modules names {wrong[0]}, which is not among {', '.join(RECOMPUTED)}"
        problems.append(Problem(what, fix="use recompute_granularity=full", field=wheres["recompute_modules"]))
    added = ["moe"] if with_experts and "moe" not in modules else []
    return {"granularity": "selective", "modules": [*modules, *added]}
