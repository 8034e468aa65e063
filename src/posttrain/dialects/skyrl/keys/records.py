"""Keys of trainer about what happens beside the steps: validation, checkpoints, logging."""

from __future__ import annotations

from typing import Literal

from posttrain.dialects.ledger import Key, ignored, mapped

TRACKERS = ("wandb", "mlflow", "swanlab", "vemlp_wandb", "tensorboard", "console")

_VALIDATION: tuple[Key, ...] = (
    ignored(
        "trainer.eval_batch_size",
        int,
        1024,
        "validation prompts are scored together, as many side by side as the sampler takes",
        "PROMPTS per validation batch; no effect on the numbers",
    ),
    mapped(
        "trainer.eval_before_train",
        bool,
        True,
        "validation.before_training",
        "validate the starting weights; needs trainer.eval_interval above 0",
        by_rule=True,
    ),
    mapped(
        "trainer.eval_interval",
        int,
        5,
        "validation.every_steps validation.after_training",
        "validate every so many steps and at the end; 0 or less: never",
        by_rule=True,
        change="0 or less: no validation at all",
        note="In mid-2025 SkyRL scored weights that were a step old; validation at step N here scores those after N steps.",
    ),
)

_CHECKPOINT: tuple[Key, ...] = (
    mapped(
        "trainer.resume_mode",
        Literal["none", "latest", "from_path"] | None,
        "latest",
        "run.resume",
        "null or none: start anew; latest: go on from the newest checkpoint; from_path: from trainer.resume_path",
        by_rule=True,
        change="latest, from_path: auto; none: never (a folder that holds a run already is refused, not written over)",
    ),
    mapped(
        "trainer.resume_path",
        str | None,
        None,
        "run.resume_path",
        "with resume_mode from_path: checkpoint folder to go on from (its name holds global_step_)",
        by_rule=True,
    ),
    mapped(
        "trainer.ckpt_path",
        str,
        "${oc.env:HOME}/ckpts/",
        "checkpoint.folder",
        "folder of the checkpoints",
        note="The files inside are this program's own; SkyRL's guide names files that its code does not write either.",
    ),
    mapped(
        "trainer.max_ckpts_to_keep",
        int,
        -1,
        "checkpoint.keep_last",
        "keep the newest so many checkpoints; negative: all; 0 is refused",
        by_rule=True,
        change="negative: null",
    ),
    mapped(
        "trainer.ckpt_interval",
        int,
        10,
        "checkpoint.every_steps checkpoint.at_end",
        "save every so many steps and at the end; 0 or less: never",
        by_rule=True,
        change="0 or less: none, not at the end either",
        note="SkyRL names its last checkpoint global_step_{T+1}; here it is global_step_{T}.",
    ),
    mapped(
        "trainer.hf_save_interval",
        int,
        -1,
        "checkpoint.export_every_steps",
        "export the models every so many steps and at the end; 0 or less: never",
        by_rule=True,
        change="0 or less: null",
    ),
    mapped(
        "trainer.export_path",
        str,
        "${oc.env:HOME}/exports/",
        "checkpoint.export_folder",
        "folder of exported models and dumps",
        by_rule=True,
        change="read with hf_save_interval; samples, validation results and metrics are in the run folder, runs/<run_name>",
    ),
)

_LOGGING: tuple[Key, ...] = (
    mapped("trainer.project_name", str, "skyrl", "tracking.project", "project under which trackers file the run"),
    mapped("trainer.run_name", str, "test_run", "run.name", "name of the run, and of its folder runs/<name>"),
    mapped(
        "trainer.logger",
        str | list[str],
        "wandb",
        "tracking.trackers tracking.dialect_names",
        f"one or several of {', '.join(TRACKERS)}",
        by_rule=True,
        change="one name becomes a list of one; services are sent SkyRL's names of metrics too",
        note="SkyRL's page names wandb and console; its code knows six.",
    ),
    mapped(
        "trainer.dump_data_batch",
        bool,
        False,
        "tracking.batches_every_steps",
        "write the tensors of every training batch",
        to=lambda dumps: 1 if dumps else None,
        change="batches/step_N.safetensors in the run folder, which is no pickle",
        note="SkyRL's file is called global_step_{N}_training_input.pkl, with the ending that its page leaves out.",
    ),
    ignored(
        "trainer.dump_eval_results",
        bool,
        True,
        "validation responses and scores are always written, to validation/step_N.jsonl in the run folder",
        "write validation responses and scores to files",
        note="SkyRL writes to dumped_evals/global_step_{N}_evals, not to the folder that its page names.",
    ),
)

ROWS: tuple[Key, ...] = (*_VALIDATION, *_CHECKPOINT, *_LOGGING)
