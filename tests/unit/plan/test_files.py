"""Model folders, run folders and templates, looked at without loading them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.plan.files import check_run_files
from posttrain.plan.model_files import is_hub_id
from posttrain.plan.model_shape import read_shape

NO_TENSORS = (2).to_bytes(
    8, "little"
) + b"{}"  # the smallest file of safetensors: the length of its header, and the header


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the files of a model; nothing reads what is in them."""
    folder = tmp_path / "models" / "small"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def problems(path: str | Path, **sections: dict[str, Any]) -> list[tuple[str, str]]:
    """(field, message) of every problem."""
    model = {"path": str(path), **sections.pop("model", {})}
    config = RunConfig.model_validate({"model": model, "data": {"train_files": ["x"]}, **sections})
    return [(problem.field, str(problem)) for problem in check_run_files(config)]


def test_a_complete_folder(model: Path) -> None:
    assert problems(model) == []
    assert problems("models/small") == []


@pytest.mark.parametrize("name", ["org/name", "gpt2", "Qwen/Qwen3-0.6B"])
def test_hub_ids_are_not_looked_for(name: str) -> None:
    assert is_hub_id(name)
    assert problems(name) == []


@pytest.mark.parametrize("name", ["/absent", "./absent", "a/b/c", "../x", ".", "models/small"])
def test_what_is_a_folder(name: str, model: Path) -> None:
    assert not is_hub_id(name)


def test_a_folder_that_is_not_there() -> None:
    assert problems("./absent") == [
        (
            "model.path",
            "there is no folder ./absent; name a Hugging Face model folder, or a hub id such as org/name",
        )
    ]


def test_a_file_is_not_a_model(model: Path) -> None:
    ((_, message),) = problems(model / "config.json")
    assert "is a file, and a model is a folder" in message


def test_weights_in_the_parts_of_processes(model: Path) -> None:
    (model / "weights").mkdir()
    (model / "model.safetensors").rename(model / "weights/shard-00001-model-00001-of-00001.safetensors")
    ((field, found),) = problems(model)
    assert field == "model.path"
    assert f"posttrain export {model.parent} OUT_DIR puts them together; then model.path=OUT_DIR" in found


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "holds no config.json, so it is not a Hugging Face model folder"),
        ("model.safetensors", "holds no weights (*.safetensors)"),
        ("tokenizer.json", "holds no tokenizer (tokenizer.json or tokenizer_config.json); add one, or name another"),
    ],
)
def test_each_file_that_is_missing(missing: str, message: str, model: Path) -> None:
    (model / missing).unlink()
    ((field, found),) = problems(model)
    assert field == "model.path"
    assert message in found


def test_everything_missing_of_a_model_comes_together(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (_, first), (_, second) = problems(tmp_path / "model")
    assert "holds no weights" in first
    assert "holds no tokenizer" in second


def test_a_folder_that_is_no_model_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "models/tiny").mkdir(parents=True)
    ((_, found),) = problems(tmp_path / "models")
    assert "holds no config.json" in found and "or a hub id such as org/name" in found
    (tmp_path / "models/tiny/config.json").write_text("{}")
    ((_, found),) = problems(tmp_path / "models")
    assert f"did you mean {tmp_path}/models/tiny?" in found


def test_pickled_weights_are_not_weights(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    ((_, message),) = problems(model)
    assert "save them again as safetensors" in message


def test_a_sharded_model_needs_every_shard(model: Path) -> None:
    (model / "model.safetensors").rename(model / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    ((_, message),) = problems(model)
    assert "lacks 1 of 2 weight files (two.safetensors is the first)" in message
    (model / "two.safetensors").write_bytes(NO_TENSORS)
    assert problems(model) == []
    (model / "model.safetensors.index.json").write_text('{"weight_map": ')
    assert "index.json cannot be read" in problems(model)[0][1]


def test_a_broken_config(model: Path) -> None:
    (model / "config.json").write_text("{")
    assert "config.json is not valid JSON" in problems(model)[0][1]


@pytest.mark.parametrize("content", ["", '{"eos_token_id":', "[1, 2]", "null", "\ufeff{}"])
@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_settings_that_no_model_has(model: Path, name: str, content: str) -> None:
    """transformers goes on without some of them: the tokens that end a response would be lost without a word."""
    (model / name).write_text("{}")
    assert problems("models/small") == []
    (model / name).write_text(content)
    ((field, message),) = problems("models/small")
    assert (field, name in message, message.endswith("copy the model again")) == ("model.path", True, True)


@pytest.mark.parametrize("size", [0, -1, "x", 1.5, True, {"a": 1}])
@pytest.mark.parametrize("name", ["hidden_size", "head_dim", "vocab_size", "num_key_value_heads"])
def test_sizes_that_no_model_has(model: Path, name: str, size: object) -> None:
    at = "models/small/config.json"
    for config in ({name: size}, {"text_config": {name: size}, name: 2}):
        (model / "config.json").write_text(json.dumps(config))
        place = f"text_config.{name}" if "text_config" in config else name
        what = f"{place} in {at} is {json.dumps(size)}, and must be a whole number of at least 1; copy the model again"
        assert problems("models/small") == [("model.path", what)]
    for fine in ({}, {name: None}, {name: [1, 2]}, {name: 3}):
        (model / "config.json").write_text(json.dumps(fine))
        assert problems("models/small") == []


@pytest.mark.parametrize("size", [None, 0, "x", [1]])
def test_no_shape_is_read_from_such_sizes(model: Path, size: object) -> None:
    whole = {
        "vocab_size": 8,
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        (model / "config.json").write_text(json.dumps(whole | {name: size}))
        assert read_shape("models/small") is None
    (model / "config.json").write_text(json.dumps(whole))
    assert read_shape("models/small") is not None


@pytest.mark.parametrize("length", [0, 3, 9])
def test_weights_that_were_cut_short(model: Path, length: int) -> None:
    (model / "model.safetensors").write_bytes(NO_TENSORS[:length])
    said = "is empty" if length == 0 else f"is cut short: it has {length} of"
    ((_, message),) = problems("models/small")
    assert said in message


def test_a_tokenizer_of_its_own(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    other = tmp_path / "tokenizer"
    assert problems(model, model={"tokenizer_path": str(other)})[0][0] == "model.tokenizer_path"
    other.mkdir()
    assert "holds no tokenizer" in problems(model, model={"tokenizer_path": str(other)})[0][1]
    (other / "tokenizer_config.json").write_text("{}")
    assert problems(model, model={"tokenizer_path": str(other)}) == []


def test_the_critic_is_looked_at_when_it_is_used(model: Path) -> None:
    assert problems(model, critic={"path": "./absent"}) == []
    ((field, _),) = problems(model, critic={"path": "./absent"}, advantage={"name": "gae"})
    assert field == "critic.path"


def test_the_reference_is_looked_at_when_it_is_used(model: Path) -> None:
    assert problems(model, reference={"path": "./absent"}) == []
    ((field, _),) = problems(model, reference={"path": "./absent"}, loss={"kl_coef": 0.1})
    assert field == "reference.path"
    (model / "tokenizer.json").unlink()  # a reference needs none
    assert len(problems(model, reference={"path": str(model)}, loss={"kl_coef": 0.1})) == 1


def test_a_chat_template_that_is_not_there(model: Path) -> None:
    assert problems(model, model={"chat_template_file": "chat.jinja"}) == [
        ("model.chat_template_file", "there is no file chat.jinja")
    ]


def test_pointers_of_git_lfs_in_the_place_of_weights(model: Path) -> None:
    """What git clone leaves without git-lfs, for a model in one file and in shards."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (model / "model.safetensors").write_text(pointer)
    text = "no model could be loaded from models/small; {} is a pointer of git-lfs: fetch the weights with git lfs pull"
    assert problems("models/small") == [("model.path", text.format("model.safetensors"))]
    (model / "model.safetensors").rename(model / "two.safetensors")
    (model / "one.safetensors").write_bytes(NO_TENSORS)
    (model / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
    )
    assert problems("models/small") == [("model.path", text.format("two.safetensors"))]


@pytest.mark.parametrize("place", ["models/small", "models/small/runs/x", "models/other/../small/"])
@pytest.mark.parametrize("field", ["run.folder", "checkpoint.folder", "checkpoint.export_folder"])
def test_nothing_is_written_among_the_files_of_a_model(field: str, place: str, model: Path) -> None:
    section, key = field.split(".")
    where = "lies in" if place.endswith("x") else "is"
    assert problems("models/small", **{section: {key: place}}) == [
        (
            field,
            f"{place} {where} the folder of the model models/small, and the run would write among its files; name another "
            f"{field}",
        )
    ]


def test_other_models_are_read_too(model: Path) -> None:
    Path("critic").symlink_to(model)
    found = problems("org/name", run={"folder": "models/small/x"}, critic={"path": "critic"})
    assert [field for field, _ in found] == ["run.folder"]
    assert problems("models/small", run={"folder": "models"}) == []  # the model lies in a folder of its own


@pytest.mark.parametrize("file", ["runs/a/metrics.jsonl", "runs/a/validation/test.parquet"])
def test_data_do_not_lie_among_what_a_run_writes(file: str, model: Path) -> None:
    data = {"train_files": ["runs/a/train.parquet"], "validation_files": [file]}
    text = f"the run writes into runs/a, and {file} lies among what it writes there; name another run.folder, or move {file}"
    assert problems(model, data=data, run={"folder": "runs/a"}) == [("run.folder", text)]
    assert problems(model, data=data, run={"folder": "runs/b"}) == []


@pytest.mark.parametrize("folder", ["runs/new", "runs"])
def test_a_run_folder_that_can_be_written_is_not_made(folder: str, model: Path) -> None:
    assert problems(model, run={"folder": folder}) == []
    assert not Path("runs").exists()


def test_a_run_folder_that_is_a_file_or_below_one(model: Path) -> None:
    Path("file").write_text("")
    for folder in ("file", "file/below/it"):
        assert problems(model, run={"folder": folder}) == [
            ("run.folder", "file is a file, and a run writes into a folder; name another run.folder")
        ]


def test_a_run_folder_without_permission(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # an administrator may write everywhere
    ((field, message),) = problems(model, run={"folder": "runs/new"})
    assert field == "run.folder"
    assert message == "nothing can be written into .: permission denied; name another run.folder"


def test_a_reward_model_has_a_head(model: Path, tmp_path: Path) -> None:
    """A causal language model has none; a class that is not named is left to loading."""
    other = tmp_path / "models" / "other"
    shutil.copytree(model, other)
    reward = {"terms": [], "model": {"path": str(other)}}
    for saved_as, wrong in (("LlamaForCausalLM", True), ("LlamaForSequenceClassification", False), (None, False)):
        (other / "config.json").write_text(json.dumps({"architectures": [saved_as]} if saved_as else {}))
        found = problems(model, reward=reward)
        assert [field for field, _ in found] == ["reward.model.path"] * wrong
        assert all(
            "is not a classifier (LlamaForCausalLM), so it has no head to score with" in text for _, text in found
        )
