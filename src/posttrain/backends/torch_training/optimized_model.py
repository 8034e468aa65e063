"""A Hugging Face model with an optimizer over master weights: micro-batches, updates, saving, loading.

The part of an engine that is independent of the loss; the engines of policy and critic are built on it.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NotRequired, TypedDict, Unpack

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.torch_training.loss_scale import LossScale
from posttrain.backends.torch_training.memory import Cutter, is_out_of_memory, offloaded_activations
from posttrain.backends.torch_training.optimizers import set_rates
from posttrain.backends.torch_training.rates import Rates
from posttrain.backends.torch_training.saved import (
    COUNTERS,
    OPTIMIZER,
    chunk_writer,
    of_another_model,
    saved_averages,
    saved_weights,
)
from posttrain.backends.torch_training.sharding import Sharding
from posttrain.backends.torch_training.update_count import UpdateCount
from posttrain.config.policy import OptimizerConfig
from posttrain.errors import RunStopped
from posttrain.libraries.cpu_kernels.load import why_no_kernels
from posttrain.models import lora
from posttrain.models.chunks import shapes_of
from posttrain.models.compiled import compile_layers
from posttrain.models.saving import save_config, save_model
from posttrain.models.vision import copy_processor, has_vision
from posttrain.records.batches import TrainBatch
from posttrain.records.notices import Notices
from posttrain.records.statistics import OptimizerStats

Factor = Callable[[int], float]  # update number -> a number


class How(TypedDict, total=False):
    """Settings that change how numbers are computed, but not the numbers; every engine takes these."""

    gradient_checkpointing: bool  # recompute activations in the backward pass
    activation_offload: bool  # keep them on the CPU instead of the device
    compile_layers: bool  # torch.compile on MLPs and norms
    share_prompts: bool  # compute a group's prompt once
    padded: bool  # process padding tokens, too
    master_dtype: torch.dtype  # of the weights that the optimizer works on
    # What masters start from, by name; without it, the model's weights
    stored_weights: Callable[[], Mapping[str, Tensor]]
    # Planned, where the learning rate moves once per step; None: it moves with every update
    updates_per_step: int | None
    weight_decay: Factor  # update number -> weight decay; without it, the optimizer's own constant
    loss_scaling: bool  # multiply losses by a factor that adapts, for float16
    rates: Rates  # what these factors come from, for checkpoints
    seed: int  # of an adapter's dropout
    sharding: Sharding
    notices: Notices


class Learning(How):
    """Arguments of an engine besides its model."""

    optimizer: OptimizerConfig
    learning_rate_factor: Factor  # update number -> factor of the peak
    sequences_per_micro_batch: int | None
    max_tokens_per_micro_batch: NotRequired[int | None]  # replaces the number of sequences


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """The result of a micro-batch's forward pass."""

    loss: Tensor  # [], its part of the mini-batch's loss, carrying gradient
    sums: Mapping[str, float]  # metric name -> sum over loss tokens
    values: Tensor  # [b, T], detached, to be joined (the policy's log-probs)
    flat: bool = False  # its gradient is known to be 0, without a backward pass


class OptimizedModel:
    """The optimizer half of an engine (see interfaces.train_engine). The model stays in eval mode: dropout would make the
    trainer score another policy than the one that sampled."""

    path_field: ClassVar[str] = "model.path"  # the setting that names the starting weights, for messages

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **how: Unpack[Learning]):
        self.model = model
        self.tokenizer = tokenizer
        self._model_class: Any = type(model)
        self._sharding = how.get("sharding") or Sharding()
        self._adapted = lora.is_adapted(model)
        self.padded = how.get("padded", False)
        share = how.get("share_prompts", True) and not self.padded
        self.cutter = Cutter(
            how["sequences_per_micro_batch"],
            self._sharding.pooled(how.get("max_tokens_per_micro_batch")),
            share_prompts=share,
            notices=how.get("notices"),
        )
        self.device = model.device  # for computing; the parameters may be offloaded
        if how.get("gradient_checkpointing"):
            # transformers 5.23 renamed it; the old name goes when 5.23 is the oldest version supported.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        self._checkpointed = [layer for layer in model.modules() if getattr(layer, "gradient_checkpointing", False)]
        if how.get("compile_layers"):
            compile_layers(model)
        self._sharding.wrap(model)
        self._masters = self._sharding.masters(model, how.get("master_dtype", torch.float32))
        if "stored_weights" in how and self._masters.shadow:
            self._masters.start_from(how["stored_weights"]())
        self._settings = optimizer = how["optimizer"]
        self._learning_rate_factor = how["learning_rate_factor"]
        self._weight_decay: Factor = how.get("weight_decay", lambda update: optimizer.weight_decay)
        self._optimizer = self._masters.optimizer(optimizer)
        self._count = UpdateCount(how.get("updates_per_step"), how.get("rates"))
        self._loss_scale = LossScale() if how.get("loss_scaling") else None
        self._passes = 0  # since the last update
        self._seed = how.get("seed", 0)
        on_device = self.device.type != "cpu"
        self._offload_optimizer = (optimizer.offload or self._sharding.offload_optimizer) and on_device
        self._offload_activations = how.get("activation_offload", False) and on_device
        self.notes: list[str] = []  # messages for the user about this engine
        missing = why_no_kernels(model.dtype) if self.device.type == "cpu" else None
        if missing:
            self.notes.append(f"updates go without compiled kernels, which is slower: {missing}")
        if self._adapted:
            self.notes.append(lora.trained_share(model))
        section = self.path_field.rpartition(".")[0]  # model or critic
        role = section.replace("model", "policy")
        asked = [f"{section}.activation_offload"] if how.get("activation_offload") else []
        asked += [f"{role}.optimizer.offload"] if optimizer.offload else []
        if asked and not on_device:
            self.notes.append(f"no effect of {', '.join(asked)}: everything is on the CPU already")

    @property
    def note(self) -> str | None:
        """Message for the user when the model is computed in an unusual way; None otherwise."""
        return "; ".join(self.notes) or None

    @property
    def version(self) -> int:
        return self._count.made

    def accumulate(
        self, batch: TrainBatch, learn: Callable[[TrainBatch], MicroBatch], still: Tensor | None = None
    ) -> tuple[float, dict[str, float], Tensor]:
        """Add the gradient of every micro-batch's loss to the accumulated gradients. Returns: the loss, sums by name, and the
        micro-batches' values as [B, T].

        A micro-batch that is flat on all processes needs no backward pass. Rows that are expected to be, [B] bool, get
        micro-batches of their own. A micro-batch that exceeds the memory is cut in two and all of them are repeated: an
        interrupted backward pass has added a part of its gradient, which cannot be removed.

        Raises: RunStopped when a single sequence does not fit.
        """
        held = self._masters.hold_gradients
        while True:
            done, too_large = self._pass_over(batch, learn, still)
            if done is not None:
                self._passes += 1
                return done
            if held or not self._sharding.splits_when_out_of_memory:
                tokens = self.cutter.tokens(batch.sequences, too_large)
                raise RunStopped(f"out of memory with a micro-batch of {tokens} tokens; use smaller micro-batches")
            self.zero_grad()
            self.cutter.shrink(batch.sequences, too_large)

    def _pass_over(
        self, batch: TrainBatch, learn: Callable[[TrainBatch], MicroBatch], still: Tensor | None
    ) -> tuple[tuple[float, dict[str, float], Tensor] | None, list[int]]:
        """Try once. Returns: the result and no rows, or None and the rows that exceeded the memory."""
        total, sums = 0.0, Counter[str]()
        values: list[Tensor] = []
        order: list[int] = []
        skips = self._sharding.skips_backward
        held = self._masters.hold_gradients
        parts = self._parts(batch, still if skips else None)
        self._sharding.begin(batch.sequences.images)
        with self._learning():
            for place, rows in enumerate(parts, start=1):
                micro = batch.rows(rows or list(range(self.cutter.rows_together)))
                if not rows:
                    micro = replace(micro, loss_mask=torch.zeros_like(micro.loss_mask))
                try:
                    with offloaded_activations(self._offload_activations):
                        found = learn(micro)
                    # The last one runs where none did: an update needs gradients, also those of 0
                    if not skips or (place == len(parts) and not held) or self._sharding.most(int(not found.flat)):
                        held = True
                        self._masters.backward(found.loss * self._loss_scale.value if self._loss_scale else found.loss)
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    return None, rows
                if rows:
                    total += found.loss.item()
                    sums.update(found.sums)
                    values.append(found.values)
                    order += rows
        joined = self._sharding.joined(torch.cat(values or [batch.advantages[:0]]), order, len(batch))
        everyone = self._sharding.total({**sums, "": total})
        return (everyone.pop(""), everyone, joined), []

    def _parts(self, batch: TrainBatch, still: Tensor | None) -> list[list[int]]:
        """Return the rows of this process's micro-batches, those without still rows first."""
        kinds = [(~still).nonzero(), still.nonzero()] if still is not None else [torch.arange(len(batch))]
        dealt: list[list[int]] = []
        for kind in (kind.flatten().tolist() for kind in kinds if len(kind)):
            sequences = batch.sequences.rows(kind)
            cut = self.cutter.cut(sequences)
            loads = [self.cutter.tokens(sequences, rows) for rows in cut]
            dealt += [[kind[row] for row in rows] for rows in self._sharding.deal(cut, loads)]
        return dealt

    @contextmanager
    def _learning(self) -> Iterator[None]:
        """Enable gradient checkpointing and an adapter's dropout inside the ``with`` block. transformers recomputes layers in
        training mode; their submodules stay in eval mode, so that no other dropout acts. Dropped values depend only on the seed,
        the update and the pass, so a resumed run drops the same."""
        for layer in self._checkpointed:
            layer.training = True
        drops = self._adapted
        with torch.random.fork_rng(enabled=drops):
            if drops:
                torch.manual_seed((self._seed * 1_000_003 + self._count.made) * 1_009 + self._passes)
                lora.drop_inputs(self.model, True)
            try:
                yield
            finally:
                if drops:
                    lora.drop_inputs(self.model, False)
                for layer in self._checkpointed:
                    layer.training = False

    def begin_step(self) -> None:
        self._count.steps += 1

    def optimizer_step(self) -> OptimizerStats:
        learning_rate = self._settings.lr * self._learning_rate_factor(self._count.place)
        set_rates(self._optimizer, learning_rate=learning_rate, weight_decay=self._weight_decay(self._count.made))
        limit, offload = self._settings.max_grad_norm, self._offload_optimizer
        self._sharding.weights_changed(self.model)  # left from a forward pass without a backward pass
        if self._loss_scale:
            self._masters.divide_gradients(self._loss_scale.value)
        norm = self._masters.step(self._optimizer, limit, self._sharding, offload=offload)
        usable = math.isfinite(norm)
        scale = self._loss_scale.value if self._loss_scale else None
        if self._loss_scale:
            self._loss_scale.after(finite=usable)
        self._count.made += usable
        self.zero_grad()
        return OptimizerStats(grad_norm=norm, lr=learning_rate, skipped=not usable, loss_scale=scale)

    def zero_grad(self) -> None:
        self._masters.zero_grad()
        self._passes = 0

    def saved_bytes(self) -> int:
        """Estimate: every trained weight and its two averages in float32; without an adapter also frozen weights."""
        size = self._sharding.shape
        trained = sum(size(weight).numel() for weight in self._masters.trained.values())
        frozen = [] if self._adapted else [tensor for tensor in self.model.parameters() if not tensor.requires_grad]
        return 3 * 4 * trained + sum(size(tensor).numel() * tensor.element_size() for tensor in frozen)

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        self.writer(optimizer=optimizer)(folder)
        self._sharding.wait()

    def writer(self, *, optimizer: bool = True, sharded: bool = False) -> Callable[[Path], None]:
        """Save a Hugging Face folder (float32 weights, tokenizer), or a peft folder with only the adapter, plus the optimizer's
        averages; all without pickle. With several processes the first one writes what all gather: gathering, and copying from a
        device to the CPU, happen before this method returns. Sharded, the folder holds chunks instead of whole weights, and every
        process writes its own."""
        if sharded and not self._adapted:
            return self._chunk_writer(optimizer=optimizer)
        masters = self._kept(self._masters.whole(self._sharding))
        state = {} if self._adapted else self._whole_state(masters)
        averages = self._kept(self._masters.averages(self._optimizer, self._sharding)) if optimizer else {}
        counters = self._counters()
        shell = self._shell()

        def write(folder: Path) -> None:
            if self._sharding.rank != 0:
                return
            if self._adapted:
                lora.write_adapter(self.model, masters, folder, head=self._head())
            else:
                save_model(shell, folder, state)
                save_config(shell, folder)
            if optimizer:
                save_file(averages, folder / OPTIMIZER)
            self._write_beside(folder, counters)

        return write

    def _counters(self) -> dict[str, Any]:
        return self._count.saved() | ({"loss_scale": self._loss_scale.saved()} if self._loss_scale else {})

    def _kept(self, gathered: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Collect tensors on the first process, which writes; the others take part in gathering and keep nothing."""
        return {name: tensor for name, tensor in gathered if self._sharding.rank == 0}

    def _chunk_writer(self, *, optimizer: bool) -> Callable[[Path], None]:
        names = self.model.state_dict().keys()
        tensors = {name: buffer for name, buffer in self.model.named_buffers() if name in names}
        tensors |= {name: self._masters.parameters.get(name, held) for name, held in self.model.named_parameters()}
        weights = self._sharding.chunks(tensors)
        averages = self._sharding.chunks(self._masters.states(self._optimizer)) if optimizer else []
        beside = partial(self._write_beside, counters=self._counters())
        return chunk_writer(self._sharding.rank, weights, averages, self._shell(), beside)

    def _write_beside(self, folder: Path, counters: Mapping[str, Any]) -> None:
        """Write the files besides weights and averages."""
        self.tokenizer.save_pretrained(folder)
        if has_vision(self.model.config):
            copy_processor(str(self.model.name_or_path), folder)
        (folder / COUNTERS).write_text(json.dumps(counters))

    def _shell(self) -> Any:
        """Return the model with a separate configuration: transformers changes that of a model it saves, and samplers that of the
        model they compute with."""
        shell: Any = object.__new__(self._model_class)  # a sharded model has another class, which cannot be copied
        shell.__dict__.update(self.model.__dict__)
        shell.config = copy.deepcopy(self.model.config)
        return shell

    def load(self, folder: Path, *, optimizer: bool = True, schedule: bool = True) -> None:
        """See interfaces.train_engine. Raises: ModelError when the folder holds another model than this one."""
        saved = self._saved_weights(folder)
        self._sharding.weights_changed(self.model)
        self._masters.load(saved, self._sharding)
        averages = saved_averages(folder) if optimizer else {}
        self._masters.load_averages(self._optimizer, averages, self._sharding, offload=self._offload_optimizer)
        counters = json.loads((folder / COUNTERS).read_text()) if schedule else None
        self._count.restore(counters)
        if self._loss_scale:
            self._loss_scale.restore(counters and counters.get("loss_scale"))
        self._passes = 0

    def _saved_weights(self, folder: Path) -> Mapping[str, Tensor]:
        """Return the trained weights in a folder written by ``save``, by name."""
        masters = {name: tuple(self._sharding.shape(weight)) for name, weight in self._masters.trained.items()}
        saved = saved_weights(
            folder,
            self.model,
            self._model_class,
            adapted=self._adapted,
            path_field=self.path_field,
            shape=self._sharding.shape,
        )
        shapes = shapes_of(saved)
        fits = all(shapes.get(name) == shape for name, shape in masters.items())
        if not fits or (self._adapted and len(saved) != len(masters)):
            raise of_another_model(folder, self.model, self.path_field)
        return saved

    def _head(self) -> str | None:
        """Name of the layer that is trained in full besides an adapter."""
        return None

    def _whole_state(self, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's state dict with the masters in place of the rounded weights (buffers and tied names kept); empty on
        processes that write nothing."""
        names, trained = self.model.state_dict().keys(), self._masters.trained
        others: dict[str, Tensor] = {name: held for name, held in self.model.named_parameters() if name not in trained}
        others |= {name: buffer for name, buffer in self.model.named_buffers() if name in names}
        state = dict(masters) | self._kept((name, self._sharding.whole(tensor)) for name, tensor in others.items())
        first_name: dict[int, str] = {}
        for name, weight in self.model.named_parameters(remove_duplicate=False):
            first = first_name.setdefault(id(weight), name)
            if name in names and first in state:
                state[name] = state[first]
        return {name: state[name] for name in names if name in state}
