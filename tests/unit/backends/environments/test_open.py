"""Programs outside as the episodes of a run: their turns, their groups, their rewards, and every way in which they can fail."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from open_runs import Run, Sampler, said
from posttrain.data.chat_api import Refused
from posttrain.data.responses_api import as_chat
from posttrain.interfaces.rollout_engine import Request
from posttrain.records.trajectories import (
    StopReason,
    Trajectory,
    Unfinished,
    VersionSpan,
)
from toy import ids


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    made.host.close()


def test_sampled_tokens_are_trained_tokens_and_rewards_come_by_call(run: Run) -> None:
    run.begin()
    trained: dict[str, tuple[list[int], float]] = {}
    for number, task in enumerate("AABB"):  # without names: conversations with the same beginning are a group
        first = run.chat(task)
        second = run.chat(task, said(first), "more")
        name = first["conversation"]
        assert second["conversation"] == name and second["policy_version"] == 7
        tokens = [
            each["token_id"] for answer in (first, second) for each in answer["choices"][0]["logprobs"]["content"]
        ]
        told = run.reward(name, float(number), metrics={"tries": 2})
        trained[told["sample"]] = tokens, float(number)
    groups = run.end()
    for group in groups:
        for each in group.trajectories:
            sampled = [token for token, own in zip(each.token_ids, each.sampled_mask, strict=True) if own]
            assert (sampled, each.env_reward) == trained[each.sample_id]
            assert dict(each.env_metrics)["tries"] == 2.0 and each.env_stop == "ended"
    rewards = [[each.env_reward for each in group.trajectories] for group in groups]
    assert rewards == [[0.0, 1.0], [2.0, 3.0]]


def test_groups_that_the_caller_names(run: Run) -> None:
    run.begin()
    names = {label: [run.chat("same", X_Group_Id=label)["conversation"] for _ in range(2)] for label in ("g", "h")}
    for number, name in enumerate([*names["g"], *names["h"]]):
        run.reward(name, number)
    assert [[each.env_reward for each in group.trajectories] for group in run.end()] == [[0.0, 1.0], [2.0, 3.0]]


def test_conversations_named_by_the_caller_and_the_same_request_twice() -> None:
    run = Run(samples=2, prompts=1)
    run.begin()
    for name in ("mine", "other"):  # the same messages, told apart by the header
        assert run.chat("Q", X_Conversation_Id=name)["conversation"] == name
    run.chat("edited", X_Conversation_Id="mine")  # another history: a sample of its own in the same episode
    run.reward("mine", 1.0)
    assert run.reward("mine", 1.0)["ok"], "the answer was lost, and the client sent its reward again"
    assert run.fails("/rewards", {"conversation": "mine", "reward": 2.0}) == (409, "the conversation 'mine' has ended")
    assert run.call("/conversations/mine")["state"] == "ended"
    run.reward("other", None)  # the run's reward terms score it
    [group] = run.end()
    assert [len(each.samples) for each in group.trajectories] == [2, 1]
    assert [each.env_reward for each in group.trajectories] == [1.0, None]
    run.host.close()


def test_rows_are_asked_for() -> None:
    run = Run(samples=1, prompts=2, rows=True)
    run.begin()
    status, why = run.fails("/v1/chat/completions", {"messages": [{"role": "user", "content": "Q"}]})
    assert status == 409 and "POST /conversations" in why
    for _ in range(2):
        row = run.call("/conversations", {})
        assert row["row"] == {"level": 1} and row["messages"] == [{"role": "user", "content": "Q"}]
        run.chat("Q", X_Conversation_Id=row["conversation"])
        run.reward(row["conversation"], 1.0)
    assert [len(group.trajectories) for group in run.end()] == [1, 1]
    run.host.close()


def test_unfinished_conversations_and_groups_fail_by_name() -> None:
    run = Run(samples=2, prompts=1, conversation_timeout_s=0.3, group_timeout_s=0.3)
    run.begin()
    name = run.chat("Q")["conversation"]
    [group] = run.end()
    reasons = [(each.failure_reason, each.failure) for each in group.trajectories]
    assert sorted(reason for reason, _ in reasons) == ["conversation_timeout", "group_incomplete"]
    assert any(name in failure for _, failure in reasons)
    status, why = run.fails("/rewards", {"conversation": name, "reward": 1.0})
    assert (status, why) == (409, f"the conversation {name!r} has failed: no request and no reward came for 0.3 s")
    run.host.close()


def test_a_request_that_cannot_be_played_is_a_400_and_its_episode_waits_for_the_next() -> None:
    run = Run(samples=1, prompts=1)
    each = "{{ message.content if message.content[0] != 'R' else message.x.y }}"
    run.options = {"chat_template": "{% for message in messages %}" + each + "{% endfor %}"}
    run.begin()
    for headers in ({}, {"X_Conversation_Id": "mine"}):
        for text, reason in (("R", "the chat template refuses it"), ("Q " * 600, "and 500 are allowed")):
            asked = {"messages": [{"role": "user", "content": text}]}
            status, why = run.fails("/v1/chat/completions", asked, **headers)
            assert (status, reason in why) == (400, True), why
    first = run.chat("Q")
    name = {"X_Conversation_Id": first["conversation"]}
    # In the middle of a conversation only the request is refused, too, and what goes on is what stood before it.
    status, why = run.fails(
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "Q"},
                first["choices"][0]["message"],
                {"role": "user", "content": "R"},
            ]
        },
        **name,
    )
    assert (status, "the chat template refuses it" in why) == (400, True)
    assert run.chat("Q", said(first), "Q2", **name)["conversation"] == first["conversation"]
    run.reward(first["conversation"], 1.0)
    [group] = run.end()
    [trajectory] = group.trajectories
    assert (trajectory.failure_reason, trajectory.env_reward, trajectory.turn_count) == ("", 1.0, 2)
    run.host.close()


class ByToken(Sampler):
    """Samples a token of every request per call of ``wait``, when it is told to, and reports its progress."""

    slots = passes = 8

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Semaphore(0)
        self.counts: dict[str, int] = {}

    def wait(self, timeout_s: float, passes: int | None = None) -> list[Trajectory]:
        if not self.go.acquire(timeout=timeout_s):
            return []
        [request] = self.waiting
        count = self.counts[request.sample_id] = self.counts.get(request.sample_id, 0) + 1
        return super().wait(timeout_s) if count == len(self._ids(request)) else []

    def progress(self, since: Mapping[str, int]) -> list[Unfinished]:
        found = []
        for request in self.waiting:
            name, count = request.sample_id, self.counts.get(request.sample_id, 0)
            if since.get(name, 0) < count:
                ids_, span = self._ids(request)[since.get(name, 0) : count], VersionSpan(0, 7)
                found.append(Unfinished(sample_id=name, token_ids=ids_, logprobs=(-0.5,) * len(ids_), spans=(span,)))
        return found

    def _ids(self, request: Request) -> tuple[int, ...]:
        return tuple(ids(f"x{self.asked.index(request)}$"))

    def take_back(self, *, keep_cache: bool = False) -> list[Unfinished]:
        raise NotImplementedError

    def close(self) -> None: ...


def test_a_turn_is_streamed_while_it_is_sampled_and_trained_as_it_was_sampled() -> None:
    run = Run(samples=1, prompts=1)
    run.sampler = sampler = ByToken()
    run.begin()
    body = {"messages": [{"role": "user", "content": "Q"}], "stream": True, "logprobs": True}
    headers = {"Authorization": "Bearer secret", "X-Conversation-Id": "mine"}
    request = urllib.request.Request(run.server.url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    sampler.go.release()
    with urllib.request.urlopen(request, timeout=20) as answer:
        lines = (json.loads(line[6:]) for line in answer if line.startswith(b"data: {"))
        events = [next(lines)]
        assert list(sampler.counts.values()) == [1]  # token is sampled when its piece is here
        sampler.go.release(2)
        events += lines
    assert answer.headers["X-Conversation-Id"] == "mine"
    choices = [event["choices"][0] for event in events]
    assert [choice["delta"].get("content") for choice in choices] == ["x", "0", None]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert {(event["conversation"], event["policy_version"]) for event in events} == {("mine", 7)}
    sampled = [one["token_id"] for choice in choices for one in (choice["logprobs"] or {"content": ()})["content"]]
    run.reward("mine", 0.5)
    [trajectory] = run.end()[0].trajectories
    assert tuple(sampled) == trajectory.token_ids == tuple(ids("x0$"))
    run.host.close()


def test_a_stream_whose_client_leaves_is_withdrawn() -> None:
    run = Run(samples=1, prompts=1)
    run.sampler = sampler = ByToken()
    run.begin()
    body = json.dumps({"messages": [{"role": "user", "content": "Q"}], "stream": True}).encode()
    request = urllib.request.Request(
        run.server.url + "/v1/chat/completions", body, {"Authorization": "Bearer secret", "X-Conversation-Id": "mine"}
    )
    sampler.go.release()
    with urllib.request.urlopen(request, timeout=20) as answer:
        answer.readline()
    until = time.monotonic() + 10
    while run.call("/conversations/mine")["turns"] or sampler.waiting:
        assert time.monotonic() < until
        time.sleep(0.02)
    sampler.go.release(3)
    assert said(run.chat("Q", X_Conversation_Id="mine")) == "x1"  # sampled again
    run.reward("mine", 0.5)
    [trajectory] = run.end()[0].trajectories
    assert trajectory.token_ids == tuple(ids("x1$"))
    run.host.close()


def test_conversations_wait_for_the_next_step_and_those_of_an_earlier_start_are_named(run: Run) -> None:
    answers: list[dict[str, Any]] = []
    early = threading.Thread(target=lambda: answers.append(run.chat("Q")))
    early.start()
    time.sleep(0.3)
    assert not answers  # the run trains
    run.begin()
    early.join(10)
    run.host.abandon()  # the step is given up, as before a checkpoint
    status, why = run.fails("/rewards", {"conversation": answers[0]["conversation"], "reward": 1.0})
    assert (status, "dropped" in why) == (409, True)
    status, why = run.fails("/rewards", {"conversation": "conversation-0a0a0a-3", "reward": 1.0})
    assert (status, "an earlier start of this run" in why) == (404, True)
    assert run.fails("/rewards", {"conversation": "other", "reward": 1.0})[1] == "there is no conversation 'other'"


def test_requests_that_cannot_be_honoured_say_why(run: Run) -> None:
    run.begin()
    asked = {"messages": [{"role": "user", "content": "Q"}]}
    for more, why in (
        ({"temperature": 0.5}, "this endpoint samples with 1 (rollout.temperature)"),
        ({"n": 3}, "each choice is a conversation of one group, which has 2"),
        ({"n": 65}, "use 1 to 64"),
        ({"response_format": {"type": "json_object"}}, "which this run cannot train"),
    ):
        status, told = run.fails("/v1/chat/completions", {**asked, **more})
        assert status == 400 and why in told
    assert run.fails("/v1/chat/completions", asked, token="wrong")[0] == 401
    assert run.fails("/v1/chat/completions", asked, Host="evil.example")[0] == 421
    for body, why in (
        ({"conversation": "a", "reward": "1"}, "use a finite number"),
        ({"conversation": "a", "reward": 1, "metrics": {"m": None}}, "metrics must be finite"),
        ({"conversation": "a", "rewards": 1}, "rewards is not known"),
    ):
        status, told = run.fails("/rewards", body)
        assert status == 400 and why in told
    for path, text, why in (
        ("/rewards", '{"conversation": "a", "reward": 1' + "0" * 400 + "}", "use a finite number"),
        ("/rewards", '{"conversation": "a", "reward": NaN}', "use a finite number"),
        ("/rewards", '{"reward": 1}', "conversation is missing"),
        ("/rewards", '{"conversation": "a", "reward": 1, "metrics": {"": 1}}', "names of metrics"),
        ("/v1/responses", '{"input": "a", "include": 5}', "include is 5; use a list of texts"),
        ("/v1/chat/completions", '{"messages": "\\ud800"}', "half a character"),
        ("/v1/chat/completions", '{"messages": [1], "stream_options": 5}', "stream_options is 5"),
        ("/v1/chat/completions", '{"messages": [1], "stream_options": {"usage": true}}', "stream_options is"),
        (
            "/v1/responses",
            '{"input": "q", "reasoning": {"effort": "high"}}',
            'reasoning.effort="high" is not supported',
        ),
        ("/v1/responses", '{"input": "q", "reasoning": 3}', "reasoning is 3; use an object"),
        ("/v1/chat/completions", '{"tools": [{"function": {"name": "f", "parameters": 1}}]}', "must be an object"),
        ("/v1/chat/completions", "[" * 9999, "nest more than"),
    ):
        status, told = run.fails(path, text)
        assert status == 400 and why in told, told
    assert run.fails("/v1/chat/completions", " " * (17 << 20))[0] == 413


def test_other_methods_and_faults_of_the_endpoint_are_answered_in_the_same_form(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = urllib.request.Request(run.server.url + "/rewards", b"{}", method="PUT")
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=20)
    assert raised.value.code == 501 and "there is POST" in json.load(raised.value)["error"]["message"]

    def fails(*given: object) -> None:
        raise LookupError("lost")

    monkeypatch.setattr(run.host, "reward", fails)
    status, told = run.fails("/rewards", {"conversation": "a", "reward": 1})
    assert (status, told) == (500, "the endpoint has failed: LookupError: lost")


class Speaker(Sampler):
    """Says the next of its texts, and ends at the stop texts of a request."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.texts = list(texts)

    def wait(self, timeout_s: float) -> list[Trajectory]:
        waiting, self.waiting = self.waiting, []
        return [self._said(request, self.texts.pop(0)) for request in waiting]

    def _said(self, request: Request, text: str) -> Trajectory:
        stops = request.sampling.stop if request.sampling else ()
        ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
        token_ids = ids(text[: min(ends)] if ends else text)
        reason = StopReason.STOP_TEXT if ends else StopReason.EOS if text.endswith("$") else StopReason.LENGTH
        top = ((1, -0.1), (2, -2.0))[: request.top_logprobs]
        return Trajectory(
            sample_id=request.sample_id,
            token_ids=token_ids,
            logprobs=(-0.5,) * len(token_ids),
            text="",
            stop_reason=reason,
            policy_version=7,
            top_logprobs=(top,) * len(token_ids) if top else (),
            prompt_logprobs=(-0.25,) * (len(request.token_ids) - 1) if request.prompt_logprobs else (),
            prompt_top_logprobs=(top,) * (len(request.token_ids) - 1) if request.prompt_logprobs else (),
        )


def sampled_tokens(trajectory: Trajectory) -> list[list[int]]:
    return [
        [token for token, own in zip(each.token_ids, each.sampled_mask, strict=True) if own]
        for each in trajectory.samples
    ]


def test_each_choice_of_several_is_a_conversation_of_its_own(run: Run) -> None:
    run.begin()
    asked = {"messages": [{"role": "user", "content": "Q"}], "n": 2, "logprobs": True, "seed": 5}
    answers = [run.call("/v1/chat/completions", asked) for _ in range(2)]
    trained = {}
    for number, answer in enumerate(answers):
        names = answer["conversations"]
        assert len(set(names)) == 2 and [each["conversation"] for each in answer["choices"]] == names
        assert answer["usage"]["completion_tokens"] == 6
        for index, choice in enumerate(answer["choices"]):
            told = run.reward(names[index], number + index / 2)
            trained[told["sample"]] = [token["token_id"] for token in choice["logprobs"]["content"]], number + index / 2
    # The draws of a choice depend on the seed and its place alone.
    assert [(each.seed, each.draws_as) for each in run.sampler.asked] == [(5, "answer 0"), (5, "answer 1")] * 2
    groups = run.end()
    for each in (each for group in groups for each in group.trajectories):
        assert (sampled_tokens(each)[0], each.env_reward) == trained[each.sample_id]
    assert [[each.env_reward for each in group.trajectories] for group in groups] == [[0.0, 0.5], [1.0, 1.5]]


def test_several_choices_of_a_named_conversation_are_turns_of_it() -> None:
    run = Run(samples=1, prompts=1)
    run.begin()
    asked = {"messages": [{"role": "user", "content": "Q"}], "n": 3}
    answer = run.call("/v1/chat/completions", asked, X_Conversation_Id="mine")
    assert answer["conversation"] == "mine" and len(answer["choices"]) == 3
    run.reward("mine", 1.0)
    [trajectory] = run.end()[0].trajectories
    assert len(trajectory.samples) == 3 and trajectory.turn_count == 3
    run.host.close()


def test_choices_are_streamed_side_by_side(run: Run) -> None:
    run.begin()
    body = {"messages": [{"role": "user", "content": "Q"}], "n": 2, "stream": True}
    body["stream_options"] = {"include_usage": True}
    headers = {"Authorization": "Bearer secret"}
    request = urllib.request.Request(run.server.url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    assert len({tuple(event["conversations"]) for event in events}) == 1
    texts = ["", ""]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert sorted(texts) == ["x0", "x1"] and events[-1]["usage"]["completion_tokens"] == 6
    run.host.abandon()


def test_a_stop_text_ends_the_answer_and_all_sampled_tokens_are_trained() -> None:
    run = Run(samples=1, prompts=1)
    run.sampler = Speaker("ab;cd$", "ok$")
    run.begin()
    asked = {"messages": [{"role": "user", "content": "Q"}], "stop": [";", "#"], "logprobs": True}
    first = run.call("/v1/chat/completions", asked)
    [choice] = first["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ab", "stop")
    assert [each["token_id"] for each in choice["logprobs"]["content"]] == list(ids("ab;"))
    second = run.chat("Q", "ab", "more")  # belongs to the conversation, and reads what the client says
    assert second["conversation"] == first["conversation"]
    assert run.sampler.asked[0].sampling.stop == (";", "#") and run.sampler.asked[1].sampling is None
    assert run.sampler.asked[1].token_ids[-len(ids("more")) - 2 :] != run.sampler.asked[0].token_ids
    run.reward(first["conversation"], 1.0)
    [trajectory] = run.end()[0].trajectories
    assert sampled_tokens(trajectory) == [list(ids("ab;")), list(ids("ok$"))]
    run.host.close()


def test_the_likeliest_tokens() -> None:
    run = Run(samples=1, prompts=1)
    run.sampler = Speaker("a$")
    run.begin()
    asked = {"messages": [{"role": "user", "content": "Q"}], "logprobs": True, "top_logprobs": 2}
    answer = run.call("/v1/chat/completions", asked)
    tops = [each["top_logprobs"] for each in answer["choices"][0]["logprobs"]["content"]]
    assert [[one["token_id"] for one in place] for place in tops] == [[1, 2], [1, 2]]
    assert run.fails("/v1/chat/completions", {**asked, "top_logprobs": 21})[0] == 400
    run.host.abandon()


def test_completions_of_token_ids_go_on_in_the_tokens_that_were_sampled() -> None:
    run = Run(samples=1, prompts=2)
    run.sampler = Speaker("ab", "cd$", "ef", "gh")
    run.begin()
    start = list(ids("Q:"))
    first = run.call("/v1/completions", {"prompt": start, "logprobs": 1, "max_tokens": 2})
    [choice] = first["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    said = choice["logprobs"]["token_ids"]
    second = run.call("/v1/completions", {"prompt": [*start, *said, *ids("!")], "logprobs": 1})
    assert second["conversation"] == first["conversation"]
    assert run.sampler.asked[1].token_ids == (*start, *ids("ab!"))
    # As text, with the prompt before the answer
    third = run.call("/v1/completions", {"prompt": "Q:", "logprobs": 1, "echo": True})
    [choice] = third["choices"]
    assert choice["text"] == "Q:ef" and choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.5, -0.5]
    fourth = run.call("/v1/completions", {"prompt": "Q:ef and"})
    assert fourth["conversation"] == third["conversation"] and run.sampler.asked[3].token_ids == tuple(ids("Q:ef and"))
    for answer, reward in ((first, 1.0), (third, 0.0)):
        run.reward(answer["conversation"], reward)
    one, other = (group.trajectories[0] for group in run.end())
    assert sampled_tokens(one) == [[*ids("ab"), *ids("cd$")]] and one.prompt_token_ids == tuple(start)
    assert sampled_tokens(other) == [[*ids("ef"), *ids("gh")]]
    run.host.close()


def test_a_completion_that_is_no_prompt() -> None:
    run = Run(samples=1, prompts=1)
    run.begin()
    for body, why in (
        ({"prompt": ["a", "b"]}, "prompt must be a text or a list of token ids"),
        ({"prompt": [10**9]}, "prompt holds a token id outside 0 to"),
        ({"prompt": "Q", "max_tokens": 0, "echo": True}, "use a whole number above 0"),
        ({"prompt": ""}, "prompt must be a text"),
        ({"prompt": "Q " * 600}, "and 500 are allowed"),
    ):
        status, told = run.fails("/v1/completions", body)
        assert status == 400 and why in told, told
    run.host.abandon()


def test_the_place_of_an_unnamed_conversation_whose_client_leaves_is_given_to_the_next() -> None:
    run = Run(samples=1, prompts=1)
    run.sampler = sampler = ByToken()
    run.begin()
    body = json.dumps({"messages": [{"role": "user", "content": "Q"}], "stream": True}).encode()
    request = urllib.request.Request(run.server.url + "/v1/chat/completions", body, {"Authorization": "Bearer secret"})
    sampler.go.release()
    with urllib.request.urlopen(request, timeout=20) as answer:
        answer.readline()
    until = time.monotonic() + 10
    while sampler.waiting:
        assert time.monotonic() < until
        time.sleep(0.02)
    sampler.go.release(3)
    second = run.chat("Q")
    run.reward(second["conversation"], 0.5)
    [trajectory] = run.end()[0].trajectories
    assert len(sampler.asked) == 2 and trajectory.turn_count == 1
    assert (trajectory.token_ids, trajectory.env_reward) == (tuple(ids("x0$")), 0.5)  # the same draws
    run.host.close()


def test_the_responses_api(run: Run) -> None:
    run.begin()
    first = run.call("/v1/responses", {"input": "Q", "instructions": "Short."})
    [message] = first["output"]
    assert message["content"][0]["text"] == "x0" and first["status"] == "completed"
    again = [
        {"role": "user", "content": "Q"},
        {"type": "message", "role": "assistant", "content": message["content"]},
        {"role": "user", "content": "more"},
    ]
    second = run.call("/v1/responses", {"input": again, "instructions": "Short."})
    assert second["conversation"] == first["conversation"]
    assert run.sampler.asked[1].token_ids[: len(run.sampler.asked[0].token_ids)] == run.sampler.asked[0].token_ids
    assert run.fails("/v1/responses", {"input": "Q", "previous_response_id": "resp_1"})[0] == 400
    run.host.abandon()


def test_tools_and_calls_of_the_responses_api() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    chat = as_chat(
        {
            "input": [
                {"role": "user", "content": "Q"},
                call,
                {"type": "function_call_output", "call_id": "c1", "output": "R"},
            ],
            "tools": [{"type": "function", "name": "look", "parameters": {}, "strict": True}],
            "max_output_tokens": 5,
        }
    )
    assert chat["tools"] == [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert chat["messages"][1]["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    assert chat["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "R"} and chat["max_tokens"] == 5
    for wrong in ({"input": "Q", "background": True}, {"input": []}, {"input": "Q", "tools": [{"type": "web_search"}]}):
        with pytest.raises(Refused):
            as_chat(wrong)
