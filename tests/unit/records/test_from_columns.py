from dataclasses import dataclass, field

import pytest

from posttrain.records.from_columns import records_of
from posttrain.records.trajectories import Reward, StopReason, Trajectory


def test_records_are_those_that_their_class_makes() -> None:
    names, reasons = ["a/0", "a/1", "b/0"], [StopReason.EOS, StopReason.LENGTH, StopReason.FAILED]
    columns = {
        "sample_id": names,
        "token_ids": [(1, 2), (), (3,)],
        "logprobs": [(-0.5, -1.0), (), (-2.0,)],
        "text": ["one", "", "two"],
        "stop_reason": reasons,
        "policy_version": [4, 4, 5],
        "env_reward": [None, 1.0, 2.0],
    }
    made = records_of(Trajectory, columns, 3)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    assert made == [Trajectory(**row) for row in rows]  # type: ignore[arg-type]
    assert all(type(each) is Trajectory for each in made) and len(set(map(id, made))) == 3
    assert records_of(Reward, {"value": [0.5]}, 1) == [Reward(0.5)]
    assert records_of(Reward, {"value": []}, 0) == []


@dataclass(slots=True)
class Lists:
    own: list[int] = field(default_factory=list)


def test_columns_that_do_not_make_records_are_refused() -> None:
    with pytest.raises(ValueError, match="2 values of terms for 3 records"):
        records_of(Reward, {"value": [1.0] * 3, "terms": [()] * 2}, 3)
    with pytest.raises(TypeError, match="value has neither a column nor a default"):
        records_of(Reward, {"terms": [()]}, 1)
    with pytest.raises(TypeError, match="own has neither"):  # one list would be every record's
        records_of(Lists, {}, 2)
