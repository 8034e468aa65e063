"""Evaluate models in the environments of a run's configuration."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.build.episodes import EpisodesRequest, OnPlan, play_episodes, read_episodes
from posttrain.config import RunConfig
from posttrain.config.evaluate import MetricsConfig
from posttrain.config.shown import shown
from posttrain.libraries.folders import make_folder
from posttrain.loops.by_parts import OnWork
from posttrain.report.evaluation import write_evaluation_report
from posttrain.run.checkpoint_folders import PREFIX, resolve_checkpoint
from posttrain.run.evaluation import SourceResult, results_json, source_results, write_evaluation
from posttrain.run.export import export_checkpoint, find_shards

EPISODES = "episodes.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """Models to evaluate, each in a folder of its own where there are several."""

    config: RunConfig
    folder: Path
    models: Mapping[str, str]  # name -> model folder, checkpoint, run folder, or model of the hub
    metrics: MetricsConfig
    by_score: bool  # right is a score of metrics.pass_score, even where environments report success
    training: bool = False
    rows_per_part: int = 32
    overwrite: bool = False


def evaluate_episodes(
    request: EvaluationRequest, *, begin: Callable[[str], tuple[OnPlan, OnWork]]
) -> dict[str, list[SourceResult]]:
    """Play, score and measure the episodes of every model, and write one report about all. Returns: results by the model's name.

    Args: ``begin`` gets a model's name, and gives what hears of its progress.
    Raises: as ``play_episodes``.
    """
    make_folder(request.folder)
    results, folders = {}, []
    for name, model in request.models.items():
        folder = request.folder / name if len(request.models) > 1 else request.folder
        make_folder(folder)
        folders.append(folder)
        on_plan, on_work = begin(name)
        results[name] = _evaluate(request, name, model, folder, on_plan, on_work)
    write_evaluation_report(folders, request.folder / "report.html")
    return results


def _evaluate(
    request: EvaluationRequest, name: str, model: str, folder: Path, on_plan: OnPlan, on_work: OnWork
) -> list[SourceResult]:
    path = model_folder(Path(model).expanduser(), folder / "model", again=request.overwrite) or model
    config = request.config.model_copy(update={"model": request.config.model.model_copy(update={"path": str(path)})})
    out = folder / EPISODES
    play_episodes(
        EpisodesRequest(
            config=config,
            out=out,
            training=request.training,
            rows_per_part=request.rows_per_part,
            overwrite=request.overwrite,
        ),
        on_plan=on_plan,
        on_work=on_work,
    )
    scored, metrics = read_episodes(out), request.metrics
    results = source_results(
        scored,
        pass_score=metrics.pass_score if request.by_score else None,
        draws=metrics.bootstrap_draws,
        confidence=metrics.confidence,
        seed=config.run.seed,
    )
    whole = shown(config)
    settings = {
        **metrics.model_dump(mode="json"),
        "seed": config.run.seed,
        "model": model,
        "rows": "training" if request.training else "validation",
        "environment": whole["environment"],
        "sampling": whole["rollout" if request.training else "validation"],
        "reward": {"terms": whole["reward"]["terms"]},
    }
    if not request.by_score:
        settings["pass_score"] = None
    write_evaluation(folder, results_json(name, _files(config, training=request.training), results, settings), scored)
    return results


def _files(config: RunConfig, *, training: bool) -> Sequence[str]:
    files = config.data.train_files if training else config.data.validation_files
    return files or [config.environment.name or ", ".join(config.environment.named)]


def model_folder(path: Path, out: Path, *, again: bool) -> Path | None:
    """Write the policy of a checkpoint, or of a run's newest one, into ``out`` as a model. Returns: ``out``; None for a path
    that is a model already.

    Raises: RequestError when the checkpoint is damaged or the run has none.
    """
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    ours = path.name.startswith(PREFIX) or any(path.glob(f"{PREFIX}*")) or (path / "checkpoints").is_dir()
    shards = find_shards(path)
    if not ours and not shards:
        return None
    source = shards or resolve_checkpoint(path)
    mark = out.with_name("model.from")
    if out.is_dir() and not again and mark.is_file() and mark.read_text(encoding="utf-8") == str(source.resolve()):
        return out
    shutil.rmtree(out, ignore_errors=True)
    export_checkpoint(path, out)
    mark.write_text(str(source.resolve()), encoding="utf-8")
    return out
