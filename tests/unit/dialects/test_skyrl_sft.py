"""SkyRL's supervised fine-tuning: sizes by hand, data sets and splits, what cannot be; single keys are tested by their rows."""

from __future__ import annotations

from functools import cache

import pytest

from posttrain.config import SftConfig
from posttrain.dialects.detect import read_config
from posttrain.dialects.entries import SFT
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.skyrl import DIALECT

MEGATRON = ("strategy=megatron", "placement.num_gpus_per_node=8", "batch_size=16")


@cache
def read(*overrides: str) -> LoadedConfig[SftConfig]:
    return read_dialect(DIALECT, None, ("train_datasets=[a/b]", *overrides), entry=SFT)


def said(*overrides: str) -> list[str]:
    return [str(problem) for problem in read("strategy=fsdp", *overrides).problems]


def test_the_keys_alone_tell_what_it_is() -> None:
    loaded = read_config(
        None, ["strategy=fsdp", "model.path=m", "num_steps=3", "micro_train_batch_size_per_gpu=1"], "skyrl"
    )
    assert loaded.entry == "sft" and not loaded.problems
    config = loaded.config
    assert (config.model.path, config.run.total_steps) == ("m", 3)
    # SkyRL's own data set, of which it takes a hundred rows, on its four devices
    assert config.data.train_files == ["yahma/alpaca-cleaned:train[:100]"]
    assert (config.policy.engine, config.placement.devices) == ("fsdp", 4)


def test_megatron_s_sizes_are_two_by_two_by_default() -> None:
    policy = read(*MEGATRON).config.policy
    assert (policy.engine, policy.tensor_parallel, policy.pipeline_parallel) == ("megatron", 2, 2)
    (problem,) = read(*MEGATRON, "megatron_config.tensor_model_parallel_size=3").problems
    assert "8 devices do not split into groups of 6" in str(problem)
    unread = read("strategy=fsdp", "megatron_config.moe_grouped_gemm=false").ignored
    assert [one.key for one in unread] == ["megatron_config"] and "strategy is fsdp" in unread[0].reason


@pytest.mark.parametrize(
    ("split", "files"),
    [
        ("train", ["a/b:train"]),
        ("train[:50]", ["a/b:train[:50]"]),
        ("train[200:240]", ["a/b:train[200:240]"]),
        ("train[-50:]", ["a/b:train[-50:]"]),
        ("train[:10%]", ["a/b:train[:10%]"]),
        ("train[10%:]+test[:5]", ["a/b:train[10%:]", "a/b:test[:5]"]),
    ],
)
def test_splits(split: str, files: list[str]) -> None:
    loaded = read("strategy=fsdp", f"train_dataset_splits=['{split}']")
    assert not loaded.problems and not loaded.unsupported
    assert (loaded.config.data.train_files, loaded.config.data.max_rows) == (files, None)


@pytest.mark.parametrize("split", ["train[3]", "train[:200%]", "train[a:b]", "[:5]", ""])
def test_splits_that_cannot_be(split: str) -> None:
    (problem,) = said(f"train_dataset_splits=['{split}']")
    assert "is no split: it is written train, train[:1000]" in problem


def test_several_sets_are_mixed_by_their_shares_unless_they_are_read_in_order() -> None:
    two = ("strategy=fsdp", "train_datasets=[x/rows.jsonl,c/d]", "train_dataset_splits=['train[:9]',test]")
    data = read(*two).config.data
    assert data.train_files == ["x/rows.jsonl[:9]", "c/d:test"]  # a file has no splits
    assert data.train_sources == ["x/rows.jsonl", "c/d"]
    assert data.source_weights == {"x/rows.jsonl": 1.0, "c/d": 1.0}
    assert read(*two, "train_dataset_weights=[3,1]").config.data.source_weights == {"x/rows.jsonl": 3.0, "c/d": 1.0}
    in_order = read(*two, "sampler=sequential").config.data
    assert (in_order.train_sources, in_order.source_weights, in_order.shuffle) == ([], {}, False)
    twice = ("strategy=fsdp", "train_datasets=[a/b,a/b]", "train_dataset_splits=['train[:9]','train[9:]']")
    assert read(*twice).config.data.source_weights == {"a/b": 1.0, "a/b#2": 1.0}


def test_held_out_sets_have_names() -> None:
    data = read("strategy=fsdp", "eval_datasets=[a/b,c/d]", "eval_dataset_splits=['train[-9:]+test',test]").config.data
    assert data.validation_files == ["a/b:train[-9:]", "a/b:test", "c/d:test"]
    assert data.validation_sources == ["a_b", "a_b", "c_d"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("train_dataset_splits=[train,test]",), "has 2 splits, and train_datasets 1 data sets"),
        (("train_dataset_weights=[1,2]",), "train_dataset_weights has 2 weights for 1 data sets"),
        (("train_dataset_weights=[0]",), "must all be above 0"),
        (("train_dataset_weights=[1]", "sampler=sequential"), "is read with sampler=random, and sampler is sequential"),
        (("pretokenized_dataset_paths=[x]",), "pretokenized_dataset_paths and train_datasets both name data"),
        (("eval_pretokenized_dataset_paths=[]",), "eval_pretokenized_dataset_paths is an empty list"),
        (("eval_datasets=[a/b]", "eval_dataset_names=[x,y]"), "has the names x, y for 1 data sets"),
        (("num_steps=3", "num_epochs=2"), "num_steps and num_epochs are both written"),
        (("dataset_name=c/d",), "train_datasets took the place of dataset_name, and both are written"),
        (("use_sequence_packing=true",), "use_sequence_packing needs max_length, which is null"),
        (("use_sequence_packing=true", "max_length=512", "max_tokens_per_microbatch=9"), "has no room for a text of"),
        (("max_ckpts_to_keep=0",), "would keep no checkpoint"),
        (("resume_from=out",), "out is no checkpoint: the folder's name must be global_step_N"),
        (("sampler=custom",), "draws rows by a class of your own"),
        (("placement.num_nodes=0",), "placement.num_nodes must be at least 1, not 0"),
        (("optimizer_config.scheduler=cosin",), "did you mean cosine"),
        (("dummy_run_full_ctx=true", "max_length=null"), "dummy_run_full_ctx needs max_length"),
        (("dummy_run_full_ctx=true", "dummy_run_max_steps=0"), "dummy_run_max_steps must be at least 1, not 0"),
        (("max_lenght=3",), "did you mean max_length"),
        (("logger=wandbb",), "did you mean wandb"),
    ],
)
def test_what_cannot_be_is_named(overrides: tuple[str, ...], words: str) -> None:
    problems = said(*overrides)
    assert any(words in problem for problem in problems), problems


def test_a_trial_makes_its_texts_up_and_keeps_nothing() -> None:
    """As SkyRL's: batch_size texts of max_length tokens, dummy_run_max_steps steps, no data, no validation, no checkpoint."""
    given = (
        "batch_size=4",
        "max_length=64",
        "ckpt_interval=5",
        "resume_from=latest",
        "eval_interval=2",
        "num_steps=10",
    )
    files = ("train_datasets=[a.parquet,b.parquet]", "eval_datasets=[c.parquet]")
    loaded = read("strategy=fsdp", *given, *files, "dummy_run_full_ctx=true", "dummy_run_max_steps=3")
    config = loaded.config
    assert loaded.problems == ()
    assert (config.data.train_files, config.data.validation_files, config.data.train_sources) == ([], [], [])
    assert config.data.dataset_class_options == {"rows": 4, "tokens": 64}
    assert (config.run.total_steps, config.run.resume, config.checkpoint.every_steps) == (3, "never", None)
    assert not config.checkpoint.at_end
    assert {"train_datasets", "eval_datasets", "num_steps"} <= {each.key for each in loaded.ignored}
    assert read("strategy=fsdp", "dummy_run_max_steps=3").config.data.dataset_class_file is None


def test_checkpoints_and_exports() -> None:
    saved = read(
        "strategy=fsdp", "ckpt_path=out", "ckpt_interval=5", "hf_save_interval=10", "resume_from=latest"
    ).config
    assert (saved.checkpoint.every_steps, saved.checkpoint.folder, saved.run.resume) == (5, "out", "auto")
    assert (saved.checkpoint.export_every_steps, saved.checkpoint.export_folder) == (10, "out/hf_exports")
    none = read("strategy=fsdp", "export_path=x").config
    assert (none.checkpoint.every_steps, none.checkpoint.at_end, none.run.resume) == (None, False, "never")
