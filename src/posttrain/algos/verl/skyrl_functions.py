"""Stand-ins for the tensor functions of SkyRL's ``ppo_utils``, for losses that users write for it.

Where SkyRL reduces a loss to a number or weighs it by the sampler's log-probs, these leave the loss of every token as it is: our
objective does both over the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posttrain.algos.kl import token_kl
from posttrain.algos.losses.ppo_clip import ppo_clip
from posttrain.algos.verl.core_algos import running_aggregation
from posttrain.errors import Problem, RequestError


def reduce_loss(loss: Tensor, loss_mask: Tensor | None, loss_reduction: str = "", *_: Any, **__: Any) -> Tensor:
    """The losses [B, T] as they are, 0 where ``loss_mask`` is 0.

    Raises: RequestError for another reduction than the run's, which SkyRL up to March 2026 lets a loss choose.
    """
    if loss_reduction and loss_reduction != running_aggregation():
        what = f"the loss reduces by {loss_reduction}, and the run by {running_aggregation()}"
        fix = f"set trainer.algorithm.loss_reduction={loss_reduction} (loss.aggregation), which the run then does"
        raise RequestError(Problem(what, fix=fix, field="loss.aggregation"))
    return loss if loss_mask is None else torch.where(loss_mask.bool(), loss, 0.0)


def masked_mean(tensor: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """The mean over the entries whose mask is set, of all or along one dimension; 0 without one."""
    if mask is None:
        return tensor.mean() if dim is None else tensor.mean(dim=dim)
    kept = torch.where(mask.bool(), tensor, 0.0)
    total, count = (kept.sum(), mask.sum()) if dim is None else (kept.sum(dim=dim), mask.sum(dim=dim))
    return total / count.clamp(min=1)


def safe_exp_delta(delta: Tensor, clip: float = 20.0, out_dtype: torch.dtype | None = None) -> Tensor:
    """exp of log-ratios that are clamped to +-clip nats."""
    return delta.clamp(-clip, clip).exp().to(out_dtype or delta.dtype)


def apply_off_policy_correction(
    loss: Tensor, old_log_probs: Tensor, rollout_logprobs: Tensor | None, loss_mask: Tensor | None, *_: Any, **__: Any
) -> tuple[Tensor, Tensor | None, dict[str, float]]:
    """The losses and the mask as they are: the run applies ``off_policy_correction`` to what the function returns."""
    return loss, loss_mask, {}


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    loss_mask: Tensor | None = None,
    use_kl_estimator_k3: bool = False,
    use_abs_kl: bool = False,
    kl_estimator_type: str = "",
) -> Tensor:
    """SkyRL's estimates of the KL per token [B, T], by SkyRL's names."""
    kind = kl_estimator_type or ("k3" if use_kl_estimator_k3 else "abs" if use_abs_kl else "k1")
    mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
    return token_kl(kind, log_probs, log_probs_base, mask)


def ppo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """SkyRL's ``regular`` or ``dual_clip`` loss of every token [B, T], as losses that build on it call it."""
    mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
    dual = config.get("clip_ratio_c") if "dual_clip" in (_name_in(config, "policy"), _name_in(config, "ppo")) else None
    loss, report = ppo_clip(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        clip_ratio_low=config.eps_clip_low,
        clip_ratio_high=config.eps_clip_high,
        dual_clip=dual,
    )
    return loss, {"clip_ratio": masked_mean(report["clip_fraction"], mask)}


def _name_in(config: Any, which: str) -> Any:
    return config.get(f"{which}_loss_type")


NAMES: Mapping[str, Any] = {
    each.__name__: each
    for each in (
        reduce_loss,
        masked_mean,
        safe_exp_delta,
        apply_off_policy_correction,
        compute_approx_kl,
        ppo_policy_loss,
    )
}
