"""Two steps of somebody's configuration (or its generation or evaluation) on a tiny model with made data: sizes shrink, all
else stays as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from posttrain.config import RunConfig, SftConfig
from posttrain.config.base import Section
from posttrain.config.environment import SINGLE_TURN
from posttrain.config.evaluate import EvaluateConfig
from posttrain.config.generate import GenerateConfig
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.native.write import to_yaml

PROMPTS, ROWS, RESPONSE = 4, 16, 16  # per step, in the file, and tokens of a response
LIMIT_S = 300
Texts = SftConfig | GenerateConfig | EvaluateConfig
POSITIONS = 4096  # of the model: pages of environments are long in the tokens of so small a vocabulary


def two_steps(loaded: LoadedConfig[Any], folder: Path, model: Path) -> str:
    """Run the configuration for two steps. Returns: "" when it does, else the last line of what it says.

    The shape of a step stays (updates per step, several responses or one); numbers of prompts, tokens and steps shrink, paths
    are replaced by a random model of two layers and rows of made sums, and files of functions by the scorer of those rows.
    """
    config = loaded.config
    if isinstance(config, SftConfig | GenerateConfig | EvaluateConfig):
        return _of_texts(config, loaded.entry, folder, model)
    if not isinstance(config, RunConfig):
        return "not tried: it is no configuration of reinforcement learning, or of texts"
    if config.validation.only:
        return "not tried: it makes no step"
    if config.reward.judges and not config.reward.terms:
        return "not tried: a judge alone scores it"
    if config.distillation.teachers:
        return "not tried: it needs the weights of its teachers"
    if config.reward.model is not None or config.environment.name not in (None, SINGLE_TURN):
        return "not tried: it needs a reward model, tools or an environment of its own"
    if any(each.settings.get("pictures") for each in config.environment.named.values()):
        return "not tried: it needs a model that sees"
    if config.policy.routing_replay or config.rollout.routing_replay or config.loss.router_balance_coef:
        return "not tried: it needs a model with experts"
    folder.mkdir(parents=True)
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(_row(config, number)) + "\n" for number in range(ROWS)))
    file = folder / "run.yaml"
    file.write_text(to_yaml(_shrunk(config, data, folder, model)))
    said = _called("train", file)
    steps = folder / "run" / "metrics.jsonl"
    count = _steps_in(steps)
    return said if said or count >= 2 else f"{count} steps"


def _steps_in(metrics: Path) -> int:
    """The number of lines that are of a step."""
    return sum(1 for line in metrics.read_text().splitlines() if '"step"' in line) if metrics.is_file() else 0


def _called(command: str, file: Path) -> str:
    """Run one command on a file. Returns: "" when it ends well, else its last words."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "posttrain", command, str(file)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"not done within {LIMIT_S} s"
    if done.returncode == 0:
        return ""
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return f"exit {done.returncode}: {' '.join(said[-3:])[:300]}"


def _of_texts(config: Texts, entry: str, folder: Path, model: Path) -> str:
    """Two steps of fine-tuning, a generation, or an evaluation, on made rows. Returns: as ``two_steps``."""
    folder.mkdir(parents=True)
    data, out = folder / "rows.jsonl", folder / "out.parquet"
    if isinstance(config, SftConfig):
        if config.distillation.teachers or config.data.dataset_class_file or config.data.train_tokenized:
            return "not tried: it needs teachers, a class or tokens of its own"
        small: Texts = _small_texts(config, data, folder, model)
    elif isinstance(config, GenerateConfig):
        length = {"max_response_tokens": RESPONSE, "samples_per_prompt": min(2, config.rollout.samples_per_prompt)}
        files = {"files": [str(data)], "prompt_column": "prompt", "max_prompt_tokens": 128}
        small = config.model_copy(
            update={
                "model": _with(config.model, path=str(model), tokenizer_path=None),
                "data": _with(config.data, **files),
                "output": _with(config.output, file=str(out)),
                "rollout": _with(config.rollout, **length),
            }
        )
    else:
        columns = {"response_column": "said", "ground_truth_column": "ground_truth", "data_source_column": None}
        columns |= {"prompt_column": "prompt", "extra_columns": []}
        terms = [term.model_copy(update={"name": "gsm8k", "path": None}) for term in config.reward.terms[:1]]
        small = config.model_copy(
            update={
                "data": _with(config.data, files=[str(data)], **columns),
                "reward": _with(config.reward, terms=terms),
                "run": _with(config.run, folder=str(folder / "run")),
            }
        )
    rows = [
        {"prompt": f"What is {n} + 1?", "response": f"#### {n + 1}", "said": [f"#### {n + 1}"] * 2}
        | {"data_source": "openai/gsm8k", "ground_truth": str(n + 1)}
        for n in range(ROWS)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "run.yaml"
    file.write_text(to_yaml(small))
    if said := _called(entry, file):
        return said
    if isinstance(config, SftConfig):
        count = _steps_in(folder / "run" / "metrics.jsonl")
        return "" if count >= 2 else f"{count} steps"
    return "" if isinstance(config, EvaluateConfig) or out.is_file() else "no responses"


def _small_texts(config: SftConfig, data: Path, folder: Path, model: Path) -> SftConfig:
    columns = dict.fromkeys(("messages_column", "query_column", "system_column"))
    columns |= {"prompt_column": "prompt", "response_column": "response", "train_sources": [], "source_weights": {}}
    files = {
        "train_files": [str(data)],
        "validation_files": [],
        "validation_sources": [],
        "sequences_per_step": PROMPTS,
    }
    few = {"sequences_per_micro_batch_per_device": 1, "max_tokens_per_micro_batch": None}
    return config.model_copy(
        update={
            "model": _with(config.model, path=str(model), tokenizer_path=None, freeze_vision=False, freeze=[]),
            "data": _with(config.data, **files, **columns, max_tokens=256, max_rows=None),
            "policy": _with(config.policy, **few),
            "run": _with(config.run, folder=str(folder / "run"), total_steps=2, resume="never"),
            "validation": _with(config.validation, every_steps=None),
            "checkpoint": _with(config.checkpoint, every_steps=None, at_end=False, upload=None, folder=None),
            "tracking": _with(config.tracking, trackers=[]),
        }
    )


def _row(config: RunConfig, number: int) -> dict[str, Any]:
    """A sum, under the columns that the configuration names."""
    data = config.data
    question = [{"role": "user", "content": f"What is {number} + 1?"}]
    truth = str(number + 1)
    return {
        data.prompt_column or "prompt": question,
        data.data_source_column or "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "ground_truth": truth,
        "question": question[0]["content"],
        data.extra_info_column: {"index": number},
    }


def _shrunk(config: RunConfig, data: Path, folder: Path, model: Path) -> RunConfig:
    samples = min(2, config.rollout.samples_per_prompt)
    sequences = config.data.prompts_per_step * config.rollout.samples_per_prompt
    updates = 2 if sequences > (config.policy.sequences_per_mini_batch or sequences) else 1
    small = {"sequences_per_mini_batch": PROMPTS * samples // updates}
    few = {"sequences_per_micro_batch_per_device": 1, "max_tokens_per_micro_batch": None}
    terms = [
        term.model_copy(update={"name": "gsm8k", "path": None, "options": {}, "data_sources": [], "kind": "function"})
        for term in config.reward.terms[:1]
    ]
    columns = {"ground_truth_column": "ground_truth", "extra_columns": []}
    rows = [] if config.environment.train_episodes else [str(data)]
    files = {"train_files": rows, "validation_files": [], "prompts_per_step": PROMPTS}
    files |= {"domains": {}, "domain_statistics": False, "max_prompt_tokens": 128 if rows else POSITIONS // 2}
    named = {
        tag: _with(each, settings=_own_rows(each.settings, data)) for tag, each in config.environment.named.items()
    }
    length = {"max_response_tokens": RESPONSE, "samples_per_prompt": samples}
    return config.model_copy(
        update={
            "model": _with(
                config.model,
                path=str(model),
                tokenizer_path=None,
                freeze_vision=False,
                freeze=[],
                config_overrides={"max_position_embeddings": POSITIONS},
            ),
            "data": _with(config.data, **files, **columns),
            "environment": _with(config.environment, named=named, max_context_tokens=None),
            "rollout": _with(config.rollout, **length),
            "asynchronous": _with(config.asynchronous, max_running_groups=None, prepared_groups=0),
            "validation": _with(config.validation, every_steps=None, before_training=False),
            "policy": _with(config.policy, **small, **few),
            "critic": _with(config.critic, path=None, **small, **few),
            "reference": _with(config.reference, path=None, **few),
            "reward": _with(
                config.reward,
                terms=terms,
                judge=None,
                more_judges={},
                overlong_buffer_tokens=None,
                check_references=False,
            ),
            # A random model scores 0 everywhere: no group would pass
            "group_filter": type(config.group_filter)(),
            "run": _with(config.run, folder=str(folder / "run"), total_steps=2, resume="never"),
            "checkpoint": _with(config.checkpoint, every_steps=None, at_end=False, upload=None, folder=None),
            "tracking": _with(config.tracking, trackers=[]),
        }
    )


def _own_rows(settings: dict[str, Any], data: Path) -> dict[str, Any]:
    """Settings of an environment that asks questions of a file: the made one, without tools. Tools of a file that was not opened
    are a calculator."""
    if settings.get("tools") == []:
        settings = settings | {"tools": ["calculator"]}
    if "file" not in settings:
        return settings
    rest = {name: value for name, value in settings.items() if name not in ("tools", "max_calls")}
    return rest | {"file": str(data), "question_column": "question", "answer_column": "ground_truth"}


def _with(section: Section, **values: Any) -> Section:
    """The section with other values, of those names that it has."""
    return section.model_copy(
        update={name: value for name, value in values.items() if name in type(section).model_fields}
    )
