"""A model in parts with an optimizer: micro-batches, updates, saving, loading.

The half of a megatron engine that does not care what the loss is. A checkpoint holds whole weights and averages under Hugging
Face names, so any engine and any sizes go on from it.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.torch_training.master_weights import MasterWeights
from posttrain.backends.torch_training.memory import Cutter
from posttrain.backends.torch_training.optimized_model import (
    COUNTERS,
    OPTIMIZER,
    Factor,
    How,
    MicroBatch,
    check_kind,
)
from posttrain.backends.torch_training.optimizers import build_optimizer, move_state, set_rates
from posttrain.backends.torch_training.sharding import Sharding
from posttrain.backends.train.megatron.parts import ModelParts
from posttrain.backends.train.megatron.pipeline import Pipeline, Scores
from posttrain.backends.train.megatron.sharding import MegatronSharding
from posttrain.backends.train.megatron.stretches import Stretches
from posttrain.config.policy import OptimizerConfig
from posttrain.errors import ModelError, Problem
from posttrain.models import lora
from posttrain.models.saving import save_model
from posttrain.records.batches import TrainBatch
from posttrain.records.statistics import OptimizerStats

AVERAGES = ("exp_avg", "exp_avg_sq")


class MegatronLearner:
    """The optimizer half of an engine (see interfaces.train_engine). The Hugging Face model gives its weights away and stays as
    a shell, by which checkpoints are written."""

    role: ClassVar[str] = "policy"  # whose settings these are, for messages
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
        if self._masters.shadow:  # the model comes in the masters' precision, and its layers compute in another
            self._masters.start_from(parts.by_parameter(parts.cut(dict(model.named_parameters()))))
        parts.release()
        self._adapted = lora.is_adapted(model)
        self._trained = parts.by_piece(self._masters.parameters)
        self._updated = dict(self._trained)  # what the optimizer changes of it
        if sharding.settings.experts.freeze_router:
            self._updated = {name: weight for name, weight in self._trained.items() if ".router." not in name}
        # What the optimizer sees of it: all, or a stretch of every weight where copies share out its averages.
        self._stretches = Stretches(self._updated, self._copies_of) if sharding.settings.distributed_optimizer else None
        self._stepped = self._stretches.mine if self._stretches else self._updated
        self._settings = optimizer
        self._learning_rate_factor = learning_rate_factor
        self._weight_decay: Factor = how.get("weight_decay", lambda update: optimizer.weight_decay)
        self._optimizer = build_optimizer(self._stepped.values(), optimizer)
        asked = {
            f"{self.role}.optimizer.offload": optimizer.offload,
            f"{self.role}.engine_options.optimizer_offload": sharding.settings.optimizer_offload,
        }
        offload = [name for name, on in asked.items() if on]
        self._offload_optimizer = bool(offload) and sharding.device.type != "cpu"
        notes = [lora.trained_share(model)] if self._adapted else []
        if offload and not self._offload_optimizer:
            notes.append(f"no effect of {', '.join(offload)}: everything is on the CPU already")
        self.note = "; ".join(notes) or None  # what people should know about how this model is computed
        self._updates = 0

    @property
    def version(self) -> int:
        return self._updates

    def accumulate(
        self, batch: TrainBatch, scores: Scores, learn: Callable[..., MicroBatch]
    ) -> tuple[float, dict[str, float], Tensor]:
        """Add the gradient of every micro-batch's loss to the gradients held.

        Args: learn from a micro-batch and its scores, each [b, T].
        Returns: the loss, sums by name, and the micro-batches' values as [B, T].
        """
        rows = self._pipeline.dealt(batch.sequences)
        micros = [batch.rows(part or [0]) for part in rows]
        micros = [
            micro if part else replace(micro, loss_mask=torch.zeros_like(micro.loss_mask))
            for micro, part in zip(micros, rows, strict=True)
        ]

        def finish(number: int, found: Any) -> tuple[Tensor, MicroBatch]:
            learned = learn(micros[number], *found)
            return learned.loss, replace(learned, loss=learned.loss.detach().clone())

        done = self._pipeline.through([micro.sequences for micro in micros], scores, finish, backward=True)
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
        return everyone.pop(""), everyone, joined

    def optimizer_step(self) -> OptimizerStats:
        learning_rate = self._settings.lr * self._learning_rate_factor(self._updates)
        self._add_gradients()
        norm = self._gradient_norm()
        usable = bool(torch.isfinite(norm))
        if usable:
            if self._settings.max_grad_norm is not None:
                clip_grads_with_norm_(self._updated.values(), self._settings.max_grad_norm, norm)
            set_rates(self._optimizer, learning_rate=learning_rate, weight_decay=self._weight_decay(self._updates))
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
            self._updates += 1
        self.zero_grad()
        return OptimizerStats(grad_norm=float(norm), lr=learning_rate, skipped=not usable)

    def _add_gradients(self) -> None:
        """What ranks have computed of the gradient of the same weight. Losses divide by counts of the whole mini-batch, so
        gradients add up."""
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

    def _copies_of(self, name: str) -> dist.ProcessGroup:
        """The ranks that hold the same part of the same weight."""
        of_experts = self.parts.of_experts(name)
        return self._sharding.expert_copies_group if of_experts else self._sharding.copies_group

    def _gradient_norm(self) -> Tensor:
        """Of the whole model's gradient, every weight counted once; [] float32."""
        squares = torch.zeros(2, device=self._sharding.device)  # of experts, and of the rest
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
        """Every trained weight and its two averages in float32."""
        return 3 * 4 * sum(weight.numel() for weight in self.parts.shell.parameters() if weight.requires_grad)

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        self.writer(optimizer=optimizer)(folder)
        self._sharding.wait()

    def writer(self, *, optimizer: bool = True) -> Callable[[Path], None]:
        """As every engine's: a Hugging Face folder, or peft's with the adapter alone, and the optimizer's averages, by the first
        rank, from what all gather here."""
        masters = self._kept(self._trained)
        averages: dict[str, Tensor] = {}
        states = {name: self._optimizer.state.get(weight) for name, weight in self._stepped.items()}
        if optimizer and all(states.values()):
            for key in AVERAGES:
                frozen = self._trained.keys() - states.keys()
                held = {name: torch.zeros_like(self._trained[name]) for name in frozen}
                mine = {name: state[key].to(self._sharding.device) for name, state in states.items() if state}
                held |= self._stretches.whole(mine) if self._stretches else mine
                averages |= {f"{key}:{name}": value for name, value in self._kept(held).items()}
            step = next(state["step"] for state in states.values() if state).cpu()
            averages |= {f"step:{name}": step.clone() for name in masters}
        state = {} if self._adapted else self._whole_state(masters)
        counters = json.dumps({"updates": self._updates})
        shell = copy.copy(self.parts.shell)
        shell.config = copy.deepcopy(shell.config)  # transformers changes that of what it saves

        def write(folder: Path) -> None:
            if self._sharding.rank != 0:
                return
            if self._adapted:
                lora.write_adapter(shell, masters, folder, head=self.parts.value_head)
            else:
                save_model(shell, folder, state)
                shell.config.dtype = torch.float32  # it wrote the dtype to compute in, and loading would round to it
                shell.config.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            if optimizer:
                save_file(averages, folder / OPTIMIZER)
            (folder / COUNTERS).write_text(counters)

        return write

    def _kept(self, parts: dict[str, Any]) -> dict[str, Tensor]:
        """Whole float32 tensors on the CPU of the first rank, which writes; the others gather with it and keep nothing."""
        writes = self._sharding.rank == 0
        return {name: tensor.cpu().contiguous() for name, tensor in self.parts.whole(parts) if writes}

    def _whole_state(self, masters: dict[str, Tensor]) -> dict[str, Tensor]:
        """The shell's state dict, tied names included; empty where nothing is written."""
        first: dict[int, str] = {}
        state = {}
        for name, weight in self.parts.shell.named_parameters(remove_duplicate=False):
            owner = first.setdefault(id(weight), name)
            if owner in masters:
                state[name] = masters[owner]
        return state

    def load(self, folder: Path, *, optimizer: bool = True, schedule: bool = True) -> None:
        """See interfaces.train_engine. Raises: ModelError when the folder holds another model than this one."""
        saved = self.parts.cut(self._saved(folder), self._trained)
        self._masters.load(self.parts.by_parameter(saved), Sharding())
        self._optimizer.state.clear()
        found = load_file(folder / OPTIMIZER) if optimizer else {}
        for key in AVERAGES if found else ():
            of_key = {  # another engine saves none for a weight that never had a gradient
                name: found.get(f"{key}:{name}", torch.zeros(shape)) for name, shape in self.parts.whole_shapes.items()
            }
            parts = self.parts.cut(of_key, self._trained)
            for name, weight in self._stepped.items():
                part = parts[name].contiguous()
                mine = self._stretches.cut(name, part).clone() if self._stretches else part
                self._optimizer.state[weight][key] = mine.to(weight.device)
        if found:
            step = next(value for name, value in found.items() if name.startswith("step:"))
            for weight in self._stepped.values():
                self._optimizer.state[weight]["step"] = step.to(weight.device).clone()
        if self._offload_optimizer:
            move_state(self._optimizer, lambda parameter: torch.device("cpu"))
        self._updates = json.loads((folder / COUNTERS).read_text())["updates"] if schedule else 0

    def _saved(self, folder: Path) -> dict[str, Tensor]:
        """The whole trained weights in a folder that an engine wrote, by name."""
        shell = self.parts.shell
        check_kind(folder, adapted=self._adapted, path_field=self.path_field)
        damaged = False
        if self._adapted:
            saved = lora.adapter_tensors(folder, field=self.path_field)
        else:
            loaded: Any = type(shell).from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
            )
            model, report = loaded
            saved = dict(model.named_parameters())
            damaged = any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        shapes = {name: tuple(weight.shape) for name, weight in saved.items()}
        if damaged or shapes != {name: self.parts.whole_shapes[name] for name in self.parts.trained}:
            what = f"the checkpoint {folder} is of another model than {shell.name_or_path}"
            fix = f"set {self.path_field} back, or name another run.folder"
            raise ModelError(Problem(what, fix=fix, field=self.path_field))
        return saved


def _add(weights: list[Any], group: dist.ProcessGroup) -> None:
    """Sum up the gradients of these weights over a group, in place."""
    if group.size() > 1:
        waiting = [dist.all_reduce(weight.grad, group=group, async_op=True) for weight in weights]
        for each in waiting:
            each.wait()
