"""A real object store of Ray that is full, on a disk that is full as well."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.errors import RunStopped

pytest.importorskip("ray")

MIB = 1 << 20


@pytest.mark.slow
def test_a_store_without_room_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.backends.runtime.ray import cluster as module

    # The share of the disk from which on Ray takes it to be full
    monkeypatch.setattr(module, "SETTINGS", module.SETTINGS | {"local_fs_capacity_threshold": 0.0001})
    cluster = module.Cluster(None, workers=1, object_store_bytes=80 * MIB, start_timeout_s=120.0)
    held = []
    try:
        with pytest.raises(
            RunStopped, match=r"^Ray's object store \(80 MiB in the whole cluster\) has no room"
        ) as caught:
            for _ in range(10):
                held.append(cluster.put(np.zeros(16 * MIB, np.uint8)))
    finally:
        cluster.close()
    assert 2 <= len(held) <= 5 and "\n" not in str(caught.value)
