"""A result of which every process has computed some rows, [B, T]: whole where it is read, in parts where it is only passed on.

The processes of a training engine share out the micro-batches of a batch. Added up over all of them, log-probs of 100,000
responses of 1,000 tokens are 400 MB in every process; where results are only passed on, each keeps the rows that it has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from posttrain.records.unread_tensors import UnreadTensor

_APART: ContextVar[bool] = ContextVar("results stay in parts", default=False)


class PartialTensor(UnreadTensor):
    """See the module. Reading it is a collective operation of all processes.

    Args: own [n, T] float32, of the rows with the numbers ``of``; count B of all rows; whole adds up the parts.
    """

    own: Tensor
    of: tuple[int, ...]
    whole: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, own: Tensor, of: Sequence[int], count: int, whole: Callable[[], Tensor]) -> PartialTensor:
        made = cls._described(count, own.shape[1], own.dtype)
        made.own, made.of, made.whole = own, tuple(of), whole
        return made

    def _made_full(self) -> Tensor:
        return self.whole()

    def rows(self, index: slice | Tensor) -> Tensor:
        return self.read()[index]

    def from_column(self, column: int) -> Tensor:
        return self.read()[:, column:]


@contextmanager
def results_in_parts() -> Iterator[None]:
    """Let the results of training engines in this thread be PartialTensor, where several processes share them."""
    before = _APART.set(True)
    try:
        yield
    finally:
        _APART.reset(before)


def in_parts(own: Tensor, of: Sequence[int], count: int, whole: Callable[[], Tensor]) -> Tensor:
    """The result of all processes. Args: as of PartialTensor. Returns: [count, T], whole unless ``results_in_parts``."""
    return PartialTensor(own, of, count, whole) if _APART.get() and own.ndim == 2 else whole()
