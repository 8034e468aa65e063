"""A trial of memory and speed: a few steps on made-up rows of full length, SkyRL's program full_context."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.skyrl.rules.environment import plays
from posttrain.dialects.skyrl.rules.look import get
from posttrain.dialects.trees import value_at
from posttrain.dialects.words import OUR_SECTION
from posttrain.libraries.skyrl_names import FULL_LENGTH

STEPS = "trainer.num_dummy_steps"
_OF_DATA = (
    "data.train_data", "data.val_data", "environment.env_class", "trainer.epochs", "trainer.eval_interval",
    "trainer.eval_before_train", "trainer.ckpt_interval", "trainer.hf_save_interval", "trainer.resume_mode",
)  # fmt: skip


def is_trial(keys: Reader) -> bool:
    """Return True where the program is that of SkyRL's trials, whose class of prompts its launch names."""
    return bool(value_at(keys.values, f"{OUR_SECTION}.data.dataset_class_name") == FULL_LENGTH)


def trial(keys: Reader) -> dict[str, Any]:
    """Return the fields of a trial, which reads no data and keeps nothing; none for another run.

    SkyRL makes responses up, too; here the sampler writes them up to their limit, so its memory and speed are tried as well.
    """
    steps = get(keys, STEPS)
    if not is_trial(keys):
        if steps is not None:
            keys.ignore(STEPS, "SkyRL's program full_context alone reads it")
        return {}
    if plays(keys):
        what = "a trial on made-up rows has one turn, and this run plays episodes"
        keys.problem(what, key=STEPS, fix="use generator.max_turns=1 and an environment that scores, such as gsm8k")
    if steps is None or steps < 1:
        keys.problem(f"{STEPS} must be at least 1, not {steps}", key=STEPS, fix=f"use {STEPS}=5")
        steps = 1
    for key in _OF_DATA:
        keys.ignore(key, "a trial makes its rows up and keeps nothing")
    keys.warn(
        f"{STEPS}={steps} steps on made-up prompts, with responses of full length scored by chance: nothing is learned"
    )
    return {
        "data.train_files": [],
        "data.validation_files": [],
        "data.extra_columns": [],
        "data.dataset_class_options": {
            "rows": keys["trainer.train_batch_size"],
            "tokens": keys["trainer.max_prompt_length"],
        },
        "reward.terms": [{"name": "chance"}],
        "rollout.ignore_eos": True,
        "run.total_steps": steps,
        "run.resume": "never",
        "validation.every_steps": None,
        "validation.before_training": False,
        "checkpoint.every_steps": None,
        "checkpoint.at_end": False,
        "checkpoint.export_every_steps": None,
    }
