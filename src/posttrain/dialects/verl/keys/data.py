"""Keys of data: files, columns, lengths, the size of a step."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned
from posttrain.dialects.verl.keys.words import CUSTOM_DATA

_FILES: tuple[Key, ...] = (
    mapped(
        "data.train_files",
        list[str] | str,
        "~/data/rlhf/gsm8k/train.parquet",
        "data.train_files",
        "training files, one or a list, read in order and concatenated",
    ),
    mapped(
        "data.val_files",
        list[str] | str | None,
        "~/data/rlhf/gsm8k/test.parquet",
        "data.validation_files",
        "validation files, one or a list; null: no validation",
        to=lambda value: value or [],
        note="verl must have them, even if it never validates; here they may be null.",
    ),
    mapped(
        "data.train_max_samples",
        int,
        ABSENT,
        "data.max_prompts",
        "use only the first so many training prompts; -1: all",
        to=lambda value: value if value and value > 0 else None,
        since="later",
    ),
    mapped(
        "data.val_max_samples",
        int,
        ABSENT,
        "validation.max_prompts",
        "use only the first so many validation prompts; -1: all",
        to=lambda value: value if value and value > 0 else None,
        since="later",
    ),
    ignored(
        "data.tokenizer",
        str | None,
        None,
        "verl never reads it either: the tokenizer is that of actor_rollout_ref.model.path",
        "unused",
    ),
    ignored("data.cache_dir", str, ABSENT, "files are read where they are", "folder for copies of remote files"),
    ignored(
        "data.use_shm", bool, False, "files are read once, when they are opened", "copy files to /dev/shm", since="0.4"
    ),
)

_COLUMNS: tuple[Key, ...] = (
    mapped(
        "data.prompt_key",
        str,
        "prompt",
        "data.prompt_column",
        "column with the chat messages of the prompt",
        by_rule=True,
        change="not written: prompt, or messages where a file has no such column",
    ),
    mapped(
        "data.reward_fn_key",
        str,
        "data_source",
        "data.data_source_column",
        "column that chooses the scorer and splits the validation metrics",
        by_rule=True,
        change="not written: data_source, or the column that other formats have in its place",
        since="0.4",
    ),
    mapped("data.image_key", str, "images", "data.image_column", "column with the images", since="0.4"),
    mapped(
        "data.video_key",
        str,
        "videos",
        "data.video_column",
        "column with the videos",
        since="0.4",
        note="A row with a video is refused: this version reads still images.",
    ),
    planned("data.audio_key", str, ABSENT, "models that hear", "column with the audio", off=("audios",), since="later"),
    mapped(
        "data.mm_processor_kwargs.**",
        Any,
        ABSENT,
        "data.image_options",
        "a setting of the image processor, such as max_pixels",
        by_rule=True,
        since="later",
    ),
    mapped(
        "data.mm_processor_kwargs",
        dict,
        ABSENT,
        "data.image_options",
        "several of them",
        by_rule=True,
        since="later",
    ),
    ignored(
        "data.return_multi_modal_inputs",
        bool,
        True,
        "what the image processor makes is kept with the prompt, for the sampler and the trainer",
        "keep the processor's tensors",
        since="0.4",
    ),
)

_LENGTHS: tuple[Key, ...] = (
    mapped("data.max_prompt_length", int, 512, "data.max_prompt_tokens", "longest prompt, tokens"),
    mapped(
        "data.max_response_length",
        int,
        512,
        "rollout.max_response_tokens",
        "longest response, tokens",
        by_rule=True,
        change="actor_rollout_ref.rollout.response_length refers to it, and is what counts",
    ),
    mapped(
        "data.filter_overlong_prompts",
        bool,
        False,
        "data.overlong_prompts",
        "leave out prompts longer than max_prompt_length",
        by_rule=True,
        change="true: filter",
        since="0.4",
        note="verl 0.2 has no such key and always leaves them out; so does verl@0.2 here.",
    ),
    mapped(
        "data.filter_overlong_prompts_workers",
        int,
        1,
        "data.filter_workers",
        "processes that tokenize the data when it is opened",
        since="0.4",
    ),
    mapped(
        "data.truncation",
        Literal["error", "left", "right", "middle"],
        "error",
        "data.overlong_prompts",
        "what happens to prompts that are too long: error, or cut (left keeps the end, right the start, middle both ends)",
        by_rule=True,
        change="left: truncate_left, and so on; without effect where they are left out",
    ),
    mapped(
        "data.apply_chat_template_kwargs",
        dict,
        ABSENT,
        "data.chat_template_options",
        "extra variables of the chat template, such as enable_thinking",
        by_rule=True,
        since="later",
    ),
    mapped(
        "data.apply_chat_template_kwargs.**",
        Any,
        ABSENT,
        "data.chat_template_options",
        "one of them",
        by_rule=True,
        since="later",
    ),
)

_STEP: tuple[Key, ...] = (
    mapped(
        "data.train_batch_size",
        int,
        1024,
        "data.prompts_per_step",
        "prompts of one iteration; x rollout.n = its sequences",
        note="Not sequences, and not per GPU.",
    ),
    ignored(
        "data.gen_batch_size",
        int | None,
        ABSENT,
        "a step is filled from batches of train_batch_size prompts, as many as it takes; another size changes speed only",
        "prompts per generation while algorithm.filter_groups fills a step",
    ),
    ignored(
        "data.val_batch_size",
        int | None,
        None,
        "validation prompts are decoded side by side, as many as fit, whatever their number",
        "prompts per validation batch",
        earlier={"0.2": 1312},
        note="verl 0.2 ignores its 1312 too: the whole set is one batch.",
    ),
    mapped("data.shuffle", bool, True, "data.shuffle", "draw prompts in a new order each epoch"),
    mapped(
        "data.seed",
        int | None,
        ABSENT,
        "data.seed",
        "seed of that order",
        by_rule=True,
        note="verl reads 1 where it is absent; from October 2025 null means a new order in every run. Here null is 1.",
    ),
    ignored(
        "data.validation_shuffle",
        bool,
        False,
        "validation metrics do not depend on the order",
        "shuffle validation prompts",
        since="0.4",
    ),
    ignored(
        "data.dataloader_num_workers",
        int,
        8,
        "prompts are tokenized when the data is opened; there is nothing left to do in the background",
        "processes of the data loader",
        since="0.4",
    ),
)

_OTHERS: tuple[Key, ...] = (
    ignored(
        "data.return_raw_input_ids",
        bool,
        False,
        "verl never reads it either; a reward model with another template gets the messages (input_tokenizer)",
        "keep the ids without template",
    ),
    ignored("data.return_raw_chat", bool, False, "messages are always kept", "keep the messages of each row"),
    ignored(
        "data.return_full_prompt",
        bool,
        False,
        "the templated prompt is always kept and written to the samples",
        "keep the templated prompt",
        since="0.4",
    ),
    ignored(
        "data.trust_remote_code",
        bool,
        False,
        "tokenizer and model share one switch, actor_rollout_ref.model.trust_remote_code",
        "let code from the tokenizer's folder run",
        since="0.4",
        note="verl's page shows True, its file says False. True alone lets no code run here.",
    ),
    planned("data.custom_cls.path", str | None, None, CUSTOM_DATA, "Python file with a dataset class", since="0.4"),
    planned("data.custom_cls.name", str | None, None, CUSTOM_DATA, "name of that class", since="0.4"),
    planned("data.sampler.class_path", str | None, None, "custom samplers", "file with a sampler class", since="0.4"),
    planned("data.sampler.class_name", str | None, None, "custom samplers", "name of that class", since="0.4"),
    planned("data.datagen.path", str | None, ABSENT, CUSTOM_DATA, "file with a data generator", since="later"),
    planned("data.datagen.name", str | None, ABSENT, CUSTOM_DATA, "name of that class", since="later"),
    ignored(
        "data.tool_config_path",
        str | None,
        ABSENT,
        "the tools of actor_rollout_ref.rollout.multi_turn.tool_config_path are offered in every prompt",
        "tools for the chat template",
        since="later",
    ),
)

ROWS: tuple[Key, ...] = (*_FILES, *_COLUMNS, *_LENGTHS, *_STEP, *_OTHERS)
