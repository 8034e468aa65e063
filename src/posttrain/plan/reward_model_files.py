"""Check of the folder of a reward model: it has a score head. Nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from posttrain.config.reward import CLASSIFIERS, RewardModelConfig
from posttrain.errors import Problem
from posttrain.libraries.weight_names import score_head_in, score_labels_in

FIELD = "reward.model.path"


def head_problems(model: RewardModelConfig) -> Iterator[Problem]:
    """Yield the problem of a folder that holds another model than a classifier with one label; hub ids and unreadable files are
    not checked."""
    try:
        saved = json.loads((Path(model.path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    named = saved.get("architectures") if isinstance(saved, dict) else None
    if named and not str(named[0]).endswith(CLASSIFIERS) and score_head_in(model.path) is None:
        what = f"the model at {model.path} is not a classifier ({named[0]}), so it has no head to score with"
        fix = "train one with posttrain tune method.name=reward_model, or name a classifier with one label"
        yield Problem(what, fix=fix, field=FIELD)
    elif (labels := score_labels_in(model.path)) not in (None, 1):
        what = f"the classification head of the model at {model.path} has {labels} labels, and a score is one number"
        yield Problem(what, fix="use one that was trained with num_labels=1", field=FIELD)
