"""Mixtures of experts: which layers of a model have them, and how the engine megatron is told to share them out. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.errors import Problem

EXPERT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")  # Hugging Face's model_type
DISPATCHERS = ("alltoall", "allgather")
EXPERTS_OVER, ONE_EXPERT_OVER = "expert_model_parallel_size", "expert_tensor_parallel_size"
DISPATCHER, GROUPED, FROZEN = "moe_token_dispatcher_type", "moe_grouped_gemm", "freeze_moe_router"
ROUTER_DTYPE, RECOMPUTED_LAYER, BALANCE = "moe_router_dtype", "moe_layer_recompute", "moe_aux_loss_coeff"
# Options that say something about experts alone, and are read here; those that are not, and why.
EXPERT_OPTIONS = (EXPERTS_OVER, ONE_EXPERT_OVER, DISPATCHER, GROUPED, FROZEN, ROUTER_DTYPE, RECOMPUTED_LAYER, BALANCE)
_WHERE_THEY_GO = "tokens go where the model's own router sends them"
EXPERTS_WITHOUT_EFFECT = {
    **dict.fromkeys(
        (
            "moe_router_load_balancing_type", "moe_router_score_function", "moe_router_pre_softmax",
            "moe_router_enable_expert_bias", "moe_router_bias_update_rate",
        ),
        _WHERE_THEY_GO,
    ),
    "moe_shared_expert_overlap": "shared experts are computed before tokens travel",
    "moe_permute_fusion": "layers are computed by megatron-core's own modules, without the kernels of Transformer Engine",
    "moe_enable_deepep": f"{DISPATCHER} says how tokens travel: {' or '.join(DISPATCHERS)}",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """The experts of a model, by its config.json."""

    experts: int  # in a layer
    chosen: int  # of them, for every token
    width: int  # of an expert's MLP
    shared_width: int  # of the MLP beside them that every token goes through; 0: there is none
    normalised: bool  # the weights of the chosen ones add up to 1
    layers: tuple[bool, ...]  # which of the model's layers have experts; the others have an MLP

    def parameters(self, hidden: int) -> int:
        """Weights of all experts of all layers; routers and shared experts are not among them."""
        return sum(self.layers) * self.experts * 3 * hidden * self.width


def expert_layers(text: Mapping[str, Any]) -> ExpertLayers | None:
    """From the fields of a config.json; None for a model without experts. Raises: KeyError for fields it lacks."""
    experts = text.get("num_experts") or text.get("num_local_experts")
    if not experts:
        return None
    every, plain = text.get("decoder_sparse_step") or 1, text.get("mlp_only_layers") or ()
    layers = tuple(number not in plain and (number + 1) % every == 0 for number in range(text["num_hidden_layers"]))
    if not any(layers):
        return None
    return ExpertLayers(
        experts=experts,
        chosen=text["num_experts_per_tok"],
        width=text.get("moe_intermediate_size") or text["intermediate_size"],
        shared_width=text.get("shared_expert_intermediate_size") or 0,
        normalised=text.get("model_type") == "mixtral" or bool(text.get("norm_topk_prob")),
        layers=layers,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSettings:
    """How experts are shared out and computed."""

    parallel: int = 1  # ranks that share a layer's experts
    tensor: int | None = None  # ranks that share one expert's matrices; None: as many as share those of other layers
    # How tokens reach their experts' ranks: each to its own (alltoall), or all to all of them (allgather).
    dispatcher: str = "alltoall"
    grouped: bool = False  # one product for all experts of a rank, instead of one after another
    router_dtype: str | None = None  # fp32 or fp64 of Megatron; None: that of the layers
    freeze_router: bool = False  # routers stay as they were loaded

    def split(self, tensor: int) -> tuple[int, int]:
        """Ranks that share the experts, and one expert, where ``tensor`` share other matrices."""
        return self.parallel, tensor if self.tensor is None else self.tensor


def expert_settings(
    given: Mapping[str, Any], wheres: Mapping[str, str], problems: list[Problem], sizes: Mapping[str, int | None]
) -> ExpertSettings:
    """Args: given options and where they stand; sizes of EXPERTS_OVER and ONE_EXPERT_OVER, looked at already."""
    dispatcher = given.get(DISPATCHER) or "alltoall"
    if dispatcher not in DISPATCHERS:
        what = f"{DISPATCHER}={dispatcher} takes kernels that this engine does not call"
        problems.append(Problem(what, fix=f"use {' or '.join(DISPATCHERS)}", field=wheres[DISPATCHER]))
    dtype = given.get(ROUTER_DTYPE)
    if dtype not in (None, "fp32", "fp64"):
        what = f"{ROUTER_DTYPE}={dtype}: routers compute in fp32, fp64, or as the layers do"
        problems.append(Problem(what, fix="use fp32, fp64 or null", field=wheres[ROUTER_DTYPE]))
    return ExpertSettings(
        parallel=sizes[EXPERTS_OVER] or 1,
        tensor=sizes[ONE_EXPERT_OVER],
        dispatcher=dispatcher,
        grouped=bool(given.get(GROUPED)),
        router_dtype=dtype,
        freeze_router=bool(given.get(FROZEN)),
    )


def expert_problems(
    path: str,
    experts: ExpertLayers | None,
    settings: ExpertSettings,
    *,
    role: str,
    tensor: int,
    pipeline: int,
    sequence_parallel: bool,
) -> list[Problem]:
    """What of a model's experts, or of its having none, does not go with the sizes."""
    at = f"{role}.engine_options"
    over, one_over = settings.split(tensor)
    if experts is None:
        if over == 1:
            return []
        what = f"{path} has no experts for {over} devices to share ({EXPERTS_OVER}={over})"
        return [Problem(what, fix=f"use {at}.{EXPERTS_OVER}=1", field=f"{at}.{EXPERTS_OVER}")]
    problems = [
        _unequal(path, f"{experts.experts} experts", experts.experts, over, f"{at}.{EXPERTS_OVER}"),
        _unequal(path, f"experts of width {experts.width}", experts.width, one_over, f"{at}.{ONE_EXPERT_OVER}"),
        _unequal(
            path, f"a shared expert of width {experts.shared_width}", experts.shared_width, tensor, f"{role}.tensor_parallel"
        ),
    ]  # fmt: skip
    if tensor > 1 and not sequence_parallel:
        what = f"{path} has experts, and Megatron trains those only where devices that share matrices share tokens, too"
        problems.append(
            Problem(what, fix=f"use {at}.sequence_parallel=true, or {role}.tensor_parallel=1",
                    field=f"{at}.sequence_parallel")
        )  # fmt: skip
    if settings.dispatcher == "allgather" and pipeline > 1:
        what = f"{DISPATCHER}=allgather takes rows of one length, and rows of a pipeline have any"
        fix = f"use {at}.{DISPATCHER}=alltoall, or {role}.pipeline_parallel=1"
        problems.append(Problem(what, fix=fix, field=f"{at}.{DISPATCHER}"))
    return [problem for problem in problems if problem is not None]


def _unequal(path: str, what: str, count: int, ranks: int, field: str) -> Problem | None:
    if count % ranks == 0:
        return None
    fits = max(size for size in range(1, ranks) if count % size == 0)
    said = (
        f"{path} has {what}, which {ranks} devices cannot hold in equal parts ({count} / {ranks} = {count / ranks:.4g})"
    )
    return Problem(said, fix=f"use {field}={fits}", field=field)
