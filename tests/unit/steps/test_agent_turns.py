"""Agents with several turns at a time, with abandoned ones or two conversations: what is sampled, trained and counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from posttrain.backends.environments.processes import ProcessHost
from posttrain.data.turns import TemplateTurns
from posttrain.interfaces.env import EnvSpec
from posttrain.interfaces.rollout_engine import Request, check_requests
from posttrain.interfaces.worlds import EpisodeRules, Worlds
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory
from posttrain.steps.episodes_in_flight import Episodes
from posttrain.steps.in_flight import Place
from posttrain.steps.play import play
from toy import toy_tokenizer

AGENTS = '''
import json, socket, threading, time, urllib.request

def ask(episode, *messages, timeout=30, **more):
    body = json.dumps({"messages": list(messages), **more}).encode()
    request = urllib.request.Request(episode.base_url + "/chat/completions", body, {"Authorization": "Bearer " + episode.api_key})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)

def said(answer):
    return answer["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}

def interleaved(episode):
    """Two conversations of two turns, a turn of one after a turn of the other."""
    one, two = [user("one")], [user("two")]
    for talk in (one, two):
        talk.append(said(ask(episode, *talk)))
        talk.append(user("and"))
    for talk in (one, two):
        ask(episode, *talk)
    return 4.0

def branching(episode):
    """Two requests that go on behind the same answer: the second one is a sample of its own."""
    start = [user("one")]
    start.append(said(ask(episode, *start)))
    ask(episode, *start, user("left"))
    ask(episode, *start, user("right"))
    return 1.0

def parallel(episode):
    found = {}
    def work(name):
        found[name] = said(ask(episode, user(name)))["content"]
    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"reward": len(found), "metrics": {"ends": sum(text.endswith("x") for text in found.values())}}

def impatient(episode):
    """The second turn is tried three times."""
    talk = [user("one")]
    talk += [said(ask(episode, *talk)), user("slow")]
    for timeout in (0.4, 0.4, 30):
        try:
            ask(episode, *talk, timeout=timeout)
            return 1.0
        except (TimeoutError, socket.timeout, OSError):
            time.sleep(0.05)

def leaves(episode):
    """Ends while a request of its own is being answered."""
    talk = [user("one")]
    talk += [said(ask(episode, *talk)), user("slow")]
    threading.Thread(target=ask, args=(episode, *talk), daemon=True).start()
    time.sleep(0.3)
    return 1.0

def counts(episode):
    usage = ask(episode, user("one"))["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return {"reward": 1.0, "metrics": usage}
'''


@dataclass
class Sampler:
    """Says "x" to every request, in the order ``picks`` gives; requests that it does not pick wait."""

    picks: Callable[[Sequence[Request], int], Sequence[Request]] = lambda waiting, answered: waiting
    asked: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    answered: int = 0

    def open_stream(self, sampling: SamplingParams, on_tokens: object = None) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def close(self) -> None: ...

    def submit(self, requests: Sequence[Request]) -> None:
        check_requests(requests, [each.sample_id for each in self.waiting])
        self.asked += requests
        self.waiting += requests

    def cancel(self, sample_ids: Collection[str]) -> None:
        self.cancelled += [each.sample_id for each in self.waiting if each.sample_id in sample_ids]
        self.waiting = [each for each in self.waiting if each.sample_id not in sample_ids]

    def wait(self, timeout_s: float) -> list[Trajectory]:
        picked = list(self.picks(self.waiting, self.answered))
        if not picked:
            time.sleep(0.01)
        self.waiting = [each for each in self.waiting if each not in picked]
        self.answered += len(picked)
        return [
            Trajectory(
                sample_id=each.sample_id,
                token_ids=tuple(b"x$"),
                logprobs=(-0.5, -0.5),
                text="x",
                stop_reason=StopReason.EOS,
                policy_version=1,
            )
            for each in picked
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "agents.py").write_text(AGENTS)
    return folder


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[ProcessHost]:
    made = ProcessHost(2, 20.0, ["agent"], own=[f"{folder}/agents.py:parallel"])
    yield made
    made.close()


@pytest.fixture
def played(folder: Path, host: ProcessHost) -> Callable[..., Trajectory]:
    def run(name: str, sampler: Sampler, max_turns: int | None = None, **rules: int) -> Trajectory:
        spec = EnvSpec(name="agent", settings={"function": f"{folder}/agents.py:{name}"}, max_turns=max_turns)
        limits = {"max_response_tokens": 10, "max_context_tokens": 1000, "max_turns": max_turns} | rules
        writer = TemplateTurns(toy_tokenizer(), {})
        worlds = Worlds(host=host, writer=writer, rules=EpisodeRules(**limits), spec_of=lambda _: spec)
        prompt = Prompt(prompt_id="p", token_ids=(), text="", data_source="t")
        [group] = play(sampler, [prompt], SamplingParams(max_response_tokens=10), worlds)
        [trajectory] = group.trajectories
        return trajectory

    return run


def text_of(sample: Trajectory) -> tuple[str, str, str]:
    """What a sample's prompt and response hold, and which tokens are trained."""
    mask = "".join("1" if trained else "0" for trained in sample.sampled_mask)
    return bytes(sample.prompt_token_ids or ()).decode(), bytes(sample.token_ids).decode(), mask


def test_interleaved_conversations_continue_each_their_own(played: Callable[..., Trajectory]) -> None:
    sampler = Sampler()
    trajectory = played("interleaved", sampler)
    assert [text_of(sample) for sample in trajectory.samples] == [
        ("Uone$\nA", "x$\nUand$\nAx$", "11" + "0" * 8 + "11"),
        ("Utwo$\nA", "x$\nUand$\nAx$", "11" + "0" * 8 + "11"),
    ]
    assert trajectory.failure == "" and trajectory.env_reward == 4.0 and trajectory.turn_count == 4
    assert [turn.reward for sample in trajectory.samples for turn in sample.turns] == [None, None, None, 4.0]
    assert [each.conversation for each in sampler.asked] == ["p/0/1", "p/0/2", "p/0/1", "p/0/2"]


def test_a_second_branch_is_a_sample_of_its_own(played: Callable[..., Trajectory]) -> None:
    trajectory = played("branching", Sampler())
    assert [text_of(sample)[:2] for sample in trajectory.samples] == [
        ("Uone$\nA", "x$\nUleft$\nAx$"),
        ("Uone$\nAx$\nUright$\nA", "x$"),
    ]


def test_parallel_requests_do_not_wait_for_each_other(played: Callable[..., Trajectory]) -> None:
    """Nothing is answered before all three requests are there."""
    sampler = Sampler(lambda waiting, answered: waiting if len(waiting) == 3 else [])
    trajectory = played("parallel", sampler)
    assert trajectory.env_reward == 3.0 and len(trajectory.samples) == 3
    assert dict(trajectory.env_metrics)["ends"] == 3.0
    again = Sampler(lambda waiting, answered: waiting if len(waiting) == 3 else [])
    played("parallel", again)
    # whichever thread is quicker, a request draws the same random numbers
    named = [{each.token_ids: each.sample_id for each in one.asked} for one in (sampler, again)]
    assert named[0] == named[1] and len(named[0]) == 3


def test_abandoned_requests_are_neither_sampled_nor_trained_nor_counted(played: Callable[..., Trajectory]) -> None:
    """The second turn is answered at its third try only."""
    tries: list[Request] = []

    def third_try(waiting: Sequence[Request], answered: int) -> Sequence[Request]:
        tries.extend(each for each in waiting if not any(each is one for one in tries))
        return waiting if answered == 0 or len(tries) == 4 else []

    sampler = Sampler(third_try)
    trajectory = played("impatient", sampler, max_turns=2)
    assert [text_of(sample)[:2] for sample in trajectory.samples] == [("Uone$\nA", "x$\nUslow$\nAx$")]
    assert trajectory.env_reward == 1.0 and trajectory.turn_count == 2 and trajectory.sampled_tokens == 4
    metrics = dict(trajectory.env_metrics)
    assert (metrics["num_actions"], metrics["abandoned_turns"], metrics["refused_turns"]) == (2, 2, 0)
    assert len(sampler.asked) == 4 and len(sampler.cancelled) == 2
    # each try draws the same random numbers, and would have got the same answer
    assert len({each.sample_id for each in sampler.asked[1:]}) == 1


def test_a_request_that_outlives_its_agent_does_not_count(played: Callable[..., Trajectory]) -> None:
    sampler = Sampler(lambda waiting, answered: waiting if answered == 0 else [])
    trajectory = played("leaves", sampler)
    assert [text_of(sample)[:2] for sample in trajectory.samples] == [("Uone$\nA", "x$")]
    assert trajectory.env_reward == 1.0 and len(sampler.cancelled) == 1


def test_usage_counts_the_tokens_of_a_turn(played: Callable[..., Trajectory]) -> None:
    metrics = dict(played("counts", Sampler()).env_metrics)
    # Uone$⏎A is 7 tokens, x$ is 2
    assert [metrics[f"{name}_tokens"] for name in ("prompt", "completion", "total")] == [7, 2, 9]


def test_limits_hold_for_all_conversations_together(played: Callable[..., Trajectory]) -> None:
    refused = dict(played("parallel", Sampler(), max_turns=2).env_metrics)
    assert (refused["num_actions"], refused["refused_turns"]) == (2, 1)
    # two answers of 2 tokens each; the third turn has no room
    short = played("interleaved", Sampler(), max_trajectory_tokens=4)
    assert short.stop_reason is StopReason.LENGTH and short.turn_count == 2 and short.env_reward is None


def test_asynchronous_runs_play_the_same_conversations(folder: Path, host: ProcessHost) -> None:
    spec = EnvSpec(name="agent", settings={"function": f"{folder}/agents.py:impatient"})
    rules = EpisodeRules(max_response_tokens=10, max_context_tokens=1000)
    episodes = Episodes(
        Worlds(host=host, writer=TemplateTurns(toy_tokenizer(), {}), rules=rules, spec_of=lambda _: spec)
    )
    prompt = Prompt(prompt_id="p", token_ids=(), text="", data_source="t")
    tries: set[int] = set()

    def third_try(waiting: Sequence[Request], answered: int) -> Sequence[Request]:
        tries.update(map(id, waiting))
        return waiting if answered == 0 or len(tries) == 4 else []

    sampler, ended = Sampler(third_try), []
    episodes.begin(Place(0, 0), prompt, SamplingParams(max_response_tokens=10))
    until = time.monotonic() + 30
    while not ended and time.monotonic() < until:
        ended = episodes.poll(sampler)  # type: ignore[arg-type]
    [(place, trajectory)] = ended
    assert place == Place(0, 0) and trajectory.env_reward == 1.0
    assert [text_of(sample)[:2] for sample in trajectory.samples] == [("Uone$\nA", "x$\nUslow$\nAx$")]
    assert dict(trajectory.env_metrics)["abandoned_turns"] == 2 and len(sampler.cancelled) == 2
    assert {each.draw_name for each in sampler.asked[1:]} == {sampler.asked[1].draw_name}
