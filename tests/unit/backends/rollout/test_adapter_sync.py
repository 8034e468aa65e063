"""A LoRA adapter alone, sent to vLLM: to a stand-in for its server, and (slow, POSTTRAIN_VLLM_PYTHON) to a real one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from posttrain.backends.rollout.vllm.options import engine_arguments
from posttrain.backends.serving.folder_sync import FolderSync
from posttrain.backends.serving.start import make_sampler, sampler_plan, start_weight_sync
from posttrain.config.lora import LoraConfig
from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import SamplerPlan
from posttrain.models.loading import load_causal_lm
from posttrain.models.lora import add_adapter, merged_weights
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams

PYTHON = os.environ.get("POSTTRAIN_VLLM_PYTHON", "")
CPU = torch.device("cpu")
LORA = LoraConfig(rank=4, alpha=12.0, target_modules=["q_proj", "v_proj", "down_proj"])
PROMPTS = [
    Prompt(prompt_id=text, token_ids=tuple(text.encode()), text=text, data_source="t")
    for text in ("3+4=", "xy", "Hello")
]
GREEDY = SamplingParams(max_response_tokens=16, temperature=0.0, ignore_eos=True)


class Policy:
    def __init__(self, version: int):
        self.version = version


@pytest.fixture
def trained(served_model: Path) -> PreTrainedModel:
    model = load_causal_lm(str(served_model), dtype=torch.float32)
    add_adapter(model, LORA, seed=1)
    return model


def train(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))


def greedy_of_merged(model: PreTrainedModel, folder: Path) -> list[list[int]]:
    plain = AutoModelForCausalLM.from_pretrained(folder)
    plain.load_state_dict(merged_weights(model))
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt.token_ids])
        config = {"do_sample": False, "max_new_tokens": 16, "min_new_tokens": 16, "eos_token_id": 300}
        out = plain.generate(ids, attention_mask=torch.ones_like(ids), **config)
        found.append(out[0, ids.shape[1] :].tolist())
    return found


def connect(folder: Path, model: PreTrainedModel, **settings: Any) -> tuple[Any, Any]:
    rollout = RolloutConfig(engine="vllm", max_concurrent_sequences=6, max_prefill_tokens=64, **settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = ModelConfig(path=str(folder), compute_dtype="float32")
    kind = {"device": CPU, "seed": 0, "max_prompt_tokens": 64, "lora": LORA}
    engine = make_sampler(rollout, config, lambda: model, tokenizer, **kind)  # type: ignore[arg-type]
    return engine, start_weight_sync(rollout, model, tokenizer, device=CPU, lora=LORA)


def follow(engine: Any, sync: Any, model: PreTrainedModel, folder: Path) -> list[list[int]]:
    """Sync the adapter's next values and look at what is sampled then."""
    version = engine.version + 1
    train(model, version)
    sync.publish(Policy(version), engine)
    groups = engine.generate(PROMPTS, GREEDY)
    got = [list(group.trajectories[0].token_ids) for group in groups]
    assert got == greedy_of_merged(model, folder)
    assert engine.version == groups[0].trajectories[0].policy_version == version
    return got


def test_vllm_samples_from_base_and_adapter_of_every_version(
    stand_in: Any, served_model: Path, trained: PreTrainedModel
) -> None:
    server = stand_in()
    base = {name: tensor.clone() for name, tensor in server.model.state_dict().items()}
    engine, sync = connect(served_model, trained, endpoints=[server.url], weight_sync="adapter")
    assert isinstance(sync, FolderSync) and sync.what == "adapter"
    assert engine.note == "vllm is sent the adapter alone, over the base weights that it has loaded itself"
    assert follow(engine, sync, trained, served_model) != follow(engine, sync, trained, served_model)
    assert list(server.adapters) == [f"policy-2-{engine.content_hash[:8]}"]  # the older one is given up
    for name, tensor in server.model.state_dict().items():
        torch.testing.assert_close(tensor, base[name])
    told = len(server.asked)
    sync.publish(Policy(2), engine)
    assert len(server.asked) == told  # nothing changed, nothing is sent


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda tensors, name: tensors.pop(name), "did not arrive"),
        (lambda tensors, name: tensors[name].add_(1e-3), "was altered on the way"),
        (lambda tensors, name: tensors.update(more=torch.ones(1)), "arrived and was not sent"),
        (lambda tensors, name: tensors.update({name: tensors[name].double()}), "sent with dtype float32"),
    ],
)
def test_an_adapter_that_was_damaged_on_the_way_is_not_served(
    damage: Any, words: str, stand_in: Any, said: Any, served_model: Path, trained: PreTrainedModel
) -> None:
    server = stand_in()
    engine, sync = connect(served_model, trained, endpoints=[server.url], weight_sync="adapter")

    def misbehave(path: str, body: Any) -> Any:
        if path == "/collective_rpc":
            file = Path(body["args"][0]) / "adapter_model.safetensors"
            tensors = load_file(file)
            damage(tensors, sorted(tensors)[3])
            save_file(tensors, file)
        return said()

    server.misbehave = misbehave
    with pytest.raises(RunStopped, match=f"rejected the weights: .*{words}"):
        sync.publish(Policy(1), engine)
    assert engine.version == 0 and not server.adapters


def test_a_server_that_takes_no_adapters_is_told_how_to(
    stand_in: Any, said: Any, served_model: Path, trained: PreTrainedModel
) -> None:
    server = stand_in()
    server.misbehave = lambda path, body: said(status=404, body={}) if path == "/v1/load_lora_adapter" else said()
    engine, sync = connect(served_model, trained, endpoints=[server.url], weight_sync="adapter")
    with pytest.raises(RunStopped, match=r"--enable-lora, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
        sync.publish(Policy(1), engine)


def test_who_is_sent_the_adapter_alone_and_what_is_told(
    served_model: Path, trained: PreTrainedModel, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served_model)

    def plan(rollout: RolloutConfig, lora: LoraConfig | None) -> SamplerPlan:
        config = ModelConfig(path=str(served_model))
        return sampler_plan(rollout, config, tokenizer, device=CPU, seed=0, max_prompt_tokens=9, lora=lora)

    whole = (
        "vllm prefills whole prompts (enable_chunked_prefill is off): on a CPU, vLLM 0.32 dies of a seeded request whose "
        "prompt was prefilled in pieces"
    )
    merged = "the adapter is merged into its layers for {}, which is sent all weights"
    alone = plan(RolloutConfig(engine="vllm", engine_options={"load_format": "dummy"}), LoraConfig(rank=20))
    words = engine_arguments(alone)
    assert alone.adapter_rank == 20 and "alone" in alone.note
    assert (words["enable_lora"], words["max_lora_rank"]) == (True, 32) and "load_format" not in words
    for rollout, lora, note in (
        (RolloutConfig(engine="vllm"), None, whole),
        (RolloutConfig(engine="vllm", endpoints=["h:1"]), LORA, merged.format("vllm")),  # may have been started without
        (RolloutConfig(engine="vllm", weight_sync="disk"), LORA, f"{merged.format('vllm')}; {whole}"),
        (
            RolloutConfig(engine="vllm"),
            LoraConfig(rank=600),
            f"{merged.format('vllm')}; {whole}",
        ),  # vLLM takes up to 512
        (RolloutConfig(engine="sglang"), LORA, merged.format("sglang")),
    ):
        found = plan(rollout, lora)
        assert (found.adapter_rank, found.note) == (0, note)
        assert not engine_arguments(found).keys() & {"enable_lora", "max_lora_rank"}
        if not rollout.endpoints and lora is LORA:
            sync = start_weight_sync(rollout, trained, tokenizer, device=CPU, lora=lora)
            assert not isinstance(sync, FolderSync) or sync.what == "weights"
    saved = tmp_path / "saved"
    trained.peft_config["default"].save_pretrained(saved)  # type: ignore[operator]
    config = json.loads((saved / "adapter_config.json").read_text())
    (saved / "adapter_config.json").write_text(json.dumps(config | {"rank_pattern": {"q_proj": 12}}))
    assert plan(RolloutConfig(engine="vllm"), LoraConfig(rank=2, adapter_path=str(saved))).adapter_rank == 12


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="POSTTRAIN_VLLM_PYTHON names no Python with vLLM")
def test_real_vllm_samples_from_base_and_adapter(served_model: Path, trained: PreTrainedModel) -> None:
    options = {"python": PYTHON, "enforce_eager": True, "load_format": "dummy", "startup_timeout_s": 550}
    engine, sync = connect(served_model, trained, engine_options=options)
    try:
        assert follow(engine, sync, trained, served_model) != follow(engine, sync, trained, served_model)
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="POSTTRAIN_VLLM_PYTHON names no Python with vLLM")
def test_real_vllm_has_the_rotary_positions_of_the_trainer(served_model: Path) -> None:
    """By the log-probs of what it samples: those of the model that is loaded here with the same overrides, and of no other."""
    overrides = {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    options = {"python": PYTHON, "enforce_eager": True, "startup_timeout_s": 550}
    rollout = RolloutConfig(engine="vllm", max_concurrent_sequences=6, max_prefill_tokens=64, engine_options=options)
    config = ModelConfig(path=str(served_model), compute_dtype="float32", config_overrides=overrides)
    model = load_causal_lm(str(served_model), dtype=torch.float32, config_overrides=overrides)
    tokenizer = AutoTokenizer.from_pretrained(served_model)
    engine = make_sampler(rollout, config, lambda: model, tokenizer, device=CPU, seed=0, max_prompt_tokens=64)
    try:
        [group] = engine.generate(PROMPTS[2:], GREEDY)
    finally:
        engine.close()
    [sampled] = group.trajectories
    ids = torch.tensor([[*PROMPTS[2].token_ids, *sampled.token_ids]])
    told = torch.tensor(sampled.logprobs)

    def gap(policy: PreTrainedModel) -> float:
        with torch.no_grad():
            plain = AutoModelForCausalLM.from_pretrained(
                served_model, config=policy.config, attn_implementation="eager"
            )
            logits = plain(ids).logits[0, :-1]
        own = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[-len(told) :, 0]
        return float((own - told).abs().max())

    assert gap(model) < 1e-4
    assert gap(load_causal_lm(str(served_model), dtype=torch.float32)) > 0.1
