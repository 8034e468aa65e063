"""A saved position of the data loader goes on exactly where it was taken."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.loader import ShuffledLoader
from posttrain.records.prompts import Prompt


@given(
    count=st.integers(1, 30),
    per_step=st.integers(1, 30),
    before=st.integers(0, 40),
    after=st.integers(1, 40),
    seed=st.integers(0, 2**63),
    shuffle=st.booleans(),
)
def test_restored_loader_continues_as_the_uninterrupted_one(count, per_step, before, after, seed, shuffle):
    per_step = min(per_step, count)
    prompts = [Prompt(prompt_id=str(i), token_ids=(i,), text="", data_source="t") for i in range(count)]
    loader = ShuffledLoader(prompts, per_step, seed=seed, shuffle=shuffle)
    for _ in range(before):
        loader.next()

    fresh = ShuffledLoader(prompts, per_step, seed=seed, shuffle=shuffle)
    fresh.restore(json.loads(json.dumps(loader.state())))

    assert fresh.state() == loader.state()
    for _ in range(after):
        assert fresh.next() == loader.next()
    assert fresh.state() == loader.state()


@given(count=st.integers(1, 30), per_step=st.integers(1, 30), seed=st.integers(0, 2**32), skip=st.integers(0, 3))
def test_no_prompt_twice_in_an_epoch(count, per_step, seed, skip):
    per_step = min(per_step, count)
    prompts = [Prompt(prompt_id=str(i), token_ids=(i,), text="", data_source="t") for i in range(count)]
    loader = ShuffledLoader(prompts, per_step, seed=seed, shuffle=True)
    for _ in range(skip * loader.steps_per_epoch):
        loader.next()

    epoch = [prompt.prompt_id for _ in range(loader.steps_per_epoch) for prompt in loader.next()]

    assert len(epoch) == len(set(epoch)) == count // per_step * per_step
