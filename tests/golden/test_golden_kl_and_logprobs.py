"""KL estimators and controllers, log-probs, entropy and learning-rate schedules, against verl's and SkyRL's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batches import sequence_batch
from posttrain.algos import logprobs, schedules
from posttrain.algos.kl import token_kl
from posttrain.algos.kl_control import next_kl_coef
from posttrain.algos.kl_reward import penalize_kl
from posttrain.algos.objective import aggregate
from posttrain.data.packing import pack
from posttrain.records.batches import LossCounts

ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def ours(estimator: str) -> str:
    base = estimator.removesuffix("+")
    return ESTIMATORS.get(base, base) + estimator[len(base) :]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.golden("kl.json")
def test_kl_estimators(case: Any, dtype: torch.dtype) -> None:
    mask, ref = case.mask(), case.tensor("ref_logprobs", dtype)
    for estimator, expected in case.outputs["value"].items():
        policy = case.tensor("policy_logprobs", dtype).requires_grad_()
        kl = token_kl(ours(estimator), policy, ref, mask)
        case.check(kl, expected)
        assert (kl[~mask] == 0).all()
        (gradient,) = torch.autograd.grad(kl.sum(), policy)
        case.check(gradient, case.outputs["grad"][estimator])
        assert (gradient[~mask] == 0).all()


@pytest.mark.golden("kl_value_skyrl.json", "kl_")
def test_skyrl_kl(case: Any) -> None:
    mask = case.mask()
    for estimator, expected in case.outputs["value"].items():
        kl = token_kl(ours(estimator), case.tensor("policy_logprobs"), case.tensor("ref_logprobs"), mask)
        case.check(kl, expected)
        counts = LossCounts(tokens=int(mask.sum()), sequences=len(mask))
        case.check(aggregate(kl, mask, "sequence_mean_token_mean", counts), case.outputs["kl_loss"][estimator])


@pytest.mark.golden("kl_control.json", "fixed", "adaptive")
def test_kl_controllers(case: Any) -> None:
    check_controller(case)


@pytest.mark.golden("kl_value_skyrl.json", "adaptive")
def test_skyrl_kl_controller(case: Any) -> None:
    check_controller(case)


def check_controller(case: Any) -> None:
    coefficients = [case.params["kl_coef"]]
    for step in case.inputs["steps"]:
        kl, sequences = (step["kl"], step["sequences"]) if isinstance(step, dict) else step
        coefficients.append(
            next_kl_coef(
                coefficients[-1],
                kl,
                sequences,
                target_kl=case.params.get("target_kl"),
                horizon=case.params.get("horizon", 1),
            )
        )
    case.check(coefficients, case.outputs["coefficient"])


@pytest.mark.golden("kl_control.json", "reward")
def test_kl_in_the_reward(case: Any) -> None:
    mask, params = case.mask(), case.params
    tokens = token_kl(ours(params["estimator"]), case.tensor("old_logprobs"), case.tensor("ref_logprobs"), mask)
    rewards, _, kl = penalize_kl(case.tensor("token_scores"), tokens, mask, kl_coef=params["kl_coef"])
    case.check(rewards, case.outputs["token_rewards"])
    case.check(kl, case.outputs["kl"])
    assert case.outputs["coefficient_used"] == params["kl_coef"]
    after = next_kl_coef(
        params["kl_coef"], kl, len(mask), target_kl=params.get("target_kl"), horizon=params.get("horizon", 1)
    )
    case.check(after, case.outputs["coefficient_after"])


@pytest.mark.golden("logprobs_entropy.json", "random", "temperature", "huge_spread", "uniform", "forbidden")
def test_logprobs_and_entropy(case: Any) -> None:
    shape = torch.tensor(case.inputs["labels"]).shape
    leaf = case.tensor("logits").requires_grad_()
    scores = logprobs.log_probabilities(leaf.flatten(0, 1), case.params["temperature"])
    drawn = logprobs.token_logprobs(scores, torch.tensor(case.inputs["labels"]).flatten())
    entropy = logprobs.entropy(scores)
    case.check(drawn.view(shape), case.outputs["logprobs"])
    case.check(entropy.view(shape), case.outputs["entropy"])
    case.check(logprobs.sum_pi_squared(scores).view(shape), case.outputs["sum_pi_squared"])
    for name, total in (("grad_sum_logprobs", drawn.sum()), ("grad_sum_entropy", entropy.sum())):
        case.check(torch.autograd.grad(total, leaf, retain_graph=True)[0], case.outputs[name])


@pytest.mark.golden("logprobs_entropy.json", "response_shift")
def test_a_response_token_is_predicted_one_position_earlier(case: Any) -> None:
    """Which of a sequence's logits belong to which response token is decided where rows are packed."""
    tokens, response = torch.tensor(case.inputs["input_ids"]), case.params["response_length"]
    rows, length = tokens.shape
    batch = sequence_batch(
        tokens=tokens,
        prompt_lengths=torch.full((rows,), length - response),
        response_mask=torch.ones(rows, response, dtype=torch.bool),
        rollout_logprobs=torch.zeros(rows, response),
        group_index=torch.arange(rows),
    )
    packed = pack(batch)
    scores = logprobs.log_probabilities(
        case.tensor("logits").flatten(0, 1)[packed.predicting], case.params["temperature"]
    )
    case.check(packed.unpack(logprobs.token_logprobs(scores, packed.targets)), case.outputs["response_logprobs"])


@pytest.mark.golden("lr_schedules.json")
def test_learning_rate_schedules(case: Any) -> None:
    params = case.params
    kind = {"wsd": "warmup_stable_decay"}.get(params["kind"], params["kind"])
    given = {"warmup_updates": params["num_warmup_steps"]}
    if kind != "constant":
        given |= {"total_updates": params["num_training_steps"], "min_lr_ratio": params.get("min_lr_ratio", 0.0)}
    if "stable_ratio" in params:
        given["stable_ratio"] = params["stable_ratio"]
    schedule = getattr(schedules, kind)
    case.check([schedule(update, **given) for update in range(case.inputs["steps"])], case.outputs["multiplier"])
