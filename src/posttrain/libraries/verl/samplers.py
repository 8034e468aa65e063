"""Bases of samplers written for verl: they choose the order in which the rows of a dataset are drawn."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sized
from typing import Any

from torch.utils.data import Sampler


class AbstractSampler(Sampler[int]):
    """Constructed with the dataset and the section ``data``; iterating it gives row numbers of one epoch."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any):
        """Take the dataset and the configuration."""


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that is given every step's batch with its scores."""

    @abstractmethod
    def update(self, batch: Any) -> None:
        """Look at the step's batch before the next rows are drawn."""
