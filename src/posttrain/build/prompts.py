"""The prompts of a run, and the order in which it draws them: from files, or by classes of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from posttrain.config import RunConfig
from posttrain.config.data import DataConfig
from posttrain.config.roles import draws_no_prompts, reads_references
from posttrain.data.curriculum import CurriculumLoader
from posttrain.data.domains import DomainLoader
from posttrain.data.episodes import training_episodes
from posttrain.data.images import PromptImageReader
from posttrain.data.loader import ShuffledLoader
from posttrain.data.own_order import SamplerLoader
from posttrain.data.own_prompts import load_own_prompts, sampler_rows, start
from posttrain.data.prompts import PromptSet, What, load_prompts
from posttrain.errors import ConfigError, DataError, Problem
from posttrain.interfaces.loader import PromptLoader
from posttrain.processes.child import Child
from posttrain.records.prompts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_prompts(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: PromptImageReader | None,
    *,
    what: What,
    limit: int | None = None,
) -> PromptSet:
    """Read the prompts of the training or validation files. Raises: RequestError."""
    data = config.data
    files = data.validation_files if what == "validation" else data.train_files
    if data.dataset_class_file is None:
        return load_prompts(
            files,
            data,
            tokenizer,
            what=what,
            limit=limit,
            processor=processor,
            references=reads_references(config),
        )
    _refuse_images(processor)
    own = load_own_prompts(files, data, config.model, tokenizer, what=what)
    own.child.close()
    return own.prompts


def training_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, processor: PromptImageReader | None, open_ones: ExitStack
) -> tuple[PromptSet, Child | None]:
    """Read the prompts that a run trains on; one without, which only validates, has its held-out ones.

    Returns: them, and the process of a sampler class, which ``open_ones`` closes; None without one.
    Raises: RequestError.
    """
    data = config.data
    if draws_no_prompts(config):
        held_out = read_prompts(config, tokenizer, processor, what="validation").prompts
        # As many as a step has, of which none is drawn
        return PromptSet.generated(held_out * -(-data.prompts_per_step // max(len(held_out), 1))), None
    if config.environment.train_episodes is not None:
        return PromptSet.generated(training_episodes(config.environment)), None
    if data.sampler_class_file is None:
        return read_prompts(config, tokenizer, processor, what="training"), None
    if data.dataset_class_file is None:
        training = read_prompts(config, tokenizer, processor, what="training")
        rows = sampler_rows(training.prompts[: data.max_prompts])
        child = start((), data, config.model, sampler=True, rows=rows)
        open_ones.callback(child.close)
        return training, child
    _refuse_images(processor)
    own = load_own_prompts(data.train_files, data, config.model, tokenizer, what="training", sampler=True)
    open_ones.callback(own.child.close)
    if own.prompts.dropped:
        what = f"{own.prompts.dropped} rows of {data.dataset_class_name} are too long and left out, and "
        what += f"{data.sampler_class_name} numbers them all"
        fix = "leave them out in the class, or raise data.max_prompt_tokens"
        raise DataError(Problem(what, fix=fix, field="data.overlong_prompts"))
    return own.prompts, own.child


def prompt_loader(
    data: DataConfig, prompts: Sequence[Prompt], seed: int, child: Child | None = None, pad_id: int = 0
) -> PromptLoader:
    """Return the loader of a run: of all rows as they come, of domains with their parts of every step, by a
    curriculum, or in the order of a
    sampler class. Raises: ConfigError."""
    if child is not None:
        name = f"{data.sampler_class_name} of {data.sampler_class_file}"
        return SamplerLoader(prompts, data.prompts_per_step, child, name=name, pad_id=pad_id)
    if data.curriculum is not None:
        return CurriculumLoader(prompts, data.prompts_per_step, data.curriculum, seed=seed, shuffle=data.shuffle)
    if data.domains:
        return DomainLoader(prompts, data.domains, seed=seed, shuffle=data.shuffle)
    return ShuffledLoader(prompts, data.prompts_per_step, seed=seed, shuffle=data.shuffle)


def _refuse_images(processor: PromptImageReader | None) -> None:
    if processor is not None:
        what = "a dataset class of your own gives text, and this is a vision model"
        fix = "name the files alone, whose images are read from data.image_column"
        raise ConfigError(Problem(what, fix=fix, field="data.dataset_class_file"))
