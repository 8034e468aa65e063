"""Form of a model's output head, between its last hidden states and its logits, detected by observing a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from posttrain.algos.fused_scoring import Head
from posttrain.models.packed_attention import packed_layout

PROBE_TOKENS = 2
REACH = 100.0  # range of the probed logits, -100 to 100


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
    """Detect the form of ``model``'s head, once. Returns: it, or the reason why it is unknown."""
    linear = model.get_output_embeddings()
    known = _DETECTED.get(model)
    if known is None or known[0]() is not linear:
        known = _DETECTED[model] = ref(linear), _detected(model, linear)
    return known[1]


@torch.no_grad()
def _detected(model: PreTrainedModel, linear: nn.Module) -> HeadForm | str:
    """Detect the form of a head whose layer is ``linear``.

    The model reads two tokens while its output layer is observed. The layer's input must be the last hidden state of the model's
    body. Its output is replaced by a ramp, and the returned logits show the transformation: none, a multiplication (Cohere,
    Granite), or the soft cap of its configuration (Gemma).
    """
    if type(linear) is not nn.Linear:
        return f"its output layer is {type(linear).__name__}, not a plain linear layer"
    ramp = torch.linspace(-REACH, REACH, linear.out_features, device=model.device).expand(1, PROBE_TOKENS, -1)
    seen: list[Tensor] = []

    def watch(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        seen.append(inputs[0])
        return ramp.clone()

    tokens = torch.arange(PROBE_TOKENS, device=model.device)[None]
    inputs = {"input_ids": tokens, "position_ids": tokens}
    hook = linear.register_forward_hook(watch)
    try:
        logits = model(**inputs, attention_layout=packed_layout([PROBE_TOKENS], model.device), use_cache=False).logits
    finally:
        hook.remove()
    if len(seen) != 1:
        return f"its forward pass calls the output layer {len(seen)} times"
    if not torch.allclose(seen[0], last_hidden_states(model, packed_layout([PROBE_TOKENS], model.device), **inputs)):
        return "what enters its output layer is not the last hidden state of its body"
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if softcap and torch.allclose(logits, softcap * torch.tanh(ramp / softcap), rtol=1e-5):
        return HeadForm(softcap=softcap)
    scale = float(logits[0, 0, -1] / REACH)
    if torch.allclose(logits, scale * ramp, rtol=1e-5):
        return HeadForm(scale=scale)
    return "it transforms its logits in an unknown way"


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
