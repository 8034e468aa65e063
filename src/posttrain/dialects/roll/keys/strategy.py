"""What strategy_config may hold, by the library that reads it. ROLL hands it on unchecked; so do we, after a look at names."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT
from posttrain.dialects.roll.keys.worker import LATEST, Base

_C = "strategy_args.strategy_config"
_Number = int | float | str  # DeepSpeed's sizes may be auto


def _of(*keys: tuple[str, Any, Any, str], since: str = "") -> tuple[Base, ...]:
    return tuple(Base(f"{_C}.{name}", type, default, meaning, since=since) for name, type, default, meaning in keys)


MEGATRON = _of(
    ("tensor_model_parallel_size", int, 1, "devices that share one layer's matrices"),
    ("pipeline_model_parallel_size", int, 1, "devices that share the layers"),
    ("context_parallel_size", int, 1, "devices that share one sequence"),
    ("expert_model_parallel_size", int, 1, "devices that share the experts; does not divide the data-parallel size"),
    ("expert_tensor_parallel_size", int | None, None, "devices that share one expert's matrices"),
    ("virtual_pipeline_model_parallel_size", int | None, None, "virtual stages of the pipeline"),
    ("sequence_parallel", bool, False, "split activations along the sequence within tensor-parallel groups"),
    ("recompute_granularity", Literal["full", "selective"] | None, None, "recompute activations in the backward pass"),
    ("recompute_method", str | None, None, "which layers are recomputed"),
    ("recompute_num_layers", int | None, None, "layers per recomputed unit"),
    ("recompute_modules", list[str] | None, None, "modules that are recomputed"),
    ("moe_layer_recompute", bool, False, "recompute expert layers"),
    ("moe_token_dispatcher_type", Literal["allgather", "alltoall", "flex"] | None, None, "how tokens travel to experts"),
    ("moe_grouped_gemm", bool, False, "one product for all experts"),
    ("moe_shared_expert_overlap", bool, False, "compute shared experts while tokens travel"),
    ("moe_aux_loss_coeff", float, 0.0, "weight of the balance loss of experts"),
    ("use_distributed_optimizer", bool, False, "split the optimizer's state over data-parallel ranks"),
    ("overlap_grad_reduce", bool, False, "reduce gradients during the backward pass"),
    ("overlap_param_gather", bool, False, "gather weights during the forward pass; ROLL does not support it"),
    ("overlap_p2p_comm", bool, True, "overlap the pipeline's messages"),
    ("variable_seq_lengths", bool, False, "micro-batches of different widths; not with allgather"),
    ("bias_activation_fusion", bool, False, "fuse bias and activation"),
    ("apply_rope_fusion", bool, False, "fuse the rotary embedding"),
    ("account_for_embedding_in_pipeline_split", bool, False, "count the embedding as a layer"),
    ("account_for_loss_in_pipeline_split", bool, False, "count the loss as a layer"),
    ("additional_configs", dict, {}, "further fields of Megatron's configuration"),
)  # fmt: skip

FSDP2 = _of(
    ("fsdp_size", int, 1, "devices that share a copy; 1 or all: everything is sharded over all"),
    ("param_dtype", str, "bf16", "precision of gathered weights"),
    ("reduce_dtype", str, "float32", "precision of gradient reduction"),
    ("reshard_after_forward", bool | int | None, None, "free gathered weights after the forward pass"),
    ("offload_policy", bool, False, "keep weights and optimizer state in CPU memory"),
    ("wrap_policy", dict, {}, "modules that are sharded as units"),
    ("ep_size", int, 1, "devices that share the experts"),
    ("efsdp_size", int, 1, "devices that share a copy of an expert"),
    ("moe_use_grouped_mm", bool, False, "one product for all experts"),
    ("apply_tiled_mlp", bool, False, "compute feed-forward layers in tiles"),
    ("tiled_num_shards", int, 4, "tiles of a feed-forward layer"),
    ("use_batched_model_update", bool, False, "send weights to the sampler in batches"),
    ("reduce_scatter_during_grad_accumulation", bool, True, "reduce gradients at every micro-batch"),
    ("async_save_ckpt", bool, True, "save checkpoints in the background"),
    ("save_only_model", bool, False, "checkpoints without optimizer state"),
    since=LATEST,
)  # fmt: skip

DEEPSPEED = _of(
    ("train_micro_batch_size_per_gpu", _Number, "auto", "per_device_train_batch_size decides"),
    ("train_batch_size", _Number, "auto", "the batch sizes decide"),
    ("gradient_accumulation_steps", _Number, "auto", "training_args.gradient_accumulation_steps decides"),
    ("gradient_clipping", _Number, "auto", "max_grad_norm decides, the one place for it"),
    ("bf16.enabled", bool, True, "train in bfloat16; model_args.dtype decides"),
    ("fp16.enabled", bool, False, "train in float16, which is refused"),
    ("fp16.loss_scale", _Number, 0, "loss scale; 0: dynamic"),
    ("fp16.initial_scale_power", int, 16, "first loss scale, as a power of 2"),
    ("fp16.loss_scale_window", int, 1000, "steps until the scale rises"),
    ("fp16.hysteresis", int, 2, "overflows until the scale falls"),
    ("fp16.min_loss_scale", _Number, 1, "smallest loss scale"),
    ("checkpoint.tag_validation", str, "IGNORE", "when ranks disagree about a checkpoint's name; one process names ours"),
    ("zero_optimization.stage", int, 0, "what is split over devices: 1 optimizer state, 2 gradients too, 3 weights too"),
    ("zero_optimization.allgather_partitions", bool, True, "gather weights in one call"),
    ("zero_optimization.allgather_bucket_size", _Number, 1e9, "elements per gathering"),
    ("zero_optimization.overlap_comm", bool, True, "communicate during the backward pass"),
    ("zero_optimization.reduce_scatter", bool, True, "reduce and scatter gradients in one call"),
    ("zero_optimization.reduce_bucket_size", _Number, 5e8, "elements per reduction; auto: h x h, the hidden size h"),
    ("zero_optimization.contiguous_gradients", bool, True, "copy gradients into one buffer"),
    ("zero_optimization.sub_group_size", _Number, 1e9, "elements per optimizer call"),
    ("zero_optimization.stage3_prefetch_bucket_size", _Number, "auto", "elements fetched ahead; auto: 0.9 x h x h"),
    ("zero_optimization.stage3_param_persistence_threshold", _Number, "auto", "smaller weights stay gathered; auto: 10 x h"),
    ("zero_optimization.stage3_max_live_parameters", _Number, 1e9, "elements gathered at a time"),
    ("zero_optimization.stage3_max_reuse_distance", _Number, 1e9, "weights used again this soon stay gathered"),
    ("zero_optimization.stage3_gather_16bit_weights_on_model_save", bool, True, "gather weights for saving, as is always done"),
    ("zero_optimization.round_robin_gradients", bool, False, "spread the copying of gradients"),
    ("zero_optimization.zero_hpz_partition_size", int, 1, "devices of a second, nearer copy of the weights; stage 3"),
    ("zero_optimization.zero_quantized_weights", bool, False, "gather weights in 8 bits, which is refused"),
    ("zero_optimization.zero_quantized_gradients", bool, False, "reduce gradients in 4 bits, which is refused"),
    ("communication_data_type", str | None, None, "precision of gradient reduction; null: fp32"),
    ("data_types.grad_accum_dtype", str | None, None, "precision in which micro-batches add up; null: fp32"),
    ("zero_optimization.offload_optimizer.device", str, "none", "where the optimizer's state rests: none, cpu"),
    ("zero_optimization.offload_optimizer.pin_memory", bool, False, "in pinned memory"),
    ("zero_optimization.offload_param.device", str, "none", "where weights rest: none, cpu; stage 3"),
    ("zero_optimization.offload_param.pin_memory", bool, False, "in pinned memory"),
)  # fmt: skip

VLLM = _of(
    ("gpu_memory_utilization", float, 0.9, "share of a device's memory for weights and cache (vLLM)"),
    ("block_size", int, 16, "tokens per cache block (vLLM)"),
    ("max_model_len", int | None, None, "longest prompt and response; null: the model's (vLLM)"),
    ("max_num_seqs", int | None, None, "sequences decoded side by side (vLLM)"),
    ("max_num_batched_tokens", int, 8192, "tokens per pass (vLLM)"),
    ("enforce_eager", bool, False, "no CUDA graphs (vLLM)"),
    ("enable_prefix_caching", bool, True, "keep the cache of shared beginnings (vLLM)"),
    ("data_parallel_size", int | None, None, "copies of the engine; must be the number of workers (vLLM)"),
    ("quantization", str | None, None, "precision of the sampler's weights, such as fp8 (vLLM)"),
    ("sleep_level", int, 1, "what is freed while the engine sleeps (vLLM)"),
    ("VLLM_USE_V1", int | str | bool, 1, "vLLM's newer engine"),
)  # fmt: skip
SGLANG = _of(
    ("mem_fraction_static", float | None, None, "share of free memory for weights and cache (SGLang)"),
    ("enable_memory_saver", bool, True, "free memory while the engine sleeps (SGLang)"),
)  # fmt: skip
SAMPLERS = _of(
    ("tensor_parallel_size", int | None, None, "devices that share one copy of the sampler; null: 1, for SGLang all of a "
     "worker's"),
    ("pipeline_parallel_size", int, 1, "devices that share the sampler's layers"),
    ("load_format", str, "dummy", "where the sampler's first weights come from; dummy: from the trainer"),
    ("disable_custom_all_reduce", bool, True, "use NCCL's reduction"),
)  # fmt: skip

REST = Base(f"{_C}.**", Any, ABSENT, "further settings of the strategy, handed on as they are")
TRAINED = (*MEGATRON, *FSDP2, *DEEPSPEED)
SAMPLED = (*SAMPLERS, *VLLM, *SGLANG)

# Which strategies read a key that is not handed to all.
READERS = {
    **{base.name: "megatron" for base in MEGATRON},
    **{base.name: "fsdp2" for base in FSDP2},
    **{base.name: "deepspeed" for base in DEEPSPEED},
    **{base.name: "vllm" for base in VLLM},
    **{base.name: "sglang" for base in SGLANG},
}
