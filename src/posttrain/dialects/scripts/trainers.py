"""Trainers that launch scripts start: the module or program, its dialect, and the file that it reads by default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.dialects.scripts.asks import Ask
from posttrain.dialects.scripts.recipes import recipe_of

# The peers' own entry points, as modules.
ENTRY_POINTS = {
    "verl.trainer.main_ppo": "verl",
    "verl.trainer.fsdp_sft_trainer": "verl",
    "verl.trainer.sft_trainer": "verl",
    "verl.trainer.main_generation": "verl",
    "verl.trainer.main_generation_server": "verl",
    "verl.trainer.main_eval": "verl",
    "verl.experimental.fully_async_policy.fully_async_main": "verl",
    "recipe.fully_async_policy.fully_async_main": "verl",
    "verl.experimental.one_step_off_policy.main_ppo": "verl",
    "recipe.one_step_off_policy.main_ppo": "verl",
    "skyrl_train.entrypoints.main_base": "skyrl",
    "skyrl.train.entrypoints.main_base": "skyrl",
    "skyrl.train.main_sft": "skyrl",
    "skyrl_train.entrypoints.main_generate": "skyrl",
    "skyrl.train.entrypoints.main_generate": "skyrl",
    "examples.algorithms.dapo.main_dapo": "skyrl",
    "examples.train.algorithms.dapo.main_dapo": "skyrl",
    "examples.fully_async.main_fully_async": "skyrl",
    "examples.fully_async.main_async": "skyrl",
    "examples.train.fully_async.main_fully_async": "skyrl",
    "examples.train.algorithms.dapo.main_dapo_fully_async": "skyrl",
    "examples.on_policy_distillation.main_on_policy_distill": "skyrl",
    "examples.train.on_policy_distillation.main_on_policy_distill": "skyrl",
    "examples.async.main_async": "skyrl",
    "examples.train.async.main_async": "skyrl",
}
# Responses to the validation prompts, by the sampler alone
GENERATES = (
    "+posttrain.validation.only=true",
    "++trainer.eval_before_train=true",
    "++trainer.placement.colocate_all=false",
)
# SkyRL's programs that start another loop than its base, and the key that asks for it: ours, where none of theirs does.
_ASKS = {
    re.compile(r"(?!.*\bfully_async\.)(?:\w+\.)*main_async"): ("+posttrain.asynchronous.mode=one_step",),
    re.compile(r"(?:\w+\.)*(?:main_(?:\w+_)?fully_async(?:_sim)?|fully_async\.main_async)"): (
        "++trainer.fully_async.enabled=true",
    ),
    re.compile(r"(?:\w+\.)*entrypoints\.main_generate"): GENERATES,
}
# The file an entry point starts from, where a script names no other.
BASE_FILES = {
    "verl.trainer.main_ppo": "ppo_trainer",
    "verl.trainer.fsdp_sft_trainer": "sft_trainer",
    "verl.trainer.sft_trainer": "sft_trainer_engine",
    "verl.trainer.main_generation": "generation",
    "verl.trainer.main_generation_server": "generation",
    "verl.trainer.main_eval": "evaluation",
}
# Programs that take the keys of ppo_trainer, and whose entry has others here.
RENAMED = {
    "verl.trainer.main_generation_server": {
        "actor_rollout_ref.model": "model",
        "actor_rollout_ref.rollout.n": "data.n_samples",
        "actor_rollout_ref.rollout": "rollout",
        "data.train_files": "data.path",
    },
}
# Values of ppo_trainer that the file of the entry has otherwise.
HOLDS = {
    "verl.trainer.main_generation_server": (
        "data.n_samples=1",
        "rollout.top_k=-1",
        "rollout.top_p=1",
        "rollout.prompt_length=512",
        "rollout.response_length=512",
        "rollout.tensor_model_parallel_size=2",
    ),
}
# Programs of a third party that start from verl's own file: verl_tool.trainer.main_ppo, verl.trainer.main_ppo_format
_OWN_PROGRAMS = re.compile(r"(?:\w+\.)+(main_ppo|main_generation|main_eval|fsdp_sft_trainer)(?:_\w+)?")
# A verl recipe's main: recipe.dapo.main_dapo, recipe/prime/main_prime.py
_RECIPES = re.compile(r"(?:\w+\.)*recipe\.(?:\w+\.)*main_\w+")
# SkyRL's examples: examples.train.search.main_search, integrations.verifiers.entrypoints.main_verifiers
_SKYRL = re.compile(r"(?:examples|integrations|skyrl\w*)\.(?:\w+\.)*main_\w+")
_ROLL = re.compile(r"(?:\w+\.)*start_\w+_pipeline(?:_\w+)?")


def keys_asked_by(trainer: Trainer) -> list[str]:
    """Return the overrides that stand for the loop that a program starts; before its key SkyRL had the program alone."""
    found = [key for program, keys in _ASKS.items() for key in keys if program.fullmatch(trainer.module)]
    return found if trainer.dialect == "skyrl" else []


def entry_of(module: str) -> str:
    """Return the command that a trainer's module is for; "" where its file decides."""
    name = module.rpartition(".")[2]
    if name.startswith("main_generat"):
        return "generate"
    if name == "main_eval":
        return "evaluate"
    return "sft" if "sft" in name else "" if module == "roll" else "train"


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer that a word of a command starts."""

    module: str  # the peer's own entry point
    dialect: str
    written: str  # the module as the script names it, in dots
    # Of a program of the user's own: the parts that it replaces, why it is refused, and overrides that say the same as its code
    notes: tuple[str, ...] = ()
    refused: str = ""
    instead: str = ""  # the fix of refused, where naming the peer's own entry point is none
    adds: tuple[str, ...] = ()
    asks: tuple[Ask, ...] = ()  # differences that a run needs confirmed by name, each in own_keys by its field
    # Options that the program reads itself: True for one with a value
    options: Mapping[str, bool] = field(default_factory=dict)


def trainer_of(word: str) -> Trainer | None:
    """The trainer that a word of a command starts, a module or a program's file; None for another word."""
    if "=" in word or "\0" in word or not re.fullmatch(r"[\w./-]+", word):
        return None
    written = word.removeprefix("./").removesuffix(".py").strip("/").replace("/", ".")
    for module, dialect in ENTRY_POINTS.items():
        if written == module or written.endswith(f".{module}"):
            return Trainer(module, dialect, written)
    own = _OWN_PROGRAMS.fullmatch(written)
    if own is not None:
        return Trainer(f"verl.trainer.{own[1]}", "verl", written)
    if _RECIPES.fullmatch(written) or recipe_of(written) is not None:
        return Trainer("verl.trainer.main_ppo", "verl", written)
    if _SKYRL.fullmatch(written):
        return Trainer("skyrl_train.entrypoints.main_base", "skyrl", written)
    return Trainer("roll", "roll", written) if _ROLL.fullmatch(written) else None
