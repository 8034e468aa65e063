"""Report how the native sampler would compute a model, without its weights."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from posttrain.backends.rollout.native.int8 import int8_products
from posttrain.backends.rollout.native.token_pass import TokenPass
from posttrain.models.attention import NAME, register_attention
from posttrain.models.loading import load_model_config, refuse_unsupported
from posttrain.models.recurrent import separate_sequences

FEWEST_LAYERS = 2
VOCABULARY = 1024  # tokens; how many there are changes nothing


def sampling_outlook(path: str) -> str:
    """Try the first layers of a model, as wide as they are and with random weights, on the CPU. Returns: how prompts and tokens
    are computed, or the reason for a slower way; and the same of weights of eight bits.

    Raises: ModelError for a model that cannot be read, or is not supported.
    """
    whole = load_model_config(path)
    refuse_unsupported(whole, path)
    register_attention()
    model = AutoModelForCausalLM.from_config(
        _shortened(whole.get_text_config()), attn_implementation=NAME, dtype=torch.float32
    )
    separate_sequences(model, "model.path")
    token_pass = TokenPass(model.eval())
    return f"{token_pass.note or 'fast passes with compiled kernels'}; rollout.weights=int8 {_of_int8(token_pass)}"


def _of_int8(token_pass: TokenPass) -> str:
    if token_pass.decoder is None:
        return "needs fast passes"
    _, reason = int8_products(torch.bfloat16, torch.device("cpu"))
    return f"saves no time: {reason}" if reason else "is compiled"


def _shortened(config: PretrainedConfig) -> PretrainedConfig:
    """Leave of the layers as many as show every kind of layer, and a small vocabulary."""
    layers = config.num_hidden_layers
    lists = {name: found for name, found in vars(config).items() if isinstance(found, list) and len(found) == layers}
    kept = min(layers, FEWEST_LAYERS)
    while any(set(map(str, found[:kept])) != set(map(str, found)) for found in lists.values()):
        kept += 1
    for name, found in lists.items():
        setattr(config, name, found[:kept])
    config.num_hidden_layers, config.vocab_size = kept, min(config.vocab_size, VOCABULARY)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)
    return config
