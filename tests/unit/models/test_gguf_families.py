"""Gemma, Phi, Granite, OLMo 2, SmolLM3 and Starcoder 2 in GGUF: read back equal, same log-probs and tokens as llama.cpp.

``llama_cpp.json`` holds what llama.cpp gives for the files that this test writes: the number of tokens of TEXT, and the twenty
most likely tokens after the first 40 and after all of them. It was recorded with xllamacpp 2026.10.11549 (llama.cpp's server in
Python: ``handle_completions`` with ``n_probs``, cache in float32, no flash attention, 256 and 512 tokens of context).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from posttrain.errors import ModelError
from posttrain.models.chat import load_gguf
from posttrain.models.gguf_file import write_gguf
from posttrain.models.gguf_pieces import UNMERGED, general_name, space_in_front
from posttrain.models.gguf_settings import check_family, context_length, llama3_rope, longrope_attention
from posttrain.models.gguf_tokenizer import pre_tokenizer_called, pre_tokenizer_name
from posttrain.models.tiny import draw_weights, write_tiny_model

RECORDED = json.loads(Path(__file__).with_name("llama_cpp.json").read_text())
TEXT = (
    "<|user|>\n Hello  there; the gradient is that of the whole step, café ☃ 12+34 = 46<|end|>\n"
    "and the\nrest of the text is here so that a window of sixteen tokens matters.\n"
) * 3
WORDS = [
    "▁the",
    "▁there",
    "▁that",
    "▁is",
    "▁of",
    "▁a",
    "▁text",
    "▁step",
    "▁whole",
    "ent",
    "en",
    "es",
    "er",
    "▁s",
    "▁w",
    "▁▁",
]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"max_position_embeddings": 512}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA3_ROPE = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": ROPE}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1 + 0.02 * i for i in range(8)],
    "long_factor": [1 + 0.7 * i for i in range(8)],
    "original_max_position_embeddings": 256,
}
# By name: the model type, and its settings
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 32, "num_hidden_layers": 2}),
    "gemma2": (
        "gemma2",
        {"head_dim": 32, "num_hidden_layers": 3, "query_pre_attn_scalar": 32, "sliding_window": 16},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "phi3": ("phi3", {"num_hidden_layers": 2, "sliding_window": 300}),
    "phi3-part": ("phi3", {"num_hidden_layers": 2, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    "phi3-long": (
        "phi3",
        {"num_hidden_layers": 2, "original_max_position_embeddings": 256, "rope_parameters": LONGROPE},
    ),
    "granite": (
        "granite",
        {
            "num_hidden_layers": 2,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    "granite-biases": ("granite", {"num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", {"num_hidden_layers": 2, "rms_norm_eps": 1e-3}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "starcoder2": ("starcoder2", {"num_hidden_layers": 2, "norm_epsilon": 1e-3, "sliding_window": 400}),
}


def pieces(*, in_front: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of pieces: as Phi-3's with a space in front of the text and blanks dropped behind marks, or as Gemma's."""
    marks = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>", "<|endoftext|>"]
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz<>|"))
    built: list[str] = []
    for word in sorted(WORDS, key=len):  # the shortest first; each word from the left
        built += [word[:end] for end in range(2, len(word) + 1) if word[:end] not in built]
    known = {*letters, *built}
    cuts = [(word[:cut], word[cut:]) for word in built for cut in range(1, len(word))]
    merges = [pair for pair in cuts if known.issuperset(pair)]  # every pair that makes a piece, as SentencePiece has it
    tokens = [*marks, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *built]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if in_front else replace
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(marks)
    state = json.loads(backend.to_str())
    for each in state["added_tokens"]:
        each["rstrip"] = in_front and each["content"] in ("</s>", "<|user|>", "<|end|>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template="{% for message in messages %}<|user|>\n{{ message['content'] }}<|end|>\n{% endfor %}",
        clean_up_tokenization_spaces=False,
    )


# By the model type: llama.cpp's name of the rule by which its text is cut.
CUTS = {"granite": "gpt-2", "olmo2": "qwen2", "smollm3": "llama-bpe", "starcoder2": "smollm"}


def byte_level(cut: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with merges, which cuts text by a rule that llama.cpp calls ``cut``."""
    marks = ["<|user|>", "<|end|>", "</s>"]
    merges = [
        ("Ġ", "t"),
        ("h", "e"),
        ("Ġt", "he"),
        ("i", "s"),
        ("e", "n"),
        ("1", "2"),
        ("e", "r"),
        ("Ġ", "w"),
        ("Ġ", "="),
    ]
    merges += [("t", "he"), ("t", "en"), (":", "Ċ"), ("e", "Ġw"), ("3", "4")]
    tokens = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizer_called(cut)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        chat_template="{% for message in messages %}<|user|>\n{{ message['content'] }}<|end|>\n{% endfor %}",
        clean_up_tokenization_spaces=False,
    )


def write(folder: Path, name: str) -> Path:
    """Write the model MODELS[name] and its tokenizer; GGUF's file beside it."""
    kind, settings = MODELS[name]
    tokenizer = byte_level(CUTS[kind]) if kind in CUTS else pieces(in_front=kind == "phi3")
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer) + 3, **ids, **SIZES, **settings)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model, 0)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if kind.startswith("gemma") and key.endswith("norm.weight"):
                weight.sub_(0.75)  # gains of 1.25 instead of 2
            if key.endswith("bias"):
                weight.add_(torch.linspace(-0.2, 0.2, len(weight)))
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    assert write_gguf(folder / name, folder / f"{name}.gguf", "f32").largest_error == 0.0
    return folder / f"{name}.gguf"


@pytest.mark.parametrize("name", MODELS)
def test_a_file_computes_as_llama_cpp_and_as_the_model(tmp_path: Path, name: str) -> None:
    file = write(tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
    read, its_tokenizer = load_gguf(file)
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    assert its_tokenizer(TEXT, add_special_tokens=False).input_ids == ids
    assert its_tokenizer.chat_template == tokenizer.chat_template
    recorded = RECORDED[name]
    assert recorded["tokens"] == len(ids)
    for length, top in zip((40, len(ids)), recorded["top"], strict=True):
        with torch.no_grad():
            given = torch.tensor([ids[:length]])
            wanted, found = (each(given).logits[0, -1].log_softmax(-1) for each in (model, read))
        assert torch.allclose(found, wanted, atol=1e-5)  # 1 + weight is rounded, and 1 is taken off again
        # llama.cpp looks GELU up in a table of half precision; SiLU is computed
        bound = 1e-2 if name.startswith(("gemma", "starcoder")) else 1e-4
        assert max(abs(value - float(found[int(key)])) for key, value in top.items()) < bound
        assert len(top) == 20


def test_settings_and_pieces_are_written(tmp_path: Path) -> None:
    file = write(tmp_path, "gemma3")
    reader = gguf.GGUFReader(file)
    said = {key: reader.fields[f"gemma3.{key}"].contents() for key in ("attention.sliding_window", "rope.freq_base")}
    said["rope.scaling.factor"] = reader.fields["gemma3.rope.scaling.factor"].contents()
    assert said == {"attention.sliding_window": 16, "rope.freq_base": 1e6, "rope.scaling.factor": 8.0}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "gemma3", dtype=torch.float32).state_dict()
    gains = torch.tensor(tensors["blk.0.attn_q_norm.weight"].data.copy())
    assert torch.equal(gains, 1 + state["model.layers.0.self_attn.q_norm.weight"])
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    scores, kinds = (reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("scores", "token_type"))
    by_token = {token: (score, kind) for token, score, kind in zip(tokens, scores, kinds, strict=True)}
    kind = gguf.TokenType
    assert by_token["<0x0A>"] == (UNMERGED, kind.BYTE) and by_token["<unk>"][1] == kind.UNKNOWN
    assert by_token["<|user|>"][1] == kind.CONTROL and by_token[f"[PAD{len(tokens) - 1}]"][1] == kind.UNUSED
    # The merges begin with the two-letter words in their order: ▁a, en, es ...
    assert [by_token[token][0] for token in ("▁a", "en", "es")] == [0.0, -1.0, -2.0]
    assert reader.fields["tokenizer.ggml.add_space_prefix"].contents() is False


def test_factors_of_longrope_and_windows_of_phi() -> None:
    config = AutoConfig.for_model("phi3", **SIZES, **MODELS["phi3-long"][1])
    # 512 / 256 = 2 and 256 = 2^8: sqrt(1 + 1 / 8)
    assert longrope_attention(config) == pytest.approx(1.125**0.5)
    assert context_length(config) == 512
    assert context_length(AutoConfig.for_model("phi3", **SIZES, **MODELS["phi3"][1])) == 300


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gemma2", {"query_pre_attn_scalar": 24}, "with query_pre_attn_scalar 32, and this model"),
        ("gemma2", {"layer_types": ["full_attention"] * 3}, "every 2th layer full_attention"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping null"),
        ("gemma", {"hidden_act": "silu"}, "with the activation gelu_pytorch_tanh, this model with silu"),
        ("llama", {"hidden_act": "gelu"}, "with the activation silu"),
        (
            "starcoder2",
            {"hidden_act": "gelu"},
            "starcoder2 with the activation gelu_pytorch_tanh, this model with gelu",
        ),
        ("starcoder2", {"use_bias": False}, "starcoder2 with biases"),
        ("olmo2", {"attention_bias": True}, "olmo2 without biases"),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, r"with no_rope_layers \[1, 1, 1\]"),
        (
            "granite",
            {"rope_parameters": {"rope_type": "yarn"}},
            "of type yarn are not written as GGUF here for granite",
        ),
        ("phi3", {"rope_parameters": {"rope_type": "llama3"}}, "of type llama3 are not written as GGUF here for phi3"),
        # llama.cpp does not load these, or computes whole heads: seen with a small model of each
        *((kind, {"attention_bias": True}, f"{kind} without biases") for kind in ("gemma", "gemma2", "qwen3")),
        *(
            (kind, {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, f"whole heads of {kind}, .* 0.5 of them")
            for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "granite", "olmo2", "starcoder2")
        ),
        *((kind, {"head_dim": 24}, r"heads of 16 numbers, .* 24 \(head_dim\)") for kind in ("olmo2", "qwen2", "phi3")),
        *(
            (kind, {"rope_parameters": ROPE | {"rope_type": "llama3"}}, f"of type llama3 .* for {kind}")
            for kind in ("qwen2", "qwen3", "gemma", "gemma2")
        ),
    ],
)
def test_a_model_that_llama_cpp_would_compute_otherwise(kind: str, changes: dict[str, Any], message: str) -> None:
    settings = {"num_hidden_layers": 3} | ({"query_pre_attn_scalar": 32} if kind[-1] != "a" else {})
    wide = {"head_dim": 32} if kind.startswith("gemma") else {}
    config = AutoConfig.for_model(kind, **SIZES, **settings, **wide)
    if kind == "mistral":
        config.sliding_window = None
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ModelError, match=message):
        check_family(config)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"head_dim": 24, "num_key_value_heads": 1}),
        ("llama", {"rope_parameters": LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 64}}),
        (
            "llama",
            {"head_dim": 64, "rope_parameters": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}},
        ),
        (
            "mistral",
            {
                "sliding_window": None,
                "rope_parameters": LLAMA3 | {"factor": 2.0, "original_max_position_embeddings": 200},
            },
        ),
        ("qwen3", {"head_dim": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48}),
        ("olmo2", {"tie_word_embeddings": True}),
        (
            "gemma2",
            {
                "head_dim": 16,
                "query_pre_attn_scalar": 16,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": 3.0,
            },
        ),
        (
            "gemma2",
            {
                "head_dim": 16,
                "query_pre_attn_scalar": 16,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": None,
            },
        ),
    ],
)
def test_odd_models_are_read_as_they_compute(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    tokenizer = pieces(in_front=False) if kind == "gemma2" else byte_level(CUTS.get(kind, "qwen2"))
    sizes = SIZES | {"num_hidden_layers": 2, "vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **{**sizes, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw_weights(model, 0)
    model.save_pretrained(tmp_path / "odd")
    tokenizer.save_pretrained(tmp_path / "odd")
    write_gguf(tmp_path / "odd", tmp_path / "odd.gguf", "f32")
    said = gguf.GGUFReader(tmp_path / "odd.gguf").fields
    assert not any(
        field.contents() == 0.0 for key, field in said.items() if "softcapping" in key
    )  # llama.cpp divides by it
    read, _ = load_gguf(tmp_path / "odd.gguf")
    ids = torch.tensor([tokenizer(TEXT).input_ids])
    with torch.no_grad():
        wanted, found = (each(ids).logits.log_softmax(-1) for each in (model, read))
    assert torch.allclose(found, wanted, atol=1e-4), float((found - wanted).abs().max())


def test_divisors_of_frequencies_that_are_not_of_llama_3(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not Llama 3's"):
        llama3_rope([1.0, 3.0, 2.0, 8.0], 10000.0, tmp_path / "m.gguf")
    # By hand: of one wave in the middle, (original / wavelength - 1) / 3 = 1/2 where original is 2.5 wavelengths
    wave = 2 * 3.141592653589793 * 10.0  # theta 100, head of 4: frequencies 1 and 1/10
    found = llama3_rope([1.0, 1 / (0.5 / 8 + 0.5), 8.0], 1000.0, tmp_path / "m.gguf")
    assert found["original_max_position_embeddings"] == pytest.approx(2.5 * wave, rel=1e-3)


def test_the_name_by_which_llama_cpp_knows_phi() -> None:
    phi, gemma = (json.loads(pieces(in_front=each).backend_tokenizer.to_str()) for each in (True, False))
    assert general_name("model-q8_0", phi) == "Phi-3 model-q8_0" and general_name("my-phi-3-f16", phi) == "my-phi-3-f16"
    assert general_name("like-Phi-3-f16", gemma) == "like-phi 3-f16" and general_name("phi4", gemma) == "phi4"


def test_how_text_is_prepared() -> None:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    metaspace = {"type": "Metaspace", "replacement": "▁", "split": False}
    assert space_in_front({"normalizer": replace}) is False
    assert space_in_front({"normalizer": None, "pre_tokenizer": metaspace | {"prepend_scheme": "always"}}) is True
    assert space_in_front({"normalizer": None, "pre_tokenizer": metaspace | {"prepend_scheme": "never"}}) is False
    # Only in front of a whole text, not behind marks: llama.cpp knows no such rule
    assert space_in_front({"normalizer": None, "pre_tokenizer": metaspace | {"prepend_scheme": "first"}}) is None
    assert space_in_front({"normalizer": {"type": "NFKC"}}) is None


@pytest.mark.parametrize("cut", CUTS.values())
def test_the_rule_by_which_text_is_cut_is_read_as_it_was_written(cut: str) -> None:
    state = json.loads(byte_level(cut).backend_tokenizer.to_str())["pre_tokenizer"]
    assert pre_tokenizer_name(state) == cut
    with pytest.raises(ValueError, match=r"as llama\.cpp's falcon, which is not read here"):
        pre_tokenizer_called("falcon")


def test_a_tokenizer_of_bytes_without_merges_is_read(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    write_gguf(folder, tmp_path / "tiny.gguf", "f16")
    _, found = load_gguf(tmp_path / "tiny.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("Hi, é☃\n", "<|im_start|>user\nHi<|im_end|>\n", "  two"):
        assert found(text).input_ids == tokenizer(text).input_ids
        assert found.decode(found(text).input_ids) == text
    assert found.eos_token == tokenizer.eos_token and found.chat_template == tokenizer.chat_template


def test_a_file_that_is_cut(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    write_gguf(folder, tmp_path / "tiny.gguf", "f16")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    for length in (0, 7, 3000, len(whole) // 2):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf is no GGUF file, or a part of one"):
            load_gguf(tmp_path / "cut.gguf")
