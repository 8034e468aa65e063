"""Low-rank adapters (LoRA, arXiv:2106.09685) on a Hugging Face model, by peft: added, read, saved, merged.

The model object stays; its chosen linear layers are replaced in place, so code for models also works with an adapter. A
saved adapter is a peft folder: adapter_model.safetensors and adapter_config.json, which names its base.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.config.lora import LoraConfig
from posttrain.errors import MissingDependency, ModelError, Problem
from posttrain.models.loading import expanded, first_line
from posttrain.models.quantized import FILE as BASE_QUANTIZATION
from posttrain.models.quantized import (
    plain_state,
    plain_weight,
    quantize_base,
    settings_of,
    weight_count,
    without_kernel_notice,
)
from posttrain.models.vision import vision_parts
from posttrain.registry import missing_library

ADAPTER = "default"  # the name that peft gives the only adapter
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Settings of peft with which an adapter is more than scale x B A on linear layers.
NOT_PLAIN = (
    "use_dora",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "velora_config",
    "monteclora_config",
    "arrow_config",
    "kasa_config",
    "alora_invocation_tokens",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
)
# init_lora_weights that keep the base weights.
PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
_PREFIX = "base_model.model."  # before every name in the file: peft's wrappers around the model


def add_adapter(
    model: PreTrainedModel,
    config: LoraConfig,
    *,
    seed: int = 0,
    head: str | None = None,
    field: str = "policy.lora",
    merged: bool = True,
) -> None:
    """Add a new adapter to ``model``, or load that of ``config.adapter_path``, and freeze all other weights. In a
    vision-language model only the language model gets one.

    A starts random from ``seed``, B at 0, so the model's output is unchanged. The adapter's weights have the dtype of their
    layers.

    Args: head names a last layer that is trained in full besides the adapter (a critic's); field is the section of the
        configuration, for messages; merged, the adapter may be merged later, which an output layer tied to the embedding forbids.
    Raises: MissingDependency without peft; ModelError when no layer fits, or the saved adapter belongs to another model.
    """
    peft = peft_library(field)
    if config.adapter_path:
        wanted = read_config(peft, config.adapter_path, f"{field}.adapter_path")
    else:
        wanted = peft.LoraConfig(
            r=config.rank,
            lora_alpha=int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
            lora_dropout=config.dropout,
            target_modules=config.target_modules,
            exclude_modules=_excluding(config.exclude_modules, head, vision_parts(model)),
            use_rslora=config.use_rslora,
            bias="none",
        )
    wanted.modules_to_save = None  # the head is trained in place, without a wrapper
    dtype = model.dtype
    if config.quantize is not None:
        quantize_base(model, config, head=head, field=field)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(wanted, model, adapter_name=ADAPTER)
    except ValueError as error:
        linear = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        what = f"no adapter can be put on {model.name_or_path}: {first_line(error)}"
        fix = f"its linear layers are called {', '.join(linear)}"
        raise ModelError(Problem(what, fix=fix, field=f"{field}.target_modules")) from error
    if merged:
        _refuse_tied_output(model, field)
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_" in name or (head is not None and name.startswith(f"{head}.")))
        if "lora_" in name and config.quantize is not None:
            weight.data = weight.data.to(dtype)  # peft leaves it in float32 beside 4-bit weights
    if config.adapter_path:
        read_adapter(model, Path(expanded(config.adapter_path)), field=f"{field}.adapter_path")
    model.eval()


def is_adapted(model: nn.Module) -> bool:
    """Return True when a model has an adapter."""
    return any(hasattr(module, "base_layer") for module in model.modules())


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and module of every layer with an adapter."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "base_layer"))


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapter inside the ``with`` block, which gives a policy's reference without a second model.

    Not for code that computes gradients.
    """
    layers = [layer for _, layer in adapter_layers(model)]
    for layer in layers:
        # peft's own switch, enable_adapters, also toggles requires_grad, which would trigger the optimizer's hooks.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def drop_inputs(model: nn.Module, on: bool) -> None:
    """Enable or disable the adapters' dropout; the rest of the model stays in eval mode."""
    for _, layer in adapter_layers(model):
        layer.lora_dropout.train(on)


@torch.no_grad()
def effective_weight(module: nn.Module) -> Tensor:
    """Return the weight that a linear layer multiplies by: its own, or with an adapter base + scale x B A, in the base's dtype.

    The sum is computed in float32 and rounded once. Without an active adapter this is the module's own tensor, not a copy. Needs
    no peft.
    """
    base = getattr(module, "base_layer", None)
    if base is None:
        return plain_weight(module)
    if module._disable_adapters:
        return plain_weight(base)
    layer: Any = module
    if ADAPTER not in layer.lora_A:  # an embedding
        a, b = layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER]
    else:
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    return _merged(layer, plain_weight(base), a, b)


@torch.no_grad()
def merged_weights(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the state dict of the model with its adapter merged: plain names, effective weights.

    Args: state is the model's own state dict with whole tensors, for a sharded model.
    """
    adapted = dict(adapter_layers(model))
    state = plain_state(model, model.state_dict() if state is None else state)
    merged = {}
    for name, tensor in state.items():
        if "lora_" in name:
            continue
        layer = name.partition(".base_layer.")[0]
        if layer in adapted and name.endswith(".base_layer.weight"):
            pairs = [(f"lora_{side}.{ADAPTER}.weight", f"lora_embedding_{side}.{ADAPTER}") for side in "AB"]
            a, b = (state.get(f"{layer}.{linear}", state.get(f"{layer}.{embedding}")) for linear, embedding in pairs)
            assert a is not None and b is not None
            tensor = _merged(adapted[layer], tensor, a, b)
        merged[name.replace(".base_layer.", ".")] = tensor
    return merged


def write_adapter(model: PreTrainedModel, tensors: Mapping[str, Tensor], folder: Path, *, head: str | None) -> None:
    """Write the trained tensors, by parameter name, as a folder for ``peft.PeftModel.from_pretrained``."""
    save_file({file_name(name): tensor for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    _write_settings(model, folder, head)


def adapter_settings(model: PreTrainedModel) -> str:
    """Return the text of adapter_config.json, as ``write_adapter`` writes it."""
    with tempfile.TemporaryDirectory(prefix="posttrain-adapter-") as folder:
        _write_settings(model, Path(folder), head=None)
        return (Path(folder) / CONFIG).read_text(encoding="utf-8")


def _write_settings(model: PreTrainedModel, folder: Path, head: str | None) -> None:
    peft = peft_library("policy.lora")
    config: Any = cast(Any, model.peft_config)[ADAPTER]
    path = str(model.name_or_path)
    base = Path(expanded(path))
    saved = type(config)(**{**config.to_dict(), "inference_mode": True})
    saved.base_model_name_or_path = str(base.resolve()) if base.exists() else path
    of_sequences = type(model).__name__.endswith("ForSequenceClassification")
    headed = peft.TaskType.SEQ_CLS if of_sequences else peft.TaskType.TOKEN_CLS
    saved.task_type = headed if head else peft.TaskType.CAUSAL_LM
    saved.modules_to_save = [head] if head else None
    if isinstance(saved.target_modules, set):
        saved.target_modules = sorted(saved.target_modules)  # the order of a set differs between processes
    saved.save_pretrained(folder)
    if (rounded := settings_of(model)) is not None:
        (folder / BASE_QUANTIZATION).write_text(rounded + "\n", encoding="utf-8")


def write_own_adapter(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """Write the adapter of ``model`` as ``write_adapter`` does. Returns: its tensors by their names in the file."""
    tensors = {name: weight.detach() for name, weight in model.named_parameters() if "lora_" in name}
    write_adapter(model, tensors, folder, head=None)
    return {file_name(name): tensor for name, tensor in tensors.items()}


def adapter_rank(config: LoraConfig, *, field: str = "policy.lora") -> int:
    """Return the largest rank of an adapter with this configuration. Raises: ModelError as ``add_adapter``."""
    if not config.adapter_path:
        return config.rank
    saved = read_config(peft_library(field), config.adapter_path, f"{field}.adapter_path")
    return max([saved.r, *saved.rank_pattern.values()])


def adapter_tensors(folder: Path, *, field: str) -> dict[str, Tensor]:
    """Read the tensors written by ``write_adapter``, by parameter name.

    Raises: ModelError when the file is missing or damaged.
    """
    try:
        return {_parameter_name(name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    except (OSError, SafetensorError) as error:
        what = f"no adapter could be read from {folder}: {first_line(error)}"
        fix = f"name a folder with {WEIGHTS} and {CONFIG}"
        raise ModelError(Problem(what, fix=fix, field=field)) from error


@torch.no_grad()
def read_adapter(model: PreTrainedModel, folder: Path, *, field: str) -> None:
    """Load the values of a saved adapter into the adapter of ``model``.

    Raises: ModelError when their tensors differ.
    """
    saved = adapter_tensors(folder, field=field)
    mine = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if lacking := unlike(mine, saved):
        what = f"the adapter in {folder} is of another model than {model.name_or_path}: {lacking}"
        raise ModelError(Problem(what, fix="use the model that adapter_config.json names", field=field))
    for name, weight in mine.items():
        weight.copy_(saved[name])


def unlike(mine: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> str:
    """Describe the first tensor in which two sets differ; "" when there is none."""
    for name in sorted(mine.keys() | saved.keys()):
        shapes = [tuple(side[name].shape) if name in side else "missing" for side in (mine, saved)]
        if shapes[0] != shapes[1]:
            return f"{name} is {shapes[1]} there and {shapes[0]} here"
    return ""


def trained_share(model: nn.Module) -> str:
    """Describe the trained share of the model for the user."""
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    everything = sum(weight_count(weight) for weight in model.parameters())
    layers = sum(1 for _ in adapter_layers(model))
    share = 100 * trained / everything
    digits = max(0, 1 - math.floor(math.log10(share)))
    return f"LoRA trains {trained:,} of {everything:,} weights ({share:.{digits}f} %), on {layers} layers"


def _excluding(names: list[str] | str | None, head: str | None, vision: list[str]) -> list[str] | str | None:
    """Extend names or a regular expression to match also the head, which is trained in full, and the vision parts, which get
    no adapter."""
    if vision:
        own = [f"({names})"] if isinstance(names, str) else [rf"(.*\.)?{re.escape(name)}" for name in names or []]
        return "|".join([*own, *(rf"{re.escape(part)}\..*" for part in vision)])
    if head is None:
        return names
    return f"({names})|{head}" if isinstance(names, str) else [*(names or []), head]


def _merged(layer: Any, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return weight + scale x B A, in the weight's dtype. The adapter of a weight [inputs, outputs] is transposed: of an
    embedding's, and of GPT-2's layers."""
    if layer._disable_adapters:
        return weight
    delta = (b.float() @ a.float()) * layer.scaling[ADAPTER]
    if ADAPTER not in layer.lora_A or getattr(layer, "fan_in_fan_out", False):
        delta = delta.T
    return (weight.float() + delta).to(weight.dtype)


def file_name(parameter: str) -> str:
    """Return the name of an adapter's parameter in a file of peft's."""
    return _PREFIX + parameter.replace(f".{ADAPTER}", "", 1)


def _parameter_name(saved: str) -> str:
    """Return the model's name of a parameter, from that in a file of peft's."""
    name = saved.removeprefix(_PREFIX)
    for part in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
        name = name.replace(f".{part}", f".{part}.{ADAPTER}")
    return name


def _refuse_tied_output(model: PreTrainedModel, field: str) -> None:
    output = model.get_output_embeddings()
    if output is None or not hasattr(output, "base_layer"):
        return
    entrance: Any = model.get_input_embeddings()
    if entrance.weight is output.base_layer.weight:
        what = (
            f"the output layer of {model.name_or_path} shares its weights with the embedding: merged, both would change"
        )
        raise ModelError(Problem(what, fix="leave it out of target_modules", field=f"{field}.target_modules"))


def read_config(peft: Any, folder: str, field: str) -> Any:
    path = Path(expanded(folder))
    try:
        kind = json.loads((path / CONFIG).read_text(encoding="utf-8")).get("peft_type")
        if kind != "LORA":
            raise ValueError(f"it is of type {kind}, not LORA")
        config = peft.LoraConfig.from_pretrained(str(path))
        for name in NOT_PLAIN:
            if getattr(config, name, False):
                raise ValueError(f"it has {name}, and only plain LoRA is trained and sampled from here")
        if config.init_lora_weights not in PLAIN_STARTS:
            raise ValueError(
                f"it began as {config.init_lora_weights}, which changes the base weights that samplers read"
            )
        return config
    except (OSError, ValueError, TypeError) as error:
        what = f"no LoRA adapter could be read from {path}: {first_line(error)}"
        raise ModelError(Problem(what, fix=f"name a folder with {WEIGHTS} and {CONFIG}", field=field)) from error


def peft_library(field: str) -> Any:
    try:
        with without_kernel_notice():
            import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise MissingDependency(missing_library("peft", field)) from error
    return peft
