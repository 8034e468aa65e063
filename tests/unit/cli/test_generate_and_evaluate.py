"""posttrain generate and posttrain evaluate as their users type them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.cli.app import main
from warm.processes import WarmProcess

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def posttrain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``posttrain ARGUMENTS``: (exit code, stdout, stderr)."""
    for name in ("TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # what prepare() sets does not outlive the test

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["posttrain", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return run


def rows(count: int = 6) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{number}+1="}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"index": number},
        }
        for number in range(count)
    ]


def write_rows(path: Path, values: list[dict[str, Any]]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(values), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in values))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> list[str]:
    """Arguments of a generation in which everything is right; its folder is the current one."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "p.parquet", rows())
    return [
        f"model.path={tiny_llama}",
        "model.compute_dtype=float32",
        "data.files=p.parquet",
        "output.file=out.parquet",
        "output.rows_per_part=2",
        "rollout.samples_per_prompt=3",
        "rollout.max_response_tokens=8",
        "placement.cpu_threads=1",
    ]


def test_round_trip(posttrain: Run, job: list[str], tmp_path: Path) -> None:
    code, out, err = posttrain("generate", *job)
    assert (code, err) == (0, "")
    assert "wrote out.parquet" in out
    table = pq.read_table("out.parquet")
    assert table.column_names == ["data_source", "prompt", "reward_model", "extra_info", "responses"]
    assert table.drop_columns(["responses"]).to_pylist() == rows()
    responses = table["responses"].to_pylist()
    assert [len(texts) for texts in responses] == [3] * 6
    assert len({text for texts in responses for text in texts}) > 6  # every sample has random numbers of its own

    code, out, _ = posttrain("generate", *job)  # nothing is done twice
    assert code == 0 and "complete already" in out and "wrote" not in out

    code, out, err = posttrain("evaluate", "data.files=out.parquet", "output.folder=e", "run.name=first")
    assert code == 0
    assert not err or err.startswith("Model-written code runs in a box")  # said once it is known
    assert "openai/gsm8k: 6 prompts, 18 responses" in out and "reward_mean@3" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    results = json.loads(Path("e/results.json").read_text())
    assert results["sources"]["openai/gsm8k"]["metrics"]["accuracy"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    samples = [json.loads(line) for line in Path("e/dumped_evals/openai_gsm8k.jsonl").read_text().splitlines()]
    assert [sample["output_response"] for sample in samples] == [text for texts in responses for text in texts]
    assert "first" in Path("e/report.html").read_text()

    code, out, _ = posttrain("evaluate", "data.files=out.parquet", "output.folder=e", "--json")
    assert code == 0 and json.loads(out)["name"] == "evaluation"
    code, out, _ = posttrain("report", "e", "e", "--out", "both.html")
    assert code == 0 and Path("both.html").is_file()


def test_a_row_gets_the_same_whatever_was_done_before(posttrain: Run, job: list[str]) -> None:
    assert posttrain("generate", *job)[0] == 0
    whole = Path("out.parquet").read_bytes()
    assert posttrain("generate", *job, "--overwrite", "output.file=other.parquet")[0] == 0
    assert Path("other.parquet").read_bytes() == whole  # the file's name is no part of it
    assert posttrain("generate", *job, "output.file=seeded.parquet", "run.seed=2")[0] == 0
    assert Path("seeded.parquet").read_bytes() != whole


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_other_files_keep_their_columns(posttrain: Run, job: list[str], suffix: str) -> None:
    path = Path(f"q{suffix}")
    if suffix == ".csv":
        path.write_text('prompt,level\n"1+1=",3\n"a, b",4\n')
    else:
        write_rows(path, [{"prompt": "1+1=", "level": 3}, {"prompt": "a, b", "level": 4, "note": "x"}])
    code, _, err = posttrain("generate", *job, f"data.files={path}")
    assert (code, err) == (0, "")
    found = pq.read_table("out.parquet").to_pylist()
    assert [row["prompt"] for row in found] == ["1+1=", "a, b"]
    assert [str(row["level"]) for row in found] == ["3", "4"]
    assert all(len(row["responses"]) == 3 for row in found)


def test_plans_of_both(posttrain: Run, job: list[str]) -> None:
    code, out, _ = posttrain("plan", *job)
    assert code == 0 and "6 rows, 18 responses" in out
    write_rows(Path("said.parquet"), [row | {"responses": ["#### 1"]} for row in rows()])
    code, out, _ = posttrain("plan", "data.files=said.parquet", "metrics.bootstrap_draws=10")
    assert code == 0 and "sources    openai/gsm8k" in out and "6 rows" in out
    code, _, err = posttrain("plan", "data.files=said.parquet", "metrics.bootstrap_draws=100000000")
    assert code == 2 and "bootstrap_draws must be at most 1000000, not 100000000" in err


def no_prompt() -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "prompt"} for row in rows()]


def with_row(number: int, **change: Any) -> list[dict[str, Any]]:
    found = rows()
    found[number] |= change
    return found


SAID = [row | {"responses": ["#### 1", "#### 2"]} for row in rows()]


def said(number: int, **change: Any) -> list[dict[str, Any]]:
    return [row | (change if index == number else {}) for index, row in enumerate(SAID)]


# What is written into p.jsonl (a text, or rows), the arguments that are changed, and what must be told.
BAD_GENERATIONS: list[tuple[Any, list[str], str]] = [
    (None, ["data.files=none.parquet"], "there is no file none.parquet"),
    (None, ["data.files=[]"], "there is no file with prompts"),
    ("", [], "p.jsonl holds no rows"),
    ("{", [], "line 1 of p.jsonl is not JSON"),
    ("[1, 2]\n", [], "line 1 of p.jsonl holds a list of 2"),
    (no_prompt(), [], "has none of the columns prompt, messages"),
    (rows(), ["data.prompt_column=promt"], "did you mean data.prompt_column=prompt?"),
    (with_row(2, prompt=[]), [], "row 2 of p.jsonl: column prompt holds a list of 0 messages"),
    (with_row(3, prompt=[{"role": "user"}]), [], "row 3 of p.jsonl: column prompt has no content in message 0"),
    (with_row(4, prompt=7), [], "row 4 of p.jsonl: column prompt holds 7"),
    (with_row(0, prompt=" "), [], "row 0 of p.jsonl: column prompt holds an empty text"),
    (with_row(1, extra_info="x"), [], "column extra_info of p.jsonl holds values of several kinds"),
    (with_row(0, responses=["x"]), [], "has a column responses already"),
    (rows(), ["output.file=out.json"], "its name must end in .parquet"),
    (rows(), ["output.file=p.jsonl"], "p.jsonl is read and written"),
    (rows(), ["rollout.temperature=0"], "at temperature 0 the 3 responses to a prompt would all be the same"),
    (rows(), ["data.max_prompt_tokens=3"], "6 of 6 prompts are longer than 3 tokens"),
    (rows(), ["rollout.max_response_tokens=2000"], "do not fit into the 1024 positions of the model"),
    (rows(), ["model.path=nowhere/at/all"], "there is no folder nowhere/at/all"),
    (rows(), ["rollout.engine=vlm"], "there is no rollout engine called 'vlm'"),
]
BAD_EVALUATIONS: list[tuple[Any, list[str], str]] = [
    (None, ["data.files=none.parquet"], "there is no file none.parquet"),
    (rows(), [], "has no column 'responses'"),
    (SAID, ["data.response_column=response"], "did you mean data.response_column=responses?"),
    (said(2, responses=None), [], "row 2 of p.jsonl: column responses holds nothing"),
    (said(1, responses=[]), [], "row 1 of p.jsonl: column responses holds a list of 0 responses"),
    (said(5, responses=["a", 3]), [], "row 5 of p.jsonl: column responses holds 3 as response 1"),
    (said(0, responses={"a": "b"}), [], "row 0 of p.jsonl: column responses holds a mapping of 1"),
    (said(3, data_source=None), [], "row 3 of p.jsonl: column data_source holds nothing"),
    (said(3, data_source="my/own"), [], "data source 'my/own'"),
    (said(3, reward_model={"style": "rule"}), [], "reward_model.ground_truth"),
    (said(4, extra_info=3), [], "row 4 of p.jsonl: column extra_info holds 3"),
    (SAID, ["reward.terms=[{name: gsmk}]"], "there is no reward called 'gsmk'"),
    (SAID, ["reward.terms=[]"], "there is nothing to score responses by"),
    (SAID, ["reward.terms=[{name: f, path: none.py}]"], "there is no file none.py"),
    (SAID, ["metrics.confidence=95"], "confidence must be below 1, not 95"),
    (SAID, ["metric.confidence=0.9"], "there is no key metric"),
    (SAID, ["reward.model.path=m"], "by a reward model is planned"),
    (SAID, ["output.folder=p.jsonl"], "p.jsonl is a file"),
]
BAD = [("generate", *case) for case in BAD_GENERATIONS] + [("evaluate", *case) for case in BAD_EVALUATIONS]


def test_there_are_enough_of_them() -> None:
    assert len(BAD) >= 30


@pytest.mark.parametrize(("command", "content", "changes", "says"), BAD, ids=[f"{one[0]}-{one[3][:40]}" for one in BAD])
def test_a_bad_request_is_one_clear_error(
    posttrain: Run, job: list[str], command: str, content: Any, changes: list[str], says: str
) -> None:
    file = Path("p.jsonl")
    if isinstance(content, str):
        file.write_text(content)
    elif content is not None:
        write_rows(file, content)
    arguments = ["data.files=p.jsonl"] if command == "evaluate" else [*job, "data.files=p.jsonl"]
    before = sorted(Path.cwd().iterdir())
    code, out, err = posttrain(command, "--dialect", "native", *arguments, *changes)
    assert code == 2, out + err
    assert says in " ".join(err.split())
    assert "Traceback" not in err and "bug in posttrain" not in err
    assert sorted(Path.cwd().iterdir()) == before  # nothing was written


def test_a_changed_request_is_noticed(posttrain: Run, job: list[str]) -> None:
    from posttrain.build.generate import request_of
    from posttrain.cli.request import load_request
    from posttrain.dialects.entries import GENERATE
    from posttrain.run.parts import Parts

    config = load_request(job, "native", GENERATE).config
    parts = Parts(Path("out.parquet"), request_of(config), column="responses", rows=6, rows_per_part=2)
    parts.begin()
    parts.write(0, [["kept"] * 3] * 2)
    code, _, err = posttrain("generate", *job, "rollout.temperature=0.5", "run.seed=9")
    assert code == 2
    told = " ".join(err.split())
    assert "rollout.temperature 1.0, and this request has 0.5" in told and "run.seed 1, and this request has 9" in told
    code, out, _ = posttrain("generate", *job)
    assert code == 0 and "resuming after 2 of 6 rows" in out
    assert not parts.folder.exists()
    assert pq.read_table("out.parquet")["responses"].to_pylist()[:2] == [["kept"] * 3] * 2
    write_rows(Path("p.parquet"), rows(5))
    code, _, err = posttrain("generate", *job)
    assert code == 2 and "out.parquet is there already, and not made by this request" in err
    assert posttrain("generate", *job, "--overwrite")[0] == 0
    assert pq.read_table("out.parquet").num_rows == 5


def test_too_many_responses_without_a_score(posttrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three have no reference that could be matched: everything is written, and the command fails."""
    monkeypatch.chdir(tmp_path)
    write_rows(Path("p.jsonl"), [SAID[0], *(row | {"reward_model": {"ground_truth": None}} for row in SAID[1:3])])
    code, out, err = posttrain("evaluate", "data.files=p.jsonl", "output.folder=e")
    assert code == 3
    assert "4 of 6 responses have no score" in err and "without a score: 4 (exception 4)" in out
    assert json.loads(Path("e/results.json").read_text())["sources"]["openai/gsm8k"]["invalid"] == {"exception": 4}


def start(arguments: list[str]) -> WarmProcess:
    command = [sys.executable, "-c", "from posttrain.cli.start import main; main()", "generate", *arguments]
    return WarmProcess(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def parts_done(folder: Path) -> int:
    return len(list(folder.glob("part_*.parquet")))


@pytest.mark.slow
def test_killed_at_several_rows_and_then_stopped_by_a_signal(job: list[str], tmp_path: Path) -> None:
    """SIGKILL after 1, 2, ... parts, then SIGTERM; the file is that of a run that was left alone."""
    write_rows(tmp_path / "p.parquet", rows(40))
    job = [*job, "rollout.max_response_tokens=64", "rollout.ignore_eos=true"]
    assert start([*job, "output.file=whole.parquet"]).wait() == 0
    parts, killed = tmp_path / "out.parquet.parts", 0
    for at_least in (1, 4, 7, 10, 13):
        process = start(job)
        while process.poll() is None and parts_done(parts) < at_least:
            time.sleep(0.002)
        if process.poll() is None:
            process.kill()
            killed += process.wait() == -signal.SIGKILL
        done = parts_done(parts)
        assert at_least <= done
    assert killed >= 4
    process = start(job)
    while process.poll() is None and parts_done(parts) < 16:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == 75, said
    assert "of 40 rows are done and kept in out.parquet.parts" in " ".join(said.split())
    assert start(job).wait() == 0
    assert (tmp_path / "out.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert not parts.exists()
