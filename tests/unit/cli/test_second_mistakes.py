"""Slips of a first day: values as other libraries write them, YAML and data files that an editor or a copy has damaged.

Each is one problem with its place and its fix, found by plan before a model is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.cli.app import main

Plan = Callable[..., str]
BASE = """run: {folder: out, total_steps: 2}
model: {path: model}
data: {train_files: [a.jsonl], prompts_per_step: 2, max_prompt_tokens: 64}
rollout: {samples_per_prompt: 2, max_response_tokens: 8}
reward: {terms: [{name: gsm8k}]}
placement: {device: cpu}
"""
ROW = {"prompt": "1 + 1?", "ground_truth": "2"}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_llama, tmp_path / "model")
    (tmp_path / "run.yaml").write_text(BASE)
    (tmp_path / "a.jsonl").write_text(8 * (json.dumps(ROW) + "\n"))
    return tmp_path


@pytest.fixture
def plan(job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Run ``posttrain plan run.yaml ARGUMENTS``. Returns: standard error in one line, "" when it plans."""

    def run(*arguments: str, file: str = "run.yaml") -> str:
        monkeypatch.setattr("sys.argv", ["posttrain", "plan", file, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        err = " ".join(capsys.readouterr().err.split())
        assert ended.value.code in (0, None) if not err else ended.value.code == 2
        assert "problems" not in err, "one slip is one problem"
        assert "Traceback" not in err
        return err

    return run


def test_the_base_plans(plan: Plan) -> None:
    assert plan() == ""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        # pydantic reads 1e_6 as a million
        ("policy.optimizer.lr=1e_6", "lr must be a number, not '1e_6'"),
        ("run.total_steps=None", "total_steps must be a whole number, not 'None', at override run.total_steps=None; write null"),
        ("run.total_steps=-1", "must be at least 1, not -1, at override run.total_steps=-1; null means all steps"),
        ("rollout.top_k=-1", "top_k must be at least 0, not -1, at override rollout.top_k=-1; 0 keeps every token"),
        ("model.compute_dtype=bf16", "not 'bf16', at override model.compute_dtype=bf16; did you mean bfloat16?"),
        ("model.compute_dtype=torch.bfloat16", "did you mean bfloat16?"),
        ("placement.device=cuda:0", "not 'cuda:0', at override placement.device=cuda:0; did you mean cuda?"),
        ("policy.optimizer.name=adam", "did you mean adamw?"),
        ("loss.aggregation=seq-mean-token-mean", "did you mean sequence_mean_token_mean?"),
        ("tracking.trackers=wandb", "trackers must be a list, not 'wandb', at override tracking.trackers=wandb; write [wandb]"),
        ("policy.optimizer.betas=0.9", "at override policy.optimizer.betas=0.9; write [0.9, 0.999]"),
        ("policy.optimizer.betas=[0.9]", "betas has 1 values, which are too few"),
        ("policy.schedule=cosine", "did you mean policy.schedule.name=cosine?"),
        ("advantage=grpo", "did you mean advantage.name=grpo?"),
        ("model=tiny", "a section of key: value lines, not 'tiny', at override model=tiny; did you mean model.path=tiny?"),
        ("data=a.jsonl", "did you mean data.train_files=[a.jsonl]?"),
        ("policy.lora=true", "did you mean policy.lora.rank=16?"),
        ("reward=my.py", "did you mean 'reward.terms=[{path: my.py, name: NAME_OF_THE_FUNCTION}]'?"),
        ("rollout.stop=</s>", "(a character that needs quotes); write \"rollout.stop='</s>'\", with both kinds of quotes"),
        ("rollout.samples_per_prompt = 4", "(a character that needs quotes); write rollout.samples_per_prompt=4"),
        ("model.path=.", "so it is not a Hugging Face model folder, at override model.path=.; did you mean model?"),
    ],
)  # fmt: skip
def test_a_value_as_other_libraries_write_it(plan: Plan, override: str, said: str) -> None:
    assert said in plan(override)


@pytest.mark.parametrize("cut", [("rollout.top_k", "=4"), ("rollout.top_k=", "4"), ("rollout.top_k", "=", "4")])
def test_blanks_around_the_equals_sign(plan: Plan, cut: tuple[str, ...]) -> None:
    assert plan(*cut) == "posttrain: there are blanks around the = of rollout.top_k=4; write rollout.top_k=4"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("total_steps: 2}", "total_steps: 1_0}", ""),  # YAML's own separator of digits
        ("\n", "\r\n", ""),
        ("run:", "\ufeffrun:", ""),
        ("total_steps: 2", "total_steps: '2'", ""),
        ("placement: {", "placement:\n\t{", "here is a tab, at run.yaml:7; replace it by spaces"),
        ("placement: {device: cpu}", "model: {path: x}", "model is written twice, on lines 2 and 6, at run.yaml:6; keep one"),
        ("total_steps: 2", "total_steps: 2,5", "keys are names, at run.yaml:1 run.5; a decimal has a point, not a comma"),
        ("{samples_per_prompt: 2, ", "{samples_per_prompt: 2.5, ", "must be a whole number, not 2.5, at run.yaml:4"),
        ("prompts_per_step: 2", "prompts_per_step: yes", "prompts_per_step must be a number, not true, at run.yaml:3"),
        ("prompts_per_step: 2", "prompts_per_step:", "at run.yaml:3"),
        ("prompts_per_step: 2", "prompts_per_step: [2]", "at run.yaml:3"),
        ("path: model", "path:", "path must be text, not null (Folder or hub id"),
        ("{samples_per_prompt: 2, ", "{samples_per_prompt: 2 ", "at run.yaml:4"),
        ("reward: {terms: [{name: gsm8k}]}", "reward: {terms: [{name: gsm8k}]", "at run.yaml:"),
    ],
)  # fmt: skip
def test_a_damaged_configuration(plan: Plan, job: Path, old: str, new: str, said: str) -> None:
    (job / "run.yaml").write_bytes(BASE.replace(old, new).encode())
    err = plan()
    assert said in err if said else err == ""


def table(job: Path, **columns: list[object]) -> str:
    pq.write_table(pa.table(columns), job / "d.parquet")
    return "d.parquet"


def text(job: Path, name: str, content: str) -> str:
    (job / name).write_text(content)
    return name


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda job: table(job, question=["a"] * 3, answer=["1"] * 3), "did you mean data.prompt_column=question?"),
        (lambda job: table(job, prompt=["a"] * 3, label=["1"] * 3), "did you mean data.ground_truth_column=label?"),
        (lambda job: table(job, prompt=["a", None, "c"], answer=["1"] * 3), "row 1 of d.parquet: column prompt holds nothing"),
        (lambda job: table(job, prompt=[], answer=[]), "d.parquet holds no rows"),
        (lambda job: text(job, "d.jsonl", 17 * (json.dumps(ROW) + "\n") + '{"prompt": "x"}\n'),
         "row 17 of d.jsonl has no column 'ground_truth'"),
        (lambda job: text(job, "d.jsonl", '{"prompt": "x", "answer": "1",}\n'), "; remove the comma before the bracket"),
        (lambda job: text(job, "d.jsonl", "{'prompt': 'x', 'answer': '1'}\n"), "this looks like a printed Python mapping"),
        (lambda job: text(job, "d.csv", "prompt;answer\na;1\n"), "the cells of d.csv are separated by ';', and commas are"),
        (lambda job: text(job, "d.parquet", "hello"), "d.parquet cannot be read"),
        (lambda job: text(job, "d.jsonl", ""), "d.jsonl holds no rows"),
        (lambda job: "model", "model is a folder of a model"),
    ],
)  # fmt: skip
def test_a_damaged_data_file(plan: Plan, job: Path, write: Callable[[Path], str], said: str) -> None:
    assert said in plan(
        f"data.train_files=[{write(job)}]", "data.prompts_per_step=1", "policy.sequences_per_mini_batch=2"
    )


def remove(name: str) -> Callable[[Path], object]:
    return lambda model: (model / name).unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (remove("chat_template.jinja"), "has no chat template, at model.chat_template_file"),
        (lambda model: (model / "tokenizer.json").write_text('{"version": '), "tokenizer.json is not JSON: it may have"),
        (lambda model: (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-100]),
         "model.safetensors is cut short: it has "),
        (lambda model: (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:100]),
         "model.safetensors is cut short: it has 100 of "),
        (remove("config.json"), "holds no config.json"),
    ],
)  # fmt: skip
def test_a_damaged_model(plan: Plan, job: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(job / "model")
    assert said in plan()


REWARDS = """
def of_one(response, *, strict=True): return 1
def good(solution_str, ground_truth, bonus=1): return 1
def lists(data_sources, solution_strs, ground_truths, extra_infos): return [1]
"""


@pytest.mark.parametrize(
    ("term", "said"),
    [
        ("{path: r.py, name: good, options: {bonus: 2}}", ""),
        ("{path: r.py, name: lists, batched: true}", ""),
        ("{path: r.py, name: of_one}", "of_one(response, *, strict=True) in r.py cannot be called with the keywords data_source"),
        ("{path: r.py, name: good, options: {bonsu: 2}}", "got an unexpected keyword argument 'bonsu'"),
        ("{path: r.py, name: good, batched: true}", "cannot be called with the keywords data_sources"),
    ],
)  # fmt: skip
def test_a_reward_that_cannot_be_called(plan: Plan, job: Path, term: str, said: str) -> None:
    (job / "r.py").write_text(REWARDS)
    err = plan(f"reward.terms=[{term}]")
    assert said in err if said else err == ""


def test_missing_libraries_are_reported_by_plan_and_refused_by_train(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("posttrain.plan.checks.libraries.is_installed", lambda name: False)
    for command, code in (("plan", 0), ("train", 2)):
        chosen = ["tracking.trackers=[console,wandb]", "policy.lora.rank=8"]
        monkeypatch.setattr("sys.argv", ["posttrain", command, "run.yaml", *chosen])
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == code
        shown = capsys.readouterr()
        said = " ".join((shown.out + shown.err).split())
        if command == "plan":
            assert said.endswith("not installed here: wandb, peft")
        for library, extra in (("wandb", "wandb"), ("peft", "lora")) if command == "train" else ():
            assert f"{library} is not installed (needed by " in said and f"pip install 'posttrain[{extra}]'" in said


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["d.jsonl"], 2, "did you mean data.prompt_column=question?"),
        (["d.jsonl", "data.prompt_column=question"], 0, "d.jsonl: 1 rows, all right for rl"),
        (
            ["d.jsonl", "--for", "sft"],
            0,
            "d.jsonl: 1 rows, all right for sft",
        ),  # a whole number is an answer there, too
        (["d.jsonl", "prompt_column=question"], 2, "write data.prompt_column=... for a key of the data section"),
        (["d.jsonl", "data.prompt_colum=question"], 2, "did you mean data.prompt_column?"),
    ],
)
def test_a_check_of_a_file_takes_the_keys_that_it_advises(
    arguments: list[str],
    code: int,
    said: str,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (job / "d.jsonl").write_text('{"question": "1 + 1?", "answer": 2}\n')
    monkeypatch.setattr("sys.argv", ["posttrain", "data", "check", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert (ended.value.code or 0, said in shown.out + " ".join(shown.err.split())) == (code, True)


def test_rows_for_fine_tuning_are_checked_by_plan(plan: Plan, job: Path) -> None:
    (job / "sft.yaml").write_text("model: {path: model}\ndata: {train_files: [d.jsonl], sequences_per_step: 2}\n")
    rows = [{"question": "?", "answer": 7}, {"question": "?", "answer": ""}, {"question": "?", "answer": True}]
    (job / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in 4 * rows[:1]))
    assert plan(file="sft.yaml") == ""
    for bad, said in ((rows[1], "holds an empty text"), (rows[2], "holds True; text is expected")):
        (job / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*4 * rows[:1], bad]))
        assert f"row 4 of d.jsonl: column answer {said}" in plan(file="sft.yaml")


def test_a_path_in_the_home_folder_needs_no_quotes(plan: Plan, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell expands ~ at the beginning of a word alone."""
    monkeypatch.setenv("HOME", str(job))
    assert plan("model.path=~/model") == ""
    assert f"there is no folder {job}/none, at override model.path=~/none" in plan("model.path=~/none")


ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
VERL = [
    "--dialect", "verl", "actor_rollout_ref.model.path=model", "data.train_files=a.jsonl", "data.val_files=a.jsonl",
    "algorithm.adv_estimator=grpo", "data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=8", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8", f"{ROLLOUT}.n=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8", "trainer.n_gpus_per_node=1", f"{ROLLOUT}.name=hf",
    "trainer.logger=console", "custom_reward_function.path=r.py", "custom_reward_function.name=good",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.train_batch_size='8'"], "must be int, not '8', at override data.train_batch_size='8'; write 8"),
        (["data.train_batch_size=8.0"], "not 8.0, at override data.train_batch_size=8.0; write 8"),
        # the default estimator stands in, and its critic's default folder is not there: no second problem
        (["algorithm.adv_estimator=GRPO"], "not 'GRPO', at override algorithm.adv_estimator=GRPO; did you mean grpo?"),
        (["algorithm.adv_estimator=gspo"], "gspo is a policy loss, which this key does not choose"),
        ([f"{ACTOR}.policy_loss.loss_mode=grpo"], "grpo is an advantage estimator, which this key does not choose"),
        ([f"{ROLLOUT}.name=VLLM"], "did you mean vllm?"),
        ([f"{ACTOR}.use_kl_loss=1"], "; write True"),
        ([f"{ACTOR}.use_kl_loss=yes"], "; write True"),
        (["trainer.default_local_dir=a.jsonl"], "a.jsonl is a file, and a run writes into a folder"),
        (["data.train_files=[a.jsonl"], "(a bracket or a quote is not closed, or stands in the wrong place)"),
        (["trainer.project_name=my", "project"], "goes into both kinds of quotes: \"trainer.project_name='my project'\""),
        (["deepspeed=ds.json"], "there is no key deepspeed in verl 0.4 or later, at override deepspeed=ds.json; did you mean"),
    ],
)  # fmt: skip
def test_slips_in_a_command_of_verl(
    overrides: list[str], said: str, job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (job / "r.py").write_text(REWARDS)
    monkeypatch.setattr("sys.argv", ["posttrain", "plan", *VERL, *overrides])
    with pytest.raises(SystemExit) as ended:
        main()
    err = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and said in err and "problems" not in err
