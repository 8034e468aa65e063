from __future__ import annotations

import json

import pytest

from posttrain.data.loader import ShuffledLoader
from posttrain.errors import ConfigError
from posttrain.records.prompts import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{i}", token_ids=(i,), text=str(i), data_source="t") for i in range(count)]


def ids(batch: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in batch]


def test_file_order_without_shuffling_and_the_incomplete_batch_dropped():
    loader = ShuffledLoader(prompts(5), 2, seed=1, shuffle=False)

    assert loader.steps_per_epoch == 2  # 5 // 2; p4 is left out
    assert [ids(loader.next()) for _ in range(3)] == [["p0", "p1"], ["p2", "p3"], ["p0", "p1"]]


def test_every_epoch_is_a_new_permutation_that_the_seed_fixes():
    def epochs(seed: int) -> list[list[str]]:
        loader = ShuffledLoader(prompts(20), 5, seed=seed, shuffle=True)
        return [[name for _ in range(4) for name in ids(loader.next())] for _ in range(3)]

    first, second, third = epochs(1)
    assert sorted(first) == sorted(second) == sorted(third) == sorted(ids(prompts(20)))
    assert first != second != third != first
    assert epochs(1) == [first, second, third]
    assert epochs(2)[0] != first


def test_state_is_plain_and_names_its_position():
    loader = ShuffledLoader(prompts(5), 2, seed=7, shuffle=True)
    for _ in range(3):
        loader.next()

    state = loader.state()

    assert state == {"epoch": 1, "step": 1, "prompts": 5, "prompts_per_step": 2, "seed": 7, "shuffle": True}
    assert json.loads(json.dumps(state)) == state


def test_a_state_of_other_data_is_refused_with_everything_that_differs():
    state = ShuffledLoader(prompts(6), 2, seed=7, shuffle=True).state()
    loader = ShuffledLoader(prompts(5), 3, seed=7, shuffle=True)
    before = loader.state()

    with pytest.raises(ConfigError) as caught:
        loader.restore(state)

    assert [problem.field for problem in caught.value.problems] == ["data.train_files", "data.prompts_per_step"]
    assert "prompts = 6, and this run has 5" in str(caught.value)
    assert loader.state() == before


def test_fewer_prompts_than_a_step_needs():
    with pytest.raises(ConfigError, match="a step needs 8 prompts and the dataset has 5"):
        ShuffledLoader(prompts(5), 8, seed=1, shuffle=True)
