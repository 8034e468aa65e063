"""Every environment that skyrl-gym ships, through our adapter and called directly: the same observations, rewards and ends."""

from __future__ import annotations

import json
import sqlite3
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from omegaconf import OmegaConf

from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvSpec

skyrl_gym = pytest.importorskip("skyrl_gym")
import skyrl_gym.envs  # noqa: E402, F811
from skyrl_gym.envs.registration import registry  # noqa: E402

from posttrain.backends.environments.inline import InlineHost  # noqa: E402
from posttrain.backends.environments.make import HostedEpisode  # noqa: E402
from posttrain.envs.skyrl_gym import SkyRLGym, make_skyrl_gym  # noqa: E402
from posttrain.interfaces.env import EnvFailed, EnvStart, EnvStep  # noqa: E402

SHIPPED = tuple(registry)
PROMPT = [{"role": "user", "content": "How many?"}]
NUMBER = {"reward_spec": {"method": "rule", "ground_truth": "72"}}
TESTS = [{"input": "2 3\n", "output": "5\n", "testtype": "stdin", "metadata": {"func_name": None}}]
SUM = "```python\nprint(sum(map(int, input().split())))\n```"


class Retriever(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"result": [[{"document": {"contents": "Paris is in France"}}]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def search_url() -> Any:
    server = HTTPServer(("127.0.0.1", 0), Retriever)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    server.server_close()


@pytest.fixture
def databases(tmp_path: Path) -> str:
    folder = tmp_path / "spider/database/shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as connection:
        connection.execute("create table goods (name text, price int)")
        connection.execute("insert into goods values ('tea', 3), ('ink', 5)")
    connection.close()
    return str(tmp_path)


# id -> the row, the replies, and the rewards that the package's own rules give for them
CASES: dict[str, tuple[dict[str, Any], list[str], list[float]]] = {
    "gsm8k": (NUMBER, ["36 x 2 = 72, so #### 72"], [1.0]),
    "aime": ({"reward_model": {"ground_truth": "204"}}, ["... Answer: 205"], [-1.0]),
    # three turns: no number, a wrong number in the right form (0.2 / 3), the answer
    "gsm8k_multi_turn": ({**NUMBER, "extra_info": {}}, ["hm", "#### 7", "#### 72"], [0.0, 0.2 / 3, 1.0]),
    "text2sql": (
        {"db_id": "shop", "data": "spider", "reward_spec": {"ground_truth": "select max(price) from goods"}},
        [
            "<think>look</think><sql>select * from goods where price > 3</sql>",
            "<think>look</think><sql>select cost from goods</sql>",
            "<think>so</think><solution>select 5</solution>",
        ],
        [0.0, 0.0, 1.0],
    ),
    "search": (
        {"reward_spec": {"ground_truth": {"target": ["France"]}}},
        ["<search>where is Paris?</search>", "<answer>france</answer>"],
        [0.0, 1.0],
    ),
    "searchcode": (
        NUMBER,
        ["<tool><python>print(36 * 2)</python></tool>", "no tool", "<solution>#### 72</solution>"],
        [0.0, 0.0, 1.0],
    ),
    "lcb": ({"reward_spec": {"ground_truth": json.dumps(TESTS)}}, [SUM], [1.0]),
}


def test_every_shipped_environment_has_a_case() -> None:
    assert set(CASES) == set(SHIPPED)


@pytest.mark.parametrize("name", list(CASES))
def test_equal_to_the_package_called_directly(name: str, search_url: str, databases: str) -> None:
    row, replies, rewards = CASES[name]
    configs = {
        "search": {"search_url": search_url, "topk": 1, "timeout": 5, "log_requests": False},
        "text2sql": {"db_path": databases},
    }
    settings = {"env_class": name, "configs": configs, "allow_unboxed_code": True}
    spec = EnvSpec(name="skyrl_gym", settings=settings, messages=PROMPT, row={"data_source": "x", **row}, max_turns=3)
    direct = skyrl_gym.make(
        name, env_config=OmegaConf.create(configs.get(name, {})), extras={"data_source": "x", **row, "max_turns": 3}
    )
    first, _ = direct.init(PROMPT)
    host = InlineHost()
    host.start("e", spec, 0)
    ((_, start),) = host.wait(0.0)
    assert isinstance(start, EnvStart) and start.messages == first
    found = []
    for reply in replies:
        expected = direct.step(reply)
        host.step("e", reply)
        ((_, step),) = host.wait(0.0)
        assert isinstance(step, EnvStep), step
        assert (step.messages, step.reward, step.done) == (
            expected["observations"],
            expected["reward"],
            expected["done"],
        )
        found.append(step.reward)
    assert found == pytest.approx(rewards)
    assert step.done
    host.finish("e")
    ((_, metrics),) = host.wait(0.0)
    assert metrics == direct.get_metrics() | type(direct).aggregate_metrics([direct.get_metrics()])


def test_a_recursive_language_model_takes_its_instructions_back() -> None:
    """Its steps take the last instruction out of the generator's list, played here as SkyRL's generator keeps it."""
    rlm = pytest.importorskip("skyrl_gym.envs.rlm.env")
    skyrl_gym.envs.register(id="rlm", entry_point="skyrl_gym.envs.rlm.env:BaseRLMEnv")
    row = {"extra_info": {"context_text": "the code is 1234"}}
    replies = [
        "no code",
        "```repl\nx = context[-4:]\nprint(x)\n```",
        "hm",
        "still",
        "```repl\nprint(1)\n```\nFINAL(1234)",
    ]
    spec = EnvSpec(name="skyrl_gym", settings={"env_class": "rlm"}, messages=PROMPT, row=row, max_turns=8)
    direct = rlm.BaseRLMEnv(extras={**row, "max_turns": 8})
    history, _ = direct.init([dict(message) for message in PROMPT])
    host = InlineHost()
    host.start("e", spec, 0)
    ((_, start),) = host.wait(0.0)
    assert isinstance(start, EnvStart) and start.messages == history
    for reply in replies:  # more than the list had instructions at the start
        expected = direct.step(reply)
        history += [{"role": "assistant", "content": reply}, *expected["observations"]]
        host.step("e", reply)
        ((_, step),) = host.wait(0.0)
        assert isinstance(step, EnvStep), step
        assert (step.conversation, step.reward, step.done) == (history, expected["reward"], expected["done"])
    assert step.done and step.reward == 1.0
    assert sum("Your next action" in str(message["content"]) for message in history) == 0, "instructions do not pile up"
    host.finish("e")
    ((_, metrics),) = host.wait(0.0)
    assert isinstance(metrics, dict) and metrics["turns_used"] == 5.0 and metrics["final_value_set"] == 1.0


class Own(skyrl_gym.envs.base_text_env.BaseTextEnv):  # type: ignore[misc, name-defined]
    """Saves what it has counted."""

    def __init__(self, env_config: Any, extras: Any) -> None:
        super().__init__()
        self.count = 0

    def step(self, action: str) -> Any:
        self.count += len(action)
        return {
            "observations": [{"role": "user", "content": str(self.count)}],
            "reward": 0.0,
            "done": self.count > 5,
        }

    def state(self) -> Any:
        return self.count

    def restore(self, state: Any) -> None:
        self.count = state


@pytest.mark.parametrize("name", ["gsm8k_multi_turn", "text2sql", "aime", "own"])
def test_a_saved_episode_is_continued_by_another_environment(name: str, databases: str) -> None:
    if name not in registry:
        skyrl_gym.envs.register(id=name, entry_point=Own)
    row, replies, _ = CASES.get(name, ({}, ["a", "bb", "ccc"], []))
    settings = {"env_class": name, "configs": {"text2sql": {"db_path": databases}}}
    spec = EnvSpec(name="skyrl_gym", settings=settings, messages=PROMPT, row=row, max_turns=3, saves=True)
    whole = HostedEpisode(spec, 0)
    expected, saved = [], [whole.reset()["saved"]]
    for reply in replies:
        expected.append(whole.step(reply))
        saved.append(expected[-1]["saved"])
    metrics = whole.close()
    for turn, state in enumerate(saved[:-1]):
        again = HostedEpisode(spec, 0)
        assert state is not None and again.restore(json.loads(json.dumps(state))) == {"restored": True}
        assert [again.step(reply) for reply in replies[turn:]] == expected[turn:]
        assert again.close() == metrics


def test_what_is_not_known_to_be_repeatable_is_not_saved(search_url: str) -> None:
    settings = {"env_class": "search", "configs": {"search": {"search_url": search_url}}}
    spec = EnvSpec(name="skyrl_gym", settings=settings, messages=PROMPT, row=CASES["search"][0], saves=True)
    assert HostedEpisode(spec, 0).reset()["saved"] is None


def test_an_environment_of_a_release_without_metrics() -> None:
    class Old:
        """The form of June 2025: no metrics, no metadata."""

        def init(self, prompt: list[Any]) -> Any:
            return prompt, {}

        def step(self, action: str) -> Any:
            return {"observations": [], "reward": 1.0, "done": True}

        def close(self) -> None: ...

    env = SkyRLGym(Old(), EnvSpec(name="skyrl_gym", messages=PROMPT))
    assert env.reset(0).messages == PROMPT and env.step("72").reward == 1.0 and env.close() == {}


def test_queries_of_text2sql_run_in_boxes(databases: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is run by this process, and none changes the database."""

    def here(*_: object, **__: object) -> None:
        raise AssertionError("a query was run outside a box")

    row = {**CASES["text2sql"][0], "env_class": "text2sql"}
    spec = EnvSpec(name="skyrl_gym", row=row, messages=PROMPT, max_turns=5)
    env = make_skyrl_gym(spec, configs={"text2sql": {"db_path": databases}})
    monkeypatch.setattr("sqlite3.connect", here)
    said = []
    for query in (
        "delete from goods",
        "select count(*) as n from goods",
        "select fts3_tokenizer('x', x'4141414141414141')",
    ):
        step = env.step(f"<think>.</think><sql>{query}</sql>")
        assert isinstance(step, EnvStep)
        said.append(str(step.messages[0]["content"]))
    assert "attempt to write a readonly database" in said[0] and "2" in said[1]
    step = env.step("<think>.</think><solution>select max(price) from goods</solution>")
    assert isinstance(step, EnvStep) and step.reward == 1.0
    assert env.close() is not None


def test_a_row_names_its_own() -> None:
    spec = EnvSpec(name="skyrl_gym", row={**NUMBER, "env_class": "gsm8k"}, messages=PROMPT)
    step = make_skyrl_gym(spec, env_class="aime").step("#### 72")
    assert isinstance(step, EnvStep) and step.reward == 1.0


OWN = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.riddle.words import SAID

class Riddle(BaseTextEnv):
    def __init__(self, env_config, extras={}):
        super().__init__()
        self.level = env_config.level
    def step(self, action):
        return BaseTextEnvStepOutput(observations=[], reward=float(action == SAID) * self.level, done=True, metadata={})
"""


def test_a_class_of_a_forks_skyrl_gym_finds_what_stands_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "skyrl-gym/skyrl_gym/envs/riddle"
    folder.mkdir(parents=True)
    (folder / "env.py").write_text(OWN)
    (folder / "words.py").write_text("SAID = 'egg'\n")
    paths = list(skyrl_gym.__path__), list(skyrl_gym.envs.__path__)
    settings = {
        "env_class": "riddle",
        "register": {"riddle": f"{folder}/env.py:Riddle"},
        "configs": {"riddle": {"level": 2}},
    }
    try:
        env = make_skyrl_gym(EnvSpec(name="skyrl_gym", messages=PROMPT), **settings)
        env.reset(0)
        assert env.step("egg").reward == 2.0
    finally:
        registry.pop("riddle", None)
        skyrl_gym.__path__[:], skyrl_gym.envs.__path__[:] = paths


def test_a_class_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN.replace("from skyrl_gym.envs.riddle.words import SAID", "SAID = 'egg'"))
    name = f"{file}:Riddle"
    try:
        env = make_skyrl_gym(EnvSpec(name="skyrl_gym", messages=PROMPT), env_class=name, configs={name: {"level": 3}})
        env.reset(0)
        assert env.step("egg").reward == 3.0
    finally:
        registry.pop(name, None)


def test_a_class_of_ones_own_and_its_correction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_worlds.py").write_text(
        "from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput\n"
        "class Cutting(BaseTextEnv):\n"
        "    def __init__(self, env_config, extras):\n"
        "        super().__init__()\n"
        "        self.limit = env_config.limit\n"
        "    def step(self, action):\n"
        "        return BaseTextEnvStepOutput(observations=[], reward=0.5, done=True, metadata={},\n"
        "                                     postprocessed_action=action[: self.limit])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for settings in (
        {
            "env_class": "own_cutting",
            "register": {"own_cutting": "own_worlds:Cutting"},
            "configs": {"own_cutting": {"limit": 2}},
        },
        {"env_class": "own_worlds:Cutting", "configs": {"own_worlds:Cutting": {"limit": 2}}},
    ):
        step = make_skyrl_gym(EnvSpec(name="skyrl_gym"), **settings).step("abcd")
        assert isinstance(step, EnvStep) and step.action == "ab"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "the row has no env_class"),
        ({"env_class": "gms8k"}, "skyrl-gym has no environment 'gms8k'"),
        ({"env_class": "lcb"}, "executes model-written code without a sandbox"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_skyrl_gym(EnvSpec(name="skyrl_gym", row=NUMBER), **settings)


def test_a_row_without_what_the_environment_needs_is_told() -> None:
    host = InlineHost()
    host.start("e", EnvSpec(name="skyrl_gym", settings={"env_class": "gsm8k"}), 0)
    ((_, event),) = host.wait(0.0)
    assert isinstance(event, EnvFailed) and "reward_spec field is required" in event.detail


ANSWERING = """
from skyrl_gym.envs.base_text_env import BaseTextEnv

class Mine(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()

    def step(self, action):
        return ANSWER
"""
FAULTS = {
    "None": "returned None; step returns a mapping",
    "([], 1.0, True, {})": "returned a tuple; step returns a mapping",
    "{'observations': [], 'reward': 1.0}": "returned a mapping without done; step returns",
    "{'reward': 'good', 'done': True}": "returned reward='good'; a reward is a finite number",
    "{'reward': float('nan'), 'done': True}": "returned reward=nan; a reward is a finite number",
    "{'reward': 1.0, 'done': 'no'}": "returned done='no'; step returns",
    "{'observations': 'again', 'reward': 0.0, 'done': False}": "observations of which the list is 'again'; step returns",
    "{'observations': ['again'], 'reward': 0.0, 'done': False}": "observations of which number 0 is 'again'; step returns",
    "{'observations': [{'text': 'x'}], 'reward': 0.0, 'done': False}": "of which number 0 is a dict; step returns",
}


@pytest.mark.parametrize("answer", FAULTS)
def test_a_wrong_answer_of_an_own_environment_names_class_file_and_line(answer: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ANSWERING.replace("ANSWER", answer))
    env = make_skyrl_gym(EnvSpec(name="skyrl_gym", messages=PROMPT), env_class=f"{file}:Mine")
    env.reset(0)
    with pytest.raises(ConfigError) as error:
        env.step("seven")
    (problem,) = error.value.problems
    assert problem.what.startswith(f"Mine.step ({file}:8) ") and FAULTS[answer] in problem.what


def test_an_environment_that_cannot_be_made_names_its_class(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        ANSWERING.replace("env_config=None, extras={}", "") + "class NoEnv:\n    def __init__(self, **k): pass\n"
    )
    for name, place, what in (
        ("Mine", f"{file}:4", "unexpected keyword argument"),
        ("NoEnv", f"{file}:10", "must inherit"),
    ):
        with pytest.raises(ConfigError, match=what) as error:
            make_skyrl_gym(EnvSpec(name="skyrl_gym", messages=PROMPT), env_class=f"{file}:{name}")
        assert f"{file}:{name} ({place}) cannot be made" in str(error.value)


def test_init_returns_messages_and_metadata(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ANSWERING + "\n    def init(self, prompt):\n        return prompt\n")
    with pytest.raises(
        ConfigError, match=r"Mine.init \(.*mine.py:11\) returned a list; init returns \(messages, metadata\)"
    ):
        make_skyrl_gym(EnvSpec(name="skyrl_gym", messages=PROMPT), env_class=f"{file}:Mine").reset(0)
