"""The top level: names, folders, lengths, cadence, scheduling of rollouts."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned, refused
from posttrain.dialects.roll.keys.worker import LATEST

_PROFILED = "of the first three steps: those of a whole run would fill a disk"
_ALONE = "a time limit or a setting between processes, which a run on one device does not have"
_SAMPLES = "the samples of every step are written to the run folder in any case"

_BOOKKEEPING: tuple[Key, ...] = (
    mapped("exp_name", str, "start_rlvr_pipeline", "run.name", "name of the run; by default that of ROLL's start script"),
    mapped("seed", int, 42, "run.seed", "seed of data order and sampling"),
    mapped(
        "output_dir", str, "./output", "run.folder", "folder of the checkpoints", by_rule=True,
        change="output_dir/exp_name; null, which is runs/exp_name, when it is not written",
        note="In ROLL runs with one output_dir share their folders.",
    ),
    ignored("base_dir", str, "./output", "ROLL does not read it", "nothing"),
    ignored("logging_dir", str, "./output/logs", "logs and metrics are in the run folder", "folder of the logs"),
    ignored("rollout_dump_dir", str | None, None, _SAMPLES, "folder for the rollouts of every step"),
    ignored("save_logging_board_dir", str | None, None, _SAMPLES, "folder for tokens, log-probs and rewards"),
    mapped(
        "track_with", Literal["tensorboard", "wandb", "swanlab", "trackio", "stdout", ""], "tensorboard",
        "tracking.trackers tracking.dialect_names", "where metrics go", by_rule=True,
        change="console besides; stdout and the default: console alone; metrics.jsonl is always written. Services are "
        "sent ROLL's names of metrics too",
        note="In mid-2025 tensorboard, wandb and stdout. ROLL's default is tensorboard; a run that does not ask for it "
        "does without.",
    ),
    mapped("tracker_kwargs.project", str, ABSENT, "tracking.project", "project that the tracker files the run under"),
    ignored("tracker_kwargs.**", Any, ABSENT, "trackers get the project and the run's name", "settings of the tracker"),
    mapped("max_steps", int, 500, "run.total_steps", "steps of the run", by_rule=True),
    mapped(
        "save_steps", int, 50, "checkpoint.every_steps", "save after every so many steps", by_rule=True,
        note="ROLL counts from 0 and saves after step 50, which is the 51st; here after the 50th.",
    ),
    mapped("max_ckpt_to_keep", int, 0, "checkpoint.keep_last", "keep so many checkpoints; 0: all", by_rule=True,
           change="0: null", since=LATEST),
    mapped("logging_steps", int, 1, "tracking.samples_every_steps", "show samples and metrics every so many steps",
           by_rule=True, change="samples are written to a file; metrics are shown at every step"),
    mapped(
        "eval_steps", int, 10, "validation.every_steps validation.before_training validation.after_training",
        "validate before every so many steps, the first included", by_rule=True,
        change="the starting weights are validated, the last ones are not",
    ),
    mapped(
        "resume_from_checkpoint", bool | str, False, "run.resume run.resume_path",
        "go on from a checkpoint: true for the newest, or the path of one", by_rule=True,
        change="true: auto; false: never; a path: auto, from there",
        note="In ROLL true finds nothing, because it looks into a folder that was just made; here it works.",
    ),
    mapped("checkpoint_config.output_dir", str, ABSENT, "checkpoint.folder", "folder that checkpoints are moved to",
           note="ROLL adds the time of the start, so a new start does not find it; here nothing is added."),
    ignored("checkpoint_config.type", Literal["file_system"] | None, ABSENT, "a folder is what there is",
            "kind of store"),
    ignored("checkpoint_config.async_upload", bool, ABSENT, "a checkpoint is written in place", "move in the background"),
    ignored("checkpoint_config", dict | None, None, "a folder has no further settings", "where checkpoints are moved to"),
    mapped("profiler_timeline", bool, False, "profiling.steps", "record a timeline", by_rule=True, change=_PROFILED),
    mapped("profiler_memory", bool, False, "profiling.steps profiling.memory profiling.operators", "record memory",
           by_rule=True, change=_PROFILED),
    mapped("profiler_output_dir", str | None, None, "profiling.folder", "folder of the profiles", by_rule=True,
           change="null: profiles in the run folder"),
    ignored("length_profiler_dir", str | None, None, "metrics hold the lengths", "folder for lengths", since=LATEST),
    ignored("report_length_and_rewards", bool, False, "samples hold lengths and rewards", "write lengths and rewards",
            since=LATEST),
    ignored("otlp_output_dir", str | None, None, "no traces are written", "folder for traces", since=LATEST),
    ignored("system_envs", dict, {}, "a configuration does not change the environment here: set variables where the run is "
            "started", "environment variables of all workers"),
    mapped("rpc_timeout", int, 3600, "placement.call_timeout_s", "seconds until a call between workers fails"),
    mapped("num_gpus_per_node", int, 8, "placement.nodes", "devices of a node", by_rule=True,
           change="devices / this = nodes", note="ROLL of 2026 overwrites it by the number of local devices; here it counts."),
    ignored("num_nodes", int, 1, "computed from the device ids, in ROLL too", "nodes"),
    refused("model_download_type", Literal["MODELSCOPE", "HUGGINGFACE_HUB"] | None, None,
            "models are read from a folder or from the Hugging Face hub", "where models are downloaded from",
            off=("HUGGINGFACE_HUB",), note="Without it ROLL downloads from ModelScope; here it is Hugging Face."),
    mapped("model_update_buffer_size_mb", int, 1024, "rollout.weight_bucket_mib",
           "MiB per piece when weights go to the sampler", since=LATEST),
    ignored("is_offload_states", bool, False, "read by SFT and DPO only", "offload models after every call", since=LATEST),
    ignored("is_offload_optimizer_states_in_train_step", bool, False, "read by SFT and DPO only",
            "offload the optimizer during passes", since=LATEST),
    mapped("rollout_mock.enable", bool, False, "tracking.batches_every_steps", "record or replay rollouts", by_rule=True,
           change="every step is recorded", since=LATEST),
    ignored("rollout_mock.mode", Literal["dump", "mock"], "dump",
            "a run records; what it has recorded is learned from again by `posttrain replay`", "record or replay",
            since=LATEST),
    ignored("rollout_mock.dump_dir", str, "./rollout_mock_dumps", "records are in batches/ of the run folder",
            "folder of the records", since=LATEST),
    planned("transfer_backend", dict | None, None, "a transfer service between nodes", "service that moves tensors",
            cluster=True, since=LATEST),
    ignored("alive_check_interval", int, 10, _ALONE, "seconds between looks at workers", until="2025-05"),
    ignored("local_rank", int, -1, "ROLL does not read it", "nothing"),
)  # fmt: skip

_ROLLOUT: tuple[Key, ...] = (
    mapped("rollout_batch_size", int, 128, "data.prompts_per_step", "prompts per step (trajectories, in agentic pipelines)",
           by_rule=True),
    mapped(
        "num_return_sequences_in_group", int, 1, "rollout.samples_per_prompt", "responses per prompt", by_rule=True,
    ),
    mapped("prompt_length", int, 1024, "data.max_prompt_tokens data.overlong_prompts", "longest prompt; others are left out",
           by_rule=True, change="longer ones are filtered",
           note="ROLL also leaves out prompts of 5 tokens and fewer; here they stay."),
    mapped("response_length", int | None, None, "rollout.max_response_tokens", "longest response", by_rule=True),
    mapped("sequence_length", int | None, None, "rollout.max_response_tokens",
           "longest prompt and response together; goes before response_length", by_rule=True,
           change="- prompt_length = response tokens"),
    mapped("val_prompt_length", int | None, None, "validation.max_response_tokens",
           "with val_sequence_length: what is left of it for the response", by_rule=True,
           note="Validation prompts are cut at prompt_length, in ROLL too."),
    mapped("val_sequence_length", int | None, None, "validation.max_response_tokens",
           "longest validation prompt and response together", by_rule=True, change="- val_prompt_length"),
    mapped("val_batch_size", int, 128, "environment.validation_episodes", "agentic: trajectories of a validation", by_rule=True,
           change="/ group_size of val_env_manager"),
    ignored("generate_opt_level", int, 1, "responses are always decoded side by side as they come",
            "1: one request per prompt, 0: one call for all"),
    ignored("is_num_return_sequences_expand", bool, False, "a prompt is computed once for all its responses",
            "one request per response"),
    mapped("max_running_requests", int, 128, "rollout.max_concurrent_sequences", "requests decoded side by side",
           note="Per sampler in ROLL, where a request may be all responses of a prompt; here it counts responses."),
    ignored("is_use_additional_prompts", bool, False,
            "prompts that a filter drops are replaced in any case, and slow ones are waited for",
            "start more prompts than a step needs and drop the slow ones",
            note="Dropping what comes late favours short responses."),
    ignored("max_additional_running_prompts", int, 16, "no more prompts are started than a step needs",
            "prompts in flight while additional ones may start"),
    ignored("generate_redundancy_num", int, ABSENT, "ROLL does not read it", "nothing"),
    planned("async_generation_ratio", int | float, 0, "asynchronous rollouts", "how many steps old a sample may be",
            off=(0.0,)),
    planned("user_defined_rollout_loop_cls", str | None, None, "rollout loops of your own", "class of the rollout loop",
            since=LATEST),
    ignored("router_args", dict | None, None, "a prompt's samples, and a conversation's turns, go to one sampler, and "
            "prompts are shared out by load", "how requests are shared out over several samplers", since=LATEST),
)  # fmt: skip

_DEAD_REASON = "ROLL does not read it"
_DEAD: tuple[Key, ...] = tuple(
    ignored(name, type, ABSENT, reason, "nothing")
    for name, type, reason in (
        ("offload_nccl", bool, _DEAD_REASON),
        ("pg_variant", str, f"{_DEAD_REASON} here; it counts in actor_train.pg_variant"),
        ("use_additional_prompts", bool, _DEAD_REASON),
        ("use_remove_padding", bool, _DEAD_REASON),
        ("reward_system_config", dict | None, _DEAD_REASON),
        ("max_actions_per_traj", int, _DEAD_REASON),
        ("model_name", str, _DEAD_REASON),
        ("positive_loss_coef", float, f"{_DEAD_REASON}: its own field is spelled postive_loss_coef"),
        ("tis_lower_bound", float, f"{_DEAD_REASON} here; it counts in actor_train.tis_lower_bound"),
        ("tis_upper_bound", float, f"{_DEAD_REASON} here; it counts in actor_train.tis_upper_bound"),
        ("cispo_epsilon_low", float, f"{_DEAD_REASON} here; it counts in actor_train.cispo_epsilon_low"),
        ("cispo_epsilon_high", float, f"{_DEAD_REASON} here; it counts in actor_train.cispo_epsilon_high"),
        ("cispo_use_unified_mask", bool, _DEAD_REASON),
        ("kimi15_tau", float, f"{_DEAD_REASON} here; it counts in actor_train.kimi15_tau"),
        ("reward_normalize", bool, _DEAD_REASON),
        *((f"lora_{name}", int | float | str | list | None, f"{_DEAD_REASON} here; LoRA is asked for in model_args")
          for name in ("target", "rank", "alpha", "dropout")),
        ("hydra.**", Any, "a setting of Hydra itself"),
        *((name, dict, "a set of values that other keys refer to")
          for name in ("deepspeed_zero", "deepspeed_zero2", "deepspeed_zero2_cpuoffload", "deepspeed_zero3",
                       "deepspeed_zero3_cpuoffload", "custom_env")),
    )
)  # fmt: skip

ROWS: tuple[Key, ...] = (*_BOOKKEEPING, *_ROLLOUT, *_DEAD)
