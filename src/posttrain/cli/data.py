"""``posttrain data``: write and check datasets."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.errors import Problem, RequestError

if TYPE_CHECKING:
    from posttrain.data.check import Purposed

app = typer.Typer(
    help="Write datasets in the format that training reads, and check files.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def data() -> None:
    """Write datasets in the format that training reads, and check files."""


@app.command("reasoning-gym")
def reasoning_gym(
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Receives train.parquet and validation.parquet.")],
    task: Annotated[str, typer.Option(help="Name of the task family, such as chain_sum.")],
    train_rows: Annotated[int, typer.Option(min=1, help="Prompts to train on.")] = 2000,
    validation_rows: Annotated[int, typer.Option(min=1, help="Held-out prompts.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the tasks.")] = 1,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the task, such as max_terms=3. Repeatable.")
    ] = None,
    instruction: Annotated[str | None, typer.Option(help="System message of every prompt.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Write train and validation prompts of a reasoning-gym task, with verifiable answers."""
    from posttrain.config.reading.overrides import parse_overrides
    from posttrain.data.reasoning_gym import write_dataset

    _refuse_present(out, ("train", "validation"), overwrite)
    files = write_dataset(
        task,
        out,
        train_rows=train_rows,
        validation_rows=validation_rows,
        seed=seed,
        options={each.key: each.value for each in parse_overrides(option or [])},
        instruction=instruction,
    )
    for file in files:
        typer.echo(f"wrote {file}")


@app.command("arithmetic")
def arithmetic(
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Receives train.parquet and validation.parquet.")],
    task: Annotated[str, typer.Option(help="sums (with + and -) or products.")] = "sums",
    numbers: Annotated[int, typer.Option(help="Numbers in a question, 2 to 8.")] = 2,
    digits: Annotated[int, typer.Option(help="Most digits of a number, 1 to 6.")] = 1,
    train_rows: Annotated[int, typer.Option(min=1, help="Prompts to train on.")] = 120,
    validation_rows: Annotated[int, typer.Option(min=1, help="Held-out prompts.")] = 80,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the questions.")] = 1,
    instruction: Annotated[str | None, typer.Option(help="System message of every prompt.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Sums and products with exact answers: tasks that need no download and no library."""
    from posttrain.data.arithmetic import Arithmetic, write_arithmetic

    _refuse_present(out, ("train", "validation"), overwrite)
    asked = Arithmetic(task=task, numbers=numbers, digits=digits)
    files = write_arithmetic(
        out, asked, train_rows=train_rows, validation_rows=validation_rows, seed=seed, instruction=instruction
    )
    for file in files:
        typer.echo(f"wrote {file}")


OUT = Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Receives a parquet file per split.")]
TRAIN = Annotated[Path | None, typer.Option(help="The published file (or folder of JSON files) of the training split.")]
TEST = Annotated[Path | None, typer.Option(help="The published file (or folder of JSON files) of the test split.")]
INSTRUCTION = Annotated[str | None, typer.Option(help="Text after every question; by default the dataset's own.")]
OVERWRITE = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]


@app.command("gsm8k")
def gsm8k(
    out: OUT, train: TRAIN = None, test: TEST = None, instruction: INSTRUCTION = None, overwrite: OVERWRITE = False
) -> None:
    """GSM8K: grade-school word problems, from its JSON lines or parquet files."""
    _published("gsm8k", out, train, test, instruction, overwrite)


@app.command("math")
def math(
    out: OUT, train: TRAIN = None, test: TEST = None, instruction: INSTRUCTION = None, overwrite: OVERWRITE = False
) -> None:
    """MATH: competition problems, from its parquet files, JSON lines, or folders of JSON files."""
    _published("math", out, train, test, instruction, overwrite)


@app.command("geo3k")
def geo3k(
    out: OUT, train: TRAIN = None, test: TEST = None, instruction: INSTRUCTION = None, overwrite: OVERWRITE = False
) -> None:
    """Geometry3K: geometry with figures, from its parquet files. Figures are checked and copied unchanged."""
    _published("geo3k", out, train, test, instruction, overwrite)


@app.command("shapes")
def shapes(
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Receives train.parquet and validation.parquet.")],
    train_rows: Annotated[int, typer.Option(min=1, help="Prompts to train on.")] = 2000,
    validation_rows: Annotated[int, typer.Option(min=1, help="Held-out prompts.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the pictures.")] = 1,
    max_shapes: Annotated[int, typer.Option(help="Most shapes in a picture, and the largest answer; 1 to 36.")] = 5,
    kinds: Annotated[int, typer.Option(help="Kinds of shapes, 1 to 4; with one, questions count all shapes.")] = 2,
    colors: Annotated[int, typer.Option(help="Colours, 1 to 6; with several, questions name them.")] = 1,
    size: Annotated[int, typer.Option(help="Pixels on a side of a picture, 8 to 1024.")] = 56,
    instruction: Annotated[str, typer.Option(help="Text after every question.")] = "Answer with a number.",
    overwrite: OVERWRITE = False,
) -> None:
    """Count shapes in generated pictures: a task for vision models that needs no download."""
    from posttrain.data.shapes import Difficulty, write_shapes

    _refuse_present(out, ("train", "validation"), overwrite)
    difficulty = Difficulty(max_shapes=max_shapes, kinds=kinds, colors=colors, size=size)
    rows = {"train_rows": train_rows, "validation_rows": validation_rows}
    for file in write_shapes(out, **rows, seed=seed, difficulty=difficulty, instruction=instruction):
        typer.echo(f"wrote {file}")


@app.command("hh-rlhf")
def hh_rlhf(
    out: OUT,
    form: Annotated[str, typer.Option(help="rl: prompts; sft: the chosen answers; rm: both, to train a reward model.")],
    train: TRAIN = None,
    test: TEST = None,
    instruction: Annotated[str | None, typer.Option(help="System message of every conversation.")] = None,
    overwrite: OVERWRITE = False,
) -> None:
    """Helpful and harmless: pairs of answers, from the files of Dahoas/full-hh-rlhf or Anthropic/hh-rlhf."""
    _published("hh-rlhf", out, train, test, instruction, overwrite, form=form)


@app.command("check")
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A .parquet, .jsonl, .json, .csv or .arrow file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the data section, such as data.prompt_column=question."),
    ] = None,
    purpose: Annotated[str, typer.Option("--for", help="Use of the file: rl, sft or evaluate.")] = "rl",
    model: Annotated[str | None, typer.Option(help="A vision model, to count the tokens of its images.")] = None,
) -> None:
    """Check every row of a file, and report the row and column of every problem."""
    from posttrain.cli.request import refuse_dashes
    from posttrain.data.check import MAX_SHOWN, PURPOSES, check_dataset

    if purpose not in PURPOSES:
        raise RequestError(Problem(f"there is no use called {purpose!r}", fix=f"use {', '.join(PURPOSES)}"))
    refuse_dashes(overrides or [])
    found = check_dataset(file, purpose, _data_section(file, purpose, overrides or []))
    if found.bad:
        more = found.bad - len(found.problems)
        rest = [Problem(f"… and {more} more (the first {MAX_SHOWN} are shown)")] if more else []
        raise RequestError([*found.problems, *rest])
    typer.echo(f"{file}: {found.rows} rows, all right for {purpose}")
    if found.responses:
        typer.echo(f"{found.responses} responses")
    if images := found.images_text():
        typer.echo(images + (f", {_image_tokens(model, found.image_sizes)}" if model else ""))
    for source, rows in sorted(found.sources.items()):
        typer.echo(f"  {source}: {rows} rows")
    for source in found.unscored():
        typer.echo(f"no built-in scorer fits {source}: name one with reward.terms")


def _data_section(file: str, purpose: str, overrides: list[str]) -> Purposed:
    """The data section of the purpose's command, with the overrides. Raises: RequestError with the problems of all overrides."""
    from posttrain.config.reading.compose import compose
    from posttrain.config.reading.validate import validate
    from posttrain.data.check import PURPOSES
    from posttrain.dialects.entries import ENTRIES

    entry = {"rl": "train"}.get(purpose, purpose)
    section, names_files = PURPOSES[purpose]
    composed = compose(None, overrides)
    if other := [key for key in composed.values if key != "data"]:
        fix = f"write data.{other[0]}=... for a key of the data section"
        raise RequestError(Problem(f"a check of a file reads data.* alone, not {other[0]}", fix=fix))
    values = composed.values | {"data": {names_files: [file]} | composed.values.get("data", {})}
    config, problems = validate(values, composed.sources, ENTRIES[entry].root)
    problems = [problem for problem in problems if problem.field.startswith("data")]
    if problems:
        raise RequestError(problems)
    data = config.data
    assert isinstance(data, section)
    return data


def _image_tokens(model: str, sizes: Iterable[tuple[int, int]]) -> str:
    """Count the tokens of the images for a model. Raises: RequestError for a model without vision, or an unsupported size."""
    from posttrain.config.images import ImageSettings
    from posttrain.config.model import ModelConfig
    from posttrain.data.images import CHOOSE_A_VISION_MODEL
    from posttrain.models.loading import load_tokenizer
    from posttrain.models.processors import load_processor

    config = ModelConfig(path=model)
    processor = load_processor(config, load_tokenizer(config), ImageSettings())
    if processor is None:
        raise RequestError(Problem(f"{model} reads text only", fix=CHOOSE_A_VISION_MODEL))
    tokens, problems = [], []
    for size in sorted(sizes):
        try:
            tokens.append(processor.tokens(size))
        except ValueError as error:
            problems.append(Problem(f"the model refuses images of {size[0]} x {size[1]} pixels: {error}"))
    if problems:
        raise RequestError(problems)
    low, high = min(tokens), max(tokens)
    return f"{low if low == high else f'{low} to {high}'} tokens each for this model"


def _published(
    name: str,
    out: Path,
    train: Path | None,
    test: Path | None,
    instruction: str | None,
    overwrite: bool,
    *,
    form: str = "rl",
) -> None:
    from posttrain.data.published import DATASETS, write_published

    forms = [known for dataset, known in DATASETS if dataset == name]
    if form not in forms:
        raise RequestError(Problem(f"there is no form called {form!r}", fix=f"use {', '.join(forms)}"))
    splits = {split: path.expanduser() for split, path in (("train", train), ("test", test)) if path is not None}
    if not splits:
        raise RequestError(Problem("there is no file to read", fix="name one with --train or --test"))
    _refuse_present(out, splits, overwrite)
    for file in write_published(name, out, splits, form=form, instruction=instruction):
        typer.echo(f"wrote {file}")


def _refuse_present(out: Path, splits: Iterable[str], overwrite: bool) -> None:
    present = [str(file) for name in splits if (file := out / f"{name}.parquet").exists()]
    if present and not overwrite:
        raise RequestError(
            Problem(f"{' and '.join(present)} already there", fix="name another folder, or add --overwrite")
        )
