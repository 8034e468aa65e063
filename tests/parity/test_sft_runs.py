"""Supervised fine-tuning from the file to the last checkpoint: the numbers are those of a plain loop, and a run that is
stopped anywhere goes on as if it had not been."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.backends.torch_training import policy as local_engine
from posttrain.build.sft import sft_run
from posttrain.config.sft import SftConfig
from posttrain.errors import RunStopped
from posttrain.models.tiny import write_tiny_model
from warm.processes import WarmProcess, run

ROOT = Path(__file__).parents[2]
Make = Callable[..., SftConfig]
Row = tuple[list[int], list[bool]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(tmp_path: Path, model: Path) -> Make:
    """A configuration of 8 conversations of different lengths, 4 per step, unless changed by section."""
    rows = []
    for index in range(8):
        asked = [{"role": "user", "content": f"say {index} " + "please " * (index % 3)}]
        rows.append([*asked, {"role": "assistant", "content": f"{index}!" * (index + 1)}])
        if index % 2:
            rows[-1] += [{"role": "user", "content": "again"}, {"role": "assistant", "content": "no"}]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    pairs = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(3)]
    (tmp_path / "held_out.jsonl").write_text("\n".join(json.dumps(pair) for pair in pairs))

    def config(name: str, **sections: dict[str, Any]) -> SftConfig:
        data = {
            "train_files": [str(tmp_path / "train.jsonl")],
            "validation_files": [str(tmp_path / "held_out.jsonl")],
            "sequences_per_step": 4,
            "max_tokens": 256,
        }
        optimizer = {"lr": 1e-2, "eps": 1e-4, "betas": [0.9, 0.98], "weight_decay": 0.1, "max_grad_norm": 0.5}
        return SftConfig.model_validate(
            {
                "model": {"path": str(model), "compute_dtype": "float32"} | sections.get("model", {}),
                "data": data | sections.get("data", {}),
                "run": {"name": name, "folder": str(tmp_path / name), "total_epochs": 2} | sections.get("run", {}),
                "policy": {"optimizer": optimizer, "sequences_per_micro_batch_per_device": 3}
                | sections.get("policy", {}),
                "validation": sections.get("validation", {}),
                "checkpoint": sections.get("checkpoint", {}),
                "tracking": {"trackers": []},
                "placement": {"device": "cpu", "cpu_threads": 1},
            }
        )

    return config


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(("time/", "speed/"))} for line in lines]


def weights_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / f"checkpoints/global_step_{step}/policy/model.safetensors")
    return found


# ------------------------------------------------------------------------------------------- a plain loop


def plain_rows(config: SftConfig) -> list[Row]:
    """Token ids of each row, and which are learned, by ChatML written out: what the assistant says, and the end of its turn."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    rows = []
    for line in Path(config.data.train_files[0]).read_text().splitlines():
        ids: list[int] = []
        learned: list[bool] = []
        for message in json.loads(line)["messages"]:
            head, said = f"<|im_start|>{message['role']}\n", f"{message['content']}<|im_end|>"
            for text, is_learned in ((head, False), (said, message["role"] == "assistant"), ("\n", False)):
                new = tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += new
                learned += [is_learned] * len(new)
        rows.append((ids, learned))
    return rows


def plain_losses(model: Any, rows: list[Row]) -> torch.Tensor:
    """-log pi of every learned token, one row at a time through the unmodified model."""
    losses = []
    for ids, learned in rows:
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
        targets, mask = torch.tensor(ids[1:]), torch.tensor(learned[1:])
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none")[mask])
    return torch.cat(losses)


def plain_run(config: SftConfig, updates: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and weights of a loop over the file in its order, with AdamW and the schedule by formula."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    settings, rows = config.policy.optimizer, plain_rows(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    losses, norms = [], []
    warmup = int(0.25 * updates)  # 4 updates: 1 of warm-up
    for update in range(updates):
        wave = 0.5 * (1 + math.cos(math.pi * (update - warmup) / (updates - warmup)))
        factor = update / warmup if update < warmup else 0.1 + 0.9 * wave
        optimizer.param_groups[0]["lr"] = settings.lr * factor
        loss = plain_losses(model, rows[4 * (update % 2) : 4 * (update % 2) + 4]).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, dict(model.named_parameters())


SCHEDULE = {"name": "cosine", "warmup_ratio": 0.25, "min_lr_ratio": 0.1}


def test_losses_gradients_and_weights_are_those_of_a_plain_loop(make: Make) -> None:
    optimizer = make("x").policy.optimizer.model_dump()
    policy = {"schedule": SCHEDULE, "optimizer": optimizer, "sequences_per_micro_batch_per_device": 3}
    config = make("run", data={"shuffle": False}, policy=policy, validation={"before_training": False})
    folder = sft_run(config)
    losses, norms, weights = plain_run(config, updates=4)
    logged = metrics_of(folder)
    assert [line["policy/loss"] for line in logged] == pytest.approx(losses, rel=1e-6)
    assert [line["policy/grad_norm"] for line in logged] == pytest.approx(norms, rel=1e-5)
    # lr: 0; peak; 0.1 + 0.9 x (1 + cos(pi / 3)) / 2 = 0.775; 0.1 + 0.9 x (1 + cos(2 pi / 3)) / 2 = 0.325
    assert [line["policy/lr"] for line in logged] == pytest.approx([0.0, 1e-2, 0.775e-2, 0.325e-2])
    for name, weight in weights_of(folder, 4).items():
        torch.testing.assert_close(weight, weights[name].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changed",
    [
        {"policy": {"sequences_per_micro_batch_per_device": 1}},
        {"policy": {"sequences_per_micro_batch_per_device": 4}},
        {"policy": {"max_tokens_per_micro_batch": 130}},
        {"model": {"padded": True}},
        {"model": {"gradient_checkpointing": True}},
    ],
    ids=["one by one", "all at once", "by tokens", "padded", "checkpointing"],
)
def test_ways_of_computing_change_nothing(make: Make, changed: dict[str, dict[str, Any]]) -> None:
    optimizer = make("x").policy.optimizer.model_dump()
    policy = {"optimizer": optimizer} | changed.get("policy", {})
    one = metrics_of(sft_run(make("one", run={"total_steps": 2})))
    other = metrics_of(sft_run(make("other", model=changed.get("model", {}), policy=policy, run={"total_steps": 2})))
    for before, after in zip(one, other, strict=True):
        assert after == pytest.approx(before, rel=2e-5)


def test_float16_scales_the_loss_and_learns_as_float32_does(make: Make) -> None:
    """The factor starts at 2^16 and is halved until the gradients are finite."""
    full = metrics_of(sft_run(make("full", run={"total_steps": 3})))[1:]
    half = metrics_of(sft_run(make("half", model={"compute_dtype": "float16"}, run={"total_steps": 3})))[1:]
    made = [line for line in half if line["policy/skipped_updates"] == 0]
    assert made
    assert all(line["policy/loss_scale"] in {2.0**power for power in range(4, 17)} for line in half)
    assert [line["policy/loss"] for line in half] == pytest.approx([line["policy/loss"] for line in full], rel=5e-3)
    assert [line["policy/grad_norm"] for line in made] == pytest.approx(
        [line["policy/grad_norm"] for line in full if line["step"] in {one["step"] for one in made}], rel=5e-2
    )


def test_validation_is_the_mean_over_all_held_out_tokens(make: Make) -> None:
    config = make("run", run={"total_steps": 1}, validation={"after_training": False})
    first = metrics_of(sft_run(config))[0]
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    rows = []
    for number in range(3):  # as RL samples it: the prompt, and then the answer with the end token
        prompt = tokenizer(f"<|im_start|>user\n{number}+1?<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        answer = tokenizer(f"{number + 1}<|im_end|>")["input_ids"]
        rows.append((prompt + answer, [False] * len(prompt) + [True] * len(answer)))
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    with torch.no_grad():
        expected = float(plain_losses(model, rows).mean())
    assert first == {"step": 0, "validation/loss": pytest.approx(expected, rel=1e-6)}


# ------------------------------------------------------------------------------------------- going on


def test_two_epochs_resumed_after_every_step_are_the_uninterrupted_run(make: Make) -> None:
    """With schedule_over=epochs the learning rate is that of the whole run from the beginning."""
    policy = {"schedule_over": "epochs", "optimizer": {"lr": 1e-2}}
    validation = {"every_steps": 1}
    whole = sft_run(make("whole", policy=policy, validation=validation))
    for steps in (1, 2, 3, 4):
        resumed = sft_run(make("resumed", policy=policy, validation=validation, run={"total_steps": steps}))
    assert len(json.loads((resumed / "run.json").read_text())["resumes"]) == 3
    assert metrics_of(resumed) == metrics_of(whole)
    for name, weight in weights_of(resumed, 4).items():
        assert torch.equal(weight, weights_of(whole, 4)[name]), name


def test_epoch_cadences(make: Make) -> None:
    each = {"each_epoch": True}
    folder = sft_run(make("run", validation={**each, "before_training": False}, checkpoint={**each, "at_end": False}))
    assert [line["step"] for line in metrics_of(folder) if "validation/loss" in line] == [2, 4]  # 2 steps per epoch
    assert sorted(path.name for path in (folder / "checkpoints").glob("global_step_*")) == [
        "global_step_2",
        "global_step_4",
    ]


def test_a_run_of_reinforcement_learning_is_not_gone_on_with(make: Make) -> None:
    from posttrain.errors import ConfigError

    config = make("run", run={"total_steps": 1})
    folder = sft_run(config)
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    saved["data"] = {"prompts_per_step": 8, "train_files": ["x"]}
    (folder / "config.yaml").write_text(yaml.safe_dump(saved))
    with pytest.raises(ConfigError, match="holds a run of reinforcement learning, and this is one of SFT"):
        sft_run(config)


def test_a_dead_run_stays_dead_and_keeps_its_last_good_checkpoint(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of an epoch, from the second one on without an update."""
    objective, seen = local_engine.policy_objective, list[int]()

    def spoiled(*args: Any) -> Any:
        seen.append(1)
        loss, sums = objective(*args)
        return (loss * float("nan") if len(seen) > 2 else loss), sums

    monkeypatch.setattr(local_engine, "policy_objective", spoiled)
    config = make("run", run={"max_skipped_steps": 3}, checkpoint={"every_steps": 1, "keep_last": 1})
    for _ in range(2):
        with pytest.raises(RunStopped, match=r"3 steps in a row made no update .step 4 was the last") as raised:
            sft_run(config)
        assert "Last good checkpoint: global_step_1" in str(raised.value)
        left = sorted(path.name for path in (Path(config.folder) / "checkpoints").glob("global_step_*"))
        assert left == ["global_step_1", "global_step_3"]


def test_a_lora_run_learns_and_saves_an_adapter(make: Make) -> None:
    policy = {"lora": {"rank": 4}, "optimizer": {"lr": 1e-2}, "schedule": {"name": "constant"}}
    folder = sft_run(make("run", policy=policy, run={"total_epochs": 4}))
    losses = [line["policy/loss"] for line in metrics_of(folder) if "policy/loss" in line]
    assert losses[-1] < losses[0]
    assert (folder / "checkpoints/global_step_8/policy/adapter_model.safetensors").is_file()


def test_every_logged_metric_is_in_the_glossary_and_nothing_else_is(make: Make) -> None:
    """<placeholders> in the glossary stand for any name."""
    folder = sft_run(make("run", model={"compute_dtype": "float16"}, data={"validation_sources": ["a"]}))
    logged = {name for line in (folder / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    logged = {"validation/<source>/loss" if name == "validation/a/loss" else name for name in logged}
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").partition("## Supervised fine-tuning")[2]
    page = page.partition("## Tuning")[0]
    in_background = {"time/checkpoint_wait_s"}  # a save that the next step's update had to wait for
    assert logged - {"step"} == set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)) - in_background


@pytest.mark.slow
def test_command_stopped_by_sigterm_exits_75_and_finishes_when_started_again(make: Make, tmp_path: Path) -> None:
    config = make("run", run={"total_epochs": 200}, validation={"before_training": False})
    file = tmp_path / "run.yaml"
    tree = config.model_dump(mode="json") | {"tracking": {"trackers": ["console"]}}
    file.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-c", "from posttrain.cli.app import main; main()", "sft", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = WarmProcess(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGTERM)
            break
    output = process.stdout.read()
    assert process.wait(60) == 75, output
    saved = [int(path.name.rpartition("_")[2]) for path in (tmp_path / "run/checkpoints").glob("global_step_*")]
    tree["run"]["total_steps"] = saved[0] + 1
    tree["policy"]["schedule_over"] = "epochs"
    file.write_text(yaml.safe_dump(tree))
    again = run([*command, "--allow-config-change"], env=environment, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"resuming after step {saved[0]}" in again.stdout
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == list(range(1, saved[0] + 2))


@pytest.mark.slow
def test_the_examples_in_three_languages_are_the_same_run(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two steps of each, on the tiny model. A tenth of so few steps is none, and with ROLL, which rounds up, one."""
    from posttrain.data.reasoning_gym import write_dataset
    from posttrain.dialects.detect import read_config

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    sizes = {"train_rows": 16, "validation_rows": 3, "seed": 1}
    write_dataset("chain_sum", tmp_path / "runs/data/chain_sum", **sizes, options=options, instruction=None)  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    losses = []
    for name, overrides in (
        ("sft_chain_sum", [f"model.path={model}", "run.total_steps=2", "data.max_tokens=1024"]),
        ("verl_sft", [f"model.partial_pretrain={model}", "+posttrain.run.total_steps=2", "data.max_length=1024"]),
        (
            "roll_sft",
            [
                f"pretrain={model}",
                "max_steps=2",
                "sequence_length=1024",
                "sft_train.training_args.warmup_ratio=0",
                "+posttrain.data.shuffle=true",
            ],
        ),
    ):
        loaded = read_config(str(ROOT / "examples" / f"{name}.yaml"), overrides, None).runnable()
        assert loaded.entry == "sft"
        losses.append([line.get("policy/loss") for line in metrics_of(sft_run(loaded.config)) if line["step"]])
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 2


# ------------------------------------------------------------------------------------------- tokens and sources


def test_rows_that_are_tokens_already_train_as_their_texts_do(make: Make, tmp_path: Path) -> None:
    texts = make("texts")
    sft_run(texts)
    lines = [json.dumps({"input_ids": ids, "loss_mask": list(map(int, mask))}) for ids, mask in plain_rows(texts)]
    (tmp_path / "tokens.jsonl").write_text("\n".join(lines))
    data = {"train_files": [str(tmp_path / "tokens.jsonl")], "train_tokenized": True}
    sft_run(make("from_tokens", data=data))
    assert metrics_of(tmp_path / "from_tokens") == metrics_of(tmp_path / "texts")


def test_sources_are_mixed_by_weight_and_validated_each(make: Make, tmp_path: Path) -> None:
    file, held = str(tmp_path / "train.jsonl"), str(tmp_path / "held_out.jsonl")
    data = {
        "train_files": [f"{file}[:1]", f"{file}[1:]"],
        "train_sources": ["one", "rest"],
        "source_weights": {"one": 1e9, "rest": 1e-9},
        "validation_files": [f"{held}[:1]", f"{held}[1:]"],
        "validation_sources": ["first", "others"],
    }
    sft_run(make("mixed", data=data))
    found = metrics_of(tmp_path / "mixed")
    # All draws are of the first row: every step has four times its tokens
    (ids, learned), *_ = plain_rows(make("again"))
    steps = [line for line in found if "data/tokens" in line]
    assert [line["data/tokens"] for line in steps] == [4.0 * len(ids)] * 4
    assert [line["data/learned_tokens"] for line in steps] == [4.0 * sum(learned)] * 4
    sft_run(make("plain", run={"total_epochs": 1}))
    start, plain = found[0], metrics_of(tmp_path / "plain")[0]
    assert start["validation/loss"] == pytest.approx(plain["validation/loss"], rel=1e-6)
    # Of three rows of as many learned tokens each, the loss of all is a third of the first's and two thirds of the others'
    parts = (start["validation/first/loss"] + 2 * start["validation/others/loss"]) / 3
    assert parts == pytest.approx(start["validation/loss"], rel=1e-6)
    assert start["validation/first/loss"] != pytest.approx(start["validation/others/loss"], rel=1e-4)
