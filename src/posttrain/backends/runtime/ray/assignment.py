"""The work of one worker, as the driver describes it before the worker has loaded a library of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.interfaces.rollout_engine import NodeSpan

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
    span: NodeSpan | None = (
        None  # of a sampler whose copy lies on several machines; this worker starts the processes of one
    )
    visible: str = ""  # the devices of a copy that several share, as CUDA_VISIBLE_DEVICES; "": this worker's own
