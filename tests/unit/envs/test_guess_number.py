"""Guess the number, with scripted players."""

from __future__ import annotations

import pytest

from posttrain.envs.guess_number import GuessNumber, guess_number
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvSpec

SPEC = EnvSpec(name="guess_number")


def test_halving_finds_every_number_in_four_guesses() -> None:
    secrets = set()
    for seed in range(60):
        env = guess_number(SPEC)
        env.reset(seed)
        low, high, told, reward = 1, 10, "", 0.0
        for _ in range(4):
            guess = (low + high) // 2
            answer = env.step(f"{guess}")
            told, reward = answer.messages[0]["content"], answer.reward or 0.0
            if answer.done:
                break
            low, high = (guess + 1, high) if "higher" in told else (low, guess - 1)
        assert (told, reward, answer.stop) == ("Right.", 1.0, "solved")
        secrets.add(guess)
    assert secrets == set(range(1, 11))


def test_answers_narrow_the_state_and_consistent_guesses_are_rewarded() -> None:
    game = GuessNumber(1, 10, 0.5)
    game.begin(0)
    game.secret = 7
    told = [game.act(str(guess)) for guess in (5, 3, 9)]
    assert [one.seen for one in told] == [
        "It is higher than 5.",
        "It is higher than 3.",
        "It is lower than 9.",
    ]
    assert [one.reward for one in told] == [0.5, 0.0, 0.5]  # 3 was ruled out
    assert [one.effective for one in told] == [True, False, True]
    assert game.state() == "6-8"
    assert game.act(None).seen == "Say a number from 1 to 10."
    assert game.act("7").reward == 1.5


def test_the_first_number_of_an_answer_counts() -> None:
    env = guess_number(SPEC, high=20, max_turns=2)
    env.reset(0)
    assert env.step("30 or 4").state_key == "1-20"  # no number of the range
    assert env.step("no").stop == "max_turns"
    assert env.close()["action_is_valid"] == 0.0


def test_equal_seeds_are_equal_games() -> None:
    def secret(seed: int) -> int:
        game = GuessNumber(1, 1000, 0.0)
        game.begin(seed)
        return game.secret

    assert secret(1) == secret(1)
    assert len({secret(seed) for seed in range(20)}) > 15


def test_a_range_of_nothing() -> None:
    with pytest.raises(ConfigError, match="low is 5 and high is 5; use a high above low"):
        guess_number(SPEC, low=5, high=5)
