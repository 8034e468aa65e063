"""A Hugging Face model with AdamW over float32 master weights: updates, gradient checkpointing, saving, loading.

The half of a local engine that does not care what the loss is; the policy's engine and the critic's are built on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.train.local.master_weights import MasterWeights
from posttrain.config.policy import OptimizerConfig
from posttrain.errors import ModelError, Problem
from posttrain.records.statistics import OptimizerStats

OPTIMIZER = "optimizer.safetensors"
COUNTERS = "engine.json"


class OptimizedModel:
    """The optimizer half of an engine (see interfaces.train_engine)."""

    path_field: ClassVar[str] = "model.path"  # the setting that names the starting weights, for messages

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        optimizer: OptimizerConfig,
        learning_rate_factor: Callable[[int], float],  # update number -> factor of the peak
        gradient_checkpointing: bool = False,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self._masters = MasterWeights(model)
        self._settings = optimizer
        self._learning_rate_factor = learning_rate_factor
        self._updates = 0
        self._optimizer = torch.optim.AdamW(
            self._masters.parameters.values(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        if gradient_checkpointing:
            # transformers 5.23 renamed it; the old name goes when 5.23 is the oldest version supported.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        self._checkpointed = [layer for layer in model.modules() if getattr(layer, "gradient_checkpointing", False)]

    @property
    def version(self) -> int:
        return self._updates

    def recompute_activations(self, on: bool) -> None:
        """Gradient checkpointing, where asked for. transformers does it in layers that are in training mode; what is
        inside them stays in eval mode, so that no dropout acts."""
        for layer in self._checkpointed:
            layer.training = on

    def optimizer_step(self) -> OptimizerStats:
        learning_rate = self._settings.lr * self._learning_rate_factor(self._updates)
        parameters = self._masters.parameters.values()
        limit = self._settings.max_grad_norm
        norm = float(clip_grad_norm_(parameters, limit if limit is not None else float("inf")))
        usable = norm == norm and norm != float("inf")
        if usable:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self._masters.publish()
            self._updates += 1
        self.zero_grad()
        return OptimizerStats(grad_norm=norm, lr=learning_rate, skipped=not usable)

    def zero_grad(self) -> None:
        self._masters.zero_grad()

    def saved_bytes(self) -> int:
        """Every trained weight and its two averages in float32; frozen weights and buffers as they are."""
        trained = sum(weight.numel() for weight in self._masters.parameters.values())
        others = [tensor for tensor in self.model.parameters() if not tensor.requires_grad]
        return 3 * 4 * trained + sum(tensor.numel() * tensor.element_size() for tensor in others)

    def save(self, folder: Path) -> None:
        """A Hugging Face folder (float32 weights, tokenizer) plus the optimizer's averages, all without pickle."""
        masters = {name: weight.detach().cpu().contiguous() for name, weight in self._masters.parameters.items()}
        self.model.save_pretrained(folder, state_dict=self._whole_state(masters))
        # save_pretrained wrote the compute dtype into config.json, and loading would round to it.
        self.model.config.dtype = torch.float32
        self.model.config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        averages = {}
        for name, weight in self._masters.parameters.items():
            for key, value in self._optimizer.state.get(weight, {}).items():
                averages[f"{key}:{name}"] = value.detach().cpu().contiguous()
        save_file(averages, folder / OPTIMIZER)
        (folder / COUNTERS).write_text(json.dumps({"updates": self._updates}))

    def load(self, folder: Path) -> None:
        """See interfaces.train_engine. Raises: ModelError when the folder holds another model than this one."""
        # By transformers, not by name: what it writes for a mixture of experts is laid out differently in memory.
        loaded: Any = type(self.model).from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
        model, report = loaded
        saved = dict(model.named_parameters())
        masters = self._masters.parameters
        fits = all(name in saved and saved[name].shape == master.shape for name, master in masters.items())
        if not fits or any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            raise ModelError(
                Problem(
                    f"the checkpoint {folder} is of another model than {self.model.name_or_path}",
                    fix=f"set {self.path_field} back, or name another run.folder",
                    field=self.path_field,
                )
            )
        self._masters.load(saved)
        self._optimizer.state.clear()
        for key_and_name, value in load_file(folder / OPTIMIZER).items():
            key, name = key_and_name.split(":", 1)  # a weight that never had a gradient has no averages
            weight = self._masters.parameters[name]
            self._optimizer.state[weight][key] = value.to(weight.device)
        self._updates = json.loads((folder / COUNTERS).read_text())["updates"]

    def _whole_state(self, masters: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model's state dict with the masters in place of the rounded weights (buffers and tied names kept)."""
        by_storage = {weight.data_ptr(): name for name, weight in self.model.named_parameters()}
        return {
            name: masters.get(by_storage.get(tensor.data_ptr(), name), tensor)
            for name, tensor in self.model.state_dict().items()
        }
