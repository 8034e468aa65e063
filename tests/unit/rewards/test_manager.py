"""Reward managers of a user's, written for verl, as batched terms."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.config.reward import RewardConfig, RewardTerm
from posttrain.errors import ConfigError
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Reward, StopReason, Trajectory, TrajectoryGroup
from posttrain.rewards.load import check_rewards, load_rewards
from posttrain.rewards.verl.scores import default_compute_score as default_score
from posttrain.verl_rows import columns_read

CODE = '''
from collections import defaultdict
import torch
from verl import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager

@register("votes")
class Votes(AbstractRewardManager):
    """1 for the answer that most responses to the prompt give, as in test-time RL."""
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", bonus=0.0):
        self.tokenizer, self.bonus = tokenizer, bonus
        self.compute_score = compute_score or default_compute_score

    def __call__(self, data: DataProto, return_dict=False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        info, by_prompt = defaultdict(list), defaultdict(list)
        texts = []
        for i in range(len(data)):
            item = data[i]
            prompt_length = item.batch["prompts"].shape[-1]
            count = item.batch["attention_mask"][prompt_length:].sum()
            texts.append((self.tokenizer.decode(item.batch["responses"][:count]), count))
            by_prompt[item.non_tensor_batch["uid"]].append(texts[-1][0])
        for i, (text, count) in enumerate(texts):
            item = data[i].non_tensor_batch
            votes = by_prompt[item["uid"]]
            rewards[i, count - 1] = float(votes.count(text) * 2 > len(votes)) + self.bonus
            info["votes"].append(votes.count(text))
            info["checked"].append(self.compute_score(data_source=item["data_source"], solution_str=text,
                                   ground_truth=item["reward_model"]["ground_truth"], extra_info=item["extra_info"]))
        return {"reward_tensor": rewards, "reward_extra_info": info} if return_dict else rewards

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)

class Spread(Votes):
    def __call__(self, data, return_dict=False):
        return data.batch["response_mask"].float() / 2

class Wrong(Votes):
    def __call__(self, data):
        return torch.zeros(1, 1)

class Nothing(Votes):
    def __call__(self, data):
        len(data)

class Columns(Votes):
    def __call__(self, data):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for i in range(len(data)):
            item = data[i].non_tensor_batch
            rewards[i, 0] = item["answer"] + 10 * item.get("level", 0) + 100 * ("domain" in data.non_tensor_batch)
        return rewards

class Loop:
    def __init__(self, config, tokenizer, compute_score, reward_router_address=None):
        self.tokenizer = tokenizer
    async def run_single(self, data):
        return {"reward_score": float(data[0].batch["responses"][0]), "reward_extra_info": {"rows": len(data)}}
'''


@pytest.fixture
def own(tmp_path):
    """The file, and no module of verl's left behind."""
    file = tmp_path / "managers.py"
    file.write_text(CODE)
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "verl"}
    yield str(file)
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]
    sys.modules.update(before)


def group(*responses: tuple[int, ...], **columns: object) -> TrajectoryGroup:
    prompt = Prompt(
        prompt_id="a:0", token_ids=(1, 2), text="?", data_source="sums", ground_truth="7 7", extra_info=columns
    )
    made = [
        Trajectory(
            sample_id=f"a:0/{number}",
            token_ids=ids,
            logprobs=(0.0,) * len(ids),
            text="unread",
            stop_reason=StopReason.EOS,
            policy_version=0,
        )
        for number, ids in enumerate(responses)
    ]
    return TrajectoryGroup(prompt=prompt, trajectories=tuple(made))


def tokenizer():
    return SimpleNamespace(decode=lambda ids, **_: " ".join(str(int(one)) for one in ids))


def scored(own: str, name: str, *responses: tuple[int, ...], **term):
    config = RewardConfig(terms=[RewardTerm(name=name, path=own, kind="manager", **term)])
    assert check_rewards(config) == []
    return load_rewards(config, tokenizer=tokenizer).score(group(*responses))


def test_a_registered_manager_scores_all_responses_together(own):
    outcomes = scored(own, "votes", (7, 7), (7, 7), (8,), options={"bonus": 0.5}, scores_with=f"{own}:compute_score")
    assert [outcome.value for outcome in outcomes] == [1.5, 1.5, 0.5]  # 2 of 3 votes for "7 7"
    assert outcomes[0].terms == (("votes", 1.5), ("votes/votes", 2.0), ("votes/checked", 1.0))
    assert outcomes[2].terms == (("votes", 0.5), ("votes/votes", 1.0), ("votes/checked", 0.0))


def test_rewards_on_several_tokens_are_added_up_and_counted(own):
    [outcome] = scored(own, "Spread", (4, 5, 6))
    assert outcome == Reward(1.5, (("Spread", 1.5), ("Spread/token_rewards", 3.0)))


def test_a_reward_loop_is_called_with_one_row_at_a_time(own):
    outcomes = scored(own, "Loop", (4, 5), (9,))
    assert [outcome.terms for outcome in outcomes] == [
        (("Loop", 4.0), ("Loop/rows", 1.0)),
        (("Loop", 9.0), ("Loop/rows", 1.0)),
    ]


ACTORS = """
import asyncio, ray
from verl.experimental.reward_loop.reward_manager import register as register_manager
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

@ray.remote(num_cpus=1)
class Adder:
    def __init__(self, score): self.score, self.calls = score, 0
    def add(self, text):
        self.calls += 1
        return {"score": self.score(text) / (text != "9"), "calls": self.calls}

@ray.remote
def first(text): return float(text.split()[0])

@register_manager("acting")
class Acting(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score=None, **_):
        super().__init__(config, tokenizer)
        self.loop = asyncio.new_event_loop()
        node = ray.get_runtime_context().get_node_id()
        place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=True)
        self.adder = Adder.options(scheduling_strategy=place).remote(lambda text: ray.get(first.remote(text)))

    async def run_single(self, data):
        item = data[0]
        ids = item.batch["responses"][: item.batch["attention_mask"][-len(item.batch["responses"]) :].sum()]
        text = await self.loop.run_in_executor(None, lambda: self.tokenizer.decode(ids))
        found = await asyncio.wait_for(self.adder.add.remote(text), timeout=9)
        return {"reward_score": found["score"], "reward_extra_info": found}
"""


def test_a_manager_scores_by_actors_in_its_own_process(tmp_path, monkeypatch):
    """4 and 5 are the first words of the responses; the third one divides by zero in the actor."""
    for name in ("ray", "ray.util", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, None)  # put back behind the test
    file = tmp_path / "acting.py"
    file.write_text(ACTORS)
    assert [each.value for each in scored(str(file), "acting", (4, 5), (5,))] == [4.0, 5.0]
    [failed] = scored(str(file), "acting", (9,))
    assert isinstance(failed, Invalid) and "ZeroDivisionError" in failed.detail and "acting.py:11" in failed.detail


def test_a_manager_hands_its_function_arguments_of_its_own(own, tmp_path):
    """The manager also passes the number of tokens, which is the score."""
    calls = "self.compute_score(data_source=item"
    code = Path(own).read_text()
    assert calls in code
    Path(own).write_text(code.replace(calls, "self.compute_score(tokens=int(count), data_source=item"))
    (tmp_path / "scores.py").write_text("def score(data_source, tokens, **_):\n    return tokens\n")
    [outcome] = scored(own, "votes", (7, 7), scores_with=f"{tmp_path / 'scores.py'}:score")
    assert dict(outcome.terms)["votes/checked"] == 2.0


def test_a_manager_finds_the_columns_that_it_reads(own):
    """answer 3 + 10 x level 2; domain is no column of these rows."""
    config = RewardConfig(terms=[RewardTerm(name="Columns", path=own, kind="manager")])
    [outcome] = load_rewards(config, tokenizer=tokenizer).score(group((4, 5), answer=3, level=2))
    assert outcome.value == 23.0


OLD_CODE = """
import torch
from verl.workers.reward_manager import BatchRewardManager

def {default}(data_source, solution_str, ground_truth):
    return 0.25

class Math:
    def __init__(self, tokenizer, num_examine, compute_score=None):
        self.tokenizer, self.compute_score = tokenizer, compute_score or {default}

    def __call__(self, data):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for row in range(len(data)):
            text = self.tokenizer.decode(data[row].batch["responses"])
            rewards[row, -1] = self.compute_score(data_source="openai/gsm8k", solution_str=text, ground_truth="7 7")
        return rewards

class Batches(BatchRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source"):
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.tokenizer, self.compute_score = tokenizer, compute_score

    def verify(self, data):
        rows = [item.non_tensor_batch for item in data]
        return self.compute_score(data_sources=["openai/gsm8k"] * len(rows), solution_strs=["#### 7", "#### 8"],
                                  ground_truths=["7"] * len(rows), extra_infos=[row["extra_info"] for row in rows])
"""


@pytest.mark.parametrize(
    ("default", "term", "expected"),
    [
        ("mine", {}, 0.0),  # as verl from 0.4 on, which hands over its default
        ("mine", {"own_score": True}, 0.25),
        ("_default_compute_score", {}, 0.25),
        ("mine", {"own_score": True, "scores_with": "OWN:compute_score"}, 1.0),
    ],
)
def test_a_manager_with_a_default_of_its_own_uses_it_as_under_its_verl(own, tmp_path, default, term, expected):
    (tmp_path / "old.py").write_text(OLD_CODE.format(default=default))
    term = {name: value.replace("OWN", own) if name == "scores_with" else value for name, value in term.items()}
    [outcome] = scored(str(tmp_path / "old.py"), "Math", (7, 7), **term)
    assert outcome.value == expected


@pytest.mark.parametrize("own_score", [False, True])
def test_a_manager_of_batches_gets_the_default_for_lists(own, tmp_path, own_score):
    (tmp_path / "old.py").write_text(OLD_CODE.format(default="_default_compute_score"))
    outcomes = scored(str(tmp_path / "old.py"), "Batches", (7, 7), (8,), own_score=own_score)
    assert [outcome.value for outcome in outcomes] == [1.0, 0.0]


def test_a_wrong_shape_is_no_reward(own):
    [outcome] = scored(own, "Wrong", (4, 5))
    assert isinstance(outcome, Invalid)
    assert "it returned rewards of shape (1, 1); (1, 2) is expected" in outcome.detail
    [outcome] = scored(own, "Nothing", (4, 5))
    assert isinstance(outcome, Invalid)
    assert re.search(r"\.py:\d+: it returned a NoneType without rewards; \(1, 2\) is expected", outcome.detail)


def test_names_and_arguments_are_checked(own):
    term = RewardTerm(name="vote", path=own, kind="manager")
    [problem] = check_rewards(RewardConfig(terms=[term]))
    assert "neither defines nor registers a reward manager 'vote' (it has: votes, Votes, Spread" in problem.what
    assert "did you mean votes?" in problem.fix and problem.field == "reward.terms.0.name"
    term = RewardTerm(name="votes", path=own, kind="manager", options={"bonsu": 1})
    with pytest.raises(ConfigError, match=r"votes could not be constructed: TypeError: .*'bonsu'"):
        load_rewards(RewardConfig(terms=[term]), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("source", "response", "expected"),
    [("openai/gsm8k", "#### 12", 1.0), ("openai/gsm8k", "#### 13", 0.0), ("lighteval/MATH", r"\boxed{12}", 1.0)],
)
def test_the_default_score_is_a_number_that_a_manager_can_assign(source: str, response: str, expected: float) -> None:
    found = default_score(source, response, "12")
    assert type(found) is float and found == expected


def test_the_default_score_of_dapo_is_a_mapping_as_in_verl() -> None:
    assert default_score("math_dapo", "Answer: 12", "12")["score"] == 1.0


def test_what_samplers_of_verl_add_is_no_column_of_the_data():
    text = 'item.non_tensor_batch.get("reward_scores", {}); item.non_tensor_batch["answer"]'
    text += '; data.non_tensor_batch.get("__num_turns__")'
    assert columns_read(ast.parse(text)) == ["answer"]
