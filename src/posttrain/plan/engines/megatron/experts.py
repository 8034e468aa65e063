"""Options of the engine megatron about experts: how they are split over devices and computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Strict

from posttrain.errors import Problem
from posttrain.plan.experts import ExpertLayers
from posttrain.plan.options import Options, ignored, option

EXPERT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")  # Hugging Face's model_type
DISPATCHERS = ("alltoall", "allgather")
EXPERTS_OVER, ONE_EXPERT_OVER = "expert_model_parallel_size", "expert_tensor_parallel_size"
DISPATCHER, GROUPED, FROZEN = "moe_token_dispatcher_type", "moe_grouped_gemm", "freeze_moe_router"
ROUTER_DTYPE, RECOMPUTED_LAYER, BALANCE = "moe_router_dtype", "moe_layer_recompute", "moe_aux_loss_coeff"
SMALL_LOGITS, KIND = "moe_z_loss_coeff", "moe_router_load_balancing_type"
Balancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]
SINKHORN = "sinkhorn"
_WITHOUT_LOSS = {SINKHORN, "none"}
FLEX = "flex"  # Megatron's name for the kernels of DeepEP, which move the same tokens
# Options that say something about experts alone, and are read here; those that are not, and why.
EXPERT_OPTIONS = (
    EXPERTS_OVER,
    ONE_EXPERT_OVER,
    DISPATCHER,
    GROUPED,
    FROZEN,
    ROUTER_DTYPE,
    RECOMPUTED_LAYER,
    BALANCE,
    SMALL_LOGITS,
)
WHERE_THEY_GO = "tokens go where the model's own router sends them"
_NONE_DROPPED = "every token reaches its experts, in the sampler as here: none is dropped, whatever their number"
_NO_KERNELS = "layers are computed by megatron-core's own modules, without the kernels of Transformer Engine"


class ExpertOptions(Options):
    """Options about experts, in Megatron's words."""

    expert_model_parallel_size: Annotated[int, Strict()] | None = option(None, ge=1, fix="use 2")
    """Devices that share a layer's experts."""
    expert_tensor_parallel_size: Annotated[int, Strict()] | None = option(None, ge=1, fix="use 2")
    """Devices that share one expert's matrices; null: tensor_parallel."""
    moe_token_dispatcher_type: str | None = None
    """Route of tokens to the devices of their experts: alltoall (each to its own; also flex) or allgather (all to all)."""
    moe_grouped_gemm: bool = False
    """Compute all experts of a device in one product."""
    freeze_moe_router: bool = False
    """Leave routers as they were loaded."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = option(None, fix="use fp32, fp64 or null")
    """Precision of routers; null: that of the layers."""
    moe_layer_recompute: bool = False
    """Recompute layers of experts in the backward pass."""
    moe_aux_loss_coeff: float = option(0.0, ge=0.0, fix="use 0.01")
    """Weight of the loss that balances experts, of each layer: 1 where they are used evenly. Shares are those of the whole
    mini-batch."""
    moe_z_loss_coeff: float = option(0.0, ge=0.0, fix="use 0.001")
    """Weight of the loss that keeps routers' logits small, of each layer: the squared logsumexp, mean over learned tokens."""
    moe_router_load_balancing_type: Balancing | list[Balancing] | None = option(None, fix="use aux_loss or none")
    """Kind of balancing. Without a loss, whatever its weight: none, sinkhorn; one loss over the mini-batch: the others, null."""
    moe_router_score_function: Any = ignored(WHERE_THEY_GO)
    moe_router_pre_softmax: Any = ignored(WHERE_THEY_GO)
    moe_router_enable_expert_bias: Any = ignored(WHERE_THEY_GO)
    moe_router_bias_update_rate: Any = ignored(WHERE_THEY_GO)
    moe_expert_capacity_factor: Any = ignored(_NONE_DROPPED)
    moe_pad_expert_input_to_capacity: Any = ignored(_NONE_DROPPED)
    moe_token_drop_policy: Any = ignored(_NONE_DROPPED)
    moe_shared_expert_overlap: Any = ignored("shared experts are computed before tokens travel")
    moe_permute_fusion: Any = ignored(_NO_KERNELS)
    moe_permutation_async_comm: Any = ignored("tokens that travel are waited for")
    moe_enable_deepep: Any = ignored(f"{DISPATCHER} says how tokens travel: {' or '.join(DISPATCHERS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSettings:
    """Split of experts over devices, and their computation."""

    parallel: int = 1  # ranks that share a layer's experts
    tensor: int | None = None  # ranks that share one expert's matrices; None: as many as share those of other layers
    # How tokens reach their experts' ranks: each to its own (alltoall), or all to all of them (allgather).
    dispatcher: str = "alltoall"
    grouped: bool = False  # one product for all experts of a rank, instead of one after another
    router_dtype: str | None = None  # fp32 or fp64 of Megatron; None: that of the layers
    freeze_router: bool = False  # routers stay as they were loaded
    balance: float = 0.0  # weight of the loss that balances experts, of each layer
    small_logits: float = 0.0  # weight of the loss that keeps routers' logits small, of each layer

    def split(self, tensor: int) -> tuple[int, int]:
        """Return the ranks that share the experts, and one expert, where ``tensor`` share other matrices."""
        return self.parallel, tensor if self.tensor is None else self.tensor


def expert_settings(given: Mapping[str, Any], wheres: Mapping[str, str], problems: list[Problem]) -> ExpertSettings:
    """Make the settings of options and the places where these stand."""
    dispatcher = given.get(DISPATCHER) or "alltoall"
    dispatcher = "alltoall" if dispatcher == FLEX else dispatcher
    if dispatcher not in DISPATCHERS:
        what = f"{DISPATCHER}={dispatcher} takes kernels that this engine does not call"
        problems.append(Problem(what, fix=f"use {' or '.join(DISPATCHERS)}", field=wheres[DISPATCHER]))
    return ExpertSettings(
        parallel=given.get(EXPERTS_OVER, 1),
        tensor=given.get(ONE_EXPERT_OVER),
        dispatcher=dispatcher,
        grouped=bool(given.get(GROUPED)),
        router_dtype=given.get(ROUTER_DTYPE),
        freeze_router=bool(given.get(FROZEN)),
        balance=0.0 if balances_none(given) else given.get(BALANCE, 0.0),
        small_logits=given.get(SMALL_LOGITS, 0.0),
    )


def balances_none(given: Mapping[str, Any]) -> bool:
    """Return True when the kind of balancing, as Megatron reads it, has no loss."""
    kinds = given.get(KIND)
    return kinds is not None and set(kinds if isinstance(kinds, list) else [kinds]) <= _WITHOUT_LOSS


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
    """Check that a model's experts, or its having none, go with the sizes."""
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
