"""What only a GPU can show: the update packed and padded, prompts shared, scoring fused, and the sampler, with peak memory and
the share of the machine's matrix peak.

    python benchmarks/gpu.py [MODEL_FOLDER] [--rounds 3] [--sequences 64] [--samples 64,256] [--tokens 256]

Without a folder the model is one of random weights with the shape of Qwen2.5-0.5B: speed and memory do not depend on what it
has learned, and nothing has to be downloaded. ``--device cpu --tiny`` goes through the same lines where there is no GPU, so that
they stay right; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import median, print_table
from transformers import AutoConfig, AutoModelForCausalLM
from updates import PPO_CLIP, Way, flops, groups_batch, make_engine, matrix_peak, ragged_batch, timed

from posttrain.config.model import ModelConfig
from posttrain.models.loading import DTYPES, load_causal_lm, load_tokenizer
from posttrain.models.tiny import tiny_tokenizer, write_tiny_model
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams
from posttrain.registry import ROLLOUT_ENGINES

WAYS: dict[str, tuple[str, Way]] = {  # name -> (its batch, how)
    "ragged, padded": ("ragged", {"padded": True}),
    "ragged, packed": ("ragged", {"share_prompts": False}),
    "ragged, packed, logits kept": ("ragged", {"share_prompts": False, "whole_logits": True}),
    "groups, prompts repeated": ("groups", {"share_prompts": False}),
    "groups, prompts shared": ("groups", {}),
    "groups, float32": ("groups", {"dtype": "float32"}),
}
PROMPT_TOKENS, SAMPLES = 256, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: to try the script, not to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=64, help="of the ragged batch")
    parser.add_argument("--groups", type=int, default=8, help="prompts of the other batch, with 8 responses each")
    parser.add_argument("--micro-batch", type=int, default=32, help="sequences")
    parser.add_argument("--samples", default="64,256", help="responses sampled together")
    parser.add_argument("--tokens", type=int, default=256, help="of a sampled response")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here; --device cpu --tiny tries the script without one")
    with tempfile.TemporaryDirectory() as temporary:
        path = arguments.model or str(made_model(Path(temporary) / "model", tiny=arguments.tiny))
        print(f"{device_name(arguments.device)}\n")
        updates(path, arguments)
        print()
        samplers(path, arguments)


def made_model(folder: Path, *, tiny: bool) -> Path:
    if tiny:
        return write_tiny_model(folder)
    config = AutoConfig.for_model(
        "qwen2",
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else device


def updates(path: str, arguments: argparse.Namespace) -> None:
    rows: list[list[str]] = []
    first: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for name, (kind, way) in WAYS.items():
        engine, model = make_engine({"path": path, "micro": arguments.micro_batch, "device": arguments.device, **way})
        vocabulary = model.config.vocab_size
        batch = (
            ragged_batch(arguments.sequences, vocabulary)
            if kind == "ragged"
            else groups_batch(vocabulary, arguments.groups)
        )
        dtype = way.get("dtype", "bfloat16")
        if dtype not in peaks:
            peaks[dtype] = matrix_peak(model.config, DTYPES[dtype], arguments.device, tokens=8192)

        def step(engine: Any = engine, batch: Any = batch) -> None:
            engine.forward_backward(batch, PPO_CLIP, batch.counts())
            engine.optimizer_step()

        step()  # warms up, and makes gradients and averages
        held = reset_peak(arguments.device)
        took = median([timed(step, arguments.device) for _ in range(arguments.rounds)])
        tokens = int((batch.sequences.prompt_lengths + batch.sequences.response_lengths).sum())
        base = first.setdefault(kind, took)
        rate = flops(model, batch) / took
        rows.append(
            [
                name,
                f"{took:.3f}",
                f"{base / took:.2f}x",
                f"{tokens / took:,.0f}",
                f"{rate / 1e12:.1f}",
                f"{rate / peaks[dtype]:.0%}",
                f"{peak_mib(arguments.device) - held:,.0f}",
            ]
        )
        del engine, model, step
        gc.collect()
    header = [
        "update",
        "s",
        "faster than its first",
        "tokens/s",
        "TFLOP/s",
        "of the matrix peak",
        "peak above the model, MiB",
    ]
    print_table(header, rows)
    print(json.dumps({"matrix peak, TFLOP/s": {name: round(value / 1e12, 1) for name, value in peaks.items()}}))


def samplers(path: str, arguments: argparse.Namespace) -> None:
    """The native sampler next to transformers' generate: every response of the same length."""
    tokenizer = load_tokenizer(ModelConfig(path=path))
    model = load_causal_lm(path, dtype=torch.bfloat16, device=arguments.device).requires_grad_(False)
    native = ROLLOUT_ENGINES.get("native")(model, tokenizer, max_concurrent_sequences=512, max_prefill_tokens=16_384)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(arguments.device)
    rows = []
    for count in map(int, arguments.samples.split(",")):
        ids = torch.randint(0, 200, (count // SAMPLES, PROMPT_TOKENS)).tolist()
        prompts = [Prompt(prompt_id=str(n), token_ids=tuple(one), text="", data_source="") for n, one in enumerate(ids)]
        sampling = SamplingParams(
            samples_per_prompt=SAMPLES, max_response_tokens=arguments.tokens, ignore_eos=True, seed=1
        )
        repeated = torch.tensor(ids, device=arguments.device).repeat_interleave(SAMPLES, dim=0)
        works = {
            "native": partial(native.generate, prompts, sampling),
            "native, passes not recorded": partial(unrecorded, native, prompts, sampling),
            "model.generate": partial(
                plain.generate,
                repeated,
                attention_mask=torch.ones_like(repeated),
                do_sample=True,
                top_k=0,
                min_new_tokens=arguments.tokens,
                max_new_tokens=arguments.tokens,
                pad_token_id=0,
            ),
        }
        found: dict[str, tuple[float, float]] = {}
        for name, work in works.items():
            work()
            held = reset_peak(arguments.device)
            took = median([timed(work, arguments.device) for _ in range(arguments.rounds)])
            found[name] = took, peak_mib(arguments.device) - held
        for name, (took, memory) in found.items():
            rate = count * arguments.tokens / took
            rows.append(
                [str(count), name, f"{took:.2f}", f"{rate:,.0f}", f"{took / found['native'][0]:.2f}x", f"{memory:,.0f}"]
            )
    print_table(["sequences", "sampler", "s", "tokens/s", "time / native's", "peak above the model, MiB"], rows)


def unrecorded(native: Any, prompts: list[Prompt], sampling: SamplingParams) -> None:
    """Sample with every kernel of a decoding pass started by itself."""
    recorded, native.token_pass.graphed = native.token_pass.graphed, None
    native.generate(prompts, sampling)
    native.token_pass.graphed = recorded


def reset_peak(device: str) -> float:
    """MiB held now; the peak is counted anew from here."""
    if not device.startswith("cuda"):
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 2**20


def peak_mib(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 2**20 if device.startswith("cuda") else 0.0


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
