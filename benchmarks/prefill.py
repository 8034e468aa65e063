"""Shares of the machine's limits that the native sampler reaches: prompts, passes of few rows, draws.

    python benchmarks/prefill.py [MODEL_FOLDER | --shape NAME] [--prompts 16x64,4x512,1x2048,8x1500] [--rounds 5]
    python benchmarks/prefill.py [MODEL_FOLDER | --shape NAME] --rows 1,2,4,8,16 [--dtype float32]
    python benchmarks/prefill.py [MODEL_FOLDER | --shape NAME] --opening
    python benchmarks/prefill.py --draws 49152,151936

--shape: layers of a known model's widths with random weights, so that nothing is loaded. Times are CPU seconds of one thread,
the median; ways take turns. Prompts are computed by transformers' modules and by the fast pass; their share of peak counts the
products of weights and of attention, and the peak is that of a square product of 2,048. A pass of few rows is compared with
the time of reading the weights once, at the speed at which the machine adds up an array of their size. A draw is compared with
the plain softmax of its logits. Opening a stream packs the weights, all of them or those that have changed since the last one.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import median, print_table
from shapes import SHAPES

from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.kept_products import KeptProducts
from posttrain.backends.rollout.native.products import library_product
from posttrain.backends.rollout.native.sampling import draw
from posttrain.backends.rollout.native.token_pass import TokenPass
from posttrain.models.attention import NAME, register_attention
from posttrain.models.cpu_products import choose_float32_products
from posttrain.models.packed_attention import packed_layout
from posttrain.models.recurrent import layers_with_keys, separate_sequences
from posttrain.records.trajectories import SamplingParams

VOCABULARY = 4096  # of random models: the head is no part of a layer's speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model folder; default: the demo's")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--prompts", default="16x64,4x512,1x2048")
    parser.add_argument("--rows", help="row counts of single passes")
    parser.add_argument("--draws", help="sizes of vocabularies")
    parser.add_argument("--opening", action="store_true", help="time the opening of a stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    choose_float32_products()
    with torch.inference_mode():
        if arguments.draws:
            draws([int(size) for size in arguments.draws.split(",")], arguments.rounds)
            return
        model = shaped(arguments.shape) if arguments.shape else loaded(arguments.model)
        model.to(getattr(torch, arguments.dtype))
        if arguments.opening:
            opening(model, arguments.rounds)
            return
        token_pass = TokenPass(model)
        print(token_pass.note or "fast passes with compiled kernels")
        if arguments.rows:
            few_rows(model, token_pass, [int(rows) for rows in arguments.rows.split(",")], arguments.rounds)
        else:
            sizes = [tuple(map(int, each.split("x"))) for each in arguments.prompts.split(",")]
            prompts(model, token_pass, sizes, arguments.rounds)


def loaded(path: str | None) -> Any:
    from posttrain.models.loading import load_causal_lm
    from posttrain.models.smollm2 import smollm2_135m_instruct

    return load_causal_lm(path or str(smollm2_135m_instruct()), dtype=torch.bfloat16).eval()


def shaped(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    sizes = dict(SHAPES[name])
    config = AutoConfig.for_model(sizes.pop("family"), **sizes, vocab_size=VOCABULARY, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.bfloat16).eval()
    separate_sequences(model, "--shape")
    return model


def timed(ways: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """CPU seconds of each way, which take turns: the median after one round to warm up."""
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds + 1):
        for way, of_way in zip(ways, seconds, strict=True):
            start = time.thread_time()
            way()
            of_way.append(time.thread_time() - start)
    return [median(of_way[1:]) for of_way in seconds]


def prompts(model: Any, token_pass: TokenPass, sizes: Sequence[tuple[int, ...]], rounds: int) -> None:
    config = model.config.get_text_config()
    square = torch.randn(2048, 2048).to(model.dtype)
    weights = active_weights(model)
    rows = []
    for count, length in sizes:
        tokens = (torch.arange(count * length) * 7919 % config.vocab_size)[None]
        places = torch.arange(length).repeat(count)[None]
        layout, ends = packed_layout([length] * count), torch.arange(1, count + 1) * length - 1
        inputs = {"input_ids": tokens, "position_ids": places}
        parts = [(n * length, (n + 1) * length, n, 0) for n in range(count)]

        def fast(inputs: Any = inputs, parts: Any = parts, layout: Any = layout, ends: Any = ends) -> None:
            cache = token_pass.new_cache()
            cache.prefilling(parts)
            token_pass.prefill(inputs, layout, cache, ends, None)

        def modules(inputs: Any = inputs, parts: Any = parts, layout: Any = layout, ends: Any = ends) -> None:
            cache = KeyValueCache.of(model)
            cache.prefilling(parts)
            model(**inputs, past_key_values=cache, attention_layout=layout, logits_to_keep=ends, use_cache=False)

        with token_pass.holding_weights():
            slow, quick, of_square = timed([modules, fast, lambda: square @ square], rounds)
        peak = 2 * 2048**3 / of_square
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        scores = len(layers_with_keys(config)) * config.num_attention_heads * head_dim * count * length * (length + 1)
        work = 2 * weights * count * length + 2 * scores
        shares = (f"{work / seconds / peak:.0%}" for seconds in (slow, quick))
        rows.append([f"{count} × {length:,}", f"{slow:.3f}", f"{quick:.3f}", f"{slow / quick:.2f}x", *shares])
    print_table(["prompts × tokens", "by modules, s", "fast, s", "ratio", "of peak, modules", "of peak, fast"], rows)


def active_weights(model: Any) -> int:
    """Numbers of the layers' weights that a token is multiplied by."""
    config, total = model.config.get_text_config(), 0
    for name, weight in model.get_decoder().layers.named_parameters():
        if weight.dim() == 3 and hasattr(config, "num_experts_per_tok"):
            total += weight.numel() * config.num_experts_per_tok // len(weight)
        elif weight.dim() == 2 and name:
            total += weight.numel()
    return total


def opening(model: Any, rounds: int) -> None:
    """Read the weights for a stream, after all of them changed and after none did."""
    rows = []
    for int8 in (False, True):
        token_pass = TokenPass(model, int8=int8)

        def kept(token_pass: TokenPass = token_pass) -> None:
            with token_pass.holding_weights():
                pass

        def changed(token_pass: TokenPass = token_pass, again: Callable[[], None] = kept) -> None:
            token_pass.weights_changed()
            again()

        all_changed, none_changed = timed([changed, kept], rounds)
        rows.append(["int8" if int8 else "compute dtype", f"{all_changed * 1000:.1f}", f"{none_changed * 1000:.1f}"])
    print_table(["weights", "all changed, ms", "none changed, ms"], rows)


def few_rows(model: Any, token_pass: TokenPass, counts: Sequence[int], rounds: int) -> None:
    """Passes over one token per row, after 48 tokens of a prompt, which eight rows share, and 100 of a response; with the
    sampler's products, with the matrix library's, and by transformers' modules, in turns."""
    floor = timed([reading(model)], rounds)[0]
    by_library = TokenPass(model)
    by_library.decoder.products = KeptProducts(library_product)
    by_modules = TokenPass(model)
    by_modules.decoder = None
    rows = []
    for count in counts:
        slots = [row // 8 for row in range(count)]
        tokens, places = torch.arange(count), torch.full((count,), 148)
        ways = by_modules, by_library, token_pass

        def one(
            its: TokenPass, cache: KeyValueCache, slots: Any = slots, tokens: Any = tokens, places: Any = places
        ) -> None:
            cache.decoding(slots, [48] * len(slots), [100] * len(slots))
            its.logits(its(tokens, places, cache))

        with token_pass.holding_weights(), by_library.holding_weights():
            caches = [prompts_of_48(way, max(slots) + 1) for way in ways]
            modules, library, seconds = timed(
                [partial(one, way, cache) for way, cache in zip(ways, caches, strict=True)], 4 * rounds
            )
        times = [f"{each * 1000:.1f}" for each in (modules, library, seconds, floor)]
        ratios = modules / seconds, library / seconds, seconds / floor
        rows.append([str(count), *times, *(f"{each:.2f}x" for each in ratios)])
    titles = ["rows", "by modules, ms", "by the matrix library, ms", "pass, ms", "reading the weights, ms"]
    titles += ["of modules", "of the library", "of reading"]
    print_table(titles, rows)


def prompts_of_48(token_pass: TokenPass, prompts: int) -> KeyValueCache:
    """Return a cache that holds prompts of 48 tokens."""
    cache, length = token_pass.new_cache(), 48
    cache.prefilling([(slot * length, (slot + 1) * length, slot, 0) for slot in range(prompts)])
    inputs = {
        "input_ids": torch.arange(prompts * length)[None],
        "position_ids": torch.arange(length).repeat(prompts)[None],
    }
    ends = torch.arange(1, prompts + 1) * length - 1
    token_pass.prefill(inputs, packed_layout([length] * prompts), cache, ends, None)
    return cache


def reading(model: Any) -> Callable[[], object]:
    held = {id(weight): weight.nbytes for weight in model.parameters()}
    array = torch.ones(sum(held.values()) // 4, dtype=torch.float32)
    return array.sum


def draws(vocabularies: Sequence[int], rounds: int) -> None:
    """16 rows of normal logits, of standard deviation 4: flatter than a trained model's."""
    kinds = {
        "plain": {},
        "top_k=50": {"top_k": 50},
        "top_p=0.9": {"top_p": 0.9},
        "both": {"top_k": 50, "top_p": 0.9},
    }
    rows = []
    for vocabulary in vocabularies:
        generator = torch.Generator().manual_seed(1)
        logits = (4 * torch.randn(16, vocabulary, generator=generator)).bfloat16()
        random = torch.rand(16, generator=generator)
        plans = [SamplingParams(max_response_tokens=1, **settings) for settings in kinds.values()]
        ways = [partial(draw, logits, random, plan) for plan in plans]
        *found, softmax = timed([*ways, lambda logits=logits: logits.float().softmax(dim=1)], rounds)
        for kind, seconds in zip(kinds, found, strict=True):
            rows.append([f"{vocabulary:,}", kind, f"{seconds * 1000:.1f}", f"{seconds / softmax:.1f}x"])
    print_table(["vocabulary", "draw", "ms", "of a softmax"], rows)


if __name__ == "__main__":
    main()
