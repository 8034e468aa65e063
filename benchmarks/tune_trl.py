"""TRL's side of benchmarks/tune.py, which starts it with a Python that has TRL: one trainer, a step per turn."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from step import say
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer


def train(
    path: str, folder: Path, run: Mapping[str, Any], dtype: str, *, learning_rate: float, pad: str, max_tokens: int
) -> None:
    """Train with the rows that posttrain tokenized. Losses are those that TRL reports of a step."""
    method, micro = run["method"], run["sequences"] if run["method"] == "kto" else run["micro"]
    per_device = micro // 2 if method in ("dpo", "reward_model") else micro
    rows_per_step = run["sequences"] // (micro // per_device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    clock = Clock()
    settings = {
        "output_dir": str(folder),
        "model_init_kwargs": {"dtype": dtype},
        "bf16": True,
        "use_cpu": True,
        "seed": 0,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": rows_per_step // per_device,
        "max_length": max_tokens,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "max_steps": run["steps"],
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
    }
    tokenizer = AutoTokenizer.from_pretrained(path)
    if method == "distill":
        trainer = distilling(path, run, tokenizer, settings, clock)
    else:
        kinds = {
            "dpo": (DPOTrainer, DPOConfig),
            "kto": (KTOTrainer, KTOConfig),
            "reward_model": (RewardTrainer, RewardConfig),
        }
        kind, config = kinds[method]
        if method == "reward_model":
            settings["pad_token"] = pad
        trainer = read(kind)(
            model=path,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(tokenized(method, run["ids"], per_device)),
            args=config(**settings),
            callbacks=[clock],
        )
    trainer.train()


class Clock(TrainerCallback):
    """Waits for its turn before every step, and answers with the step's time and loss."""

    step_s = cpu_s = start = cpu_start = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        say({})

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        sys.stdin.readline()
        self.start, self.cpu_start = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.step_s, self.cpu_s = time.perf_counter() - self.start, time.process_time() - self.cpu_start

    def on_log(self, *_: Any, logs: Mapping[str, float], **__: Any) -> None:
        if "loss" in logs:
            say({"step_s": self.step_s, "cpu_s": self.cpu_s, "loss": float(logs["loss"])})


def read(kind: Any) -> Any:
    """Return the trainer without its own tokenization: the rows are token ids."""
    return type(kind.__name__, (kind,), {"_prepare_dataset": lambda self, dataset, *_, **__: dataset})


def tokenized(method: str, rows: list[dict[str, Any]], micro: int) -> list[dict[str, Any]]:
    """Return the rows with the columns that the trainer's collator reads."""
    if method == "dpo":
        return [
            {"prompt_ids": row["prompt"], "chosen_ids": row["completions"][0], "rejected_ids": row["completions"][1]}
            for row in rows
        ]
    if method == "reward_model":
        sides = ("chosen_ids", "rejected_ids")
        return [
            {name: row["prompt"] + ids for name, ids in zip(sides, row["completions"], strict=True)} for row in rows
        ]
    found = []
    for start in range(0, len(rows), micro):
        part = rows[start : start + micro]
        for number, row in enumerate(part):
            other = part[(number + 1) % len(part)]
            ids = {"prompt_ids": row["prompt"], "completion_ids": row["completions"][0]}
            found.append(ids | {"KL_completion_ids": other["completions"][0], "label": row["label"]})
    return found


def distilling(path: str, run: Mapping[str, Any], tokenizer: Any, settings: dict[str, Any], clock: Clock) -> Any:
    """Return a GKDTrainer on the rows' own completions (lmbda 0)."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        prompts = [torch.tensor(row["prompt"]) for row in rows]
        texts = [torch.tensor(row["prompt"] + row["completions"][0]) for row in rows]
        labels = [
            torch.cat([torch.full_like(prompt, -100), text[len(prompt) :]])
            for prompt, text in zip(prompts, texts, strict=True)
        ]

        def padded(parts: list[Any], value: int) -> Any:
            return pad_sequence(parts, batch_first=True, padding_value=value)

        return {
            "input_ids": padded(texts, tokenizer.pad_token_id),
            "attention_mask": padded([torch.ones_like(text) for text in texts], 0),
            "labels": padded(labels, -100),
            "prompts": padded(prompts, tokenizer.pad_token_id),
            "prompt_attention_mask": padded([torch.ones_like(prompt) for prompt in prompts], 0),
        }

    dtype = settings["model_init_kwargs"]["dtype"]
    return GKDTrainer(
        model=path,
        teacher_model=AutoModelForCausalLM.from_pretrained(run["teacher"], dtype=dtype),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(run["ids"]),
        data_collator=collate,
        args=GKDConfig(**settings, lmbda=0.0, beta=0.5, temperature=1.0),
        callbacks=[clock],
    )
