"""Keys of trainer.algorithm up to the loss: estimators, KL, dynamic sampling."""

from __future__ import annotations

from typing import Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped

_A = "2025-08"

_ADVANTAGES: tuple[Key, ...] = (
    mapped(
        "trainer.algorithm.advantage_estimator",
        str,
        "grpo",
        "advantage.name advantage.lone_sample_keeps_reward",
        "advantage estimator: grpo, gae, rloo, reinforce++, or one of this program's",
        by_rule=True,
        change="reinforce++: reinforce_plus_plus; grpo with one sample per prompt takes the reward as the advantage",
        note="In June 2025 grpo and gae only.",
    ),
    mapped(
        "trainer.algorithm.grpo_norm_by_std",
        bool,
        True,
        "advantage.normalize_by_std",
        "grpo: divide by the group's standard deviation",
        by_rule=True,
        since=_A,
    ),
    mapped("trainer.algorithm.lambd", float, 1.0, "advantage.gae_lambda", "gae: lambda", by_rule=True),
    mapped(
        "trainer.algorithm.gamma",
        float,
        1.0,
        "advantage.gamma",
        "gae, reinforce++: discount per token",
        by_rule=True,
    ),
    mapped(
        "trainer.algorithm.advantage_batch_normalize",
        bool,
        False,
        "advantage.whiten",
        "bring the step's advantages to mean 0 and variance 1",
        note="SkyRL's mean counts padding too; here only tokens in the loss count.",
    ),
    mapped(
        "trainer.algorithm.value_clip",
        float | None,
        0.2,
        "critic.value_clip critic.aggregation",
        "values move at most this far from the old ones before the loss stops rewarding it; null: no limit",
        by_rule=True,
        change="and the value loss is a mean over sequences of means over tokens, whatever loss_reduction says",
    ),
    ignored(
        "trainer.algorithm.value_head_prefix",
        str,
        "value_head",
        "the head is found by its shape",
        "name of the critic's head in its weights",
    ),
    ignored(
        "trainer.algorithm.normalize_reward",
        bool,
        True,
        "in SkyRL too it leaves values as they are",
        "normalise the critic's values",
        until="2025-06",
        note="The page says mean and standard deviation are learned; the code never learns them.",
    ),
)

_KL: tuple[Key, ...] = (
    ignored("trainer.algorithm.kl_target", float | None, None, "SkyRL does not read it", "nothing", until="2025-06"),
    ignored("trainer.algorithm.init_kl_coef", float, 0.0, "SkyRL does not read it", "nothing", until="2025-06"),
    mapped(
        "trainer.algorithm.use_kl_estimator_k3",
        bool,
        True,
        "loss.kl_estimator reward.kl.estimator",
        "estimate KL with k3; false: k1",
        by_rule=True,
        earlier={_A: False},
        note="Replaced by kl_estimator_type in August 2025.",
    ),
    mapped(
        "trainer.algorithm.use_abs_kl",
        bool,
        False,
        "reward.kl.estimator",
        "estimate KL in the reward with |k1|, unless use_kl_estimator_k3; the loss ignores it",
        by_rule=True,
        note="In August 2025 it went before use_kl_estimator_k3, and the loss followed it too.",
    ),
    mapped(
        "trainer.algorithm.kl_estimator_type",
        Literal["k1", "k2", "k3", "abs"] | None,
        None,
        "loss.kl_estimator reward.kl.estimator",
        "estimator of the KL; null: by use_kl_estimator_k3 and use_abs_kl",
        by_rule=True,
        since=_A,
        earlier={_A: "k3"},
    ),
    mapped(
        "trainer.algorithm.use_kl_in_reward",
        bool,
        False,
        "reward.kl.coef",
        "subtract KL from every token's reward; not together with use_kl_loss",
        by_rule=True,
    ),
    mapped(
        "trainer.algorithm.use_kl_loss",
        bool,
        True,
        "loss.kl_coef",
        "add the mean KL to the loss",
        by_rule=True,
        note="From August 2025 to March 2026 SkyRL's KL loss had no gradient; here it has. SkyRL takes it as a mean over "
        "sequences, this program as loss_reduction says.",
    ),
    mapped(
        "trainer.algorithm.kl_loss_coef",
        float,
        0.001,
        "loss.kl_coef reward.kl.coef",
        "weight of the KL, in the loss or in the reward",
        by_rule=True,
    ),
    mapped(
        "trainer.algorithm.kl_ctrl.type",
        Literal["fixed", "adaptive"],
        "fixed",
        "reward.kl.target",
        "keep the weight of the KL in the reward, or steer it",
        by_rule=True,
        since=_A,
        change="fixed: null; adaptive: kl_ctrl.kl_target",
    ),
    mapped(
        "trainer.algorithm.kl_ctrl.kl_target",
        float,
        0.1,
        "reward.kl.target",
        "adaptive: the KL to steer to, in nats per token",
        by_rule=True,
        since=_A,
    ),
    mapped(
        "trainer.algorithm.kl_ctrl.horizon",
        int | float,
        10000,
        "reward.kl.horizon_sequences",
        "adaptive: how slowly the weight is steered, in sequences",
        by_rule=True,
        since=_A,
    ),
)

_SAMPLING: tuple[Key, ...] = (
    mapped(
        "trainer.algorithm.dynamic_sampling.type",
        Literal["filter", "replace"] | None,
        None,
        "group_filter.strategy",
        "what happens to prompts whose samples all got the same reward; null: nothing",
        by_rule=True,
        since=_A,
        change="filter: refill; replace: replace; groups with a standard deviation above 0 are kept",
    ),
    mapped(
        "trainer.algorithm.dynamic_sampling.max_sample_batches",
        int,
        30,
        "group_filter.max_batches",
        "batches of prompts sampled for one step before the run stops; 0 or less: no limit",
        by_rule=True,
        since=_A,
        change="0 or less: null",
    ),
    mapped(
        "trainer.algorithm.dynamic_sampling.min_replace_ratio",
        float,
        0.3,
        "group_filter.min_kept_share",
        "replace: sample again until more than this share of the prompts is good",
        by_rule=True,
        since=_A,
        change="(floor(share x prompts) + 1) / prompts: the smallest share that is more",
    ),
    mapped(
        "trainer.algorithm.zero_variance_filter",
        bool,
        False,
        "group_filter.strategy",
        "leave prompts whose samples all got the same reward out of the loss",
        by_rule=True,
        since="later",
        change="true: drop",
    ),
    mapped(
        "trainer.algorithm.overlong_buffer.len",
        int,
        ABSENT,
        "reward.overlong_buffer_tokens",
        "responses that reach into the last so many tokens lose reward",
        by_rule=True,
        note="From SkyRL's DAPO example. There the limit is input plus response length less the prompt, and a response beyond "
        "it gets 0; here the limit is generator.sampling_params.max_generate_length.",
    ),
    mapped(
        "trainer.algorithm.overlong_buffer.penalty_factor",
        float,
        ABSENT,
        "reward.overlong_penalty",
        "reward lost by a response that fills the buffer",
        by_rule=True,
    ),
)

ROWS: tuple[Key, ...] = (*_ADVANTAGES, *_KL, *_SAMPLING)
