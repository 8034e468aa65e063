"""A launch with an agent loop trains, and one that asks once trains as a run without it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from warm.processes import run

LOOPS = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

class Once(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        prompt = self.tokenizer.apply_chat_template(kwargs["raw_prompt"], add_generation_prompt=True, tokenize=True)
        output = await self.server_manager.generate(request_id="1", prompt_ids=prompt, sampling_params=sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=output.token_ids, response_mask=[1] * len(output.token_ids), metrics={}, num_turns=2
        )
"""
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) % 5 / 4
"""


def trained(folder: Path, model: Path, *words: str) -> dict[str, Any]:
    folder.mkdir()
    (folder / "my_loops.py").write_text(LOOPS)
    (folder / "loops.yaml").write_text("- name: once\n  _target_: my_loops.Once\n")
    (folder / "score.py").write_text(SCORE)
    rows = [
        {
            "data_source": "t",
            "prompt": [{"role": "user", "content": f"who {number}"}],
            "reward_model": {"style": "rule", "ground_truth": "a"},
            "extra_info": {"index": number},
        }
        for number in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    keys = [
        *(
            "algorithm.adv_estimator=reinforce_plus_plus",
            "data.train_files=train.parquet",
            "data.val_files=train.parquet",
        ),
        *("data.train_batch_size=4", "data.max_prompt_length=64", "data.max_response_length=16"),
        *(f"actor_rollout_ref.model.path={model}", f"{actor}.ppo_mini_batch_size=4", f"{actor}.optim.lr=1e-3"),
        *(f"{actor}.ppo_micro_batch_size_per_gpu=8", f"{rollout}.log_prob_micro_batch_size_per_gpu=8"),
        *(
            f"{rollout}.name=vllm",
            f"{rollout}.mode=async",
            f"{rollout}.top_k=1",
            "custom_reward_function.path=score.py",
        ),
        *(
            "trainer.n_gpus_per_node=1",
            "trainer.nnodes=1",
            "trainer.logger=[console]",
            "trainer.total_training_steps=2",
        ),
        *("trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.default_local_dir=out"),
        *("posttrain.model.compute_dtype=float32", "trainer.val_before_train=False"),
    ]
    command = [sys.executable, "-m", "posttrain", "train", "--dialect", "verl", "--here", *keys, *words]
    done = run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False, children=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "out/metrics.jsonl").read_text().splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_loop_that_asks_once_trains_as_a_run_without_it(tmp_path: Path, tiny_llama: Path) -> None:
    """The likeliest tokens alone (top_k=1), since the draws of turns have names of their own."""
    agent = "actor_rollout_ref.rollout.agent"
    plain = trained(tmp_path / "plain", tiny_llama)
    looped = trained(
        tmp_path / "looped",
        tiny_llama,
        *(f"{agent}.agent_loop_config_path=loops.yaml", f"+{agent}.default_agent_loop=once"),
    )
    assert looped["environment/num_turns"] == 2.0 and looped["environment/unsampled_tokens"] == 0.0
    for name in ("reward/mean", "response/length_mean", "policy/loss", "policy/grad_norm"):
        assert looped[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-7), name
    assert plain["policy/grad_norm"] > 0
