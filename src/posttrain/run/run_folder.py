"""RUN_DIR: what ran (config.yaml), on what and how it ended (run.json), and whether another run may go on in it."""

from __future__ import annotations

import json
import platform
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from posttrain import __version__
from posttrain.config import RunConfig, SftConfig, TrainingConfig, TuneConfig
from posttrain.config.roles import needs_values
from posttrain.dialects.native.write import to_yaml
from posttrain.errors import ConfigError, Problem
from posttrain.libraries import yaml_text
from posttrain.libraries.remote import is_url
from posttrain.plan.hub import portable_config
from posttrain.run.checkpoint_folders import is_used, steps_in
from posttrain.run.config_change import Change, changes, flat
from posttrain.run.durable import write_durably
from posttrain.run.last_run import ABOUT, CONFIG, LastRun, last_run, read_about, run_of_origin
from posttrain.run.origins import started_by
from posttrain.run.own_files import changed_files, keep, own_files
from posttrain.run.ownership import Owner, check_owner, claim, ids_of, owner_id, owner_of
from posttrain.run.record import METRICS, keep_aside, lost_rows, read_metrics, steps_on_record

# What the last digits of a run depend on besides its configuration, by its names in run.json.
ROUND = ("device", "cpu_threads", "versions.torch", "versions.transformers", "versions.posttrain")


class RunFolder:
    """The folder of one run. Nothing is written before ``begin``: a request that is refused leaves it as it was."""

    def __init__(self, config: TrainingConfig):
        self.path = Path(config.folder)
        self._config = portable_config(config)
        self._about: dict[str, Any] = {}
        self._id: str | None = None
        self._starts_over = False
        self._writing = Lock()  # a checkpoint is put on record by the thread that has written it
        self.notes: list[str] = []  # for the user, of ``begin``

    @cached_property
    def _config_text(self) -> str:
        """The configuration as in config.yaml."""
        return to_yaml(self._config)

    @cached_property
    def _config_values(self) -> dict[str, Any]:
        """The values of that text: what a later run reads there."""
        values: dict[str, Any] = yaml_text.safe_load(self._config_text)
        return values

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return Path(self._config.checkpoint.folder or self.path / "checkpoints")

    @property
    def origin(self) -> Path | str | None:
        """The checkpoint, or the folder of a run, that this one starts from, or its URL; None: from its own newest."""
        path = self._config.run.resume_path
        return path if path is None or is_url(path) else Path(path).expanduser()

    @property
    def checkpoints_setting(self) -> str:
        """The setting that names the folder of the checkpoints."""
        return "checkpoint.folder" if self._config.checkpoint.folder else "run.folder"

    def check(
        self, *, holds_checkpoint: bool, allow_config_change: bool = False, start_over: bool = False
    ) -> list[str]:
        """Check that this run may resume from what the folder (or run.resume_path) holds, or start in it.

        Returns: notes for the user. Raises: ConfigError when it may not.
        """
        self.check_unused()
        notes = self._check_owner()
        if isinstance(self.origin, Path) and not self.origin.is_dir():
            raise ConfigError(Problem(f"there is no folder {self.origin}", field="run.resume_path"))
        before = None
        if holds_checkpoint:
            before = last_run(self.path, self.checkpoints)
        else:
            notes += self._check_start(start_over)
            if isinstance(self.origin, Path):
                before = run_of_origin(self.origin)
        if before is not None:
            notes += before.notes
            self._check_kind(before)
            self._check_weights(before)
            self._check_changes(before, allow_config_change)
        return notes

    def check_unused(self) -> None:
        """Refuse folders that hold a run or checkpoints, where run.resume=never requests it. Raises: ConfigError."""
        if self._config.run.resume != "never":
            return
        self._check_owner()
        used = f"{self.path} already holds a run" if (self.path / METRICS).exists() else None
        field = "run.folder"
        if used is None and is_used(self.checkpoints):
            used, field = f"{self.checkpoints} already holds checkpoints", self.checkpoints_setting
        if used:
            fix = f"name another {field}, or set run.resume=auto"
            raise ConfigError(Problem(used, fix=fix, field=field))

    def _check_owner(self) -> list[str]:
        return check_owner(self.checkpoints, self.path, self._about_before(), named_by=self.checkpoints_setting)

    def _check_start(self, start_over: bool) -> list[str]:
        """Refuse to start where steps are on record and the checkpoint that they led to is gone. A run that was cut off before it
        saved anything is made again."""
        about = self._about_before()
        elsewhere = about.get("checkpoints")
        if elsewhere and Path(elsewhere) != self.checkpoints.resolve() and steps_in(Path(elsewhere)):
            what = f"{self.path} holds a run whose checkpoints are in {elsewhere}, not in {self.checkpoints}"
            fix = "set checkpoint.folder to where they are, or name another run.folder"
            raise ConfigError(Problem(what, fix=fix, field="checkpoint.folder"))
        steps = steps_on_record(self.path, about)
        over = "or add --start-over, which begins at the first step and keeps the records aside"
        lost = last_run(self.path, self.checkpoints).config
        if about.get("status") == "done" and not start_over and not (lost.get("validation.only") and not steps):
            fix = f"name another run.folder, {over}"
            what = f"{self.path} holds a finished run without a checkpoint to resume from"
            raise ConfigError(Problem(what, fix=fix, field="run.folder"))
        if not steps:
            return []
        if self.origin is not None and not start_over and lost.get("run.resume_path") != self._config.run.resume_path:
            return []  # the user names a checkpoint in place of the lost one
        self._starts_over = True
        if start_over:
            return []
        if about.get("last_checkpoint", "") is None and owner_of(self.checkpoints) is not None:
            return [f"the run was cut off before its first checkpoint; its {_steps(steps)} are made again"]
        saved = about.get("last_checkpoint") or "its last checkpoint"
        what = f"{self.path} holds a run of {_steps(steps)}, and {self.checkpoints}, where it saved {saved}, holds none any more"
        fix = f"mount that disk or put back a copy, name another run.folder, {over}"
        raise ConfigError(Problem(what, fix=fix, field=self.checkpoints_setting))

    def _check_kind(self, before: LastRun) -> None:
        """A run of another kind has other steps, and another configuration altogether."""
        saved = before.config
        kinds: dict[
            str, tuple[str, type[TrainingConfig]]
        ] = {  # the first that fits: a tuning run has rows of files, too
            "tuning": ("method.name", TuneConfig),
            "reinforcement learning": ("data.prompts_per_step", RunConfig),
            "SFT": ("data.sequences_per_step", SftConfig),
        }
        own = next(kind for kind, (_, known) in kinds.items() if isinstance(self._config, known))
        for kind in [kind for kind, (mark, _) in kinds.items() if mark in saved][:1]:
            if kind != own:
                what = f"{before.folder} holds a run of {kind}, and this is one of {own}"
                fix = "name another run.folder; weights of the other run are named with model.path"
                raise ConfigError(Problem(what, fix=fix, field="run.folder"))

    def _check_weights(self, before: LastRun) -> None:
        """Weights come from the checkpoint, so another model.path would be ignored in silence."""
        saved = before.config
        started_from = saved.get("model.path")
        if started_from not in (None, self._config.model.path):
            what = (
                f"{before.folder} holds a run that started from {started_from}, and would go on with that run's weights"
            )
            fix = "name another run.folder, or the same model.path"
            raise ConfigError(Problem(what, fix=fix, field="model.path"))
        if not isinstance(self._config, RunConfig):
            return
        same_estimator = saved.get("advantage.name") == self._config.advantage.name
        critic_from, wanted = saved.get("critic.path"), self._config.critic.path
        if same_estimator and needs_values(self._config) and critic_from != wanted:
            origin = critic_from or "the policy"
            what = f"{before.folder} holds a run whose critic started from {origin}, and would go on with its weights"
            fix = "name another run.folder, or the same critic.path"
            raise ConfigError(Problem(what, fix=fix, field="critic.path"))

    def _check_changes(self, before: LastRun, allow: bool) -> None:
        grave = [change for change in self._changes(before) if not change.harmless]
        if grave and not allow:
            fix = "set it back, name another run.folder, or go on all the same with --allow-config-change"
            raise ConfigError(
                [
                    Problem(
                        f"the run in {before.folder} had {change.field} {_short(change.before)}, and this one has "
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
        about = self._about_before()
        if (first_step == 1 or self._starts_over) and steps_on_record(self.path, about):
            self.notes.append(f"the records of the steps until now are kept in {keep_aside(self.path)}")
            about = {"earlier_ids": ids_of(about)}
        resumes = list(about.get("resumes", []))
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
        changed, moved = [], []
        before = last_run(self.path, self.checkpoints)
        if first_step > 1:
            changed = [str(change) for change in self._changes(before)]
            moved = machine_changes(about, machine)
            resumes.append(
                {"time": now, "first_step": first_step, "damaged": list(passed_over), "changed": [*changed, *moved]}
            )
        began = self._began(about, first_step)
        lost = lost_rows(self.path, began, first_step - 1)
        self.notes += lost
        if changed and before.text:
            write_durably(self.path / f"config.until_step_{first_step - 1}.yaml", before.text)
        files = own_files(self._config)
        keep(files, self.path)
        earlier = [one for one in ids_of(about) if one != self.id_from(first_step)]
        start = started_by(self._config, now)
        self._about = {
            "name": self._config.run.name,
            "id": self.id_from(first_step),
            **({"earlier_ids": earlier} if earlier else {}),
            "started": about.get("started") or now,
            # The last of the starts, to be read at a glance
            **{name: start[name] for name in ("command", "host", "commit") if name in start},
            "starts": [*about.get("starts", []), start],
            "first_step": began,
            "resumes": resumes,
            "lost": [*about.get("lost", []), *lost],
            "checkpoints": str(self.checkpoints.resolve()),
            "last_checkpoint": about.get("last_checkpoint"),
            "total_steps": total_steps,
            "own_files": files,
            **machine,
        }
        self._write("running")
        write_durably(self.path / CONFIG, self._config_text)
        return [*changed, *moved]

    def _began(self, about: Mapping[str, Any], first_step: int) -> int:
        """The first step made in this folder: of a run that starts from another one's checkpoint, not step 1."""
        if steps_on_record(self.path, about) and "first_step" in about:
            return int(about["first_step"])
        rows = [step for step, _ in read_metrics(self.path / METRICS).rows if step > 0]
        return 1 if self.origin is None else min([*rows, first_step])

    def claim_checkpoints(self) -> None:
        """Put on record that the folder of the checkpoints is this run's. To be called after ``begin``: killed in between, the
        next start finds the owner's id among the earlier ones in run.json."""
        owner = Owner(
            id=self._about["id"],
            name=self._config.run.name,
            run_folder=str(self.path.resolve()),
            config=self._config_text,
            own_files=self._about["own_files"],
        )
        claim(self.checkpoints, owner)

    def saved(self, checkpoint: str) -> None:
        """Put on record that a checkpoint is whole."""
        self._about["last_checkpoint"] = checkpoint
        self._write("running")

    def id_from(self, first_step: int) -> str:
        """The id by which trackers and upload folders know the run: the same after a resume, another one where the first step is
        made again."""
        if self._id is None:
            known = self._about_before().get("id") or owner_id(self.checkpoints, self.path)
            same = first_step > 1 and not self._starts_over
            self._id = known if same and known else uuid.uuid4().hex
        return self._id

    def end(self, status: str) -> None:
        """Record how the run ended: done, interrupted, stopped or failed. Never raises for a full disk: the error that ended
        the run must come through."""
        self._about["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OSError):
            self._write(status)

    def _write(self, status: str) -> None:
        with self._writing:
            write_durably(self.path / ABOUT, json.dumps(self._about | {"status": status}, indent=1))

    def _about_before(self) -> dict[str, Any]:
        return read_about(self.path)

    def _changes(self, before: LastRun) -> list[Change]:
        """Settings that differ from those of a run, and files of the user's own; none when it is not known what it had."""
        configured = changes(before.config, self._config_values, type(self._config)) if before.config else []
        return [*configured, *changed_files(before.own_files, own_files(self._config))]


def machine_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences of the machine that change the rounding of numbers, a line each. Both as in run.json."""
    was, is_now = flat(before), flat(now)
    keys = [key for key in ROUND if key in was and was[key] != is_now[key]]
    return [
        f"{key} {was[key]} -> {is_now[key]}, which may round otherwise than until now"
        for key in keys
        if key != "cpu_threads" or now["device"] == "cpu"
    ]


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
