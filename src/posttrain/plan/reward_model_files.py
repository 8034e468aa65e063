"""Checks of the folder of a reward model, used or trained further: its score head. Nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from posttrain.config.reward import CLASSIFIERS, RewardModelConfig
from posttrain.errors import Problem
from posttrain.libraries.weight_names import OF_A_HEAD, score_head_in, score_labels_in, weight_names

FIELD = "reward.model.path"


def head_problems(model: RewardModelConfig) -> Iterator[Problem]:
    """Yield the problem of a folder that holds another model than a classifier with one label; hub ids and unreadable files are
    not checked."""
    try:
        saved = json.loads((Path(model.path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    shape = list(head_shape_problems(model.path, FIELD))
    named = saved.get("architectures") if isinstance(saved, dict) else None
    if not shape and named and not str(named[0]).endswith(CLASSIFIERS) and score_head_in(model.path) is None:
        what = f"the model at {model.path} is not a classifier ({named[0]}), so it has no head to score with"
        fix = "train one with posttrain tune method.name=reward_model, or name a classifier with one label"
        yield Problem(what, fix=fix, field=FIELD)
    yield from shape


def head_shape_problems(path: str, field: str) -> Iterator[Problem]:
    """Yield the problem of a saved head that is not one linear layer to one number; a folder without a head has none."""
    if (labels := score_labels_in(path)) not in (None, 1):
        what = f"the classification head of the model at {path} has {labels} labels, and a score is one number"
        yield Problem(what, fix="use one that was trained with num_labels=1", field=field)
    elif labels is None and (layers := sorted(filter(OF_A_HEAD.match, weight_names(path)))):
        what = f"the head of the model at {path} is not one linear layer to one number: it has {', '.join(layers[:4])}"
        yield Problem(what, fix="use a model whose head is one layer, or the language model below it", field=field)
