"""Agentic pipelines: environments, their managers, advantages over turns."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned
from posttrain.dialects.roll.keys.worker import FIRST, LATEST

TRAJECTORIES = "roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager"
STEPS = "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager"
PIPELINE = "roll.pipeline.agentic.agentic_pipeline.AgenticPipeline"
_NAMED = "environment.named"
_JUDGE = "a model that judges what happens in environments"
_SOFTWARE = "environments for software"


def _row(name: str, type: Any, default: Any, fields: str, meaning: str, change: str = "", **more: Any) -> Key:
    return mapped(name, type, default, fields, meaning, change=change, by_rule=True, **more)


_ENVIRONMENTS: tuple[Key, ...] = (
    _row("custom_envs.*.env_type", str, ABSENT, _NAMED, "kind of environment",
         "frozen_lake, sokoban, and environments of posttrain by their names; ROLL's others are planned"),
    _row("custom_envs.*.max_steps", int | None, ABSENT, _NAMED, "turns of an episode"),
    _row("custom_envs.*.max_steps_per_traj", int | None, ABSENT, _NAMED, "its name of mid-2025"),
    _row("custom_envs.*.max_actions_per_traj", int | None, ABSENT, _NAMED, "actions of an episode: one per turn",
         "where max_steps_per_traj is not given"),
    _row("custom_envs.*.max_tokens_per_step", int | None, ABSENT, f"rollout.max_response_tokens {_NAMED}",
         "tokens of a turn", "the most of all tags; max_response_length of the template is the tag's own"),
    _row("custom_envs.*.max_tokens", int | None, ABSENT, _NAMED, "tokens of a turn, as the prompt says them",
         "max_response_length of the template"),
    _row("custom_envs.*.env_manager_cls", str | None, ABSENT, "environment.sample_per_turn",
         "class that runs the environment: what a training sample is",
         "the trajectory (TrajEnvManager, the default) or the turn (StepEnvManager); others are planned",
         note="ROLL's StepEnvManager writes a prompt of its own for each turn, in which earlier steps are listed; here a turn's "
         "prompt is the conversation before it."),
    _row("custom_envs.*.agent_system_template", str | None, ABSENT, _NAMED, "system message"),
    _row("custom_envs.*.agent_template", str | None, ABSENT, _NAMED, "message of a turn, with {observation} and the like"),
    _row("custom_envs.*.env_instruction", str | None, ABSENT, _NAMED, "instruction before the first observation"),
    _row("custom_envs.*.env_config", dict | None, ABSENT, _NAMED, "arguments of the environment", "by our names",
         note="Maps and rooms are drawn by generators of our own: equal seeds give other ones than in ROLL."),
    ignored("custom_envs.*.use_thread_lock", bool, False, "every environment has a process of its own", "one step at a time"),
    ignored("custom_envs.*.max_env_step_concurrent", int, 0, "environment.workers says how many work at a time",
            "steps at a time"),
    planned("custom_envs.*.tool_wrapper", dict | None, ABSENT, "tools around ROLL's environments; env_type tools is built",
            "tools"),
    planned("custom_envs.*.agent_runner_cls", str | None, ABSENT, _SOFTWARE, "class that runs an agent"),
)  # fmt: skip


def _manager(section: str, groups: str, size: str) -> tuple[Key, ...]:
    ungroomed = "episodes are drawn as a step needs them"
    return (
        _row(f"{section}.num_env_groups", int, 128, groups, "groups of environments",
             "they set the shares of the tags; a step's groups are its size / group_size", since=LATEST),
        _row(f"{section}.env_groups", int, ABSENT, groups, "the name of mid-2025 for num_env_groups"),
        _row(f"{section}.tags", list[str], ["SimpleSokoban"], _NAMED, "which environments"),
        _row(f"{section}.num_groups_partition", list[int], [128], _NAMED, "groups of each tag"),
        _row(f"{section}.n_groups", list[int], ABSENT, _NAMED, "the name of mid-2025 for num_groups_partition"),
        _row(f"{section}.group_size", int, 1, size, "trajectories from one beginning"),
        planned(f"{section}.group_size_redundancy", int, 0, "further trajectories, of which the slowest are dropped",
                "further ones, of which the slowest are dropped"),
        ignored(f"{section}.max_traj_per_env", int, -1, ungroomed, "trajectories per environment and step"),
        _row(f"{section}.format_penalty", float, 0.0, _NAMED, "reward of a turn without a valid action",
             "where env_config has none, of train_env_manager",
             note="ROLL of 2026 drops it in silence and reads env_config; in mid-2025 it counted, as here."),
        ignored(f"{section}.max_env_num_per_worker", int, 0, "every environment has a process of its own",
                "environments per process"),
        planned(f"{section}.group_filter_cls", str | None, None, "filters of your own; posttrain.group_filter has some",
                "class that drops groups"),
        planned(f"{section}.llm_proxy", dict, {}, "other players than the policy", "what answers: the policy, a service, chance",
                off=({"proxy_type": "policy"}, {"proxy_type": "policy", "proxy_config": {}})),
    )  # fmt: skip


_ONLY_SOME = "what particular managers of ROLL do"

_PIPELINE: tuple[Key, ...] = (
    planned("reward", dict, ABSENT, _JUDGE, "judge that environments ask"),
    planned("pipeline_cls", str, ABSENT, "pipelines of your own", "class of the pipeline", off=(PIPELINE,)),
    _row("reward_normalization.grouping", str, "batch", "reward.normalize_mean reward.normalize_std advantage.normalize_by_std",
         "whose rewards are compared", "batch: the step; traj_group_id: the group; others are planned",
         earlier={FIRST: "state"}),
    _row("reward_normalization.method", Literal["identity", "mean", "mean_std", "asym_clip"], "identity",
         "reward.normalize_mean reward.normalize_std reward.clip advantage.normalize_by_std", "how",
         "asym_clip: mean and deviation, in ROLL of 2026 too"),
    _row("reward_normalization.norm_mean_type", Literal["batch", "group", "None"] | None, None, "reward.normalize_mean",
         "mean of whom", "goes before method"),
    _row("reward_normalization.norm_std_type", Literal["batch", "group", "None"] | None, None, "reward.normalize_std",
         "deviation of whom", "goes before method"),
    _row("episode_reward_weight", float, 1.0, "advantage.episode_weight", "gigpo: weight of the episode"),
    _row("step_reward_weight", float, 1.0, "advantage.step_weight", "gigpo: weight of the turn"),
    _row("step_reward_gamma", float, 0.95, "advantage.step_gamma", "gigpo and step_reinforce: discount per turn"),
    planned("ratio_type", Literal["token", "segment"], "token", "one ratio for each turn", "one ratio per token or turn"),
    ignored("batch_adjust_mode", Literal["copy", "delete", "auto", "random_sample"], "copy",
            "updates take the sequences that there are: none is copied or dropped", "how rows are made to divide"),
    ignored("dirty_data_mask", bool, False, "an episode that failed has no reward and no part in the loss, in any case",
            "leave broken trajectories out"),
    planned("open_feedback_turn", bool, False, _ONLY_SOME, "a turn of feedback"),
    planned("use_token_reward", bool, False, _ONLY_SOME, "rewards on tokens"),
    ignored("partial_gpu_mode", bool, True, "device_mapping says which devices a role has",
            "train on a part of the sampler's devices"),
    ignored("env_monitor.enable", bool, True, "environments have a deadline (environment.timeout_s)", "watch environments"),
    ignored("env_monitor.monitor_interval", int, 30, "environments have a deadline (environment.timeout_s)",
            "seconds between looks"),
    ignored("env_monitor.hung_timeout", int, 3600, "environments have a deadline (environment.timeout_s)",
            "seconds until one counts as hung"),
    ignored("render_save_dir", str | None, None, "posttrain report shows trajectories turn by turn", "folder for pictures"),
    planned("exp_mode", Literal["train", "eval_gt", "eval_test"], "train", _SOFTWARE, "what software environments do"),
    ignored("parse_tool_call_parameter_to_dict", bool, False, "tool calls are read from the text", "reading of tool calls"),
    ignored("skip_mock_system_prompt", bool, False, "a turn is what the chat template writes behind the one before it",
            "system message of later turns"),
    planned("enable_response_mask", bool, True, "training on what the policy did not write", "train on responses only",
            until=FIRST),
    ignored("action_sep", str, "||", "an answer's first match of action_pattern is its action", "text between actions",
            until=FIRST),
    _row("use_turn_scores", bool, False, "reward.by_turn", "rewards at the end of turns", "and always with gigpo and "
         "step_reinforce", until=FIRST),
    ignored("enable_think", bool, True, "the template asks for thinking where it should", "ask for thinking", until=FIRST),
    ignored("special_token_list", list[str],
            ["<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>"],
            "end tokens are no part of what an environment reads", "tokens taken out of actions", until=FIRST),
    _row("max_steps_per_traj", int, 10, _NAMED, "turns of an episode, where an environment does not say", until=FIRST),
)  # fmt: skip

ROWS: tuple[Key, ...] = (
    *_ENVIRONMENTS,
    *_manager("train_env_manager", "data.prompts_per_step", "rollout.samples_per_prompt"),
    *_manager("val_env_manager", "environment.validation_episodes", "validation.samples_per_prompt"),
    *_PIPELINE,
)
