"""The reference follows the policy: its weights are mixed with the policy's during the run (TR-DPO, arXiv:2404.09656)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.backends.torch_training.sharding import Sharding
from posttrain.errors import ModelError, Problem
from posttrain.models.chunks import ChunkedTensors, write_chunks
from posttrain.run.durable import note_hashes

WHOLE = "reference.safetensors"  # beside the policy's weights in a checkpoint
CHUNKS = "reference"


class MovingReference:
    """A frozen model whose weights move.

    They are kept in float32 besides, from the first move on: a small step would be lost in bfloat16, and a resumed run has to
    continue from the very same numbers.

    Args: model, wrapped already where it is sharded.
    """

    def __init__(self, model: PreTrainedModel, sharding: Sharding | None = None):
        self._model = model
        self._sharding = sharding or Sharding()
        self._parameters = dict(model.named_parameters())
        self._exact: dict[str, Tensor] = {}  # float32, this process's part

    def check_fits(self, policy: Mapping[str, Tensor], shape: Callable[[Tensor], torch.Size]) -> None:
        """Raises: ModelError when a trained weight of the policy is not one of the reference, by name and shape."""
        for name, weight in policy.items():
            held = self._parameters.get(name)
            if held is None or self._sharding.shape(held) != shape(weight):
                what = (
                    f"reference.update_every mixes the policy's weights into the reference, which has no {name} like it"
                )
                fix = "use a reference of the policy's architecture, or reference.update_every=null"
                raise ModelError(Problem(what, fix=fix, field="reference.path"))

    @torch.no_grad()
    def move(self, weights: Iterable[tuple[str, Tensor]], mix: float) -> None:
        """reference <- mix x policy + (1 - mix) x reference, in float32.

        Args: the policy's weights, whole, by name; mix in (0, 1], where 1 replaces the reference. A collective call.
        Source: arXiv:2404.09656, equations 5 and 6.
        """
        for name, value in weights:
            held = self._parameters[name]
            new = self._sharding.part(value.float(), like=held)
            if mix < 1:
                before = self._exact.get(name)
                if before is None:
                    before = self._sharding.part(self._sharding.whole(held).float(), like=held)
                new = before * (1 - mix) + new * mix
            self._put(name, new)
        self._sharding.weights_changed(self._model)

    def _put(self, name: str, value: Tensor) -> None:
        self._exact[name] = value
        self._sharding.assign(self._parameters[name], value)

    def saved_bytes(self) -> int:
        """Estimate of the bytes that the writer writes."""
        return sum(4 * self._sharding.shape(weight).numel() for weight in self._parameters.values())

    def writer(self, *, sharded: bool) -> Callable[[Path], None]:
        """Gather the weights that have moved, and return the function that writes them beside the policy's; without a move so far
        it writes nothing, and a resumed run has the reference that it began with."""
        rank = self._sharding.rank
        if sharded:
            chunks = self._sharding.chunks(self._exact)
            return lambda folder: note_hashes(write_chunks(folder / CHUNKS, rank, chunks))
        gathered = {name: tensor for name, tensor in self._whole() if rank == 0}

        def write(folder: Path) -> None:
            if gathered:
                save_file(gathered, folder / WHOLE)

        return write

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self._exact.items():
            yield name, self._sharding.whole(value)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the output of ``writer``; a folder without one leaves the reference as it is."""
        saved: Mapping[str, Tensor] = {}
        if (folder / CHUNKS).is_dir():
            saved = ChunkedTensors(folder / CHUNKS)
        elif (folder / WHOLE).is_file():
            saved = ChunkedTensors(folder, whole=[folder / WHOLE])
        for name in saved:
            self._put(name, self._sharding.read(saved, name, like=self._parameters[name]))
        if saved:
            self._sharding.weights_changed(self._model)
