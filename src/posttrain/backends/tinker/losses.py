"""Tinker's losses: sums over the tokens of a datum, from the policy losses of this project where the formulas agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.algos.losses.ppo_clip import clipped_surrogate
from posttrain.algos.ratio import LOG_RATIO_LIMIT
from posttrain.backends.tinker.requests import Datum, LossRequest
from posttrain.data.chat_api import Refused
from posttrain.registry import POLICY_LOSSES

# (log-probs of the targets, inputs by name, settings) -> loss per token
Formula = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerLoss:
    """A loss by Tinker's name."""

    formula: Formula
    inputs: tuple[str, ...]  # besides target_tokens, all required
    settings: Mapping[str, float | None]  # of loss_fn_config, with their defaults; None: required
    several_targets: bool = False  # [N, K] targets


def _cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """-w log p per token; a weight of 0 takes no part, whatever the log-prob."""
    weights = inputs["weights"]
    return torch.where(weights != 0, -weights * logprobs, 0.0)


def _policy(name: str, rename: Callable[[Mapping[str, float]], dict[str, float]]) -> Formula:
    """Return a policy loss of this project over every token."""

    def formula(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
        everywhere = torch.ones_like(logprobs, dtype=torch.bool)[None]
        given: Any = POLICY_LOSSES.get(name)
        loss: Tensor = given(
            logprobs[None], inputs["logprobs"][None], inputs["advantages"][None], everywhere, **rename(settings)
        )[0][0]
        return loss

    return formula


def _clips(settings: Mapping[str, float]) -> dict[str, float]:
    """Tinker bounds the ratio itself; here the settings are its distances from 1."""
    return {
        "clip_ratio_low": 1 - settings["clip_low_threshold"],
        "clip_ratio_high": settings["clip_high_threshold"] - 1,
    }


def _gspo(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """PPO's clipped loss, where every token's ratio has the value s = exp(mean log-ratio of the tokens that sequence_ratio_mask
    marks), and the gradient of s x its own log-prob (arXiv:2507.18071, GSPO-token). Tokens outside of the mask count, too."""
    marked = inputs["sequence_ratio_mask"] != 0
    distance = torch.where(marked, logprobs.detach() - inputs["logprobs"], 0.0)
    mean = (distance.sum() / marked.sum().clamp(min=1)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = (mean + logprobs - logprobs.detach()).exp()
    clips = _clips(settings)
    return clipped_surrogate(ratio, inputs["advantages"], clips["clip_ratio_low"], clips["clip_ratio_high"])[0]


_SAMPLED = ("logprobs", "advantages")
_THRESHOLDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: dict[str, TinkerLoss] = {
    "cross_entropy": TinkerLoss(formula=_cross_entropy, inputs=("weights",), settings={}, several_targets=True),
    "importance_sampling": TinkerLoss(
        formula=_policy("importance_sampling", lambda settings: {}), inputs=_SAMPLED, settings={}
    ),
    "ppo": TinkerLoss(formula=_policy("ppo_clip", _clips), inputs=_SAMPLED, settings=_THRESHOLDS),
    "cispo": TinkerLoss(formula=_policy("cispo", _clips), inputs=_SAMPLED, settings=_THRESHOLDS),
    "dro": TinkerLoss(
        formula=_policy("dro", lambda settings: {"dro_beta": settings["beta"]}),
        inputs=_SAMPLED,
        settings={"beta": None},
    ),
    "gspo": TinkerLoss(
        formula=_gspo,
        inputs=(*_SAMPLED, "sequence_ratio_mask"),
        settings={"clip_low_threshold": None, "clip_high_threshold": None},
    ),
}
_CUSTOM = "; a loss of your own runs in the client: forward_backward_custom"


def check_loss(request: LossRequest, vocabulary: int, context: int) -> None:
    """Raises: Refused for everything in a request that can be seen before it is computed."""
    loss = LOSSES.get(request.loss_fn)
    if loss is None:
        known = ", ".join(LOSSES)
        raise Refused(f"this server has no loss called {request.loss_fn!r}; it has {known}{_CUSTOM}")
    settings_of(request)
    if not request.data:
        raise Refused("the request has no data")
    for place, datum in enumerate(request.data):
        _check_datum(f"data[{place}]", request.loss_fn, loss, datum, vocabulary, context)


def settings_of(request: LossRequest) -> dict[str, float]:
    """Return the settings of a request's loss, defaults included. Raises: Refused for unknown, missing and wrong ones."""
    loss = LOSSES[request.loss_fn]
    if unknown := sorted(request.config.keys() - loss.settings.keys()):
        has = f"it has {', '.join(loss.settings)}" if loss.settings else "it has none"
        raise Refused(f"{request.loss_fn} has no setting called {unknown[0]} in loss_fn_config; {has}")
    settings: dict[str, float] = {}
    for name, default in loss.settings.items():
        value = request.config.get(name, default)
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise Refused(f"{request.loss_fn} needs a number for {name} in loss_fn_config")
        settings[name] = float(value)
    low, high = settings.get("clip_low_threshold", 0.0), settings.get("clip_high_threshold", 1.0)
    if not 0 <= low <= 1 <= high:
        raise Refused(
            "clip_low_threshold is between 0 and 1, and clip_high_threshold at least 1: they bound the ratio itself"
        )
    if settings.get("beta", 1.0) <= 0:
        raise Refused("beta of dro is above 0")
    return settings


def _check_datum(where: str, name: str, loss: TinkerLoss, datum: Datum, vocabulary: int, context: int) -> None:
    size = len(datum.token_ids)
    if not 0 < size <= context:
        raise Refused(f"{where} has {size} tokens; from 1 to {context} fit")
    wanted = ("target_tokens", *loss.inputs)
    missing = [each for each in wanted if each not in datum.inputs]
    unknown = sorted(datum.inputs.keys() - set(wanted))
    if missing or unknown:
        told = f"{where} lacks {missing[0]}" if missing else f"{where} has {unknown[0]}, which is not supported"
        raise Refused(f"{told}; {name} reads {', '.join(wanted)}")
    targets = datum.inputs["target_tokens"]
    if targets.ndim not in ((1, 2) if loss.several_targets else (1,)) or len(targets) != size or not targets.size:
        raise Refused(
            f"{where}: target_tokens has the shape {list(targets.shape)} for {size} tokens; one per token is needed"
        )
    if targets.dtype.kind != "i":
        raise Refused(f"{where}: target_tokens are no whole numbers")
    for given in (targets, np.array(datum.token_ids)):
        if given.min() < 0 or given.max() >= vocabulary:
            raise Refused(f"{where} holds a token outside of 0 to {vocabulary - 1}")
    for each in loss.inputs:
        value = datum.inputs[each]
        if value.shape != targets.shape:
            raise Refused(f"{where}: {each} has the shape {list(value.shape)}, and target_tokens {list(targets.shape)}")
        if not np.isfinite(value).all():
            raise Refused(f"{where}: {each} holds a value that is not finite")
