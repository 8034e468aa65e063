"""Training of one client's adapter: gradients by Tinker's losses, steps of AdamW, saving and loading."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from posttrain.backends.tinker.adapters import AdaptedModel, Adapter
from posttrain.backends.tinker.losses import LOSSES, settings_of
from posttrain.backends.tinker.requests import Datum, LossRequest, LossResult, number
from posttrain.backends.torch_training.master_weights import MasterWeights
from posttrain.backends.torch_training.memory import is_out_of_memory
from posttrain.backends.torch_training.optimizers import set_rates
from posttrain.backends.torch_training.saved import OPTIMIZER
from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.backends.torch_training.sharding import Sharding
from posttrain.config.policy import OptimizerConfig
from posttrain.data.chat_api import Refused
from posttrain.data.packing import PackedSequences
from posttrain.models.lora import adapter_tensors, write_adapter

STEPS = "steps.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """Settings of one step of AdamW, as clients send them with it."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0 does not clip


class Scorers:
    """Scorers of the model: one for the plain output layer, one for an output layer with an adapter."""

    def __init__(self, model: AdaptedModel, *, max_tokens: int, gradient_checkpointing: bool = False):
        self.model = model
        self.max_tokens = max_tokens  # of a micro-batch; a longer sequence is one of its own
        self._by_output: dict[bool, LogprobScorer] = {}
        if gradient_checkpointing:
            model.model.gradient_checkpointing_enable({"use_reentrant": False})
        layers = model.model.modules()
        self._checkpointed = [layer for layer in layers if getattr(layer, "gradient_checkpointing", False)]

    def of(self, adapter: Adapter | None) -> LogprobScorer:
        """Put an adapter into the model. Returns: the scorer of the model with it."""
        self.model.use(adapter)
        adapted = self.model.output_adapted(adapter)
        if adapted not in self._by_output:
            self._by_output[adapted] = LogprobScorer(self.model.model, None, max_tokens_per_micro_batch=self.max_tokens)
        return self._by_output[adapted]

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Enable gradient checkpointing inside the ``with`` block, where it is on: transformers recomputes in training mode."""
        for layer in self._checkpointed:
            layer.training = True
        try:
            yield
        finally:
            for layer in self._checkpointed:
                layer.training = False


class ClientTraining:
    """The adapter of one client, its gradient and its optimizer. For the thread that uses the model."""

    def __init__(self, scorers: Scorers, adapter: Adapter, tokenizer: PreTrainedTokenizerBase):
        self.adapter = adapter
        self.steps = 0
        self._scorers = scorers
        self._tokenizer = tokenizer
        scorers.model.use(adapter)
        self._masters = MasterWeights(scorers.model.model)
        self._optimizer = self._masters.optimizer(OptimizerConfig(max_grad_norm=None))
        self.lost = ""  # why a gradient of this step is missing

    def forward(self, request: LossRequest) -> LossResult:
        """Compute a loss and the log-probs of the targets. With forward_only no gradient is added.

        A request that fails adds nothing: the gradient of those before it stays as it was.
        """
        scorer = self._scorers.of(self.adapter)
        if request.forward_only:
            with torch.no_grad():
                return self._over(request, scorer, backward=False)
        before = {name: weight.grad for name, weight in self.adapter.weights.items()}
        self._masters.zero_grad()
        try:
            with self._scorers.learning():
                result = self._over(request, scorer, backward=True)
            for name, weight in self.adapter.weights.items():
                weight.grad = _sum(before[name], weight.grad)
            return result
        except BaseException:
            for name, weight in self.adapter.weights.items():
                weight.grad = before[name]
            raise

    def _over(self, request: LossRequest, scorer: LogprobScorer, *, backward: bool) -> LossResult:
        """Compute micro-batch by micro-batch; one that exceeds the memory halves their size for all later ones."""
        while True:
            try:
                return self._pass(request, scorer, backward=backward)
            except RuntimeError as error:
                if not is_out_of_memory(error) or self._scorers.max_tokens <= 1:
                    raise
            longest = max(len(datum.token_ids) for datum in request.data)
            if self._scorers.max_tokens <= longest:
                raise Refused(f"out of memory with a sequence of {longest} tokens")
            self._scorers.max_tokens = max(longest, self._scorers.max_tokens // 2)
            if backward:  # else the gradient is that of earlier requests
                self._masters.zero_grad()

    def _pass(self, request: LossRequest, scorer: LogprobScorer, *, backward: bool) -> LossResult:
        loss, settings = LOSSES[request.loss_fn], settings_of(request)
        found: list[np.ndarray] = []
        total = 0.0
        for data in micro_batches(request.data, self._scorers.max_tokens):
            scored = scorer.score(pack_data(data, scorer.model.device), 1.0).logprobs.float().cpu()
            parts = scored.split([datum.inputs["target_tokens"].size for datum in data])
            losses = []
            for datum, flat in zip(data, parts, strict=True):
                logprobs = flat.view(datum.inputs["target_tokens"].shape)
                inputs = {name: torch.tensor(datum.inputs[name], dtype=torch.float32) for name in loss.inputs}
                losses.append(loss.formula(logprobs, inputs, settings).sum())
                found.append(logprobs.detach().numpy())
            part = torch.stack(losses).sum()
            if not math.isfinite(part.item()):
                raise Refused(f"the loss of {request.loss_fn} is not finite, so its gradient is not added")
            if backward:
                self._masters.backward(part)
            total += part.item()
        return LossResult(logprobs=tuple(found), metrics={"loss:sum": total})

    def step(self, params: AdamParams) -> dict[str, float]:
        """Make a step with the gradient that was added since the last one, which is dropped in any case.

        Raises: Refused without a gradient, with one that is not finite, and where a request since the last step failed.
        """
        self._scorers.model.use(self.adapter)
        try:
            if self.lost:
                raise Refused(f"no step was made, and the gradient was dropped: {self.lost}")
            if not self._masters.hold_gradients:
                raise Refused("there is no gradient for optim_step: call forward_backward first")
            set_rates(self._optimizer, learning_rate=params.learning_rate, weight_decay=params.weight_decay)
            for group in self._optimizer.param_groups:
                group["betas"], group["eps"] = (params.beta1, params.beta2), params.eps
            norm = self._masters.step(self._optimizer, params.grad_clip_norm or None, Sharding())
            if not math.isfinite(norm):
                raise Refused("the gradient is not finite: no step was made, and the gradient was dropped")
        finally:
            self.lost = ""
            self._masters.zero_grad()
        self.steps += 1
        return {"grad_norm": norm, "learning_rate": params.learning_rate}

    def save(self, folder: Path, *, optimizer: bool) -> None:
        """Write the adapter as a folder of peft's, with the tokenizer, and the optimizer's averages on request."""
        self._scorers.model.use(self.adapter)
        whole = dict(self._masters.whole(Sharding()))
        write_adapter(self._scorers.model.model, whole, folder, head=None)
        self._tokenizer.save_pretrained(folder)
        if optimizer:
            save_file(dict(self._masters.averages(self._optimizer, Sharding())), folder / OPTIMIZER)
            (folder / STEPS).write_text(json.dumps({"steps": self.steps}), encoding="utf-8")

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read what ``save`` wrote, into this adapter; without the optimizer its averages begin at zero. Raises: Refused."""
        saved = adapter_tensors(folder, field="path")
        shapes = {name: tuple(weight.shape) for name, weight in self._masters.parameters.items()}
        if {name: tuple(tensor.shape) for name, tensor in saved.items()} != shapes:
            raise Refused(
                f"the adapter there has other layers or another rank than this client's of rank {self.adapter.shape.rank}"
            )
        if optimizer and not (folder / OPTIMIZER).exists():
            raise Refused("there is no state of an optimizer: it was saved for sampling")
        self._masters.load(saved, Sharding())
        averages = load_file(folder / OPTIMIZER) if optimizer else {}
        self._masters.load_averages(self._optimizer, averages, Sharding())
        self.steps = json.loads((folder / STEPS).read_text(encoding="utf-8"))["steps"] if optimizer else 0
        self._masters.zero_grad()
        self.lost = ""


def micro_batches(data: Sequence[Datum], max_tokens: int) -> Iterator[list[Datum]]:
    """Cut data, in order, into runs of at most ``max_tokens``, of one datum at least."""
    run: list[Datum] = []
    size = 0
    for datum in data:
        if run and size + len(datum.token_ids) > max_tokens:
            yield run
            run, size = [], 0
        run.append(datum)
        size += len(datum.token_ids)
    if run:
        yield run


def pack_data(data: Sequence[Datum], device: torch.device) -> PackedSequences:
    """Pack data side by side; every target of every position is scored, [M] in order."""
    sizes = [len(datum.token_ids) for datum in data]
    starts = np.cumsum([0, *sizes[:-1]])
    predicting = []
    for start, datum in zip(starts, data, strict=True):
        targets = datum.inputs["target_tokens"]
        each = targets.shape[1] if targets.ndim == 2 else 1
        predicting.append(np.repeat(np.arange(start, start + len(targets)), each))
    scored = sum(map(len, predicting))
    return PackedSequences(
        token_ids=torch.tensor([token for datum in data for token in datum.token_ids], device=device),
        position_ids=torch.cat([torch.arange(size) for size in sizes]).to(device),
        groups=tuple((size, ()) for size in sizes),
        predicting=torch.tensor(np.concatenate(predicting), device=device),
        targets=torch.tensor(np.concatenate([d.inputs["target_tokens"].ravel() for d in data]), device=device),
        response_mask=torch.ones(1, scored, dtype=torch.bool, device=device),
        rows=torch.full((sum(sizes),), -1, device=device),
    )


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def check_optimizer(given: Any) -> None:
    """Raises: Refused for another optimizer than AdamW."""
    if isinstance(given, Mapping) and given.get("type", "adamw") != "adamw":
        raise Refused(f"this server has no optimizer called {given.get('type')}; it has adamw")


def read_adam(body: Mapping[str, Any]) -> AdamParams:
    """Read the settings of an optimizer step. Raises: Refused."""
    given = next((body[name] for name in ("adam_params", "optim_params") if name in body), None)
    if not isinstance(given, Mapping) or given.get("type", "adamw") != "adamw":
        raise Refused("optim_step takes adam_params: this server has no other optimizer than adamw")
    known = {field.name: field.default for field in fields(AdamParams)}
    if unknown := sorted(given.keys() - known.keys() - {"type"}):
        raise Refused(f"adam_params has no {unknown[0]}; it has {', '.join(known)}")
    found = {name: number(given, name, default, kind=float) for name, default in known.items()}
    if found["beta1"] >= 1 or found["beta2"] >= 1:
        raise Refused("beta1 and beta2 are below 1")
    return AdamParams(**found)
