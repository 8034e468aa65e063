"""A game of two players: the rules by hand, and self-play in which one side alone is trained."""

from __future__ import annotations

import json
from typing import Any

import pytest

from posttrain.backends.environments.processes import ProcessHost
from posttrain.config import RunConfig
from posttrain.config.checks.environment import environment_problems
from posttrain.config.data import DataConfig
from posttrain.config.environment import EnvironmentConfig
from posttrain.config.model import ModelConfig
from posttrain.data.turns import TemplateTurns
from posttrain.envs.nim import nim
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvAsk, EnvSpec, EnvStep
from posttrain.interfaces.worlds import EpisodeRules, Worlds
from posttrain.loops.by_hand import TypedTurns
from posttrain.models.tiny import tiny_tokenizer
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams
from posttrain.steps.play import play


def begun(**settings: Any) -> tuple[Any, list[Any]]:
    env, events = nim(EnvSpec(name="nim"), **settings), []
    env.begin(1, events.append)
    return env, events


def take(env: Any, events: list[Any], text: str) -> Any:
    env.answer(events[-1].turn, text, cut=False, prompt_tokens=1, response_tokens=1)
    return events[-1]


def test_the_best_opponent_leaves_a_multiple_of_four() -> None:
    env, events = begun(stones=7, opponent="best", begins="opponent")
    assert isinstance(events[0], EnvAsk) and events[0].messages[0]["content"].endswith("I take 3. 4 left.")
    asked = take(env, events, "I take 1 stone")  # 3 are left, and the opponent takes them
    assert asked == EnvStep(done=True, stop="lost", reward=0.0)
    assert env.close() == {"success": 0.0, "num_actions": 1.0, "action_is_valid": 1.0}


def test_the_player_wins_and_what_is_no_move_loses() -> None:
    env, events = begun(stones=3, begins="player")
    assert take(env, events, "3") == EnvStep(done=True, stop="solved", reward=1.0)
    for text in ("4", "none", "0", "9" * 5000):
        env, events = begun(stones=4, begins="player")
        assert take(env, events, text) == EnvStep(done=True, stop="illegal", reward=0.0)
        assert env.close()["action_is_valid"] == 0.0


@pytest.mark.parametrize("opponent", ["policy", "random", "best"])
def test_a_saved_game_goes_on_as_it_would_have(opponent: str) -> None:
    def rest(env: Any, events: list[Any]) -> list[Any]:
        while isinstance(events[-1], EnvAsk):
            take(env, events, "1")
        return [*events, env.close()]

    settings = {"stones": [14, 15], "opponent": opponent}
    states, env, events = [], *begun(**settings)
    while isinstance(events[-1], EnvAsk):
        states.append((len(events), json.loads(json.dumps(env.state()))))
        take(env, events, "1")
    assert len(states) > 3
    for count, state in states:
        again = nim(EnvSpec(name="nim"), **settings)
        continued = list(events[:count])
        again.restore(state, continued.append)  # type: ignore[attr-defined]
        assert rest(again, continued) == [*events, env.close()]


def test_the_policy_takes_both_sides_and_one_is_trained() -> None:
    """8 stones: the player takes 3, the other 2, the player the last 3. Only the player's tokens are in the trajectory."""
    tokenizer = tiny_tokenizer()
    said = iter(["3", "2", "3"])
    sampler = TypedTurns(lambda tokens: next(said), lambda text: tuple(text.encode()), tokenizer.eos_token_id)
    host = ProcessHost(1, 30.0, ["nim"])
    settings = {"stones": 8, "opponent": "policy", "begins": "player"}
    worlds = Worlds(
        host=host,
        writer=TemplateTurns(tokenizer, {}),
        rules=EpisodeRules(max_response_tokens=8, max_context_tokens=500),
        spec_of=lambda prompt: EnvSpec(name="nim", settings=settings),
    )
    prompt = Prompt(prompt_id="p", token_ids=(), text="", data_source="nim", extra_info={"seed": 4})
    try:
        [group] = play(sampler, [prompt], SamplingParams(max_response_tokens=8), worlds)
    finally:
        host.close()
    [trajectory] = group.trajectories
    assert trajectory.turn_texts == ("3", "3") and trajectory.env_reward == 1.0 and trajectory.env_stop == "solved"
    assert len(trajectory.samples) == 1 and trajectory.turns[-1].reward == 1.0
    sampled = [token for token, mine in zip(trajectory.token_ids, trajectory.sampled_mask, strict=True) if mine]
    assert sampled == [ord("3"), tokenizer.eos_token_id] * 2
    assert "I take 2. 3 left." in trajectory.text, "the other side's move is read, and not trained"


def test_the_seed_draws_the_stones_and_the_rules_can_be_others() -> None:
    seen = set()
    for seed in range(20):
        env, events = nim(EnvSpec(name="nim"), stones=[5, 9], begins="player", instruction=""), []
        env.begin(seed, events.append)
        seen.add(events[0].messages[0]["content"])  # type: ignore[attr-defined]
    assert seen == {"5 left.", "9 left."}


def test_it_needs_a_process_of_its_own() -> None:
    environment = EnvironmentConfig(name="nim", train_episodes=8, workers=0)
    config = RunConfig(model=ModelConfig(path="m"), data=DataConfig(train_files=[]), environment=environment)
    assert [problem.field for problem in environment_problems(config)] == ["environment.workers"]


def test_settings_that_cannot_be_are_refused() -> None:
    for settings in (
        {"most": 13},
        {"stones": []},
        {"stones": [9, 2]},
        {"stones": 3},
        {"stones": 3, "begins": "opponent"},
        {"opponent": "nobody"},
        {"begins": "me"},
    ):
        with pytest.raises(ConfigError):
            nim(EnvSpec(name="nim"), **settings)  # type: ignore[arg-type]
