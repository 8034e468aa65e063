"""Commands and programs of the documents that load a model, as a reader types them, with a tiny model where SmolLM2 would be.

Every page is gone through from top to bottom in one folder, whose names are those that the pages use: `run.yaml`, `RUN_DIR`, the
examples and their data. Sizes of a step are smaller than those of the examples; nothing else is changed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from documents import ROOT, Block, all_blocks
from posttrain.cli.app import main

pytestmark = pytest.mark.slow

# Run by .ci/run itself, or by the test that installs the wheel.
ELSEWHERE = ("make", ".ci/run", "pip", "source")
RUN = """
model: {path: MODEL, compute_dtype: float32}
data: {train_files: [train.jsonl], validation_files: [train.jsonl], prompts_per_step: 2}
rollout: {samples_per_prompt: 3, max_response_tokens: 6}
reward: {workers: 1, terms: [{name: exact_match, options: {extract: last_number}}]}
validation: {every_steps: 1}
checkpoint: {every_steps: 1}
tracking: {trackers: [], batches_every_steps: 1}
run: {total_steps: 2, seed: 1}
placement: {device: cpu, cpu_threads: 1}
"""
STEP = "data.prompts_per_step=2 rollout.samples_per_prompt=2 policy.sequences_per_mini_batch=4 run.total_steps=1"
VALIDATED = "policy.sequences_per_micro_batch_per_device=4 validation.max_prompts=4"
VERL = "data.train_batch_size=4 actor_rollout_ref.rollout.n=2 actor_rollout_ref.actor.ppo_mini_batch_size=4"
# By the file that a command names: overrides that make its steps small.
SMALLER = {
    "examples/grpo_chain_sum.yaml": f"{STEP} {VALIDATED}",
    "examples/grpo_guess_number.yaml": f"{STEP} policy.sequences_per_micro_batch_per_device=4 environment.validation_episodes=2",
    "examples/distill_chain_sum.yaml": f"{STEP} {VALIDATED} policy.epochs_per_step=1",
    "examples/verl_ppo.yaml": f"{VERL} trainer.total_training_steps=1 data.max_response_length=8",
    "examples/sft_chain_sum.yaml": "data.max_rows=8",
    "examples/dpo_hh_rlhf.yaml": "data.sequences_per_step=8",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder, with a finished run in it; HOME is beside it, with a tiny model in the place of the demo's."""
    from posttrain.models.tiny import write_tiny_model

    folder = tmp_path_factory.mktemp("documents")
    model = folder / "home/.cache/posttrain/SmolLM2-135M-Instruct"
    write_tiny_model(model, "llama")
    os.symlink(ROOT / "examples", folder / "examples")
    rows = [{"prompt": f"{n}+{n}=", "data_source": "sums", "answer": str(2 * n)} for n in range(6)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(RUN.replace("MODEL", str(model)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder / "home"))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        patch.chdir(folder)
        run("posttrain train run.yaml run.folder=RUN_DIR", patch)
        line = "posttrain data reasoning-gym --task chain_sum --train-rows 12 --validation-rows 4"
        run(f"{line} --option max_terms=2 --option max_digits=1 runs/data/chain_sum", patch)
        run(
            "posttrain train run.yaml run.folder=RUN asynchronous.mode=one_step loss.rollout_correction.weights=token",
            patch,
        )
        given = "rollout.max_response_tokens=4 placement.device=cpu output.file=responses.parquet"
        run(f"posttrain generate model.path={model} data.files=train.jsonl {given}", patch)
        for name in ("EVALUATION", "OTHER_EVALUATION"):
            run(
                f"posttrain evaluate data.files=responses.parquet reward.terms=[{{name:gsm8k}}] output.folder={name}",
                patch,
            )
        (folder / "runs/data/hh").mkdir(parents=True, exist_ok=True)
        pairs = pa.Table.from_pylist([{"prompt": f"Q{n}", "chosen": "Yes.", "rejected": "No."} for n in range(8)])
        for part in ("train", "test"):
            pq.write_table(pairs, folder / f"runs/data/hh/{part}.parquet")
        for name in ("RUN_A", "RUN_B", "RUN_C"):
            shutil.copytree(folder / "RUN_DIR", folder / name)
        for name in ("STUDENT", "TEACHER"):
            shutil.copytree(model, folder / name)
        yield folder


def run(line: str | list[str], monkeypatch: pytest.MonkeyPatch, stdin: str = "") -> None:
    """Run a command in this process. Raises: AssertionError with its words where it does not end with 0."""
    words = line.split() if isinstance(line, str) else line
    monkeypatch.setattr(sys, "argv", [str(Path(word).expanduser()) if word.startswith("~") else word for word in words])
    monkeypatch.setattr(sys, "stdin", StringIO(stdin))
    if words[1] == "data":  # a page makes data that another page has made
        shutil.rmtree(words[-1], ignore_errors=True)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None), " ".join(words)


def smaller(words: list[str]) -> list[str]:
    """The words of a command, with overrides for a small step of the file that it names."""
    return [*words, *(SMALLER.get(words[2], "").split() if words[1] in ("train", "sft", "tune") else ())]


BLOCKS = [each for each in all_blocks() if each.runs and not each.quick and each.language in ("bash", "python")]
BLOCKS = [each for each in BLOCKS if each.language != "bash" or any(words[0] == "posttrain" for words in each.commands)]


@pytest.mark.parametrize("block", [pytest.param(each, id=each.place) for each in BLOCKS])
def test_a_block_runs(block: Block, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if block.language == "python":
        exec(compile(block.text, block.place, "exec"), {"__name__": "shown"})  # noqa: S102 (the documents' own code)
        return
    for words in block.commands:
        if words[0] not in ELSEWHERE:
            assert words[0] == "posttrain", f"{block.place}: no test runs {words[0]}; mark the block"
            run(smaller(words), monkeypatch, stdin="Hello\n/quit\n" if words[1] == "chat" else "5\n3\n2\n7\n1\n")
