"""What passes between the driver of a run under Ray and its workers in one step: bytes of values, and messages."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

POLL = "news"  # the method that every worker is asked again and again


class Traffic:
    """What is counted in the first step. Bytes are of values as they are serialized, without the frames of the protocol."""

    def __init__(self) -> None:
        self.step = 0
        self.bytes = {"to the driver": 0, "from the driver": 0}
        self.calls = 0  # of workers
        self.polls = 0
        self._read: WeakSet[Any] = WeakSet()  # arrays that the driver has fetched, which it does once

    def mib(self) -> dict[str, float]:
        return {way: count / 2**20 for way, count in self.bytes.items() if count}

    def listen(self) -> None:
        """Count what the runtime puts, sends and receives."""
        from posttrain.backends.runtime.ray.cluster import Cluster, RayArray

        call, put, value, read = Cluster.call, Cluster.put, Cluster.value, RayArray.read
        call_for_two = Cluster.call_for_two

        def counted_call(cluster: Any, handle: Any, method: str, *arguments: Any) -> Any:
            self._count_call(method, arguments)
            return call(cluster, handle, method, *arguments)

        def counted_call_for_two(cluster: Any, handle: Any, method: str, *arguments: Any) -> Any:
            self._count_call(method, arguments)
            return call_for_two(cluster, handle, method, *arguments)

        def counted_put(cluster: Any, given: Any) -> Any:
            self._count("from the driver", given)
            return put(cluster, given)

        def counted_value(cluster: Any, promise: Any, timeout_s: float) -> Any:
            found = value(cluster, promise, timeout_s)
            self._count("to the driver", found)
            return found

        def counted_read(array: Any) -> Any:
            if array not in self._read:
                self._read.add(array)
                self._count("to the driver", read(array))
            return read(array)

        RayArray.read = counted_read  # type: ignore[method-assign]
        Cluster.call, Cluster.call_for_two = counted_call, counted_call_for_two  # type: ignore[method-assign]
        Cluster.put, Cluster.value = counted_put, counted_value  # type: ignore[method-assign]

    def _count_call(self, method: str, arguments: Any) -> None:
        if self.step == 1:
            self.polls += method == POLL
            self.calls += method != POLL
        self._count("from the driver", arguments)

    def _count(self, way: str, value: Any) -> None:
        if self.step == 1:
            from ray._private.worker import global_worker

            self.bytes[way] += global_worker.get_serialization_context().serialize(value).total_bytes
