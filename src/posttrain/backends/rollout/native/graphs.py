"""Recorded passes of a CUDA device: a pass over one token per row is a few hundred kernels of microseconds each, and to start
them one by one takes many times as long as they take. A CUDA graph starts them all at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.named_parts import layers_of
from posttrain.backends.rollout.native.parts import mlp_of, router_of
from posttrain.models.recurrent import has_states

Step = Callable[[Tensor, Tensor, KeyValueCache], Tensor]  # Decoder.step


CHECKED = 4  # replays
# Largest difference of a replay: the same kernels, whose sums may be cut otherwise
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 0.05}
# Position embeddings that depend on the longest position of a pass, which the host would have to know
ROPES_THAT_WAIT = {"dynamic", "longrope"}


def unrecordable(model: PreTrainedModel) -> str:
    """Return why passes of ``model`` cannot be recorded: something in them waits for the device; "" where nothing does."""
    body: Any = model.get_decoder()
    if any(router_of(mlp_of(layer)) is not None for layer in layers_of(body)):
        return "the host deals out the rows to the experts"
    if has_states(model.config):
        return "layers that keep a state go through transformers' modules"
    ropes = set(_values_of(getattr(model.config.get_text_config(), "rope_parameters", None) or {}, "rope_type"))
    waiting = ropes & ROPES_THAT_WAIT
    return f"its position embeddings ({', '.join(sorted(waiting))}) depend on the longest position" if waiting else ""


def _values_of(settings: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Yield the values under this name, in the mapping and the mappings in it."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _values_of(value, name)
        elif key == name:
            yield value


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    given: Tensor  # [2, rows] int64: token ids and positions
    output: Tensor


class GraphedStep:
    """``Decoder.step`` for CUDA tensors. A number of rows is computed as it is at its first pass, which also compiles its
    kernels, recorded at its second, and replayed from then on, as long as the cache stays where it is.

    Needs attention that reads lengths from the cache's tensors, and layers that never wait for the device. The first replays are
    compared with the step itself, so that what a driver or a layer does otherwise is noticed, and nothing is recorded then.
    """

    def __init__(self, step: Step):
        self._step = step
        self._place: tuple[KeyValueCache, int] | None = None  # where the recorded passes read and write
        self._recorded: dict[int, _Recorded | None] = {}  # by the number of rows; None: one pass was made
        self._memory: Any = None  # shared by the graphs, one of which runs at a time
        self._unchecked = CHECKED
        self.fails = False  # passes cannot be recorded

    def __call__(self, token_ids: Tensor, positions: Tensor, cache: KeyValueCache) -> Tensor:
        """See Decoder.step. The result is overwritten by the next call."""
        rows, place = len(token_ids), (cache, cache.moves)
        if place != self._place:
            self.clear()
            self._place = place
        if self.fails or rows not in self._recorded:
            self._recorded[rows] = None
            return self._step(token_ids, positions, cache)
        recorded = self._recorded[rows]
        if recorded is None:
            try:
                recorded = self._recorded[rows] = self._record(token_ids, positions, cache)
            except RuntimeError as error:  # a layer that waits for the device, which cannot be recorded
                self._give_up(str(error).splitlines()[0])
                return self._step(token_ids, positions, cache)
        recorded.given[0].copy_(token_ids)
        recorded.given[1].copy_(positions)
        recorded.graph.replay()
        if self._unchecked:
            self._unchecked -= 1
            expected = self._step(token_ids, positions, cache)
            apart = float((recorded.output.float() - expected.float()).norm() / expected.float().norm())
            if not apart <= TOLERANCE.get(expected.dtype, 0.0):
                self._give_up(f"a replay gives another result ({apart:.1g} apart)")
                return expected
        return recorded.output

    def _give_up(self, why: str) -> None:
        self.fails = True
        warnings.warn(f"passes are not recorded as CUDA graphs, which is slower: {why}", stacklevel=3)

    def clear(self) -> None:
        """Forget what was recorded: weights or cache are about to move."""
        self._recorded.clear()
        self._place = self._memory = None  # memory without a graph cannot be shared any more

    def _record(self, token_ids: Tensor, positions: Tensor, cache: KeyValueCache) -> _Recorded:
        given = torch.stack([token_ids, positions])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            output = self._step(given[0], given[1], cache)
        self._memory = graph.pool()
        return _Recorded(graph, given, output)
