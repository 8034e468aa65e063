"""A loader of several domains with exact parts of every step."""

from __future__ import annotations

import json

import pytest

from posttrain.config.domains import DomainConfig
from posttrain.data.domains import DomainLoader, interleaved
from posttrain.data.loader import ShuffledLoader
from posttrain.errors import ConfigError
from posttrain.records.prompts import Prompt

MATH = DomainConfig(sources=["math", "gsm"], prompts_per_step=3)
CODE = DomainConfig(sources=["code"], prompts_per_step=1)


def prompts(**counts: int) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"{source}{number}", token_ids=(number,), text="", data_source=source)
        for source, count in counts.items()
        for number in range(count)
    ]


ROWS = prompts(math=4, code=2, gsm=3, chat=5)


def loader(seed: int = 1, shuffle: bool = True) -> DomainLoader:
    return DomainLoader(ROWS, {"maths": MATH, "code": CODE}, seed=seed, shuffle=shuffle)


def ids(batch: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in batch]


def test_every_step_has_exactly_its_parts_and_rows_of_no_domain_are_never_drawn() -> None:
    """7 rows of maths are 2 steps of 3 an epoch, with one left out; 2 of code are 2 steps of 1."""
    steps = [loader.next() for loader in [loader()] for _ in range(6)]
    for step in steps:
        assert sorted("code" if prompt.data_source == "code" else "maths" for prompt in step) == [
            "code",
            *["maths"] * 3,
        ]
    assert not any("chat" in name for step in steps for name in ids(step))


def test_a_domain_comes_in_the_order_it_has_alone() -> None:
    alone = ShuffledLoader([row for row in ROWS if row.data_source in MATH.sources], 3, seed=1, shuffle=True)
    both = loader()
    for _ in range(5):
        assert [name for name in ids(both.next()) if "code" not in name] == ids(alone.next())


def test_domains_that_are_complete_are_not_drawn_from() -> None:
    one = loader(shuffle=False)
    assert ids(one.next()) == ["math0", "math1", "code0", "math2"]
    assert ids(one.next(["code"])) == ["code1"]
    # maths did not move meanwhile
    assert ids(one.next()) == ["math3", "gsm0", "code0", "gsm1"]


def test_a_position_is_restored_in_every_domain() -> None:
    one, other = loader(), loader()
    one.next()
    one.next(["code"])
    other.restore(json.loads(json.dumps(one.state())))
    assert [ids(one.next()) for _ in range(4)] == [ids(other.next()) for _ in range(4)]
    assert one.epochs == other.epochs == 3.0  # code: 6 steps of 2 rows


def test_a_position_of_other_domains_is_refused() -> None:
    with pytest.raises(ConfigError, match="of the domains code, and this run has maths, code"):
        loader().restore(DomainLoader(ROWS, {"code": CODE}, seed=1, shuffle=True).state())
    with pytest.raises(ConfigError, match="of the domains none"):
        loader().restore(ShuffledLoader(ROWS, 4, seed=1, shuffle=True).state())


def test_domains_with_too_few_rows_are_all_named() -> None:
    big = {name: DomainConfig(sources=[name], prompts_per_step=9) for name in ("math", "code")}
    with pytest.raises(ConfigError) as caught:
        DomainLoader(ROWS, big, seed=1, shuffle=True)
    first, second = caught.value.problems
    assert "a step needs 9 prompts and the dataset has 4 with the sources of the domain math (math)" in first.what
    assert (first.field, second.field) == ("data.domains.math.prompts_per_step", "data.domains.code.prompts_per_step")


def test_lists_alternate_by_their_lengths() -> None:
    """After n of 6 items the list of 4 has had n x 4 / 6 of them, to within one."""
    mixed = interleaved([["a"] * 4, ["b"] * 2])
    assert mixed == ["a", "b", "a", "a", "b", "a"]
    for n in range(1, 7):
        assert abs(mixed[:n].count("a") - n * 4 / 6) < 1
