"""An agent of one's own as an environment: requests are turns, histories are kept or begin anew, its end is the episode's."""

from __future__ import annotations

import json
import queue
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.backends.environments.processes import ProcessHost
from posttrain.data.chat_api import Refused
from posttrain.data.openai_api.own_sampling import Honours
from posttrain.data.openai_api.request import read
from posttrain.envs.agent import Agent, AgentEpisode, AgentFailed, agent
from posttrain.envs.agent.listener import Listener, turn_honours
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvAsk, EnvFailed, EnvSpec, EnvStart, EnvStep
from posttrain.processes import proc
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory

ASKED = [{"role": "user", "content": "Guess."}]
RUN = SamplingParams(max_response_tokens=64)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}

AGENTS = '''
import json, os, signal, subprocess, time, urllib.request

def ask(episode, messages, **more):
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    request = urllib.request.Request(episode.base_url + "/chat/completions", body,
        {"Authorization": "Bearer " + episode.api_key, "Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]

def three(episode, bonus=0.0):
    """Goes on, goes on with a call of a tool, and then begins anew with what it has heard."""
    messages = list(episode.messages)
    said = ask(episode, messages)["message"]
    messages += [said, {"role": "user", "content": "And?"}]
    tools = [{"type": "function", "function": {"name": "look"}}]
    first = ask(episode, messages)
    heard = ask(episode, [{"role": "user", "content": "Heard: " + first["message"]["content"]}], max_tokens=5)
    return {"reward": len(heard["message"]["content"]) + bonus, "metrics": {"seed": episode.seed,
            "cut": heard["finish_reason"] == "length"}}

def caller(episode):
    """Calls a tool for the model, and sends its own message back as it came."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}]
    messages = list(episode.messages)
    choice = ask(episode, messages, tools=tools)
    call = choice["message"]["tool_calls"][0]
    messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["arguments"]}]
    ask(episode, messages, tools=tools)

def rivals(episode):
    """Two players of one policy at a time, of which one is trained."""
    from concurrent.futures import ThreadPoolExecutor
    names = ("policy", "policy-untrained")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: ask(episode, episode.messages, model=name), names))
    return 1.0

def by_tokens(episode):
    """Goes on behind the token ids that were sampled, then behind others, and returns the sum of their log-probs."""
    def complete(prompt):
        body = json.dumps({"prompt": prompt, "logprobs": 1}).encode()
        request = urllib.request.Request(episode.base_url + "/completions", body,
            {"Authorization": "Bearer " + episode.api_key, "Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["logprobs"]
    first = complete([1, 2])
    second = complete([1, 2, *first["token_ids"], 9])
    third = complete([1, 2, 8, 9])
    return sum(sum(each["token_logprobs"]) for each in (first, second, third))

async def waits(episode):
    ask(episode, episode.messages)
    return 0.5

def greedy(episode):
    while True:
        ask(episode, episode.messages)

def breaks(episode):
    ask(episode, episode.messages)
    raise KeyError("lost")

def dies(episode):
    ask(episode, episode.messages)
    os.kill(os.getpid(), signal.SIGKILL)

def silent(episode):
    return 1.0

def nonsense(episode):
    ask(episode, episode.messages)
    return "much"

def hangs(episode, pids):
    ask(episode, episode.messages)
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(pids, "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(600)
'''


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    (tmp_path / "agents.py").write_text(AGENTS)
    return tmp_path / "agents.py"


class InTurns:
    """An agent that makes one request after the other, driven as the environments that answer turn by turn."""

    def __init__(self, env: Any):
        assert isinstance(env, Agent)
        self.env = env
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.asked = EnvAsk(turn="", line=0, messages=())
        self.cut = False

    def reset(self, seed: int) -> EnvStart:
        self.env.begin(seed, self.events.put)
        asked = self.next()
        assert isinstance(asked, EnvAsk)
        self.asked = asked
        return EnvStart(messages=asked.messages, tools=asked.tools, max_response_tokens=asked.max_response_tokens)

    def turn_was_cut(self) -> None:
        self.cut = True

    def step(self, action: str) -> EnvStep:
        self.env.answer(self.asked.turn, action, cut=self.cut, prompt_tokens=11, response_tokens=len(action))
        self.cut = False
        before, event = self.asked.line, self.next()
        if isinstance(event, EnvStep):
            return event
        self.asked = event
        if event.line == before:
            return EnvStep(messages=event.messages, max_response_tokens=event.max_response_tokens)
        return EnvStep(conversation=event.messages, tools=event.tools, max_response_tokens=event.max_response_tokens)

    def next(self) -> Any:
        event = self.events.get(timeout=30)
        if isinstance(event, Exception):
            raise event
        return event

    def close(self) -> dict[str, float]:
        return dict(self.env.close())


@pytest.fixture
def made(agents: Path) -> Iterator[Callable[..., InTurns]]:
    alive: list[InTurns] = []

    def make(name: str, max_turns: int | None = None, **settings: Any) -> InTurns:
        spec = EnvSpec(name="agent", messages=ASKED, row={"id": 3}, max_turns=max_turns)
        env = InTurns(agent(spec, function=f"{agents}:{name}", **settings))
        alive.append(env)
        return env

    yield make
    for env in alive:
        env.close()


def test_requests_are_turns(made: Callable[..., InTurns]) -> None:
    env = made("three", options={"bonus": 0.25})
    assert env.reset(7) == EnvStart(messages=ASKED)
    step = env.step("Ten")
    assert step == EnvStep(messages=[{"role": "user", "content": "And?"}])  # it went on: added behind what was sampled
    step = env.step("Two")
    heard = [{"role": "user", "content": "Heard: Two"}]
    assert step == EnvStep(conversation=heard, tools=(), max_response_tokens=5)  # it began anew
    env.turn_was_cut()
    step = env.step("Fine")
    assert (step.done, step.stop, step.reward) == (True, "ended", 4.25)
    assert env.close() == {"seed": 7, "cut": 1, "num_actions": 3, "refused_turns": 0, "abandoned_turns": 0}


def test_calls_of_tools_come_back_as_they_were_told(made: Callable[..., InTurns]) -> None:
    env = made("caller")
    assert env.reset(0).tools == [TOOL]
    step = env.step('Let me see.<tool_call>{"name": "look", "arguments": {"at": "door"}}</tool_call>')
    assert step.conversation is None  # so the tokens stay, although the client was told the call in another form
    [observation] = step.messages
    assert (observation["role"], observation["content"]) == ("tool", '{"at": "door"}')
    assert env.step("Done.").reward is None  # it returned nothing: the run's terms score it


def test_token_ids_go_on_behind_those_that_were_sampled(made: Callable[..., InTurns]) -> None:
    env = made("by_tokens")
    env.reset(0)
    asked = []
    for ids, logprobs in (((3, 4), (-0.5, -0.25)), ((5,), (-1.0,)), ((6,), (-2.0,))):
        assert env.asked.options.tokens
        asked.append((env.asked.line, env.asked.prompt))
        env.env.sampled(env.asked.turn, ids, logprobs)
        end = env.step("text")
    # The second adds one token to the two that were read and the two that were sampled; the third is another conversation
    assert asked == [(1, (1, 2)), (1, (9,)), (2, (1, 2, 8, 9))]
    assert end.reward == -3.75


def test_a_host_that_knows_no_tokens_gives_no_log_probs(made: Callable[..., InTurns]) -> None:
    env = made("by_tokens")
    env.reset(0)
    with pytest.raises(AgentFailed, match="HTTP Error 400"):
        env.step("text")


def test_tokens_reach_an_agent_through_its_process(agents: Path) -> None:
    host = ProcessHost(1, 60.0, ["agent"])
    try:
        host.start("a", EnvSpec(name="agent", settings={"function": f"{agents}:by_tokens"}, messages=ASKED), 0)
        prompts: list[Any] = []
        for ids, logprobs in (((3, 4), (-0.5, -0.25)), ((5,), (-1.0,)), ((6,), (-2.0,))):
            [(_, asked)] = host.wait(60)
            assert isinstance(asked, EnvAsk)
            prompts.append(asked.prompt)
            said = Trajectory(
                sample_id="s", token_ids=ids, logprobs=logprobs, text="x", stop_reason=StopReason.EOS, policy_version=0
            )
            host.sampled("a", asked.turn, said)
            host.answer("a", asked.turn, "x", cut=False, prompt_tokens=2, response_tokens=len(ids))
        [(_, end)] = host.wait(60)
        assert prompts == [(1, 2), (9,), (1, 2, 8, 9)] and isinstance(end, EnvStep) and end.reward == -3.75
    finally:
        host.close()


def test_coroutine_functions(made: Callable[..., InTurns]) -> None:
    env = made("waits")
    env.reset(0)
    assert env.step("x").reward == 0.5


def test_turns_are_limited(made: Callable[..., InTurns]) -> None:
    env = made("greedy", max_turns=2)
    env.reset(0)
    assert env.step("a").conversation == ASKED
    assert env.step("b") == EnvStep(done=True, stop="max_turns")  # the third was refused, and the agent gave up
    assert env.close() == {"num_actions": 2, "refused_turns": 1, "abandoned_turns": 0}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("breaks", r"KeyError: 'lost' \(.*agents.py:\d+\)"),
        ("dies", "signal SIGKILL"),
        ("nonsense", "its reward is 'much'"),
    ],
)
def test_an_agent_that_fails_says_how(name: str, words: str, made: Callable[..., InTurns]) -> None:
    env = made(name)
    env.reset(0)
    with pytest.raises(AgentFailed, match=words):
        env.step("x")


def test_one_that_asks_for_nothing(made: Callable[..., InTurns]) -> None:
    with pytest.raises(AgentFailed, match="ended without requesting a turn"):
        made("silent").reset(0)


def test_a_program(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys, urllib.request\n"
        "def call(url, body=None):\n"
        "    data = None if body is None else json.dumps(body).encode()\n"
        "    headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "    return json.load(urllib.request.urlopen(urllib.request.Request(url, data, headers)))\n"
        "episode = call(os.environ['POSTTRAIN_URL'] + '/episode')\n"
        "assert episode['row'] == {'id': 3} and episode['options'] == {'x': 1} and episode['seed'] == 5\n"
        "said = call(os.environ['OPENAI_BASE_URL'] + '/chat/completions', {'messages': episode['messages']})\n"
        "call(os.environ['POSTTRAIN_URL'] + '/result', {'reward': 0.75, 'metrics': {'turns': 1}})\n"
        "print(said['choices'][0]['message']['content'], file=sys.stderr)\n"
        "sys.exit(3 if 'fail' in sys.argv else 0)\n"
    )
    spec = EnvSpec(name="agent", messages=ASKED, row={"id": 3})
    for arguments in ([], ["fail"]):
        env = InTurns(agent(spec, command=[sys.executable, str(program), *arguments], options={"x": 1}))
        try:
            env.reset(5)
            if arguments:
                with pytest.raises(AgentFailed, match="exit code 3: Hm"):
                    env.step("Hm")
            else:
                assert env.step("Hm").reward == 0.75
        finally:
            assert env.close()["num_actions"] == 1


@pytest.mark.parametrize("as_program", [False, True])
def test_an_agent_sees_no_secret_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_program: bool
) -> None:
    for name in ("WANDB_API_KEY", "JUDGE_KEY"):
        monkeypatch.setenv(name, "secret")
    seen, file = tmp_path / "seen", tmp_path / "names.py"
    ask = (
        "import json, os, urllib.request\n"
        "def main(episode=None):\n"
        f"    open({str(seen)!r}, 'w').write(' '.join(os.environ))\n"
        "    headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "    body = json.dumps({'messages': [{'role': 'user', 'content': 'q'}]}).encode()\n"
        "    url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "    urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    file.write_text(ask)
    where: dict[str, Any] = {"command": [sys.executable, str(file)]} if as_program else {"function": f"{file}:main"}
    env = InTurns(agent(EnvSpec(name="agent", messages=ASKED), **where))
    try:
        env.reset(0)
        env.step("x")
    finally:
        env.close()
    assert "PATH" in seen.read_text().split() and not {"WANDB_API_KEY", "JUDGE_KEY"} & set(seen.read_text().split())


def test_what_is_not_an_agent() -> None:
    with pytest.raises(ConfigError, match="neither is given"):
        agent(EnvSpec(name="agent"))
    with pytest.raises(ConfigError, match="both are given"):
        agent(EnvSpec(name="agent"), function="a:b", command=["c"])
    with pytest.raises(ConfigError, match="command must be a list"):
        agent(EnvSpec(name="agent"), command="python agent.py")  # type: ignore[arg-type]


def test_a_hanging_agent_is_killed_with_what_it_has_started(agents: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    settings = {"function": f"{agents}:hangs", "options": {"pids": str(pids)}}
    host = ProcessHost(1, 1.0, ["agent"])
    try:
        host.start("a", EnvSpec(name="agent", settings=settings, messages=ASKED), 0)
        [(_, asked)] = host.wait(60)
        assert isinstance(asked, EnvAsk)
        host.answer("a", asked.turn, "x", cut=False, prompt_tokens=1, response_tokens=1)
        [(_, failed)] = host.wait(60)
        assert isinstance(failed, EnvFailed) and failed.reason == "env_timeout"
        # the next episode finds a worker of its own, and plays
        host.start("b", EnvSpec(name="agent", settings={"function": f"{agents}:waits"}, messages=ASKED), 0)
        [(_, asked)] = host.wait(60)
        assert isinstance(asked, EnvAsk)
        host.answer("b", asked.turn, "x", cut=False, prompt_tokens=1, response_tokens=1)
        [(_, step)] = host.wait(60)
        assert isinstance(step, EnvStep) and step.reward == 0.5
        started = [int(pid) for pid in pids.read_text().split()]
        assert len(started) == 2
        until = time.monotonic() + 10  # a process that was killed takes a moment to be gone
        while proc.usage(started).processes and time.monotonic() < until:
            time.sleep(0.05)
        assert proc.usage(started).processes == 0
    finally:
        host.close()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ([], "the body must be a JSON object"),
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": ASKED, "temperature": 0.5}, r"this endpoint samples with 1 \(rollout.temperature\)"),
        ({"messages": ASKED, "stop": ["x"]}, r"this endpoint stops at \[\]"),
        ({"messages": ASKED, "n": 65}, "use 1 to 64"),
        ({"messages": ASKED, "logprobs": True, "top_logprobs": 2}, "those of the sampled tokens only"),
        ({"messages": ASKED, "max_tokens": 0.5}, "max_tokens is 0.5"),
        ({"messages": ASKED, "tools": [1]}, "tools must be a list of functions"),
        ({"messages": ASKED, "seed": 3}, "seed=3 is not supported"),
        ({"messages": ASKED, "top_k": 5}, "have it ignored .environment.settings.any_sampling=true"),
        ({"messages": ASKED, "reasoning_effort": "low"}, 'reasoning_effort="low" is not supported'),
        ({"messages": ASKED, "modalities": ["text", "audio"]}, "modalities=.* is not supported"),
        ({"messages": ASKED, "functions": [{"name": "f"}]}, "functions=.* is not supported"),
        ({"messages": ASKED, "best": 3}, "best is not known"),
    ],
)
def test_what_agents_cannot_ask_for(body: Any, problem: str) -> None:
    with pytest.raises(Refused, match=problem):
        read(body, RUN, chat=True, honours=turn_honours(EnvSpec(name="agent"), any_sampling=False))


def test_sampling_can_be_let_pass() -> None:
    ignored = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3}
    honours = turn_honours(EnvSpec(name="agent"), any_sampling=True)
    asked = read({"messages": ASKED, **ignored, "max_tokens": 7}, RUN, chat=True, honours=honours)
    assert asked.max_tokens == 7


def test_parameters_without_an_effect_pass() -> None:
    """Clients write out parameters that say what holds anyway."""
    usual = {"modalities": ["text"], "verbosity": "medium", "repetition_penalty": 1.0, "prompt_cache_retention": "24h"}
    nothing = dict.fromkeys(("reasoning_effort", "prediction", "audio", "functions", "function_call", "top_k"))
    honours = turn_honours(EnvSpec(name="agent"), any_sampling=False)
    assert read({"messages": ASKED, **usual, **nothing}, RUN, chat=True, honours=honours).messages == ASKED


def test_the_address_is_for_those_who_know_the_token() -> None:
    listener = Listener(lambda asked: asked[0].refuse("no turns today"), sampling=RUN, honours=Honours())
    listener.start(AgentEpisode(base_url="", api_key="", messages=ASKED, row={}, seed=0, max_turns=None), {})

    def status(path: str, token: str, data: bytes | None = None) -> tuple[int, str]:
        request = urllib.request.Request(listener.url + path, data, {"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["message"]

    try:
        assert status("/episode", "guess")[0] == status("/v1/chat/completions", "", b"{}")[0] == 401
        assert json.loads(status("/episode", listener.token)[1])["messages"] == ASKED
        assert json.loads(status("/v1/models", listener.token)[1])["data"][0]["id"] == "policy"
        assert json.loads(status("/v1/models/policy", listener.token)[1])["object"] == "model"
        assert status("/v1/models/other", listener.token)[0] == 404
        assert status("/v1/embeddings", listener.token, b"{}")[0] == 404
        assert status("/v1/chat/completions", listener.token, b"{")[1].startswith("the body is not JSON")
        other = json.dumps({"model": "gpt-4o", "messages": [{"role": "user", "content": "a"}]}).encode()
        found = status("/v1/chat/completions", listener.token, other)
        assert found == (404, 'there is no model "gpt-4o"; this endpoint has policy')
        body = json.dumps({"messages": ASKED}).encode()
        assert status("/v1/chat/completions", listener.token, body) == (400, "no turns today")
        assert status("/result", listener.token, b"[1]")[0] == 400
    finally:
        before = time.monotonic()
        listener.close()
    assert time.monotonic() - before < 20


def test_the_policy_as_another_player_is_neither_trained_nor_counted(made: Callable[..., InTurns]) -> None:
    played = made("rivals", max_turns=1)
    played.env.begin(0, played.events.put)
    first, other = played.next(), played.next()
    found = {each.trained: each for each in (first, other)}
    assert found[True].line != found[False].line  # although both say the same
    assert found[True].messages == found[False].messages
    for each in (first, other):
        played.env.answer(each.turn, "yes", cut=False, prompt_tokens=1, response_tokens=1)
    assert played.next() == EnvStep(done=True, stop="ended", reward=1.0)
    assert played.env.close()["num_actions"] == 1


# RFC 9112, 6.3: a length beside a coding, in either order, and lengths that differ
UNFRAMED = (
    "Transfer-Encoding: chunked\r\nContent-Length: 400",
    "Content-Length: 5\r\nTransfer-Encoding: chunked",
    "Content-Length: 5\r\nContent-Length: 400",
    "Content-Length: 5, 6",
)


@pytest.mark.parametrize("headers", UNFRAMED)
def test_requests_without_a_certain_end_are_answered_and_the_connection_closed(headers: str) -> None:
    listener = Listener(lambda asked: asked[0].refuse("no turns today"), sampling=RUN, honours=Honours())
    listener.start(AgentEpisode(base_url="", api_key="", messages=(), row={}, seed=0, max_turns=None), {})
    try:
        with socket.create_connection(("127.0.0.1", int(listener.url.rpartition(":")[2]))) as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {listener.token}\r\n"
            client.sendall(f"{head}{headers}\r\n\r\n0\r\n\r\nGET /episode HTTP/1.1\r\n\r\n".encode())
            client.settimeout(30)
            answer = b"".join(iter(lambda: client.recv(4096), b""))  # ends with the connection
    finally:
        listener.close()
    assert answer.split()[1] == b"400" and answer.count(b"HTTP/1.") == 1
    assert b"Content-Length" in answer.partition(b"\r\n\r\n")[2]
