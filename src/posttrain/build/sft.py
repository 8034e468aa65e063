"""Run supervised fine-tuning from an SftConfig."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from posttrain.build.fits import check_texts_fit
from posttrain.build.plans import sft_plan, text_loss_plan
from posttrain.build.runs import as_written, open_run, run_trackers, say_nothing
from posttrain.config.roles import runtime_of
from posttrain.config.sft import SftConfig, SftDataConfig
from posttrain.data.loader import ShuffledLoader
from posttrain.data.own_dataset import load_own_texts
from posttrain.data.sft import TextSet, What, load_texts
from posttrain.data.weighted_loader import WeightedLoader
from posttrain.errors import ConfigError
from posttrain.loops import sft
from posttrain.models.loading import import_modules, load_tokenizer
from posttrain.plan.sft import plan_sft
from posttrain.records.texts import Text
from posttrain.registry import RUNTIMES
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.lifetime import begin_run, under_way
from posttrain.run.progress import Progress
from posttrain.run.run_folder import RunFolder


def sft_run(
    config: SftConfig,
    *,
    allow_config_change: bool = False,
    start_over: bool = False,
    say: Callable[[str], None] = say_nothing,
    in_words: Callable[[str], str] = as_written,
) -> Path:
    """Run it, from the data to the last checkpoint. Returns the run folder.

    Args: allow_config_change resumes a run although a setting has changed that its numbers depend on; start_over begins at the
        first step where all checkpoints of a run are damaged or gone; say receives what is being loaded, before the trackers
        of the run are open; in_words replaces the names of fields in the run's messages by the user's.
    Raises: RequestError for what can be seen before the first step; RunStopped and RunInterrupted as the loop says.
    """
    opened = open_run(config, allow_config_change=allow_config_change, start_over=start_over)
    with opened as (folder, checkpoints, notes):
        return _train(config, folder, checkpoints, notes, say, in_words)


def _train(
    config: SftConfig,
    folder: RunFolder,
    checkpoints: Checkpoints,
    notes: list[str],
    say: Callable[[str], None],
    in_words: Callable[[str], str],
) -> Path:
    import_modules(config.model.external_modules)
    say("loading tokenizer and data")
    tokenizer = load_tokenizer(config.model)
    training = texts_of(config, tokenizer, "training")
    validation = (
        texts_of(config, tokenizer, "validation") if config.data.validation_files else TextSet(texts=[], rows=0)
    )
    texts, held_out = training.texts[: config.data.max_rows], validation.texts[: config.validation.max_rows]
    batches, problems = plan_sft(config, len(texts))
    if batches is None:
        raise ConfigError(problems)
    order_seed = config.run.seed if config.data.seed is None else config.data.seed
    loader = _loader(config.data, texts, order_seed)
    check_texts_fit(config, [*texts, *held_out])
    plan = sft_plan(config, batches, validates=bool(held_out))
    trackers = run_trackers(config.tracking, folder.path, in_words)
    say(f"loading model {config.model.path}")
    runtime = RUNTIMES.get(runtime_of(config.placement))()
    with closing(runtime.start_sft(config, batches, tokenizer)) as learner:
        progress = Progress(policy=learner.policy, loader=loader)
        first_step = checkpoints.restore(progress, trackers.message) + 1
        about_data = [*training.notes("training"), *validation.notes("validation")]
        begin_run(
            config,
            folder,
            checkpoints,
            trackers,
            first_step=first_step,
            total_steps=plan.total_steps,
            device=learner.device,
            notes=[*notes, *about_data, *learner.notes],
            saved_bytes=checkpoints.bytes_of(progress.engines.values()),
            save_steps=plan.save_steps(first_step),
        )
        with under_way(config, folder, checkpoints, trackers, first_step) as run:
            sft.run(learner, loader, held_out, progress, plan, run, text_loss_plan(config))
    return folder.path


def _loader(data: SftDataConfig, texts: Sequence[Text], seed: int) -> ShuffledLoader[Text]:
    if data.source_weights:
        return WeightedLoader(texts, data.sequences_per_step, data.source_weights, seed=seed)
    return ShuffledLoader(texts, data.sequences_per_step, seed=seed, shuffle=data.shuffle, kind="sequences")


def texts_of(config: SftConfig, tokenizer: PreTrainedTokenizerBase, what: What) -> TextSet:
    """The texts of one of the datasets, read here or by a class of the user's."""
    files = config.data.train_files if what == "training" else config.data.validation_files
    load = load_texts if config.data.dataset_class_file is None else load_own_texts
    found = load(files, config.data, tokenizer, what=what)
    if config.distillation.used and config.distillation.on_prompts:
        return replace(found, texts=[text.with_prompt() for text in found.texts])
    return found
