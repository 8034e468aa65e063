"""Keys of trainer, and of the top of the file: length, devices, validation, checkpoints, trackers."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned
from posttrain.dialects.verl.keys.words import PROFILERS, SERVERS

_LENGTH: tuple[Key, ...] = (
    mapped(
        "trainer.total_epochs",
        int,
        30,
        "run.total_epochs",
        "passes over the training data, where total_training_steps is null",
        by_rule=True,
    ),
    mapped(
        "trainer.total_training_steps",
        int | None,
        None,
        "run.total_steps",
        "iterations; null: total_epochs passes",
        note="verl 0.2 makes one update less than it says; here as many as it says.",
    ),
    mapped(
        "trainer.critic_warmup",
        int,
        0,
        "critic.warmup_steps",
        "the actor is updated from this iteration on (they count from 1)",
        by_rule=True,
        change="k: k - 1 steps, since verl skips iterations 1 to k - 1",
        note="verl also skips the actor's update where there is no critic; here that has no effect and is told.",
    ),
    mapped(
        "trainer.n_gpus_per_node",
        int,
        8,
        "placement.devices",
        "devices of each machine",
        by_rule=True,
        change="x nnodes = devices",
    ),
    mapped(
        "trainer.nnodes",
        int,
        1,
        "placement.nodes placement.devices",
        "machines",
        by_rule=True,
        change="x n_gpus_per_node = devices",
    ),
    mapped(
        "trainer.device",
        Literal["cuda", "cpu"],
        "cuda",
        "placement.device",
        "kind of device",
        by_rule=True,
        change="not written: an accelerator when there is one",
        since="0.4",
    ),
)

_RECORDS: tuple[Key, ...] = (
    mapped("trainer.project_name", str, "verl_examples", "tracking.project", "project in the trackers"),
    mapped("trainer.experiment_name", str, "gsm8k", "run.name", "name of the run"),
    mapped(
        "trainer.logger",
        list[str] | str,
        ["console", "wandb"],
        "tracking.trackers tracking.dialect_names",
        "trackers, one or a list",
        by_rule=True,
        change="tracking: wandb; file: none, since metrics.jsonl is always written. Services are sent verl's names too",
    ),
    mapped(
        "trainer.log_val_generations",
        int,
        0,
        "tracking.validation_samples",
        "validation responses shown in the tracker",
        by_rule=True,
        since="0.4",
        note="verl draws them; here they are those to the first prompts. All are in validation/step_N.jsonl.",
    ),
    mapped(
        "trainer.val_generations_to_log_to_wandb",
        int,
        ABSENT,
        "tracking.validation_samples",
        "log_val_generations by the name it had in 0.2",
        by_rule=True,
        earlier={"0.2": 0},
        until="0.2",
    ),
    ignored(
        "trainer.rollout_data_dir",
        str | None,
        None,
        "every response is written to the run folder (samples/step_N.jsonl)",
        "folder for the responses of training",
        since="0.4",
    ),
    ignored(
        "trainer.validation_data_dir",
        str | None,
        None,
        "every validation response is written to the run folder (validation/step_N.jsonl)",
        "folder for the responses of validation",
        since="0.4",
    ),
    mapped("trainer.wandb_proxy", str | None, ABSENT, "tracking.proxy", "proxy of wandb", since="0.4"),
)

_VALIDATION: tuple[Key, ...] = (
    mapped(
        "trainer.test_freq",
        int,
        -1,
        "validation.every_steps validation.after_training",
        "iterations between validations, and one at the end; 0 or less: none of these",
        by_rule=True,
        change="0 or less: null and false",
        note="verl's page shows 2; its file says -1. verl 0.2 validates at the end in any case.",
    ),
    mapped(
        "trainer.val_before_train",
        bool,
        True,
        "validation.before_training",
        "validate the starting weights",
        since="0.4",
    ),
    planned("trainer.val_only", bool, False, "runs that only validate", "stop after that", since="0.4"),
)

_CHECKPOINTS: tuple[Key, ...] = (
    mapped(
        "trainer.save_freq",
        int,
        -1,
        "checkpoint.every_steps checkpoint.at_end",
        "iterations between checkpoints, and one at the end; 0 or less: no checkpoint",
        by_rule=True,
        change="0 or less: null and false",
    ),
    mapped(
        "trainer.default_local_dir",
        str,
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "run.folder checkpoint.folder",
        "folder of the checkpoints; here of everything the run writes",
    ),
    mapped(
        "trainer.default_hdfs_dir",
        str | None,
        None,
        "checkpoint.upload",
        "remote folder that checkpoints are copied to",
        note="verl's page shows a path; its file says null, and verl stops at any other value unless resume_mode=disable. Here "
        "it is a URL or a folder, and trainer.resume_from_path may name it.",
    ),
    mapped(
        "trainer.resume_mode",
        str,
        "auto",
        "run.resume",
        "auto, disable or resume_path",
        by_rule=True,
        change="resume_path: auto; disable: never, which refuses a folder that holds a run",
        note="In verl 0.2 the path itself stands here.",
    ),
    mapped(
        "trainer.resume_from_path",
        str | bool | None,
        None,
        "run.resume_path",
        "checkpoint to go on from, a folder or URL that names global_step_N; read with resume_mode=resume_path only",
        by_rule=True,
        earlier={"0.2": False},
    ),
    mapped(
        "trainer.max_actor_ckpt_to_keep",
        int | None,
        None,
        "checkpoint.keep_last",
        "newest checkpoints that are kept; null: all",
        by_rule=True,
        since="0.4",
        note="verl deletes before it saves, and forgets older ones when it resumes; here after, and never.",
    ),
    ignored(
        "trainer.max_critic_ckpt_to_keep",
        int | None,
        None,
        "a checkpoint holds actor and critic together; max_actor_ckpt_to_keep says how many are kept",
        "the same for the critic's",
        since="0.4",
    ),
    mapped(
        "trainer.remove_previous_ckpt_in_save",
        bool,
        ABSENT,
        "checkpoint.keep_last",
        "deprecated: keep one checkpoint",
        by_rule=True,
        change="true: 1",
        earlier={"0.2": False},
        note="On verl's page, and not in its file of 0.4.",
    ),
    ignored(
        "trainer.del_local_ckpt_after_load",
        bool,
        False,
        "the copy of a remote checkpoint is deleted once it is loaded, in any case",
        "delete the copy of a remote checkpoint",
    ),
    planned(
        "trainer.esi_redundant_time",
        int | float,
        0,
        "saving before a rented machine expires",
        "seconds to spare",
        since="0.4",
        cluster=True,
    ),
)

_MACHINES: tuple[Key, ...] = (
    ignored(
        "trainer.balance_batch",
        bool,
        True,
        "sequences stay in their order; losses divide by global counts, so their place does not matter",
        "give devices batches of like length",
        since="0.4",
        note="In verl it also changes which sequences share a mini-batch.",
    ),
    ignored(
        "trainer.ray_wait_register_center_timeout",
        int,
        300,
        "there is no such process to wait for",
        "seconds to wait for workers",
        since="0.4",
    ),
    ignored("ray_init.num_cpus", int | None, None, "Ray is not started for one device", "CPUs of Ray", since="0.4"),
    planned("ray_init.timeline_json_file", str | None, None, PROFILERS, "Ray's timeline", since="0.4", cluster=True),
    ignored("ray_kwargs.ray_init.**", Any, ABSENT, "Ray is not started for one device", "ray_init", since="later"),
    planned(
        "ray_kwargs.timeline_json_file", str | None, ABSENT, PROFILERS, "Ray's timeline", since="later", cluster=True
    ),
    planned("trainer.profile_steps", list[int] | None, None, PROFILERS, "iterations", since="0.4", cluster=True),
    planned("trainer.controller_nsight_options.**", Any, ABSENT, PROFILERS, "nsys", since="0.4", cluster=True),
    planned("trainer.worker_nsight_options.**", Any, ABSENT, PROFILERS, "nsys", since="0.4", cluster=True),
    planned("trainer.npu_profile.**", Any, ABSENT, PROFILERS, "profiles of NPUs", since="0.4", cluster=True),
    planned("global_profiler.**", Any, ABSENT, PROFILERS, "profiles", since="later", cluster=True),
    planned("trainer.use_v1", bool, ABSENT, SERVERS, "another loop", off=(False,), since="later", cluster=True),
    planned("transfer_queue.**", Any, ABSENT, SERVERS, "a queue between loops", since="later", cluster=True),
    planned("async_training.**", Any, ABSENT, "asynchronous training", "the fully asynchronous recipe", since="later"),
    ignored("**._target_", str, ABSENT, "it names verl's own class of this section", "class", since="later"),
)

ROWS: tuple[Key, ...] = (*_LENGTH, *_RECORDS, *_VALIDATION, *_CHECKPOINTS, *_MACHINES)
