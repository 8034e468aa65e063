"""The model card of an exported checkpoint, made from its run's records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.report.curves import write_curves_svg
from posttrain.report.read import RecordedRun, read_run

CURVES = "training.svg"


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint is in, or that it is itself; None for one of another program."""
    for folder in (checkpoint, *checkpoint.resolve().parents[:3]):
        if (folder / "run.json").is_file() and (folder / "config.yaml").is_file():
            return folder
    return None


def write_card(folder: Path, run_folder: Path | None, *, name: str) -> Path:
    """Write README.md, the hub's model card, into an exported folder, and a picture of the run's curves beside it."""
    run = read_run(run_folder) if run_folder else None
    pictured = run is not None and any(len(run.series(each)) > 1 for each in run.metric_names())
    if run_folder and pictured:
        write_curves_svg([run_folder], folder / CURVES)
    card = folder / "README.md"
    card.write_text(card_text(name, run, pictured=pictured), encoding="utf-8")
    return card


def card_text(name: str, run: RecordedRun | None, *, pictured: bool = False) -> str:
    """Write the card: front matter, the model it began from, data, rewards, results, the command, and how to load it."""
    # A base that is a folder of the trainer's machine is named without its path
    base = run.model.partition("@")[0] if run else ""
    is_id = base.count("/") == 1 and not base.startswith(("/", ".", "~"))
    front = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [posttrain, reinforcement-learning]"]
    front += [f"base_model: {base}"] if is_id else []
    lines = ["---", *front, "---", "", f"# {name}", ""]
    if run is None:
        return "\n".join([*lines, "Exported with posttrain.", "", *_loading(name)])
    began = base if is_id else Path(base).name
    lines += [f"Trained from {began or 'a model'} with posttrain, {run.steps_done} steps.", ""]
    lines += ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in _facts(run.config, run.info))]
    if results := _results(run):
        lines += ["", "## Results", "", "| metric | first | last |", "|---|---|---|", *results]
    if pictured:
        lines += ["", f"![Curves of the run]({CURVES})"]
    if command := run.info.get("command"):
        lines += ["", "## Command", "", "```", str(command), "```"]
    return "\n".join([*lines, "", *_loading(name)])


def _facts(config: Mapping[str, Any], info: Mapping[str, Any]) -> list[tuple[str, str]]:
    def at(*path: str) -> Any:
        found: Any = config
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    terms = [str(term.get("name")) for term in at("reward", "terms") or [] if isinstance(term, Mapping)]
    found = {
        "data": ", ".join(
            f"`{Path(str(file)).parent.name}/{Path(str(file)).name}`" for file in at("data", "train_files") or []
        ),
        "rewards": ", ".join(f"`{term}`" for term in terms),
        "advantage, loss": ", ".join(f"`{each}`" for each in (at("advantage", "name"), at("loss", "name")) if each),
        "prompts × samples per step": " × ".join(
            str(each) for each in (at("data", "prompts_per_step"), at("rollout", "samples_per_prompt")) if each
        ),
        "learning rate": str(at("policy", "optimizer", "lr") or ""),
        "seed": str(at("run", "seed") if at("run", "seed") is not None else ""),
        "commit": str(info.get("commit") or ""),
    }
    return [(key, value) for key, value in found.items() if value]


def _results(run: RecordedRun) -> list[str]:
    names = [each for each in run.metric_names() if each.startswith("validation/") and each.endswith("accuracy")]
    rows = []
    for metric in ["reward/mean", *names, "validation/loss"]:
        values = [(step, value) for step, value in run.series(metric).items() if value is not None]
        if values:
            (first, began), (last, ended) = values[0], values[-1]
            rows.append(f"| `{metric}` | {began:.3f} (step {first}) | {ended:.3f} (step {last}) |")
    return rows


def _loading(name: str) -> list[str]:
    return [
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{name}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        "```",
        "",
    ]
