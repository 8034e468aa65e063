"""ROLL's agentic pipeline: environments, groups, advantages over turns; what does not go together and what is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.roll import DIALECT
from posttrain.dialects.roll.rules.environments import PICTURED, STEPS
from posttrain.errors import Problem
from posttrain.plan.batch import plan_batches
from posttrain.plan.environments.tools import tool_problems

BASE: dict[str, Any] = {
    "defaults": ["../config/traj_envs@_here_"],
    "pretrain": "m",
    "sequence_length": 1000,
    "rollout_batch_size": 16,
    "max_steps": 5,
    "adv_estimator": "grpo",
    "reward_normalization": {"grouping": "traj_group_id", "method": "mean_std"},
    "actor_train": {"training_args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}},
    "actor_infer": {"generating_args": {"max_new_tokens": 100, "temperature": 0.8, "top_k": 0, "top_p": 1.0}},
    "train_env_manager": {
        "num_env_groups": 4,
        "group_size": 4,
        "tags": ["FrozenLake", "SimpleSokoban"],
        "num_groups_partition": [3, 1],
    },
    "custom_envs": {"FrozenLake": "${custom_env.FrozenLake}", "SimpleSokoban": "${custom_env.SimpleSokoban}"},
}
VALIDATES = {
    "val_batch_size": 6,
    "eval_steps": 2,
    "val_env_manager": {"num_env_groups": 3, "group_size": 2, "tags": ["LargerSokoban"], "num_groups_partition": [3]},
}


@pytest.fixture
def load(tmp_path: Path):
    def read(*overrides: str, **changes: Any) -> LoadedConfig[Any]:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(BASE | changes))
        return read_dialect(DIALECT, str(path), list(overrides))

    return read


def said(loaded: LoadedConfig[Any]) -> list[str]:
    return [str(problem) for problem in loaded.problems]


def planned(loaded: LoadedConfig[Any]) -> list[str]:
    assert not loaded.problems, said(loaded)
    return [str(problem) for problem in loaded.unsupported]


def test_trajectories_groups_and_shares(load) -> None:
    loaded = load()
    assert not planned(loaded)
    config = loaded.config
    # 16 trajectories / 4 from each beginning = 4 beginnings; 5 steps x 4 = 20 episodes, none twice
    assert (config.data.prompts_per_step, config.rollout.samples_per_prompt) == (4, 4)
    assert config.environment.train_episodes == 20 and not config.data.shuffle
    assert config.policy.sequences_per_mini_batch == 8
    lake, store = config.environment.named["FrozenLake"], config.environment.named["SimpleSokoban"]
    assert (lake.name, lake.weight, lake.max_turns) == ("frozen_lake", 3.0, 10)
    assert lake.settings == {"size": 4, "slippery": False, "format_penalty": -0.01}
    assert store.settings == {"rows": 6, "columns": 6, "boxes": 1, "format_penalty": -0.15}
    # a turn has min(100, 128) tokens, and 1000 - 100 may stand before it
    assert (config.rollout.max_response_tokens, config.environment.max_context_tokens) == (100, 900)
    assert (config.advantage.name, config.reward.normalize_mean, config.reward.normalize_std) == (
        "reinforce",
        "group",
        "group",
    )
    assert config.reward.terms == [] and not config.reward.by_turn and not config.environment.sample_per_turn
    assert config.environment.validation_episodes is None


def test_validation_has_its_own_environments_and_actor_infers_sampling(load) -> None:
    loaded = load(
        **VALIDATES,
        custom_envs={name: f"${{custom_env.{name}}}" for name in ("FrozenLake", "SimpleSokoban", "LargerSokoban")},
    )
    assert not planned(loaded)
    config = loaded.config
    # 6 trajectories / 2 from each beginning
    assert (config.environment.validation_episodes, config.validation.samples_per_prompt) == (3, 2)
    assert (config.validation.every_steps, config.validation.temperature) == (2, 0.8)
    named = config.environment.named
    assert [(each.weight, each.validation_weight) for each in named.values()] == [(3.0, 0.0), (1.0, 0.0), (0.0, 3.0)]
    assert named["LargerSokoban"].settings["pulls"] == 10


def test_managers_sample_where_actor_infer_says_nothing(load) -> None:
    train = BASE["train_env_manager"] | {"generating_args": {"max_new_tokens": 20, "temperature": 0.5, "top_p": 1.0}}
    val = VALIDATES["val_env_manager"] | {"tags": ["FrozenLake"], "generating_args": {"temperature": 0.0}}
    loaded = load(actor_infer={}, train_env_manager=train, val_env_manager=val, val_batch_size=6, eval_steps=1)
    config = loaded.config
    assert (config.rollout.temperature, config.rollout.max_response_tokens) == (0.5, 20)
    assert config.validation.temperature == 0.0
    told = [one.key for one in load(train_env_manager=train).ignored]
    assert "train_env_manager.generating_args" in told  # actor_infer's go before them


@pytest.mark.parametrize(
    "without",
    [("actor_infer.generating_args.max_new_tokens=null",),
     ("~actor_infer", "+train_env_manager.generating_args.max_new_tokens=null")],
)  # fmt: skip
def test_environments_alone_may_say_how_long_a_turn_is(load, without: tuple[str, ...]) -> None:
    lake = "custom_env.FrozenLake.max_tokens_per_step=9"
    loaded = load(*without, lake, "custom_env.SimpleSokoban.max_tokens_per_step=8")
    assert not planned(loaded)
    config = loaded.config
    assert (config.rollout.max_response_tokens, config.environment.max_context_tokens) == (9, 991)  # 1000 - 9


def test_words_of_mid_2025(load) -> None:
    train = {"env_groups": 4, "n_groups": [4], "group_size": 4, "tags": ["Lake"], "format_penalty": -0.2}
    lake = {
        "env_type": "frozen_lake",
        "max_actions_per_traj": 7,
        "env_instruction": "Go.",
        "env_config": {
            "p": 0.9,
            "grid_lookup": {0: "A", 3: "Z"},
            "action_lookup": {"west": 1, "Down": 2, "Right": 3, "Up": 4},
            "is_random": True,
        },
    }
    loaded = load(train_env_manager=train, custom_envs={"Lake": lake})
    assert not said(loaded)
    env = loaded.config.environment.named["Lake"]
    assert env.max_turns == 7
    assert env.settings == {
        "ice_share": 0.9,
        "symbols": {"player": "A", "goal": "Z"},
        "action_words": {"Left": "west"},
        "instruction": "Go.",
        "format_penalty": -0.2,
    }
    assert any("env_config.is_random is not known to frozen_lake here" in text for text in loaded.warnings)


def test_gigpo_and_step_reinforce_have_a_sample_per_turn(load) -> None:
    lake = {"env_type": "frozen_lake", "env_manager_cls": STEPS, "max_steps": 3}
    train = {"num_env_groups": 4, "group_size": 4, "tags": ["Lake"], "num_groups_partition": [4]}
    loaded = load("adv_estimator=gigpo", "step_reward_weight=0.5", train_env_manager=train, custom_envs={"Lake": lake})
    assert not planned(loaded)
    config = loaded.config
    assert config.environment.sample_per_turn and config.reward.by_turn
    advantage = config.advantage
    assert (advantage.name, advantage.step_gamma, advantage.episode_weight, advantage.step_weight) == (
        "gigpo",
        0.95,
        1.0,
        0.5,
    )
    assert advantage.normalize_by_std
    loaded = load("adv_estimator=step_reinforce", train_env_manager=train, custom_envs={"Lake": lake})
    assert not planned(loaded) and loaded.config.advantage.name == "step_reinforce"
    [problem] = said(load("adv_estimator=gigpo"))
    assert problem.startswith("gigpo needs every turn as a sample of its own")


def test_turns_with_the_conversation_before_them_are_samples_of_their_own(load) -> None:
    concat = "roll.pipeline.agentic.env_manager.step_concat_env_manager.StepConcatEnvManager"
    lake = {"env_type": "frozen_lake", "env_manager_cls": concat, "max_steps": 3}
    train = {"num_env_groups": 4, "group_size": 4, "tags": ["Lake"], "num_groups_partition": [4]}
    loaded = load("adv_estimator=gigpo", train_env_manager=train, custom_envs={"Lake": lake})
    assert not planned(loaded) and not said(loaded) and loaded.config.environment.sample_per_turn


@pytest.mark.parametrize("kind", ["alfworld", "game:Wordle-v0", "deepeyes"])
def test_a_planned_environment_is_the_only_thing_to_say(load, kind: str) -> None:
    """Sizes, turns and estimators are checked with a game in its place."""
    custom = {"Shop": {"env_type": kind, "env_manager_cls": STEPS, "max_steps": 3}}
    train = {"num_env_groups": 4, "group_size": 4, "tags": ["Shop"], "num_groups_partition": [4]}
    loaded = load("adv_estimator=gigpo", train_env_manager=train, custom_envs=custom)
    assert not said(loaded)
    [only] = planned(loaded)
    assert f"custom_envs.Shop.env_type={kind} is planned" in only
    assert loaded.config.environment.named["Shop"].max_turns == 3


def test_a_pipeline_that_only_samples_needs_no_trainer(load) -> None:
    given = ["~actor_train", "~critic", "+actor_infer.device_mapping='list(range(0,8))'", "~adv_estimator"]
    loaded = load(*given)
    assert not planned(loaded)
    assert any(
        "the run plays the episodes of all its steps once and trains nothing" in text for text in loaded.warnings
    )
    config = loaded.config
    # 5 steps of 16 trajectories, in groups of 4
    assert config.validation.only and config.environment.validation_episodes == 5 * 16 // 4
    assert (config.validation.samples_per_prompt, config.validation.temperature) == (4, 0.8)
    assert config.environment.named["FrozenLake"].weight == 3.0


@pytest.mark.parametrize("estimator", ["gigpo", "step_reinforce"])
def test_rewards_before_estimators_of_turns_are_their_settings(load, estimator: str) -> None:
    steps = [f"+custom_env.{name}.env_manager_cls={STEPS}" for name in ("FrozenLake", "SimpleSokoban")]
    given = [f"adv_estimator={estimator}", *steps]
    clip = {"gigpo": "total_clip", "step_reinforce": "returns_clip"}[estimator]
    loaded = load(*given, "+reward_clip=5", "+gamma=0.9")
    assert not planned(loaded)
    settings = loaded.config.advantage.settings
    assert (settings[clip], settings["token_gamma"]) == (5.0, 0.9)
    plain = load(*given, "+reward_clip=0", "+whiten_rewards=false", "+gamma=1.0").config.advantage.settings
    assert (plain[clip], plain["token_gamma"]) == (None, 1.0)
    [whitened] = said(load(*given, "+whiten_rewards=true"))
    assert whitened.startswith(f"whiten_rewards=true is not supported with adv_estimator={estimator}")
    assert not planned(load("+reward_clip=5", "+whiten_rewards=true", "+gamma=0.9"))  # grpo does all of it


@pytest.mark.parametrize(
    ("normalization", "episodes", "steps", "returns"),
    [
        # method alone decides about steps; mean and deviation of episodes by norm_*_type where they are given
        ({"grouping": "traj_group_id", "method": "mean_std"}, ("group", None), (True, True), ("group", "group")),
        ({"grouping": "traj_group_id", "method": "mean"}, ("group", None), (True, False), ("group", "none")),
        ({"grouping": "batch", "method": "mean_std"}, ("batch", "batch"), (True, True), ("batch", "batch")),
        ({"grouping": "traj_group_id", "norm_mean_type": "group", "norm_std_type": "batch"}, ("group", "batch"),
         (False, False), ("group", "batch")),
        ({}, ("none", None), (False, False), ("none", "none")),
    ],
)  # fmt: skip
def test_normalisation_of_episodes_steps_and_returns(load, normalization, episodes, steps, returns) -> None:
    managers = [f"+custom_env.{name}.env_manager_cls={STEPS}" for name in ("FrozenLake", "SimpleSokoban")]
    loaded = load("adv_estimator=gigpo", *managers, reward_normalization=normalization)
    assert not planned(loaded)
    chosen = loaded.config.advantage.settings
    assert (chosen["episode_mean"], chosen["episode_std"]) == episodes
    assert (chosen["compare_steps"], chosen["normalize_by_std"]) == steps
    assert any("without comparing them" in text for text in loaded.warnings) == (not steps[0])
    chosen = load(
        "adv_estimator=step_reinforce", *managers, reward_normalization=normalization
    ).config.advantage.settings
    assert (chosen["returns_mean"], chosen["returns_std"]) == returns


SHOPPED = {"tags": ["W"], "num_groups_partition": [4], "num_env_groups": 4, "group_size": 4}


@pytest.mark.parametrize(
    ("entry", "name", "settings"),
    [
        ({"env_type": "webshop", "env_config": {"observation_mode": "text", "format_penalty": -0.05}}, "shop",
         {"format_penalty": -0.05}),
        ({"env_type": "game:GuessTheNumber-v0", "env_config": {"min_number": 3, "max_number": 9}}, "guess_number",
         {"low": 3, "high": 9, "max_turns": 10, "action_pattern": r".*\\boxed\{\s*(\d+)\s*\}"}),
        ({"env_type": "rg:letter_counting", "env_config": {"size": 500, "seed": 42, "min_words": 3}}, "reasoning_gym",
         {"task": "letter_counting", "options": {"min_words": 3}}),
        ({"env_type": "roll_math", "env_config": {"dataset_name": "a.jsonl", "answer_key": "solution"}}, "questions",
         {"grader": "math", "file": "a.jsonl", "question_column": "problem", "answer_column": "solution"}),
        ({"env_type": "roll_qa", "env_config": {"dataset_name": "a.jsonl", "split": "train", "question_key": "q"}}, "questions",
         {"grader": "text", "file": "a.jsonl", "question_column": "q", "action_pattern": ".*<answer>(.*?)</answer>"}),
    ],
)  # fmt: skip
def test_environments_of_other_names(load, entry, name, settings) -> None:
    loaded = load(train_env_manager=SHOPPED, custom_envs={"W": entry | {"max_steps": 3}})
    assert not planned(loaded)
    found = loaded.config.environment.named["W"]
    assert (found.name, found.settings, found.max_turns) == (name, settings, 3)


def test_sokoban_under_other_names(load) -> None:
    config = {"format_penalty": -0.15, "dim_room": [7, 7]}
    contained = {
        "env_type": "sokoban_sandbox",
        "max_steps": 3,
        "agent_template": "{observation} {suffix}",
        "env_config": config,
    }
    loaded = load(train_env_manager=SHOPPED, custom_envs={"W": contained})
    assert not planned(loaded) and not loaded.config.environment.sample_per_turn
    found = loaded.config.environment.named["W"]
    assert (found.name, found.settings["rows"], found.settings["template"]) == ("sokoban", 7, "{observation} {suffix}")
    manager = "roll.pipeline.agentic.env_manager.agent_native_env_manager.AgentNativeStepEnvManager"
    native = {"env_type": "sokoban_native_env", "env_manager_cls": manager, "agent_template": "placeholder"}
    loaded = load(train_env_manager=SHOPPED, custom_envs={"W": native | {"max_steps": 3, "env_config": config}})
    assert not planned(loaded) and loaded.config.environment.sample_per_turn
    assert "template" not in loaded.config.environment.named["W"].settings


def test_tools_around_questions(load) -> None:
    def entry(*tools: dict[str, Any], kind: str = "roll_math") -> dict[str, Any]:
        rewards = {"tool_reward": -0.1, "tool_success_reward": 0.3, "max_tool_uses": 5}
        wrapper = {"wrapper_args": rewards, "tool_configs": list(tools)}
        config = {"dataset_name": "a.jsonl"} if kind == "roll_math" else {}
        return {"W": {"env_type": kind, "env_config": config, "max_steps": 3, "tool_wrapper": wrapper}}

    code = {"tool_id": "python_code", "tool_args": {"timeout": 7, "sandbox_type": "none"}}
    search = {"tool_id": "search", "tool_args": {"search_url": "http://localhost:8000/retrieve", "topk": 2}}
    loaded = load(train_env_manager=SHOPPED, custom_envs=entry(code, search))
    assert not planned(loaded)
    settings = loaded.config.environment.named["W"].settings
    assert settings["tools"] == [
        {"name": "python", "timeout_s": 7.0},
        {"name": "retrieve", "url": "http://localhost:8000/retrieve", "results": 2},
    ]
    # -0.1 for every use, and 0.3 more for one that succeeds
    assert (settings["max_calls"], settings["failed_call_reward"]) == (5, -0.1)
    assert settings["call_reward"] == pytest.approx(0.2)
    [problem] = said(load(train_env_manager=SHOPPED, custom_envs=entry({"tool_id": "browser"})))
    assert "tool_wrapper.tool_configs.0 has the tool_id 'browser' with no tool_args" in problem
    [problem] = said(load(train_env_manager=SHOPPED, custom_envs=entry(code, kind="webshop")))
    assert "tool_wrapper is supported around questions (roll_math, roll_qa) only" in problem


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        ("search", "tool_wrapper must be section"),
        ({"tool_configs": {"tool_id": "search"}}, "tool_wrapper.tool_configs is no list"),
        ({"tool_configs": ["search"]}, "tool_wrapper.tool_configs.0 is no mapping: 'search'"),
        ({"tool_configs": [{"tool_id": "python_code", "tool_args": 5}]}, "tool_configs.0.tool_args is no mapping: 5"),
        ({"tool_configs": [{"tool_id": "python_code"}], "wrapper_args": [1]}, "wrapper_args is no mapping: [1]"),
        (
            {"tool_configs": [{"tool_id": "python_code"}], "wrapper_args": {"tool_reward": "x"}},
            "wrapper_args.tool_reward is no number: 'x'",
        ),
        (
            {"tool_configs": [{"tool_id": "python_code"}], "wrapper_args": {"max_tool_uses": -1}},
            "max_calls of the environment questions is -1",
        ),
    ],
)
def test_a_tool_wrapper_of_another_form(load, wrapper: Any, message: str) -> None:
    entry = {
        "env_type": "roll_math",
        "env_config": {"dataset_name": "a.jsonl"},
        "max_steps": 3,
        "tool_wrapper": wrapper,
    }
    problems = said(load(train_env_manager=SHOPPED, custom_envs={"W": entry}))
    assert any(message in problem and "run.yaml:" in problem for problem in problems), problems


@pytest.mark.parametrize("number", [0, -1, 2.5, "many", [1]])
def test_a_number_of_passages_that_is_none_is_found_before_the_run(load, number: Any) -> None:
    search = {"tool_id": "search", "tool_args": {"search_url": "http://localhost:8000/retrieve", "topk": number}}
    entry = {"env_type": "roll_math", "env_config": {"dataset_name": "a.jsonl"}, "max_steps": 3}
    entry["tool_wrapper"] = {"tool_configs": [search]}
    tools = load(train_env_manager=SHOPPED, custom_envs={"W": entry}).config.environment.named["W"].settings["tools"]
    [problem] = tool_problems(tools, "tools")
    assert f"the option results of the tool retrieve is {number!r}" in str(problem)


def test_a_game_played_by_an_agent_runner_is_a_trajectory(load) -> None:
    proxied = (
        "+custom_env.FrozenLake.env_manager_cls=roll.pipeline.agentic.env_manager.proxy_env_manager.ProxyEnvManager"
    )
    runner = "+custom_env.FrozenLake.agent_runner_cls=roll.pipeline.agentic.agent_runner"
    loaded = load(proxied, f"{runner}.gem_runner.GEMRunner")
    assert not planned(loaded) and not loaded.config.environment.sample_per_turn
    [problem] = said(load(proxied, f"{runner}.swe_runner.SWERunner"))
    assert "is an agent of ROLL's own program" in problem


def test_rewards_are_compared_over_the_trajectories_of_a_tag(load) -> None:
    loaded = load("reward_normalization.grouping=tags")
    assert not planned(loaded) and loaded.config.environment.statistics_by_name
    assert (loaded.config.reward.normalize_mean, loaded.config.reward.normalize_std) == ("batch", "batch")
    plain = load("reward_normalization.grouping=tags", "reward_normalization.method=identity").config
    assert not plain.environment.statistics_by_name and not load().config.environment.statistics_by_name
    for override, word in (
        ("+whiten_advantages=true", "with whiten_advantages"),
        ("adv_estimator=step_reinforce", "with adv_estimator=step_reinforce"),
        ("+reward_normalization.norm_mean_type=batch", "over the batch"),
    ):
        more = ["+reward_normalization.norm_std_type=group"] if "norm_mean" in override else []
        assert any(word in text for text in said(load("reward_normalization.grouping=tags", override, *more))), word
    [problem] = said(load("reward_normalization.grouping=env_ids"))
    assert "grouping=env_ids is not supported: rewards are compared over the step, a tag or a group" in problem


def test_redundant_trajectories_are_further_episodes(load) -> None:
    loaded = load("+train_env_manager.group_size_redundancy=2")
    assert not planned(loaded)
    assert (loaded.config.environment.extra_episodes, loaded.config.rollout.samples_per_prompt) == (2, 4)
    [problem] = said(load("+train_env_manager.group_size_redundancy=-1"))
    assert problem.startswith("train_env_manager.group_size_redundancy is -1")


def test_a_ratio_per_segment_is_one_per_turn(load) -> None:
    assert load("+ratio_type=segment").config.loss.settings["ratio_of"] == "turn"
    worker = "actor_train.worker_cls=roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker"
    [problem] = said(load("+ratio_type=segment", f"+{worker}", "+actor_train.pg_variant=topr"))
    assert problem.startswith("ratio_type=segment is not supported with pg_variant=topr")


def test_gae_is_whitened_over_the_tokens_of_the_loss(load) -> None:
    for asked in (False, True):
        advantage = load("adv_estimator=gae", f"+whiten_advantages={asked}").config.advantage
        assert (advantage.name, advantage.whiten, advantage.estimator_whitens) == ("gae", asked, False)


@pytest.mark.parametrize(
    ("method", "grouping", "mean", "std"),
    [
        ("identity", "batch", "none", "none"),
        ("mean", "batch", "batch", "none"),
        ("mean_std", "batch", "batch", "batch"),
        ("asym_clip", "traj_group_id", "group", "group"),
        ("mean", "traj_group_id", "group", "none"),
    ],
)
def test_rewards_are_normalised_as_asked(load, method: str, grouping: str, mean: str, std: str) -> None:
    reward = load(reward_normalization={"method": method, "grouping": grouping}).config.reward
    assert (reward.normalize_mean, reward.normalize_std) == (mean, std)


def test_norm_types_go_before_the_method(load) -> None:
    norms = {"method": "mean_std", "grouping": "traj_group_id", "norm_mean_type": "batch", "norm_std_type": "group"}
    reward = load(reward_normalization=norms).config.reward
    assert (reward.normalize_mean, reward.normalize_std) == ("batch", "group")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["rollout_batch_size=18"], "rollout_batch_size=18 does not divide into groups: 4 trajectories at a time"),
        (["train_env_manager.num_groups_partition=[3]"], "names 2 environments, and train_env_manager.num_groups_partition has"),
        (["train_env_manager.num_groups_partition=[3,2]"], "adds up to 5, and there are 4 groups"),
        (["train_env_manager.tags=[FrozenLak,SimpleSokoban]"], "there is no environment FrozenLak in custom_envs"),
        (["custom_env.FrozenLake.env_type=frozen_lak"], "did you mean frozen_lake?"),
        (["custom_env.SimpleSokoban.env_config.dim_room=[6]"], "write [rows, columns], such as [6, 6]"),
        (["sequence_length=90"], "sequence_length=90 leaves no room beside turns of 100 tokens"),
        (["~sequence_length"], "sequence_length is not given"),
        (["actor_infer.generating_args.max_new_tokens=null", "~custom_env.FrozenLake.max_tokens_per_step"],
         "max_new_tokens is null, and custom_envs.FrozenLake has no max_tokens_per_step"),
        (["~actor_infer", "+train_env_manager.generating_args.max_new_tokens=null", "train_env_manager.tags=[]"],
         "use train_env_manager.generating_args.max_new_tokens=512"),
    ],
)  # fmt: skip
def test_what_cannot_be(load, overrides: list[str], problem: str) -> None:
    problems = said(load(*overrides))
    assert any(problem in text for text in problems), problems


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["custom_env.FrozenLake.env_type=alfworld"], "env_type=alfworld is planned"),
        (["+custom_env.FrozenLake.env_manager_cls=a.b.VLTrajEnvManager"], "VLTrajEnvManager is planned"),
    ],
)
def test_what_is_planned(load, overrides: list[str], reason: str) -> None:
    told = planned(load(*overrides))
    assert any(reason in text for text in told), told


def test_pictures_of_games(load) -> None:
    """VLTrajEnvManager: templates around the observation, and cells of gym_sokoban's and gymnasium's size."""
    seen = (
        "+custom_env.SimpleSokoban.env_config.render_mode=rgb_array", "+custom_env.FrozenLake.env_config.render_mode=rgb_array",
        f"+custom_env.SimpleSokoban.env_manager_cls={PICTURED}", f"+custom_env.FrozenLake.env_manager_cls={PICTURED}",
        "+custom_env.SimpleSokoban.pre_step_template='Turn {turn_idx}: '",
        "+custom_env.SimpleSokoban.next_step_template=' {actions_left} left'",
    )  # fmt: skip
    named = load(*seen).config.environment.named
    room, lake = (named[tag].settings for tag in ("SimpleSokoban", "FrozenLake"))
    assert (room["pictures"], room["pixels_per_cell"], lake["pictures"], lake["pixels_per_cell"]) == (
        True,
        16,
        True,
        64,
    )
    assert (room["template"], lake["template"]) == (
        "Turn {turn_idx}: {observation} {actions_left} left",
        "{observation}",
    )
    assert not said(load(*seen)) and not planned(load(*seen))
    [problem] = said(load(seen[0]))
    assert "shows pictures, which" in problem and "TrajEnvManager takes for text" in problem
    [problem] = said(load("+custom_env.FrozenLake.env_config.render_mode=human"))
    assert "render_mode is 'human'" in problem


def test_what_prompts_and_rewards_would_say_is_told(load) -> None:
    told = {
        one.key for one in load("+num_return_sequences_in_group=8", "+norm_mean_type=group", "+eval_steps=3").ignored
    }
    assert {"num_return_sequences_in_group", "norm_mean_type", "eval_steps"} <= told


def test_what_rlvr_alone_reads_is_told_when_it_is_written(load) -> None:
    names = (
        "difficulty_mask=true", "difficulty_low_threshold=0.1", "difficulty_high_threshold=0.9", "response_length=50",
        "val_prompt_length=20", "val_sequence_length=90",
    )  # fmt: skip
    before, loaded = load(), load(*(f"+{name}" for name in names))
    assert not planned(loaded) and loaded.config == before.config
    told = {one.key: one.reason for one in loaded.ignored}
    assert {name.partition("=")[0] for name in names} == set(told) - {one.key for one in before.ignored}
    assert "read by RLVR alone" in told["difficulty_mask"] and "sequence_length" in told["response_length"]


def test_the_native_sampler_reports_that_it_has_no_repetition_penalty(load) -> None:
    tags = ("FrozenLake", "SimpleSokoban", "LargerSokoban")
    validates = {**VALIDATES, "custom_envs": {name: f"${{custom_env.{name}}}" for name in tags}}
    for section, changes in (("train_env_manager", {}), ("val_env_manager", validates)):
        key = f"{section}.generating_args.repetition_penalty"
        loaded = load("~actor_infer", f"+{key}=1.1", **changes)
        assert any(one.key == key for one in loaded.ignored) or "repetition_penalty" in str(loaded.warnings)


def test_a_slip_in_env_config_is_named_with_its_key(load) -> None:
    slip = {"env_type": "frozen_lake", "max_steps": 3, "env_config": {"siez": 4, "is_random": True}}
    [problem] = load(custom_envs=BASE["custom_envs"] | {"FrozenLake": slip}).problems
    assert problem.what == "frozen_lake has no 'siez' in env_config" and problem.fix == "did you mean size?"
    assert problem.where.endswith("custom_envs.FrozenLake.env_config.siez")
    lake = slip | {"env_config": {"size": "four"}}
    [problem] = load(custom_envs=BASE["custom_envs"] | {"FrozenLake": lake}).problems
    assert problem.where.endswith("custom_envs.FrozenLake.env_config.size"), problem


def test_templates_of_2025_and_of_the_step_manager(load) -> None:
    """{state} counts turns from 0; a step manager's template is the whole prompt of its turn."""
    lake = {"env_type": "frozen_lake", "max_steps": 3, "max_tokens_per_step": 9, "reward_template": "R{reward}\n",
            "agent_template": "Turn {turn_idx}: {state}", "user_prompt_format": "<answer>"}  # fmt: skip
    settings = (
        load(custom_envs=BASE["custom_envs"] | {"FrozenLake": lake}).config.environment.named["FrozenLake"].settings
    )
    assert (settings["first_turn"], settings["reward_template"], settings["answer_format"]) == (
        0,
        "R{reward}\n",
        "<answer>",
    )
    assert "turns_apart" not in settings
    step = lake | {"agent_template": "{env_instruction} {history}", "env_manager_cls": STEPS, "history_length": 4}
    one = {"train_env_manager": BASE["train_env_manager"] | {"tags": ["FrozenLake"], "num_groups_partition": [4]}}
    config = load(custom_envs={"FrozenLake": step}, **one).config.environment
    settings = config.named["FrozenLake"].settings
    assert config.sample_per_turn and (settings["turns_apart"], settings["history_turns"]) == (True, 3)
    assert "first_turn" not in settings


def test_an_environment_of_ones_own_is_asked_for_once_and_the_fix_says_how(load) -> None:
    kinds = {tag: {"env_type": "tictactoe", "max_steps": 3} for tag in ("First", "Second")}
    manager = BASE["train_env_manager"] | {"tags": ["First", "Second"], "num_groups_partition": [3, 1]}
    (problem,) = load(custom_envs=kinds, train_env_manager=manager).problems
    assert problem.what.startswith("there is no environment tictactoe (known: ")
    assert problem.fix.startswith("one of your own is env_type: FILE.py:Class")


def test_a_class_that_a_fork_registers_plays_its_environment(load, tmp_path: Path) -> None:
    package = tmp_path / "roll" / "pipeline" / "agentic" / "env"
    package.mkdir(parents=True)
    registered = 'import gem\ngem.register("poker", entry_point="roll.games.poker:Poker")\n'
    registered += 'gem.register(env_id="dice", entry_point="roll.games:Dice")\n'
    (package / "__init__.py").write_text(registered)
    kinds = {
        "First": {
            "env_type": "poker",
            "max_steps": 3,
            "env_config": {"players": 2},
            "agent_template": "{observation}?",
        },
        "Second": {"env_type": "dice", "max_steps": 3, "agent_system_template": "S"},
    }
    manager = BASE["train_env_manager"] | {"tags": ["First", "Second"], "num_groups_partition": [3, 1]}
    loaded = load(custom_envs=kinds, train_env_manager=manager)
    assert said(loaded) == []
    first, second = (loaded.config.environment.named[tag] for tag in ("First", "Second"))
    assert (first.name, first.settings["path"], first.settings["root"]) == (
        "gem_class",
        "roll.games.poker:Poker",
        str(tmp_path.resolve()),
    )
    assert (first.settings["options"], first.settings["template"]) == ({"players": 2}, "{observation}?")
    assert (second.settings["path"], second.settings["system"]) == ("roll.games:Dice", "S")


def test_the_context_of_a_turn_is_reported_at_sequence_length(load) -> None:
    field = "environment.max_context_tokens"
    [found] = load().locate([Problem("it is too long", fix=f"lower {field}", field=field)])
    assert (found.field, found.fix) == ("sequence_length", "lower sequence_length")


THREE = (
    "rollout_batch_size=256",
    "actor_train.device_mapping=[0,1,2]",
    "actor_infer.device_mapping=[0,1,2]",
    "actor_train.strategy_args.strategy_name=fsdp2_train",
    "actor_train.training_args.gradient_accumulation_steps=4",
    "actor_train.infer_batch_size=8",
)


@pytest.mark.parametrize(
    ("mode", "fit", "trained", "said_so"),
    [
        ("copy", "copy", 288, "32 are copied"),
        ("delete", "drop", 240, "16 are left out"),
        ("auto", "nearest", 240, "16 are left out"),
        ("random_sample", "one", 48, "208 are left out"),
    ],
)
def test_trajectories_are_copied_or_left_out_until_they_divide(
    load, mode: str, fit: str, trained: int, said_so: str
) -> None:
    """256 over 3 ranks: an update has 4 x 4 x 3 = 48, a pass without gradient 8 x 3 = 24; 256 = 5 x 48 + 16."""
    loaded = load(*THREE, f"batch_adjust_mode={mode}")
    assert not planned(loaded)
    config = loaded.config
    assert (config.resampling.fit, config.resampling.multiple_of) == (fit, 48)
    assert config.policy.sequences_per_mini_batch == 48 and config.policy.shuffle == (trained > 48)
    plan, problems = plan_batches(config, None)
    assert plan is not None and not problems
    assert (plan.trained_samples_per_step, plan.updates_per_step) == (trained, trained // 48)
    warnings = str(loaded.warnings)
    assert "256 trajectories do not divide by 48" in warnings and said_so in warnings


def test_passes_without_gradient_count_too(load) -> None:
    """Updates of 48, and 40 x 3 = 120 or 8 x 3 = 24 without gradient. A reference that ROLL would have counts, an adapter's own
    does not."""

    def multiple(*more: str) -> int:
        found = load(*THREE, *more)
        assert not planned(found)
        return found.config.resampling.multiple_of

    assert multiple("actor_train.infer_batch_size=40", "init_kl_coef=0") == 240
    reference = ("+reference.device_mapping=[0,1,2]", "+reference.infer_batch_size=7")
    assert multiple("init_kl_coef=0", *reference) == 48
    for has_one in ("init_kl_coef=0.1", "use_kl_loss=true"):
        assert multiple(has_one, *reference) == 336  # lcm(48, 24, 21)
    adapter = ("actor_train.model_args.lora_target=all-linear", "actor_train.model_args.lora_rank=8")
    assert multiple("use_kl_loss=true", *reference, *adapter) == 48
    split = ("reference.strategy_args.strategy_name=megatron_infer",
             "+reference.strategy_args.strategy_config.tensor_model_parallel_size=3")  # fmt: skip
    assert multiple("init_kl_coef=0.1", *reference, *split) == 336  # lcm(48, 24, 7)


def test_a_step_that_divides_is_left_as_it_is(load) -> None:
    loaded = load("batch_adjust_mode=delete")
    assert loaded.config.resampling.fit == "none" and not planned(loaded)
    told = {one.key: one.reason for one in loaded.ignored}
    assert told["batch_adjust_mode"] == "16 trajectories divide by 16: none is copied or left out"


def test_rows_of_the_step_manager_are_turns(load) -> None:
    """Each row of an update is a turn, as in ROLL, so their number is the episodes' to tell."""
    loaded = load(*(f"+custom_env.{tag}.env_manager_cls={STEPS}" for tag in ("FrozenLake", "SimpleSokoban")))
    assert not planned(loaded)
    config = loaded.config
    assert (config.resampling.fit, config.resampling.multiple_of) == ("copy", 16)
    plan, _ = plan_batches(config, None)
    assert plan is not None and plan.counts_turns and plan.updates_per_step == 2


MINE = "roll.pipeline.agentic.env_manager.mine.MineEnvManager"


def checkout_with(tmp_path: Path, text: str) -> None:
    file = tmp_path / Path(*MINE.split(".")[:-1]).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(text)


def test_a_manager_of_the_checkout_plays_itself(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shop = {"env_type": "a_shop_of_mine", "env_manager_cls": MINE, "max_steps": 3, "env_config": {"x": 1}}
    changes: dict[str, Any] = {"custom_envs": {"FrozenLake": "${custom_env.FrozenLake}", "SimpleSokoban": shop},
                               "tracker_kwargs": {"api_key": "hidden"}}  # fmt: skip
    assert "there is no environment a_shop_of_mine" in "".join(said(load(**changes)))
    checkout_with(tmp_path, "class MineEnvManager: ...")
    loaded = load(**changes)
    assert not planned(loaded)
    lake, mine = (loaded.config.environment.named[tag] for tag in ("FrozenLake", "SimpleSokoban"))
    assert (lake.name, mine.name, mine.max_turns) == ("frozen_lake", "roll_manager", 3)
    settings = mine.settings
    assert (settings["folder"], settings["tag"], settings["model"]) == (str(tmp_path), "SimpleSokoban", "m")
    assert settings["values"]["custom_envs"]["SimpleSokoban"] == shop
    assert settings["values"]["custom_envs"]["FrozenLake"]["env_type"] == "frozen_lake"
    assert "tracker_kwargs" not in settings["values"]
    # A manager cuts its last turn to what is left of sequence_length itself
    environment = loaded.config.environment
    assert (environment.max_context_tokens, environment.max_sequence_tokens) == (None, 1000)
    assert any(MINE in text and "a class of yours" in text for text in map(str, loaded.warnings))


def test_a_manager_that_asks_other_weights_does_not_train(
    load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manager = (f"+custom_env.FrozenLake.env_manager_cls={MINE}", "train_env_manager.tags=[FrozenLake]",
               "train_env_manager.num_groups_partition=[4]")  # fmt: skip
    assert f"env_manager_cls={MINE} is planned" in "".join(planned(load(*manager)))
    checkout_with(tmp_path, "class MineEnvManager:\n    def ask(self, data): data.meta_info['lora_name'] = None")
    assert "asks for responses of other weights (lora_name in" in "".join(planned(load(*manager)))


def test_an_environment_that_is_not_here_is_played_by_the_checkouts_manager(
    load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kind = ("custom_env.FrozenLake.env_type=countdown", "train_env_manager.tags=[FrozenLake]",
            "train_env_manager.num_groups_partition=[4]")  # fmt: skip
    assert "env_type=countdown is planned" in "".join(planned(load(*kind)))
    file = tmp_path / "roll/pipeline/agentic/env_manager/traj_env_manager.py"
    file.parent.mkdir(parents=True)
    file.write_text("class TrajEnvManager: ...")
    assert load(*kind).config.environment.named["FrozenLake"].name == "roll_manager"
