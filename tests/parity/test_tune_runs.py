"""Tuning runs from the file to the last checkpoint: the numbers are those of a plain loop, however the step is cut and wherever
the run is stopped, and a reward model scores alike in training, in transformers and in a PPO run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from posttrain.backends.reward_model.local import Conversation, LocalRewardModel
from posttrain.build.tune import tune_run
from posttrain.config.reward import RewardModelConfig
from posttrain.config.tune import TuneConfig
from posttrain.data.preferences import load_preferences
from posttrain.errors import DataError, ModelError
from posttrain.models.processors import load_processor
from posttrain.models.reward_model import load_reward_model
from posttrain.models.tiny import write_tiny_model
from posttrain.models.tiny_vision import write_tiny_vision_model
from posttrain.records.texts import Text
from posttrain.run.export import export_checkpoint

ROOT = Path(__file__).parents[2]
Make = Callable[..., TuneConfig]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(tmp_path: Path, model: Path) -> Make:
    """A configuration of 8 pairs of different lengths, 4 pairs per step, unless changed by section."""
    pairs = [
        {"prompt": f"say {n} " + "please " * (n % 3), "chosen": f"{n}! " * (n % 4 + 1), "rejected": f"no {n}"}
        for n in range(8)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))

    def config(name: str, **sections: dict[str, Any]) -> TuneConfig:
        data = {"train_files": [str(tmp_path / "pairs.jsonl")], "sequences_per_step": 8, "max_tokens": 128}
        policy = {
            "optimizer": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.0},
            "schedule": {"name": "constant"},
            "sequences_per_micro_batch_per_device": 4,
        } | sections.get("policy", {})
        # The reference's micro-batches are the policy's: on some processors a product's last bits depend on its number of rows,
        # and equal weights are to give equal log-probs.
        cut = {name: size for name, size in policy.items() if name.endswith(("micro_batch", "micro_batch_per_device"))}
        return TuneConfig.model_validate(
            {
                "model": {"path": str(model), "compute_dtype": "float32"} | sections.get("model", {}),
                "data": data | sections.get("data", {}),
                "method": {"name": "dpo", "beta": 0.2} | sections.get("method", {}),
                "reference": cut | sections.get("reference", {}),
                "run": {"name": name, "folder": str(tmp_path / name), "total_epochs": 2} | sections.get("run", {}),
                "policy": policy,
                "checkpoint": {"at_end": False} | sections.get("checkpoint", {}),
                "tracking": {"trackers": []},
                "placement": {"device": "cpu", "cpu_threads": 1},
            }
        )

    return config


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(("time/", "speed/"))} for line in lines]


def assert_alike(one: list[dict[str, Any]], other: list[dict[str, Any]], *, rel: float = 2e-4) -> None:
    assert len(one) == len(other) > 1
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            if name == "rewards/accuracies" and abs(mine["rewards/margins"]) < 1e-6:
                continue  # the policy is its reference: rounding decides which side is better
            assert theirs[name] == pytest.approx(value, rel=rel, abs=2e-5), name


def test_two_steps_of_dpo_by_hand_in_float64(make: Make, model: Path) -> None:
    """Sums of log-probs from transformers' own logits, the formula of the paper, SGD."""
    lr, beta = 0.05, 0.2
    sgd = {"optimizer": {"name": "sgd", "lr": lr, "weight_decay": 0.0, "max_grad_norm": None}}
    config = make(
        "run", run={"total_epochs": 2}, data={"shuffle": False}, policy=sgd | {"schedule": {"name": "constant"}}
    )
    found = metrics_of(tune_run(config))
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    rows = load_preferences(config.data.train_files, config, tokenizer, what="training").rows
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)

    def logp(ids: Any, learned: Any) -> Tensor:
        tokens = torch.tensor(ids.astype("int64"))[None]
        logprobs = policy(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        each = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
        return each[torch.tensor(learned[1:])].sum()

    def ratios(of: int) -> Tensor:
        part = rows[of * 4 : of * 4 + 4]
        return torch.stack([torch.stack([logp(s.token_ids, s.learned) for s in row.sides]) for row in part])

    with torch.no_grad():
        reference = [ratios(0), ratios(1)]
    for number, line in enumerate(found[:2]):
        rewards = beta * (ratios(number) - reference[number])
        loss = -logsigmoid(rewards[:, 0] - rewards[:, 1]).mean()
        loss.backward()
        loss, rewards = loss.detach(), rewards.detach()
        gradients = [weight.grad for weight in policy.parameters() if weight.grad is not None]
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
        assert line["policy/loss"] == pytest.approx(float(loss), rel=1e-5)
        assert line["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert line["rewards/margins"] == pytest.approx(float((rewards[:, 0] - rewards[:, 1]).mean()), abs=1e-5)
        with torch.no_grad():
            for weight in policy.parameters():
                if weight.grad is not None:
                    weight -= lr * weight.grad
                    weight.grad = None
    assert found[0]["policy/loss"] == pytest.approx(math.log(2), rel=1e-12)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "method", ["dpo", *(pytest.param(n, marks=SLOW) for n in ("kto", "orpo", "simpo", "reward_model"))]
)
def test_no_cut_of_a_step_changes_its_numbers(make: Make, method: str) -> None:
    """One pair at a time, whatever fits into a budget of tokens, and padded rows of their own: the same losses and gradients."""
    named = {"method": {"name": method}, "run": {"total_steps": 2, "total_epochs": 1}}
    whole = metrics_of(tune_run(make("whole", **named, policy=_micro(64))))
    one = metrics_of(tune_run(make("one", **named, policy=_micro(1))))
    by_tokens = metrics_of(
        tune_run(
            make("tokens", **named, policy=_micro(1) | {"max_tokens_per_micro_batch": 150}, model={"padded": True})
        )
    )
    assert_alike(whole, one)
    assert_alike(whole, by_tokens)


def _micro(sequences: int) -> dict[str, Any]:
    optimizer = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.0}
    return {"optimizer": optimizer, "sequences_per_micro_batch_per_device": sequences}


@pytest.mark.slow
def test_reference_in_the_run_before_it_and_in_columns_give_the_same_numbers(make: Make, tmp_path: Path) -> None:
    config = make("run", data={"shuffle": False})
    in_run = metrics_of(tune_run(config))
    before = metrics_of(tune_run(make("before", data={"shuffle": False}, reference={"precompute": True})))
    assert_alike(in_run, before, rel=1e-5)
    from posttrain.build.reference_logps import with_reference_logps

    tokenizer: Any = AutoTokenizer.from_pretrained(config.model.path)
    (scored,) = with_reference_logps(
        config, load_preferences(config.data.train_files, config, tokenizer, what="training").rows
    )
    lines = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    for line, row in zip(lines, scored, strict=True):
        assert row.ref_logps is not None
        line["ref_chosen_logps"], line["ref_rejected_logps"] = row.ref_logps
    (tmp_path / "scored.jsonl").write_text("\n".join(map(json.dumps, lines)))
    columns = {"train_files": [str(tmp_path / "scored.jsonl")], "shuffle": False}
    columns["reference_columns"] = ["ref_chosen_logps", "ref_rejected_logps"]
    assert_alike(in_run, metrics_of(tune_run(make("columns", data=columns))), rel=1e-5)


def test_adapter_switched_off_is_the_reference(make: Make) -> None:
    folder = tune_run(make("run", policy={"lora": {"rank": 4}, "optimizer": {"lr": 1e-2}}, checkpoint={"at_end": True}))
    found = metrics_of(folder)
    assert found[0]["policy/loss"] == pytest.approx(math.log(2), rel=1e-9)
    assert found[-1]["rewards/accuracies"] > 0.5 > found[0]["rewards/accuracies"]
    assert (folder / "checkpoints/global_step_4/policy/adapter_model.safetensors").is_file()


@pytest.mark.parametrize("method", [pytest.param("kto", marks=SLOW), "reward_model"])
def test_resumed_run_is_the_uninterrupted_one_byte_for_byte(make: Make, method: str) -> None:
    named = {"method": {"name": method}, "checkpoint": {"at_end": True}}
    whole = tune_run(make("whole", **named, run={"total_steps": 3}))
    tune_run(make("cut", **named, run={"total_steps": 2}))
    cut = tune_run(make("cut", **named, run={"total_steps": 3}))
    assert metrics_of(whole) == metrics_of(cut)
    last = "checkpoints/global_step_3/policy/model.safetensors"
    assert (whole / last).read_bytes() == (cut / last).read_bytes()


def test_reward_model_scores_alike_in_training_transformers_and_ppo(make: Make, tmp_path: Path) -> None:
    data = {"validation_files": [str(tmp_path / "pairs.jsonl")]}
    config = make("run", method={"name": "reward_model"}, data=data, checkpoint={"at_end": True})
    folder = tune_run(config)
    found = metrics_of(folder)
    assert found[0]["validation/loss"] == pytest.approx(math.log(2))
    assert found[-1]["validation/accuracy"] == 1.0
    out = tmp_path / "exported"
    export_checkpoint(folder, out)
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    rows = load_preferences(config.data.train_files, config, tokenizer, what="training").rows
    theirs: Any = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
    frozen = load_reward_model(RewardModelConfig(path=str(out)), dtype=torch.float32)
    ours = LocalRewardModel(frozen, None, sequences_per_micro_batch=8)._scores(
        [Conversation(side.token_ids.tolist()) for row in rows for side in row.sides]
    )
    with torch.no_grad():
        plain = [
            float(theirs(input_ids=torch.tensor(side.token_ids.astype("int64"))[None]).logits)
            for row in rows
            for side in row.sides
        ]
    assert ours == pytest.approx(plain, abs=1e-5)
    assert found[-1]["validation/rewards/chosen"] == pytest.approx(sum(plain[0::2]) / 8, abs=1e-5)
    assert theirs.config.pad_token_id is not None and theirs.config.num_labels == 1
    assert "score.weight" in load_file(out / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"policy": {"lora": {"rank": 4}}}, {"checkpoint": {"at_end": True, "sharded": True}}])
def test_reward_model_of_an_adapter_or_of_parts_is_exported_whole(
    make: Make, tmp_path: Path, how: dict[str, Any]
) -> None:
    data = {"validation_files": [str(tmp_path / "pairs.jsonl")]}
    config = make("run", **{"method": {"name": "reward_model"}, "data": data, "checkpoint": {"at_end": True}} | how)
    folder = tune_run(config)
    out = tmp_path / "exported"
    export_checkpoint(folder, out)
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    rows = load_preferences(config.data.train_files, config, tokenizer, what="training").rows
    theirs: Any = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        tokens = [torch.tensor(row.sides[0].token_ids.astype("int64"))[None] for row in rows]
        scores = [float(theirs(input_ids=each).logits) for each in tokens]
    assert metrics_of(folder)[-1]["validation/rewards/chosen"] == pytest.approx(sum(scores) / len(scores), abs=1e-4)
    assert theirs.config.pad_token_id is not None


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision_model(tmp_path_factory.mktemp("seeing"), "qwen2_vl")


def write_pairs_with_images(folder: Path) -> None:
    """Four pairs; the second has no image, and the third names its place."""
    for n in range(3):
        Image.new("RGB", (28 * (n + 1), 28), (80 * n, 10, 200)).save(folder / f"{n}.png")
    rows = [
        {"prompt": "which colour", "images": ["0.png"], "chosen": "red", "rejected": "blue blue"},
        {"prompt": "say red", "images": None, "chosen": "red red", "rejected": "no"},
        {"prompt": "here <image> or there", "images": ["1.png"], "chosen": "here", "rejected": "there it is"},
        {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "same"}]}],
         "images": ["1.png", "2.png"], "chosen": [{"role": "assistant", "content": "no"}],
         "rejected": [{"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]},
    ]  # fmt: skip
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_pairs_with_images_have_transformers_numbers(make: Make, tmp_path: Path, seeing: Path) -> None:
    """The first step's log-probs are those of transformers' own model, side by side without packing."""
    write_pairs_with_images(tmp_path)
    config = make("run", model={"path": str(seeing)}, data={"shuffle": False})
    found = metrics_of(tune_run(config))
    tokenizer: Any = AutoTokenizer.from_pretrained(seeing)
    processor = load_processor(config.model, tokenizer, config.data)
    assert processor is not None
    rows = load_preferences(config.data.train_files, config, tokenizer, processor, what="training").rows
    assert [bool(row.sides[0].images) for row in rows] == [True, False, True, True]
    policy: Any = AutoModelForImageTextToText.from_pretrained(seeing, dtype=torch.float32)

    def logp(side: Text) -> float:
        tokens = torch.tensor(side.token_ids.astype("int64"))[None]
        given: dict[str, Any] = {
            "input_ids": tokens,
            "mm_token_type_ids": (tokens == policy.config.image_token_id).int(),
        }
        if side.images is not None:
            given |= {name: torch.tensor(value) for name, value in side.images.features.items()}
        with torch.no_grad():
            logprobs = policy(**given).logits[0, :-1].log_softmax(-1)
        return float(logprobs.gather(1, tokens[0, 1:, None])[:, 0][torch.tensor(side.learned[1:])].sum())

    for number, name in enumerate(("logps/chosen", "logps/rejected")):
        mean = sum(logp(row.sides[number]) for row in rows) / len(rows)
        assert found[0][name] == pytest.approx(mean, abs=1e-4)
    assert found[0]["policy/loss"] == pytest.approx(math.log(2), rel=1e-12)


@pytest.mark.slow
def test_images_in_pairs_survive_cuts_and_a_stop(make: Make, tmp_path: Path, seeing: Path) -> None:
    write_pairs_with_images(tmp_path)
    named = {"model": {"path": str(seeing)}, "checkpoint": {"at_end": True}}
    whole = tune_run(make("whole", **named, run={"total_steps": 2}))
    tune_run(make("cut", **named, run={"total_steps": 1}))
    cut = tune_run(make("cut", **named, run={"total_steps": 2}))
    assert metrics_of(whole) == metrics_of(cut)
    assert_alike(metrics_of(whole), metrics_of(tune_run(make("one", **named, run={"total_steps": 2}, policy=_same(2)))))


def _same(sequences: int) -> dict[str, Any]:
    optimizer = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.0}
    return {"optimizer": optimizer, "sequences_per_micro_batch_per_device": sequences}


@pytest.mark.parametrize("method", [pytest.param("kto", marks=SLOW), pytest.param("orpo", marks=SLOW)])
def test_every_method_reads_images(make: Make, tmp_path: Path, seeing: Path, method: str) -> None:
    write_pairs_with_images(tmp_path)
    found = metrics_of(tune_run(make("run", model={"path": str(seeing)}, method={"name": method})))
    assert math.isfinite(found[-1]["policy/loss"]) and found[-1]["policy/grad_norm"] > 0


@pytest.mark.slow
def test_a_reward_model_of_pairs_with_images_scores_as_in_ppo_and_resumes(
    make: Make, tmp_path: Path, seeing: Path
) -> None:
    """Scores of the exported folder, on texts with their images one by one, are those that training measured."""
    write_pairs_with_images(tmp_path)
    data = {"validation_files": [str(tmp_path / "pairs.jsonl")]}
    named = {"model": {"path": str(seeing)}, "method": {"name": "reward_model"}, "data": data}
    named |= {"checkpoint": {"at_end": True}}
    config = make("whole", **named, run={"total_steps": 3})
    folder = tune_run(config)
    found = metrics_of(folder)
    assert found[0]["validation/loss"] == pytest.approx(math.log(2)) and found[1]["policy/grad_norm"] > 0
    tune_run(make("cut", **named, run={"total_steps": 1}))
    assert metrics_of(tune_run(make("cut", **named, run={"total_steps": 3})))[-1] == found[-1]
    export_checkpoint(folder, tmp_path / "exported")
    tokenizer: Any = AutoTokenizer.from_pretrained(seeing)
    processor = load_processor(config.model, tokenizer, config.data)
    rows = load_preferences(config.data.train_files, config, tokenizer, processor, what="training").rows
    frozen = load_reward_model(RewardModelConfig(path=str(tmp_path / "exported")), dtype=torch.float32)
    scorer = LocalRewardModel(frozen, None, sequences_per_micro_batch=1)
    scores = [scorer._scores([_conversation(row.sides[side])])[0] for row in rows for side in (0, 1)]
    for number, name in enumerate(("chosen", "rejected")):
        mean = sum(scores[number::2]) / len(rows)
        assert found[-1][f"validation/rewards/{name}"] == pytest.approx(mean, abs=1e-4)
    seen = rows[0].sides[0].images
    assert seen is not None
    features = {**seen.features, "pixel_values": -seen.features["pixel_values"]}
    other = replace(seen, features=features, content_hash="another")
    (unlike,) = scorer._scores([replace(_conversation(rows[0].sides[0]), images=other)])
    assert abs(unlike - scores[0]) > 1e-4


def _conversation(side: Text) -> Conversation:
    return Conversation(side.token_ids.tolist(), prompt=int(side.learned.argmax()), images=side.images)


def test_images_are_refused_where_nothing_reads_them(make: Make, tmp_path: Path, seeing: Path) -> None:
    write_pairs_with_images(tmp_path)
    with pytest.raises(ModelError, match=r"3 of 4 rows have images \(pairs.jsonl:0 is the first\)"):
        tune_run(make("text"))
    with pytest.raises(DataError, match=r"holds images that are not read; set data\.image_column=images"):
        tune_run(make("named", model={"path": str(seeing)}, data={"image_column": "pictures"}))
    left_out = tune_run(make("out", data={"image_column": None, "train_files": [_texts(tmp_path)]}))
    assert len(metrics_of(left_out)) == 2


def _texts(folder: Path) -> str:
    """The rows whose prompts are texts."""
    lines = (folder / "pairs.jsonl").read_text().splitlines()
    (folder / "texts.jsonl").write_text("\n".join([*lines[:3], lines[1].replace("no", "never")]))
    return str(folder / "texts.jsonl")


@pytest.mark.parametrize(
    "how",
    [
        {"checkpoint": {"at_end": True}},
        pytest.param({"policy": {"lora": {"rank": 4}}}, marks=SLOW),
        pytest.param({"checkpoint": {"at_end": True, "sharded": True}}, marks=SLOW),
    ],
)
def test_bias_of_a_head_is_trained_resumed_exported_and_scored(
    make: Make, model: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    """Without center_coef its gradient is 0 (both sides of a pair are shifted alike), so it stays 3.5 without decay."""
    started: Any = AutoModelForTokenClassification.from_pretrained(model, num_labels=1)
    torch.nn.init.zeros_(started.score.weight)
    torch.nn.init.constant_(started.score.bias, 3.5)
    started.save_pretrained(tmp_path / "scorer")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "scorer")
    named = {
        "method": {"name": "reward_model", "center_coef": 0.0},
        "model": {"path": str(tmp_path / "scorer")},
        "data": {"validation_files": [str(tmp_path / "pairs.jsonl")]},
        "checkpoint": {"at_end": True},
    } | how
    tune_run(make("run", **named, run={"total_steps": 1}))
    folder = tune_run(make("run", **named, run={"total_steps": 2}))
    found = metrics_of(folder)
    assert found[0]["validation/rewards/chosen"] == 3.5
    out = tmp_path / "exported"
    export_checkpoint(folder, out)
    assert load_file(out / "model.safetensors")["score.bias"].tolist() == pytest.approx([3.5], abs=1e-6)
    frozen = load_reward_model(RewardModelConfig(path=str(out)), dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    config = make("run", **named)
    rows = load_preferences(config.data.train_files, config, tokenizer, what="training").rows
    scorer = LocalRewardModel(frozen, None, sequences_per_micro_batch=8)
    scores = scorer._scores([Conversation(row.sides[0].token_ids.tolist()) for row in rows])
    assert found[-1]["validation/rewards/chosen"] == pytest.approx(sum(scores) / len(scores), abs=1e-4)


@pytest.mark.slow
def test_every_logged_metric_is_in_the_glossary(make: Make, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").partition("## Supervised fine-tuning")[2]
    not_of_tuning = {"policy/entropy", "validation/<source>/loss", "time/checkpoint_wait_s"}
    documented = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)) - not_of_tuning
    logged: set[str] = set()
    for method, dtype in (("dpo", "float32"), ("kto", "float32"), ("orpo", "float16")):
        data = {"validation_files": [str(tmp_path / "pairs.jsonl")]}
        model = {"compute_dtype": dtype}  # loss_scale is of float16 alone
        folder = tune_run(make(method, method={"name": method}, data=data, model=model, run={"total_steps": 1}))
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        logged |= {name for line in lines for name in json.loads(line)}
    copies = {
        name for name in logged if name.startswith("validation/") and name.removeprefix("validation/") in documented
    }
    assert logged - copies - {"step"} == documented - {"validation/<name>"} - copies
