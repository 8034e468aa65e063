"""plan --fit: what it proposes is accepted, fits, and the next larger size does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.config import RunConfig
from posttrain.dialects.native import load
from posttrain.errors import ConfigError
from posttrain.plan.batch import plan_batches
from posttrain.plan.estimate import estimate, peak
from posttrain.plan.fit import GIB, RESERVE, fits
from posttrain.plan.roles import place

SHAPE = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}  # fmt: skip
GIVEN = ["data.train_files=[t.jsonl]", "reward.terms=[{name: exact_match}]", "data.prompts_per_step=8"]
GIVEN += ["rollout.samples_per_prompt=12", "rollout.max_response_tokens=512", "data.max_prompt_tokens=512"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return f"model.path={tmp_path}"


def fullest(config: RunConfig) -> int:
    """The peak of the configuration as it stands, on an accelerator."""
    placement, _ = place(config)
    batches, problems = plan_batches(config, None)
    assert placement and batches and not problems
    memory = estimate(config, batches, placement, on_cpu=False)
    assert memory
    return peak(placement, memory).bytes


@pytest.mark.parametrize("gib", [16, 24, 80, 200])
def test_a_proposal_fits_and_the_next_size_does_not(model: str, gib: int) -> None:
    config = load(None, [*GIVEN, model]).config
    found = fits(config, gib)
    assert found and len(found) == 10
    limit = gib * GIB * (1 - RESERVE)
    for fit in found:
        if not fit.settings:
            assert fit.smallest > limit
            continue
        chosen = load(None, [*GIVEN, model, *fit.settings]).config
        assert fullest(chosen) <= limit and 96 % (fit.sequences or 0) == 0
        larger = [count for count in range((fit.sequences or 0) + 1, 97) if 96 % count == 0][:1]
        for count in larger:
            policy = chosen.policy.model_copy(update={"sequences_per_micro_batch_per_device": count})
            assert fullest(chosen.model_copy(update={"policy": policy})) > limit
        assert fit.response_tokens is not None and fit.response_tokens >= 512


def test_a_7b_model_on_24_gib_by_hand(model: str) -> None:
    """7.6e9 weights: in float32 with gradient and two averages 16 bytes each, 114 GiB, besides the bfloat16 copy; as a frozen
    bfloat16 base 14.2 GiB, which leaves an adapter room."""
    found = fits(load(None, [*GIVEN, model]).config, 24)
    assert found is not None
    first = next(fit for fit in found if fit.settings)
    assert first.method == "LoRA, rank 16" and "policy.lora.rank=16" in first.settings
    assert 113 * GIB < found[0].smallest < 135 * GIB
    recomputed = found[-1]
    assert recomputed.sequences and first.sequences and recomputed.sequences > first.sequences


def test_a_14b_model_on_24_gib_by_hand(tmp_path: Path) -> None:
    """48 layers of 2 x 5120 x 5120 + 2 x 5120 x 1024 + 3 x 5120 x 13824 = 275 M weights are 13.2e9; in 4 bits with a scale of 1
    byte and 1 / 64 per 64 weights 0.516 bytes each, 6.3 GiB, with 2 x 152064 x 5120 embeddings in 2 bytes 9.2 GiB. In 2 bytes all
    are 27.5 GiB, which the native sampler unpacks: with it QLoRA does not fit either."""
    shape = SHAPE | {"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"intermediate_size": 13824}))
    config = load(None, [*GIVEN, f"model.path={tmp_path}"]).config
    found = {fit.method: fit for fit in fits(config, 24) or []}
    assert not found["LoRA, rank 16, recomputed activations"].settings
    unpacked, packed = found["QLoRA (nf4), rank 16"], found["QLoRA (nf4), rank 16, hf samples"]
    assert not unpacked.settings and unpacked.smallest > 27.5 * GIB
    assert packed.settings and packed.smallest > 9.2 * GIB
    assert {"policy.lora.quantize=nf4", "rollout.engine=hf"} <= set(packed.settings)
    # The first that fits is the one that is proposed
    assert next(fit.method for fit in found.values() if fit.settings) == packed.method
    done = CliRunner().invoke(app, ["plan", "--skip-files", "--fit", "24", *GIVEN, f"model.path={tmp_path}"])
    assert "add, for QLoRA (nf4), rank 16, hf samples:" in done.output
    chosen = load(None, [*GIVEN, f"model.path={tmp_path}", *packed.settings]).config
    assert fullest(chosen) <= 24 * GIB * (1 - RESERVE)


def test_the_command_says_what_to_add_and_what_it_assumes(model: str) -> None:
    done = CliRunner().invoke(app, ["plan", "--skip-files", "--fit", "24", *GIVEN, model])
    assert done.exit_code == 0 and "add, for LoRA, rank 16:" in done.output and "assumed: one device" in done.output
    assert "does not fit: at least" in done.output and "QLoRA" in done.output
    done = CliRunner().invoke(app, ["plan", "--skip-files", "--fit", "4", *GIVEN, model])
    assert "nothing fits" in done.output
    done = CliRunner().invoke(app, ["plan", "--skip-files", "--fit", "4", *GIVEN, "model.path=org/name"])
    assert isinstance(done.exception, ConfigError) and "its config.json is not here" in str(done.exception)


def test_experts_are_fitted_without_qlora_and_another_kind_of_model_says_so(tmp_path: Path) -> None:
    given = ["plan", "--skip-files", "--fit", "24", *GIVEN, f"model.path={tmp_path}"]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "hidden_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | experts | {"model_type": "qwen3_moe"}))
    said = CliRunner().invoke(app, given).output
    assert "QLoRA (nf4)" not in said and "without QLoRA: the model has experts" in said
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 64}))
    with pytest.raises(ConfigError, match=r"its config\.json lacks one of vocab_size, hidden_size"):
        CliRunner().invoke(app, given, catch_exceptions=False)


@pytest.mark.parametrize("gib", ["inf", "1e30", "nan", "0"])
def test_a_memory_that_no_device_has(model: str, gib: str) -> None:
    assert CliRunner().invoke(app, ["plan", "--skip-files", "--fit", gib, *GIVEN, model]).exit_code == 2
