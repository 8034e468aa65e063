"""The update phase at the demo's size: shared prompts on and off, side by side, round after round.

python benchmarks/update.py [MODEL_FOLDER] [--rounds 5]
"""

from __future__ import annotations

import argparse
import time

import torch
from common import median, print_table, random_batch

from posttrain.cli.process import keep_memory
from posttrain.config.model import ModelConfig
from posttrain.config.policy import OptimizerConfig
from posttrain.models.loading import DTYPES, load_causal_lm, load_tokenizer
from posttrain.models.smollm2 import smollm2_135m_instruct
from posttrain.records.plans import LossPlan
from posttrain.registry import TRAIN_ENGINES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="model folder; default: the demo's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=8, help="prompts, with 8 responses each")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    arguments = parser.parse_args()
    keep_memory()
    path = arguments.model or str(smollm2_135m_instruct())
    model = load_causal_lm(path, dtype=DTYPES[arguments.dtype])
    engine = TRAIN_ENGINES.get("local")(
        model,
        load_tokenizer(ModelConfig(path=path)),
        optimizer=OptimizerConfig(lr=1e-9),
        learning_rate_factor=lambda update: 1.0,
        sequences_per_micro_batch=16,  # two groups; 64 long prompts repeated would need over 20 GB
        sequences_per_scoring_batch=64,
    )
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    plan = LossPlan(name="ppo_clip", parameters=clip, aggregation="token_mean", temperature=1.0)
    rows = []
    for prompt, response in ((46, 24), (256, 64)):
        batch = random_batch(arguments.groups, 8, prompt, response, model.config.vocab_size)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for round_number in range(arguments.rounds + 1):
            for shared in (True, False):
                engine.cutter.share_prompts = shared
                start = time.perf_counter()
                engine.forward_backward(batch, plan, batch.counts())
                engine.optimizer_step()
                if round_number:  # the first round warms up
                    seconds[shared].append(time.perf_counter() - start)
        on, off = median(seconds[True]), median(seconds[False])
        tokens = int((batch.sequences.prompt_lengths + batch.sequences.response_lengths).sum())
        rows.append(
            [
                f"{arguments.groups} x 8, prompt {prompt}, response up to {response}",
                f"{off:.2f}",
                f"{on:.2f}",
                f"{off / on:.2f}",
                f"{tokens / on:.0f}",
            ]
        )
    print_table(["batch", "prompts repeated, s", "prompts shared, s", "ratio", "tokens/s shared"], rows)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
