"""``posttrain plan --on``: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.errors import RequestError

SHAPE = {
    "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    settings = ["data.train_files=[x.jsonl]", "reward.terms=[{name: exact_match}]", "placement.devices=8"]
    return ["plan", "--skip-files", f"model.path={tmp_path}", "policy.engine=fsdp", *settings]


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def refusal(*arguments: str) -> str:
    with pytest.raises(RequestError) as caught:
        CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return str(caught.value)


def test_seconds_by_part(words: list[str]) -> None:
    text = printed(*words, "--on", "8xH100")
    assert text.startswith("One step on 8xH100\n")
    assert all(
        part in text for part in ("sampling", "policy", "weights to the sampler", "driver", "steps and", "assumed:")
    )
    assert "by link" in text and "gather (8 x)" in text
    found = json.loads(printed(*words, "--on", "8xH100", "--json"))
    assert found["seconds"] == pytest.approx(sum(each["computing"] + each["sending"] for each in found["parts"]))
    assert found["weight_sync"]["links"][0]["what"] == "gather"


def test_a_quicker_way_for_new_weights_is_named(words: list[str]) -> None:
    """Samplers on seven other nodes fetch all weights from one of them, which a broadcast spreads."""
    apart = ["placement.devices=64", "placement.nodes=8", f"policy.devices={list(range(8))}"]
    apart += [f"rollout.devices={list(range(8, 64))}", "rollout.engine=vllm", "--on", "8x8xH100"]
    told = "a broadcast would take"
    text = printed(*words, *apart)
    seconds = text.split(told)[1].split(":")[0].strip()
    assert "rollout.weight_sync=collective" in text.split(told)[1]
    by_broadcast = printed(*words, *apart, "rollout.weight_sync=collective")
    assert f"New weights for the sampler in {seconds}, by link" in by_broadcast and told not in by_broadcast
    beside = ["policy.devices=[0,1,2,3]", "rollout.devices=[4,5,6,7]", "rollout.engine=vllm", "--on", "8xH100"]
    assert told in printed(*words, *beside)
    # 15 ms are nothing beside a longer step
    assert told not in printed(*words, *beside, "rollout.max_response_tokens=4096")


def test_a_copy_over_two_nodes_is_priced_as_it_is_reached(words: list[str]) -> None:
    apart = ["placement.devices=32", "placement.nodes=4", f"policy.devices={list(range(16))}"]
    apart += [f"rollout.devices={list(range(16, 32))}", "rollout.engine=vllm", "--on", "4x8xH100"]
    text = printed(*words, *apart, "rollout.tensor_parallel=16")
    assert "broadcast (16 x)" in text and "node's memory" not in text and "a broadcast would take" not in text
    assert "node's memory to a copy on it (2 x)" in printed(*words, *apart, "rollout.tensor_parallel=8")


def test_proposals_are_settings_to_add(words: list[str]) -> None:
    found = json.loads(printed(*words, "--on", "8xH100", "--propose", "--json"))
    first = found["proposals"][0]
    again = json.loads(printed(*words, *first["settings"], "--on", "8xH100", "--json"))
    assert again["seconds"] == pytest.approx(first["seconds"])
    assert first["seconds"] <= json.loads(printed(*words, "--on", "8xH100", "--json"))["seconds"]


def test_refusals(words: list[str], tmp_path: Path) -> None:
    assert "the run has 8 devices, and 4xL4 has 4 devices" in refusal(*words, "--on", "4xL4")
    assert "--propose needs a machine" in refusal(*words, "--propose")
    assert "ask one at a time" in refusal(*words, "--fit", "24", "--on", "8xH100")
    small = tmp_path / "small.yaml"
    small.write_text("{devices_per_node: 8, tflops: 1, memory_gib: 0.1, memory_gb_s: 1, link_gb_s: 1}")
    assert "nothing fits into 0.1 GiB per device: of " in refusal(*words, "--on", str(small), "--propose")
    assert "the shape of org/name is not known" in refusal(*words, "model.path=org/name", "--on", "8xH100")


def test_a_run_that_does_not_fit_is_priced_and_ends_with_2(words: list[str], tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    small.write_text("{devices_per_node: 8, tflops: 1, memory_gib: 0.1, memory_gb_s: 1, link_gb_s: 1}")
    done = CliRunner().invoke(app, [*words, "--on", str(small)])
    assert done.exit_code == 2
    assert ": it does not fit; --propose looks" in done.output
    done = CliRunner().invoke(app, [*words, "--on", str(small), "--json"])
    assert (done.exit_code, json.loads(done.output)["fits"]) == (2, False)
    assert json.loads(printed(*words, "--on", "8xH100", "--json"))["fits"] is True


def test_a_machine_file_that_lacks_numbers(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "machine.yaml").write_text(
        "devices_per_node: 8\ntflops: -3\nmemory_gb: 80\nmemory_gb_s: 3350\nlink_gb_s: 450\n"
    )
    text = refusal(*words, "--on", str(tmp_path / "machine.yaml"))
    file = tmp_path / "machine.yaml"
    assert text.splitlines() == [
        f"tflops must be above 0, not -3, at {file}:2 tflops",
        f"there is no key memory_gb, at {file}:3 memory_gb; did you mean memory_gib?",
    ]
