"""Rewards that ask a server, against one on loopback that answers as it is told, also badly, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.config.reward import RewardConfig, RewardTerm
from posttrain.errors import ConfigError
from posttrain.interfaces.reward import NotScored
from posttrain.libraries import json_http as asking_http
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Reward, StopReason, Trajectory, TrajectoryGroup
from posttrain.rewards.built_in import built_in
from posttrain.rewards.load import check_rewards
from posttrain.rewards.scorers import llm_judge
from posttrain.rewards.scorers.llm_judge import chat_url, conversation, last_line_verdict
from posttrain.rewards.served import queries_a_server, start_scorer, term_names


@dataclass
class Said:
    """An answer: a JSON value or raw bytes, and how it is given."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0
    cut: bool = False  # the connection ends in the middle of the answer
    drip_s: float = 0.0  # a byte at a time


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: Any


class Local:
    def __init__(self, answer: Callable[[Asked], Said]):
        self.answer = answer
        self.asked: list[Asked] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.url = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    local: Local

    def do_POST(self) -> None:
        local = self.local
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = Asked(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
        with local.lock:
            local.asked.append(asked)
            local.at_once += 1
            local.most_at_once = max(local.most_at_once, local.at_once)
        try:
            said = local.answer(asked)
            time.sleep(said.after_s)
            self._say(said)
        finally:
            with local.lock:
                local.at_once -= 1

    def _say(self, said: Said) -> None:
        data = said.body if isinstance(said.body, bytes) else json.dumps(said.body).encode()
        try:
            self.send_response(said.status)
            for name, value in said.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data) + said.cut * 100))
            self.end_headers()
            if said.drip_s:
                for byte in data:
                    self.wfile.write(bytes([byte]))
                    time.sleep(said.drip_s)
            else:
                self.wfile.write(data)
            self.close_connection = self.close_connection or said.cut
        except OSError:  # the client has gone, which is what some tests are about
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(answer: Callable[[Asked], Said]) -> Iterator[Local]:
    local = Local(answer)
    handler = type("Handler", (_Handler,), {"local": local})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads, server.block_on_close = True, False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    local.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield local
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def in_turn(*answers: Said) -> Callable[[Asked], Said]:
    """The answers one after the other; the last one again and again."""
    left = list(answers)
    lock = threading.Lock()

    def answer(asked: Asked) -> Said:
        with lock:
            return left.pop(0) if len(left) > 1 else left[0]

    return answer


# ------------------------------------------------------------------------------------------------------- asking a server

PROMPT = Prompt(
    prompt_id="a:0",
    token_ids=(1,),
    text="<user>2+2?",
    data_source="sums",
    ground_truth="4",
    extra_info={"n": np.int64(7)},
    messages=({"role": "user", "content": "2+2?"},),
)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_http, "FIRST_WAIT_S", 0.02)


def outcome(reward: Any, response: str = "four", prompt: Prompt = PROMPT) -> Any:
    """The score, or the failure."""
    [result] = reward.score_many([(prompt, response)])
    return result


def reason(result: Any) -> str:
    assert isinstance(result, NotScored), result
    return result.reason


def test_what_is_posted_and_read() -> None:
    with serving(in_turn(Said({"result": {"points": 0.25}}))) as local:
        reward = built_in("http", {"url": f"{local.url}/score", "field": "result.points"})
        assert outcome(reward) == 0.25
    [asked] = local.asked
    assert asked.path == "/score"
    assert asked.body == {
        "data_source": "sums",
        "prompt": "<user>2+2?",
        "response": "four",
        "ground_truth": "4",
        "extra_info": {"n": 7},
    }
    counts = reward.take_counts()
    assert (counts["requests"], counts["retries"], counts["cache_hits"]) == (1, 0, 0)
    assert reward.take_counts()["requests"] == 0


@pytest.mark.parametrize(
    ("failures", "score", "requests"),
    [
        ([Said(status=500), Said(status=503)], 1.0, 3),
        ([Said({"score": 1}, cut=True)], 1.0, 2),
        ([Said(status=429, headers={"Retry-After": "0"})], 1.0, 2),
        ([Said(status=500)] * 4, "http_status", 4),
        ([Said({"error": "no such model"}, status=404)], "http_status", 1),
        ([Said(status=302, headers={"Location": "http://127.0.0.1:9/"})], "http_status", 1),
        ([Said(b"x" * (2 << 20))], "http_answer", 1),
        ([Said(b"{score: 1}")], "http_answer", 1),
        ([Said(b"[" * 200_000)], "http_answer", 1),
        ([Said(b'{"score": NaN}')], "http_answer", 1),
        ([Said(b'{"score": 1e999}')], "http_answer", 1),
        ([Said(b'{"score": ' + b"9" * 5000 + b"}")], "http_answer", 1),
        ([Said({"points": 1})], "http_answer", 1),
        ([Said({"score": "1"})], "http_answer", 1),
        ([Said({"score": None})], "http_answer", 1),
        ([Said([1])], "http_answer", 1),
    ],
)
def test_a_server_that_misbehaves(failures: list[Said], score: float | str, requests: int) -> None:
    with serving(in_turn(*failures, Said({"score": 1}))) as local:
        reward = built_in("http", {"url": local.url})
        result = outcome(reward)
    assert (result if isinstance(result, float) else reason(result)) == score
    assert len(local.asked) == requests
    counts = reward.take_counts()
    assert (counts["requests"], counts["retries"]) == (requests, requests - 1)


def test_a_server_that_is_not_there() -> None:
    with serving(in_turn(Said())) as local:
        pass
    result = outcome(built_in("http", {"url": local.url, "retries": 1}))
    assert reason(result) == "http_connection" and local.url in str(result)


@pytest.mark.parametrize("slow", [Said({"score": 1}, after_s=30.0), Said({"score": 1}, drip_s=3.0)])
def test_the_deadline_holds_for_the_whole_answer(slow: Said) -> None:
    with serving(in_turn(slow)) as local:
        start = time.monotonic()
        assert reason(outcome(built_in("http", {"url": local.url, "timeout_s": 0.3}))) == "http_timeout"
        assert time.monotonic() - start < 15


def test_the_server_says_when_to_come_back() -> None:
    with serving(in_turn(Said(status=429, headers={"Retry-After": "1"}), Said({"score": 1}))) as local:
        start = time.monotonic()
        assert outcome(built_in("http", {"url": local.url})) == 1.0
        assert time.monotonic() - start >= 1.0
    with serving(
        in_turn(Said(status=429, headers={"Retry-After": "3600"}))
    ) as local:  # beyond the deadline: not waited for
        start = time.monotonic()
        assert reason(outcome(built_in("http", {"url": local.url}))) == "http_status"
        assert time.monotonic() - start < 1800 and len(local.asked) == 1


def test_a_date_as_retry_after() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 28 < asking_http._retry_after_s(soon) <= 30
    assert asking_http._retry_after_s("Mon, 01 Jan 2001 00:00:00 GMT") == 0.0
    assert [asking_http._retry_after_s(text) for text in ("", "soon", "-5", "1e9", "12")] == [0, 0, 0, 0, 12]


def test_waits_grow_and_are_the_same_in_every_run() -> None:
    waits = [asking_http.wait_s(b"{}", attempt) for attempt in range(3)]
    assert waits == [asking_http.wait_s(b"{}", attempt) for attempt in range(3)]
    assert waits[0] != asking_http.wait_s(b"[]", 0)
    for attempt, wait in enumerate(waits):  # 0.02, 0.04, 0.08 and from half of it
        assert 0.01 * 2**attempt <= wait <= 0.02 * 2**attempt


def test_only_so_many_requests_at_once() -> None:
    with serving(lambda asked: Said({"score": len(asked.body["response"])}, after_s=0.1)) as local:
        reward = built_in("http", {"url": local.url, "concurrency": 4})
        start = time.monotonic()
        results = reward.score_many([(PROMPT, "x" * number) for number in range(16)])
        took = time.monotonic() - start
    assert results == [float(number) for number in range(16)]
    assert local.most_at_once == 4
    assert took >= 0.4  # 16 x 0.1 s / 4 at once


def test_a_failure_is_that_of_its_response_alone() -> None:
    def answer(asked: Asked) -> Said:
        return Said(status=400) if asked.body["response"] == "b" else Said({"score": 1})

    with serving(answer) as local:
        results = built_in("http", {"url": local.url}).score_many([(PROMPT, text) for text in "abc"])
    assert [results[0], reason(results[1]), results[2]] == [1.0, "http_status", 1.0]


def test_batches() -> None:
    with serving(lambda asked: Said([{"score": len(each["response"])} for each in asked.body])) as local:
        reward = built_in("http", {"url": local.url, "batch": 2})
        assert reward.score_many([(PROMPT, "x" * number) for number in range(5)]) == [0, 1, 2, 3, 4]
    assert sorted(len(asked.body) for asked in local.asked) == [1, 2, 2]
    with serving(in_turn(Said([{"score": 1}, {"points": 1}]))) as local:
        results = built_in("http", {"url": local.url, "batch": 2}).score_many([(PROMPT, "a"), (PROMPT, "b")])
        assert results[0] == 1.0 and reason(results[1]) == "http_answer"
    with serving(in_turn(Said([{"score": 1}]))) as local:  # one answer for two responses: whose is it?
        results = built_in("http", {"url": local.url, "batch": 2}).score_many([(PROMPT, "a"), (PROMPT, "b")])
        assert [reason(result) for result in results] == ["http_answer"] * 2


@pytest.mark.parametrize(("cache", "requests"), [("run", 2), ("memory", 2), ("off", 4)])
def test_the_same_content_is_asked_once(cache: str, requests: int) -> None:
    with serving(lambda asked: Said({"score": len(asked.body["response"])})) as local:
        reward = built_in("http", {"url": local.url, "cache": cache})
        assert reward.score_many([(PROMPT, "a"), (PROMPT, "a"), (PROMPT, "bb")]) == [1, 1, 2]
        assert outcome(reward, "a") == 1
    assert len(local.asked) == requests
    assert reward.take_counts()["cache_hits"] == 4 - requests


def test_a_resumed_run_does_not_ask_again(tmp_path: Path) -> None:
    with serving(in_turn(Said({"score": 0.5, "other": 0.75}))) as local:
        first = built_in("http", {"url": local.url})
        assert outcome(first, "a") == 0.5  # before the folder is known
        first.keep_in(tmp_path)
        assert outcome(first, "b") == 0.5
        again = built_in("http", {"url": local.url})
        again.keep_in(tmp_path)
        assert again.score_many([(PROMPT, "a"), (PROMPT, "b")]) == [0.5, 0.5]
        assert len(local.asked) == 2
        elsewhere = built_in("http", {"url": local.url, "field": "other"})  # read in another way
        elsewhere.keep_in(tmp_path)
        assert outcome(elsewhere, "a") == 0.75 and len(local.asked) == 3
    (tmp_path / "reward_cache.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match=r"reward_cache\.sqlite cannot be used as a cache: .*; delete it"):
        built_in("http", {"url": local.url}).keep_in(tmp_path)


def test_failures_are_asked_again() -> None:
    with serving(in_turn(Said({}), Said({"score": 1}))) as local:
        reward = built_in("http", {"url": local.url})
        assert [reason(outcome(reward)), outcome(reward)] == ["http_answer", 1.0]


def test_a_row_that_json_cannot_hold() -> None:
    with serving(in_turn(Said({"score": 1}))) as local:
        reward = built_in("http", {"url": local.url})
        for value in (object(), float("nan")):
            assert isinstance(outcome(reward, prompt=replace(PROMPT, ground_truth=value)), (TypeError, ValueError))
    assert local.asked == []


def test_proxies_of_the_environment_are_used_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(in_turn(Said({"score": 0.0}))) as proxy, serving(in_turn(Said({"score": 1.0}))) as local:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert outcome(built_in("http", {"url": local.url})) == 1.0
        assert outcome(built_in("http", {"url": local.url, "proxy_from_env": True})) == 0.0
    assert len(proxy.asked) == len(local.asked) == 1


# -------------------------------------------------------------------------------------------------------------- secrets

SECRET = "s3cr3t-abcdef"


def test_headers_come_from_the_environment_and_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", f"Bearer {SECRET}")
    answers = [Said({"error": f"bad {SECRET}"}, status=status) for status in (401, 403, 400)]
    with serving(in_turn(*answers)) as local:
        reward = built_in("http", {"url": local.url, "headers_from_env": {"Authorization": "MY_TOKEN"}})
        results = [outcome(reward) for _ in answers]
    assert [asked.headers["authorization"] for asked in local.asked] == [f"Bearer {SECRET}"] * 3
    assert [str(result).replace(local.url, "URL") for result in results] == [
        "URL answered with status 401",
        "URL answered with status 403",
        'URL answered with status 400: {"error": "bad …"}',
    ]
    assert SECRET not in repr(reward._server)


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (
            {"headers_from_env": {"Authorization": f"Bearer {SECRET}"}},
            "headers_from_env.Authorization is not the name of",
        ),
        (
            {"headers_from_env": {"Authorization": "s3cr3tabcdef"}},
            "the environment variable that headers_from_env.Author",
        ),
        ({"headers_from_env": f"Bearer {SECRET}"}, "headers_from_env is not what it should be"),
        ({"headers_from_env": {"Authorization": "TWO_LINES"}}, "holds characters that no header can"),
        ({"headers_from_env": {"A B": "HOME"}}, "a name that is no header's"),
        ({"url": f"https://ann:{SECRET}@host/"}, "url holds a password or key"),
        ({"url": f"https://host/?api_key={SECRET}"}, "url holds a password or key"),
        ({"url": "host:8000"}, "url is not the address of a server"),
        ({"url": "file:///etc/passwd"}, "url is not the address of a server"),
        ({"url": ""}, "url is not the address of a server"),
        ({"timeout_s": 0.0}, "timeout_s is 0"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"retries": -1}, "retries is -1"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"cache": "disk"}, "cache is 'disk' (known: run, memory, off)"),
    ],
)
def test_wrong_options(options: dict[str, Any], fragment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWO_LINES", f"{SECRET}\nX: y")
    with pytest.raises(ConfigError) as raised:
        built_in("http", {"url": "http://127.0.0.1:1/", **options})
    assert fragment in str(raised.value)
    assert SECRET not in str(raised.value) and "s3cr3tabcdef" not in str(raised.value)


# ------------------------------------------------------------------------------------------------------------ the judge


def wrote(text: Any, finish_reason: str = "stop") -> Said:
    usage = {"prompt_tokens": 100, "completion_tokens": 20}
    return Said({"choices": [{"message": {"content": text}, "finish_reason": finish_reason}], "usage": usage})


def judge(local: Local, **options: Any) -> Any:
    return built_in("llm_judge", {"base_url": local.url, "model": "m", **options})


def test_what_a_judge_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    with serving(in_turn(wrote("It agrees.\n\n0.75\n"))) as local:
        reward = judge(local, prompt_template="Q {prompt} R {response} T {ground_truth} {x}", api_key_env="JUDGE_KEY")
        assert outcome(reward, "{ground_truth} {0} {x} } {") == 0.75
    [asked] = local.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["authorization"] == f"Bearer {SECRET}"
    text = "Q 2+2? R {ground_truth} {0} {x} } { T 4 {x}"  # put in as it is, and not looked at again
    messages = [{"role": "user", "content": text}]
    assert asked.body == {"model": "m", "messages": messages, "temperature": 0.0, "max_tokens": 512}
    counts = reward.take_counts()
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (100, 20)


@pytest.mark.parametrize(
    ("base_url", "url"),
    [
        ("http://h:1", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1/", "http://h:1/v1/chat/completions"),
        ("https://h/v1beta/openai", "https://h/v1beta/openai/chat/completions"),
    ],
)
def test_the_address_of_a_judge(base_url: str, url: str) -> None:
    assert chat_url(base_url) == url


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("1", 1.0),
        ("Right.\n**0.5**", 0.5),
        ("Score: .25.", 0.25),
        ("of the 3 points, 0.7", 0.7),
        ("Verdict: YES", 1.0),
        ("No.", 0.0),
        ("<think>\n0.1</think>\nyes", 1.0),
    ],
)
def test_verdicts(text: str, verdict: float) -> None:
    with serving(in_turn(wrote(text))) as local:
        assert outcome(judge(local)) == verdict


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8/10",
        "0.8/1",
        "80%",
        "7",
        "-1",
        "1_0",
        "good",
        "yes or no",
        "1. Correct: no",
        "0.5\nThat is all.",
        "nan",
        "\u0661",  # a digit one of another script
    ],
)
def test_no_verdict_is_not_0(text: str) -> None:
    with serving(in_turn(wrote(text))) as local:
        assert reason(outcome(judge(local))) == "no_verdict"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (wrote("0.5\n1", finish_reason="length"), "no_verdict"),
        (wrote(None), "no_verdict"),
        (wrote([{"text": "1"}]), "no_verdict"),
        (Said({"choices": []}), "http_answer"),
        (Said({"error": "x"}), "http_answer"),
        (Said([]), "http_answer"),
    ],
)
def test_answers_that_are_no_verdict(said: Said, why: str) -> None:
    with serving(in_turn(said)) as local:
        assert reason(outcome(judge(local))) == why


@pytest.mark.parametrize(
    ("extract", "text", "verdict"),
    [
        (r"\[\[(.+?)\]\]", "[[3]] rather [[7.5]]", 7.5),
        (r"(?<=Grade: )\w+", "Grade: Yes", 1.0),
        (r"\[\[(.+?)\]\]", "[[A]]", "no_verdict"),
        (r"\[\[(.+?)\]\]", "7", "no_verdict"),
        (r"(x)?7", "7", "no_verdict"),
        (r"(?:a+)+(?:a+)+(?:a+)+(?:a+)+\d", "a" * 2000, "no_verdict"),  # takes for ever, and is stopped
    ],
)
def test_a_pattern_of_the_users_own(extract: str, text: str, verdict: float | str) -> None:
    with serving(in_turn(wrote(text))) as local:
        start = time.monotonic()
        result = outcome(judge(local, extract=extract))
    assert (result if isinstance(result, float) else reason(result)) == verdict
    assert time.monotonic() - start < 30


def test_a_long_line_is_read_in_linear_time() -> None:
    start = time.process_time()
    with pytest.raises(NotScored):
        last_line_verdict("a" * 1_000_000)
    assert time.process_time() - start < 5  # a quadratic one would take an hour


def test_a_judge_without_a_reference() -> None:
    with serving(in_turn(wrote("1"))) as local:
        assert isinstance(outcome(judge(local), prompt=replace(PROMPT, ground_truth=None)), ValueError)
        assert outcome(judge(local, prompt_template="{response}"), prompt=replace(PROMPT, ground_truth=None)) == 1.0


def test_a_conversation_of_several_messages() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "and this?"}]
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": parts})
    assert conversation(replace(PROMPT, messages=messages)) == "system: Be brief.\n\nuser: and this?"
    assert conversation(replace(PROMPT, messages=())) == "<user>2+2?"


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"model": ""}, "model is empty"),
        ({"prompt_template": "{prompt}"}, "prompt_template does not show the response"),
        ({"extract": "("}, "extract is not a regular expression"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"api_key_env": SECRET}, "api_key_env is not the name of an environment variable"),
        ({"base_url": "h"}, "base_url is not the address of a server"),
    ],
)
def test_wrong_options_of_a_judge(options: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ConfigError) as raised:
        built_in("llm_judge", {"base_url": "http://127.0.0.1:1", "model": "m", **options})
    assert fragment in str(raised.value) and SECRET not in str(raised.value)


# ------------------------------------------------------------------------------------------------- beside other terms


def group(source: str, *responses: str) -> TrajectoryGroup:
    prompt = replace(PROMPT, prompt_id=source, data_source=source)
    trajectories = tuple(
        Trajectory(
            sample_id=f"{source}/{number}",
            token_ids=(1,),
            logprobs=(0.0,),
            text=text,
            stop_reason=StopReason.EOS,
            policy_version=0,
        )
        for number, text in enumerate(responses)
    )
    return TrajectoryGroup(prompt=prompt, trajectories=trajectories)


def test_terms_of_both_kinds(tmp_path: Path) -> None:
    def answer(asked: Asked) -> Said:
        return Said({"score": 0.5}) if asked.body["response"] != "bad 4" else Said({})

    with serving(answer) as local:
        term = {"name": "http", "options": {"url": local.url}}
        terms = [
            {**term, "weight": 2.0, "data_sources": ["a", "b"]},
            {"name": "exact_match", "data_sources": ["a", "c"]},
            {**term, "options": {"url": f"{local.url}/second"}, "data_sources": ["b"]},
        ]
        scorer = start_scorer(RewardConfig(terms=terms))
        scorer.keep_in(tmp_path)
        groups = [group("a", "is 4", "bad 4", "5"), group("b", "x"), group("c", "4"), group("d", "4")]
        for each in groups:
            scorer.begin(each)
        a, b, c, d = scorer.score(groups)
        scorer.close()
    assert a[0] == Reward(2.0, (("exact_match", 1.0), ("http", 0.5)), (("exact_match/pred", "4"),))  # 1 x 1 + 2 x 0.5
    assert a[1] == Invalid("http_answer", "http: the answer has no field 'score'")
    assert a[2] == Reward(1.0, (("exact_match", 0.0), ("http", 0.5)), (("exact_match/pred", "5"),))
    assert b == (Reward(1.5, (("http", 0.5), ("http_2", 0.5))),)  # 2 x 0.5 + 1 x 0.5
    assert c == (Reward(1.0, (("exact_match", 1.0),), (("exact_match/pred", "4"),)),)
    assert isinstance(d[0], Invalid) and d[0].reason == "no_reward_for_data_source"
    costs = scorer.take_costs()
    assert (costs["reward/cost/http/requests"], costs["reward/cost/http_2/requests"]) == (4.0, 1.0)
    assert (tmp_path / "reward_cache.sqlite").is_file()


def test_a_response_that_another_term_cannot_score_is_not_asked_about() -> None:
    with serving(in_turn(Said({"score": 1}))) as local:
        terms = [{"name": "http", "options": {"url": local.url}}, {"name": "exact_match"}]
        scorer = start_scorer(RewardConfig(terms=terms))
        broken = group("a", "4")
        [[only]] = scorer.score([replace(broken, prompt=replace(broken.prompt, ground_truth=None))])
        scorer.close()
    assert isinstance(only, Invalid) and only.reason == "exception" and local.asked == []


def test_servers_are_asked_while_other_groups_are_still_to_come(tmp_path: Path) -> None:
    """Four responses, two at once; the answers come only when the first two have been asked for."""
    go_on = threading.Event()
    with serving(lambda asked: Said({"score": float(go_on.wait(60))})) as local:
        options = {"url": local.url, "concurrency": 2, "cache": "off"}
        scorer = start_scorer(RewardConfig(terms=[{"name": "http", "options": options}]))
        groups = [group("a", "1", "2"), group("b", "3", "4")]
        for each in groups:
            scorer.begin(each)  # were this to wait for the scores, they would be 0
        while len(local.asked) < 2:
            time.sleep(0.01)
        go_on.set()
        outcomes = scorer.score(groups)
        scorer.close()
    assert [outcome.value for each in outcomes for outcome in each if isinstance(outcome, Reward)] == [1.0] * 4
    assert local.most_at_once == 2 and len(local.asked) == 4


OWN = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "crash":
        os._exit(1)
    return {"score": 1, "sees": len({"GRADER_TOKEN", "JUDGE_KEY"} & set(os.environ))}

def all_at_once(data_sources, solution_strs, ground_truths, extra_infos):
    return [None if text == "late" else 10 for text in solution_strs]
"""


def test_a_response_that_a_worker_cannot_score_is_not_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the key of the server in the environment of the worker."""
    monkeypatch.setenv("GRADER_TOKEN", "Bearer secret")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    (tmp_path / "mine.py").write_text(OWN)
    path = str(tmp_path / "mine.py")
    answers = [{"score": 0.5}, {"choices": [{"message": {"content": "1"}}]}]
    with serving(lambda asked: Said(answers[asked.path.endswith("completions")])) as local:
        served = {"url": local.url, "headers_from_env": {"Authorization": "GRADER_TOKEN"}}
        judge = {"base_url": local.url, "model": "m", "api_key_env": "JUDGE_KEY"}
        terms = [
            {"name": "http", "options": served},
            {"name": "compute_score", "path": path},
            {"name": "all_at_once", "path": path, "batched": True},
            {"name": "llm_judge", "options": judge},
        ]
        scorer = start_scorer(RewardConfig(terms=terms, workers=1))
        groups = [group("a", "x", "crash"), group("b", "late", "y")]
        scorer.begin(groups[0])
        (good, crashed), (late, other) = scorer.score(groups)
        scorer.close()
    named = (
        ("compute_score", 1.0),
        ("compute_score/sees", 0.0),
        ("all_at_once", 10.0),
        ("http", 0.5),
        ("llm_judge", 1.0),
    )
    assert good == other == Reward(12.5, named)
    assert isinstance(crashed, Invalid) and crashed.reason == "crashed"
    assert isinstance(late, Invalid) and late.reason == "not_a_number"
    assert {asked.headers["authorization"] for asked in local.asked} == {"Bearer secret"}
    # Three responses to each server: batched functions are asked at the end, when that of "late" has been asked about.
    assert len(local.asked) == 6


def test_a_pattern_that_takes_long_on_one_answer_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_judge, "_REGEX_S", 0.6)
    slow = "a" * 40 + "d"

    def answer(asked: Asked) -> Said:
        bad = "slow" in asked.body["messages"][0]["content"]
        return Said({"choices": [{"message": {"content": slow if bad else "b 1"}}]}, after_s=0.0 if bad else 0.2)

    with serving(answer) as local:
        reward = built_in(
            "llm_judge",
            {"base_url": local.url, "model": "m", "extract": "(?:a|a)+c|b (.)", "timeout_s": 0.5, "retries": 0},
        )
        results = reward.score_many([(PROMPT, "slow"), (PROMPT, "x"), (PROMPT, "y")])  # type: ignore[attr-defined]
    assert reason(results[0]) == "no_verdict" and "took more than 0.6 s" in str(results[0])
    assert results[1:] == [1.0, 1.0]


def test_closing_gives_up_what_is_under_way() -> None:
    with serving(in_turn(Said({"score": 1}, after_s=60.0))) as local:
        scorer = start_scorer(RewardConfig(terms=[{"name": "http", "options": {"url": local.url, "concurrency": 1}}]))
        scorer.begin(group("a", "1", "2", "3"))
        while not local.asked:
            time.sleep(0.01)
        begun = time.monotonic()
        scorer.close()
        assert time.monotonic() - begun < 30
    assert len(local.asked) == 1


def test_problems_are_at_their_terms() -> None:
    terms = [{"name": "http"}, {"name": "exact_match", "options": {"extract": "x"}}, {"name": "llm_judge"}]
    assert {problem.field.rsplit(".", 1)[0] for problem in check_rewards(RewardConfig(terms=terms))} == {
        "reward.terms.0.options",
        "reward.terms.1.options",
        "reward.terms.2.options",
    }
    terms[0]["options"] = {"url": "http://127.0.0.1:1"}
    with pytest.raises(ConfigError) as raised:
        start_scorer(RewardConfig(terms=terms[:2]))
    assert [problem.field for problem in raised.value.problems] == ["reward.terms.1.options.extract"]


def test_a_server_is_not_one_of_the_sources() -> None:
    with pytest.raises(ConfigError, match=r"llm_judge cannot be one of the sources.*data_sources: \[mine\]"):
        built_in("by_data_source", {"sources": {"mine": "llm_judge"}})


def test_terms_are_named_in_their_order_and_those_that_ask_a_server_after_the_others() -> None:
    names = ("http", "exact_match", "exact_match")
    given = [RewardTerm(name="http", path="r.py"), *(RewardTerm(name=name) for name in names)]
    assert queries_a_server(given[1]) and not queries_a_server(given[0])
    assert term_names([given[1], given[0], *given[2:]]) == ["http_2", "http", "exact_match", "exact_match_2"]
