"""Stand-ins for ``verl.trainer.ppo.core_algos``, for functions that users write for it.

Registering is a no-op: the configuration finds a function by its decorator in the source. ``agg_loss`` leaves the loss of every
token as it is, because our objective aggregates over the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from posttrain.algos.advantages.grpo import grpo
from posttrain.algos.kl import token_kl
from posttrain.errors import Problem, RequestError

F = TypeVar("F", bound=Callable[..., Any])
TOKEN_MEAN = "token-mean"
_KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
_mode: ContextVar[str] = ContextVar("_mode", default=TOKEN_MEAN)


_NAMES = (
    *(
        "gae",
        "grpo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "rloo",
        "opo",
        "grpo_passk",
        "gpg",
    ),
    *("rloo_vectorized", "grpo_vectorized", "optimal_token_baseline", "tir_optimal_token_baseline", "gdpo"),
)
AdvantageEstimator = Enum("AdvantageEstimator", {name.upper(): name for name in _NAMES}, type=str)  # type: ignore[misc]


def register_adv_est(name_or_enum: Any) -> Callable[[F], F]:
    """Decorator of an estimator."""
    return lambda function: function


def register_policy_loss(name: str) -> Callable[[F], F]:
    """Decorator of a loss."""
    return lambda function: function


@contextmanager
def aggregated_by(mode: str) -> Iterator[None]:
    """While a loss runs: the aggregation that the run does afterwards."""
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def running_aggregation() -> str:
    """The aggregation, by the peer's name, of the run whose loss is being called."""
    return _mode.get()


def agg_loss(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str = "", **_: Any) -> Tensor:
    """The losses [B, T] as they are, 0 where ``loss_mask`` is 0.

    Raises: RequestError for another aggregation than the run's: a function may ask for its own.
    """
    if loss_agg_mode and loss_agg_mode != running_aggregation():
        what = f"the loss aggregates by {loss_agg_mode}, and the run by {running_aggregation()}"
        fix = f"set actor_rollout_ref.actor.loss_agg_mode={loss_agg_mode} (loss.aggregation), which the run then does"
        raise RequestError(Problem(what, fix=fix, field="loss.aggregation"))
    return torch.where(loss_mask.bool(), loss_mat, 0.0)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """verl's estimates of the KL per token, by verl's names."""
    name = kl_penalty.removesuffix("+")
    estimator = _KL.get(name, name) + ("+" if kl_penalty.endswith("+") else "")
    return token_kl(estimator, logprob, ref_logprob, torch.ones_like(logprob, dtype=torch.bool))


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """GRPO's advantages [B, T], twice, as estimators that build on verl's call it."""
    groups = torch.from_numpy(np.unique(np.asarray(index), return_inverse=True)[1])
    valid = torch.ones(len(groups), dtype=torch.bool)
    found = grpo(
        token_level_rewards.sum(dim=1),
        valid,
        groups,
        response_mask.bool(),
        normalize_by_std=norm_adv_by_std_in_grpo,
        lone_sample_keeps_reward=True,
    )
    return found, found
