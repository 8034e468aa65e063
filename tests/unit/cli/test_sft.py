"""``posttrain sft`` as its users type it: one clear error for each thing that is wrong, before torch is loaded where that
can be; and what a plan says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.cli.app import main
from posttrain.config import SftConfig
from posttrain.dialects.entries import SFT
from posttrain.models.tiny import write_tiny_model
from posttrain.plan.checks.sft import warnings_of
from posttrain.plan.sft import plan_sft

Run = Callable[..., tuple[int, str, str]]
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]


@pytest.fixture
def posttrain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``posttrain ARGUMENTS``: (exit code, stdout, stderr without line breaks)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["posttrain", *arguments])
        monkeypatch.setenv("COLUMNS", "80")
        for name in ("TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE"):
            monkeypatch.setenv(name, "1")
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, " ".join(shown.err.split())

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def job(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a request in which everything is right."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"messages": TURNS}) + "\n" for _ in range(10)))
    (tmp_path / "bad.jsonl").write_text(json.dumps({"messages": TURNS[:1]}) + "\n")
    (tmp_path / "broken.jsonl").write_text("{\n")
    (tmp_path / "plain.jinja").write_text("{{ messages[0]['content'] }}{{ raise_exception('never') }}")
    (tmp_path / "run.yaml").write_text(
        "model: {path: model}\ndata:\n  train_files: train.jsonl\n  sequences_per_step: 4\n"
        "run: {name: r}\ntracking: {trackers: []}\n"
    )
    return tmp_path


WRONG = [
    ("data.train_files=nix.jsonl", "there is no file nix.jsonl, at override data.train_files=nix.jsonl"),
    ("data.train_files=[]", "there is no training file"),
    ("data.train_files=bad.jsonl", "row 0 of bad.jsonl: column messages holds no assistant message"),
    ("data.train_files=broken.jsonl", "line 1 of broken.jsonl is not JSON"),
    ("data.messages_column=chat", "train.jsonl has no column chat (it has messages)"),
    ("data.prompt_column=messages", "has no column response or answer"),
    ("data.max_tokens=8", "10 of 10 training rows are longer than 8 tokens"),
    ("data.sequences_per_step=11", "the training files hold 10 rows, fewer than the 11 of one step"),
    ("data.sequences_per_stepp=4", "there is no key data.sequences_per_stepp"),
    ("data.overlong=cut", "overlong must be error, filter, truncate_left or truncate_right, not 'cut'"),
    ("data.train_on=first_turn", "train_on must be all_turns or last_turn, not 'first_turn'"),
    ("rollout.temperature=1", "there is no key rollout, at override rollout.temperature=1"),
    ("model.path=nowhere/at/all", "there is no folder nowhere/at/all"),
    ("model.chat_template_file=plain.jinja", "the chat template refuses it: TemplateError: never"),
    ("model.master_dtype=float16", "master_dtype must be float32 or bfloat16, not 'float16'"),
    ("policy.optimizer.lr=0", "lr must be above 0, not 0"),
    ("policy.schedule.name=cosin", "name must be constant, cosine,"),
    (
        "policy.engine=fsdp",
        "fsdp shares the policy out over worker processes, and placement.runtime=inprocess has none",
    ),
    ("policy.engine=megatron", "megatron shares the policy out over worker processes"),
    ("policy.engine=fdsp", "there is no training engine called 'fdsp'"),
    ("placement.devices=2", "the policy has 2 devices, and policy.engine=local trains on one"),
    ("policy.sequence_parallel=2", "policy.sequence_parallel is 2, and policy.engine=local does not split that way"),
    ("placement.ray_address=ray://h:1 placement.runtime=ray", "ray:// drives a cluster from outside"),
    ("tracking.trackers=[consol]", "there is no tracker called 'consol'"),
    ("data.dataset_class_file=none.py", "there is no file none.py"),
    ("checkpoint.keep_best=1", "checkpoint.keep_best needs the metric"),
    ("--data.max_tokens=8", "an override has no dashes: data.max_tokens=8"),
]


@pytest.mark.parametrize(("override", "message"), WRONG)
def test_what_is_wrong_is_told_without_a_traceback(posttrain: Run, job: Path, override: str, message: str) -> None:
    code, out, err = posttrain("sft", "run.yaml", *override.split(" "))
    assert code == 2 and out == ""
    assert message in err
    assert "Traceback" not in err
    assert not (job / "runs" / "r" / "metrics.jsonl").exists()


def test_everything_wrong_is_told_at_once(posttrain: Run, job: Path) -> None:
    _, _, err = posttrain(
        "sft", "run.yaml", "data.train_files=nix.jsonl", "policy.optimizer.lr=0", "model.path=no/such/folder"
    )
    assert "3 problems, and nothing was started" in err


def test_a_file_of_another_command_is_told_by_name(posttrain: Run, job: Path) -> None:
    message = "reading run.yaml ... posttrain: this is an SFT configuration: posttrain sft run.yaml"
    assert posttrain("train", "run.yaml")[2] == message
    (job / "rl.yaml").write_text("model: {path: model}\ndata: {train_files: a}\nrollout: {samples_per_prompt: 4}\n")
    message = (
        "reading rl.yaml ... posttrain: this is a configuration of reinforcement learning: posttrain train rl.yaml"
    )
    assert posttrain("sft", "rl.yaml")[2] == message


def test_a_misspelled_key_makes_no_other_configuration_of_it(posttrain: Run, job: Path) -> None:
    """max_prompt_tokens is a key of reinforcement learning; sequences_per_step still says what this is."""
    _, _, err = posttrain("sft", "run.yaml", "data.max_prompt_tokens=64")
    assert "there is no key data.max_prompt_tokens" in err


def test_the_plan(posttrain: Run, job: Path) -> None:
    code, out, err = posttrain("plan", "run.yaml", "run.total_epochs=3")
    assert (code, err) == (0, "")
    assert "10 rows / 4 per step = 2 steps per epoch, 2 rows left out of each" in out
    assert "6 steps" in out
    plan = json.loads(posttrain("plan", "run.yaml", "--json")[1])
    assert (plan["dialect"], plan["entry"], plan["derived"]["total_steps"]) == ("native", "sft", 2)


SHARED = ("placement.devices=4", "policy.engine=fsdp", "policy.sequence_parallel=2")


def test_the_plan_on_several_devices(posttrain: Run, job: Path) -> None:
    code, out, err = posttrain("plan", "run.yaml", *SHARED, "policy.sequences_per_micro_batch_per_device=1")
    assert (code, err) == (0, "")
    # 4 sequences over 2 copies
    assert "micro-batches: 2 of up to 1 sequences on each of 2 copies" in out
    assert "policy       0-3       2 copies, 2 devices each; awake in update" in out
    assert "2 share a sequence; weights in parts over 4" in out
    assert "policy: share sequences" in out and "Memory per device" in out
    (policy,) = json.loads(posttrain("plan", "run.yaml", "--json", *SHARED)[1])["derived"]["placement"]["roles"]
    assert (policy["role"], policy["sizes"]["data"], policy["sizes"]["shard"]) == ("policy", 2, 4)


def test_here_it_is_a_run_on_one_device(posttrain: Run, job: Path) -> None:
    options = "policy.engine_options={fsdp_size: 2, cpu_offload: true}"
    code, out, _ = posttrain("plan", "run.yaml", "--here", *SHARED, options)
    assert code == 0 and "Devices: 1 device, auto" in out and "Planned" not in out
    for change in ("policy.engine: local instead of fsdp", "policy.sequence_parallel: 1 instead of 2"):
        assert f"here: {change}" in out
    assert "here: policy.engine_options: none instead of fsdp_size 2, cpu_offload True" in out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("placement.devices=3", *SHARED[1:]),
            "the policy has 3 devices, which are no multiple of the 2 that share one copy (policy.sequence_parallel 2)",
        ),
        (("placement.devices=3", "placement.nodes=2", SHARED[1]), "3 devices do not spread evenly over 2 nodes"),
        ((*SHARED, "policy.engine_options.fsdp_sise=2"), "fsdp has no option fsdp_sise, at override"),
        # the tiny model has 4 heads
        (
            ("placement.devices=6", SHARED[1], "policy.sequence_parallel=3", "data.sequences_per_step=6"),
            "4 attention heads, which 3 devices that share a sequence cannot hold in equal parts",
        ),
        ((*SHARED, "data.sequences_per_step=5"), "5 sequences in a step do not split over the 2 copies of the policy"),
        (("policy.devices=[1]",), "the policy is put on device 1, and there are 1 devices, 0 to 0"),
    ],
)
def test_devices_that_cannot_be(posttrain: Run, job: Path, overrides: tuple[str, ...], message: str) -> None:
    code, _, err = posttrain("plan", "run.yaml", *overrides)
    assert code == 2 and message in err


def test_translated_it_is_the_same_run(posttrain: Run, job: Path) -> None:
    _, out, _ = posttrain("translate", "run.yaml")
    (job / "all.yaml").write_text(out)
    assert posttrain("translate", "all.yaml")[1] == out


def test_its_schema_and_keys(posttrain: Run) -> None:
    assert json.loads(posttrain("schema", "--entry", "sft")[1])["title"] == "SftConfig"
    assert "there is no entry 'stf'; did you mean sft?" in posttrain("schema", "--entry", "stf")[2]
    _, out, _ = posttrain("keys", "native", "data.sequences_per_step")
    assert "entry     posttrain sft" in out


def config(**sections: object) -> SftConfig:
    return SftConfig.model_validate({"model": {"path": "m"}, "data": {"train_files": ["a"]}} | sections)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"validation": {"every_steps": 5}},
            "validation.every_steps has no effect: data.validation_files names no file",
        ),
        (
            {"data": {"train_files": ["a"], "dataset_class_name": "x"}},
            "data.dataset_class_name has no effect: data.data",
        ),
        (
            {"data": {"train_files": ["a"], "prompt_column": "p", "train_on": "last_turn"}},
            "data.train_on has no effect: rows are a prompt and a response",
        ),
        (
            {"data": {"train_files": ["a"], "dataset_class_file": "f", "dataset_class_name": "C", "tools_column": "t"}},
            "data.tools_column has no effect: a dataset class of your own reads the files",
        ),
        ({"tracking": {"samples_every_steps": None}}, "tracking.samples_every_steps has no effect: nothing is sampled"),
        ({"tracking": {"batches_every_steps": 1}}, "tracking.batches_every_steps has no effect: nothing is sampled"),
        ({"profiling": {"shapes": True}}, "profiling.shapes has no effect: profiling.steps is empty"),
        ({"policy": {"schedule_over": "epochs"}}, "policy.schedule_over has no effect: run.total_steps is null"),
        (
            {"policy": {"schedule": {"name": "constant", "min_lr_ratio": 0.1}}},
            "policy.schedule.min_lr_ratio has no effect",
        ),
        ({"placement": {"call_timeout_s": 5.0}}, "placement.call_timeout_s has no effect: the run has one process"),
        ({"policy": {"engine_options": {"fsdp_size": 2}}}, "policy.engine_options has no effect: the local engine"),
        (
            {
                "policy": {"engine": "fsdp", "engine_options": {"use_orig_params": True}},
                "placement": {"devices": 2},
            },
            "policy.engine_options.use_orig_params has no effect: FSDP2",
        ),
        ({"checkpoint": {"keep_every": 2}}, "checkpoint.keep_every has no effect: checkpoint.keep_last is null"),
    ],
)
def test_settings_without_effect_are_told(sections: dict[str, object], said: str) -> None:
    (found,) = warnings_of(config(**sections))
    assert found.startswith(said)
    assert SFT.check(config(**sections)) == []


def test_nothing_is_told_of_the_defaults() -> None:
    assert warnings_of(config()) == SFT.check(config()) == SFT.unsupported(config()) == []


@pytest.mark.parametrize(
    ("run", "over", "total", "schedule"),
    [
        ({}, "run", 6, 6),  # 100 rows / 16 = 6 steps
        ({"total_epochs": 2}, "run", 12, 12),
        ({"total_steps": 20}, "run", 20, 20),
        ({"total_steps": 4}, "epochs", 4, 6),
        ({"total_steps": 20}, "epochs", 6, 6),
    ],
)
def test_how_long_a_run_and_its_schedule_are(run: dict[str, int], over: str, total: int, schedule: int) -> None:
    data = {"train_files": ["a"], "sequences_per_step": 16}
    plan, problems = plan_sft(config(run=run, data=data, policy={"schedule_over": over}), 100)
    assert plan is not None and problems == []
    assert (plan.steps_per_epoch, plan.total_steps, plan.schedule_updates) == (6, total, schedule)


def test_sizes_that_devices_cannot_share() -> None:
    data = {"train_files": ["a"], "sequences_per_step": 10}
    plan, (problem,) = plan_sft(config(data=data, placement={"devices": 4}), 100)
    assert plan is None
    assert str(problem) == (
        "10 sequences in a step do not split over the 4 copies of the policy; use data.sequences_per_step=8 or "
        "data.sequences_per_step=12"
    )
