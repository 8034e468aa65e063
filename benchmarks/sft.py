"""Supervised fine-tuning next to TRL's SFTTrainer: same model, rows, tokens and learned tokens, turn by turn.

    python benchmarks/sft.py --trl-python PATH [MODEL_FOLDER] [--rounds 5] [--rows 32] [--preload LIBRARY]

PATH is a Python that has TRL (its own environment: pip install torch==2.13.0 trl). Each of the two runs as its user would run
it, and waits before every update for its turn, so that both meet the same machine. Rows are prompts and responses of
log-normal lengths (sigma 0.8), the loss is on the response, one update reads --rows of them. TRL is given bfloat16 weights, the
micro-batches in --micro and as many threads; it pads each micro-batch to its longest row (its packing needs a GPU kernel). The
optimizer of ours keeps float32 masters; TRL's updates the bfloat16 weights. The phases of ours: forward and backward passes with
the optimizer (update), and the rest of the step (batches, metrics).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from step import Worker, say

WORDS = ("the", "sum", "of", "two", "numbers", "is", "more", "than", "either", "when", "both", "are", "above", "zero")
MAX_TOKENS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model folder; default: the demo's")
    parser.add_argument("--trl-python", default=os.environ.get("POSTTRAIN_TRL_PYTHON"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=32, help="rows of an update")
    parser.add_argument("--words", type=float, default=60.0, help="median words of a response")
    parser.add_argument("--micro", default="8,4", help="micro-batch sizes to try in TRL")
    parser.add_argument("--preload", help="a library that every process loads first")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, _, micro = arguments.worker.partition(":")
        rows = json.loads(Path(arguments.folder, "rows.json").read_text())
        {"posttrain": ours, "trl": trl}[name](arguments.model, Path(arguments.folder), rows, int(micro))
        return
    from common import median, print_table

    from posttrain.models.smollm2 import smollm2_135m_instruct

    path = arguments.model or str(smollm2_135m_instruct())
    names = ["posttrain:8"]
    if arguments.trl_python:
        names += [f"trl:{micro}" for micro in arguments.micro.split(",")]
    texts = pairs(arguments.rows * (arguments.rounds + 1), arguments.words)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as temporary:
        workers = {}
        for name in names:
            folder = Path(temporary) / name.replace(":", "_")
            workers[name] = Worker(name, path, folder, arguments, {"rows.json": json.dumps([arguments.rows, texts])})
        for round_number in range(arguments.rounds + 1):
            for name, worker in workers.items():
                step = worker.turn()
                if round_number:  # the first warms up
                    found[name].append(step)
        for worker in workers.values():
            worker.close()
    first = [step["step_s"] for step in found[names[0]]]
    table = []
    for name in names:
        seconds = [step["step_s"] for step in found[name]]
        update_s = [step["update_s"] for step in found[name]]
        ratios = sorted(theirs / own for own, theirs in zip(first, seconds, strict=True))
        tokens = [step["tokens"] for step in found[name]]
        table.append(
            [
                name.replace(":", ", micro-batch "),
                f"{median([count / s for count, s in zip(tokens, seconds, strict=True)]):.0f}",
                f"{median(seconds):.2f}",
                f"{median(update_s):.2f}",
                f"{median([s - u for s, u in zip(seconds, update_s, strict=True)]):.2f}",
                f"{median(ratios):.2f}x",
                f"{ratios[0]:.2f}-{ratios[-1]:.2f}x",
            ]
        )
    header = [
        "",
        "tokens/s",
        "s per update",
        "passes and optimizer",
        "the rest",
        "time / posttrain's",
        "lowest-highest",
    ]
    print_table(header, table)


def pairs(count: int, median_words: float) -> list[tuple[str, str]]:
    draw = random.Random(0)

    def text(words: float) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(max(1, min(400, round(words)))))

    lengths = [median_words * draw.lognormvariate(0.0, 0.8) for _ in range(count)]
    return [(f"{number}: {text(length / 2)}?", text(length)) for number, length in enumerate(lengths)]


def ours(path: str, folder: Path, given: list[Any], micro: int) -> None:
    rows, texts = given
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": asked, "response": said}) + "\n" for asked, said in texts))
    from posttrain.cli.process import prepare
    from posttrain.config import SftConfig

    config = SftConfig.model_validate(
        {
            "run": {"folder": str(folder / "run")},
            "model": {"path": path, "compute_dtype": "bfloat16"},
            "data": {
                "train_files": [str(data)],
                "sequences_per_step": rows,
                "max_tokens": MAX_TOKENS,
                "overlong": "truncate_right",
                "shuffle": False,
            },
            "policy": {"sequences_per_micro_batch_per_device": micro, "optimizer": {"lr": 1e-6}},
            "checkpoint": {"at_end": False},
            "tracking": {"trackers": ["turns"]},
        }
    )
    prepare(config)
    from posttrain.build.sft import sft_run
    from posttrain.registry import TRACKERS

    @TRACKERS.register("turns")
    class Turns:
        """A tracker that holds the run until it is its turn."""

        def begin(self, *_: object) -> None:
            say({})
            sys.stdin.readline()

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            say(
                {
                    "step_s": metrics["time/step_s"],
                    "update_s": metrics["time/update_s"],
                    "tokens": metrics["data/tokens"],
                }
            )
            sys.stdin.readline()

        def ignore(self, *_: object, **__: object) -> None:
            """phase, advance, message, close"""

        phase = advance = message = close = ignore

    sft_run(config)


def trl(path: str, folder: Path, given: list[Any], micro: int) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rows, texts = given
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(path)
    clock = {"start": 0.0, "update_s": 0.0, "tokens": 0.0}

    class Turns(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            say({})

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            sys.stdin.readline()
            clock.update(start=time.perf_counter(), update_s=0.0, tokens=0.0)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_s = time.perf_counter() - clock["start"]
            say({"step_s": step_s, "update_s": step_s, "tokens": clock["tokens"]})

    # Tokenised here, as ours is before its first step: the same ids, and the same ones learned.
    examples = []
    for asked, said in texts:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        response = [*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        ids = [*prompt, *response][:MAX_TOKENS]
        examples.append({"input_ids": ids, "completion_mask": ([0] * len(prompt) + [1] * len(response))[:MAX_TOKENS]})

    class Counted(SFTTrainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            mask = inputs.get("attention_mask")
            clock["tokens"] += float(mask.sum() if mask is not None else inputs["input_ids"].numel())
            return super().training_step(model, inputs, *rest)

    trainer = Counted(
        model=path,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(examples),
        args=SFTConfig(
            output_dir=str(folder),
            model_init_kwargs={"dtype": "bfloat16"},
            bf16=True,
            use_cpu=True,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=rows // micro,
            max_length=MAX_TOKENS,
            completion_only_loss=True,
            learning_rate=1e-6,
            gradient_checkpointing=False,
            max_steps=len(examples) // rows,
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        callbacks=[Turns()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
