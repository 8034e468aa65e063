"""The work of one worker, as the driver describes it before the worker has loaded a library of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.processes.environment import Kind, variables_for

if TYPE_CHECKING:
    from posttrain.config import RunConfig, SftConfig
    from posttrain.records.batch_plans import BatchPlan, SftBatchPlan

# The function that a worker begins with: a name, because the function itself would bring torch before the worker has answered
START_ROLES = "posttrain.backends.runtime.ray.worker_roles:start_worker_roles"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAssignment:
    """The work of one worker, in plain values."""

    kind: type[RunConfig] | type[SftConfig]
    config: str  # of that kind, as JSON
    batches: BatchPlan | SftBatchPlan
    roles: tuple[str, ...]
    rank: int  # in its group
    ranks: int
    meeting: tuple[str, int] | None  # address and port of rank 0, for torch.distributed; None: the group has one rank
    cuda: bool
    threads: int  # of the CPU
    node: str  # its address, for messages
    timeout_s: float  # of what the ranks do together
    folders: tuple[str, str]  # of the run, and the one in which relative paths begin: every node must see them
    visible: str = ""  # the devices of a copy that several share, as CUDA_VISIBLE_DEVICES; "": this worker's own


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
