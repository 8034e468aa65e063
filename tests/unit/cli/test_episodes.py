"""Evaluation and generation from the configuration of a run, as its user types them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from posttrain.loops import episodes

Run = Callable[..., tuple[int, str, str]]

RUN = """
run: {{name: guess}}
model: {{path: {model}}}
data: {{train_files: [], max_prompt_tokens: 64}}
environment:
  {{name: world.py:Echo, max_turns: 2, train_episodes: 2, validation_episodes: 3, workers: 0}}
rollout: {{max_response_tokens: 3, samples_per_prompt: 2}}
validation: {{samples_per_prompt: 2, temperature: 1.0}}
"""
# Success for even seeds; the reward is never 1. Episodes of seed 2 fail.
WORLD = """
from posttrain.interfaces.env import EnvStart, EnvStep

class Echo:
    def __init__(self, spec):
        self.turns = 0
    def reset(self, seed):
        self.seed = seed
        return EnvStart(messages=[{"role": "user", "content": f"seed {seed}"}])
    def step(self, action):
        self.turns += 1
        if self.seed == 2:
            raise KeyError("lost")
        return EnvStep(messages=[{"role": "user", "content": "?"}], reward=0.25, done=self.turns == 2, stop="enough")
    def close(self):
        return {"success": float(self.seed % 2 == 0)}
"""


@pytest.fixture
def posttrain(command: Run, tmp_path: Path, tiny_llama: Path) -> Run:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "6*7?", "answer": "42"}\n')
    (tmp_path / "world.py").write_text(WORLD)
    (tmp_path / "run.yaml").write_text(RUN.format(model=tiny_llama))
    return command


def results(folder: Path) -> dict[str, dict[str, float]]:
    [(_, source)] = json.loads((folder / "results.json").read_text())["sources"].items()
    found: dict[str, dict[str, float]] = source["metrics"]
    return found


def test_a_model_is_measured_in_the_environment_of_its_run(posttrain: Run, tmp_path: Path) -> None:
    code, out, err = posttrain("evaluate", "run.yaml")
    assert code == 0, err
    found = results(tmp_path / "guess.evaluation")
    # Seeds 0, 1, 2, two episodes each: success, none, failed.
    assert found["accuracy"]["value"] == found["pass@2"]["value"] == pytest.approx(1 / 3)
    assert found["environment/success"]["value"] == 0.5, "of the episodes that have not failed"
    assert found["reward_mean"]["value"] == 0.5
    assert found["turns_mean"] == {"value": 2.0, "low": 2.0, "high": 2.0}
    assert 2 <= found["length_mean"]["value"] <= 6
    assert found["invalid_share"]["value"] == pytest.approx(1 / 3)
    assert "right: the environment reports success" in out
    lines = (tmp_path / "guess.evaluation" / "dumped_evals" / "world.py_Echo.jsonl").read_text().splitlines()
    sample = json.loads(lines[0])
    assert sample["stop_reason"] == "enough" and sample["turns"] == 2 and sample["environment"] == {"success": 1.0}
    assert json.loads(lines[4])["invalid"]["reason"] == "env_crashed"


def test_a_score_can_say_which_episodes_are_right(posttrain: Run, tmp_path: Path) -> None:
    assert posttrain("evaluate", "run.yaml", "--pass-score=0.5", "--out=e")[0] == 0
    assert results(tmp_path / "e")["accuracy"]["value"] == pytest.approx(2 / 3)


def test_an_evaluation_that_was_stopped_resumes_and_gives_the_same(
    posttrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    posttrain("evaluate", "run.yaml", "--rows-per-part=1", "--out=whole")
    played = []
    real = episodes.play

    def stopping(engine, prompts, *rest):  # type: ignore[no-untyped-def]
        played.append(prompts[0].prompt_id)
        if len(played) == 2:
            raise MemoryError("as a kill would end it")
        return real(engine, prompts, *rest)

    monkeypatch.setattr(episodes, "play", stopping)
    assert posttrain("evaluate", "run.yaml", "--rows-per-part=1", "--out=broken")[0] != 0
    code, out, _ = posttrain("evaluate", "run.yaml", "--rows-per-part=1", "--out=broken")
    assert code == 0 and "resuming after 1 of 3 rows" in out
    assert played == ["validation:0", "validation:1", "validation:1", "validation:2"]
    for name in ("results.json", "dumped_evals/world.py_Echo.jsonl"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    # Another world plays other episodes: the finished ones are not taken for them.
    (tmp_path / "world.py").write_text(WORLD.replace("0.25", "0.75"))
    code, _, err = posttrain("evaluate", "run.yaml", "--rows-per-part=1", "--out=broken")
    assert code == 2 and "name another --out, or add --overwrite" in err


def test_a_trained_model_stands_beside_its_base(posttrain: Run, tmp_path: Path, tiny_llama: Path) -> None:
    code, _, err = posttrain("evaluate", "run.yaml", f"--model=base={tiny_llama}", f"--model=again={tiny_llama}")
    assert code == 0, err
    page = (tmp_path / "guess.evaluation" / "report.html").read_text()
    assert "<th class='num'>base</th><th class='num'>again</th>" in page
    assert results(tmp_path / "guess.evaluation" / "base") == results(tmp_path / "guess.evaluation" / "again")
    code, _, err = posttrain("evaluate", "run.yaml", "--model=x=a", "--model=x=b")
    assert code == 2 and "two models are called x" in err


def test_episodes_are_written_with_their_tokens_and_rewards(posttrain: Run, tmp_path: Path) -> None:
    code, out, err = posttrain("generate", "run.yaml", "--training", "--out=e.parquet")
    assert code == 0 and "wrote e.parquet" in out, err
    rows = pq.read_table(tmp_path / "e.parquet").to_pylist()
    assert [(row["prompt_id"], row["rewards"]) for row in rows] == [("train:0", [0.5, 0.5]), ("train:1", [0.5, 0.5])]
    [sample] = json.loads(rows[0]["episodes"][0])["samples"]
    assert sum(end - start for start, end in sample["sampled"]) == sum(
        turn["end"] - turn["start"] for turn in sample["turns"]
    )
    assert len(sample["turns"]) == 2 and len(sample["token_ids"]) > 6


def test_a_run_without_environments_is_evaluated_too(posttrain: Run, tmp_path: Path) -> None:
    changes = ("data.validation_files=[rows.jsonl]", "environment.name=null", "environment.max_turns=null")
    changes = (*changes, "environment.train_episodes=null", "environment.validation_episodes=null")
    code, _, err = posttrain("evaluate", "run.yaml", *changes, "reward.terms=[{name: exact_match}]", "--out=plain")
    assert code == 0, err
    assert results(tmp_path / "plain")["accuracy"]["value"] == 0.0


def test_what_does_not_fit_is_refused(posttrain: Run, tmp_path: Path) -> None:
    code, _, err = posttrain("evaluate", "run.yaml", "environment.validation_episodes=null")
    assert code == 2 and "there are no validation rows to play" in err and "--training" in err
    for name in ("evaluate", "generate"):
        changes = ("environment.name=open", "environment.workers=1", "environment.validation_episodes=null")
        code, _, err = posttrain(name, "run.yaml", *changes)
        assert code == 2 and "played by programs outside" in err and "environment.name" in err
    (tmp_path / "e.yaml").write_text("data: {files: [rows.jsonl]}\n")
    code, _, err = posttrain("evaluate", "e.yaml", "--model=m", "--out=x")
    assert code == 2 and "--out is for the configuration of a run" in err and "set output.folder" in err
    code, _, err = posttrain("evaluate", "run.yaml", "environment.name=no_such_world")
    assert code == 2 and "no_such_world" in err
