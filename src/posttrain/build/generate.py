"""Generate a file of responses from a GenerateConfig."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from posttrain.backends.runtime.inprocess import start_sampler
from posttrain.build.fits import check_rows_fit
from posttrain.build.generation_copies import copies_of, sample_on_copies
from posttrain.build.plans import sampling_params
from posttrain.config.generate import GenerateConfig
from posttrain.config.shown import shown
from posttrain.data.generation import load_generation
from posttrain.errors import ConfigError, Problem, RunInterrupted
from posttrain.loops import generate
from posttrain.loops.by_parts import OnWork
from posttrain.models.loading import import_modules, load_tokenizer
from posttrain.models.processors import load_processor
from posttrain.run.lock import InUse, only_trainer
from posttrain.run.parts import Parts, folder_hashes, hashes, parts_folder
from posttrain.run.stopping import GraceOver, StopSignal

OnPlan = Callable[[int, int, list[str]], None]  # rows, rows that are done already, and what a person should know


def generate_run(config: GenerateConfig, *, overwrite: bool = False, on_plan: OnPlan, on_work: OnWork) -> bool:
    """Sample every row that is not done yet and write the file. Returns whether there was anything to do.

    Args: ``overwrite`` starts over, whatever is there.
    Raises: RequestError for what can be seen before the first row; RunInterrupted when a signal asked to stop.
    """
    out = Path(config.output.file)
    try:
        return _generate(config, out, overwrite=overwrite, on_plan=on_plan, on_work=on_work)
    finally:
        with suppress(OSError):  # rows are kept in it
            parts_folder(out).rmdir()


def _generate(config: GenerateConfig, out: Path, *, overwrite: bool, on_plan: OnPlan, on_work: OnWork) -> bool:
    with ExitStack() as stack:
        try:
            notes = stack.enter_context(only_trainer(parts_folder(out)))
        except InUse:
            fix = "wait for it, or name another output.file"
            problem = Problem(f"another process is writing {out}", fix=fix, field="output.file")
            raise ConfigError(problem) from None
        import_modules(config.model.external_modules)
        tokenizer = load_tokenizer(config.model)
        rows = load_generation(config.data, tokenizer, load_processor(config.model, tokenizer, config.data))
        check_rows_fit(config, rows.prompts)
        request = request_of(config)
        parts = Parts(
            out,
            request,
            column=config.output.column,
            rows=len(rows.prompts),
            rows_per_part=config.output.rows_per_part,
        )
        if overwrite:
            parts.discard()
        if parts.finished:
            parts.tidy()
            on_plan(len(rows.prompts), len(rows.prompts), [f"{out} is complete already; --overwrite makes it again"])
            return False
        parts.check()
        over_machines = config.placement.nodes > 1 and not config.rollout.endpoints
        copies = 1 if over_machines else copies_of(config)
        if over_machines:
            where = f"{config.placement.devices} devices of {config.placement.nodes} machines"
        elif copies > 1:
            where = f"{copies} copies of the sampler, a process each"
        else:
            engine, device = start_sampler(config, tokenizer)
            where = str(device)
        parts.begin()
        missing = sum(len(parts.rows_of(part)) for part in parts.missing())
        on_plan(len(rows.prompts), len(rows.prompts) - missing, [*notes, f"sampling on {where}", *rows.notes])
        sampling = sampling_params(config.rollout, config.rollout.max_response_tokens, config.run.seed)
        try:
            with StopSignal() as stop:
                if over_machines:
                    # Only a cluster needs Ray
                    from posttrain.build.generation_machines import sample_on_machines

                    sample_on_machines(config, parts, request, stop=stop, on_work=on_work)
                elif copies > 1:
                    sample_on_copies(config, copies, parts, request, stop=stop, on_work=on_work)
                else:
                    generate.run(engine, rows.prompts, sampling, parts, stop=stop, on_work=on_work)
        except GraceOver:
            raise RunInterrupted(
                f"stopped in the middle of a part, which is sampled again; finished rows are kept in {parts.folder}"
            ) from None
        parts.finish(rows.table)
    return True


def request_of(config: GenerateConfig) -> dict[str, Any]:
    """Everything that the responses depend on: the settings, and the content of the files and of the model's folder (of a
    model of the hub, its name)."""
    settings = {name: section for name, section in shown(config).items() if name != "placement"}
    settings["output"] = {name: value for name, value in settings["output"].items() if name != "file"}
    folder = Path(config.model.path)
    return {
        "config": settings,
        "data.files": hashes([Path(file) for file in config.data.files]),
        "model.path": folder_hashes(folder) if folder.is_dir() else {},
    }
