"""Sampling beside busy neighbours: how long OpenMP threads spin decides whether a run survives another process.

    python benchmarks/contention.py [MODEL_FOLDER] [--seconds 60]

Each row is a process of its own (libgomp reads its settings once); rows alternate between settings, and each is given
--seconds at most, loading included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from posttrain.models.smollm2 import smollm2_135m_instruct

SETTINGS = {"libgomp's default": {}, "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"}}
SPIN = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="model folder; default: the demo's")
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2], help="busy processes beside it")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    path = arguments.model or str(smollm2_135m_instruct())
    if arguments.measure:
        measure(path)
        return
    print("| busy neighbours | setting | tokens/s, worst to best of 5 |\n| --- | --- | --- |")
    for neighbours in arguments.neighbours:
        for name, setting in SETTINGS.items():
            others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(neighbours)]
            try:
                command = [sys.executable, __file__, path, "--measure"]
                environment = os.environ | setting
                done = subprocess.run(
                    command, env=environment, timeout=arguments.seconds, capture_output=True, text=True
                )
                result = done.stdout.strip() if done.returncode == 0 else done.stderr.strip()[-200:]
            except subprocess.TimeoutExpired:
                result = f"not done in {arguments.seconds} s"
            finally:
                for process in others:
                    process.kill()
                    process.wait()
            print(f"| {neighbours} | {name} | {result} |", flush=True)


def measure(path: str) -> None:
    """8 prompts x 8 samples x 10 tokens, bfloat16, six times, the first to warm up."""
    import torch

    from posttrain.config.model import ModelConfig
    from posttrain.models.loading import load_causal_lm, load_tokenizer
    from posttrain.records.prompts import Prompt
    from posttrain.records.trajectories import SamplingParams
    from posttrain.registry import ROLLOUT_ENGINES

    engine = ROLLOUT_ENGINES.get("native")(
        load_causal_lm(path, dtype=torch.bfloat16),
        load_tokenizer(ModelConfig(path=path)),
        max_concurrent_sequences=64,
        max_prefill_tokens=8192,
    )
    prompts = [
        Prompt(prompt_id=str(i), token_ids=tuple(range(5 + i, 50 + i)), text="", data_source="none") for i in range(8)
    ]
    sampling = SamplingParams(samples_per_prompt=8, max_response_tokens=10, ignore_eos=True)
    rates = []
    for _ in range(6):
        start = time.perf_counter()
        engine.generate(prompts, sampling)
        rates.append(640 / (time.perf_counter() - start))
    print(", ".join(f"{rate:.0f}" for rate in sorted(rates[1:])))


if __name__ == "__main__":
    main()
