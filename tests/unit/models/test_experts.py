"""Experts of any width, also where torch's grouped products refuse them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.models.experts import takes_grouped_products
from posttrain.models.loading import load_causal_lm
from posttrain.models.packed_attention import packed_layout
from posttrain.models.tiny import draw_weights

EXPERTS = {"head_dim": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, **EXPERTS},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 45, "norm_topk_prob": True, **EXPERTS},
}
TOKENS = torch.tensor([[5, 1, 7, 30, 2, 9]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "width"), [(64, 45), (66, 48), (68, 44)])
@pytest.mark.parametrize("family", MIXTURES)
def test_any_width_has_the_results_and_gradients_of_the_model_s_own_loop(
    tmp_path: Path, family: str, hidden: int, width: int, dtype: torch.dtype
) -> None:
    more = {"hidden_size": hidden, "intermediate_size": width, **MIXTURES[family]}
    if "moe_intermediate_size" in more:
        more["moe_intermediate_size"] = width
    config = AutoConfig.for_model(
        family, vocab_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, **more
    )
    drawn = AutoModelForCausalLM.from_config(config)
    draw_weights(drawn, 0)
    drawn.save_pretrained(tmp_path)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager", dtype=dtype)
    model = load_causal_lm(str(tmp_path), dtype=dtype)

    place = {"input_ids": TOKENS, "position_ids": torch.arange(6)[None], "use_cache": False}
    results = own(**place).logits, model(**place, attention_layout=packed_layout([6])).logits
    assert (results[1] - results[0]).norm() <= (1e-5 if dtype == torch.float32 else 0.1) * results[0].norm()
    for logits in results:
        logits.float().logsumexp(-1).sum().backward()
    for (name, weight), other in zip(model.named_parameters(), own.parameters(), strict=True):
        assert weight.grad is not None and other.grad is not None and weight.grad.isfinite().all()
        if dtype == torch.float32:  # in bfloat16 the two ways to compute attention are too far apart
            assert (weight.grad - other.grad).norm() <= 1e-4 * other.grad.norm() + 1e-6, name


def test_widths_that_grouped_products_take_are_left_to_them(tmp_path: Path) -> None:
    assert takes_grouped_products(64, 48) and not takes_grouped_products(64, 45) and not takes_grouped_products(66)
    tokens, ends = torch.randn(6, 64, dtype=torch.bfloat16), torch.tensor([2, 6], dtype=torch.int32)
    torch.nn.functional.grouped_mm(tokens, torch.randn(2, 64, 48, dtype=torch.bfloat16), offs=ends)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        torch.nn.functional.grouped_mm(tokens, torch.randn(2, 64, 44, dtype=torch.bfloat16), offs=ends)
