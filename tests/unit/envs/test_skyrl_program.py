"""A program on SkyRL that brings its own generator: its own main and get_generator are called, and its requests are turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from driven import RAY, Driven
from posttrain.envs.agent import AgentFailed
from posttrain.envs.agent.bridged import bridge_of
from posttrain.envs.skyrl_agent import skyrl_agent
from posttrain.envs.skyrl_program import BRIDGE, skyrl_program
from posttrain.envs.skyrl_program.bridge import answer_of, left_out
from posttrain.envs.skyrl_program.rows import ProgramRows
from posttrain.errors import ConfigError, DataError
from posttrain.interfaces.env import EnvAsk, EnvSpec, EnvStep
from posttrain.records.trajectories import SamplingParams

pytestmark = pytest.mark.usefixtures("warm_children")

# The parts of SkyRL and Ray that a program meets, with the signatures of SkyRL in 2026.
SKYRL = """
import sys
from dataclasses import dataclass
import ray
if ray.is_initialized():
    raise RuntimeError("an actor would start")
from types import ModuleType, SimpleNamespace

@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int

@dataclass
class BatchMetadata:
    global_step: int
    training_phase: str

class BasePPOExp:
    def __init__(self, cfg):
        raise RuntimeError("engines would start")
    def run(self):
        raise RuntimeError("training would start")

def section(arguments):
    tree = SimpleNamespace()
    for key, _, value in (each.lstrip("+").partition("=") for each in arguments):
        at = tree
        *above, last = key.split(".")
        for part in above:
            at.__dict__.setdefault(part, SimpleNamespace())
            at = getattr(at, part)
        setattr(at, last, value)
    return tree

def module(name, **given):
    sys.modules[name] = made = ModuleType(name)
    made.__dict__.update(given)

def initialize_ray(cfg):
    raise RuntimeError("a cluster would start")

module("skyrl.train")
module("skyrl.train.generators")
module("skyrl.train.generators.base", TrajectoryID=TrajectoryID, BatchMetadata=BatchMetadata)
module("skyrl.train.entrypoints")
module("skyrl.train.entrypoints.main_base", BasePPOExp=BasePPOExp, initialize_ray=initialize_ray)
"""
PROGRAM = """
import asyncio, json, os, sys, urllib.request
from types import SimpleNamespace
TASK = [{"role": "user", "content": "task"}]
import ray
import skyrl
from skyrl.train.entrypoints.main_base import BasePPOExp, initialize_ray
from .helpers import double

@ray.remote(num_cpus=0.01)
def outside(messages):
    body = json.dumps({"model": "openai/m", "messages": messages, "temperature": 0.3, "min_tokens": 1, "logprobs": 0,
                       "include_stop_str_in_output": True, "skip_special_tokens": True}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

class Runner:
    def __init__(self):
        held = SimpleNamespace(num_trajectories=2)
        self.cfg = SimpleNamespace(generator=SimpleNamespace(num_trajectories=8, val_config=held))

class Generator:
    def __init__(self, cfg, tokenizer, client):
        self.runner = Runner()
        self.mode, self.tokenizer, self.client = cfg.generator.mode, tokenizer, client
        self.url = client.get_endpoint_url()

    async def generate(self, given):
        [messages], [row], [name] = given["prompts"], given["env_extras"], given["env_classes"]
        assert given["batch_metadata"].training_phase == row["phase"] and name == row["wants"], (given, row)
        if self.mode == "runner":
            settings = self.runner.cfg.generator
            await outside.remote(messages)
            count = settings.num_trajectories if row["phase"] == "train" else settings.val_config.num_trajectories
            return {"rewards": [0.5] * count, "loss_masks": [[1]] * count, "stop_reasons": ["stop"] * count}
        if self.mode == "task":
            stop = await outside.remote(TASK)
            return {"rewards": [float(messages == "/tasks/0")], "loss_masks": [[1]], "stop_reasons": [stop]}
        if self.mode == "chat":
            said = await outside.remote(messages)
            return {"rewards": [float(said)], "loss_masks": [[1]], "stop_reasons": ["stop"]}
        prompt = self.tokenizer.apply_chat_template(messages)
        first = await self.client.generate({"prompt_token_ids": [prompt], "sampling_params": {"max_tokens": 5}})
        ids = prompt + first["response_ids"][0] + [9]
        second = await self.client.generate({"prompt_token_ids": [ids], "sampling_params": None})
        told = {"rewards": [[0.0, double(0.125)], [1.0]], "loss_masks": [[1, 1], [1]], "is_last_step": [False, True],
                "stop_reasons": ["stop", "length"], "env_metrics": [{}, {"said": len(second["responses"][0]), "name": "x"}]}
        if self.mode == "children":  # the child's row comes first, and a question to a helper is in none
            asked = [prompt, [80], [81], prompt + first["response_ids"][0] + [9] + second["response_ids"][0] + [7]]
            third = await self.client.generate({"prompt_token_ids": [asked[1]], "sampling_params": None})
            await self.client.generate({"prompt_token_ids": [asked[2]], "sampling_params": None})
            return {"rewards": [[0.0, 2.0], [0.0, 0.0], [0.0, 1.0]], "loss_masks": [[1, 1], [1, 1], [1, 1]],
                    "is_last_step": [False, False, True], "stop_reasons": ["stop"] * 3,
                    "prompt_token_ids": [asked[1], prompt, ids],
                    "response_ids": [third["response_ids"][0], first["response_ids"][0], second["response_ids"][0]]}
        if self.mode == "masked":
            told["loss_masks"] = [[0, 0], [0]]
        if self.mode == "several":
            told["is_last_step"] = [True, True]
        return told

class Exp(BasePPOExp):
    def get_generator(self, cfg, tokenizer, inference_engine_client):
        return Generator(cfg, tokenizer, inference_engine_client)

    def get_train_dataset(self):
        if self.cfg.generator.mode == "broken":
            raise FileNotFoundError("no tasks")
        extras = {"phase": "train"}
        return [{"prompt": f"{self.cfg.data.train_data}/{n}", "env_class": None, "env_extras": extras} for n in (0, 1)]

    def get_eval_dataset(self):
        if self.cfg.generator.mode == "blind":
            return None
        return [([{"role": "user", "content": "CD"}], "words", {"data_source": "held"}, "uid-0")]

class Longer(Exp):
    def run(self): ...

class Asynchronous(Exp):
    def run(self):
        asyncio.run(self._setup_trainer().train())

@ray.remote(num_cpus=1)
def entrypoint(cfg):
    {"runs": Longer, "chat": Asynchronous}.get(cfg.generator.mode, Exp)(cfg).run()

def main():
    cfg = skyrl.section(sys.argv[1:])
    print("programs print")
    initialize_ray(cfg)
    ray.get(entrypoint.remote(cfg))
"""
# As skyrl-agent's runner for verl asks and returns
AGENT = """
from types import SimpleNamespace

class AutoAgentRunner:
    @classmethod
    def from_task(cls, task, infer_engine, tokenizer):
        made = cls()
        made.task, made.engine, made.tokenizer = open(task).read(), infer_engine, tokenizer
        generator = SimpleNamespace(num_trajectories=8, val_config=SimpleNamespace(num_trajectories=3))
        made.cfg = SimpleNamespace(generator=generator)
        return made

    async def run(self, batch, val_mode):
        assert self.task == "described"
        settings = self.cfg.generator.val_config if val_mode else self.cfg.generator
        columns = {name: value[0] for name, value in batch.non_tensor_batch.items()}
        assert columns["raw_prompt"].shape == (1,) and columns["instance"] == columns["extra_info"]["instance"] == "i"
        ids = self.tokenizer.apply_chat_template(columns["raw_prompt"])
        text, said = await self.engine.generate(request_id="r", prompt_ids=ids, sampling_params={"max_tokens": 5, "stop": ("E",)})
        assert (text, said["output_tokens"], said["finish_reason"]) == ("CD", [67, 68], "stop"), (text, said)
        scored = float(columns["reward_model"]["ground_truth"]) + (10 if val_mode else 0)
        count = settings.num_trajectories
        return {"rewards": [scored] * count, "loss_masks": [[1, 1]] * count, "stop_reasons": ["stop"] * count}
"""
# Letters for tokens
TRANSFORMERS = """
class AutoTokenizer:
    @classmethod
    def from_pretrained(cls, path, padding_side):
        assert (path, padding_side) == ("m", "left")
        return cls()
    def apply_chat_template(self, messages, **options):
        return [ord(letter) for message in messages for letter in message["content"]]
    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Driven]]:
    site, folder = tmp_path / "site", tmp_path / "checkout" / "examples"
    for package, text in (("skyrl", SKYRL), ("ray", RAY), ("transformers", TRANSFORMERS)):
        (site / package).mkdir(parents=True)
        (site / package / "__init__.py").write_text(text)
    folder.mkdir(parents=True)
    (folder / "main_mine.py").write_text(PROGRAM)
    (folder / "helpers.py").write_text("def double(value): return 2 * value")
    (tmp_path / "checkout/skyrl_agent").mkdir()
    (tmp_path / "checkout/skyrl_agent/__init__.py").write_text(AGENT)
    (tmp_path / "checkout/task.yaml").write_text("described")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    running: list[Driven] = []

    def start(mode: str, seed: int = 1_000_003, **row: Any) -> Driven:
        spec = EnvSpec(
            name="skyrl_program",
            messages=[{"role": "user", "content": "AB"}],
            row={"phase": "train" if seed >= 1_000_000 else "eval", "wants": "words", **row},
            sampling=SamplingParams(max_response_tokens=64),
        )
        env = skyrl_program(
            spec,
            file=str(folder / "main_mine.py"),
            folder=str(tmp_path / "checkout"),
            env_class="words",
            arguments=["trainer.policy.model.path=m", f"+generator.mode={mode}"],
            python=str(python),
        )
        running.append(Driven(env, seed))
        return running[-1]

    yield start
    for each in running:
        each.env.close()
    bridge_of(str(python), BRIDGE, "SkyRL").kill()


def test_token_ids_of_its_requests_are_turns_of_one_sample(started: Callable[..., Driven]) -> None:
    for seed in (1_000_003, 5):  # of training and of validation, by one process
        play = started("tokens", seed)
        first = play.next()
        # "AB" is 65, 66; the generator asks for five tokens at most
        assert isinstance(first, EnvAsk) and (first.prompt, first.max_response_tokens) == ((65, 66), 5)
        play.answer(first, "CD", 67, 68)
        second = play.next()
        assert (second.line, second.prompt) == (first.line, (9,))
        play.answer(second, "EFG", 69, 70, 71)
        end = play.next()
        # 0 + 2 * 0.125 in the first turn, and 1 in the second, which alone counts
        assert isinstance(end, EnvStep) and end.done and end.reward == 1.0
        assert play.env.close() == {"said": 3.0, "num_actions": 2, "refused_turns": 0, "abandoned_turns": 0}


def test_turns_that_no_row_of_a_program_trains_are_left_out(started: Callable[..., Driven]) -> None:
    """The agent's two turns, a child's and a helper's: the rows are the child's and the agent's, with the last one's reward."""
    play = started("children")
    lines = []
    for number in range(4):
        asked = play.next()
        lines.append(asked.line)
        play.answer(asked, "XY", 70 + 2 * number, 71 + 2 * number)
    end = play.next()
    agent, again, child, helper = lines
    assert agent == again and len({agent, child, helper}) == 3
    assert end.reward == 1.0 and end.learned == {agent: None, child: None}


@pytest.mark.parametrize(
    ("rows", "dropped"),
    [
        ([([1, 2], [3, 4], [1, 1])], [([9], [8])]),
        ([([1, 2], [3, 4], [1, 1]), ([9], [8], [1])], []),
        ([([1, 2], [3, 4], [1, 1]), ([9], [8], [0])], [([9], [8])]),  # masked
        ([([1], [2, 3, 4], [0, 1, 1])], [([9], [8])]),  # two turns in one row: 2 was read
        ([([1], [2, 3, 4], [0, 0, 1])], [([9], [8])]),  # trained in part
        ([([1], [2, 3, 4], [1, 0, 0])], []),  # 2 is trained, and nobody sampled it
        ([([1, 2], [3], [1])], [([9], [8])]),  # cut by the program
        ([([1, 2], [5, 4], [1, 1])], []),  # tokens of the program's own
    ],
)
def test_requests_of_which_nothing_is_trained(rows: list[Any], dropped: list[Any]) -> None:
    names = ("prompt_token_ids", "response_ids", "loss_masks")
    output = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    assert left_out([([1, 2], [3, 4]), ([9], [8])], output) == dropped
    assert left_out([([1, 2], [3, 4])], {"loss_masks": [[1]]}) == []


@pytest.mark.parametrize(
    ("rewards", "prompts", "joins", "counted"),
    [
        ([[0.25, 0.5], [1.0]], [[1], [1, 2, 3, 4]], False, 1.0),  # two rows, of which the last counts
        ([[0.25, 0.5], [1.0]], [[1], [1, 2, 3, 4]], True, 1.75),  # 1, 2, 3 begins the second prompt: they are one row
        ([[0.25, 0.5], [1.0]], [[1], [1, 9, 3, 4]], True, 1.0),  # another history
        ([[4.0], [0.25, 0.5], [1.0]], [[8], [1], [1, 2, 3, 4]], True, 1.75),  # the first row stays alone
        ([0.5, 1.0], [[1], [1, 2, 3, 4]], True, 1.0),  # of numbers for rows, the last one stays
    ],
)
def test_the_reward_of_a_trajectory_of_steps_is_that_of_its_last_row(
    rewards: list[Any], prompts: list[list[int]], joins: bool, counted: float
) -> None:
    responses = [[7]] * (len(prompts) - 2) + [[2, 3], [5]]
    masks = [[1] * len(each) for each in responses]
    last = [False] * (len(prompts) - 1) + [True]
    output = {"rewards": rewards, "prompt_token_ids": prompts, "response_ids": responses, "loss_masks": masks}
    assert answer_of({**output, "is_last_step": last}, joins=joins)["reward"] == counted


def test_a_row_names_its_environment_and_workers_of_ray_are_threads(started: Callable[..., Driven]) -> None:
    play = started("chat", env_class="others", wants="others")
    asked = play.next()
    assert list(asked.messages) == [{"role": "user", "content": "AB"}]
    play.answer(asked, "0.75", 1)
    assert play.next().reward == 0.75


@pytest.mark.parametrize("seed", [1_000_003, 5])  # of training and of validation
def test_a_runner_that_repeats_rows_by_itself_plays_each_once(started: Callable[..., Driven], seed: int) -> None:
    """skyrl-agent's plays as many trajectories of a row as its task file says; the run asks for each of a group."""
    play = started("runner", seed)
    asked = play.next()
    play.answer(asked, "C", 67)
    assert play.next().reward == 0.5


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("masked", "masks the whole trajectory .length."),
        ("several", "returned 2 trajectories for one row"),
        ("runs", "Longer of .*main_mine.py has a run of its own"),
    ],
)
def test_programs_that_cannot_be_played_say_why(started: Callable[..., Driven], mode: str, said: str) -> None:
    play = started(mode)
    with pytest.raises(AgentFailed, match=said):
        while isinstance(asked := play.next(), EnvAsk):
            play.answer(asked, "C", 67)


def rows(tmp_path: Path, what: str, mode: str = "task") -> list[dict[str, Any]]:
    file, folder = tmp_path / "checkout/examples/main_mine.py", tmp_path / "checkout"
    arguments = ["trainer.policy.model.path=m", f"+generator.mode={mode}", "data.train_data=/tasks"]
    config = {"file": str(file), "folder": str(folder), "arguments": arguments, "python": str(tmp_path / "python")}
    return list(ProgramRows(config, what))


@pytest.mark.usefixtures("started")
def test_rows_of_the_programs_own_dataset(tmp_path: Path) -> None:
    """A text, such as a task's folder, is the content of a message, and kept for the generator; tuples are SkyRL's own items."""
    [first, second] = rows(tmp_path, "training")
    assert first == {
        "raw_prompt": [{"role": "user", "content": "/tasks/0"}],
        "data_source": "skyrl_program",
        "extra_info": {"phase": "train", "program_prompt": "/tasks/0", "index": 0},
    }
    assert second["extra_info"]["program_prompt"] == "/tasks/1"
    assert rows(tmp_path, "validation") == [
        {
            "raw_prompt": [{"role": "user", "content": "CD"}],
            "data_source": "held",
            "extra_info": {"data_source": "held", "env_class": "words", "index": 0},
        }
    ]
    with pytest.raises(DataError, match=r"gives no training rows: FileNotFoundError: no tasks"):
        rows(tmp_path, "training", "broken")
    with pytest.raises(DataError, match=r"gives no validation rows: its get_eval_dataset returns None"):
        rows(tmp_path, "validation", "blind")


def test_a_prompt_that_is_a_text_is_given_to_the_generator_as_it_is(started: Callable[..., Driven]) -> None:
    play = started("task", program_prompt="/tasks/0")
    play.answer(play.next(), "stop", 1)
    assert play.next().reward == 1.0


@pytest.mark.parametrize(("seed", "reward"), [(1_000_003, 0.5), (5, 10.5)])  # of training and of validation
@pytest.mark.usefixtures("started")
def test_a_runner_of_skyrl_agent_for_verl_plays_one_trajectory_of_a_row(
    tmp_path: Path, seed: int, reward: float
) -> None:
    spec = EnvSpec(
        name="skyrl_agent",
        messages=[{"role": "user", "content": "AB"}],
        row={"data_source": "d", "ground_truth": "0.5", "instance": "i"},
        sampling=SamplingParams(max_response_tokens=64, stop=("E",)),
    )
    env = skyrl_agent(
        spec, task="task.yaml", folder=str(tmp_path / "checkout"), model="m", python=str(tmp_path / "python")
    )
    play = Driven(env, seed)
    asked = play.next()
    assert (asked.prompt, asked.max_response_tokens) == ((65, 66), 5)
    play.answer(asked, "CD", 67, 68)
    end = play.next()
    assert end.reward == reward
    env.close()


def test_it_needs_a_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTTRAIN_SKYRL_PYTHON", raising=False)
    with pytest.raises(ConfigError, match="needs a Python that has SkyRL"):
        skyrl_program(EnvSpec(name="skyrl_program"), file="main.py", folder=".")
