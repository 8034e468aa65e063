"""The commands as their users type them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.app import main
from posttrain.cli.version import version_text
from posttrain.config import RunConfig
from posttrain.dialects.native.write import json_schema

ROOT = Path(__file__).parents[3]
EXAMPLE = str(ROOT / "examples" / "grpo_chain_sum.yaml")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def posttrain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``posttrain ARGUMENTS``: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["posttrain", *arguments])
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return run


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a request in which everything is right: run.yaml, its data and its model folder."""
    monkeypatch.chdir(tmp_path)
    row = {"data_source": "t", "prompt": "1+1=", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(20)))
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # no tensors
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (tmp_path / "run.yaml").write_text(
        "model: {path: ./model}\ndata:\n  train_files: train.jsonl\n  prompts_per_step: 4\nrollout: {samples_per_prompt: 6}\n"
    )
    return tmp_path


@pytest.fixture
def train_run(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Stands in for posttrain.build.train: notes the configurations it is asked to run."""
    started: list[RunConfig] = []
    build = types.ModuleType("posttrain.build.train")
    build.train_run = lambda config, **_: started.append(config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "posttrain.build.train", build)
    for name in ("TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE"):
        monkeypatch.setenv(name, "")  # train sets what is absent; this way nothing outlives the test
    return started


# What is right to ask for, and not built.
PLANNED = ("advantage.name=gae", "policy.tensor_parallel=2", "critic.engine=megatron", "critic.pipeline_parallel=2")


class TestPlan:
    def test_json(self, posttrain: Run, job: Path) -> None:
        code, out, _ = posttrain("plan", "run.yaml", "policy.sequences_per_mini_batch=12", "--json")
        plan = json.loads(out)
        assert code == 0
        assert list(plan) == [
            *("dialect", "entry", "config", "derived", "ignored", "unsupported", "warnings"),
            *("trains", "verdict", "needs"),
        ]
        assert (plan["dialect"], plan["entry"]) == ("native", "train")
        assert plan["config"]["rollout"]["samples_per_prompt"] == 6
        placement = plan["derived"].pop("placement")
        assert (placement["runtime"], placement["devices"]) == ("inprocess", 1)
        assert [role["role"] for role in placement["roles"]] == ["rollout", "policy"]  # no KL: no reference
        assert plan["derived"] == {
            "world_size": 1,
            "devices": 1,
            "prompts_per_step": 4,
            "samples_per_prompt": 6,
            "sequences_per_step": 24,  # 4 x 6
            "epochs_per_step": 1,
            "updates_per_step": 2,  # 24 / 12
            "sequences_per_update": 12,
            "sequences_per_micro_batch_per_device": 8,
            "gradient_accumulation_steps": 2,  # 12 = 8 + 4
            "steps_per_epoch": 5,  # 20 / 4
            "total_steps": 5,
            "schedule_steps": 5,
            "total_updates": 10,
            "critic": None,  # grpo asks for no values
            "max_tokens_per_micro_batch": None,
            "counts_turns": False,  # sequences are whole episodes
            "trained_samples_per_step": None,  # resampling.fit changes nothing
        }

    def test_text_shows_each_number_with_its_key_in_80_columns(self, posttrain: Run, job: Path) -> None:
        code, out, err = posttrain("plan", "run.yaml", "policy.sequences_per_mini_batch=12", "policy.epochs_per_step=2")
        assert (code, err) == (0, "")
        beside = {line.split("  ")[-1].strip(): line for line in out.splitlines()}
        assert "4 prompts" in beside["data.prompts_per_step"]
        assert "x 6 samples" in beside["rollout.samples_per_prompt"]
        assert "/ 12 per mini-batch" in beside["policy.sequences_per_mini_batch"]
        assert "x 2 passes" in beside["policy.epochs_per_step"]
        assert "4 updates, 2 in each pass" in out
        assert "2 micro-batches per update" in out
        assert "20 prompts / 4 per step = 5 steps per epoch" in out
        assert "20 updates, 120 sampled sequences" in out  # 5 x 4, 5 x 24
        assert max(map(len, out.splitlines())) <= 80

    def test_a_correction_of_the_samplers_log_probs_is_part_of_the_plan(self, posttrain: Run, job: Path) -> None:
        at = "loss.rollout_correction"
        rules = (f"{at}.reject=[token_k1]", f"{at}.reject_bounds=['0.5_2']")
        code, out, err = posttrain("plan", "run.yaml", f"{at}.weights=token", f"{at}.weight_low=0.5", *rules)
        assert code == 0, err
        assert "x trainer / sampler, per token, 0 below 0.5 and above 2\n" in out
        assert "without what breaks token_k1 (0.5_2)\n" in out
        code, out, _ = posttrain("plan", "run.yaml", f"{at}.use_rollout_logprobs=true", "loss.sft_coef=0.1")
        assert "old log-probs are the sampler's\n" in out and "+ 0.1 x SFT on responses with a score above 0\n" in out
        code, _, err = posttrain("plan", "run.yaml", rules[0])
        assert code == 2 and f"{at}.reject has no bounds" in err

    def test_a_critic_is_part_of_the_plan(self, posttrain: Run, job: Path) -> None:
        changes = ["critic.warmup_steps=2", "critic.sequences_per_mini_batch=8", "critic.optimizer.lr=3e-5"]
        code, out, err = posttrain("plan", "run.yaml", "advantage.name=gae", *changes)
        assert (code, err) == (0, "")
        assert "critic     the policy's starting weights with a new value head\n" in out
        assert "value loss, value_clip 0.5, token_mean\n" in out
        assert "adamw, learning rate 3e-05, constant\n" in out
        assert "3 updates per step, of 8 sequences\n" in out  # 24 / 8
        assert "8 sequences per micro-batch\n" in out
        assert "alone in the first 2 steps: the policy is not updated there\n" in out
        assert "3 updates, 120 sampled sequences" in out  # the policy's: (5 - 2) x 1
        assert max(map(len, out.splitlines())) <= 80
        code, out, err = posttrain("plan", "run.yaml", *changes)
        assert code == 0 and "\ncritic " not in out
        assert "critic.warmup_steps have no effect: grpo needs no critic (gae would)" in out

    @pytest.mark.parametrize("name", ["grpo_chain_sum", "ppo_chain_sum"])
    def test_the_native_examples_are_sound(self, name: str, posttrain: Run) -> None:
        code, out, err = posttrain("plan", str(ROOT / "examples" / f"{name}.yaml"), "--skip-files")
        assert (code, err) == (0, "")
        assert "warning" not in out

    def test_mini_batches_of_the_critic_that_do_not_divide(self, posttrain: Run, job: Path) -> None:
        code, _, err = posttrain("plan", "run.yaml", "advantage.name=gae", "critic.sequences_per_mini_batch=7")
        assert code == 2
        assert "24 sequences do not split into mini-batches of 7" in " ".join(err.split())

    def test_budget_of_tokens(self, posttrain: Run, job: Path) -> None:
        asked = ("plan", "run.yaml", "policy.max_tokens_per_micro_batch=16384")
        derived = json.loads(posttrain(*asked, "--json")[1])["derived"]
        assert derived["max_tokens_per_micro_batch"] == 16384
        assert derived["sequences_per_micro_batch_per_device"] is derived["gradient_accumulation_steps"] is None
        _, out, _ = posttrain(*asked)
        beside = {line.split("  ")[-1].strip(): line for line in out.splitlines()}
        assert "/ up to 16384 tokens" in beside["policy.max_tokens_per_micro_batch"]
        assert "micro-batches, as they fill" in out and "None" not in out
        assert max(map(len, out.splitlines())) <= 80

    @pytest.mark.skipif(sys.platform != "linux", reason="boxes are made by Linux")
    def test_what_keeps_code_in_is_said(self, posttrain: Run, job: Path) -> None:
        code, out, _ = posttrain("plan", "run.yaml", "reward.terms=[{name: code}]", "reward.allow_unboxed_code=true")
        assert code == 0
        assert "Model-written code runs in a box:\n  on " in out
        assert "reward.allow_unboxed_code has no effect: the box holds" in out
        assert max(map(len, out.splitlines())) <= 80
        _, out, _ = posttrain("plan", "run.yaml", "reward.allow_unboxed_code=true")
        assert "box:" not in out
        assert "reward.allow_unboxed_code has no effect: no term runs code" in out

    def test_warnings_are_shown(self, posttrain: Run, job: Path) -> None:
        _, out, _ = posttrain("plan", "run.yaml", "validation.every_steps=3")
        assert "warning: validation.every_steps has no effect" in out

    def test_skip_files_checks_the_configuration_alone(self, posttrain: Run, tmp_path: Path) -> None:
        overrides = ["model.path=./absent", "data.train_files=absent.parquet"]
        code, out, _ = posttrain("plan", *overrides, "--skip-files")
        assert code == 0
        assert "not counted" in out
        code, _, err = posttrain("plan", *overrides, "--skip-files", "rollout.top_p=3")
        assert code == 2 and "top_p must be at most 1" in err

    def test_everything_wrong_comes_together(self, posttrain: Run, job: Path) -> None:
        (job / "model" / "tokenizer.json").unlink()
        code, out, err = posttrain(
            "plan", "run.yaml", "data.train_files=absent.jsonl", "rollout.temprature=1", "loss.name=nope"
        )
        assert (code, out) == (2, "")
        assert err.startswith("posttrain: 4 problems, and nothing was started:\n1. ")
        for part in ("rollout.temprature", "nope", "absent.jsonl", "holds no tokenizer"):
            assert part in err
        assert "Traceback" not in err
        assert max(len(line) for line in err.splitlines() if "/" not in line) <= 80

    def test_files_and_sizes_come_together(self, posttrain: Run, job: Path) -> None:
        (job / "model" / "tokenizer.json").unlink()
        code, _, err = posttrain("plan", "run.yaml", "policy.sequences_per_mini_batch=9")
        assert code == 2
        assert "holds no tokenizer" in err
        text = " ".join(err.split())
        assert "4 prompts x 6 samples = 24 sequences do not split into mini-batches of 9" in text
        assert "at override policy.sequences_per_mini_batch=9" in text

    def test_an_override_with_dashes(self, posttrain: Run, job: Path) -> None:
        code, _, err = posttrain("plan", "run.yaml", "--run.seed=2", "--jsn")
        assert code == 2
        text = " ".join(err.split())
        assert "there is no option --run.seed; an override has no dashes: run.seed=2" in text
        assert "there is no option --jsn; --help lists the options" in text

    def test_a_step_larger_than_the_data(self, posttrain: Run, job: Path) -> None:
        code, _, err = posttrain("plan", "run.yaml", "data.prompts_per_step=21")
        text = " ".join(err.split())
        assert code == 2
        assert "the training files hold 20 prompts, fewer than the 21 of one step" in text
        assert "use data.prompts_per_step=20" in text

    def test_a_size_that_is_a_default_says_so(self, posttrain: Run, job: Path) -> None:
        (job / "run.yaml").write_text("model: {path: ./model}\ndata: {train_files: train.jsonl}\n")
        (job / "train.jsonl").write_text((job / "train.jsonl").read_text().splitlines()[0] + "\n")
        _, _, err = posttrain("plan", "run.yaml")
        assert "at data.prompts_per_step (a default; run.yaml does not set it)" in " ".join(err.split())

    def test_what_is_planned_is_told_in_a_plan_and_refused_in_a_run(self, posttrain: Run, job: Path) -> None:
        arguments = ("run.yaml", "policy.engine=megatron", *PLANNED, "placement.devices=2")
        code, out, _ = posttrain("plan", *arguments)
        assert code == 2 and "does not train: 2 things" in out
        planned = (
            "1. policy.tensor_parallel is 2 and critic.tensor_parallel is 1 on the same devices; this version cannot"
        )
        assert planned in " ".join(out.split())
        code, _, err = posttrain("train", *arguments)
        assert code == 2 and "2 problems, and nothing was started" in err and "critic.pipeline_parallel is 2" in err

    def test_here_puts_it_on_one_device_and_says_what_changed(self, posttrain: Run, job: Path) -> None:
        arguments = ("run.yaml", "rollout.engine=vllm", "placement.devices=2", "policy.engine=fsdp", "--here", "--json")
        code, out, _ = posttrain("plan", *arguments)
        plan = json.loads(out)
        assert code == 0 and plan["unsupported"] == [] and plan["derived"]["world_size"] == 1
        assert plan["warnings"] == [
            "placement.devices: 1 instead of 2",
            "policy.engine: local instead of fsdp",
            "rollout.engine: native instead of vllm",
        ]

    def test_a_cluster_is_planned_with_the_share_of_each_copy(self, posttrain: Run, job: Path) -> None:
        arguments = (
            "run.yaml",
            "placement.devices=8",
            "policy.engine=fsdp",
            "policy.sequence_parallel=2",
            "policy.sequences_per_mini_batch=12",
        )
        _, out, _ = posttrain("plan", *arguments, "--json")
        derived = json.loads(out)["derived"]  # 24 sequences, mini-batches of 12 over 8 / 2 copies: 3 each
        assert derived["world_size"] == 8 and derived["sequences_per_update"] == 12
        assert derived["sequences_per_micro_batch_per_device"] == 3 and derived["gradient_accumulation_steps"] == 1
        _, out, _ = posttrain("plan", *arguments)
        assert "policy       0-7       4 copies, 2 devices each; awake in log-probs, update" in out
        assert "stays in memory while rollout works" in out and "3 sequences per copy, per update" in out
        code, _, err = posttrain(
            "plan", "run.yaml", *arguments[1:3], "placement.devices=6", "rollout.tensor_parallel=4"
        )
        assert (
            code == 2
            and "the rollout has 6 devices, which are no multiple of the 4 that share one copy" in " ".join(err.split())
        )

    def test_a_dialect_that_nobody_knows(self, posttrain: Run) -> None:
        code, _, err = posttrain("plan", EXAMPLE, "--dialect", "naitve")
        err = " ".join(err.split())
        assert code == 2 and "there is no dialect 'naitve' (known: native," in err and "did you mean native?" in err

    def test_no_file(self, posttrain: Run) -> None:
        assert posttrain("plan", "absent.yaml")[0] == 2
        code, _, err = posttrain("plan")
        assert code == 2 and "there is nothing to read; name a file" in err


def keys_of(lines: list[str]) -> list[str]:
    """The lines of a list of keys without its titles."""
    return [line for line in lines if line and not line.endswith("`):")]


class TestKeysAndTranslate:
    def test_one_key_in_words_and_a_misspelt_one(self, posttrain: Run) -> None:
        code, out, _ = posttrain("keys", "native", "rollout.temperature")
        assert code == 0 and out.splitlines()[0] == "rollout.temperature" and "  default   1.0" in out
        code, _, err = posttrain("keys", "native", "rollout.temprature")
        assert code == 2 and "native has no key rollout.temprature; did you mean rollout.temperature?" in " ".join(
            err.split()
        )
        code, _, err = posttrain("keys", "vrel")
        assert code == 2 and "did you mean verl?" in err

    def test_every_entry_point_s_keys_are_listed_with_their_meaning(self, posttrain: Run) -> None:
        from posttrain.dialects.entries import ENTRIES
        from posttrain.dialects.explain import ENTRIES as TITLES
        from posttrain.dialects.native.ledger import native_ledger

        rows = native_ledger().rows
        code, out, _ = posttrain("keys", "native")
        assert code == 0 and list(TITLES) == list(ENTRIES)
        lines = out.splitlines()
        assert [line for line in lines if line.endswith("`):")] == [f"{TITLES[entry]}:" for entry in list(ENTRIES)[1:]]
        assert [line.split()[0] for line in lines if line and not line.endswith("`):")] == [row.name for row in rows]
        assert all(row.meaning and row.meaning in line for row, line in zip(rows, keys_of(lines), strict=True))
        for section in ("model", "data", "run", "rollout"):
            code, out, _ = posttrain("keys", "native", section)
            assert code == 0
            assert [line.split()[0] for line in keys_of(out.splitlines())] == [
                row.name for row in rows if row.name.startswith(f"{section}.")
            ]

    def test_a_key_of_several_entry_points_is_explained_once(self, posttrain: Run) -> None:
        code, out, _ = posttrain("keys", "native", "model.path")
        assert code == 0 and out.count("model.path\n  Folder") == 1
        assert "  entry     posttrain train, sft, tune, generate, serve" in out

    def test_the_list_of_a_dialect_says_where_keys_go_and_why_not(self, posttrain: Run) -> None:
        out = posttrain("keys", "verl", "trainer")[1]
        assert "-> placement.devices: devices of each machine" in out
        assert "ignored (" in out and "Supervised fine-tuning (`posttrain sft`):" in out

    def test_json_is_a_list_of_rows(self, posttrain: Run) -> None:
        rows = json.loads(posttrain("keys", "native", "--json")[1])
        assert {"key", "type", "default", "field", "status", "reason", "meaning"} <= set(rows[0])
        by_key = {row["key"]: row for row in rows}
        assert by_key["data.train_files"]["type"] == "list of text" and by_key["run.seed"]["default"] == 1

    def test_a_translation_reads_back_as_the_same_run(self, posttrain: Run, job: Path) -> None:
        code, out, _ = posttrain("translate", "run.yaml", "rollout.top_p=0.9")
        assert code == 0
        (job / "again.yaml").write_text(out)
        first = json.loads(posttrain("plan", "run.yaml", "rollout.top_p=0.9", "--json")[1])
        again = json.loads(posttrain("plan", "again.yaml", "--json")[1])
        assert first["config"] == again["config"] and first["derived"] == again["derived"]
        code, _, err = posttrain("translate", "run.yaml", "--to", "verl")
        assert code == 2 and "use --to native" in err


class TestTrain:
    def test_a_sound_request_is_run(self, posttrain: Run, job: Path, train_run: list[RunConfig]) -> None:
        code, _, err = posttrain("train", "run.yaml", "run.seed=7", "validation.every_steps=2")
        assert code == 0
        assert [config.run.seed for config in train_run] == [7]
        assert "warning: validation.every_steps has no effect" in err

    def test_a_wrong_one_is_not_started(self, posttrain: Run, job: Path, train_run: list[RunConfig]) -> None:
        (job / "train.jsonl").unlink()
        code, _, err = posttrain("train", "run.yaml", "policy.sequences_per_mini_batch=9")
        assert code == 2
        assert "train.jsonl" in err and "mini-batches of 9" in err
        assert train_run == []


class TestOthers:
    def test_version(self, posttrain: Run) -> None:
        assert posttrain("--version")[:2] == posttrain("version")[:2] == (0, f"{version_text()}\n")

    def test_doctor(self, posttrain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("posttrain.registry.is_installed", lambda name: name != "math_verify")
        code, out, _ = posttrain("doctor")
        assert code == 0
        assert re.search(r"^  (on |off)  landlock  ", out, re.MULTILINE)
        assert "math_verify     not installed: pip install 'posttrain[math]'" in out
        assert "(for the reward math_verify)" in out
        assert "langdetect      installed" in out
        for words in (
            r"^torch \d.*, built for ",
            r"^accelerator: ",
            r"^memory: .* GiB, .* available",
            r"^disk, this folder: .* free of",
        ):
            assert re.search(words, out, re.MULTILINE), words
        monkeypatch.setenv("PATH", "")
        assert "C++ compiler: not found: sampling on the CPU takes up to 1.8 times as long" in posttrain("doctor")[1]

    def test_steps_are_pushed_to_services_only(self, posttrain: Run, tmp_path: Path) -> None:
        for name in ("jsonl", "console"):
            code, _, err = posttrain("report", "--push", name, str(tmp_path))
            assert code == 2 and f"{name} is not a tracker that receives steps; use one of tensorboard," in err
        code, _, err = posttrain("report", "--push", "tensorbord", str(tmp_path))
        assert code == 2 and "did you mean tensorboard?" in err
        code, _, err = posttrain("report", "--push", "tensorboard", str(tmp_path / "none"))
        assert code == 2 and "does not exist" in " ".join(err.split())

    def test_schema(self, posttrain: Run) -> None:
        assert posttrain("schema")[:2] == (0, json_schema())

    def test_data_options_are_read_like_overrides(
        self, posttrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: dict[str, Any] = {}

        def write_dataset(task: str, folder: Path, **rest: Any) -> tuple[Path, Path]:
            asked.update(task=task, folder=folder, **rest)
            return folder / "train.parquet", folder / "validation.parquet"

        monkeypatch.setattr("posttrain.data.reasoning_gym.write_dataset", write_dataset)
        command = ["data", "reasoning-gym", "--task", "chain_sum", "--train-rows", "30", "--validation-rows", "5"]
        code, out, _ = posttrain(*command, "--option", "min_terms=2", "--option", "ratio=1e-1", str(tmp_path / "d"))
        assert code == 0
        assert asked == {
            "task": "chain_sum",
            "folder": tmp_path / "d",
            "train_rows": 30,
            "validation_rows": 5,
            "seed": 1,
            "options": {"min_terms": 2, "ratio": 0.1},
            "instruction": None,
        }
        assert str(tmp_path / "d" / "validation.parquet") in out

    def test_existing_datasets_are_not_replaced_unasked(self, posttrain: Run, tmp_path: Path) -> None:
        (tmp_path / "train.parquet").write_text("mine")
        code, _, err = posttrain("data", "reasoning-gym", "--task", "chain_sum", str(tmp_path))
        assert code == 2
        assert "train.parquet already there; name another folder, or add --overwrite" in " ".join(err.split())
        assert (tmp_path / "train.parquet").read_text() == "mine"

    def test_a_wrong_option_of_a_task(self, posttrain: Run, tmp_path: Path) -> None:
        code, _, err = posttrain("data", "reasoning-gym", "--task", "chain_sum", "--option", "min_terms", str(tmp_path))
        assert code == 2 and "'min_terms' is not an override" in err

    def test_report(self, posttrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "posttrain.report.html.write_report", lambda folders, out: out or folders[0] / "report.html"
        )
        assert posttrain("report", str(tmp_path))[:2] == (0, f"wrote {tmp_path / 'report.html'}\n")
        assert posttrain("report", "a", "b", "--out", "c.html")[:2] == (0, "wrote c.html\n")

    def test_live_report(self, posttrain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []
        monkeypatch.setattr("posttrain.report.live.serve", lambda folders, port, say: asked.append((folders, port)))
        assert posttrain("report", "a", "b", "--live", "--port", "81")[0] == 0
        assert asked == [([Path("a"), Path("b")], 81)]

    def test_options_of_a_report_that_do_not_go_together(self, posttrain: Run, tmp_path: Path) -> None:
        for options, message in (
            (["--live", "--out", "x.html"], "--live writes no file; leave out --out, or --live"),
            (["--port", "80"], "--port is the port of the live page; add --live, or leave out --port"),
            (["--push", "wandb", "--live"], "--push sends one run, and writes nothing"),
            (["b", "--push", "wandb"], "--push sends one run, and writes nothing"),
        ):
            code, _, err = posttrain("report", "a", *options)
            assert code == 2 and message in " ".join(err.split()), options
        (tmp_path / "results.json").write_text("{}")
        code, _, err = posttrain("report", str(tmp_path), "--live")
        assert code == 2 and "--live shows runs" in err
        code, _, err = posttrain("report", "nowhere", "--live")
        assert code == 2 and "nowhere does not exist" in " ".join(err.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["plan", EXAMPLE, "--skip-files", "run.seed=2"],
        ["plan", "run.yaml"],
        ["plan", "--help"],
        ["schema"],
        ["doctor"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments: list[str], job: Path) -> None:
    """In a process of its own: what these commands have imported when they end."""
    code = (
        "import sys\n"
        "from posttrain.cli.app import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "print('IMPORTED', *sorted({'torch', 'transformers', 'ray', 'datasets', 'reasoning_gym'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].strip() == "IMPORTED"
