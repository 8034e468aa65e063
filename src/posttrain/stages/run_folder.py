"""RUN_DIR: what ran (config.yaml), on what and how it ended (run.json), and whether another run may go on in it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from posttrain import __version__
from posttrain.config import RunConfig
from posttrain.dialects.native.write import to_yaml
from posttrain.errors import ConfigError, Problem
from posttrain.placement.batch import needs_values


class RunFolder:
    """The folder of one run. Nothing is written before ``begin``: a request that is refused leaves it as it was."""

    def __init__(self, config: RunConfig):
        self.path = Path(config.folder)
        self._config = config
        self._about: dict[str, Any] = {}

    def check(self, holds_checkpoint: bool) -> None:
        """Raises ConfigError when this run must not go on from what the folder holds."""
        if self._config.run.resume == "never" and (self.path / "metrics.jsonl").exists():
            fix = "name another run.folder, or set run.resume=auto"
            raise ConfigError(Problem(f"{self.path} already holds a run", fix=fix, field="run.folder"))
        if not holds_checkpoint and self._status() == "done":
            # It would start over, and the record of the finished run would be gone.
            fix = "name another run.folder, or delete this one"
            what = f"{self.path} holds a finished run without a checkpoint to go on from"
            raise ConfigError(Problem(what, fix=fix, field="run.folder"))
        saved = self._saved()
        started_from = saved.get("model.path")
        if holds_checkpoint and started_from not in (None, self._config.model.path):
            # Its weights come from the checkpoint, so the model that is asked for would be ignored without a word.
            raise ConfigError(
                Problem(
                    f"{self.path} holds a run that started from {started_from}, and would go on with that run's weights",
                    fix="name another run.folder, or the same model.path",
                    field="model.path",
                )
            )
        same_estimator = saved.get("advantage.name") == self._config.advantage.name
        critic_from, wanted = saved.get("critic.path"), self._config.critic.path
        if holds_checkpoint and same_estimator and needs_values(self._config.advantage.name) and critic_from != wanted:
            raise ConfigError(
                Problem(
                    f"{self.path} holds a run whose critic started from {critic_from or 'the policy'}, and would go on with "
                    "its weights",
                    fix="name another run.folder, or the same critic.path",
                    field="critic.path",
                )
            )

    def begin(self, *, first_step: int, total_steps: int, device: str) -> list[str]:
        """Write config.yaml and run.json. Returns what a run that goes on does differently, a line per changed key; the
        configuration until then is kept as config.until_step_N.yaml."""
        self.path.mkdir(parents=True, exist_ok=True)
        before, now = self._saved(), _flat(yaml.safe_load(to_yaml(self._config)))
        changes = []
        if first_step > 1 and before:
            changes = [
                f"{key} {before.get(key)} -> {now.get(key)}" for key in now | before if before.get(key) != now.get(key)
            ]
        if changes:
            os.replace(self.path / "config.yaml", self.path / f"config.until_step_{first_step - 1}.yaml")
        (self.path / "config.yaml").write_text(to_yaml(self._config), encoding="utf-8")
        self._about = {
            "name": self._config.run.name,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device,
            "total_steps": total_steps,
            "versions": {
                "posttrain": __version__,
                "python": platform.python_version(),
                "torch": version("torch"),
                "transformers": version("transformers"),
            },
        }
        self._write("running")
        return changes

    def end(self, status: str) -> None:
        """How the run ended: done, interrupted, stopped or failed. Never raises for a full disk: the error that ended the run
        must come through."""
        with suppress(OSError):
            self._write(status)

    def _write(self, status: str) -> None:
        beside = self.path / "run.tmp"
        beside.write_text(json.dumps(self._about | {"status": status}, indent=1))
        os.replace(beside, self.path / "run.json")

    def _status(self) -> str | None:
        about = self.path / "run.json"
        return json.loads(about.read_text()).get("status") if about.exists() else None

    def _saved(self) -> dict[str, Any]:
        """The configuration in the folder by dotted key; empty when there is none."""
        saved = self.path / "config.yaml"
        return _flat(yaml.safe_load(saved.read_text(encoding="utf-8"))) if saved.exists() else {}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
