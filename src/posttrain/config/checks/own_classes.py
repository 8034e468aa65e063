"""Rules about dataset and sampler classes of the user's own: which settings go together."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import RunConfig
from posttrain.errors import Problem


def own_class_problems(config: RunConfig) -> Iterator[Problem]:
    """Report a class without its file, or beside settings that would do its work."""
    data = config.data
    for kind in ("dataset", "sampler"):
        file, name = (getattr(data, f"{kind}_class_{part}") for part in ("file", "name"))
        if (file is None) != (name is None):
            lacking = "name" if name is None else "file"
            what = f"data.{kind}_class_file and data.{kind}_class_name belong together, and the {lacking} is not given"
            field = f"data.{kind}_class_{lacking}"
            yield Problem(what, fix=f"give {field}", field=field)
        if file is not None and config.environment.train_episodes is not None:
            what = f"training episodes are generated, and the {kind} class {name} would read rows of files"
            yield Problem(what, fix="use one of them", field=f"data.{kind}_class_file")
    if data.sampler_class_file is None:
        return
    field = "data.sampler_class_file"
    if data.domains:
        what = f"the sampler class {data.sampler_class_name} and data.domains would both choose the rows of a step"
        yield Problem(what, fix="use one of them", field=field)
    if config.asynchronous.mode != "off":
        what = f"prompts are drawn ahead with asynchronous.mode={config.asynchronous.mode}, and the sampler class "
        what += f"{data.sampler_class_name} draws a step at a time"
        yield Problem(what, fix="use asynchronous.mode=off", field=field)
    if data.max_prompts is not None and data.dataset_class_file is not None:
        what = f"data.max_prompts leaves rows out, and the sampler class {data.sampler_class_name} numbers all of them"
        yield Problem(what, fix="use a dataset class that takes as many as you need", field="data.max_prompts")


def own_class_warnings(config: RunConfig) -> Iterator[str]:
    """Report settings that have no effect beside a class."""
    data = config.data
    if data.sampler_class_file is not None and not data.shuffle:
        yield f"data.shuffle has no effect: {data.sampler_class_name} chooses the order"
