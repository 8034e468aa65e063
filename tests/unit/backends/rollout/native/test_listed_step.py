"""The list of compiled functions gives what the loop over layers gives, to the bit, and is used where it can be."""

from __future__ import annotations

import pytest
import torch
from tests.unit.backends.rollout.native.test_token_pass import FAST, ODD, PROMPT, build

from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.decoder import Decoder
from posttrain.backends.rollout.native.listed_step import ListedStep
from posttrain.backends.rollout.native.token_pass import TokenPass

EXPERTS = ("mixtral", "olmoe", "qwen3_moe", "qwen2_moe", "granitemoe", "minimax_m2", "gpt_oss")
LATENT = ("deepseek_v2", "deepseek_v3", "minicpm3")
# By torch's operations: experts are dealt out, products are of each head, changes are scaled, heads are narrow or cut.
BY_THE_LOOP = {*EXPERTS, *LATENT, "granite", "olmo", "qwen3", "hunyuan_v1_dense"}


def new_caches(decoder: Decoder, rows: int) -> list[KeyValueCache]:
    """Two equal caches with as many prompts as a third of the rows."""
    torch.manual_seed(3)
    caches = [decoder.new_cache() for _ in range(2)]
    for cache in caches:
        cache.prefilling([(0, PROMPT, slot, 0) for slot in range(-(-rows // 3))])
    one, other = (cache.prompts for cache in caches)
    for mine, its in ((one.keys, other.keys), (one.values, other.values)):
        for layer, tensor in mine.items():
            its[layer].copy_(tensor.normal_())
    return caches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAST, *ODD, "int8"])
@torch.inference_mode()
def test_the_list_gives_what_the_loop_gives(family: str, dtype: torch.dtype) -> None:
    """Of ever fewer rows, then of more than before, and while the slots grow."""
    sizes = {**FAST, **ODD, "int8": {}}[family]
    model = build(family if family in FAST else "llama", dtype, **sizes)
    decoder = TokenPass(model, int8=family == "int8").decoder
    assert decoder is not None
    decoder.read_weights()
    listed = ListedStep(decoder)
    caches = new_caches(decoder, 20)
    rows_of_passes = [7] * 70 + [3, 1, 20]
    for place, rows in enumerate(rows_of_passes):
        tokens, positions = torch.arange(rows) + place % 40, torch.full((rows,), PROMPT + place)
        prompts = [row // 3 for row in reversed(range(rows))]
        found = []
        for cache, step in zip(caches, (decoder.step, listed), strict=True):
            cache.decoding(prompts, [PROMPT] * rows, [place if rows < 20 else 0] * rows)
            found.append(step(tokens, positions, cache).clone())
        assert torch.equal(*found), f"pass {place}, {rows} rows"
    if decoder.kernels is not None:
        assert (listed._calls is None) == (family in BY_THE_LOOP)


@torch.inference_mode()
def test_new_weights_are_read() -> None:
    model = build("llama")
    decoder = TokenPass(model).decoder
    assert decoder is not None
    listed, found = ListedStep(decoder), []
    cache = new_caches(decoder, 2)[0]
    for _ in range(2):
        decoder.read_weights()
        cache.decoding([0, 0], [PROMPT] * 2, [0, 0])
        found.append(listed(torch.arange(2), torch.full((2,), PROMPT), cache).clone())
        cache.decoding([0, 0], [PROMPT] * 2, [0, 0])
        assert torch.equal(found[-1], decoder.step(torch.arange(2), torch.full((2,), PROMPT), cache))
        listed.clear()
        decoder.drop_weights()
        for weight in model.parameters():
            weight.mul_(1.1)
    assert not torch.equal(*found)
