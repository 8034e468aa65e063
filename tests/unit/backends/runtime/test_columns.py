"""Responses as columns come back bit for bit, whatever they hold."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from posttrain.backends.runtime.ray.columns import from_columns, stored, to_columns
from posttrain.backends.runtime.ray.packed import Packed
from posttrain.backends.runtime.ray.worker import FinishedGroups, Outbox, PackedGroups
from posttrain.errors import RunStopped
from posttrain.interfaces.crew import Turned
from posttrain.records.stored_rows import HeldArray, StoredRow, digest_of, digest_of_logprobs
from posttrain.records.trajectories import StopReason, Trajectory, Turn, Unfinished, VersionSpan


def response(
    token_ids: tuple[int, ...] = (5, 6), logprobs: tuple[float, ...] = (-0.5, -1.25), **more: Any
) -> Trajectory:
    how: dict[str, Any] = {"sample_id": "a/0", "text": "x", "stop_reason": StopReason.EOS, "policy_version": 3}
    return Trajectory(token_ids=token_ids, logprobs=logprobs, **(how | more))


def back(*trajectories: Trajectory) -> list[Trajectory]:
    packed = pickle.dumps(to_columns(trajectories, Trajectory), protocol=5)
    return from_columns(pickle.loads(packed))  # noqa: S301  # written in the line above


FULL = response(
    response_mask=(True, False),
    version_spans=(VersionSpan(0, 2), VersionSpan(1, 3)),
    turns=(Turn(start=0, end=1, text="go", reward=0.5, stop_reason=StopReason.EOS, policy_version=2),),
    earlier=(response(sample_id="a/0", prompt_token_ids=(1,)),),
    env_metrics=(("won", 1.0),),
    top_logprobs=(((5, -0.5), (7, -1.0)), ((6, -1.25),)),
)


@pytest.mark.parametrize(
    "given_ones",
    [[], [response()], [response((), ())], [FULL, response(), response((9,), ())]],
    ids=["none", "one", "without a token", "of several kinds"],
)
def test_all_fields_come_back(given_ones: list[Trajectory]) -> None:
    found = back(*given_ones)
    assert found == given_ones and repr(found) == repr(given_ones)


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=True)), max_size=8))
def test_numbers_come_back_to_the_bit(pairs: list[tuple[int, float]]) -> None:
    whole = response(tuple(token for token, _ in pairs), tuple(nats for _, nats in pairs))
    (found,) = back(whole)
    assert found.token_ids == whole.token_ids
    # repr tells 0.0 from -0.0, and is the same for every NaN
    assert [repr(value) for value in found.logprobs] == [repr(value) for value in whole.logprobs]


def test_what_fits_takes_four_bytes_each() -> None:
    assert to_columns([response((2**31 - 1,), (-0.5,))], Trajectory).token_ids.dtype == np.int32
    assert to_columns([response((2**31,), (-0.5,))], Trajectory).token_ids.dtype == np.int64
    assert to_columns([response((1,), (float(np.float32(-0.1)),))], Trajectory).logprobs.dtype == np.float32
    assert (
        to_columns([response((1,), (-0.1,))], Trajectory).logprobs.dtype == np.float64
    )  # 0.1 has no float32 of the same value
    assert to_columns([response((1,), (-math.inf,))], Trajectory).logprobs.dtype == np.float32
    assert to_columns([response((1,), (-1e300,))], Trajectory).logprobs.dtype == np.float64  # not an infinity


def test_recorded_experts_come_back() -> None:
    experts = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    (found,) = back(response(experts=experts))
    assert found.experts is not None and found.experts.dtype == np.int16 and np.array_equal(found.experts, experts)


def test_groups_keep_their_numbers_and_sizes() -> None:
    groups = [((4, 1), (response(sample_id="b/0"), response((), ()))), ((4, 0), ()), ((4, 2), (FULL,))]
    assert PackedGroups.of(FinishedGroups.of(groups)).unpacked().each() == groups


def test_groups_come_back_from_arrays_that_travel_beside_them() -> None:
    """The driver gets the two apart, and reads an array when it looks into a response."""
    groups = [((1, 0), (response(sample_id="b/0"), response((), ()))), ((1, 1), (FULL,))]
    packed, arrays = PackedGroups.with_beside(FinishedGroups.of(groups)).parted()
    looked: list[int] = []

    class Away(HeldArray):
        def read(self) -> NDArray[Any]:
            looked.append(1)
            return super().read()

    found = packed.joined(lambda number: Away(arrays[number])).unpacked().each()
    assert not looked and packed.beside == ()
    assert found == groups and looked


def test_stored_columns_hold_places_and_read_the_same() -> None:
    given_ones = [FULL, response(), response((9,), (-1.5,)), response((), ())]
    kept: list[HeldArray] = []

    def keep(array: Any) -> HeldArray:
        kept.append(HeldArray(array))
        return kept[-1]

    found = from_columns(stored(to_columns(given_ones, Trajectory), keep))
    assert found == given_ones and repr(found) == repr(given_ones)
    assert len(kept) == 2  # token ids, log-probs
    for one, expected in zip(found, given_ones, strict=True):
        assert isinstance(one.token_ids, StoredRow) and isinstance(one.logprobs, StoredRow)
        assert one.token_ids.digest == digest_of(expected.token_ids)
        assert one.logprobs.digest == digest_of_logprobs(expected.logprobs)


def test_groups_that_the_store_has_no_room_for_end_the_call_that_samples_them() -> None:
    """A query for news, which nobody waits for, finds none; they are not lost, and come when there is room."""
    full = [True]

    def keep(array: Any) -> HeldArray:
        if full:
            raise RunStopped("no room")
        return HeldArray(array)

    outbox = Outbox(keep=keep)
    outbox.add_group((1, 0), (response(),))
    assert outbox.take()[1].message.numbers == ()
    with pytest.raises(RunStopped, match="no room"):
        outbox.take_groups()
    outbox.add_group((1, 0), (response(),))
    assert outbox.take()[1].message.numbers == ()
    full.clear()
    outbox.add_group((1, 1), (response((), ()),))
    assert outbox.take()[1].unpacked().each() == [((1, 0), (response(),)), ((1, 1), (response((), ()),))]


def test_a_turn_comes_with_ended_and_unfinished_responses_and_without_their_tokens() -> None:
    """Also one in which nothing has ended, and one in which nothing is left."""
    grown = Unfinished(sample_id="0/1", token_ids=(7, 8), logprobs=(-0.5, -2.0), spans=(VersionSpan(0, 3),))
    for ended, unfinished in (((FULL, response()), (grown,)), ((), (grown,)), ((response(),), ())):
        turned = Turned(begun=0, passes=2, ended=ended, grown=unfinished, again=("0/1",), tokens=4, busy_s=0.5)
        packed, arrays = Packed.with_beside(turned).parted()
        whole = pickle.loads(pickle.dumps(packed))  # noqa: S301  # written in this line
        found = whole.joined(lambda number, arrays=arrays: HeldArray(arrays[number])).unpacked()
        assert found == turned and len(arrays) == 2 * ((ended != ()) + (unfinished != ()))
        assert all(isinstance(each.token_ids, StoredRow) for each in (*found.ended, *found.grown))
        assert Packed.of(turned).unpacked() == turned
