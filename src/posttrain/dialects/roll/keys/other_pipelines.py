"""Agentic pipelines, SFT, DPO, distillation: understood, planned."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, planned
from posttrain.dialects.roll.keys.worker import FIRST, LATEST

_TURNS = "environments over several turns"
_INSIDE = "settings of the environments, which are planned"


def _environments() -> tuple[Key, ...]:
    """custom_envs.<tag>: the first key is what asks for them."""
    keys: tuple[tuple[str, Any, Any, str], ...] = (
        ("max_steps", int, ABSENT, "turns"),
        ("max_tokens_per_step", int, ABSENT, "tokens per turn"),
        ("env_manager_cls", str, ABSENT, "class that runs the environment"),
        ("agent_system_template", str, ABSENT, "system message"),
        ("agent_template", str, ABSENT, "message of a turn"),
        ("env_config", dict | None, ABSENT, "arguments of the environment"),
        ("use_thread_lock", bool, False, "one step at a time"),
        ("max_env_step_concurrent", int, 0, "steps at a time"),
        ("tool_wrapper", dict, ABSENT, "tools"),
        ("agent_runner_cls", str, ABSENT, "class that runs an agent"),
        ("max_actions_per_traj", int, ABSENT, "actions"),
        ("max_steps_per_traj", int, ABSENT, "turns"),
        ("env_instruction", str, ABSENT, "instruction"),
        ("max_tokens", int, ABSENT, "tokens, as the prompt says them"),
    )
    asks = planned("custom_envs.*.env_type", str, ABSENT, _TURNS, "kind of environment")
    rest = (ignored(f"custom_envs.*.{name}", type, default, _INSIDE, meaning) for name, type, default, meaning in keys)
    return (asks, *rest)


def _managers(section: str) -> tuple[Key, ...]:
    partition = f"{section}.num_groups_partition"
    asks = (
        planned(f"{section}.num_env_groups", int, 128, _TURNS, "groups of environments", since=LATEST),
        planned(f"{section}.env_groups", int, ABSENT, _TURNS, "the name of mid-2025 for num_env_groups"),
        planned(f"{section}.tags", list[str], ["SimpleSokoban"], _TURNS, "which environments"),
    )
    rest: tuple[tuple[str, Any, Any, str], ...] = (
        ("group_size", int, 1, "trajectories per group"),
        ("group_size_redundancy", int, 0, "further ones, of which the slowest are dropped"),
        ("n_groups", list[int], ABSENT, "the name of mid-2025 for num_groups_partition"),
        ("max_traj_per_env", int, -1, "trajectories per environment and step"),
        ("format_penalty", float, 0.0, "reward of a turn without a valid action"),
        ("max_env_num_per_worker", int, 0, "environments per process"),
        ("group_filter_cls", str | None, None, "class that drops groups"),
        ("llm_proxy", dict, {}, "what answers: the policy, a service, chance"),
    )
    return (
        *asks,
        ignored(partition, list[int], [128], _INSIDE, "groups per tag"),
        *(ignored(f"{section}.{name}", type, default, _INSIDE, meaning) for name, type, default, meaning in rest),
    )


_AGENTIC: tuple[Key, ...] = (
    *_environments(),
    *_managers("train_env_manager"),
    *_managers("val_env_manager"),
    planned("reward", dict, ABSENT, "a model that judges responses", "judge that environments ask"),
    planned("pipeline_cls", str, ABSENT, "pipelines of your own", "class of the pipeline"),
    *(
        ignored(name, type, default, "read by agentic pipelines only, which are planned", meaning, **more)
        for name, type, default, meaning, more in (
            ("reward_normalization.grouping", str, "batch", "whose rewards are compared", {"earlier": {FIRST: "state"}}),
            ("reward_normalization.method", Literal["identity", "mean", "mean_std", "asym_clip"], "identity", "how", {}),
            ("reward_normalization.norm_mean_type", Literal["batch", "group", "None"] | None, None, "mean of whom", {}),
            ("reward_normalization.norm_std_type", Literal["batch", "group", "None"] | None, None, "deviation of whom", {}),
            ("dirty_data_mask", bool, False, "leave broken trajectories out", {}),
            ("open_feedback_turn", bool, False, "a turn of feedback", {}),
            ("use_token_reward", bool, False, "rewards on tokens", {}),
            ("batch_adjust_mode", Literal["copy", "delete", "auto", "random_sample"], "copy", "how rows are made to divide", {}),
            ("episode_reward_weight", float, 1.0, "gigpo: weight of the episode", {}),
            ("step_reward_weight", float, 1.0, "gigpo: weight of the turn", {}),
            ("step_reward_gamma", float, 0.95, "discount per turn", {}),
            ("ratio_type", Literal["token", "segment"], "token", "one ratio per token or turn", {}),
            ("partial_gpu_mode", bool, True, "train on a part of the sampler's devices", {}),
            ("env_monitor.enable", bool, True, "watch environments", {}),
            ("env_monitor.monitor_interval", int, 30, "seconds between looks", {}),
            ("env_monitor.hung_timeout", int, 3600, "seconds until one counts as hung", {}),
            ("render_save_dir", str | None, None, "folder for pictures", {}),
            ("exp_mode", Literal["train", "eval_gt", "eval_test"], "train", "what software environments do", {}),
            ("parse_tool_call_parameter_to_dict", bool, False, "reading of tool calls", {}),
            ("skip_mock_system_prompt", bool, False, "system message of later turns", {}),
            ("enable_response_mask", bool, True, "train on responses only", {"until": FIRST}),
            ("action_sep", str, "||", "text between actions", {"until": FIRST}),
            ("use_turn_scores", bool, False, "rewards at the end of turns", {"until": FIRST}),
            ("enable_think", bool, True, "ask for thinking", {"until": FIRST}),
            ("special_token_list", list[str], ["<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>"],
             "tokens taken out of actions", {"until": FIRST}),
            ("max_steps_per_traj", int, 10, "turns", {"until": FIRST}),
        )
    ),
)  # fmt: skip

_SFT = "supervised fine-tuning"
_DPO = "preference tuning (DPO)"
_DISTILL = "distillation"
_OTHERS: tuple[tuple[str, Any, str, str], ...] = (
    ("sft_train", dict, _SFT, "worker of the trained model"),
    ("prompt_key", str, _SFT, "column with the instruction"),
    ("query_key", str, _SFT, "column with the question"),
    ("response_key", str, _SFT, "column with the answer"),
    ("system_key", str, _SFT, "column with the system message"),
    ("chosen_key", str, _DPO, "column with the better response"),
    ("rejected_key", str, _DPO, "column with the worse response"),
    ("beta", float, _DPO, "strength of the preference"),
    ("ipo", bool, _DPO, "the IPO loss"),
    ("label_smoothing", float, _DPO, "share of labels taken for wrong"),
    ("student", dict, _DISTILL, "worker of the student"),
    ("question_key", str, _DISTILL, "column with the question"),
    ("answer_key", str, _DISTILL, "column with the answer"),
    ("logits_topk", int, _DISTILL, "logits kept per token"),
    ("distill_loss_weight", float, _DISTILL, "share of the distillation loss"),
    ("kd_objective", str, _DISTILL, "divergence from the teacher"),
    ("kd_temperature", float, _DISTILL, "temperature of the student"),
    ("teacher_temperature", float, _DISTILL, "temperature of the teacher"),
    ("student_pretrain", str, _DISTILL, "model of the student"),
    ("teacher_pretrain", str, _DISTILL, "model of the teacher"),
    ("skew_lambda", float, _DISTILL, "mixture of the skewed divergences"),
    ("adaptive_kl_alpha", float, _DISTILL, "mixture of the adaptive divergence"),
    ("distill_on_prompt", bool, _DISTILL, "learn from prompt tokens too"),
    ("logits_transfer_backend", str, _DISTILL, "how logits travel"),
)

ROWS: tuple[Key, ...] = (
    *_AGENTIC,
    *(planned(name, type, ABSENT, reason, meaning) for name, type, reason, meaning in _OTHERS),
)
