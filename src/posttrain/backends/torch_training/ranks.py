"""Data parallelism: micro-batches balanced by tokens over processes in lockstep, sequence parallelism, joined results.

The common part of engines over several processes, independent of the sharding of the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from posttrain.algos.balancing import balanced_parts
from posttrain.backends.torch_training.sharding import Row, Sharding
from posttrain.config import TrainingConfig
from posttrain.config.distillation import ROLE
from posttrain.config.roles import learner_of
from posttrain.data.packing import PackedSequences
from posttrain.errors import ConfigError, Problem
from posttrain.models.sequence_parallel import SplitRow, collect, gathered, stretch
from posttrain.models.vision import tower_passes
from posttrain.plan.engine import engine_options
from posttrain.records.images import PromptImages
from posttrain.records.partial_tensors import in_parts

Settings = TypeVar("Settings")


class RanksSharding(Sharding, ABC):
    """Args: device_type of the processes' devices; compute_dtype of the passes; sequence: number of neighbouring processes that
    share a sequence.

    torch.distributed must be initialised, with a CPU backend as well where shards are offloaded.
    """

    splits_when_out_of_memory = False

    def __init__(self, device_type: str, *, compute_dtype: torch.dtype, sequence: int = 1):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device_type = device_type
        self.compute_dtype = compute_dtype
        self.sequence = sequence
        self._smallest: PromptImages | None = None  # images of the batch that is passed over; None: it has none
        if sequence > 1:
            pairs = init_device_mesh(
                device_type, (self.ranks // sequence, sequence), mesh_dim_names=("data", "sequence")
            )
            self.group = pairs.get_group("sequence")

    @classmethod
    @abstractmethod
    def of_options(
        cls, options: Mapping[str, Any], role: str, *, device_type: str, compute_dtype: torch.dtype, sequence: int
    ) -> Self:
        """Build the sharding from a role's engine options. Raises: ConfigError for invalid options."""

    @classmethod
    def of_run(cls, config: TrainingConfig, role: str, device_type: str, compute_dtype: torch.dtype) -> Self:
        """Build the sharding of a role's model over the processes: policy, critic, reward models, and
        teachers that are not split as the policy is. Raises: as ``of_options``."""
        alone = role == "reward model" or role.startswith(ROLE)  # and not split as the policy is
        sequence = 1 if alone else learner_of(config, role).sequence_parallel
        options = engine_options(config, role)
        return cls.of_options(options, role, device_type=device_type, compute_dtype=compute_dtype, sequence=sequence)

    def beside(self, options: Mapping[str, Any], role: str) -> Self:
        return self.of_options(
            options,
            role,
            device_type=self.device_type,
            compute_dtype=self.compute_dtype,
            sequence=self.sequence,
        )

    def begin(self, images: Sequence[PromptImages | None]) -> None:
        found = [each for each in images if each is not None]
        self._smallest = min(found, key=lambda each: each.features["pixel_values"].size, default=None)

    def _idle_images(self, packed: PackedSequences) -> tuple[PromptImages, ...]:
        """Return the images for ``Row.idle_images``. Every process must use the tower's weights as often as the others, so that
        they can be gathered, and their gradients reduced."""
        if self._smallest is None:
            return ()
        passes = tower_passes([each.images for each in packed.images])
        return (self._smallest,) * (self.most(passes) - passes)

    def row(self, packed: PackedSequences, counted: Tensor | None = None) -> Row:
        """Return this process's input: with sequence > 1 a slice of the tokens, and the scores within it."""
        whole = replace(super().row(packed, counted), idle_images=self._idle_images(packed))
        if self.sequence == 1:
            return whole
        token_ids = stretch(packed.token_ids, self.group)
        first = self.group.rank() * len(token_ids)
        places = ((packed.predicting >= first) & (packed.predicting < first + len(token_ids))).nonzero()[:, 0]
        # Every process must use every weight so that gradients can be reduced: without scored tokens, one score with weight 0.
        scored = places if len(places) else places.new_zeros(1)
        return Row(
            token_ids=token_ids,
            position_ids=stretch(packed.position_ids, self.group),
            layout=SplitRow(whole.layout, len(packed.token_ids), self.group),
            predicting=packed.predicting[scored] - first if len(places) else scored,
            targets=packed.targets[scored],
            places=places,
            images=whole.images,
            idle_images=whole.idle_images,
            whole=packed if packed.images else None,
            stretch=partial(stretch, group=self.group),
            own=packed.own.at(places) if packed.own else None,
            # Padding has no experts, and losses do not look at it
            experts=None if packed.experts is None else stretch(packed.experts, self.group, -1),
            counted=None if counted is None else stretch(counted, self.group),
        )

    def collected(self, values: Tensor, row: Row, packed: PackedSequences) -> Tensor:
        if row.places is None:
            return values
        return collect(values[: len(row.places)], row.places, len(packed.targets), self.group)

    def of_all_tokens(self, values: Tensor) -> Tensor:
        return values.cpu() if self.sequence == 1 else gathered(values, self.group)

    def over_sequence(self, part: Tensor) -> Tensor:
        if self.sequence == 1:
            return part
        return collect(part[None], torch.zeros(1, dtype=torch.int64, device=part.device), 1, self.group)[0]

    def deal(self, parts: list[list[int]], loads: Sequence[int]) -> list[list[int]]:
        """Balance by Karmarkar-Karp: equally many micro-batches for every copy, of nearly equal total tokens."""
        copies = self.ranks // self.sequence
        missing = -len(parts) % copies
        filled, weights = parts + [[]] * missing, [*loads, *[0] * missing]
        mine = balanced_parts(weights, copies, equal_size=True)[self.rank // self.sequence]
        return [filled[part] for part in mine]

    def joined(self, values: Tensor, rows: Sequence[int], count: int) -> Tensor:
        def whole() -> Tensor:
            out = Sharding.joined(self, values, rows, count).to(self.device_type)
            if not self._speaks:
                out.zero_()
            dist.all_reduce(out)  # every row is computed by one copy, and 0 elsewhere
            return out.cpu()

        own = slice(None if self._speaks else 0)
        return in_parts(values[own], rows[own], count, whole)

    @property
    def _speaks(self) -> bool:
        """Return True on one process of those that share a sequence, whose results are equal."""
        return self.rank % self.sequence == 0

    def most(self, count: int) -> int:
        largest = torch.tensor(count, device=self.device_type)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def total(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Sum over processes; those that ran only empty micro-batches may lack names that others have."""
        everyone: list[dict[str, float]] = [{} for _ in range(self.ranks)]
        dist.all_gather_object(everyone, dict(sums) if self._speaks else {})
        names = {name for each in everyone for name in each}
        return {name: sum(each.get(name, 0.0) for each in everyone) for name in sorted(names)}

    def wait(self) -> None:
        dist.barrier()


def checked(found: tuple[Settings, Sequence[Problem], object]) -> Settings:
    """Return the settings that ``plan`` has read from engine options. Raises: ConfigError with their problems."""
    settings, problems, _ = found
    if problems:
        raise ConfigError(problems)
    return settings
