"""Weights that are not trained, by the beginnings of their names."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from posttrain.errors import ModelError, Problem, did_you_mean


def freeze(model: PreTrainedModel, prefixes: Sequence[str], field: str = "model.freeze") -> None:
    """Exclude the weights whose names begin so from training. Tied weights are frozen by any of their names.

    Args: field is the setting that names them, for messages.
    Raises: ModelError with every beginning that matches no weight, and when nothing is left to train.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    modules = sorted({name.rpartition(".")[0] for name in weights})
    problems = [
        Problem(
            f"{field} names {prefix}, and no weight of {model.name_or_path} begins so",
            fix=did_you_mean(prefix, modules) or f"weights are called {next(iter(weights))} and the like",
            field=field,
        )
        for prefix in prefixes
        if not any(name.startswith(prefix) for name in weights)
    ]
    if problems:
        raise ModelError(problems)
    for name, weight in weights.items():
        if name.startswith(tuple(prefixes)):
            weight.requires_grad_(False)
    if not any(weight.requires_grad for weight in weights.values()):
        what = f"{field} leaves nothing of {model.name_or_path} to train"
        raise ModelError(Problem(what, fix="name fewer weights", field=field))
