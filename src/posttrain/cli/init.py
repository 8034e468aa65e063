"""``posttrain init``: write a commented configuration from a few answers, as questions or as options."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.errors import Problem, RequestError, did_you_mean
from posttrain.libraries.disk_errors import described
from posttrain.registry import REWARDS, TUNE_METHODS

STDOUT = Path("-")


def methods() -> list[str]:
    """The methods that a file can be written for."""
    return ["grpo", "dapo", "ppo", "sft", *TUNE_METHODS.names()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Everything that the written file depends on."""

    method: str
    model: str
    data: str
    validation: str = ""
    reward: str = (
        "exact_match"  # a name of `posttrain keys`, or a Python file: my.py (its function score), my.py:function
    )
    steps: int = 100
    lora: bool = False

    @property
    def entry(self) -> str:
        """The command that starts the run."""
        if self.method in TUNE_METHODS.names():
            return "tune"
        return "sft" if self.method == "sft" else "train"

    @property
    def own_reward(self) -> tuple[str, str] | None:
        """The user's file and function."""
        return _own(self.reward) if self.entry == "train" else None


def init(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write; - prints it.")] = Path("run.yaml"),
    method: Annotated[
        str | None, typer.Option(help="grpo, dapo, ppo (with a critic), sft, or one of preferences, such as dpo.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model folder or hub id.")] = None,
    data: Annotated[str | None, typer.Option(help="The training file: parquet or JSON lines.")] = None,
    validation: Annotated[str | None, typer.Option(help="Held-out prompts; empty for none.")] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="A reward by name, or a Python file with a function score (my.py:NAME for another)."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the run.")] = None,
    lora: Annotated[bool | None, typer.Option("--lora/--full", help="Train an adapter, or all weights.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented configuration; asks for what no option says, where there is a terminal to ask."""
    if out.is_dir():
        raise RequestError(Problem(f"{out} is a folder", fix=f"name a file, such as {out / 'run.yaml'}"))
    if out.exists() and not overwrite:
        raise RequestError(Problem(f"{out} exists", fix="name another file, or add --overwrite"))
    given: dict[str, Any] = {"method": method, "model": model, "data": data, "validation": validation}
    given |= {"reward": reward, "steps": steps, "lora": lora}
    answers = Answers(**_asked(given))
    text = written(answers)
    _check(text, answers)
    if out == STDOUT:
        typer.echo(text, nl=False)
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{out} cannot be written ({described(error)})") from None
    typer.echo(f"wrote {out}")
    if answers.own_reward and not Path(answers.own_reward[0]).is_file():
        path, name = answers.own_reward
        typer.echo(f"write your function {name} into {path}, which is not there yet")
    typer.echo(f"check it: posttrain plan {shlex.quote(str(out))}")
    typer.echo(f"start it: posttrain {answers.entry} {shlex.quote(str(out))}")


def _asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The answers: options, then what a person types, then the defaults. A wrong answer brings the question again.

    Raises: RequestError for a wrong option, and for what is missing.
    """
    interactive = sys.stdin.isatty()
    found = {
        name: value.strip() if isinstance(value, str) else value for name, value in given.items() if value is not None
    }

    def ask(name: str, question: str, default: Any = None, of: Callable[[str], Any] = str) -> None:
        if name not in found and interactive:
            found[name] = typer.prompt(question, default=default, value_proc=_again(of))

    if "method" in found:
        found["method"] = _method(found["method"])
    if "reward" in found:
        _reward(found["reward"])
    ask("method", f"Method ({', '.join(methods())})", "grpo", _method)
    found.setdefault("method", "grpo")
    if "reward" in found and found["method"] in _without_reward():
        what = f"method {found['method']} learns from its file, without a reward"
        raise RequestError(Problem(what, fix="leave out --reward"))
    ask("model", "Model (a folder, or org/name of the hub)")
    ask("data", "Training file (parquet or JSON lines)")
    ask("validation", "Held-out file (empty for none)", "")
    if found["method"] not in _without_reward():
        ask("reward", "Reward (a name, or a Python file with a function score)", "exact_match", _reward)
    ask("steps", "Steps", "100", _steps)
    ask("lora", "Train an adapter (LoRA) instead of all weights (yes, no)", "no", _yes)
    missing = [name for name in ("model", "data") if not found.get(name)]
    if missing:
        raise RequestError([Problem(f"no {name} is given", fix=f"add --{name}") for name in missing])
    return found


def _without_reward() -> list[str]:
    """The methods that no reward belongs to."""
    return ["sft", *TUNE_METHODS.names()]


def _again(of: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a reader of answers whose errors bring the question again."""

    def read(text: str) -> Any:
        try:
            return of(text.strip())
        except RequestError as error:
            raise typer.BadParameter(str(error)) from None

    return read


def _method(text: str) -> str:
    known = methods()
    if text.lower() not in known:
        what = f"there is no method {text!r} (known: {', '.join(known)})"
        raise RequestError(Problem(what, fix=did_you_mean(text.lower(), known, listed=True)))
    return text.lower()


def _own(reward: str) -> tuple[str, str] | None:
    """Read ``my.py`` and ``my.py:function``. Returns: file and function; None for the name of a reward."""
    path, _, name = reward.partition(".py:")
    if name.isidentifier():
        return f"{path}.py", name
    return (reward, "score") if reward.endswith(".py") else None


def _reward(text: str) -> str:
    if _own(text) is None and text not in REWARDS.names():
        raise RequestError(REWARDS.problem(text))
    return text


def _steps(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise RequestError(f"{text!r} is no number of steps, such as 100")
    return int(text)


def _yes(text: str) -> bool:
    if text.lower() not in ("y", "yes", "true", "n", "no", "false"):
        raise RequestError(f"{text!r} is neither yes nor no")
    return text.lower() in ("y", "yes", "true")


def _check(text: str, answers: Answers) -> None:
    """Read the text as ``posttrain plan`` would, without looking at files. Raises: RequestError with what is wrong."""
    from tempfile import NamedTemporaryFile

    from posttrain.dialects.entries import ENTRIES
    from posttrain.dialects.native.loader import read

    with NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            problems = [*read(file.name, [], ENTRIES[answers.entry]).problems]
        except RequestError as error:
            problems = [*error.problems]
    if problems:  # without their place: it is in no file of the user's
        raise RequestError([replace(problem, where="") for problem in problems])


def written(answers: Answers) -> str:
    """Write the file."""
    return {"train": _rl, "sft": _sft, "tune": _tune}[answers.entry](answers)


def _beginning(answers: Answers, columns: str) -> str:
    """Return the file up to its training data, whose ``columns`` a comment names."""
    from posttrain.dialects.entries import ENTRIES, schema_line

    entry, q = answers.entry, json.dumps
    validation = f"  validation_files: [{q(answers.validation)}]\n" if answers.validation else ""
    return f"""\
{schema_line(entry)}#
# Written by posttrain init. Every other setting, with its meaning: posttrain keys native. Editors check the file with the
# schema of its first line, which `posttrain schema --entry {entry} > {ENTRIES[entry].schema_file}` writes beside it.
#
#   posttrain plan  FILE     explains batch sizes and memory, and what is wrong
#   posttrain {entry:<5} FILE     starts the run; the same command resumes it

run:
  total_steps: {answers.steps}
  seed: 1
model:
  path: {q(answers.model)}
  compute_dtype: bfloat16          # the weights that are trained stay float32
data:
  train_files: [{q(answers.data)}]   # {columns}
{validation}"""


def _end(answers: Answers, every_steps: int, between: str = "") -> str:
    """Return what follows the learning rate; ``between`` stands before the checkpoints."""
    return f"""\
{_lora(answers)}{between}checkpoint:
  every_steps: {every_steps}
  at_end: true
  keep_last: 2
"""


def _lora(answers: Answers) -> str:
    if not answers.lora:
        return ""
    return """\
  lora:
    rank: 16                       # of the adapter; the base model stays as it is
    alpha: 32
"""


def _rl(answers: Answers) -> str:
    q = json.dumps
    every = "validation:\n  every_steps: 10\n  before_training: true\n" if answers.validation else ""
    if own := answers.own_reward:
        path, name = own
        term, says = f"{{name: {name}, path: {q(path)}}}", f"def {name}(solution_str, ground_truth) -> float"
    else:
        term, says = f"{{name: {q(answers.reward)}}}", "docs/rewards.md lists them, with their options"
    method = {
        "grpo": "advantage:\n  name: grpo                       # responses to one prompt are compared with each other\n",
        "dapo": (
            "advantage:\n  name: grpo                       # responses to one prompt are compared with each other\n"
            "loss:\n  clip_ratio_low: 0.2\n  clip_ratio_high: 0.28            # clip-higher (DAPO, arXiv:2503.14476)\n"
            "  aggregation: token_mean\n"
            "group_filter:\n  strategy: refill                 # prompts whose responses score alike are replaced\n"
            "  above_std: 0.0\n  max_batches: 10\n"
        ),
        "ppo": "advantage:\n  name: gae                        # a critic estimates the value of every token\n",
    }[answers.method]
    return f"""\
{_beginning(answers, "columns prompt and ground truth; docs/data.md")}  prompts_per_step: 8
  max_prompt_tokens: 1024          # longer prompts are reported; docs/data.md says what can be done with them
rollout:
  samples_per_prompt: 8            # 8 prompts x 8 samples = 64 sequences per step, in one update
  max_response_tokens: 512
  temperature: 1.0                 # training divides by the same temperature
reward:
  terms:
    - {term}   # {says}
{method}policy:
  max_tokens_per_micro_batch: 16384   # memory, not numbers: the gradient is that of the whole step
  optimizer:
    lr: {"1e-5" if answers.lora else "1e-6"}
{_end(answers, 20, every)}"""


def _sft(answers: Answers) -> str:
    return f"""\
{_beginning(answers, "a column messages, or prompt and response; docs/sft.md")}policy:
  max_tokens_per_micro_batch: 16384   # memory, not numbers: the gradient is that of the whole batch
  optimizer:
    lr: {"1e-4" if answers.lora else "1e-5"}
{_end(answers, 50)}"""


def _tune(answers: Answers) -> str:
    columns = "prompt with chosen and rejected, or completion and label; docs/tune.md"
    return f"""\
{_beginning(answers, columns)}  sequences_per_step: 64           # in one update; both sides of a pair count
method:
  name: {answers.method}
policy:
  max_tokens_per_micro_batch: 16384   # memory, not numbers: the gradient is that of the whole step
  optimizer:
    lr: {"1e-5" if answers.lora else "1e-6"}
{_end(answers, 50)}"""
