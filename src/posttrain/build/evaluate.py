"""Evaluate responses from an EvaluateConfig."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from posttrain.config.evaluate import EvaluateConfig
from posttrain.config.shown import shown
from posttrain.data.responses import load_responses
from posttrain.libraries.folders import make_folder
from posttrain.loops import evaluate
from posttrain.report.evaluation import write_evaluation_report
from posttrain.rewards.served import start_scorer
from posttrain.run.evaluation import SourceResult, results_json, source_results, write_evaluation
from posttrain.run.stopping import StopSignal

GROUPS_AT_ONCE = 256  # prompts whose responses are handed to the scorer together; only for progress and signals

OnPlan = Callable[[int, int], None]  # prompts and responses


def evaluate_run(config: EvaluateConfig, *, on_plan: OnPlan, on_scored: evaluate.OnScored) -> list[SourceResult]:
    """Score every response, and write results.json, report.html and the samples into the configured folder.

    Raises: RequestError for what can be seen before the first response; RunInterrupted when a signal asked to stop.
    """
    folder = Path(config.folder)
    groups = load_responses(config.data)
    with closing(start_scorer(config.reward)) as scorer:
        on_plan(len(groups), sum(len(group.trajectories) for group in groups))
        make_folder(folder)
        scorer.keep_in(folder)
        # Such a function is to see all responses at once
        batched = any(term.batched for term in config.reward.terms)
        with StopSignal() as stop:
            scored = evaluate.run(
                groups,
                scorer,
                groups_at_once=len(groups) if batched else GROUPS_AT_ONCE,
                stop=stop,
                on_scored=on_scored,
            )
        costs = scorer.take_costs()
    results = source_results(
        scored,
        pass_score=config.metrics.pass_score,
        draws=config.metrics.bootstrap_draws,
        confidence=config.metrics.confidence,
        seed=config.run.seed,
    )
    settings = {**config.metrics.model_dump(mode="json"), "seed": config.run.seed, "costs": costs}
    settings["reward"] = {"terms": shown(config)["reward"]["terms"]}
    write_evaluation(folder, results_json(config.run.name, config.data.files, results, settings), scored)
    write_evaluation_report([folder])
    return results
