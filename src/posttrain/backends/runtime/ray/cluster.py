"""Ray, and nothing besides: the one file that imports it. Everything else here speaks to a ``Cluster``."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import ray
from numpy.typing import NDArray
from ray._private import services
from ray.exceptions import (
    GetTimeoutError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from posttrain.backends.runtime.ray import own_folder
from posttrain.errors import ConfigError, Problem, RunStopped
from posttrain.processes.environment import Kind, variables_for

T = TypeVar("T")
# Of a cluster of its own. Its workers are what the machine is there for (Ray would have them yield to everything else), and each
# is started in its own environment: those that Ray starts ahead of time would be of no use, at a second of CPU time each.
SETTINGS = {"worker_niceness": 0, "prestart_worker_first_driver": False, "enable_worker_prestart": False}
# Ray's own limits in seconds, of which placement.start_timeout_s makes larger ones. Its environment variable of the head's start
# holds for the whole start of it.
HEAD_START = "RAY_gcs_server_port_wait_time_s"
HEAD_START_S, WORKER_START_S, AGENT_START_S = 30, 60, 100
# What ``ray.init`` raises; besides these Exception itself, where a node does not come up.
START_FAULTS = (ConnectionError, RuntimeError, RayError, TimeoutError, ValueError, OSError)
LOOKS_PER_S = 256  # at single promises, of those that are waited for together
CALLS_AT_A_TIME = 4  # of one worker: its work, and questions how it is


class WorkerDied(Exception):
    """The process that was to answer is gone. The message is Ray's; ``why`` in words where Ray itself has ended it."""

    why = ""


class KilledForMemory(WorkerDied):
    """Ray has killed the worker, because its machine ran low on memory."""

    why = "was killed by Ray: its machine ran low on memory (RAY_memory_usage_threshold)"


class NodeGone(Exception):
    """A node does not answer."""


class Cluster:
    """A connection to a Ray cluster, which is started on this machine when no address is given and ends with the connection.

    Args: workers that will run, which a cluster of its own has room for; object_store_bytes of shared memory at most, for a
        cluster of its own; start_timeout_s, in which that must be up.
    Raises: RunStopped when there is no cluster, it does not start in time, or the process is connected to one already.
    """

    def __init__(self, address: str | None, *, workers: int, object_store_bytes: int, start_timeout_s: float):
        self._folder: str | None = None
        if ray.is_initialized():
            raise RunStopped(
                "this process is connected to Ray already, and a run makes a connection of its own: call ray.shutdown() first, "
                "or start the run in another process (placement.ray_address names a cluster that is up)"
            )
        logging.getLogger("ray").setLevel(logging.ERROR)  # it tells every user that it uses a token
        common: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR}
        handler = signal.getsignal(signal.SIGTERM)
        try:
            if address is None:
                self._folder = own_folder.new_folder()
                with _time_to_start(start_timeout_s):
                    ray.init(
                        address="local",
                        num_cpus=workers,
                        include_dashboard=False,
                        object_store_memory=object_store_bytes,
                        _temp_dir=self._folder,
                        _system_config=SETTINGS | _limits(start_timeout_s),
                        **common,
                    )
            else:
                ray.init(address=address, **common)
        except SystemExit as ended:  # Ray's handler of SIGTERM, which it has put in place of ours
            if callable(handler) and ended.code == signal.SIGTERM:
                self.close()
                handler(signal.SIGTERM, None)
            raise
        except Exception as error:
            self.close()
            if type(error) is not Exception and not isinstance(error, START_FAULTS):
                raise
            if address is None:
                raise RunStopped(f"Ray does not start: {error}") from error
            raise RunStopped(
                f"the Ray cluster at {address} cannot be reached: {error}. Is it up (ray status), and does it want a token "
                "(then set RAY_AUTH_MODE=token here, too)?"
            ) from error
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        self.node: str = ray.get_runtime_context().get_node_id()
        self._groups: list[PlacementGroup] = []

    def reserve(self, bundles: Sequence[Sequence[Mapping[str, float]]], timeout_s: float) -> list[PlacementGroup]:
        """Resources for the run: per node, a bundle per device. Each node's lie together, on a machine of their own.

        Raises: ConfigError when the cluster has less than that, or does not get it free in time.
        """
        wanted = [_totals(node) for node in bundles]
        until = time.monotonic() + (timeout_s if self._folder is None else 0.0)
        while len(machines := self._machines(wanted)) < len(wanted):
            if time.monotonic() >= until:  # others may still be joining
                count, need = len(ray.nodes()), wanted[len(machines)]
                raise ConfigError(
                    Problem(
                        f"the run needs {_machines_text(len(wanted))} with {_listed(need)}, and of the {_machines_text(count)} "
                        f"of the Ray cluster {len(machines)} {'is' if len(machines) == 1 else 'are'} so large",
                        fix="use fewer devices or nodes, or add machines to the cluster",
                        field="placement.nodes" if len(wanted) > 1 else "placement.devices",
                    )
                )
            time.sleep(1.0)
        for node, machine in zip(bundles, machines, strict=True):
            own = [dict(bundle) for bundle in node]
            self._groups.append(placement_group(own, strategy="STRICT_PACK", _soft_target_node_id=machine))
        for number, group in enumerate(self._groups):
            try:
                ray.get(group.ready(), timeout=timeout_s)
            except GetTimeoutError:
                free = {n: amount for n, amount in ray.available_resources().items() if n in wanted[number]}
                raise ConfigError(
                    Problem(
                        f"node {number} of the run, {_listed(wanted[number])} on one machine, was not free within "
                        f"{timeout_s:g} s; free in the whole cluster: {_listed(free)}",
                        fix="wait for other runs to end, raise placement.start_timeout_s, or use more nodes",
                        field="placement.devices",
                    )
                ) from None
        return self._groups

    def _machines(self, wanted: Sequence[Mapping[str, float]]) -> list[str]:
        """Ray's ids of different machines, one for each of the first needs, as far as there are; the driver's own first."""
        free = [each for each in ray.nodes() if each["Alive"]]
        free.sort(key=lambda each: each["NodeID"] != self.node)
        found: list[str] = []
        for need in wanted:
            fits = [each for each in free if all(each["Resources"].get(n, 0) >= a for n, a in need.items())]
            if not fits:
                break
            free.remove(fits[0])
            found.append(fits[0]["NodeID"])
        return found

    def node_of(self, group: PlacementGroup) -> str:
        """Ray's id of the node that a reserved group lies on."""
        table = ray.util.placement_group_table(group)
        found: str = next(iter(table["bundles_to_node_id"].values()))
        return found

    def address_of(self, node: str) -> str:
        """Return the address of a node within the cluster."""
        return next(str(each["NodeManagerAddress"]) for each in ray.nodes() if each["NodeID"] == node)

    def amount(self, resource: str) -> float:
        """Return the amount of a resource (CPU, GPU) in the whole cluster."""
        found: float = ray.cluster_resources().get(resource, 0.0)
        return found

    def spawn(
        self,
        kind: type,
        arguments: Sequence[Any],
        *,
        group: PlacementGroup,
        bundle: int,
        cpus: float,
        gpus: float,
        environment: Mapping[str, str],
    ) -> Any:
        """A worker process with an object of this class. Returns at once; a handle."""
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_concurrency": CALLS_AT_A_TIME,
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": dict(environment)},
        }
        return ray.remote(kind).options(**options).remote(*arguments)

    def started(self, handle: Any, name: str, timeout_s: float) -> Any:
        """Wait until a worker runs. Returns: its description of its process. Raises: RunStopped."""
        try:
            return ray.get(handle.about.remote(), timeout=timeout_s)
        except GetTimeoutError:
            raise RunStopped(f"{name} did not start within {timeout_s:g} s (placement.start_timeout_s)") from None
        except RayError as error:
            raise RunStopped(f"{name} does not start: {error}") from error

    def call(self, handle: Any, method: str, *arguments: Any) -> Any:
        """Call a worker's method. Returns at once; a promise. Promises among the arguments arrive as their values."""
        return getattr(handle, method).remote(*arguments)

    def call_for_two(self, handle: Any, method: str, *arguments: Any) -> tuple[Any, Any]:
        """The same for a method that returns two values: a promise of each.

        A value of which this process has the promise stays in shared memory until that is forgotten, also when the worker ends.
        """
        first, second = getattr(handle, method).options(num_returns=2).remote(*arguments)
        return first, second

    def put(self, value: Any) -> Any:
        """A promise of a value that lies in shared memory until the promise is forgotten. Raises: as ``put``."""
        return put(value)

    def ready(self, promises: Sequence[Any], timeout_s: float, *, whole: bool = False) -> list[Any]:
        """Return the promises that are fulfilled or failed; waits at most ``timeout_s`` for the first one, or with ``whole`` for
        all of them, and of many of these longer: a look at 64 that are open takes a millisecond."""
        count = len(promises) if whole else 1
        timeout_s = max(timeout_s, len(promises) / LOOKS_PER_S) if whole else timeout_s
        done, _ = ray.wait(list(promises), num_returns=count, timeout=timeout_s, fetch_local=False)
        if done and not whole:
            done, _ = ray.wait(list(promises), num_returns=len(promises), timeout=0, fetch_local=False)
        return list(done)

    def value(self, promise: Any, timeout_s: float) -> Any:
        """Raises: WorkerDied; TimeoutError."""
        try:
            return ray.get(promise, timeout=timeout_s)
        except GetTimeoutError:
            raise TimeoutError from None
        except OutOfMemoryError as error:
            raise KilledForMemory(str(error)) from error
        except RayActorError as error:
            raise WorkerDied(str(error)) from error

    def on_node(self, node: str, function: Callable[..., T], *arguments: Any, timeout_s: float = 15.0) -> T:
        """Call a function of this package on a node, in a process of its own unless the node is this one.

        Raises: NodeGone.
        """
        if node == self.node:
            return function(*arguments)
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        try:
            found: T = ray.get(task.remote(*arguments), timeout=timeout_s)
        except (GetTimeoutError, RayError) as error:
            raise NodeGone(f"node {node[:8]} does not answer: {type(error).__name__}") from error
        return found

    def kill(self, handle: Any) -> None:
        with suppress(RayError, ValueError):
            ray.kill(handle, no_restart=True)

    def close(self) -> None:
        """Give back what was reserved; end a cluster of its own. Closing again does nothing."""
        if ray.is_initialized():
            for group in getattr(self, "_groups", []):
                with suppress(RayError, ValueError):
                    remove_placement_group(group)
            ray.shutdown()
        if self._folder:
            own_folder.remove(self._folder)


def put(value: Any) -> Any:
    """A promise of a value that lies in shared memory until the promise is forgotten, and is lost with this process.

    Raises: RunStopped when neither shared memory nor the disk that Ray falls back to has room for it.
    """
    try:
        return ray.put(value)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        held = ray.cluster_resources().get("object_store_memory", 0.0) / 2**20
        raise RunStopped(
            f"Ray's object store ({held:,.0f} MiB in the whole cluster) has no room for a batch, "
            f"nor has the disk that it falls back to: {str(error).splitlines()[0]}. Make room in /dev/shm and in Ray's "
            "temporary folder, start the cluster with a larger --object-store-memory, or give a step fewer sequences"
        ) from error


class RayArray:
    """See records.stored_rows.StoredArray: an array in Ray's object store. Args: promise of it, or of several, of which it is
    the one with this number."""

    def __init__(self, promise: Any, number: int | None = None):
        self._promise, self._number = promise, number
        self._values: NDArray[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RayArray, (self._promise, self._number)

    def read(self) -> NDArray[Any]:
        """Raises: RunStopped where the array is lost."""
        if self._values is None:
            try:
                found = ray.get(self._promise)
            except RayError as error:
                raise RunStopped(f"a part of the batch is lost: {str(error).splitlines()[0]}") from error
            self._values = found if self._number is None else found[self._number]
        assert self._values is not None
        return self._values


def store(values: NDArray[Any]) -> RayArray:
    """Put an array into the object store. Raises: as ``put``."""
    return RayArray(put(values))


def worker_environment(threads: int, cuda: bool) -> dict[str, str]:
    """Return the environment of a worker, set before it imports torch: as the command line sets it for one process.

    The variables of malloc do what ``mallopt`` does there; on the CPU freed memory is kept. What this process has set for
    libraries goes along, as a cluster's nodes do not have it.
    """
    own = variables_for(Kind.RAY_WORKER)
    if cuda:
        return own
    keep = {"MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_TOP_PAD_": str(64 << 20), "MALLOC_MMAP_MAX_": "0"}
    return keep | own | {"OMP_NUM_THREADS": str(threads)}


@contextmanager
def _time_to_start(timeout_s: float) -> Iterator[None]:
    """Give a node of this process so long to start.

    Ray (2.60) looks for its new node for 30 s, a number in its code, so that it is the look that waits here. Any setting of Ray's
    for that would make this unnecessary.

    Raises: TimeoutError, from ``ray.init``, when the node is not up in time.
    """
    look, until = services.get_node, time.monotonic() + timeout_s

    def patient_look(address: str, node: str) -> Any:
        while True:
            try:
                return look(address, node)
            except RuntimeError:
                if time.monotonic() >= until:
                    raise TimeoutError(
                        f"its node was not up within {timeout_s:g} s (placement.start_timeout_s). The machine may be busy: raise "
                        "that, or start the run when other work has ended"
                    ) from None
                time.sleep(0.2)

    chosen = HEAD_START in os.environ
    if not chosen:
        os.environ[HEAD_START] = str(max(HEAD_START_S, math.ceil(timeout_s)))
    services.get_node = patient_look
    try:
        yield
    finally:
        services.get_node = look
        if not chosen:
            del os.environ[HEAD_START]


def _limits(timeout_s: float) -> dict[str, int]:
    """Return Ray's settings for processes that have so long to start: it would end them, and start others, before that."""
    seconds = math.ceil(timeout_s)
    return {
        "worker_register_timeout_seconds": max(WORKER_START_S, seconds),
        "agent_register_timeout_ms": 1000 * max(AGENT_START_S, seconds),
    }


def _machines_text(count: int) -> str:
    return f"{count} machine{'s' * (count != 1)}"


def _totals(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            totals[name] = totals.get(name, 0) + amount
    return totals


def _listed(amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items())
