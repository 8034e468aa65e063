"""Handling of short memory: splitting of micro-batches, and activation offloading to the CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from posttrain.data.micro_batches import micro_batches, tokens_of
from posttrain.errors import RunStopped
from posttrain.records.batches import SequenceBatch
from posttrain.records.notices import Notices

SMALLEST_MOVED = 1 << 18  # bytes; copying a smaller tensor does not pay


class Cutter:
    """Cuts batches into micro-batches by count or tokens, and into smaller ones once one of them exceeded the memory."""

    def __init__(
        self,
        sequences: int | None,
        max_tokens: int | None = None,
        *,
        share_prompts: bool = True,
        notices: Notices | None = None,
        what: str = "a micro-batch",
    ):
        # Neighbouring rows that a loss compares, never in two micro-batches
        self.rows_together = 1
        self.sequences = sequences
        self.max_tokens = max_tokens
        self.share_prompts = share_prompts
        self.too_many_tokens: int | None = None  # the fewest that exceeded the memory
        self._notices = notices
        self._what = what

    def cut(self, batch: SequenceBatch) -> list[list[int]]:
        """Return the row numbers of each micro-batch."""
        parts = micro_batches(
            batch,
            self.sequences,
            self.max_tokens,
            share_prompts=self.share_prompts,
            rows_together=self.rows_together,
        )
        return [piece for part in parts for piece in self._halved(batch, part)]

    def shrink(self, batch: SequenceBatch, rows: list[int]) -> None:
        """Record that these rows exceeded the memory, and cut batches of their size in two from now on. Call it outside of the
        exception handler: the exception keeps everything alive that was in memory when it was raised.

        Raises: RunStopped when the rows are a single sequence.
        """
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        tokens = self.tokens(batch, rows)
        if len(rows) <= self.rows_together:
            single = "single sequence" if self.rows_together == 1 else "single pair of sequences"
            raise RunStopped(
                f"out of memory with a {single} of {tokens} tokens in {self._what}; turn on "
                "model.gradient_checkpointing, train an adapter (policy.lora), or lower rollout.max_response_tokens"
            )
        self.too_many_tokens = tokens
        if self._notices is not None:
            self._notices.add(
                f"out of memory with {len(rows)} sequences of {tokens} tokens in {self._what}: batches of this size are "
                "cut in two from now on, and the work was repeated; the numbers are the same"
            )

    def tokens(self, batch: SequenceBatch, rows: list[int]) -> int:
        return tokens_of(batch.rows(rows), share_prompts=self.share_prompts)

    def _halved(self, batch: SequenceBatch, rows: list[int]) -> list[list[int]]:
        together = self.rows_together
        if self.too_many_tokens is None or len(rows) <= together or self.tokens(batch, rows) < self.too_many_tokens:
            return [rows]
        middle = (len(rows) // together + 1) // 2 * together
        return [*self._halved(batch, rows[:middle]), *self._halved(batch, rows[middle:])]


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return True for torch's out-of-memory errors, of a device or (DefaultCPUAllocator) of the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)


def offloaded_activations(on: bool) -> AbstractContextManager[Any]:
    """Keep the activations for the backward pass on the CPU instead of the device.

    Parameters and small tensors stay. torch.autograd.graph.save_on_cpu would also copy every weight that a product keeps.
    """
    return torch.autograd.graph.saved_tensors_hooks(_to_cpu, _back) if on else nullcontext()


def _to_cpu(tensor: Tensor) -> tuple[torch.device, Tensor]:
    stays = (tensor.is_leaf and tensor.requires_grad) or tensor.nbytes < SMALLEST_MOVED
    if stays or tensor.device.type == "cpu":
        return tensor.device, tensor
    waiting = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    waiting.copy_(tensor)
    return tensor.device, waiting


def _back(kept: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = kept
    return tensor.to(device, non_blocking=True)
