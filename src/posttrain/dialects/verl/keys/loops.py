"""Keys of verl's later loops: which one makes the steps, and what only asynchronous ones read."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.ledger import ABSENT, Key, ignored, planned

_ASYNCHRONOUS = "asynchronous training"
_V1 = "trainer.v1"

ROWS: tuple[Key, ...] = (
    ignored(
        "trainer.use_v1",
        bool,
        ABSENT,
        "verl's two loops make the same steps, and so does the one here; trainer.v1.trainer_mode says which steps are meant",
        "the later of two loops",
        since="later",
    ),
    planned(
        f"{_V1}.trainer_mode",
        str,
        ABSENT,
        _ASYNCHRONOUS,
        "sync: sample, then learn from it; colocate_async and separate_async sample meanwhile",
        off=("sync",),
        since="later",
        cluster=True,
    ),
    ignored(f"{_V1}.sync.**", Any, ABSENT, "it has none in verl", "its settings", since="later"),
    *(
        ignored(
            f"{_V1}.{mode}.**",
            Any,
            ABSENT,
            f"only trainer_mode={mode} (planned) reads it",
            "its settings",
            since="later",
        )
        for mode in ("colocate_async", "separate_async")
    ),
    planned(
        f"{_V1}.sampler.sync_refill_failed_groups",
        bool,
        ABSENT,
        "other prompts in the place of those whose responses all failed",
        "replace groups that have no responses",
        off=(False,),
        since="later",
    ),
    planned(
        f"{_V1}.sampler.custom_sampler.path", str | None, ABSENT, "custom samplers", "file with a class", since="later"
    ),
    planned(
        f"{_V1}.sampler.custom_sampler.name", str | None, ABSENT, "custom samplers", "name of the class", since="later"
    ),
    ignored(
        f"{_V1}.sampler.**",
        Any,
        ABSENT,
        "only asynchronous modes and samplers of your own (planned) read it",
        "what is learned from, of what was sampled",
        since="later",
    ),
    ignored(
        "transfer_queue.**",
        Any,
        ABSENT,
        "batches go from stage to stage without a queue between them",
        "a store of batches",
        since="later",
    ),
    ignored(
        "trainer.use_legacy_worker_impl",
        str | bool,
        ABSENT,
        "verl's workers of either kind compute the same, and so do those here",
        "which of verl's workers",
        since="later",
    ),
    ignored(
        "trainer.balance_keep_minibatch",
        bool,
        ABSENT,
        "sequences stay in their order; losses divide by global counts, so their place does not matter",
        "balance devices within each mini-batch",
        since="later",
    ),
    planned(
        "trainer.checkpoint_callback_class",
        str | None,
        ABSENT,
        "callbacks of your own",
        "class of a callback",
        since="later",
    ),
    planned(
        "distillation.enabled",
        bool,
        ABSENT,
        "learning from a teacher",
        "learn from a teacher",
        off=(False,),
        since="later",
    ),
    ignored(
        "distillation.**", Any, ABSENT, "only distillation.enabled (planned) reads it", "the teacher", since="later"
    ),
    planned("skip.*.enable", bool, ABSENT, "replayed responses", "reuse what was sampled", off=(False,), since="later"),
    ignored("skip.**", Any, ABSENT, "only skip.*.enable (planned) reads it", "what is reused", since="later"),
    planned("async_training.**", Any, ABSENT, _ASYNCHRONOUS, "the fully asynchronous recipe", since="later"),
)
