"""The top level: advantages, rewards after scoring, KL, loss, masks, correction of the sampler's gap, distillation."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned
from posttrain.dialects.roll.keys.worker import FIRST, LATEST

Norm = Literal["batch", "group", "running", "None"] | None  # the text None stands in many of ROLL's files, for null
_NORM = "reward.normalize_mean reward.normalize_std"
_OPD = "on-policy distillation"
_TOPR = "a loss on bad responses beside the policy's; actor_train.pg_variant=topr has both in its place"
_SFT = (
    "ROLL also multiplies by the probability of the whole response, which is next to nothing for all but the shortest."
)

_ADVANTAGE: tuple[Key, ...] = (
    mapped("pretrain", str | None, None, "model.path reference.path", "model of the policy and the reference where they name "
           "none", by_rule=True, note="ROLL gives it to all roles as soon as one names no model; here to those that name none."),
    mapped("reward_pretrain", str | None, None, "critic.path", "model of the critic where it names none", by_rule=True),
    mapped(
        "adv_estimator",
        Literal["gae", "reinforce", "grpo", "gigpo", "step_reinforce", "agentic_reinforce"], "gae",
        "advantage.name advantage.normalize_by_std reward.normalize_mean reward.normalize_std",
        "advantage estimator; gae has a critic", by_rule=True,
        change="gigpo and step_reinforce are reinforce, as in RLVR; grpo with gamma, a clip or a KL in the reward: reinforce on "
        "rewards normalised by the group",
    ),
    mapped("ppo_epochs", int, 1, "policy.epochs_per_step critic.epochs_per_step", "passes of the policy over a step; the "
           "critic makes one", by_rule=True),
    mapped("gamma", float, 1.0, "advantage.gamma", "discount per token", by_rule=True),
    mapped("lambd", float, 0.95, "advantage.gae_lambda", "gae: lambda", by_rule=True),
    mapped("whiten_rewards", bool, False, "advantage.whiten_rewards", "bring token rewards to mean 0 and variance 1",
           by_rule=True, note="Per domain in ROLL; here over the step."),
    mapped("whiten_advantages", bool, False, "advantage.whiten", "bring advantages to mean 0 and variance 1", by_rule=True,
           change="over the tokens of the loss, for gae too", note="Per domain in ROLL; here over the step."),
    mapped("advantage_clip", float | None, None, "advantage.clip", "cut advantages to plus or minus this", by_rule=True,
           change="0: null"),
    mapped("reward_clip", float | None, None, "reward.clip", "cut rewards to plus or minus this", by_rule=True,
           change="0: null", note="ROLL cuts a second time after the KL; here once, before it."),
    mapped("norm_mean_type", Norm, None, "reward.normalize_mean", "subtract the mean reward of the step, the group or the run",
           by_rule=True, since=LATEST, note="ROLL fails with running; here it works. Per domain in ROLL, here over the step."),
    mapped("norm_std_type", Norm, None, "reward.normalize_std", "divide by the standard deviation of the step, the group or "
           "the run", by_rule=True, since=LATEST, note="ROLL fails with group when the mean is not group too; here it works."),
    mapped("reward_norm", Norm, None, _NORM, "the name of mid-2025: normalise by mean and standard deviation", by_rule=True,
           note="ROLL of 2026 drops it in silence; here it works."),
    mapped("reward_shift", bool, False, _NORM, "with reward_norm: the mean only", by_rule=True,
           note="ROLL of 2026 drops it in silence; here it works, for grpo too."),
    mapped("reward_scale", bool, False, _NORM, "with reward_norm running: the standard deviation only", by_rule=True,
           note="ROLL of 2026 drops it in silence; here it works."),
    ignored("use_reward_scaling", bool, False, "ROLL does not read it", "nothing"),
    ignored("use_reward_norm", bool, False, "ROLL does not read it", "nothing"),
    ignored("add_len_reward", bool, False, "ROLL does not read it", "nothing"),
)  # fmt: skip

_KL: tuple[Key, ...] = (
    mapped("kl_penalty", Literal["kl", "abs", "mse", "full"], "kl", "reward.kl.estimator",
           "estimator of the KL in the reward", by_rule=True, change="kl: k1, abs: abs, mse: k2; full is refused"),
    mapped("init_kl_coef", float, 0.2, "reward.kl.coef", "weight of the KL in the reward at the start", by_rule=True,
           note="Above 0 ROLL loads a reference even where no KL is used; here only add_token_level_kl and use_kl_loss do."),
    mapped("target_kl", float | None, None, "reward.kl.target", "steer that weight towards this KL; null: keep it",
           by_rule=True, note="ROLL steers once per domain; here once per step."),
    mapped("kl_horizon", int, 10000, "reward.kl.horizon_sequences", "how slowly it is steered, in sequences", by_rule=True),
    mapped("add_token_level_kl", bool, False, "reward.kl.coef", "subtract the KL from token rewards", by_rule=True),
    mapped("use_kl_loss", bool, False, "loss.kl_coef", "add the KL (k3) to the loss", by_rule=True),
    mapped("kl_loss_coef", float, 0.0, "loss.kl_coef", "weight of the KL in the loss", by_rule=True),
    ignored("enable_reference", bool, False, "a reference is loaded where a KL is asked for", "load a reference",
            since=LATEST),
    ignored("enable_old_logprobs_recompute", bool, False, "old log-probs are computed where a step has several updates",
            "compute old log-probs", since=LATEST),
    ignored("force_disable_old_logprobs_recompute", bool, False,
            "old log-probs are computed where a step has several updates", "never compute old log-probs", since=LATEST),
)  # fmt: skip

_LOSS: tuple[Key, ...] = (
    mapped("pg_clip", float, 0.2, "loss.clip_ratio_low loss.clip_ratio_high loss.dual_clip", "the ratio is clipped to 1 plus "
           "or minus this", by_rule=True),
    mapped("use_pg_clip_range", bool, False, "loss.clip_ratio_low loss.clip_ratio_high", "clip by the next two instead",
           by_rule=True, since=LATEST),
    mapped("pg_clip_low", float, 0.2, "loss.clip_ratio_low", "the ratio is clipped below at 1 - this", by_rule=True,
           since=LATEST),
    mapped("pg_clip_high", float, 0.2, "loss.clip_ratio_high", "the ratio is clipped above at 1 + this", by_rule=True,
           since=LATEST),
    mapped("dual_clip_loss", bool, False, "loss.dual_clip", "bound the loss of negative advantages", by_rule=True,
           change="true: 1 + 2 x pg_clip", note="The paper's usual bound is 3; ROLL's is 1.4 at its default."),
    mapped("importance_sampling", Literal["token", "seq"], "token", "loss.name", "one ratio per token, or per response (GSPO)",
           by_rule=True, change="seq: gspo", since=LATEST),
    mapped(
        "loss_agg_mode",
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"], "seq-mean-token-mean",
        "loss.aggregation loss.norm_tokens", "how token losses become one number", by_rule=True,
        earlier={FIRST: "token-mean"},
        note="In mid-2025 it counted for the entropy only, and the loss was a mean over sequences of means over tokens. "
        "seq-mean-token-sum-norm is not divided by the number of sequences in ROLL; here it is, by all of the update.",
    ),
    mapped("entropy_loss_coef", float, 0.0, "loss.entropy_coef", "weight of the entropy bonus"),
    planned("rl_loss_coef", float, 1.0, "a weight on the loss of which the entropy is no part", "weight of policy and KL loss",
            since=LATEST),
    mapped("max_grad_norm", float, 1.0, "policy.optimizer.max_grad_norm critic.optimizer.max_grad_norm",
           "clip gradient norms to this", by_rule=True, change="0: null"),
    ignored("l2", float, 0.0, "ROLL does not read it", "nothing"),
    mapped("value_clip", float | None, None, "critic.value_clip critic.aggregation",
           "values move at most this far from the old ones before the loss stops rewarding it; null: no limit", by_rule=True,
           change="and the value loss is a mean over sequences of means over tokens"),
    mapped("critic_warmup", int, 0, "critic.warmup_steps", "steps at the start in which only the critic learns", by_rule=True),
    mapped("postive_loss_coef", float, 0.0, "loss.sft_coef", "weight of a supervised loss on good responses (spelled so by "
           "ROLL)", by_rule=True, note=_SFT),
    mapped("sft_loss_coef", float, 0.0, "loss.sft_coef", "its older name", by_rule=True, until=FIRST, note=_SFT),
    planned("use_topr_loss", bool, False, _TOPR, "the same on bad ones, with a clipped ratio"),
    planned("use_topr_neg_loss_coef", float, 0.0, _TOPR, "weight of the loss on bad responses"),
    planned("use_policy_loss_type", Literal["PPO", "PG"], "PPO", "this way of choosing the loss; worker_cls and pg_variant "
            "of actor_train do it", "kind of policy loss"),
)  # fmt: skip

_MASKS: tuple[Key, ...] = (
    mapped("max_len_mask", bool, False, "loss.mask_truncated", "leave responses that fill the window out of the loss",
           note="ROLL also leaves out one that ends by itself exactly at the limit."),
    mapped("difficulty_mask", bool, False, "group_filter.strategy group_filter.above_mean group_filter.below_mean "
           "group_filter.above_std", "leave groups that are too hard or too easy out of the loss", by_rule=True,
           change="true: drop"),
    mapped("difficulty_low_threshold", float, 0.0, "group_filter.above_mean", "keep groups with a mean score above this",
           by_rule=True),
    mapped("difficulty_high_threshold", float, 1.0, "group_filter.below_mean", "and below this", by_rule=True),
    planned("error_max_len_clip", bool, False, "leaving long wrong responses out", "leave long wrong responses out"),
    ignored("error_max_len_threshold", int, 9999999999, "read with error_max_len_clip only", "tokens of a long one"),
    planned("difficulty_loss_weight", bool, False, "weights of samples", "weigh samples by their difficulty"),
    planned("length_loss_weight", bool, False, "weights of samples", "weigh samples by their length"),
    *(
        ignored(name, type, default, "ROLL does not read it", "nothing")
        for name, type, default in (
            ("val_greedy", bool, False), ("val_n_sample", int, 1), ("mask_type", Literal["all", "loss"], "all"),
            ("balance_length", bool, False), ("minibatch_data_iter_num", int, 1),
            ("dataset_filter.source", str | list | None, ABSENT), ("dataset_filter.min_difficulty", float | None, ABSENT),
            ("dataset_filter.max_difficulty", float | None, ABSENT), ("dataset_filter.num_samples", int | None, ABSENT),
        )
    ),
    mapped("global_template", str | None, None, "data.chat_template_options", "chat template, before that of data_args",
           by_rule=True),
    planned("tag_to_template", dict, {}, "a chat template per task", "chat template by task"),
)  # fmt: skip


def _correction(name: str, type: Any, default: Any, fields: str, meaning: str, change: str = "") -> Key:
    ours = " ".join(f"loss.rollout_correction.{field}" for field in fields.split())
    return mapped(
        f"train_infer_correction.{name}", type, default, ours, meaning, by_rule=True, change=change, since=LATEST
    )


_CORRECTION: tuple[Key, ...] = (
    _correction("is_weight.enabled", bool, False, "weights", "weigh losses by trainer's over sampler's probability"),
    _correction("is_weight.weight_type", Literal["token", "segment", "geometric", "sequence"], "token", "weights",
                "of tokens or whole responses", "segment and geometric are planned"),
    _correction("is_weight.upper_bound", float | None, 1.2, "weight_high", "weights are cut to this"),
    planned("train_infer_correction.is_weight.detach", bool, True, "weights that carry a gradient", "no gradient through "
            "weights", since=LATEST),
    _correction("filters", list, [], "reject reject_bounds",
                "leave tokens or responses out whose probabilities differ too much between trainer and sampler",
                "ratio_low and ratio_high, turned round: token: token_k1, geometric: sequence_mean_k1, sequence: "
                "sequence_sum_k1; segment and diff_enabled are planned"),
)  # fmt: skip

_DISTILLATION: tuple[Key, ...] = (
    planned("is_pure_opd", bool, False, _OPD, "learn from a teacher alone", since=LATEST),
    planned("use_opd", bool, False, _OPD, "learn from a teacher besides", since=LATEST),
    planned("pure_opd_pipeline_type", str, ABSENT, _OPD, "pipeline that samples", since=LATEST),
    planned("teacher", dict, ABSENT, _OPD, "the teacher's workers", since=LATEST),
    planned("student_train", dict, ABSENT, _OPD, "the student that is trained", since=LATEST),
    planned("student_infer", dict, ABSENT, _OPD, "the student that samples", since=LATEST),
)

ROWS: tuple[Key, ...] = (*_ADVANTAGE, *_KL, *_LOSS, *_MASKS, *_CORRECTION, *_DISTILLATION)
