"""Policy losses written for SkyRL, against the same functions called as SkyRL calls them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from posttrain.algos.objective import aggregate
from posttrain.errors import RequestError
from posttrain.libraries.skyrl_modules import standing_in
from posttrain.records.batches import LossCounts
from posttrain.registry import POLICY_LOSSES
from posttrain.user_files import import_path

PROGRAM = """
import torch
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.utils.off_policy_correction_utils import apply_off_policy_correction
from skyrl_train.utils.ppo_utils import PolicyLossRegistry, ppo_policy_loss, reduce_loss, register_policy_loss
from skyrl_train.utils.torch_utils import masked_mean, safe_exp_delta


@register_policy_loss("leaky")
def leaky(new, before, adv, config, loss_mask=None, rollout_logprobs=None):
    ratio = safe_exp_delta(new - before, clip=20.0, out_dtype=new.dtype)
    clipped = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high) + config.leak * ratio
    loss = -torch.min(ratio * adv, clipped * adv)
    share = masked_mean((clipped < ratio).float(), loss_mask).detach().item()
    loss, loss_mask, metrics = apply_off_policy_correction(loss, before, rollout_logprobs, loss_mask, config.off)
    return reduce_loss(loss, loss_mask, config.loss_reduction, config.max_seq_len), {"leaking": share, **metrics}


def reinforce(log_probs, old_log_probs, advantages, config, loss_mask=None):
    return (-log_probs * advantages).mean(), 0.0


def add_up(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    return -(log_probs * advantages * loss_mask).sum(), {}


def upon_theirs(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    loss, metrics = ppo_policy_loss(log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs)
    return loss, metrics


def by_sequence(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    return reduce_loss(-log_probs * advantages, loss_mask, "sequence_mean"), {}


PolicyLossRegistry.register("reinforce_mean", reinforce)
PolicyLossRegistry.register("summed", add_up)
PolicyLossRegistry.register("upon", upon_theirs)
PolicyLossRegistry.register("sequences", by_sequence)
"""
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.bool)
CONFIG = {"eps_clip_low": 0.2, "eps_clip_high": 0.3, "leak": 0.1, "off": None, "max_seq_len": 5}
COUNTS = LossCounts(sequences=4, tokens=8)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    return (values * mask).sum(dim) / mask.sum(dim) if dim is not None else (values * mask).sum() / mask.sum()


def reduce_loss(loss: Tensor, mask: Tensor, reduction: str, longest: int | None = None) -> Tensor:
    """SkyRL's three reductions until March 2026, as its documentation states them."""
    if reduction == "token_mean":
        return masked_mean(loss, mask)
    if reduction == "sequence_mean":
        return masked_mean(loss, mask, -1).mean()
    assert longest is not None
    return ((loss * mask).sum(-1) / longest).mean()


THEIRS: dict[str, Any] = {
    "reduce_loss": reduce_loss,
    "masked_mean": masked_mean,
    "safe_exp_delta": lambda delta, clip, out_dtype: delta.clamp(-clip, clip).exp().to(out_dtype),
    "apply_off_policy_correction": lambda loss, old, rollout, mask, config: (loss, mask, {}),
}


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "main_mine.py").write_text(PROGRAM)
    return str(tmp_path / "main_mine.py")


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {name: torch.randn(4, 3) for name in ("policy_logprobs", "old_logprobs", "rollout_logprobs", "advantages")}
    found["advantages"] = torch.where(MASK, found["advantages"], 0.0)  # as SkyRL's are
    return found | {"mask": MASK}


def theirs(program: str, function: str) -> Callable[..., Any]:
    copy = Path(program).with_name("theirs.py")  # a module is imported once
    copy.write_text(PROGRAM)
    with standing_in(THEIRS):
        found: Callable[..., Any] = getattr(import_path(str(copy)), function)
    return found


def ours(program: str, name: str, tensors: dict[str, Tensor], rows: slice = slice(None), **config: Any) -> Any:
    described = POLICY_LOSSES.describe(name, program)
    given = [tensors[each][rows] for each in described.inputs]
    return POLICY_LOSSES.get(name, program)(*given, config={**CONFIG, **config})


@pytest.mark.parametrize(
    ("reduction", "mode"),
    [
        ("token_mean", "token_mean"),
        ("sequence_mean", "sequence_mean_token_mean"),
        ("seq_mean_token_sum_norm", "sequence_mean_token_sum_norm"),
    ],
)
def test_the_whole_mini_batch_is_what_their_function_returns(
    program: str, tensors: dict[str, Tensor], reduction: str, mode: str
) -> None:
    """And so is the gradient, for any cut into micro-batches."""
    policy = tensors["policy_logprobs"].requires_grad_()
    config = OmegaConf.create({**CONFIG, "loss_reduction": reduction})
    direct, metrics = theirs(program, "leaky")(
        policy, tensors["old_logprobs"], tensors["advantages"], config=config, loss_mask=MASK.float(),
        rollout_logprobs=tensors["rollout_logprobs"],
    )  # fmt: skip
    (expected,) = torch.autograd.grad(direct, policy)
    whole = torch.zeros(())
    for rows in (slice(0, 1), slice(1, 4)):
        losses, _ = ours(program, "leaky", tensors, rows, loss_reduction=reduction)
        whole = whole + aggregate(losses, MASK[rows], mode, COUNTS, norm_tokens=5)
    torch.testing.assert_close(whole, direct)
    torch.testing.assert_close(torch.autograd.grad(whole, policy)[0], expected)
    _, report = ours(program, "leaky", tensors, loss_reduction=reduction)
    assert report["leaking"][0, 0] == pytest.approx(metrics["leaking"])


def test_a_mean_of_its_own_stays_that_number(program: str, tensors: dict[str, Tensor]) -> None:
    """SkyRL's released example: the mean over the padded matrix, 12 places, of which 8 hold a token."""
    losses, report = ours(program, "reinforce_mean", tensors)
    direct, _ = theirs(program, "reinforce")(
        tensors["policy_logprobs"], tensors["old_logprobs"], tensors["advantages"], config=None, loss_mask=MASK
    )
    assert losses[MASK].tolist() == pytest.approx([float(direct)] * 8) and not losses[~MASK].any()
    products = (tensors["policy_logprobs"] * tensors["advantages"])[MASK]
    assert float(direct) == pytest.approx(-float(products.sum()) / 12, rel=1e-5)
    assert not report["clip_fraction"].any()


def test_a_sum_is_the_mean_over_tokens(program: str, tensors: dict[str, Tensor]) -> None:
    """As SkyRL's trainer makes it since April 2026, which divides the advantages by the tokens of the mini-batch."""
    direct, _ = theirs(program, "add_up")(
        tensors["policy_logprobs"], None, tensors["advantages"] / 8, config=None, loss_mask=MASK.float()
    )
    parts = [ours(program, "summed", tensors, rows)[0] for rows in (slice(0, 2), slice(2, 4))]
    assert float(torch.cat(parts).sum()) / 8 == pytest.approx(float(direct), rel=1e-5)


def test_their_own_loss_is_there_to_build_on(program: str, tensors: dict[str, Tensor]) -> None:
    losses, report = ours(program, "upon", tensors, policy_loss_type="dual_clip", clip_ratio_c=3.0)
    ratio, advantages = torch.exp(tensors["policy_logprobs"] - tensors["old_logprobs"]), tensors["advantages"]
    expected = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.3))
    expected = torch.where(advantages < 0, torch.min(expected, -3.0 * advantages), expected)
    torch.testing.assert_close(losses, torch.where(MASK, expected, 0.0))
    assert 0 < report["clip_ratio"][0, 0] < 1


def test_another_reduction_than_the_runs_is_one_error(program: str, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(RequestError, match=r"reduces by sequence_mean, and the run by token_mean.*loss_reduction=seq"):
        ours(program, "sequences", tensors, loss_reduction="token_mean")
    losses, _ = ours(program, "sequences", tensors, loss_reduction="sequence_mean")
    torch.testing.assert_close(losses, -tensors["policy_logprobs"] * tensors["advantages"])
