"""A sharded model with an optimizer: micro-batches, updates, saving, loading.

The part of a megatron engine that is independent of the loss. A checkpoint holds whole weights and averages with Hugging
Face names, so that any engine, with any sizes, resumes from it.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.torch_training.master_weights import MasterWeights
from posttrain.backends.torch_training.memory import Cutter
from posttrain.backends.torch_training.optimized_model import Factor, How, MicroBatch
from posttrain.backends.torch_training.optimizers import averages_of, build_optimizer, move_state, set_rates
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
from posttrain.backends.train.megatron.expert_choice import ExpertChoice
from posttrain.backends.train.megatron.parts import ModelParts
from posttrain.backends.train.megatron.pipeline import Compare, Pipeline, Scores
from posttrain.backends.train.megatron.router_losses import RouterLosses
from posttrain.backends.train.megatron.sharding import MegatronSharding
from posttrain.backends.train.megatron.stretches import Stretches
from posttrain.backends.train.megatron.weights import Read
from posttrain.config.policy import OptimizerConfig
from posttrain.models import lora
from posttrain.models.chunks import Chunk, part_of, shapes_of, whole_chunk
from posttrain.models.saving import save_config, save_model
from posttrain.plan.experts import expert_layers
from posttrain.records.batches import LossCounts, SequenceBatch, TrainBatch
from posttrain.records.statistics import OptimizerStats


class MegatronLearner:
    """The optimizer half of an engine (see interfaces.train_engine). The Hugging Face model releases its weights and stays as a
    shell, with which checkpoints are written."""

    role: ClassVar[str] = "policy"  # section of the settings, for messages
    path_field: ClassVar[str] = "model.path"  # the setting that names the starting weights

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        optimizer: OptimizerConfig,
        learning_rate_factor: Factor,
        sequences_per_micro_batch: int | None,
        max_tokens_per_micro_batch: int | None,
        how: How,
        replays_experts: bool = False,  # or balances them by the loss
    ):
        sharding = how["sharding"]
        assert isinstance(sharding, MegatronSharding)
        self.tokenizer = tokenizer
        self._sharding = sharding
        self.padded = how.get("padded", False)
        self._share_prompts = how.get("share_prompts", True) and not self.padded
        self.cutter = Cutter(
            sequences_per_micro_batch, sharding.pooled(max_tokens_per_micro_batch), share_prompts=self._share_prompts
        )
        parts = ModelParts(model, sharding, recompute=how.get("gradient_checkpointing", False))
        self.parts = parts
        self._pipeline = Pipeline(parts, self.cutter, padded=self.padded)
        self._masters = MasterWeights(parts.gpt, how.get("master_dtype", torch.float32))
        if self._masters.shadow:  # the model is loaded in the masters' precision, and its layers compute in another
            self._masters.start_from(parts.by_parameter(parts.cut(dict(model.named_parameters()))))
        parts.release()
        self._about_experts = sharding.settings.experts
        experts = expert_layers(model.config.get_text_config().to_dict())
        wanted = replays_experts or self._about_experts.balance or self._about_experts.small_logits
        self._pipeline.choice = ExpertChoice(parts.gpt, experts) if wanted and experts else None
        self._adapted = lora.is_adapted(model)
        self._trained = parts.by_piece(self._masters.parameters)
        self._updated = dict(self._trained)  # the parameters that the optimizer changes
        if sharding.settings.experts.freeze_router:
            self._updated = {name: weight for name, weight in self._trained.items() if ".router." not in name}
        # The optimizer's parameters: all, or a slice of every weight where copies shard its averages.
        self._stretches = Stretches(self._updated, parts.copies_of) if sharding.settings.distributed_optimizer else None
        self._stepped = self._stretches.mine if self._stretches else self._updated
        self._settings = optimizer
        self._learning_rate_factor = learning_rate_factor
        self._weight_decay: Factor = how.get("weight_decay", lambda update: optimizer.weight_decay)
        self._optimizer = build_optimizer(self._stepped, optimizer)
        asked = {
            f"{self.role}.optimizer.offload": optimizer.offload,
            f"{self.role}.engine_options.optimizer_offload": sharding.settings.optimizer_offload,
        }
        offload = [name for name, on in asked.items() if on]
        self._offload_optimizer = bool(offload) and sharding.device.type != "cpu"
        notes = [lora.trained_share(model)] if self._adapted else []
        if offload and not self._offload_optimizer:
            notes.append(f"no effect of {', '.join(offload)}: everything is on the CPU already")
        self.note = "; ".join(notes) or None  # message for the user about unusual computation
        self._count = UpdateCount(how.get("updates_per_step"), how.get("rates"))

    @property
    def version(self) -> int:
        return self._count.made

    def accumulate(
        self,
        batch: TrainBatch,
        scores: Scores,
        learn: Callable[..., MicroBatch],
        counts: LossCounts,
        balance: float = 0.0,
        *,
        compare: Compare | None = None,
    ) -> tuple[float, dict[str, float], Tensor]:
        """Add the gradient of every micro-batch's loss to the accumulated gradients.

        Args: learn from a micro-batch and its scores, each [b, T]; balance, the weight of the loss that balances experts, mean
            over layers, beside that of the settings; compare it with its teachers, the last of the scores.
        Returns: the loss, sums by name, and the micro-batches' values as [B, T].
        """
        rows = self._pipeline.dealt(batch.sequences)
        micros = [batch.rows(part or list(range(self.cutter.rows_together))) for part in rows]
        micros = [
            micro if part else replace(micro, loss_mask=torch.zeros_like(micro.loss_mask))
            for micro, part in zip(micros, rows, strict=True)
        ]

        def finish(number: int, found: Any) -> tuple[Tensor, MicroBatch]:
            learned = learn(micros[number], *found)
            return learned.loss, replace(learned, loss=learned.loss.detach().clone())

        beside = None if compare is None else lambda number, *of_row: compare(micros[number].teachers, *of_row)
        passed = [micro.sequences for micro in micros]
        learned_rows = [micro.loss_mask.any(dim=1) for micro in micros]
        losses = self._router_losses(passed, learned_rows, balance)
        done = self._pipeline.through(
            passed,
            scores,
            finish,
            backward=True,
            learned=learned_rows if losses else None,
            beside=beside,
        )
        total, sums = 0.0, Counter[str]()
        values, order = [batch.advantages[:0]], []
        for part, learned in zip(rows, done, strict=False):  # done: on the last stage
            if part:
                total += learned.loss.item()
                sums.update(learned.sums)
                values.append(learned.values)
                order += part
        joined = self._sharding.joined(torch.cat(values), order, len(batch))
        everyone = self._sharding.total({**sums, "": total})
        total = everyone.pop("")
        if losses and self._pipeline.choice:
            self._pipeline.choice.losses = None
            of_routers = losses.total(self._sharding.added(losses.sums, of_routers=True))
            total += of_routers.weighted
            everyone |= {f"{self.role}/{name}": mean * counts.tokens for name, mean in of_routers.means.items()}
        return total, everyone, joined

    def _router_losses(
        self, micros: Sequence[SequenceBatch], learned: Sequence[Tensor], balance: float
    ) -> RouterLosses | None:
        """Begin the losses of routers; None without any. A pass without gradient counts the tokens of every expert first: their
        shares are factors of every micro-batch's loss."""
        about, choice = self._about_experts, self._pipeline.choice
        if choice is None or not (balance or about.balance or about.small_logits):
            return None

        def nothing(number: int, found: Any) -> tuple[Tensor, None]:
            return torch.zeros((), device=self._sharding.device), None

        with choice.counting(self._sharding.device) as mine:
            self._pipeline.through(micros, lambda hidden, row: (), nothing, learned=learned)
        choice.losses = RouterLosses(
            balance=about.balance + balance / choice.layers,
            small_logits=about.small_logits,
            counts=self._sharding.added(mine, of_routers=True).to(self._sharding.device),
            chosen=choice.chosen,
        )
        return choice.losses

    def begin_step(self) -> None:
        self._count.steps += 1

    def optimizer_step(self) -> OptimizerStats:
        learning_rate = self._settings.lr * self._learning_rate_factor(self._count.place)
        self._add_gradients()
        norm = self._gradient_norm()
        usable = bool(torch.isfinite(norm))
        if usable:
            if self._settings.max_grad_norm is not None:
                clip_grads_with_norm_(self._updated.values(), self._settings.max_grad_norm, norm)
            set_rates(self._optimizer, learning_rate=learning_rate, weight_decay=self._weight_decay(self._count.made))
            if self._offload_optimizer:
                move_state(self._optimizer, lambda parameter: parameter.device)
            if self._stretches:
                self._stretches.take_gradients()
            self._optimizer.step()
            if self._stretches:
                self._stretches.tell()
            if self._offload_optimizer:
                move_state(self._optimizer, lambda parameter: torch.device("cpu"))
            self._masters.publish()
            self._count.made += 1
        self.zero_grad()
        return OptimizerStats(grad_norm=float(norm), lr=learning_rate, skipped=not usable)

    def _add_gradients(self) -> None:
        """Reduce the ranks' gradients of the same weight. Losses divide by global counts, so gradients are summed."""
        sharding = self._sharding
        for weight in self._updated.values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        partial = [w for name, w in self._updated.items() if self.parts.added_over_tensor_ranks(name)]
        _add(partial, sharding.tensor_group)
        if self.parts.tied and sharding.pipeline > 1 and (sharding.first_stage or sharding.last_stage):
            ends = ("embedding.word_embeddings.weight", "output_layer.weight")
            _add([self._updated[name] for name in ends if name in self._updated], parallel_state.get_embedding_group())
        for of_experts, group in ((False, sharding.copies_group), (True, sharding.expert_copies_group)):
            _add([w for name, w in self._updated.items() if self.parts.of_experts(name) == of_experts], group)

    def _gradient_norm(self) -> Tensor:
        """Compute the norm of the whole model's gradient, every weight counted once; [] float32."""
        # Of experts, and of all other weights.
        squares = torch.zeros(2, device=self._sharding.device)
        for name, weight in self._updated.items():
            if self.parts.holds_alone(name):
                assert weight.grad is not None
                squares[0 if self.parts.of_experts(name) else 1] += weight.grad.float().square().sum()
        dist.all_reduce(squares[0], group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
        dist.all_reduce(squares[1], group=parallel_state.get_model_parallel_group())
        return squares.sum().sqrt()

    def zero_grad(self) -> None:
        self._masters.zero_grad()

    def saved_bytes(self) -> int:
        """Estimate: every trained weight and its two averages in float32."""
        return 3 * 4 * sum(weight.numel() for weight in self.parts.shell.parameters() if weight.requires_grad)

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        self.writer(optimizer=optimizer)(folder)
        self._sharding.wait()

    def writer(self, *, optimizer: bool = True, sharded: bool = False) -> Callable[[Path], None]:
        """Save a Hugging Face folder, or a peft folder with only the adapter, and the optimizer's averages; the first rank writes
        what all ranks gather before this method returns. Sharded: chunks of weights and averages, written by every rank."""
        if sharded and not self._adapted:
            return self._chunk_writer(optimizer=optimizer)
        masters = self._kept(self._trained)
        averages: dict[str, Tensor] = {}
        if optimizer:
            for key, parts in self._averages():
                averages |= {f"{key}:{name}": value for name, value in self._kept(parts).items()}
            averages |= {f"step:{name}": step.clone() for step in self._steps() for name in masters}
        state = {} if self._adapted else self._whole_state(masters)
        counters, shell = self._count.saved(), self._shell()

        def write(folder: Path) -> None:
            if self._sharding.rank != 0:
                return
            if self._adapted:
                lora.write_adapter(shell, masters, folder, head=self.parts.value_head)
            else:
                save_model(shell, folder, state)
                save_config(shell, folder)
            if optimizer:
                save_file(averages, folder / OPTIMIZER)
            self._write_beside(folder, counters)

        return write

    def _chunk_writer(self, *, optimizer: bool) -> Callable[[Path], None]:
        weights = self.parts.chunks(self._trained)
        averages: list[Chunk] = []
        if optimizer:
            for key, parts in self._averages():
                averages += self.parts.chunks(parts, prefix=f"{key}:")
            if self._sharding.rank == 0:
                names = self.parts.trained
                averages += [whole_chunk(f"step:{name}", step.clone()) for step in self._steps() for name in names]
        beside = partial(self._write_beside, counters=self._count.saved())
        return chunk_writer(self._sharding.rank, weights, averages, self._shell(), beside)

    def _averages(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield kinds, each with this rank's averages by piece: none before the first update. A collective call of all ranks."""
        states = {name: self._optimizer.state.get(weight) for name, weight in self._stepped.items()}
        if not all(states.values()):
            return
        for key in averages_of(self._settings):
            frozen = self._trained.keys() - states.keys()
            held = {name: torch.zeros_like(self._trained[name]) for name in frozen}
            mine = {name: state[key].to(self._sharding.device) for name, state in states.items() if state}
            yield key, held | (self._stretches.whole(mine) if self._stretches else mine)

    def _steps(self) -> list[Tensor]:
        """Return the optimizer's count of its updates, which is the same for every weight; none before the first."""
        return [state["step"].cpu() for state in list(self._optimizer.state.values())[:1] if "step" in state]

    def _shell(self) -> PreTrainedModel:
        shell = copy.copy(self.parts.shell)
        shell.config = copy.deepcopy(shell.config)  # transformers changes that of what it saves
        return shell

    def _write_beside(self, folder: Path, counters: Mapping[str, Any]) -> None:
        """Write the files besides weights and averages."""
        self.tokenizer.save_pretrained(folder)
        (folder / COUNTERS).write_text(json.dumps(counters))

    def _kept(self, parts: dict[str, Any]) -> dict[str, Tensor]:
        """Collect whole float32 tensors on the CPU of the first rank, which writes; the others keep nothing."""
        writes = self._sharding.rank == 0
        return {name: tensor.cpu().contiguous() for name, tensor in self.parts.whole(parts) if writes}

    def _whole_state(self, masters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the shell's state dict, tied names included; empty on ranks that write nothing."""
        first: dict[int, str] = {}
        state = {}
        for name, weight in self.parts.shell.named_parameters(remove_duplicate=False):
            owner = first.setdefault(id(weight), name)
            if owner in masters:
                state[name] = masters[owner]
        return state

    def load(self, folder: Path, *, optimizer: bool = True, schedule: bool = True) -> None:
        """See interfaces.train_engine. Raises: ModelError when the folder holds another model than this one."""
        saved = self._saved(folder)
        parts = self.parts.cut(saved, self._trained)
        self._masters.load(self.parts.by_parameter(parts), Sharding())
        self._optimizer.state.clear()
        found = saved_averages(folder) if optimizer else {}
        for key in averages_of(self._settings) if found else ():
            for name, weight in self._stepped.items():
                mine = self._saved_average(name, partial(_part_of_kind, found, key))
                self._optimizer.state[weight][key] = mine.to(weight.device, copy=True)
        step = next((found[name] for name in found if name.startswith("step:")), None)
        if step is not None:
            for weight in self._stepped.values():
                self._optimizer.state[weight]["step"] = step.to(weight.device).clone()
        if self._offload_optimizer:
            move_state(self._optimizer, lambda parameter: torch.device("cpu"))
        self._count.restore(json.loads((folder / COUNTERS).read_text()) if schedule else None)

    def _saved_average(self, name: str, read: Read) -> Tensor:
        """Read the average of this rank's part of a weight, or of its slice of that: then the entries in which it lies."""
        if not self._stretches:
            return self.parts.read(name, read).contiguous()
        mine, row = self._stretches.place(name), self._trained[name][0].numel()
        first = mine.start // row
        part = self.parts.read(name, read, slice(first, -(-mine.stop // row)))
        return part.reshape(-1)[mine.start - first * row : mine.stop - first * row]

    def _saved(self, folder: Path) -> Mapping[str, Tensor]:
        """Return the whole trained weights in a folder written by an engine, by name."""
        shell = self.parts.shell
        saved = saved_weights(folder, shell, type(shell), adapted=self._adapted, path_field=self.path_field)
        shapes = shapes_of(saved)
        trained = {name: self.parts.whole_shapes[name] for name in self.parts.trained}
        if {name: shapes.get(name) for name in trained} != trained or (self._adapted and len(saved) != len(trained)):
            raise of_another_model(folder, shell, self.path_field)
        return saved


def _part_of_kind(
    saved: Mapping[str, Tensor], kind: str, name: str, offsets: Sequence[int], size: Sequence[int]
) -> Tensor:
    """Read a part of one kind of averages: 0 for a weight without any gradient so far, for which another engine saves none."""
    stored = f"{kind}:{name}"
    return part_of(saved, stored, offsets, size) if stored in saved else torch.zeros(tuple(size))


def _add(weights: list[Any], group: dist.ProcessGroup) -> None:
    """Sum the gradients of these weights over a group, in place."""
    if group.size() > 1:
        waiting = [dist.all_reduce(weight.grad, group=group, async_op=True) for weight in weights]
        for each in waiting:
            each.wait()
