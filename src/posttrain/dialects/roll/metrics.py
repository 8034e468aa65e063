"""ROLL's names for the metrics of its RLVR and DPO pipelines (spec: its section on metrics), from ours."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.dialects.metric_names import Formula, Many, Step, policy_loss, rewards_for_training, token_mean

KINDS = ("mean", "max", "min")


def of_pairs(metric: str) -> Formula:
    """A metric of a run that compares pairs; absent elsewhere."""

    def formula(step: Step) -> float:
        step["rewards/margins"]
        return step[metric]

    return formula


NAMES: Mapping[str, Formula] = {
    **{f"critic/score/{kind}": f"reward/{kind}" for kind in KINDS},
    **{f"critic/rewards/{kind}": rewards_for_training(f"reward/{kind}") for kind in KINDS},
    **{f"critic/advantages/{kind}": f"advantage/{kind}" for kind in KINDS},
    "critic/returns/mean": "critic/returns_mean",
    "critic/values/mean": "critic/values_mean",
    "critic/entropy/mean": "policy/entropy",
    "critic/kl": "reward/kl",
    "critic/kl_coef": "reward/kl_coef",
    "critic/reward_clip_frac": "reward/clip_fraction",
    "critic/clipfrac": "critic/value_clip_fraction",
    "actor/pg_loss": policy_loss,
    "actor/total_loss": "policy/loss",
    "actor/kl_loss": token_mean("reference/kl"),
    "actor/clipfrac": token_mean("policy/clip_fraction"),
    "actor/ratio_mean": "policy/ratio_mean",
    "actor/lr": "policy/lr",
    # of the DPO pipeline
    "actor/loss": of_pairs("policy/loss"),
    "time/actor_train": of_pairs("time/update_s"),
    "actor/acc": "rewards/accuracies",
    "actor/chosen_reward": "rewards/chosen",
    "actor/reject_reward": "rewards/rejected",
    "val/actor/acc": "validation/accuracy",
    "val/actor/chosen_reward": "validation/rewards/chosen",
    "val/actor/reject_reward": "validation/rewards/rejected",
    "time/cal_ref_log_probs": "time/reference_s",
    "actor_train/grad_norm": "policy/grad_norm",
    **{f"token/response_length/{kind}": f"response/length_{kind}" for kind in KINDS},
    **{f"token/prompt_length/{kind}": f"prompt/length_{kind}" for kind in KINDS},
    "time/step_generate": "time/rollout_s",
    "time/step_train": "time/update_s",
    "time/val_step": "time/validation_s",
    # ROLL counts steps from 0
    "system/global_step": lambda step: step.number - 1,
    "system/batch_size": "step/sequences",
    "system/samples": lambda step: step.number * step["step/sequences"],
}


def validation(step: Step) -> dict[str, float]:
    """``val_correct/<tag>/mean``, the share of right responses; with one tag also that of all."""
    shares = {source: value for source, name, count, value in step.validations() if (name, count) == ("accuracy", None)}
    found = {f"val_correct/{source}/mean": value for source, value in shares.items()}
    return found | ({"val_correct/all/mean": next(iter(shares.values()))} if len(shares) == 1 else {})


VALIDATION: tuple[Many, ...] = (validation,)
