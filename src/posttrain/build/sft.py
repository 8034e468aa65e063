"""From an SftConfig to a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from posttrain.backends.tracking.jsonl import Jsonl
from posttrain.build.train import profile_plan, tracker
from posttrain.config.roles import runtime_of
from posttrain.config.sft import SftConfig
from posttrain.data.loader import ShuffledLoader
from posttrain.data.own_dataset import load_own_texts
from posttrain.data.sft import TextSet, What, load_texts
from posttrain.errors import ConfigError, Problem
from posttrain.loops import sft
from posttrain.models.loading import import_modules, load_model_config, load_tokenizer, override_config, positions_of
from posttrain.plan.sft import plan_sft
from posttrain.records.plans import SftBatchPlan
from posttrain.records.texts import Text
from posttrain.registry import RUNTIMES
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.frame import begin_run, contents, retention, under_way
from posttrain.run.lock import only_trainer
from posttrain.run.run_folder import RunFolder
from posttrain.run.trackers import Trackers


def sft_run(config: SftConfig, *, allow_config_change: bool = False) -> Path:
    """Run it, from the data to the last checkpoint. Returns the run folder.

    Args: allow_config_change goes on with a run although something has changed that its numbers depend on.
    Raises: RequestError for what can be seen before the first step; RunStopped and RunInterrupted as the loop says.
    """
    folder = RunFolder(config)
    checkpoints = Checkpoints(
        folder.checkpoints, retention(config.checkpoint), folder.origin, contents(config.checkpoint)
    )
    with only_trainer(folder.path, *([folder.checkpoints] if config.checkpoint.folder else [])) as notes:
        folder.check(holds_checkpoint=checkpoints.exist(), allow_config_change=allow_config_change)
        return _train(config, folder, checkpoints, notes)


def _train(config: SftConfig, folder: RunFolder, checkpoints: Checkpoints, notes: list[str]) -> Path:
    import_modules(config.model.external_modules)
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
    loader = ShuffledLoader(
        texts, config.data.sequences_per_step, seed=order_seed, shuffle=config.data.shuffle, kind="sequences"
    )
    check_fit(config, [*texts, *held_out])
    plan = run_plan(config, batches, held_out)
    trackers = Trackers([Jsonl(folder.path)], [tracker(name, folder.path) for name in config.tracking.trackers])
    runtime = RUNTIMES.get(runtime_of(config.placement))()
    with closing(runtime.start_sft(config, batches, tokenizer)) as learner:
        first_step = checkpoints.restore(learner.policy, loader, trackers.message) + 1
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
        )
        with under_way(config, folder, checkpoints, trackers) as stop:
            sft.run(
                learner.policy,
                loader,
                plan,
                first_step=first_step,
                folder=folder.path,
                checkpoints=checkpoints,
                trackers=trackers,
                notices=learner.notices,
                stop=stop,
                workers_profiler=learner.profiler,
            )
    return folder.path


def texts_of(config: SftConfig, tokenizer: PreTrainedTokenizerBase, what: What) -> TextSet:
    """The texts of one of the datasets, read here or by a class of the user's."""
    files = config.data.train_files if what == "training" else config.data.validation_files
    load = load_texts if config.data.dataset_class_file is None else load_own_texts
    return load(files, config.data, tokenizer, what=what)


def run_plan(config: SftConfig, batches: SftBatchPlan, validation: Sequence[Text]) -> sft.SftPlan:
    """What the loop is told, from the configuration."""
    assert batches.total_steps is not None and batches.steps_per_epoch is not None

    def cadence(every: int | None, each_epoch: bool) -> tuple[int, ...]:
        return tuple(steps for steps in (every, batches.steps_per_epoch if each_epoch else None) if steps is not None)

    return sft.SftPlan(
        total_steps=batches.total_steps,
        validation=validation,
        max_skipped_steps=config.run.max_skipped_steps,
        validate_every=cadence(config.validation.every_steps, config.validation.each_epoch),
        validate_before=config.validation.before_training,
        validate_after=config.validation.after_training,
        save_every=cadence(config.checkpoint.every_steps, config.checkpoint.each_epoch),
        save_at_end=config.checkpoint.at_end,
        save_in_background=config.checkpoint.background,
        export_every=config.checkpoint.export_every_steps,
        export_folder=Path(config.checkpoint.export_folder or Path(config.folder) / "exports"),
        profile=profile_plan(config.profiling),
    )


def check_fit(config: SftConfig, texts: Sequence[Text]) -> None:
    """Whether the model knows the tokens of the texts and has positions for them. Raises: ConfigError."""
    whole = load_model_config(config.model.path, config.model.trust_remote_code)
    override_config(whole, config.model.config_overrides)
    model = whole.get_text_config()
    problems = []
    highest = max(int(text.token_ids.max()) for text in texts)
    if highest >= model.vocab_size:
        what = f"the tokenizer makes token id {highest}, and the model knows {model.vocab_size} tokens"
        field = "model.tokenizer_path" if config.model.tokenizer_path else "model.path"
        problems.append(Problem(what, fix="use the model's own tokenizer", field=field))
    longest, positions = max(len(text.token_ids) for text in texts), positions_of(model)
    if longest > positions:
        what = f"the longest row ({longest} tokens) does not fit into the {positions:.0f} positions of the model"
        fix = f"use data.max_tokens={positions:.0f} with data.overlong"
        problems.append(Problem(what, fix=fix, field="data.max_tokens"))
    if problems:
        raise ConfigError(problems)
