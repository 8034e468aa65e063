"""Episodes that are saved in the middle: continued, they are what they would have been without the interruption."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from posttrain.backends.environments.inline import InlineHost
from posttrain.backends.environments.processes import ProcessHost
from posttrain.backends.rollout.native import NativeEngine
from posttrain.data.turns import TemplateTurns
from posttrain.interfaces.env import EnvEvent, EnvFailed, EnvHost, EnvSpec
from posttrain.interfaces.worlds import EpisodeRules, Worlds
from posttrain.models.loading import load_causal_lm
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory
from posttrain.steps.episodes_in_flight import Episodes
from posttrain.steps.in_flight import Place

pytestmark = pytest.mark.usefixtures("warm_children")

PROMPTS = [Prompt(prompt_id=f"p{n}", token_ids=(), text="", data_source="", extra_info={"seed": n}) for n in range(2)]
PLACES = [Place(serial, number) for serial in range(2) for number in range(2)]
COUNTING = f"{Path(__file__).with_name('counting_env.py')}:Counting"
SAMPLING = SamplingParams(samples_per_prompt=2, max_response_tokens=5, seed=3)


class Holding(InlineHost):
    """Holds its answers back while it is told to, as an environment that takes its time."""

    holds = False

    def wait(self, timeout_s: float) -> list[tuple[str, EnvEvent]]:
        return [] if self.holds else super().wait(timeout_s)


class Playing:
    def __init__(self, folder: Path, host: EnvHost, name: str, settings: Mapping[str, Any]):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = load_causal_lm(str(folder), dtype=torch.float32)
        self.engine = NativeEngine(model, tokenizer, max_concurrent_sequences=8, max_prefill_tokens=300)
        rules = EpisodeRules(max_response_tokens=5, max_context_tokens=400)
        spec = EnvSpec(name=name, settings=settings)
        worlds = Worlds(
            host, TemplateTurns(tokenizer, {}), rules, lambda prompt: replace(spec, row={"id": prompt.prompt_id})
        )
        self.host = host
        self.episodes = Episodes(worlds)

    def begin(self, state: Mapping[str, Any] | None = None) -> None:
        if state is not None:
            self.episodes.restore(json.loads(json.dumps(state)))
        for place in PLACES:
            self.episodes.begin(place, PROMPTS[place.serial], SAMPLING)

    def play(self, polls: int | None = None) -> dict[Place, Trajectory]:
        """Play to the end, or so many polls of one pass each."""
        found: dict[Place, Trajectory] = {}
        with self.engine.open_stream(SAMPLING) as stream:
            self.episodes.resume()
            real = stream.wait
            stream.wait = lambda timeout_s, passes=None: real(timeout_s, 1)  # type: ignore[method-assign]
            while len(found) < len(PLACES) and (polls is None or polls > 0):
                found |= dict(self.episodes.poll(stream))
                polls = None if polls is None else polls - 1
            self.episodes.suspend(stream)
        return found


def same(found: Mapping[Place, Trajectory], expected: Mapping[Place, Trajectory]) -> None:
    """Log-probs differ by rounding: those of a continued turn are computed by another pass."""
    assert found.keys() == expected.keys()
    for place, each in expected.items():
        assert found[place].logprobs == pytest.approx(each.logprobs, abs=1e-4)
        assert replace(found[place], logprobs=each.logprobs) == each


GAMES: Sequence[tuple[str, dict[str, Any]]] = [
    ("guess_number", {"format_penalty": -0.25, "max_turns": 4, "template": "{observation} {turn_idx} {actions_left}"}),
    (
        "frozen_lake",
        {"size": 3, "slippery": True, "max_turns": 3, "action_pattern": "(.)", "action_words": {"Left": "e"}},
    ),
]


@pytest.mark.parametrize(("name", "settings"), GAMES)
@pytest.mark.parametrize("polls", [1, 4, 7, 9])
def test_a_continued_episode_is_the_uninterrupted_one(
    tiny_llama: Path, name: str, settings: dict[str, Any], polls: int
) -> None:
    whole = Playing(tiny_llama, InlineHost(), name, settings)
    whole.begin()
    expected = whole.play()
    first = Playing(tiny_llama, InlineHost(), name, settings)
    first.begin()
    early = first.play(polls)
    assert len(early) < len(PLACES)  # else the test interrupts nothing
    state = first.episodes.state()
    assert len(state) == len(PLACES) - len(early) - len(first.episodes._closing)
    again = Playing(tiny_llama, InlineHost(), name, settings)
    again.begin(state)
    again_from_the_start = [place for place in PLACES if again.episodes.began_again(place.serial)]
    assert not again_from_the_start or early or first.episodes._closing
    later = again.play()
    same({**later, **early}, expected)
    assert all(each.turn_count > 1 for each in expected.values())


class Dying(InlineHost):
    """Its process for the first episode ends while the policy takes a turn."""

    dies = False

    def wait(self, timeout_s: float) -> list[tuple[str, EnvEvent]]:
        found = super().wait(timeout_s)
        if self.dies:
            self.dies = False
            found.append((str(PLACES[0]), EnvFailed("crashed", "its process ended")))
        return found


def test_the_turn_of_an_episode_whose_environment_has_died_is_withdrawn(tiny_llama: Path) -> None:
    """Its request leaves the sampler, whose other responses are suspended and continued as before."""
    name, settings = GAMES[0]
    play = Playing(tiny_llama, host := Dying(), name, settings)
    play.begin()
    with play.engine.open_stream(SAMPLING) as stream:
        play.episodes.resume()
        real = stream.wait
        stream.wait = lambda timeout_s, passes=None: real(timeout_s, 1)  # type: ignore[method-assign]
        assert play.episodes.poll(stream) == []
        assert play.episodes.requests == len(PLACES)
        host.dies = True
        [(place, lost)] = play.episodes.poll(stream)
        assert place == PLACES[0] and lost.stop_reason is StopReason.FAILED
        assert play.episodes.requests == len(PLACES) - 1
        cuts = play.episodes.suspend(stream)
    assert [cut.place for cut in cuts] == PLACES[1:]
    assert play.play(60).keys() == set(PLACES[1:])


def test_an_action_that_the_environment_had_not_answered_is_taken_again(tiny_llama: Path) -> None:
    name, settings = GAMES[0]
    whole = Playing(tiny_llama, Holding(), name, settings)
    whole.begin()
    expected = whole.play()
    first = Playing(tiny_llama, host := Holding(), name, settings)
    first.begin()
    first.play(1)
    host.holds = True
    first.play(12)  # all turns end, and no answer comes
    state = first.episodes.state()
    assert [saved["acting"] is not None and saved["turns"] == [] for saved in state.values()] == [True] * len(PLACES)
    again = Playing(tiny_llama, Holding(), name, settings)
    again.begin(state)
    assert json.loads(json.dumps(again.episodes.state())) == json.loads(json.dumps(state))  # saved again at once
    same(again.play(), expected)


@pytest.mark.parametrize("turns", [1, 3, 6])
def test_an_environment_that_asks_is_continued_where_it_waited(tiny_llama: Path, turns: int) -> None:
    asking = COUNTING.replace("Counting", "Asking")
    whole = Playing(tiny_llama, ProcessHost(4, 20.0), asking, {})
    whole.begin()
    expected = whole.play()
    whole.host.close()
    assert {each.env_stop for each in expected.values()} == {"over"} and all(
        each.turn_count == 3 for each in expected.values()
    )
    first = Playing(tiny_llama, ProcessHost(4, 20.0), asking, {})
    first.begin()
    early: dict[Place, Trajectory] = {}
    while max(first.episodes._counts.values(), default=0) < turns:  # the sixth turn is the last
        early |= first.play(1)
    state = first.episodes.state()
    first.host.close()  # the processes are gone, as after a kill
    assert state
    again = Playing(tiny_llama, ProcessHost(4, 20.0), asking, {})
    again.begin(state)
    later = again.play()
    again.host.close()
    same({**later, **early}, expected)


def test_what_cannot_be_saved_begins_again(tiny_llama: Path) -> None:
    first = Playing(tiny_llama, InlineHost(), COUNTING, {"saves": False})
    first.begin()
    first.play(9)
    assert first.episodes.state() == {}
    again = Playing(tiny_llama, InlineHost(), COUNTING, {})
    again.begin({})
    assert again.episodes.began_again(0)


def test_an_environment_in_a_process_of_its_own_is_restored(tiny_llama: Path) -> None:
    """One that began at 0 again would see more than 3 turns before it ends."""
    first = Playing(tiny_llama, ProcessHost(4, 20.0), COUNTING, {})
    first.begin()
    while not (state := first.episodes.state()):
        first.play(1)
    first.host.close()
    again = Playing(tiny_llama, ProcessHost(4, 20.0), COUNTING, {})
    again.begin(state)
    found = again.play()
    again.host.close()
    assert [dict(each.env_metrics) for each in found.values()] == [{"count": 3.0}] * 4
    assert [each.turn_count for each in found.values()] == [3] * 4
