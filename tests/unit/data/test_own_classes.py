"""Dataset and sampler classes of a user's, written for verl, in the child process that holds them."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.build import own_rows
from posttrain.config.data import DataConfig
from posttrain.config.model import ModelConfig
from posttrain.data import own_prompts
from posttrain.data.own_order import SamplerLoader
from posttrain.data.own_prompts import load_own_prompts
from posttrain.errors import ConfigError, DataError, RunStopped
from posttrain.models.loading import load_tokenizer
from posttrain.models.tiny import write_tiny_model
from posttrain.processes import wire
from posttrain.processes.child import ChildFailed, described
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Reward, ScoredGroup, StopReason, Trajectory, TrajectoryGroup

pytestmark = pytest.mark.usefixtures("warm_children")

# As people write them: a subclass of verl's dataset, and samplers; two of the latter keep state.
CODE = '''
import os, random
import torch
from torch.utils.data import Dataset
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler
from verl import DataProto
import verl.utils.torch_functional as verl_F
from verl.utils.model import compute_position_id_with_mask

class Shouted(RLHFDataset):
    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        self.dataframe = self.dataframe.filter(lambda row: row["extra_info"]["index"] != 1, num_proc=1)

    def _build_messages(self, example):
        messages = example.pop(self.prompt_key)
        messages[-1]["content"] = messages[-1]["content"].upper() + self.config.get("ending", "")
        return messages

    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["pid"] = os.getpid()
        return row

class Plain(Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None):
        self.tokenizer, self.texts = tokenizer, [str(n) for n in range(int(config.count))]
        if config.get("fails"):
            raise RuntimeError("no such corpus")
    def __len__(self):
        return len(self.texts)
    def __getitem__(self, item):
        ids = self.tokenizer(self.texts[item], return_tensors="pt", add_special_tokens=False)["input_ids"]
        ids, mask = verl_F.postprocess_data(ids, torch.ones_like(ids), 8, 0)
        if item == 3:
            return {"data_source": "sums"}
        return {"input_ids": ids[0], "attention_mask": mask[0], "data_source": "sums", "odd": object(),
                "reward_model": {"ground_truth": self.texts[item]}, "extra_info": {"index": item}}

class Backwards(AbstractSampler):
    def __init__(self, data_source, data_config):
        self.rows = len(data_source)
    def __iter__(self):
        return iter(range(self.rows - 1, -1, -1))
    def __len__(self):
        return self.rows

class Drawn(Backwards):
    """A seed of its own; every epoch has another order."""
    def __init__(self, data_source, data_config):
        super().__init__(data_source, data_config)
        self.random = random.Random(data_config.get("seed") or None)
    def __iter__(self):
        return iter(self.random.sample(range(self.rows), self.rows))

class Hardest(AbstractCurriculumSampler):
    """Rows with the lowest score so far come first."""
    def __init__(self, data_source, data_config):
        self.scores = torch.zeros(len(data_source))
    def __iter__(self):
        while True:
            row = int(self.scores.argmin())
            self.scores[row] += 100
            yield row
    def update(self, batch):
        assert batch.batch["responses"].shape == batch.batch["token_level_scores"].shape
        for item in range(len(batch)):
            row = batch[item].non_tensor_batch["row"]
            self.scores[row] = batch[item].batch["token_level_scores"].sum()
    def state_dict(self):
        return {"scores": self.scores}
    def load_state_dict(self, state):
        self.scores = state["scores"]

class Endless(Backwards):
    def __iter__(self):
        while True:
            pass
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelConfig:
    return ModelConfig(path=str(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(CODE)
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"w{number}"}],
            "reward_model": {"ground_truth": str(number)},
            "extra_info": {"index": number},
        }
        for number in range(4)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config(place: Path, dataset: str | None = None, sampler: str | None = None, **options) -> DataConfig:
    return DataConfig(
        train_files=[str(place / "a.jsonl")],
        dataset_class_file=str(place / "own.py") if dataset else None,
        dataset_class_name=dataset,
        sampler_class_file=str(place / "own.py") if sampler else None,
        sampler_class_name=sampler,
        dataset_class_options=options,
        class_timeout_s=60,
    )


class InProcess:
    """A Child without the process: the handler, and values that went through the wire."""

    def __init__(self, factory, setup, **_):
        assert factory == own_prompts.FACTORY
        self._handler = own_rows.make(wire.from_bytes(wire.to_bytes(setup)))

    def call(self, value):
        try:
            return wire.from_bytes(wire.to_bytes(self._handler(wire.from_bytes(wire.to_bytes(value)))))
        except Exception as error:
            raise ChildFailed(described(error)) from error

    def close(self) -> None:
        pass


@pytest.fixture
def in_process(monkeypatch):
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "verl"}
    monkeypatch.setattr(own_prompts, "Child", InProcess)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]
    sys.modules.update(before)


def load(place, model, data: DataConfig, *, sampler: bool = False):
    tokenizer = load_tokenizer(model)
    return load_own_prompts(data.train_files, data, model, tokenizer, what="training", sampler=sampler)


def test_a_subclass_of_verls_dataset_gives_the_prompts(in_process, place, model):
    own = load(place, model, config(place, "Shouted", "Drawn", ending="!", max_prompt_length=64, return_raw_chat=True, seed=3),
               sampler=True)  # fmt: skip
    with closing(own.child):
        first = own.prompts.prompts[0]
        assert [prompt.ground_truth for prompt in own.prompts.prompts] == ["0", "2", "3"]  # index 1 is filtered
        assert [prompt.prompt_id for prompt in own.prompts.prompts] == ["training:0", "training:1", "training:2"]
        assert first.text == "<|im_start|>user\nW0!<|im_end|>\n<|im_start|>assistant\n"
        assert first.token_ids == tuple(load_tokenizer(model).encode(first.text, add_special_tokens=False))
        assert (first.data_source, first.extra_info, first.messages[0]["content"]) == ("sums", {"index": 0}, "W0!")

        # A sampler without state: drawing again gives the same, over epochs, and another process resumes exactly.
        loader = SamplerLoader(own.prompts.prompts, 2, own.child, name="Drawn")
        assert (loader.steps_per_epoch, loader.rows) == (1, 3)
        drawn = [[prompt.prompt_id for prompt in loader.next()] for _ in range(6)]
        assert len({tuple(step) for step in drawn}) > 1
    again = load(
        place, model, config(place, "Shouted", "Drawn", ending="!", max_prompt_length=64, seed=3), sampler=True
    )
    with closing(again.child):
        loader = SamplerLoader(again.prompts.prompts, 2, again.child, name="Drawn")
        assert [[prompt.prompt_id for prompt in loader.next()] for _ in range(3)] == drawn[:3]
        saved = json.loads(json.dumps(loader.state()))
        assert (saved["epoch"], saved["step"]) == (2, 1)
    resumed = load(
        place, model, config(place, "Shouted", "Drawn", ending="!", max_prompt_length=64, seed=3), sampler=True
    )
    with closing(resumed.child):
        loader = SamplerLoader(resumed.prompts.prompts, 2, resumed.child, name="Drawn")
        loader.restore(saved)
        assert [[prompt.prompt_id for prompt in loader.next()] for _ in range(3)] == drawn[3:]
        assert loader.epochs == 6.0
        with pytest.raises(ConfigError, match="draws other rows than it did before"):
            loader.restore(saved)  # its generator is elsewhere by now
        with pytest.raises(ConfigError, match="prompts_per_step = 2, and this run has 3"):
            SamplerLoader(resumed.prompts.prompts, 3, resumed.child, name="Drawn").restore(saved)


def test_a_curriculum_sees_the_scores_and_resumes_by_its_own_state(in_process, place, model):
    def scored(prompt, value: float) -> ScoredGroup:
        response = Trajectory(sample_id=f"{prompt.prompt_id}/0", token_ids=(5, 6), logprobs=(0.0, 0.0), text="x",
                              stop_reason=StopReason.EOS, policy_version=0)  # fmt: skip
        group = TrajectoryGroup(prompt=prompt, trajectories=(response,))
        return ScoredGroup(group=group, outcomes=(Reward(value),))

    data = config(place, "Plain", "Hardest", count=3)
    own = load(place, model, data, sampler=True)
    with closing(own.child):
        assert [prompt.text for prompt in own.prompts.prompts] == [
            "0",
            "1",
            "2",
        ]  # without a template, as the class made them
        loader = SamplerLoader(own.prompts.prompts, 2, own.child, name="Hardest")
        first, second = loader.next()
        assert (first.text, second.text) == ("0", "1")
        loader.learned([scored(first, 0.5), scored(second, -2.0)])
        saved = json.loads(json.dumps(loader.state()))
        assert [prompt.text for prompt in loader.next()] == ["1", "2"]  # scores 0.5, -2, 0
    own = load(place, model, data, sampler=True)
    with closing(own.child):
        loader = SamplerLoader(own.prompts.prompts, 2, own.child, name="Hardest")
        loader.restore(saved)
        assert [prompt.text for prompt in loader.next()] == ["1", "2"]


def test_faults_name_the_class_and_the_item(in_process, place, model):
    with pytest.raises(DataError, match=r"item 3 of Plain has no raw_prompt_ids, no input_ids and no raw_prompt"):
        load(place, model, config(place, "Plain", count=5))
    with pytest.raises(ConfigError, match=r"there is no class Sampled in .*own\.py"):
        load(place, model, config(place, "Sampled"))


def test_rows_that_do_not_exist_stop_the_run():
    answers = iter([{"length": 4, "learns": False, "state": False}, [9, 9]])
    child = SimpleNamespace(call=lambda call: next(answers))
    prompts = [SimpleNamespace(prompt_id=str(number)) for number in range(4)]
    with pytest.raises(RunStopped, match="gives row 9, and there are 4 rows"):
        SamplerLoader(prompts, 2, child, name="Wrong").next()


@pytest.mark.slow
def test_the_classes_live_in_a_process_of_their_own_that_can_be_killed(place, model):
    before = {name for name in sys.modules if name.startswith("verl")}  # of other tests
    own = load(place, model, config(place, "Plain", "Endless", count=2), sampler=True)
    with closing(own.child):
        assert [prompt.ground_truth for prompt in own.prompts.prompts] == ["0", "1"]
        loader = SamplerLoader(own.prompts.prompts, 2, own.child, name="Endless")
        own.child._call_s = 0.3
        with pytest.raises(RunStopped, match=r"Endless: it did not answer within 0\.3 s"):
            loader.next()
        assert own.child._process.poll() is not None
    assert {name for name in sys.modules if name.startswith("verl")} == before
    with pytest.raises(ConfigError, match=r"Plain of .*own\.py: RuntimeError: no such corpus \(.*own\.py:\d+\)"):
        load(place, model, config(place, "Plain", count=5, fails=True))


def test_an_epochs_rest_is_left_out_and_a_row_twice_in_a_step_has_two_names():
    answers = iter([{"length": 3, "learns": False, "state": False}, [0, 0], [1], [2, 1]])
    child = SimpleNamespace(call=lambda call: next(answers))
    prompts = [Prompt(prompt_id=f"t#2:{n}", token_ids=(n,), text=str(n), data_source="s") for n in range(3)]
    loader = SamplerLoader(prompts, 2, child, name="Some")
    assert [prompt.prompt_id for prompt in loader.next()] == ["t#2:0", "t#2:0#2"]
    assert loader._number("t#2:0#2") == loader._number("t#2:0") == 0
    assert [prompt.prompt_id for prompt in loader.next()] == ["t#2:2", "t#2:1"]
    assert loader.epochs == 2.0
