"""The trainer's command of a launch script, found without running the script."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.cli.request import load_request
from posttrain.dialects.scripts.launch import Launch, read_script
from posttrain.errors import ConfigError

CALL = "python3 -m verl.trainer.main_ppo "


def read(folder: Path, text: str, *arguments: str, **environment: str) -> Launch:
    script = folder / "run.sh"
    script.write_text(text, encoding="utf-8")
    return read_script(str(script), arguments, environment, folder=folder)


def words(folder: Path, text: str, *arguments: str, **environment: str) -> list[str]:
    return list(read(folder, text, *arguments, **environment).arguments)


def problems(folder: Path, text: str, *arguments: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as raised:
        read(folder, text, *arguments, **environment)
    return str(raised.value)


@pytest.mark.parametrize(
    ("before", "written", "meant"),
    [
        ("N=4", "a=$N b=${N}2 c='$N' d=\"$N x\"", ["a=4", "b=42", "c=$N", "d=4 x"]),
        ("", "a=${N:-7} b=${M:=8} c=$M", ["a=7", "b=8", "c=8"]),
        ("A=(x=1 'y=[1, 2]')\nA+=(z=3)", '"${A[@]}" n=${#A[@]} first=${A[0]}', ["x=1", "y=[1, 2]", "z=3", "n=3", "first=x=1"]),
        ("P=/models/Qwen2.5-7B.tar.gz", "a=${P##*/} b=${P%.*} c=${P%%.*} d=${P/7B/3B}", [
            "a=Qwen2.5-7B.tar.gz", "b=/models/Qwen2.5-7B.tar", "c=/models/Qwen2", "d=/models/Qwen2.5-3B.tar.gz"]),
        ("N=3\nM=$((N * 2 + 1))", "a=$M b=$((7 / 2))", ["a=7", "b=3"]),
        ("A=2\nB=3", "a=$((2*(A+B))) b=$(expr $A + $B \\* 2)", ["a=10", "b=8"]),
        ("if [ -z \"$X\" ]; then X=1; else X=2; fi", "a=$X", ["a=1"]),
        ("X=qwen\nif [[ $X == q* && 3 -gt 2 ]]; then Y=yes; elif true; then Y=no; fi", "a=$Y", ["a=yes"]),
        ("case qwen3 in llama*) T=l ;; qwen*|phi) T=q ;; *) T=o ;; esac", "a=$T", ["a=q"]),
        ("for i in 1 2 3; do S=\"$S$i\"; done", "a=$S", ["a=123"]),
        ("f() { R=\"got $1\"; }\nf it", 'a="$R"', ["a=got it"]),
        ("cat <<END > /dev/null\nX=5\nEND\nset -x\nexport Y=2", "a=$Y", ["a=2"]),
        ("B=$(basename /a/b.sh .sh)", "a=$B b=`echo 3`", ["a=b", "b=3"]),
        ("", "a={1,2} b='{x: 1}'", ["a=1", "a=2", "b={x: 1}"]),
        ("E=", "a=1 $E b=2", ["a=1", "b=2"]),
        ("D=x", "p=a-$D/f.parquet q=http://$D:8/y", ["p=a-x/f.parquet", "q=http://x:8/y"]),
        ("", "a=1 `# a remark` \\\n  b=2 2>&1 | tee log", ["a=1", "b=2"]),
        ("A=1 \\\nB=2", "a=$A b=$B", ["a=1", "b=2"]),
        ("D=${D:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}", "a=$D", ["a=gpu"]),
        ("D=$(python3 - <<'X'\nprint(get_device_name())\nX\n)\nN=0\n[ $D = npu ] && N=1", "a=$D b=$N", ["a=cuda", "b=0"]),
        ("", "a=$((1 << 63)) b=$((10 ** 18 * 10))", ["a=-9223372036854775808", "b=-8446744073709551616"]),  # as bash prints
    ],
)  # fmt: skip
def test_words_are_those_that_the_shell_passes(tmp_path: Path, before: str, written: str, meant: list[str]) -> None:
    assert words(tmp_path, f"{before}\n{CALL}{written}\n") == meant


def test_a_power_that_no_shell_holds_is_not_computed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be computed"):
        words(tmp_path, f"{CALL}a=$((9 ** 9 ** 9))")


def test_arguments_behind_the_script_are_its_own(tmp_path: Path) -> None:
    assert words(tmp_path, f'N=$1\nshift 1\n{CALL}a=$N "$@"\n', "5", "b=1", "c=x y") == ["a=5", "b=1", "c=x y"]
    assert words(tmp_path, f'{CALL}a=1 "$@"\n') == ["a=1"]
    options = 'while [[ $# -gt 0 ]]; do case "$1" in --n) N="$2"; shift 2 ;; *) break ;; esac; done\n'
    assert words(tmp_path, f'{options}{CALL}a=$N "$@"', "--n", "6", "b=2") == ["a=6", "b=2"]
    assert words(tmp_path, f"{CALL}a=1\n", "b=2") == ["a=1", "b=2"]  # a script that passes nothing on


def test_an_override_is_not_the_value_of_an_optional_argument(tmp_path: Path) -> None:
    """A script that takes its first argument as a name with a default and hands all of them on gets overrides all the same."""
    text = f'E=${{1:-vllm}}\n{CALL}e=$E "$@"\n'
    assert words(tmp_path, text, "a.b=1", "c.d=2") == ["e=vllm", "a.b=1", "c.d=2"]
    assert "$1 keeps its default vllm: a.b=1 is an override" in str(read(tmp_path, text, "a.b=1").notes)
    assert words(tmp_path, text, "a.b-c=1") == ["e=vllm", "a.b-c=1"]  # a misspelt key, which is named as one
    assert words(tmp_path, text) == ["e=vllm"]
    # As in a shell: a name, an override that is the default's kind, and one whose place has no default
    assert words(tmp_path, text, "hf", "a.b=1") == ["e=hf", "hf", "a.b=1"]
    assert words(tmp_path, f"{CALL}${{1:-a.b=2}}\n", "a.b=1") == ["a.b=1"]
    # Dropped by shift, it is added to the trainer's
    assert words(tmp_path, f'E=${{1:-vllm}}\nshift\n{CALL}e=$E "$@"\n', "a.b=1") == ["e=vllm", "a.b=1"]


def test_unset_variables_are_named_with_their_line(tmp_path: Path) -> None:
    text = f"set -x\nM=$MODEL_PATH/7b\n{CALL}\\\n  a=$M \\\n  b=$DATA c=$1\n"
    said = problems(tmp_path, text)
    assert "$MODEL_PATH of line 2 is not set" in said and "run.sh:3 a=.../7b" in said
    assert "$DATA of line 5 is not set" in said and "--set DATA=..., or export it" in said
    assert "$1 of line 5 is not given" in said
    assert words(tmp_path, text, "x", MODEL_PATH="/m", DATA="d") == ["a=/m/7b", "b=d", "c=x"]


def test_names_of_unset_variables_stand_for_paths_where_files_are_not_opened(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    keys = "data.train_files=$ROOT/gsm8k/train.parquet data.val_files=\"['$ROOT/a.parquet','$ROOT/b.parquet']\""
    grpo = f"{CALL}algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_dynamic_bsz=True"
    script.write_text(f"{grpo} actor_rollout_ref.model.path=$ROOT/qwen {keys}")
    loaded = load_request([str(script)], None, here=True, skip_files=True)
    assert not loaded.problems
    assert (loaded.config.model.path, loaded.config.data.train_files) == ("ROOT/qwen", ["ROOT/gsm8k/train.parquet"])
    assert loaded.config.data.validation_files == ["ROOT/a.parquet", "ROOT/b.parquet"]
    assert sum("$ROOT of line 1 is not set; the run needs it" in text for text in loaded.warnings) == 1
    with pytest.raises(ConfigError, match=r"\$ROOT of line 1 is not set"):  # files are opened
        load_request([str(script)], None, here=True)
    script.write_text(f"{grpo} actor_rollout_ref.rollout.n=$N")
    with pytest.raises(ConfigError, match=r"\$N of line 1 is not set"):  # a number
        load_request([str(script)], None, here=True, skip_files=True)


def test_numbers_of_devices_may_be_unknown_with_here(tmp_path: Path) -> None:
    """One device is taken in any case, so that neither a variable that is not set nor an empty one stops a plan."""
    script = tmp_path / "run.sh"
    sampler = "actor_rollout_ref.rollout.tensor_model_parallel_size=$TP"
    sizes = f"trainer.n_gpus_per_node=$GPUS trainer.nnodes=$(scontrol show) {sampler}"
    grpo = (
        f"{CALL}algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.rollout.n=4"
    )
    script.write_text(f"{grpo} {sizes}")
    loaded = load_request([str(script)], None, here=True, skip_files=True)
    assert not loaded.problems and loaded.config.placement.devices == 1
    assert loaded.config.policy.sequences_per_mini_batch == 256 * 4
    said = " ".join(loaded.warnings)
    assert "trainer.n_gpus_per_node is 1, for the one device of --here: $GPUS of line 1 is not set" in said
    assert "trainer.nnodes is 1" in said and "tensor_model_parallel_size is 1" in said
    with pytest.raises(ConfigError, match=r"\$GPUS of line 1 is not set"):
        load_request([str(script)], None, skip_files=True)
    script.write_text(f"{grpo} trainer.nnodes=1 actor_rollout_ref.actor.ulysses_sequence_parallel_size=$SP")
    shared = load_request([str(script)], None, here=True, skip_files=True)
    assert not shared.problems and shared.config.policy.sequence_parallel == 1
    script.write_text(f"{grpo} trainer.n_gpus_per_node=${{GPUS:-}} trainer.nnodes=1")
    loaded = load_request([str(script)], None, here=True, skip_files=True)
    assert not loaded.problems and any("n_gpus_per_node is empty, and is read as 1" in text for text in loaded.warnings)
    assert [problem.what for problem in load_request([str(script)], None, skip_files=True).problems] == [
        "trainer.n_gpus_per_node is empty"
    ]


def test_the_output_of_a_program_may_stand_in_a_text_where_files_are_not_opened(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    grpo = f"{CALL}algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_dynamic_bsz=True"
    script.write_text(f"TAG=$(printf '%s' a/b | rev)\n{grpo} trainer.experiment_name=run-$TAG-$(/bin/git-x rev)")
    loaded = load_request([str(script)], None, here=True, skip_files=True)
    assert not loaded.problems and loaded.config.run.name == "run-output_of_rev-output_of_gitx"
    assert any("is the output of a program" in text and "stands for it" in text for text in loaded.warnings)
    with pytest.raises(ConfigError, match="is the output of a program"):
        load_request([str(script)], None, here=True)


def test_an_end_is_cut_off_a_text_with_an_unknown_beginning(tmp_path: Path) -> None:
    """A list of files below a folder that only its users know."""
    script = tmp_path / "run.sh"
    lists = "for f in a b; do L+='\"'$DATA'/'$f'.parquet\",'; done\nL=\"${L%,}\"\n"
    script.write_text(
        f"{lists}{CALL}actor_rollout_ref.actor.use_dynamic_bsz=True data.train_files=[$L] critic.use_dynamic_bsz=True"
    )
    loaded = load_request([str(script)], None, here=True, skip_files=True)
    assert loaded.config.data.train_files == ["DATA/a.parquet", "DATA/b.parquet"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"N=$(nvidia-smi -L | wc -l)\n{CALL}a=$N", "nvidia-smi -L | wc -l of line 1 is the output of a program"),
        (f"N=$(python count.py)\n{CALL}a=$N", "$(python ...) of line 1 is the output of a program"),
        (f"if grep -q x f; then N=1; else N=2; fi\n{CALL}a=$N", "$N depends on the `if` of line 1"),
        (f"while read -r l; do N=$l; done < f\n{CALL}a=$N", "$N depends on the `loop` of line 1"),
        (
            "if [ $# -lt 1 ]; then\n  echo usage; exit 1\nfi\n" + CALL + "a=1",
            "the script ends before it calls a trainer",
        ),
        ("echo hello", "no trainer is called"),
        (f"{CALL}a=1\n{CALL}a=2", "run.sh#1 (main_ppo, line 1)"),
    ],
)
def test_what_cannot_be_known_is_said_by_line(tmp_path: Path, text: str, said: str) -> None:
    assert said in problems(tmp_path, text)


def test_nothing_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    text = f"touch {made}\nX=$(touch {made}; echo 1)\n: > {made}\n{CALL}a=1\n"
    assert words(tmp_path, text) == ["a=1"]
    assert not made.exists()


def test_one_of_several_trainers_is_chosen_by_its_number(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{CALL}a=1\n{CALL}a=2\n", encoding="utf-8")
    assert read_script(f"{script}#2").arguments == ("a=2",)


def test_a_script_that_generates_and_evaluates_is_read_for_either_command(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python -m verl.trainer.main_generation a=1\npython -m recipe.r1.main_eval b=2\n", encoding="utf-8"
    )
    assert read_script(str(script), entry="generate").arguments[-1] == "a=1"
    assert read_script(str(script), entry="evaluate").arguments[-1] == "b=2"
    with pytest.raises(ConfigError, match=r"main_generation, line 1.*main_eval, line 2"):
        read_script(str(script), entry="train")


def test_arguments_that_a_script_does_not_read_are_named(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f'{CALL}a=$1 "$@"', encoding="utf-8")
    assert "a=4" in read_script(str(script), ["4", "b=2"]).arguments
    script.write_text(f"{CALL}a=1", encoding="utf-8")
    assert read_script(str(script), ["b=2"]).arguments == ("a=1", "b=2")
    with pytest.raises(ConfigError, match=r"run\.sh does not read its arguments 4 /tmp/out; leave it out"):
        read_script(str(script), ["4", "/tmp/out", "b=2"])


def test_a_script_named_by_the_path_of_another_machine_is_read_in_this_checkout(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run.sh").write_text(f"{CALL}a=1\n", encoding="utf-8")
    launch = read(tmp_path, "ROOT=${ROOT:-/nowhere/project}\nbash $ROOT/scripts/run.sh\n")
    assert launch.arguments == ("a=1",)
    assert any(
        f"/nowhere/project/scripts/run.sh is not here; {tmp_path}/scripts/run.sh" in note for note in launch.notes
    )


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ("--standalone --nnodes=1 --nproc_per_node=4", ("devices=4", "nodes=1")),
        ("--nnodes 2 --nproc-per-node 8", ("devices=16", "nodes=2")),
        ("--nproc_per_node=$1", ("devices=8", "nodes=1")),
    ],
)
def test_fine_tuning_has_the_devices_of_its_launcher(tmp_path: Path, options: str, keys: tuple[str, ...]) -> None:
    script = tmp_path / "sft.sh"
    script.write_text(f"torchrun {options} -m verl.trainer.sft_trainer a=1\n", encoding="utf-8")
    found = read_script(str(script), environment={}, devices=8).arguments
    assert found[-2:] == tuple(f"++posttrain.placement.{key}" for key in keys)
    # PPO's trainer is one process, which starts the others
    script.write_text(f"torchrun {options} -m verl.trainer.main_ppo a=1\n", encoding="utf-8")
    assert read_script(str(script), environment={}, devices=8).arguments == ("a=1",)


def test_devices_that_a_script_counts(tmp_path: Path) -> None:
    text = f"N=$(nvidia-smi -L | wc -l)\n{CALL}trainer.n_gpus_per_node=$N trainer.nnodes=$SLURM_NNODES\n"

    def counted(text: str, devices: int) -> tuple[str, ...]:
        script = tmp_path / "count.sh"
        script.write_text(text, encoding="utf-8")
        count = lambda dialect, key: True  # noqa: E731
        return read_script(str(script), environment={}, counts_devices=count, devices=devices).arguments

    assert counted(text, 8) == ("trainer.n_gpus_per_node=8", "trainer.nnodes=1")
    assert counted(text, 1) == ("trainer.n_gpus_per_node=1", "trainer.nnodes=1")
    with pytest.raises(ConfigError, match=r"\$GPUS of line 1 is not set"):  # a number that the user gives
        counted(f"{CALL}trainer.n_gpus_per_node=$GPUS\n", 8)


@pytest.mark.parametrize("end", ["# b=2 \\\n  c=3\n"])
def test_lines_that_a_shell_does_not_pass_are_reported(tmp_path: Path, end: str) -> None:
    launch = read(tmp_path, f"{CALL}a=1 \\\n  {end}")
    assert launch.arguments == ("a=1",)
    assert re.search(r"^the line is a comment, which ends the command.*, at .*run\.sh:2;", launch.notes[0])
    blank = read(tmp_path, f"{CALL}a=1 \\ \n  b=2\n")
    assert "a=1" in blank.arguments and "b=2" not in blank.arguments
    assert re.search(r"^the line ends in a backslash and a blank.*, at .*run\.sh:1;", blank.notes[0])
    lacking = read(tmp_path, f"{CALL}a=1\n  b.c=2 \\\n  d=3\n")
    assert lacking.arguments == ("a=1",)
    assert re.search(r"^the line lacks a backslash at its end.*, at .*run\.sh:1;", lacking.notes[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("if true; then\n{call}a=1\n", r"the if of line 1 is not closed, at .*run\.sh:1; close it with fi"),
        ("true\nfor x in 1 2; do\n{call}a=1\n", r"the for of line 2 is not closed, at .*run\.sh:2; close it with done"),
        ("python3 -m verl.trainer.main_pp a=1\n", r"no trainer verl.trainer.main_pp, at .*:1; did you mean .*main_ppo"),
        ("a\0b\n", r"run\.sh is not a text file in UTF-8; save it in UTF-8"),
    ],
)  # fmt: skip
def test_what_a_shell_does_not_read_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text.replace("{call}", CALL))


@pytest.mark.parametrize(
    ("call", "dialect", "arguments"),
    [
        (
            "torchrun --nproc_per_node=2 -m verl.trainer.fsdp_sft_trainer a=1",
            "verl",
            ["sft_trainer", "a=1", "++posttrain.placement.devices=2", "++posttrain.placement.nodes=1"],
        ),
        ("python -m verl.trainer.main_eval a=1", "verl", ["evaluation", "a=1"]),
        (
            "ray job submit --runtime-env x -- python3 -m recipe.dapo.main_dapo a=1",
            "verl",
            ["reward_model.reward_manager=dapo", "a=1"],
        ),
        ("uv run --isolated -m skyrl_train.entrypoints.main_base a=1", "skyrl", ["a=1"]),
        ("python -m examples.train.async.main_async a=1", "skyrl", ["a=1", "+posttrain.asynchronous.mode=one_step"]),
        (
            "uv run -m examples.train.fully_async.main_fully_async a=1",
            "skyrl",
            ["a=1", "++trainer.fully_async.enabled=true"],
        ),
        # OmegaConf alone reads the arguments of newer programs: any text may stand behind the =
        (
            "uv run -m skyrl.train.main_sft 'dataset_split=train[:200]' a=1 b=[1,2]",
            "skyrl",
            ["dataset_split='train[:200]'", "a=1", "b=[1,2]"],
        ),
        (
            "python -m examples.train.algorithms.dapo.main_dapo_fully_async",
            "skyrl",
            ["++trainer.fully_async.enabled=true"],
        ),
        ("python examples/start_rlvr_pipeline.py --config_path cfg --config_name r", "roll", ["FILE"]),
        ('bash -c "python3 -m verl.trainer.main_ppo a=1"', "verl", ["a=1"]),
    ],
)
def test_trainers_of_every_peer(tmp_path: Path, call: str, dialect: str, arguments: list[str]) -> None:
    file = tmp_path / "examples" / "cfg" / "r.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("exp_name: x\n", encoding="utf-8")
    launch = read(tmp_path, call)
    assert launch.dialect == dialect
    assert list(launch.arguments) == [str(file) if each == "FILE" else each for each in arguments]


def test_a_script_loads_as_its_command_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_PATH", "/models/qwen")
    script = tmp_path / "run.sh"
    keys = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "data.train_batch_size=64"]
    script.write_text(
        f"N=8\n{CALL}{keys[0]} actor_rollout_ref.rollout.n=$N \\\n actor_rollout_ref.model.path=$MODEL_PATH $@\n",
        encoding="utf-8",
    )
    loaded = load_request([str(script), keys[2]], None, skip_files=True)
    plain = load_request([*keys[:2], "actor_rollout_ref.model.path=/models/qwen", keys[2]], "verl", skip_files=True)
    assert loaded.config == plain.config
    assert loaded.config.rollout.samples_per_prompt == 8


def test_devices_of_skyrls_roles_may_be_unknown_with_here(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    skyrl = "python -m skyrl_train.entrypoints.main_base data.train_data=[a] trainer.policy.model.path=m"
    roles = " ".join(f"trainer.placement.{role}_num_gpus_per_node=$GPUS" for role in ("policy", "ref"))
    script.write_text(f"{skyrl} {roles}")
    loaded = load_request([str(script)], None, here=True, skip_files=True)
    assert not [problem for problem in loaded.problems if "placement" in str(problem)]
    assert "trainer.placement.ref_num_gpus_per_node is 1, for the one device of --here" in " ".join(loaded.warnings)
    script.write_text(f"{skyrl} trainer.placement.colocate_all=$ALL")  # a choice, not a number
    with pytest.raises(ConfigError, match=r"\$ALL of line 1 is not set"):
        load_request([str(script)], None, here=True, skip_files=True)


def test_a_value_that_does_not_count_may_be_unknown(tmp_path: Path) -> None:
    """One that another follows, in the script or behind it, and with --drop-unknown one of a key that no version has."""
    assert words(tmp_path, f"{CALL}a=$X b=1 a=2") == ["b=1", "a=2"]
    assert words(tmp_path, f"{CALL}+a=$(hostname -I) b=1", "a=3") == ["b=1", "a=3"]
    assert "$X of line 1 is not set" in problems(tmp_path, f"{CALL}a=2 a=$X")
    script = tmp_path / "run.sh"
    script.write_text(f"{CALL}mine.name=$X b=1")
    launch = read_script(
        str(script), (), {}, folder=tmp_path, leaves_out=lambda dialect, key, empty: "mine" * (key == "mine.name")
    )
    assert launch.arguments == ("b=1",)
    assert launch.notes == ("mine.name is left out: mine, and $X of line 1 is not set",)


def test_drop_unknown_leaves_out_own_keys_whose_value_is_unknown(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{CALL}data.train_files=a.parquet mine.name=$X")
    loaded = load_request([str(script)], None, drop_unknown=True, skip_files=True)
    assert any("mine.name is left out" in text for text in loaded.warnings)
    with pytest.raises(ConfigError, match=r"\$X of line 1 is not set"):
        load_request([str(script)], None, skip_files=True)
    # Like verl's apply_chat_template, so it is not dropped unnamed; in a shell it is empty
    script.write_text(f"{CALL}data.train_files=a.parquet data.use_chat_template=$X")
    loaded = load_request(
        [str(script), "+posttrain.own_keys=[data.use_chat_template]"], None, drop_unknown=True, skip_files=True
    )
    assert any("and is empty in a shell" in text for text in loaded.warnings)
    script.write_text(f"{CALL}data.train_files=a.parquet mine.n_agent=$X")  # a number that may matter
    with pytest.raises(ConfigError, match=r"\$X of line 1 is not set"):
        load_request([str(script)], None, drop_unknown=True, skip_files=True)


GUARDED = f"""\
usage() {{ echo "usage: $0 GPUS FOLDER"; exit 1; }}
if [ "$#" -lt 2 ]; then usage; fi
[ -f .env ] || {{ echo "no .env"; exit 1; }}
gpus=$1
folder=$2
shift 2
{CALL}trainer.n_gpus_per_node=$gpus trainer.default_local_dir=$folder data.train_batch_size=$BATCH "$@"
"""


def test_given_values_stand_for_variables_and_arguments(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("BATCH=$(nproc --all)\n")
    script = tmp_path / "run.sh"
    script.write_text(f"set -a; . ./.env\n{GUARDED}")
    launch = read_script(str(script), ["a=1"], {}, folder=tmp_path, given={"1": "8", "2": "out", "BATCH": "64"})
    sizes = ("trainer.n_gpus_per_node=8", "trainer.default_local_dir=out", "data.train_batch_size=64")
    assert launch.arguments == (*sizes, "a=1")  # what follows the script comes behind the numbered arguments


def test_a_value_that_the_script_does_not_read_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{CALL}data.train_batch_size=$BATCH\n")
    with pytest.raises(ConfigError, match=r"reads no \$BATCHES, at --set BATCHES; did you mean BATCH\?"):
        read_script(str(script), (), {}, folder=tmp_path, given={"BATCHES": "64"})


def test_a_script_that_ends_at_a_condition_lists_what_its_trainer_lacks(tmp_path: Path) -> None:
    said = problems(tmp_path, GUARDED)
    assert "ends before it calls a trainer" in said and "run.sh:1" in said
    assert "run.sh --set 1=... --set 2=... --set BATCH=..." in said


def test_a_plan_reads_on_behind_conditions_and_asks_for_numbers_alone(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(GUARDED)
    arguments = [str(script), "--set", "BATCH=64", "--set=1=8", "--set", "2=out", "actor_rollout_ref.rollout.n=8"]
    loaded = load_request(
        [*arguments, "algorithm.adv_estimator=grpo", "data.train_files=x"], None, here=True, skip_files=True
    )
    assert loaded.config.data.prompts_per_step == 64
    assert any("unless its condition there is met" in warning for warning in loaded.warnings)
    with pytest.raises(ConfigError, match=r"\$BATCH of line 7 is not set") as raised:
        load_request(arguments[:1], None, here=True, skip_files=True)
    assert "$2" not in str(raised.value)  # a path that need not exist


LAUNCHER = f"""die() {{
    echo "$*" >&2
    exit 2
}}
check() {{
    if [[ -e $1 ]]; then
        return 0
    fi
    die "there is no $1"
}}
check "$1"
{CALL}data.train_files=$1 data.train_batch_size=32 algorithm.adv_estimator=grpo
"""


def test_a_plan_reads_on_behind_a_function_that_fails(tmp_path: Path) -> None:
    """Which stands in the script that another one hands over to: that one's line is named."""
    (tmp_path / "launch.sh").write_text(LAUNCHER)
    script = tmp_path / "run.sh"
    script.write_text(f'exec bash "{tmp_path}/launch.sh" data/train.parquet\n')
    assert "ends before it calls a trainer, at" in problems(tmp_path, script.read_text())
    assert "launch.sh:3" in problems(tmp_path, script.read_text())
    loaded = load_request([str(script)], None, here=True, skip_files=True)
    assert loaded.config.data.prompts_per_step == 32
    assert any("launch.sh:3 unless its condition there is met" in warning for warning in loaded.warnings)


def test_an_unknown_value_of_a_key_without_effect_is_left_out(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{CALL}data.return_raw_chat=$return_raw_chat data.train_files=x\n")
    loaded = load_request([str(script)], None, here=True, skip_files=True)
    assert any("data.return_raw_chat is left out: it has no effect here" in each for each in loaded.warnings)
    script.write_text(f"{CALL}hydra.run.dir=$folder/logs data.train_files=x\n")
    loaded = load_request([str(script)], None, here=True, skip_files=True)
    assert any("hydra.run.dir is left out: it configures Hydra's own program" in each for each in loaded.warnings)
    script.write_text(f"{CALL}hydra.searchpath=[$folder/config] data.train_files=x\n")
    with pytest.raises(ConfigError, match=r"\$folder of line 1 is not set"):
        load_request([str(script)], None, here=True, skip_files=True)


@pytest.mark.parametrize("setting", ["BATCH", "a-b=1", "0=1", ""])
def test_a_setting_is_a_name_and_a_value(setting: str) -> None:
    with pytest.raises(ConfigError, match="is no NAME=VALUE"):
        load_request(["run.sh", "--set", setting], None)


def test_settings_are_for_scripts() -> None:
    with pytest.raises(ConfigError, match="there is none; write the key"):
        load_request(["--set", "A=1", "algorithm.adv_estimator=grpo"], "verl")


def test_all_trainers_of_a_script_are_planned(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    keys = "data.train_files=x actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    keys += " actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 algorithm.adv_estimator=grpo"
    script.write_text("for n in 4 8; do\n" + f"{CALL}{keys} actor_rollout_ref.rollout.n=$n\ndone\n")
    shown = CliRunner().invoke(app, ["plan", str(script), "--here", "--skip-files"])
    assert f"{script}#1\n" in shown.output and f"{script}#2\n" in shown.output
    assert "4 samples" in shown.output and "8 samples" in shown.output


def test_arguments_behind_the_end_of_a_line_in_a_text(tmp_path: Path) -> None:
    text = f'COMMAND="{CALL}a=1 \\\n    b=2 \\\n    $@ 2>&1 | tee log"\neval ${{COMMAND}}\n'
    assert words(tmp_path, text, "c=3") == ["a=1", "b=2", "c=3"]


def test_keys_of_this_program_are_no_arguments_of_the_script(tmp_path: Path) -> None:
    """A script that reads its options one by one would take the key for one of them, and the run would lack it."""
    text = f'while [ $# -gt 0 ]; do case "$1" in --size) SIZE=$2; shift 2 ;; *) shift ;; esac; done\n{CALL}a=${{SIZE:-1}}\n'
    assert words(tmp_path, text, "--size", "4", "+posttrain.own_keys=[a]") == ["a=4", "+posttrain.own_keys=[a]"]


def test_a_script_finds_what_stands_above_it_from_any_folder(tmp_path: Path) -> None:
    """Scripts of a checkout are started at its root, and planned from elsewhere."""
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    for folder in (checkout / "examples/config", elsewhere):
        folder.mkdir(parents=True)
    (checkout / "examples/config/mine.yaml").write_text("trainer: {total_epochs: 7}\n")
    (checkout / "examples/base.sh").write_text(
        f'{CALL} --config-path="$(pwd)/examples/config" --config-name=mine "$@"\n', encoding="utf-8"
    )
    script = checkout / "examples/run.sh"
    script.write_text("bash examples/base.sh data.seed=3\n", encoding="utf-8")
    launch = read_script(str(script), (), {}, folder=elsewhere)
    assert launch.arguments == (f"{checkout}/examples/config/mine.yaml", "data.seed=3")


@pytest.mark.parametrize("package", ["skyrl_train.entrypoints", "skyrl.train.entrypoints"])
def test_skyrls_program_that_generates_trains_nothing(package: str, tmp_path: Path) -> None:
    call = f"python -m {package}.main_generate data.val_data=[v.parquet] environment.env_class=gsm8k"
    arguments = words(tmp_path, call)
    loaded = load_request(arguments, "skyrl", here=True, skip_files=True)
    assert loaded.problems == () and loaded.config.validation.only


def test_a_pattern_in_a_folder_that_a_program_names_is_no_crash(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text('cd "$(pip show thing)" && ln -s thing*.so\n' + CALL + "data.seed=1\n", encoding="utf-8")
    assert read_script(str(script), (), {}, folder=tmp_path).arguments == ("data.seed=1",)


def test_a_number_of_the_process_is_that_of_the_reader(tmp_path: Path) -> None:
    assert words(tmp_path, CALL + 'trainer.experiment_name="run_$$"') == [f"trainer.experiment_name=run_{os.getpid()}"]


@pytest.mark.parametrize("text", ["run_$$", "$$_run", "a/$$/b-$$", "$$"])
def test_a_number_of_the_process_needs_no_quotes(tmp_path: Path, text: str) -> None:
    expected = f"trainer.experiment_name={text.replace('$$', str(os.getpid()))}"
    assert words(tmp_path, CALL + f"trainer.experiment_name={text}") == [expected]
    assert words(tmp_path, f"NAME={text}\n" + CALL + "trainer.experiment_name=$NAME") == [expected]


def test_a_real_path_of_an_unknown_folder_is_no_crash(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text('ROOT="$(readlink -f "$(conda info)/bin")"\n' + CALL + "data.seed=1\n", encoding="utf-8")
    assert read_script(str(script), (), {}, folder=tmp_path).arguments == ("data.seed=1",)


def test_a_number_that_a_program_computes_is_asked_for_by_its_variable(tmp_path: Path) -> None:
    text = "ROWS=$(wc -l < rows.txt)\nSTEPS=$((ROWS * 3))\n" + CALL + "trainer.total_training_steps=$STEPS\n"
    with pytest.raises(ConfigError, match="--set STEPS=VALUE, or write its value into the script"):
        words(tmp_path, text)
    script = tmp_path / "given.sh"
    script.write_text(text, encoding="utf-8")
    read = read_script(str(script), (), {}, folder=tmp_path, given={"STEPS": "12"})
    assert read.arguments == ("trainer.total_training_steps=12",)


def test_the_variable_that_holds_nothing_but_a_programs_output_is_asked_for(tmp_path: Path) -> None:
    text = (
        "LENGTH=$(python length.py)\nNAME=run_$LENGTH\n"
        + CALL
        + "data.max_response_length=$LENGTH trainer.experiment_name=$NAME"
    )
    with pytest.raises(ConfigError, match=r"data\.max_response_length=\.\.\.; --set LENGTH=VALUE"):
        words(tmp_path, text)


@pytest.mark.parametrize("look", ["pgrep -af verl.trainer.main_ppo", "/bin/ps -C verl.trainer.main_ppo"])
def test_a_command_that_looks_for_a_trainer_starts_none(tmp_path: Path, look: str) -> None:
    assert words(tmp_path, f"if {look} >/dev/null; then exit 1; fi\n" + CALL + "data.seed=1") == ["data.seed=1"]


def test_a_path_that_a_condition_decides_is_called_by_its_variable_where_files_are_skipped(tmp_path: Path) -> None:
    text = "MODEL=small\nif nvidia-smi; then MODEL=big; fi\n" + CALL + "actor_rollout_ref.model.path=$MODEL\n"
    with pytest.raises(ConfigError, match="--set MODEL=VALUE"):
        words(tmp_path, text)
    script = tmp_path / "skipped.sh"
    script.write_text(text, encoding="utf-8")
    read = read_script(str(script), (), {}, folder=tmp_path, takes_names=lambda dialect, key: True)
    assert read.arguments == ("actor_rollout_ref.model.path=MODEL",)
    assert any("MODEL stands for it" in note for note in read.notes)


def test_a_placeholder_for_a_path_stands_for_it_where_files_are_skipped(tmp_path: Path) -> None:
    """Hydra has no < outside of quotes, so a run needs the value; a plan without files does not."""
    script = tmp_path / "run.sh"
    script.write_text(
        CALL + '"actor_rollout_ref.model.path=<path_to_dsv3_config>" data.train_files=a.parquet '
        '"actor_rollout_ref.actor.megatron.dist_checkpointing_path=<path_to_dist_ckpt>"\n'
    )
    loaded = load_request([str(script)], None, here=True, skip_files=True)
    assert loaded.config.model.path == "<path_to_dsv3_config>"
    assert any("<path_to_dsv3_config>, a placeholder" in text for text in loaded.warnings)
    with pytest.raises(ConfigError, match="quotes"):
        load_request([str(script)], None, here=True)
    script.write_text(CALL + '"actor_rollout_ref.rollout.n=<n>" data.train_files=a.parquet\n')  # no text
    with pytest.raises(ConfigError, match="quotes"):
        load_request([str(script)], None, here=True, skip_files=True)


def test_a_switch_behind_a_variable_that_is_not_set_is_off_where_files_are_skipped(tmp_path: Path) -> None:
    """A shell passes an empty text, which is false in Python."""
    script = tmp_path / "run.sh"
    script.write_text(CALL + "actor_rollout_ref.actor.use_kl_loss=$use_kl_loss data.train_files=a.parquet\n")
    loaded = load_request([str(script)], None, here=True, skip_files=True)
    assert loaded.config.loss.kl_coef == 0.0
    assert any("$use_kl_loss of line" in text and "is empty in a shell" in text for text in loaded.warnings)
    with pytest.raises(ConfigError, match="--set use_kl_loss"):
        load_request([str(script)], None, here=True)


def test_a_script_that_tries_again_until_it_succeeds_has_an_end(tmp_path: Path) -> None:
    """The run is planned as its first attempt; what an unsuccessful one is followed by is not."""
    script = tmp_path / "retry.sh"
    script.write_text(
        "N=0\nwhile true; do\nif [[ $N -eq 0 ]]; then M=disable; else M=auto; fi\n"
        f"{CALL}trainer.resume_mode=$M\nCODE=$?\n"
        "if [[ $CODE -eq 0 ]]; then break; fi\n((N++))\nsleep 10\ndone\nexit $CODE\n"
    )
    assert read_script(str(script), (), {}, folder=tmp_path).arguments == ("trainer.resume_mode=disable",)
