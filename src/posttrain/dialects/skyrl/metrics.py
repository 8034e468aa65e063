"""SkyRL's names for metrics (spec: its section on metric names), from ours."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.dialects.metric_names import Formula, Many, Step, epoch_from_0, policy_loss, token_mean, without

NAMES: Mapping[str, Formula] = {
    "reward/avg_raw_reward": "reward/mean",
    "generate/avg_num_tokens": "response/length_mean",
    "generate/max_num_tokens": "response/length_max",
    "generate/min_num_tokens": "response/length_min",
    "generate/std_num_tokens": "response/length_std",
    "loss/avg_raw_rewards": without("reward.kl.coef", "reward/mean"),
    "loss/avg_final_rewards": without("reward.kl.coef", "reward/mean"),  # its name in 2026
    "loss/avg_raw_advantages": without("advantage.whiten", "advantage/mean"),
    "loss/avg_raw_advantages_abs": without("advantage.whiten", "advantage/abs_mean"),
    "loss/avg_kl": "reward/kl",
    "policy/policy_loss": policy_loss,
    "policy/final_loss": "policy/loss",
    "policy/policy_lr": "policy/lr",
    "policy/ppo_clip_ratio": "policy/clip_fraction",
    "policy/policy_entropy": "policy/entropy",
    "policy/policy_kl": token_mean("reference/kl"),
    "policy/raw_grad_norm": "policy/grad_norm",
    "critic/critic_loss": "critic/loss",
    "critic/critic_lr": "critic/lr",
    "critic/raw_grad_norm": "critic/grad_norm",
    "critic/values_clipfrac": "critic/value_clip_fraction",
    "trainer/epoch": epoch_from_0,
    "trainer/global_step": lambda step: step.number,
    "timing/step": "time/step_s",
    "timing/generate": "time/rollout_s",
    "timing/policy_train": "time/update_s",
    "timing/critic_train": "time/critic_update_s",
    "timing/eval": "time/validation_s",
}


def validation(step: Step) -> dict[str, float]:
    """``eval/<source>/avg_score``; with one data source also ``eval/all/avg_score``, which is a mean over responses."""
    rows = step.validations()
    scores = {source: value for source, name, count, value in rows if name == "reward_mean" and count is None}
    found = {f"eval/{source.replace('/', '_')}/avg_score": value for source, value in scores.items()}
    return found | ({"eval/all/avg_score": next(iter(scores.values()))} if len(scores) == 1 else {})


def held_out_loss(step: Step) -> dict[str, float]:
    """``eval/<name>/loss`` of each set of held-out rows, in supervised fine-tuning."""
    return {f"eval/{source}/loss": value for source, name, _, value in step.validations() if name == "loss"}


VALIDATION: tuple[Many, ...] = (validation, held_out_loss)
