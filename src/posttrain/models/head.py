"""Form of a model's output head, between its last hidden states and its logits, detected by observing a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from posttrain.algos.fused_scoring import Head
from posttrain.errors import ModelError, PosttrainError, Problem
from posttrain.models.attention import KNOWN
from posttrain.models.packed_attention import packed_layout

BEFORE, PROBED = 3, 2  # tokens of two sequences side by side
REACH = 100.0  # range of the probed logits, -100 to 100
# Allowed difference between states that should not differ. Other experts are chosen where their weights are nearly equal, and
# their products depend on how many tokens they share.
TOLERANCE, WITH_EXPERTS = 0.01, 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadForm:
    """Form of a model's head; see algos.fused_scoring.Head."""

    scale: float = 1.0
    softcap: float | None = None

    def of(self, model: PreTrainedModel) -> Head:
        """Return the head with the model's current weights."""
        linear = model.get_output_embeddings()
        return Head(weight=linear.weight, bias=linear.bias, scale=self.scale, softcap=self.softcap)


# The forms that were detected, by model and its output layer: trainer, reference and sampler ask about the same one
_DETECTED: WeakKeyDictionary[nn.Module, tuple[ref[nn.Module], HeadForm | str]] = WeakKeyDictionary()


def head_form(model: PreTrainedModel) -> HeadForm | str:
    """Detect the form of ``model``'s head, once. Returns: it, or the reason why it is unknown.

    Raises: ModelError for a model that cannot be run, or whose sequences change each other where they are side by side.
    """
    linear = model.get_output_embeddings()
    known = _DETECTED.get(model)
    if known is None or known[0]() is not linear:
        known = _DETECTED[model] = ref(linear), _detected(model, linear)
    return known[1]


@torch.no_grad()
def _detected(model: PreTrainedModel, linear: nn.Module) -> HeadForm | str:
    """Detect the form of a head whose layer is ``linear``.

    The model reads two short sequences side by side while its output layer is observed. The layer's input must be the last hidden
    state of the model's body, or a multiple of it (MiniCPM3), where the first sequence is another one. Its output is replaced
    by a ramp, and the returned logits show the transformation: none, a multiplication (Cohere, Granite), or the soft cap of its
    configuration (Gemma).
    """
    if type(linear) is not nn.Linear:
        return f"its output layer is {type(linear).__name__}, not a plain linear layer"
    tokens = BEFORE + PROBED
    ramp = torch.linspace(-REACH, REACH, linear.out_features, device=model.device).expand(1, tokens, -1)
    seen: list[Tensor] = []

    def watch(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        seen.append(inputs[0])
        return ramp.clone()

    layout = packed_layout([BEFORE, PROBED], model.device)
    ids = torch.arange(tokens, device=model.device) % linear.out_features
    others = torch.cat([(ids[:BEFORE] + tokens) % linear.out_features, ids[BEFORE:]])
    positions = torch.cat([torch.arange(count, device=model.device) for count in (BEFORE, PROBED)])[None]
    with refused_if_it_fails(model):
        with linear.register_forward_hook(watch):
            logits = model(input_ids=ids[None], position_ids=positions, attention_layout=layout, use_cache=False).logits
        beside_others = last_hidden_states(model, layout, input_ids=others[None], position_ids=positions)
    if len(seen) != 1:
        return f"its forward pass calls the output layer {len(seen)} times"
    factor = 1.0  # of the states, before the layer
    if not _alike(model, seen[0], beside_others):
        states = last_hidden_states(model, layout, input_ids=ids[None], position_ids=positions)
        factor = float((seen[0].float() * states.float()).sum() / states.float().square().sum())
        if not _alike(model, seen[0], factor * states) or (factor != 1.0 and linear.bias is not None):
            return "what enters its output layer is not the last hidden state of its body"
        if not _alike(model, seen[0], factor * beside_others):
            what = f"{named(model)} computes a sequence otherwise when another one is packed before it"
            raise ModelError(Problem(what, fix=KNOWN))
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if softcap and torch.allclose(logits, softcap * torch.tanh(ramp / softcap), rtol=1e-5):
        return HeadForm(scale=factor, softcap=softcap)
    scale = float(logits[0, 0, -1] / REACH)
    if torch.allclose(logits, scale * ramp, rtol=1e-5):
        return HeadForm(scale=scale * factor)
    return "it transforms its logits in an unknown way"


def _alike(model: PreTrainedModel, states: Tensor, others: Tensor) -> bool:
    """Compare the states of the second sequence, [1, N, H] each. Returns: True where they are the same."""
    if states.shape != others.shape:
        return False
    probed, other = states[0, BEFORE:].float(), others[0, BEFORE:].float()
    experts = any(weight.dim() == 3 for weight in model.parameters())
    return bool((probed - other).norm() <= (WITH_EXPERTS if experts else TOLERANCE) * probed.norm())


@contextmanager
def refused_if_it_fails(model: PreTrainedModel) -> Iterator[None]:
    """Run the model for the first time inside the ``with`` block. Raises: ModelError for what its own code raises."""
    try:
        yield
    except (PosttrainError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of any kind, by what its configuration lacks
        what = (
            f"{named(model)} cannot compute a few tokens: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        )
        raise ModelError(Problem(what, fix=f"check its config.json, or {KNOWN}")) from error


def named(model: PreTrainedModel) -> str:
    """Return the class of a model and where it comes from, for messages."""
    return f"{type(model).__name__} at {model.name_or_path}" if model.name_or_path else type(model).__name__


def last_hidden_states(model: PreTrainedModel, layout: Any, **inputs: Any) -> Tensor:
    """Run the body of the model, all but the output layer, on its inputs. Returns: [1, N, H]."""
    return model.base_model(**inputs, attention_layout=layout, use_cache=False).last_hidden_state


def states_at(states: Tensor, positions: Tensor) -> Tensor:
    """Gather rows [M, H] of ``states`` [N, H], carrying gradient; a row may be requested repeatedly (the last token of a shared
    prompt).

    Implemented as an embedding, whose backward pass adds in a fixed order: that of ``states[positions]`` adds float32 rows on
    the CPU in the order of its threads, and runs would not be reproducible (torch 2.13).
    """
    return embedding(positions, states)
