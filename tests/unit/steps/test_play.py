"""The worked traces of both conversation modes, and what happens to episodes that end early, fail or change their history.

Toy language: a token per character, $ ends a turn. Toy template: role's first letter, content, $ and a newline per message;
"A" begins the assistant's turn. The environment says "ob" while it is not done, and its reward is the number of the turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pytest
import torch

from batches import shaped_batch
from posttrain.backends.environments.inline import InlineHost
from posttrain.data.turns import OneMessageTurns, TemplateTurns
from posttrain.interfaces.env import EnvSpec, EnvStart, EnvStep
from posttrain.interfaces.rollout_engine import Request
from posttrain.interfaces.worlds import EpisodeRules, Worlds
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import (
    Reward,
    SamplingParams,
    ScoredGroup,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)
from posttrain.registry import ENVS
from posttrain.steps.assemble import assemble
from posttrain.steps.play import play
from toy import FORGETFUL, TOY, ids, toy_tokenizer


@dataclass
class Scripted:
    """A sampler that answers each turn of an episode with the next of its replies; it hands them out one at a time."""

    replies: Mapping[str, Sequence[str]]
    newest_first: bool = False
    version: int = 7
    asked: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    turns: dict[str, int] = field(default_factory=dict)

    def open_stream(self, sampling: SamplingParams, on_tokens: object = None) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def submit(self, requests: Sequence[Request]) -> None:
        self.asked += requests
        self.waiting += requests

    def cancel(self, sample_ids: Collection[str]) -> None: ...

    def wait(self, timeout_s: float) -> list[Trajectory]:
        request = self.waiting.pop(-1 if self.newest_first else 0)
        turn = self.turns.get(request.conversation, 0)
        self.turns[request.conversation] = turn + 1
        text = self.replies[request.conversation][turn][: request.max_response_tokens]
        failed = text == "FAIL"
        return [
            Trajectory(
                sample_id=request.sample_id,
                token_ids=() if failed else ids(text),
                logprobs=() if failed else tuple(-0.5 - turn for _ in text),
                text=text,
                stop_reason=StopReason.FAILED
                if failed
                else StopReason.EOS
                if text[-1] == "$"
                else StopReason.STOP_TEXT,
                failure="the server has gone" if failed else "",
                policy_version=self.version,
            )
        ]


class Obs:
    """Reward: the number of the turn. Done after ``turns``. What ``last_words`` says comes with the final step too."""

    def __init__(
        self,
        spec: EnvSpec,
        turns: int = 2,
        last_words: bool = False,
        steps: Callable[[int, str], EnvStep] | None = None,
    ) -> None:
        self.spec, self.turns, self.last_words, self.steps = spec, turns, last_words, steps
        self.turn = 0

    def reset(self, seed: int) -> EnvStart:
        return EnvStart(messages=self.spec.messages, state_key="start")

    def step(self, action: str) -> EnvStep:
        self.turn += 1
        if self.steps:
            return self.steps(self.turn, action)
        done = self.turn == self.turns
        said = [] if done and not self.last_words else [{"role": "user", "content": "ob"}]
        return EnvStep(messages=said, reward=float(self.turn), done=done, state_key=f"after {self.turn}")

    def close(self) -> Mapping[str, float]:
        return {"steps": float(self.turn)}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVS._entries, "obs", Obs)


def a_prompt(prompt_id: str = "p") -> Prompt:
    return Prompt(
        prompt_id=prompt_id,
        token_ids=ids("Uq$\nA"),
        text="Uq$\nA",
        data_source="toy",
        messages=({"role": "user", "content": "q"},),
    )


def played(
    engine: Scripted,
    *,
    one_message: bool = False,
    template: str = TOY,
    close_turns: bool = True,
    samples: int = 1,
    extra: int = 0,
    prompts: Sequence[Prompt] = (),
    settings: Mapping[str, Any] | None = None,
    on_group: Callable[[TrajectoryGroup], None] | None = None,
    **rules: Any,
) -> list[TrajectoryGroup]:
    tokenizer = toy_tokenizer(template)
    writer = OneMessageTurns(tokenizer, {}) if one_message else TemplateTurns(tokenizer, {}, close_turns)
    worlds = Worlds(
        host=InlineHost(),
        writer=writer,
        rules=EpisodeRules(**{"max_response_tokens": 20, "max_context_tokens": 100, **rules}),
        spec_of=lambda prompt: EnvSpec(name="obs", messages=prompt.messages, settings=settings or {}),
    )
    sampling = SamplingParams(samples_per_prompt=samples, extra_episodes=extra, max_response_tokens=20)
    return play(engine, prompts or [a_prompt()], sampling, worlds, on_group=on_group)


def the_one(groups: Sequence[TrajectoryGroup]) -> Trajectory:
    (group,) = groups
    (trajectory,) = group.trajectories
    return trajectory


def shown(trajectory: Trajectory) -> tuple[str, str]:
    """The response as text, and its mask in digits."""
    text = bytes(trajectory.token_ids).decode()
    return text, "".join("01"[sampled] for sampled in trajectory.sampled_mask)


def rewards_of(groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
    scored = [
        ScoredGroup(group=group, outcomes=tuple(Reward(each.env_reward or 0.0) for each in group.trajectories))
        for group in groups
    ]
    return shaped_batch(assemble(scored)).rewards_on_tokens().tolist()


HALF = "\ud83d"


@pytest.mark.parametrize("said", [f"a{HALF}b", HALF, f"{HALF}{HALF}", "\udc00"])
def test_half_a_character_in_an_observation_is_replaced(said: str) -> None:
    def steps(turn: int, action: str) -> EnvStep:
        message = {"role": "user", "content": said, HALF: [said, {"a": said}]}
        return EnvStep(messages=[message] if turn == 1 else [], reward=1.0, done=turn == 2, stop=HALF, state_key=HALF)

    trajectory = the_one(played(Scripted({"p/0": ["r1$", "r2$"]}), settings={"steps": steps}))
    assert trajectory.failure == ""
    whole = said.replace(HALF, "\ufffd").replace("\udc00", "\ufffd")
    assert f"U{whole}$" in shown(trajectory)[0]


def test_two_halves_are_one_character() -> None:
    def steps(turn: int, action: str) -> EnvStep:
        return EnvStep(
            messages=[{"role": "user", "content": "\ud83d\ude00"}] if turn == 1 else [], reward=1.0, done=turn == 2
        )

    trajectory = the_one(played(Scripted({"p/0": ["r1$", "r2$"]}), settings={"steps": steps}))
    assert "U\U0001f600$" in shown(trajectory)[0]


@pytest.mark.parametrize("answer", [RuntimeError("no"), None, {"a": "text"}, {"a": float("nan")}])
def test_a_close_that_fails_loses_no_complete_episode(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def close(self: Obs) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(Obs, "close", close)
    trajectory = the_one(played(Scripted({"p/0": ["r1$", "r2$"]})))
    assert (trajectory.failure, trajectory.env_reward) == ("", 3.0)
    reason = "env_crashed: RuntimeError: no" if isinstance(answer, Exception) else "env_invalid: close"
    assert trajectory.close_failure.startswith(reason)


def test_conversation() -> None:
    # prompt Uq$⏎A; r1$ is sampled, ⏎Uob$⏎A is read, r2$ is sampled: 3 + 7 + 3 tokens, rewards on tokens 2 and 12
    engine = Scripted({"p/0": ["r1$", "r2$"]})
    groups = played(engine, max_turns=3)
    trajectory = the_one(groups)
    assert shown(trajectory) == ("r1$\nUob$\nAr2$", "1110000000111")
    assert trajectory.prompt_token_ids is None  # the group's own
    assert trajectory.env_reward == 3.0
    assert rewards_of(groups) == [[0, 0, 1.0, *[0] * 9, 2.0]]
    assert trajectory.logprobs == (-0.5,) * 3 + (0.0,) * 7 + (-1.5,) * 3
    assert [request.token_ids for request in engine.asked] == [ids("Uq$\nA"), ids("Uq$\nAr1$\nUob$\nA")]
    assert [request.sample_id for request in engine.asked] == ["p/0", "p/0@1"]
    assert {request.conversation for request in engine.asked} == {"p/0"}


def test_an_observation_on_the_final_step_is_read_by_nobody() -> None:
    trajectory = the_one(played(Scripted({"p/0": ["r1$", "r2$"]}), settings={"last_words": True}))
    assert shown(trajectory) == ("r1$\nUob$\nAr2$", "1110000000111")
    assert [turn.observation for turn in trajectory.turns] == ["ob", "ob"]  # for people


def test_one_message() -> None:
    # r1 (its $ is taken out), ob as plain text, r2$
    engine = Scripted({"p/0": ["r1$", "r2$"]})
    groups = played(engine, one_message=True)
    assert shown(the_one(groups)) == ("r1obr2$", "1100111")
    assert rewards_of(groups) == [[0, 1.0, 0, 0, 0, 0, 2.0]]
    assert engine.asked[1].token_ids == ids("Uq$\nAr1ob")


def test_turns_are_kept_one_by_one() -> None:
    first, second = the_one(played(Scripted({"p/0": ["r1$", "r2$"]}))).turns
    assert (first.start, first.end, first.text, first.observation, first.reward) == (0, 3, "r1", "ob", 1.0)
    assert (second.start, second.end, second.text, second.reward) == (10, 13, "r2", 2.0)
    assert (first.state_key, second.state_key) == ("start", "after 1")
    assert first.policy_version == 7 and first.stop_reason is StopReason.EOS


@pytest.mark.parametrize(("close_turns", "between"), [(True, "$\nUob$\nA"), (False, "\nUob$\nA")])
def test_a_turn_that_the_model_did_not_end(close_turns: bool, between: str) -> None:
    # A stop text ends "r1"; the $ behind it was not sampled, so it has mask 0.
    trajectory = the_one(played(Scripted({"p/0": ["r1", "r2$"]}), close_turns=close_turns))
    assert shown(trajectory) == (f"r1{between}r2$", "11" + "0" * len(between) + "111")


def unless_more(turn: int, action: str) -> EnvStep:
    done = "more" not in action
    return EnvStep(messages=[] if done else [{"role": "user", "content": "ob"}], reward=1.0, done=done)


class Cancelling(Scripted):
    """A sampler that samples nothing for a withdrawn request."""

    def cancel(self, sample_ids: Collection[str]) -> None:
        self.waiting = [request for request in self.waiting if request.sample_id not in sample_ids]


def test_a_group_takes_its_first_episodes_and_drops_the_rest() -> None:
    replies = {"p/0": ["more$"] * 9, "p/1": ["end$"], "p/2": ["more$", "end$"], "p/3": ["more$"] * 9}
    engine = Cancelling(replies)
    [group] = played(engine, samples=2, extra=2, settings={"steps": unless_more})
    assert [each.sample_id for each in group.trajectories] == ["p/1", "p/2"]
    # the four take turns: when p/2 is over, p/0 and p/3 have two, and what they have asked for besides is not sampled
    assert engine.turns == {"p/0": 2, "p/1": 1, "p/2": 2, "p/3": 2} and not engine.waiting


def test_a_failed_episode_counts_only_where_no_other_is_left() -> None:
    replies = {"p/0": ["FAIL"], "p/1": ["end$"], "p/2": ["more$", "more$", "end$"]}
    [group] = played(Cancelling(replies), samples=2, extra=1, settings={"steps": unless_more})
    assert [each.sample_id for each in group.trajectories] == ["p/1", "p/2"]
    [group] = played(Cancelling(replies | {"p/2": ["FAIL"]}), samples=2, extra=1, settings={"steps": unless_more})
    assert [each.sample_id for each in group.trajectories] == ["p/0", "p/1"]


def test_no_room_for_another_turn() -> None:
    # After r1$⏎Uob$⏎A the context has 5 + 10 = 15 tokens: one more than allowed. What was read last is dropped.
    engine = Scripted({"p/0": ["r1$", "r2$"]})
    trajectory = the_one(played(engine, max_context_tokens=14))
    assert shown(trajectory) == ("r1$", "111")
    assert trajectory.stop_reason is StopReason.LENGTH
    assert len(engine.asked) == 1
    assert the_one(played(Scripted({"p/0": ["r1$", "r2$"]}), max_context_tokens=15)).stop_reason is StopReason.EOS


def test_a_budget_for_all_turns_together() -> None:
    # 11 tokens: r1$ and the 7 behind it leave one for the second turn.
    trajectory = the_one(played(Scripted({"p/0": ["r1$", "r2$"]}), max_trajectory_tokens=11))
    assert shown(trajectory) == ("r1$\nUob$\nAr", "11100000001")


def test_a_sequence_has_a_length_and_a_turn_gets_what_is_left_of_it() -> None:
    # 5 tokens of the prompt, r1$ and the 7 behind it are 15: of 17 tokens the second turn has 2, and of 15 none.
    engine = Scripted({"p/0": ["r1$", "r2$"]})
    played(engine, max_sequence_tokens=17)
    assert [request.max_response_tokens for request in engine.asked] == [12, 2]
    engine = Scripted({"p/0": ["r1$", "r2$"]})
    assert the_one(played(engine, max_sequence_tokens=15)).stop_reason is StopReason.LENGTH
    assert len(engine.asked) == 1


def test_an_environment_may_ask_for_shorter_turns_and_offer_other_tools() -> None:
    begins_anew = [{"role": "user", "content": "n"}]
    look = {"type": "function", "function": {"name": "look"}}
    template = "{% if tools %}T{{ tools[0]['function']['name'] }}{% endif %}" + TOY

    def steps(turn: int, action: str) -> EnvStep:
        if turn == 1:
            return EnvStep(messages=[{"role": "user", "content": "ob"}], max_response_tokens=7)
        if turn == 2:
            return EnvStep(conversation=begins_anew, tools=[look], max_response_tokens=50)  # the run allows 20
        return EnvStep(conversation=begins_anew, done=turn == 4)  # the tools stay

    engine = Scripted({"p/0": ["r1$", "r2$", "r3$", "r4$"]})
    the_one(played(engine, settings={"steps": steps}, template=template))
    assert [request.max_response_tokens for request in engine.asked] == [20, 7, 20, 20]
    assert [request.token_ids for request in engine.asked[2:]] == [ids("TlookUn$\nA")] * 2


def test_turns_are_limited() -> None:
    trajectory = the_one(played(Scripted({"p/0": ["r1$", "r2$", "r3$"]}), settings={"turns": 9}, max_turns=2))
    assert trajectory.turn_count == 2
    assert trajectory.env_stop == "max_turns"
    assert trajectory.env_reward == 3.0


def test_a_sample_per_turn() -> None:
    groups = played(Scripted({"p/0": ["r1$", "r2$"]}), sample_per_turn=True)
    trajectory = the_one(groups)
    assert [shown(sample) for sample in trajectory.samples] == [("r1$", "111"), ("r2$", "111")]
    assert [sample.sample_id for sample in trajectory.samples] == ["p/0#0", "p/0"]
    assert trajectory.prompt_token_ids == ids("Uq$\nAr1$\nUob$\nA")
    scored = [ScoredGroup(group=groups[0], outcomes=(Reward(3.0),))]
    batch = assemble(scored)
    sequences = batch.sequences
    assert sequences.trajectory_index.tolist() == [0, 0]
    assert sequences.step_index.tolist() == [0, 1] and sequences.last_rows.tolist() == [False, True]
    assert batch.rewards.tolist() == [3.0, 3.0]
    assert batch.turn_rewards is not None and batch.turn_rewards.sum(dim=1).tolist() == [1.0, 2.0]
    assert batch.extras["state_index"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("given", "template", "rewards", "total"),
    [
        ({"sample_per_turn": True, "reward_of": "last_sample"}, TOY, [0.0, 0.0, 3.0], 3.0),
        # The first turn is a sample, and the others are one
        ({"reward_of": "last_sample"}, FORGETFUL, [0.0, 2.0, 3.0], 5.0),
        ({"reward_of": "last_turn"}, FORGETFUL, [0.0, 0.0, 3.0], 3.0),
        ({"reward_of": "last_turn"}, TOY, [0.0, 0.0, 3.0], 3.0),
        ({"reward_of": "episode"}, TOY, [1.0, 2.0, 3.0], 6.0),
    ],
)
def test_rewards_of_the_turns_that_count(
    given: dict[str, Any], template: str, rewards: list[float], total: float
) -> None:
    """Three turns with the rewards 1, 2 and 3."""
    groups = played(Scripted({"p/0": ["x)r1$", "r2$", "r3$"]}), settings={"turns": 3}, template=template, **given)
    trajectory = the_one(groups)
    found = [turn.reward for sample in trajectory.samples for turn in sample.turns]
    if given == {"reward_of": "last_sample"}:
        assert [len(sample.turns) for sample in trajectory.samples] == [1, 2]
    assert found == rewards and trajectory.env_reward == total
    batch = assemble([ScoredGroup(group=groups[0], outcomes=(Reward(total),))])
    assert batch.turn_rewards is not None and float(batch.turn_rewards.sum()) == total


def test_a_template_that_forgets_begins_a_new_sample() -> None:
    trajectory = the_one(played(Scripted({"p/0": ["x)r1$", "r2$"]}), template=FORGETFUL))
    assert [shown(sample) for sample in trajectory.samples] == [("x)r1$", "11111"), ("r2$", "111")]
    assert trajectory.prompt_token_ids == ids("Uq$\nAr1$\nUob$\nA")  # without the x)
    assert trajectory.text == "x)r1\nob\nr2" and trajectory.earlier[0].text == "x)r1"


def test_a_template_that_forgets_is_refused_or_passed_over() -> None:
    engine = Scripted({"p/0": ["x)r1$", "r2$"]})
    refused = the_one(played(replace(engine), template=FORGETFUL, changed_history="refuse"))
    assert refused.stop_reason is StopReason.FAILED and refused.failure_reason == "history_changed"
    assert "turn 1" in refused.failure
    kept = the_one(played(Scripted(engine.replies), template=FORGETFUL, changed_history="append"))
    assert shown(kept) == ("x)r1$\nUob$\nAr2$", "1" * 5 + "0" * 7 + "111")


def test_an_environment_that_edits_the_conversation_begins_a_new_sample() -> None:
    def steps(turn: int, action: str) -> EnvStep:
        return EnvStep(conversation=[{"role": "user", "content": f"again{turn}"}], done=turn == 2, reward=0.5)

    trajectory = the_one(played(Scripted({"p/0": ["r1$", "r2$"]}), settings={"steps": steps}))
    assert [shown(sample)[0] for sample in trajectory.samples] == ["r1$", "r2$"]
    assert trajectory.prompt_token_ids == ids("Uagain1$\nA")


def test_an_action_that_is_cut_keeps_its_tokens_up_to_there() -> None:
    def steps(turn: int, action: str) -> EnvStep:
        return EnvStep(messages=[{"role": "user", "content": "ob"}], action=action[:2], done=turn == 2, reward=1.0)

    groups = played(Scripted({"p/0": ["r1xyz$", "r2$"]}), settings={"steps": steps})
    trajectory = the_one(groups)
    assert shown(trajectory) == ("r1$\nUob$\nAr2$", "1100000000111")  # the first $ was not sampled there
    assert trajectory.turns[0].text == "r1"
    assert rewards_of(groups) == [[0, 1.0, *[0] * 10, 1.0]]


def test_an_action_that_was_not_sampled_begins_a_new_sample() -> None:
    def steps(turn: int, action: str) -> EnvStep:
        return EnvStep(messages=[{"role": "user", "content": "ob"}], action="no", done=turn == 2)

    trajectory = the_one(played(Scripted({"p/0": ["r1$", "r2$"]}), settings={"steps": steps}))
    assert [shown(sample)[0] for sample in trajectory.samples] == ["r1$", "r2$"]
    assert trajectory.prompt_token_ids == ids("Uq$\nAno$\nUob$\nA")


def test_a_sampler_that_fails_costs_its_episode() -> None:
    engine = Scripted({"p/0": ["r1$", "FAIL"], "p/1": ["r1$", "r2$"]})
    (group,) = played(engine, samples=2)
    lost, fine = group.trajectories
    assert lost.stop_reason is StopReason.FAILED and lost.failure == "the server has gone"
    assert shown(lost)[0] == "r1$"  # for people to look at
    assert shown(fine)[0] == "r1$\nUob$\nAr2$"


def test_an_environment_that_raises_costs_its_episode() -> None:
    def steps(turn: int, action: str) -> EnvStep:
        if action == "bad":
            raise KeyError("no such move")
        return EnvStep(done=True, reward=1.0)

    engine = Scripted({"p/0": ["bad$"], "p/1": ["r1$"]})
    (group,) = played(engine, samples=2, settings={"steps": steps})
    lost, fine = group.trajectories
    assert (lost.stop_reason, lost.failure_reason) == (StopReason.FAILED, "env_crashed")
    assert "no such move" in lost.failure
    assert fine.env_reward == 1.0


def test_a_template_that_refuses_an_observation_costs_the_episode() -> None:
    picky = TOY.replace(
        "{% for m", "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}{% for m"
    )
    lost = the_one(played(Scripted({"p/0": ["r1$", "r2$"]}), template=picky))
    assert lost.failure_reason == "template" and "too many" in lost.failure


def test_groups_come_as_they_are_done_and_order_changes_nothing() -> None:
    replies = {f"{name}/{number}": ["r1$", f"{name}{number}$"] for name in "pq" for number in range(2)}
    done: list[str] = []
    prompts = [a_prompt("p"), a_prompt("q")]
    kwargs: dict[str, Any] = {"samples": 2, "prompts": prompts}
    late = played(
        Scripted(replies, newest_first=True), on_group=lambda group: done.append(group.prompt.prompt_id), **kwargs
    )
    assert done == ["q", "p"]
    assert late == played(Scripted(replies), **kwargs)
    assert [group.prompt.prompt_id for group in late] == ["p", "q"]


def test_a_failed_start_is_a_row_that_no_loss_sees() -> None:
    trajectory = the_one(played(Scripted({}), settings={"nonsense": 1}))
    assert trajectory.stop_reason is StopReason.FAILED
    assert trajectory.token_ids == () and "nonsense" in trajectory.failure
    batch = assemble(
        [ScoredGroup(group=TrajectoryGroup(prompt=a_prompt(), trajectories=(trajectory,)), outcomes=(Reward(0.0),))]
    )
    assert not torch.any(batch.sequences.response_mask)
