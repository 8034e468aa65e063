"""How heads and tokens are shared out; what needs processes is in tests/parity/test_update_paths.py."""

from __future__ import annotations

import pytest

from posttrain.models.sequence_parallel import repeats


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "times"),
    [
        (32, 8, 1, 1),
        (32, 8, 8, 1),  # one each
        (32, 8, 16, 2),  # each for two devices
        (28, 4, 7, 7),  # 4 do not split over 7 until every query has its own
        (28, 4, 14, 7),
        (14, 2, 2, 1),
        (12, 4, 6, 3),  # 2 queries each, of which the second device's belong to two different heads
        (8, 8, 4, 1),
    ],
)
def test_heads_are_repeated_as_often_as_needed(heads: int, kv_heads: int, devices: int, times: int) -> None:
    assert repeats(heads, kv_heads, devices) == times


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices"), [(32, 8, 16), (28, 4, 7), (12, 4, 6), (14, 2, 14), (16, 4, 2)]
)
def test_every_device_has_the_keys_of_its_queries(heads: int, kv_heads: int, devices: int) -> None:
    times = repeats(heads, kv_heads, devices)
    held = [head for head in range(kv_heads) for _ in range(times)]
    queries, keys = heads // devices, len(held) // devices
    for device in range(devices):
        mine = held[device * keys : (device + 1) * keys]
        for number in range(queries):
            query = device * queries + number
            assert mine[number * keys // queries] == query // (heads // kv_heads)
