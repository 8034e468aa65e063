"""verl's names for metrics (spec: its section on metrics), from ours."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.dialects.metric_names import (
    Formula,
    Many,
    Step,
    epoch_from_0,
    policy_loss,
    token_mean,
    tokens_of_step,
    without,
)


def _ms_per_token(seconds: str, tokens: Formula) -> Formula:
    def value(step: Step) -> float:
        count = step[tokens] if isinstance(tokens, str) else tokens(step)
        return 1000 * step[seconds] / count

    return value


NAMES: Mapping[str, Formula] = {
    "actor/entropy": token_mean("policy/entropy", "loss.entropy_aggregation"),
    "actor/pg_loss": policy_loss,
    "actor/pg_clipfrac": "policy/clip_fraction",
    "actor/pg_clipfrac_lower": "policy/dual_clip_fraction",
    # theirs is the mean of -log r, ours has r - 1 - log r
    "actor/ppo_kl": lambda step: step["policy/kl_old"] - step["policy/ratio_mean"] + 1,
    "actor/kl_loss": token_mean("reference/kl", "loss.kl_aggregation"),
    "actor/kl_coef": lambda step: 0 * step["reference/kl"] + step.setting("loss.kl_coef"),
    "actor/grad_norm": "policy/grad_norm",
    "actor/lr": "policy/lr",
    "actor/reward_kl_penalty": "reward/kl",
    "actor/reward_kl_penalty_coeff": "reward/kl_coef",
    **{f"critic/score/{kind}": f"reward/{kind}" for kind in ("mean", "max", "min")},
    **{f"critic/rewards/{kind}": without("reward.kl.coef", f"reward/{kind}") for kind in ("mean", "max", "min")},
    **{f"critic/advantages/{kind}": f"advantage/{kind}" for kind in ("mean", "max", "min")},
    "critic/returns/mean": "critic/returns_mean",
    "critic/values/mean": "critic/values_mean",
    "critic/vf_loss": "critic/loss",
    "critic/vf_clipfrac": "critic/value_clip_fraction",
    "critic/vf_explained_var": "critic/explained_variance",
    **{f"response_length/{kind}": f"response/length_{kind}" for kind in ("mean", "max", "min")},
    "response_length/clip_ratio": "response/truncated_share",
    **{f"prompt_length/{kind}": f"prompt/length_{kind}" for kind in ("mean", "max", "min")},
    "timing_s/step": "time/step_s",
    "timing_s/gen": "time/rollout_s",
    "timing_s/reward": "time/reward_s",
    "timing_s/old_log_prob": without("loss.kl_coef", without("reward.kl.coef", "time/logprobs_s")),
    "timing_s/values": "time/values_s",
    "timing_s/update_critic": "time/critic_update_s",
    "timing_s/update_actor": "time/update_s",
    "timing_s/testing": "time/validation_s",
    "timing_per_token_ms/gen": _ms_per_token("time/rollout_s", "step/response_tokens"),
    "timing_per_token_ms/values": _ms_per_token("time/values_s", tokens_of_step),
    "timing_per_token_ms/update_critic": _ms_per_token("time/critic_update_s", tokens_of_step),
    "timing_per_token_ms/update_actor": _ms_per_token("time/update_s", tokens_of_step),
    "perf/total_num_tokens": tokens_of_step,
    "perf/time_per_step": "time/step_s",
    "perf/throughput": lambda step: tokens_of_step(step) / step["time/step_s"] / step.setting("placement.devices"),
    "training/global_step": lambda step: step.number,
    "training/epoch": epoch_from_0,
}


def validation(step: Step) -> dict[str, float]:
    """``val-core/<source>/reward/mean@N``, and best, worst, maj and std of k; those of all N and no std are core."""
    largest = step.setting("validation.samples_per_prompt")
    found = {}
    for source, name, count, value in step.validations():
        kind = name.removeprefix("reward_")
        if name == "reward_mean" and count is None and step[f"validation/{source}/invalid_share"] == 0:
            found[f"val-core/{source}/reward/mean@{largest}"] = value
        elif count is not None and kind in ("best", "worst", "maj", "std"):
            section = "val-core" if count == largest and kind in ("best", "maj") else "val-aux"
            found[f"{section}/{source}/reward/{kind}@{count}" + ("" if kind == "std" else "/mean")] = value
    return found


VALIDATION: tuple[Many, ...] = (validation,)

# Not here: critic/vpred_mean, which is of the values during the update, and training/rollout_probs_diff_*, which is of
# probabilities, where gap/ is of log-probs.
