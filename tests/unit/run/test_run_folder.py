"""What a run folder says about its run, and whom it lets in."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from posttrain.config import RunConfig, SftConfig
from posttrain.errors import ConfigError
from posttrain.run.config_change import HARMLESS, Change, flat
from posttrain.run.own_files import own_files
from posttrain.run.run_folder import RunFolder


def config(
    tmp_path: Path,
    *,
    model: str = "a",
    lr: float = 1e-5,
    resume: str = "auto",
    files: Sequence[str] = ("train.parquet",),
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": model},
            "data": {"train_files": list(files)},
            "run": {"folder": str(tmp_path / "run"), "resume": resume},
            "policy": {"optimizer": {"lr": lr}},
        }
    )


def test_refused_run_writes_nothing(tmp_path: Path) -> None:
    RunFolder(config(tmp_path)).check(holds_checkpoint=False)
    assert not (tmp_path / "run").exists()


def test_changes_are_told_and_the_earlier_configuration_is_kept(tmp_path: Path) -> None:
    assert RunFolder(config(tmp_path)).begin(first_step=1, total_steps=9, device="cpu") == []
    earlier = (tmp_path / "run/config.yaml").read_text()
    again = RunFolder(config(tmp_path, lr=2e-5))
    assert again.begin(first_step=4, total_steps=9, device="cpu") == ["policy.optimizer.lr 1e-05 -> 2e-05"]
    assert (tmp_path / "run/config.until_step_3.yaml").read_text() == earlier
    assert (tmp_path / "run/config.yaml").read_text() != earlier


def test_going_on_unchanged_keeps_no_copy(tmp_path: Path) -> None:
    RunFolder(config(tmp_path)).begin(first_step=1, total_steps=9, device="cpu")
    assert RunFolder(config(tmp_path)).begin(first_step=4, total_steps=9, device="cpu") == []
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.yaml", "run.json"]


def test_another_model_does_not_go_on_with_the_weights_of_this_one(tmp_path: Path) -> None:
    RunFolder(config(tmp_path)).begin(first_step=1, total_steps=9, device="cpu")
    other = RunFolder(config(tmp_path, model="b"))
    other.check(holds_checkpoint=False)  # nothing to go on from: it starts over
    with pytest.raises(ConfigError, match="started from a, and would go on with that run's weights"):
        other.check(holds_checkpoint=True)


def test_resume_never_refuses_a_used_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="already holds a run; name another"):
        RunFolder(config(tmp_path, resume="never")).check(holds_checkpoint=False)


def test_run_json_says_how_it_ended(tmp_path: Path) -> None:
    folder = RunFolder(config(tmp_path))
    folder.begin(first_step=1, total_steps=9, device="cpu")
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "running"
    folder.end("done")
    about = json.loads((tmp_path / "run/run.json").read_text())
    assert (about["status"], about["total_steps"], about["device"]) == ("done", 9, "cpu")
    assert set(about["versions"]) == {"posttrain", "python", "torch", "transformers"}


def test_finished_run_without_a_checkpoint_is_not_written_over(tmp_path: Path) -> None:
    folder = RunFolder(config(tmp_path))
    folder.begin(first_step=1, total_steps=9, device="cpu")
    folder.end("failed")
    RunFolder(config(tmp_path)).check(holds_checkpoint=False)  # nothing worth keeping: it may start over
    folder.end("done")
    with pytest.raises(ConfigError, match="finished run without a checkpoint to resume from; name another"):
        RunFolder(config(tmp_path)).check(holds_checkpoint=False)


def test_another_critic_does_not_go_on_with_the_weights_of_this_one(tmp_path: Path) -> None:
    def ppo(critic: str | None) -> RunConfig:
        tree = config(tmp_path).model_dump(mode="json")
        return RunConfig.model_validate(tree | {"advantage": {"name": "gae"}, "critic": {"path": critic}})

    RunFolder(ppo(None)).begin(first_step=1, total_steps=9, device="cpu")
    RunFolder(ppo(None)).check(holds_checkpoint=True)
    other = RunFolder(ppo("b"))
    other.check(holds_checkpoint=False)
    with pytest.raises(ConfigError, match=r"a run whose critic started from the policy, .* or the same critic\.path"):
        other.check(holds_checkpoint=True)
    tree = ppo("b").model_dump(mode="json") | {"advantage": {"name": "grpo"}}
    without_critic = RunFolder(RunConfig.model_validate(tree))
    without_critic.check(holds_checkpoint=True, allow_config_change=True)  # its path says nothing


# ------------------------------------------------------------------------------------------- what may change


def test_a_grave_change_is_refused_with_the_difference_and_can_be_allowed(tmp_path: Path) -> None:
    RunFolder(config(tmp_path)).begin(first_step=1, total_steps=9, device="cpu")
    other = config(tmp_path, lr=2e-5).model_copy(
        update={"loss": config(tmp_path).loss.model_copy(update={"kl_coef": 0.5})}
    )
    with pytest.raises(ConfigError) as caught:
        RunFolder(other).check(holds_checkpoint=True)
    assert {problem.field for problem in caught.value.problems} == {"policy.optimizer.lr", "loss.kl_coef"}
    assert "had policy.optimizer.lr 1e-05, and this one has 2e-05; set it back" in str(caught.value)
    assert "--allow-config-change" in str(caught.value)
    RunFolder(other).check(holds_checkpoint=True, allow_config_change=True)
    RunFolder(other).check(holds_checkpoint=False)  # a start, not a going on


def test_rows_that_changed_in_their_file_are_a_grave_change(tmp_path: Path) -> None:
    """As many of them, in a file of the same name and length: a response begun for a row must not go on under another one."""
    file = tmp_path / "train.jsonl"
    wanted = config(tmp_path, files=[str(file)])
    file.write_text('{"prompt": "1+1="}\n')
    RunFolder(wanted).begin(first_step=1, total_steps=9, device="cpu")
    os.utime(file, (1, 1))  # a copy
    assert RunFolder(wanted).check(holds_checkpoint=True) == []
    file.write_text('{"prompt": "1+2="}\n')
    with pytest.raises(ConfigError, match=r"had data\.train_files\.0 train\.jsonl \(sha256 \w{12}\), and this one has"):
        RunFolder(wanted).check(holds_checkpoint=True)
    RunFolder(wanted).check(holds_checkpoint=True, allow_config_change=True)
    [told] = RunFolder(wanted).begin(first_step=4, total_steps=9, device="cpu")
    assert told.startswith("data.train_files.0 train.jsonl (sha256 ")
    assert RunFolder(wanted).check(holds_checkpoint=True) == []


def test_data_in_a_pipe_is_not_read_before_the_run_does(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert own_files(config(tmp_path, files=[str(tmp_path / "pipe.jsonl"), "org/name:train"])) == {}


def test_a_folder_of_data_that_has_changed_is_another(tmp_path: Path) -> None:
    """By what its files hold and how they are called; files of other kinds in it do not count."""
    rows = tmp_path / "rows"
    (rows / "more").mkdir(parents=True)

    def digest() -> str:
        return own_files(config(tmp_path, files=[str(rows)]))["data.train_files.0"]["sha256"]

    (rows / "a.jsonl").write_text('{"prompt": "1"}\n')
    (rows / "more" / "b.jsonl").write_text('{"prompt": "2"}\n')
    first = digest()
    (rows / "README.md").write_text("about these rows")
    assert digest() == first
    (rows / "more" / "b.jsonl").rename(rows / "more" / "c.jsonl")
    renamed = digest()
    (rows / "more" / "c.jsonl").write_text('{"prompt": "300"}\n')
    assert len({first, renamed, digest()}) == 3


def test_a_section_that_comes_or_goes_is_one_change(tmp_path: Path) -> None:
    """LoRA in a folder of a run without it was five problems, four of them about defaults."""

    def lora(**settings: object) -> RunConfig:
        values = config(tmp_path).model_dump(mode="json", exclude_unset=True)
        return RunConfig.model_validate(values | {"policy": {"optimizer": {"lr": 1e-5}, "lora": settings or None}})

    RunFolder(lora()).begin(first_step=1, total_steps=9, device="cpu")
    with pytest.raises(ConfigError) as caught:
        RunFolder(lora(rank=8)).check(holds_checkpoint=True)
    (problem,) = caught.value.problems
    assert problem.field == "policy.lora" and "had policy.lora None, and this one has rank=8, alpha=" in problem.what
    RunFolder(lora(rank=8)).begin(first_step=1, total_steps=9, device="cpu")
    for other, field in ((lora(), "policy.lora"), (lora(rank=4), "policy.lora.rank")):
        with pytest.raises(ConfigError) as caught:
            RunFolder(other).check(holds_checkpoint=True)
        assert [problem.field for problem in caught.value.problems] == [field]


def test_harmless_changes_go_on_and_are_told(tmp_path: Path) -> None:
    RunFolder(config(tmp_path)).begin(first_step=1, total_steps=9, device="cpu")
    tree = config(tmp_path).model_dump(mode="json")
    tree["run"] |= {"name": "longer", "total_steps": 20}
    tree["policy"]["sequences_per_micro_batch_per_device"] = 1
    tree["validation"]["every_steps"] = 5
    other = RunFolder(RunConfig.model_validate(tree))
    other.check(holds_checkpoint=True)
    told = other.begin(first_step=4, total_steps=20, device="cpu", passed_over=["global_step_6: gone"])
    assert sorted(told) == [
        "policy.sequences_per_micro_batch_per_device 8 -> 1",
        "run.name run -> longer",
        "run.total_steps None -> 20",
        "validation.every_steps None -> 5",
    ]
    about = json.loads((tmp_path / "run/run.json").read_text())
    assert about["resumes"][0] | {"time": ""} == {
        "time": "",
        "first_step": 4,
        "damaged": ["global_step_6: gone"],
        "changed": told,
    }


def test_every_harmless_setting_exists() -> None:
    """A setting that was renamed would become a grave one unnoticed."""
    tree = {
        "model": {"path": "a"},
        "data": {"train_files": "b"},
        "reward": {"model": {"path": "c"}, "judge": {"path": "d"}, "served": {"path": "e"}},
    }
    known = flat(RunConfig.model_validate(tree).model_dump(mode="json"))
    del tree["reward"]
    known |= flat(SftConfig.model_validate(tree).model_dump(mode="json"))
    sections = {f"{name.split('.')[0]}." for name in known}
    assert [name for name in HARMLESS if name not in known and name not in sections] == []


def test_a_further_judges_devices_are_as_harmless_as_a_judges() -> None:
    assert Change("reward.more_judges.style.devices", None, [1]).harmless
    assert not Change("reward.more_judges.style.path", "a", "b").harmless


def test_a_setting_that_the_saved_configuration_does_not_know_counts_as_its_default(tmp_path: Path) -> None:
    RunFolder(config(tmp_path)).begin(first_step=1, total_steps=9, device="cpu")
    saved = tmp_path / "run/config.yaml"
    saved.write_text("".join(line for line in saved.open() if "kl_coef" not in line))
    RunFolder(config(tmp_path)).check(holds_checkpoint=True)


def test_a_setting_of_a_reward_term_that_the_saved_configuration_does_not_know_counts_as_its_default(
    tmp_path: Path,
) -> None:
    sections = config(tmp_path).model_dump(mode="json")
    sections["reward"]["terms"] = [{"name": "exact_match"}, {"name": "gsm8k", "weight": 0.5}]
    first = RunFolder(RunConfig.model_validate(sections))
    first.begin(first_step=1, total_steps=9, device="cpu")
    file = tmp_path / "run/config.yaml"
    saved = yaml.safe_load(file.read_text())
    for term in saved["reward"]["terms"]:
        del term["data_sources"]  # as an earlier version wrote it
    file.write_text(yaml.safe_dump(saved))
    first.check(holds_checkpoint=True)
    sections["reward"]["terms"][1]["weight"] = 0.25
    with pytest.raises(ConfigError, match=r"had reward\.terms"):
        RunFolder(RunConfig.model_validate(sections)).check(holds_checkpoint=True)


def test_a_run_keeps_its_id_and_its_beginning(tmp_path: Path) -> None:
    RunFolder(config(tmp_path)).begin(first_step=1, total_steps=9, device="cpu")
    first = json.loads((tmp_path / "run/run.json").read_text())
    RunFolder(config(tmp_path)).begin(first_step=3, total_steps=9, device="cpu")
    second = json.loads((tmp_path / "run/run.json").read_text())
    assert (first["id"], first["started"]) == (second["id"], second["started"])
    assert len(first["id"]) == 32
    RunFolder(config(tmp_path)).begin(
        first_step=1, total_steps=9, device="cpu"
    )  # all anew: another run to the trackers
    assert json.loads((tmp_path / "run/run.json").read_text())["id"] != first["id"]


def test_a_broken_run_json_is_in_nobodys_way(tmp_path: Path) -> None:
    RunFolder(config(tmp_path)).begin(first_step=1, total_steps=9, device="cpu")
    (tmp_path / "run/run.json").write_text('{"sta')
    RunFolder(config(tmp_path)).check(holds_checkpoint=False)


def test_checkpoints_elsewhere_are_not_forgotten(tmp_path: Path) -> None:
    """checkpoint.folder named another one; without it, the run would begin anew."""
    tree = config(tmp_path).model_dump(mode="json")
    tree["checkpoint"]["folder"] = str(tmp_path / "far")
    RunFolder(RunConfig.model_validate(tree)).begin(first_step=1, total_steps=9, device="cpu")
    (tmp_path / "far/global_step_3").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"checkpoints are in .*far, not in .*; set checkpoint\.folder to where they are"
    ):
        RunFolder(config(tmp_path)).check(holds_checkpoint=False)


def test_the_run_that_a_checkpoint_by_name_belongs_to_is_compared(tmp_path: Path) -> None:
    RunFolder(config(tmp_path)).begin(first_step=1, total_steps=9, device="cpu")
    (tmp_path / "run/checkpoints/global_step_3").mkdir(parents=True)
    for origin in ("run", "run/checkpoints/global_step_3", "gone"):
        tree = config(tmp_path, lr=2e-5).model_dump(mode="json")
        tree["run"] |= {"folder": str(tmp_path / "fork"), "resume_path": str(tmp_path / origin)}
        said = "there is no folder" if origin == "gone" else "had policy.optimizer.lr 1e-05"
        with pytest.raises(ConfigError, match=said):
            RunFolder(RunConfig.model_validate(tree)).check(holds_checkpoint=False)


def test_what_rounds_otherwise_is_told(tmp_path: Path) -> None:
    request = config(tmp_path)
    RunFolder(request).begin(first_step=1, total_steps=4, device="cpu")
    path = tmp_path / "run/run.json"
    about = json.loads(path.read_text())
    assert RunFolder(request).begin(first_step=2, total_steps=4, device="cpu") == []
    about["cpu_threads"] += 6
    about["versions"] |= {"torch": "2.11.0", "python": "3.11.0"}
    path.write_text(json.dumps(about))
    threads, torch = about["cpu_threads"] - 6, version("torch")
    told = RunFolder(request).begin(first_step=3, total_steps=4, device="cpu")
    assert told == [
        f"cpu_threads {threads + 6} -> {threads}, which may round otherwise than until now",
        f"versions.torch 2.11.0 -> {torch}, which may round otherwise than until now",
    ]
    assert json.loads(path.read_text())["resumes"][-1]["changed"] == told
    assert not (tmp_path / "run/config.until_step_2.yaml").exists()  # the configuration is the same
    path.write_text(json.dumps(about | {"device": "cuda"}))
    told = RunFolder(request).begin(first_step=3, total_steps=4, device="cuda")
    assert [line.split()[0] for line in told] == ["versions.torch"]  # threads do not matter there
