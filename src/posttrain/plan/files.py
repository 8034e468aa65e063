"""Checks of the files that a run needs besides its data: model folders, the run folder, templates. Nothing is loaded."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Protocol

from posttrain.config import RunConfig, SftConfig, TrainingConfig
from posttrain.config.config_apart import overrides_of
from posttrain.config.judge import judge_field
from posttrain.config.model import ModelConfig
from posttrain.config.roles import needs_values
from posttrain.errors import ConfigError, Problem
from posttrain.libraries.remote import is_url, plain, problem_of
from posttrain.plan.model_files import (
    TOKENIZER_FILES,
    check_model,
    check_tokenizer,
    has_chat_template,
    holds_model,
    is_hub_id,
    settings,
)
from posttrain.plan.reward_model_files import head_problems
from posttrain.plan.rounding import rounding_problems

# What a run writes into its folder: files, and folders with a file for every so many steps.
OF_A_RUN = (
    "batches",
    "checkpoints",
    "code",
    "config.yaml",
    "exports",
    "metrics.jsonl",
    "profiles",
    "run.json",
    "samples",
    "timeline.jsonl",
    "validation",
)


class ModelUser(Protocol):
    """A configuration of a command that loads a model."""

    @property
    def model(self) -> ModelConfig: ...


def check_run_files(config: RunConfig) -> list[Problem]:
    """Check the folders of the model, reference, critic, reward model, tokenizer and run, and the chat template."""
    problems = check_model_files(config.model)
    if config.reference.path is not None and (config.loss.kl_coef > 0 or config.reward.kl.coef > 0):
        problems += check_model(config.reference.path, "reference.path", tokenizer=False)
    if config.critic.path is not None and needs_values(config):
        problems += check_model(config.critic.path, "critic.path", tokenizer=False)
    if config.reward.model is not None:
        problems += check_model(config.reward.model.path, "reward.model.path", tokenizer=True)
        problems += head_problems(config.reward.model)
    if config.reward.process is not None:
        for name in ("path", "reference_path"):
            if (path := getattr(config.reward.process, name)) is not None:
                problems += check_model(path, f"reward.process.{name}", tokenizer=True)
    for name, judge in config.reward.judges.items():
        problems += check_model(judge.path, f"{judge_field(name)}.path", tokenizer=True)
    if config.reward.served is not None:
        problems += check_model(config.reward.served.path, "reward.served.path", tokenizer=True)
    return problems + check_run_folders(config)


def check_run_folders(config: TrainingConfig) -> list[Problem]:
    """Check the folders that a training run writes to and resumes from, and the models of adapters on 4-bit weights."""
    problems = list(_check_folder(Path(config.folder), "run.folder"))
    if config.checkpoint.folder is not None and not (
        problems and Path(config.checkpoint.folder).is_relative_to(config.folder)
    ):
        problems += _check_folder(Path(config.checkpoint.folder), "checkpoint.folder")
    problems += rounding_problems(config)
    return [*problems, *_among_models(config), *_among_data(config), *_check_urls(config)]


def _among_models(config: TrainingConfig) -> Iterator[Problem]:
    """Report output folders inside a model folder that is read: their files would be taken for parts of the model."""
    models = [config.model.path, config.model.tokenizer_path]
    if isinstance(config, RunConfig):
        models += [config.reference.path, config.critic.path]
        process = config.reward.process
        models += [process.path, process.reference_path] if process else []
        reward = config.reward
        models += [each.path for each in (reward.model, reward.served, *reward.judges.values()) if each is not None]
    models += [teacher.path for teacher in config.distillation.teachers.values()]
    read = {Path(path).resolve(): path for path in models if path and Path(path).is_dir() and holds_model(Path(path))}
    places = {
        "run.folder": config.folder,
        "checkpoint.folder": config.checkpoint.folder,
        "checkpoint.export_folder": config.checkpoint.export_folder,
    }
    for field, place in places.items():
        if place is None:
            continue
        written = Path(place).resolve()
        for folder in [written, *written.parents]:
            if folder in read:
                where = "is" if folder == written else "lies in"
                what = (
                    f"{place} {where} the folder of the model {read[folder]}, and the run would write among its files"
                )
                yield Problem(what, fix=f"name another {field}", field=field)


def _among_data(config: TrainingConfig) -> Iterator[Problem]:
    """Report data files that the run would overwrite."""
    folder = Path(config.folder).resolve()
    for field in ("train_files", "validation_files"):
        for file in getattr(config.data, field):
            if is_url(file) or not (path := Path(file).resolve()).is_relative_to(folder):
                continue
            if path.relative_to(folder).parts[:1] in [(name,) for name in OF_A_RUN]:
                what = f"the run writes into {config.folder}, and {file} lies among what it writes there"
                yield Problem(what, fix=f"name another run.folder, or move {file}", field="run.folder")


def _check_urls(config: TrainingConfig) -> Iterator[Problem]:
    """Check the URL that checkpoints are uploaded to, without using the network."""
    start, target = config.run.resume_path, config.checkpoint.upload
    if start is not None and is_url(start):
        found: list[Problem | None] = [problem_of(start, "run.resume_path")]
    else:
        missing = start is not None and not Path(start).expanduser().is_dir()
        found = [Problem(f"there is no folder {start}", field="run.resume_path")] if missing else []
    if target is not None:
        found.append(problem_of(target, "checkpoint.upload"))
        own = config.checkpoint.folder or Path(config.folder) / "checkpoints"
        if plain(target.removeprefix("file://")) == plain(str(own)):
            what = f"{target} is where the run's own checkpoints are"
            found.append(Problem(what, fix="name a folder on another disk", field="checkpoint.upload"))
    yield from (problem for problem in found if problem is not None)


def check_model_files(model: ModelConfig) -> list[Problem]:
    """Check a model's folder, its tokenizer and its chat template."""
    problems = list(check_model(model.path, "model.path", tokenizer=model.tokenizer_path is None))
    if model.tokenizer_path is not None and not is_hub_id(model.tokenizer_path):
        problems += check_tokenizer(Path(model.tokenizer_path), "model.tokenizer_path")
    if model.chat_template_file is not None and not Path(model.chat_template_file).is_file():
        problems.append(Problem(f"there is no file {model.chat_template_file}", field="model.chat_template_file"))
    try:
        overrides_of(model)
    except ConfigError as error:
        problems += error.problems
    return problems


def check_chat_template(model: ModelConfig) -> list[Problem]:
    """Check that the tokenizer in a local folder has a chat template, which conversations are rendered with; hub ids are not
    checked."""
    folder = Path(model.tokenizer_path or model.path)
    named = model.chat_template is not None or model.chat_template_file is not None
    if named or not any((folder / name).is_file() for name in TOKENIZER_FILES) or has_chat_template(folder):
        return []
    fix = "name a Jinja file with model.chat_template_file, or use a model tuned for chat"
    return [Problem(f"the tokenizer of {folder} has no chat template", fix=fix, field="model.chat_template_file")]


def check_reads_images(
    model: ModelConfig, readable: Collection[str], fix: str, shown: str = "the prompts have images"
) -> list[Problem]:
    """Check that a model folder is of a kind (``model_type``) that reads images; hub ids are not checked. ``shown`` says where
    the images are."""
    saved = settings(Path(model.path).expanduser() / "config.json")
    if saved is None or (kind := saved.get("model_type")) in readable:
        return []
    what = f"{shown}, and the model at {model.path} ({kind}) reads text only"
    return [Problem(what, fix=fix, field="model.path")]


def check_sees_alike(config: RunConfig) -> list[Problem]:
    """Check that critic and reward model read images as the policy's processor prepares them: they are of its family. Hub ids are
    not checked."""
    reward = config.reward.model
    others = {
        "critic.path": config.critic.path if needs_values(config) else None,
        "reward.model.path": None if reward is None else reward.path,
    }
    policy = settings(Path(config.model.path).expanduser() / "config.json")
    problems = []
    for field, path in others.items():
        theirs = settings(Path(path).expanduser() / "config.json") if path is not None else None
        if policy is None or theirs is None or theirs.get("model_type") == policy.get("model_type"):
            continue
        kinds = policy.get("model_type"), theirs.get("model_type")
        what = f"the prompts have images, prepared for {kinds[0]}, and the model at {path} is {kinds[1]}"
        problems.append(Problem(what, fix="use a model of the policy's family", field=field))
    return problems


def check_output_file(path: str, field: str) -> list[Problem]:
    """Check that a file can be written, or created. Creates nothing."""
    if Path(path).is_dir():
        return [
            Problem(
                f"{path} is a folder, and a file is to be written", fix=f"name a file in it with {field}", field=field
            )
        ]
    return list(_check_folder(Path(path).absolute().parent, field))


def check_output_folder(path: str, field: str) -> list[Problem]:
    """Check that files can be written to a folder, or that it can be created. Creates nothing."""
    return list(_check_folder(Path(path), field))


def hub_models(config: ModelUser) -> dict[str, str]:
    """The models that a command takes from the hub: field -> hub id."""
    named: dict[str, str | None] = {
        "model.path": config.model.path,
        "model.tokenizer_path": config.model.tokenizer_path,
    }
    if isinstance(config, RunConfig | SftConfig):
        named |= {
            f"distillation.teachers.{name}.path": each.path for name, each in config.distillation.teachers.items()
        }
    if isinstance(config, RunConfig):
        if config.loss.kl_coef > 0 or config.reward.kl.coef > 0:
            named["reference.path"] = config.reference.path
        if needs_values(config):
            named["critic.path"] = config.critic.path
        if config.reward.model is not None:
            named["reward.model.path"] = config.reward.model.path
        if config.reward.served is not None:
            named["reward.served.path"] = config.reward.served.path
        named |= {f"{judge_field(name)}.path": judge.path for name, judge in config.reward.judges.items()}
    if (
        endpoint := getattr(config, "endpoint", None)
    ) is not None:  # of a server, whose class is imported with its command
        named["endpoint.beside"] = endpoint.beside
    return {field: path for field, path in named.items() if path is not None and is_hub_id(path)}


def _check_folder(folder: Path, field: str) -> Iterator[Problem]:
    """Check that the run can write to a folder, or create it. Creates nothing."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    fix = f"name another {field}"
    if not there.is_dir():
        yield Problem(f"{there} is a file, and a run writes into a folder", fix=fix, field=field)
    elif not os.access(there, os.W_OK | os.X_OK):
        yield Problem(f"nothing can be written into {there}: permission denied", fix=fix, field=field)
