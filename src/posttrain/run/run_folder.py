"""RUN_DIR: what ran (config.yaml), on what and how it ended (run.json), and whether another run may go on in it."""

from __future__ import annotations

import json
import platform
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from posttrain import __version__
from posttrain.config import RunConfig, SftConfig, TrainingConfig
from posttrain.config.roles import needs_values
from posttrain.dialects.native.write import to_yaml
from posttrain.errors import ConfigError, Problem
from posttrain.libraries import yaml_text
from posttrain.libraries.remote import is_url
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.config_change import Change, changes, flat
from posttrain.run.durable import write_durably
from posttrain.run.own_files import changed_files, keep, own_files

# What the last digits of a run depend on besides its configuration, by its names in run.json.
ROUND = ("device", "cpu_threads", "versions.torch", "versions.transformers", "versions.posttrain")


class RunFolder:
    """The folder of one run. Nothing is written before ``begin``: a request that is refused leaves it as it was."""

    def __init__(self, config: TrainingConfig):
        self.path = Path(config.folder)
        self._config = config
        self._about: dict[str, Any] = {}
        self._id: str | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return Path(self._config.checkpoint.folder or self.path / "checkpoints")

    @property
    def origin(self) -> Path | str | None:
        """The checkpoint, or the folder of a run, that this one starts from, or its URL; None: from its own newest."""
        path = self._config.run.resume_path
        return path if path is None or is_url(path) else Path(path).expanduser()

    def check(self, *, holds_checkpoint: bool, allow_config_change: bool = False) -> None:
        """Raises ConfigError when this run must not go on from what the folder (or run.resume_path) holds."""
        if self._config.run.resume == "never" and (self.path / "metrics.jsonl").exists():
            fix = "name another run.folder, or set run.resume=auto"
            raise ConfigError(Problem(f"{self.path} already holds a run", fix=fix, field="run.folder"))
        if isinstance(self.origin, Path) and not self.origin.is_dir():
            raise ConfigError(Problem(f"there is no folder {self.origin}", field="run.resume_path"))
        if not holds_checkpoint and self.origin is None:
            self._check_start()
            return
        base = self.path if holds_checkpoint else self._run_of_origin()
        if base is not None:
            self._check_kind(base)
            self._check_weights(base)
            self._check_changes(base, allow_config_change)

    def _check_start(self) -> None:
        """Refuse to start at the first step where that would delete the record of a run."""
        if self._about_before().get("status") == "done":
            fix = "name another run.folder, or delete this one"
            what = f"{self.path} holds a finished run without a checkpoint to resume from"
            raise ConfigError(Problem(what, fix=fix, field="run.folder"))
        elsewhere = self._about_before().get("checkpoints")
        if elsewhere and Path(elsewhere) != self.checkpoints.resolve() and Checkpoints(Path(elsewhere)).exist():
            what = f"{self.path} holds a run whose checkpoints are in {elsewhere}, not in {self.checkpoints}"
            fix = "set checkpoint.folder to where they are, or name another run.folder"
            raise ConfigError(Problem(what, fix=fix, field="checkpoint.folder"))

    def _check_kind(self, base: Path) -> None:
        """A run of another kind has other steps, and another configuration altogether."""
        saved = _saved(base)
        kinds = {"reinforcement learning": "data.prompts_per_step", "SFT": "data.sequences_per_step"}
        own = "SFT" if isinstance(self._config, SftConfig) else "reinforcement learning"
        for kind, mark in kinds.items():
            if mark in saved and kind != own:
                what = f"{base} holds a run of {kind}, and this is one of {own}"
                fix = "name another run.folder; weights of the other run are named with model.path"
                raise ConfigError(Problem(what, fix=fix, field="run.folder"))

    def _check_weights(self, base: Path) -> None:
        """Weights come from the checkpoint, so another model.path would be ignored in silence."""
        saved = _saved(base)
        started_from = saved.get("model.path")
        if started_from not in (None, self._config.model.path):
            what = f"{base} holds a run that started from {started_from}, and would go on with that run's weights"
            fix = "name another run.folder, or the same model.path"
            raise ConfigError(Problem(what, fix=fix, field="model.path"))
        if not isinstance(self._config, RunConfig):
            return
        same_estimator = saved.get("advantage.name") == self._config.advantage.name
        critic_from, wanted = saved.get("critic.path"), self._config.critic.path
        if same_estimator and needs_values(self._config) and critic_from != wanted:
            origin = critic_from or "the policy"
            what = f"{base} holds a run whose critic started from {origin}, and would go on with its weights"
            fix = "name another run.folder, or the same critic.path"
            raise ConfigError(Problem(what, fix=fix, field="critic.path"))

    def _check_changes(self, base: Path, allow: bool) -> None:
        grave = [change for change in self._changes(base) if not change.harmless]
        if grave and not allow:
            fix = "set it back, name another run.folder, or go on all the same with --allow-config-change"
            raise ConfigError(
                [
                    Problem(
                        f"the run in {base} had {change.field} {_short(change.before)}, and this one has "
                        f"{_short(change.now)}",
                        fix=fix,
                        field=change.field,
                    )
                    for change in grave
                ]
            )

    def begin(self, *, first_step: int, total_steps: int, device: str, passed_over: Sequence[str] = ()) -> list[str]:
        """Write config.yaml and run.json. Returns the changes of a resumed run, a line per changed key; the
        configuration until then is kept as config.until_step_N.yaml. What of the machine is another one follows. ``passed_over``
        are checkpoints that were damaged."""
        self.path.mkdir(parents=True, exist_ok=True)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        before, changed, moved = self._about_before(), [], []
        resumes = list(before.get("resumes", []))
        machine = {
            "device": device,
            "cpu_threads": torch.get_num_threads(),
            "versions": {
                "posttrain": __version__,
                "python": platform.python_version(),
                "torch": version("torch"),
                "transformers": version("transformers"),
            },
        }
        if first_step > 1:
            changed = [str(change) for change in self._changes(self.path)]
            moved = machine_changes(before, machine)
            resumes.append(
                {"time": now, "first_step": first_step, "damaged": list(passed_over), "changed": [*changed, *moved]}
            )
        if changed:
            shutil.copy(self.path / "config.yaml", self.path / f"config.until_step_{first_step - 1}.yaml")
        write_durably(self.path / "config.yaml", to_yaml(self._config))
        files = own_files(self._config)
        keep(files, self.path)
        self._about = {
            "name": self._config.run.name,
            "id": self.id_from(first_step),
            "started": before.get("started") or now,
            "resumes": resumes,
            "checkpoints": str(self.checkpoints.resolve()),
            "total_steps": total_steps,
            "own_files": files,
            **machine,
        }
        self._write("running")
        return [*changed, *moved]

    def id_from(self, first_step: int) -> str:
        """The id by which trackers and upload folders know the run: the same after a resume, another one where the first step is
        made again."""
        if self._id is None:
            self._id = (self._about_before().get("id") if first_step > 1 else None) or uuid.uuid4().hex
        return self._id

    def end(self, status: str) -> None:
        """Record how the run ended: done, interrupted, stopped or failed. Never raises for a full disk: the error that ended
        the run must come through."""
        with suppress(OSError):
            self._write(status)

    def _write(self, status: str) -> None:
        write_durably(self.path / "run.json", json.dumps(self._about | {"status": status}, indent=1))

    def _about_before(self) -> dict[str, Any]:
        return _about(self.path)

    def _run_of_origin(self) -> Path | None:
        """The run folder that run.resume_path belongs to; None for a checkpoint that was moved away from its run."""
        if not isinstance(self.origin, Path):
            return None
        near = (self.origin, *self.origin.resolve().parents[:2])
        return next((path for path in near if (path / "config.yaml").is_file()), None)

    def _changes(self, base: Path) -> list[Change]:
        """Settings that differ from those of the run folder ``base``; none when that has no configuration."""
        saved = _saved(base)
        configured = changes(saved, yaml.safe_load(to_yaml(self._config)), type(self._config)) if saved else []
        return [*configured, *changed_files(_about(base).get("own_files", {}), own_files(self._config))]


def machine_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences of the machine that change the rounding of numbers, a line each. Both as in run.json."""
    was, is_now = flat(before), flat(now)
    keys = [key for key in ROUND if key in was and was[key] != is_now[key]]
    return [
        f"{key} {was[key]} -> {is_now[key]}, which may round otherwise than until now"
        for key in keys
        if key != "cpu_threads" or now["device"] == "cpu"
    ]


def _about(folder: Path) -> dict[str, Any]:
    """run.json of a run folder; empty when there is none that can be read."""
    with suppress(OSError, ValueError):
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        return about if isinstance(about, dict) else {}
    return {}


def _saved(folder: Path) -> dict[str, Any]:
    """The configuration in a run folder by dotted key; empty when there is none that can be read."""
    with suppress(OSError, ValueError, yaml.YAMLError):
        tree = yaml_text.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return flat(tree) if isinstance(tree, dict) else {}
    return {}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
