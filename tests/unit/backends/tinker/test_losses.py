"""Tinker's losses by hand, on two tokens of probability 1/2 and 1/4, sampled at 1/4 and 1/2: the ratios are 2 and 1/2."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from posttrain.backends.tinker.losses import LOSSES, check_loss, settings_of
from posttrain.backends.tinker.requests import Datum, LossRequest
from posttrain.data.chat_api import Refused

LN2 = math.log(2)


def request(loss: str, **inputs: object) -> LossRequest:
    config = inputs.pop("config", {})
    given = {name: np.array(value) for name, value in {"target_tokens": [1, 2], **inputs}.items()}
    return LossRequest(
        model_id="m",
        seq_id=1,
        data=(Datum(token_ids=(0, 1), inputs=given),),
        loss_fn=loss,
        config=config,  # type: ignore[arg-type]
    )


def loss_and_gradient(
    loss: str, config: dict[str, float] | None = None, **inputs: list[float]
) -> tuple[float, list[float]]:
    logprobs = torch.tensor([-LN2, -2 * LN2], requires_grad=True)
    given = {name: torch.tensor(value) for name, value in inputs.items()}
    settings = settings_of(request(loss, config=config or {}))
    total = LOSSES[loss].formula(logprobs, given, settings).sum()
    total.backward()
    assert logprobs.grad is not None
    return total.item(), logprobs.grad.tolist()


SAMPLED = {"logprobs": [-2 * LN2, -LN2], "advantages": [1.0, -1.0]}


def test_cross_entropy() -> None:
    # -(2 x -ln 2 + 0.5 x -2 ln 2) = 3 ln 2; the gradient is -w
    loss, gradient = loss_and_gradient("cross_entropy", weights=[2.0, 0.5])
    assert loss == pytest.approx(3 * LN2)
    assert gradient == pytest.approx([-2.0, -0.5])


def test_a_token_without_weight_takes_no_part_in_cross_entropy() -> None:
    infinite = torch.tensor([-LN2, -math.inf])
    loss = LOSSES["cross_entropy"].formula(infinite, {"weights": torch.tensor([1.0, 0.0])}, {}).sum()
    assert loss.item() == pytest.approx(LN2)


def test_importance_sampling() -> None:
    # -(2 x 1 + 0.5 x -1) = -1.5; d/dlogp of -r A is -r A
    loss, gradient = loss_and_gradient("importance_sampling", **SAMPLED)
    assert loss == pytest.approx(-1.5)
    assert gradient == pytest.approx([-2.0, 0.5])


def test_ppo() -> None:
    # A = 1: min(2, 1.2) = 1.2, clipped, no gradient; A = -1: min(-0.5, -0.8) = -0.8, clipped, too
    loss, gradient = loss_and_gradient("ppo", **SAMPLED)
    assert loss == pytest.approx(-1.2 + 0.8)
    assert gradient == pytest.approx([0.0, 0.0])
    # bounds 0.25 and 4 clip neither
    wide = {"clip_low_threshold": 0.25, "clip_high_threshold": 4.0}
    assert loss_and_gradient("ppo", wide, **SAMPLED)[0] == pytest.approx(-2 + 0.5)


def test_cispo() -> None:
    # weights 1.2 and 0.8 without gradient: -(1.2 x -ln 2 x 1 + 0.8 x -2 ln 2 x -1) = 1.2 ln 2 - 1.6 ln 2
    loss, gradient = loss_and_gradient("cispo", **SAMPLED)
    assert loss == pytest.approx(-0.4 * LN2)
    assert gradient == pytest.approx([-1.2, 0.8])


def test_dro() -> None:
    # log-ratios ln 2 and -ln 2: -(-ln 2 - -2 ln 2) + 0.1 / 2 x 2 ln2^2 = -ln 2 + 0.1 ln2^2; gradient -A + beta x log-ratio
    loss, gradient = loss_and_gradient("dro", {"beta": 0.1}, **SAMPLED)
    assert loss == pytest.approx(-LN2 + 0.1 * LN2**2)
    assert gradient == pytest.approx([-1 + 0.1 * LN2, 1 - 0.1 * LN2])


def test_gspo() -> None:
    # the mask marks the first token: s = 2 for both. Bounds 0.5 and 1.5: A = 1: min(2, 1.5); A = -1: min(-2, -1.5) = -2
    loss, gradient = loss_and_gradient(
        "gspo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}, **SAMPLED, sequence_ratio_mask=[1.0, 0.0]
    )
    assert loss == pytest.approx(-1.5 + 2)
    assert gradient == pytest.approx([0.0, 2.0])


@pytest.mark.parametrize(
    ("loss", "inputs", "told"),
    [
        ("sft", {}, "this server has no loss called 'sft'; it has cross_entropy, importance_sampling, ppo"),
        ("ppo", {"logprobs": [0.0, 0.0]}, "data[0] lacks advantages; ppo reads target_tokens, logprobs, advantages"),
        ("cross_entropy", {"weights": [1.0, 1.0], "mask": [1.0, 1.0]}, "data[0] has mask, which is not supported"),
        ("cross_entropy", {"weights": [1.0]}, "weights has the shape [1], and target_tokens [2]"),
        ("cross_entropy", {"weights": [1.0, math.nan]}, "weights holds a value that is not finite"),
        ("cross_entropy", {"weights": [1.0, 1.0], "target_tokens": [1, 9]}, "holds a token outside of 0 to 7"),
        ("cross_entropy", {"weights": [1.0], "target_tokens": [1]}, "target_tokens has the shape [1] for 2 tokens"),
        ("ppo", {"config": {"clip_low_threshold": 1.2}, **SAMPLED}, "clip_low_threshold is between 0 and 1"),
        ("ppo", {"config": {"clip_low": 0.5}, **SAMPLED}, "ppo has no setting called clip_low in loss_fn_config"),
        ("dro", SAMPLED, "dro needs a number for beta"),
    ],
)
def test_what_a_request_lacks_is_reported(loss: str, inputs: dict[str, object], told: str) -> None:
    with pytest.raises(Refused) as refused:
        check_loss(request(loss, **inputs), vocabulary=8, context=4)
    assert told in str(refused.value)


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(Refused, match="has 2 tokens; from 1 to 1 fit"):
        check_loss(request("cross_entropy", weights=[1.0, 1.0]), vocabulary=8, context=1)
