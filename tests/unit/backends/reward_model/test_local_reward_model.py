"""Reward models: the score is transformers' own, at the last token, whatever shares the batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from posttrain.backends.reward_model.local import LocalRewardModel
from posttrain.backends.torch_training.sharding import Sharding
from posttrain.config.reward import RewardModelConfig
from posttrain.errors import ModelError
from posttrain.models.reward_model import load_reward_model, load_reward_tokenizer
from posttrain.models.tiny import draw_weights
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Reward, StopReason, Trajectory, TrajectoryGroup

KINDS = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}


def write_classifier(source: Path, folder: Path, kind: str, labels: int = 1, seed: int = 3, **changes: Any) -> Path:
    """A random classifier of the tiny model's shape with its tokenizer."""
    config = AutoConfig.from_pretrained(source, num_labels=labels, **changes)
    model = KINDS[kind].from_config(config, dtype=torch.float32)
    draw_weights(model, seed)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("classifiers")
    return {kind: write_classifier(tiny_llama, root / kind, kind) for kind in KINDS}


def scorer(
    folder: Path,
    policy: Path,
    dtype: torch.dtype = torch.float32,
    *,
    sharding: Sharding | None = None,
    **settings: Any,
) -> LocalRewardModel:
    config = RewardModelConfig(path=str(folder), **settings)
    return LocalRewardModel(
        load_reward_model(config, dtype=dtype),
        load_reward_tokenizer(config, AutoTokenizer.from_pretrained(policy)),
        sequences_per_micro_batch=config.sequences_per_micro_batch_per_device,
        max_tokens=config.max_tokens,
        truncation=config.truncation,
        sharding=sharding,
    )


def group(name: str, prompt: list[int], responses: list[list[int]], text: str = "") -> TrajectoryGroup:
    return TrajectoryGroup(
        prompt=Prompt(
            prompt_id=name,
            token_ids=tuple(prompt),
            text="",
            data_source="t",
            messages=({"role": "user", "content": "2+2="},),
        ),
        trajectories=tuple(
            Trajectory(
                sample_id=f"{name}/{number}",
                token_ids=tuple(ids),
                logprobs=(-1.0,) * len(ids),
                text=text,
                stop_reason=StopReason.EOS,
                policy_version=0,
            )
            for number, ids in enumerate(responses)
        ),
    )


GROUPS = [group("a", [72, 105, 33], [[65, 66], [65, 66, 67, 68, 258], [90]]), group("b", [50], [[43, 50, 61, 52, 258]])]
IDS = [[72, 105, 33, 65, 66], [72, 105, 33, 65, 66, 67, 68, 258], [72, 105, 33, 90], [50, 43, 50, 61, 52, 258]]


def by_transformers(folder: Path, kind: str, ids: list[int]) -> float:
    """transformers' own model, alone in its batch, with its own attention."""
    model = KINDS[kind].from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits.reshape(-1)[-1])


def values(outcomes: list[tuple[Any, ...]]) -> list[float]:
    found = [outcome for group in outcomes for outcome in group]
    assert all(isinstance(outcome, Reward) for outcome in found), found
    return [outcome.value for outcome in found]


@pytest.mark.parametrize("kind", KINDS)
def test_score_is_the_number_at_the_last_token(folders: dict[str, Path], tiny_llama: Path, kind: str) -> None:
    outcomes = scorer(folders[kind], tiny_llama).score(GROUPS)
    assert [len(each) for each in outcomes] == [3, 1]
    expected = [by_transformers(folders[kind], kind, ids) for ids in IDS]
    assert values(outcomes) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert len(set(expected)) == 4


def test_an_end_token_that_is_the_padding_token_too_is_scored(tiny_llama: Path, tmp_path: Path) -> None:
    """transformers would take it for padding and score the token before."""
    folder = write_classifier(tiny_llama, tmp_path / "rm", "sequence", pad_token_id=258)
    (first,) = values(scorer(folder, tiny_llama).score([GROUPS[1]]))
    assert first != pytest.approx(by_transformers(folder, "sequence", IDS[3]), abs=1e-3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 0}))
    assert first == pytest.approx(by_transformers(folder, "sequence", IDS[3]), rel=1e-4)


def test_micro_batches_change_nothing(folders: dict[str, Path], tiny_llama: Path) -> None:
    whole = values(scorer(folders["token"], tiny_llama).score(GROUPS))
    for size in (1, 3):
        parts = scorer(folders["token"], tiny_llama, sequences_per_micro_batch_per_device=size).score(GROUPS)
        assert values(parts) == pytest.approx(whole, rel=1e-4, abs=1e-5)


def test_bfloat16_is_near_float32(folders: dict[str, Path], tiny_llama: Path) -> None:
    exact = values(scorer(folders["token"], tiny_llama).score(GROUPS))
    assert values(scorer(folders["token"], tiny_llama, torch.bfloat16).score(GROUPS)) == pytest.approx(exact, abs=0.1)


def test_longer_conversations_lose_their_beginning(folders: dict[str, Path], tiny_llama: Path) -> None:
    cut = values(scorer(folders["token"], tiny_llama, max_tokens=4).score(GROUPS))
    expected = [by_transformers(folders["token"], "token", ids[-4:]) for ids in IDS]
    assert cut == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("truncation", "seen"), [("left", [4, 5, 6]), ("right", [1, 2, 3]), ("middle", [1, 2, 6]), ("error", None)]
)
def test_the_end_that_is_cut_is_a_choice(
    folders: dict[str, Path], tiny_llama: Path, truncation: str, seen: list[int] | None
) -> None:
    model = scorer(folders["sequence"], tiny_llama, max_tokens=3, truncation=truncation)
    [[found]] = model.score([group("p", [1, 2, 3], [[4, 5, 6]])])
    if seen is None:
        assert isinstance(found, Invalid) and (found.reason, "6 tokens" in found.detail) == ("too_long", True)
    else:
        [[expected]] = scorer(folders["sequence"], tiny_llama).score([group("p", seen[:1], [seen[1:]])])
        assert isinstance(expected, Reward) and found == expected


def test_changed_fields_of_its_configuration_count(folders: dict[str, Path], tiny_llama: Path) -> None:
    groups = [group("p", [1, 2, 3], [[4, 5, 6]])]
    changed = scorer(folders["sequence"], tiny_llama, config_overrides={"rms_norm_eps": 0.5}).score(groups)
    assert changed != scorer(folders["sequence"], tiny_llama).score(groups)
    with pytest.raises(ModelError, match=r"has no field rms_norm_epps"):
        scorer(folders["sequence"], tiny_llama, config_overrides={"rms_norm_epps": 0.5})


class OfTwo(Sharding):
    """A process beside one that has three micro-batches; every pass of the model is counted."""

    passes = 0

    def most(self, count: int) -> int:
        return max(count, 3)

    def forward(self, model: Any, scores: Any) -> Any:
        self.passes += 1
        return scores()


def test_processes_that_share_the_weights_make_equally_many_passes(folders: dict[str, Path], tiny_llama: Path) -> None:
    groups, shared = [group("p", [1, 2], [[3], [4, 5]])], OfTwo()
    alone = scorer(folders["sequence"], tiny_llama).score(groups)
    found = scorer(folders["sequence"], tiny_llama, sharding=shared, sequences_per_micro_batch_per_device=2).score(
        groups
    )
    assert found == alone and shared.passes == 3
    assert scorer(folders["sequence"], tiny_llama, sharding=shared).score([]) == [] and shared.passes == 6


def test_own_template_writes_the_conversation_again(tiny_llama: Path, tmp_path: Path) -> None:
    """Other words for the turns, and other ids: the tokenizer knows one token more."""
    folder = write_classifier(tiny_llama, tmp_path / "rm", "sequence")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    model = scorer(folder, tiny_llama, own_template=True)
    outcome = model.score([group("a", [1, 2, 3], [[4]], text="It is 4.")])
    ids = list(b"[user]2+2=[assistant]It is 4.")
    assert values(outcome) == pytest.approx([by_transformers(folder, "sequence", ids)], rel=1e-4)


def test_template_that_refuses_a_conversation_makes_it_invalid(tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_classifier(tiny_llama, tmp_path / "rm", "token")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% if messages[-1]['content'] == 'bad' %}{{ raise_exception('no') }}{% endif %}x"
    tokenizer.save_pretrained(folder)
    model = scorer(folder, tiny_llama, own_template=True)
    bad, fine = model.score([group("a", [1], [[4]], text="bad"), group("b", [1], [[4]], text="good")])
    assert isinstance(bad[0], Invalid) and bad[0].reason == "exception"
    assert bad[0].detail.startswith("model: its chat template refuses it")
    assert isinstance(fine[0], Reward)


def test_scores_that_are_not_finite_are_invalid(tiny_llama: Path, folders: dict[str, Path]) -> None:
    model = scorer(folders["token"], tiny_llama)
    with torch.no_grad():
        model.model.score.weight.fill_(float("inf"))
    outcomes = [outcome for each in model.score(GROUPS) for outcome in each]
    assert {type(outcome) for outcome in outcomes} == {Invalid}
    assert {outcome.reason for outcome in outcomes} == {"not_finite"}


def test_conversation_beyond_the_models_positions_is_invalid(tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_classifier(tiny_llama, tmp_path / "rm", "token", max_position_embeddings=6)
    outcomes = [outcome for each in scorer(folder, tiny_llama).score(GROUPS) for outcome in each]
    assert [isinstance(outcome, Reward) for outcome in outcomes] == [True, False, True, True]
    assert outcomes[1].reason == "too_long" and "8 tokens, and it has 6 positions" in outcomes[1].detail
    assert len(values(scorer(folder, tiny_llama, max_tokens=6).score(GROUPS))) == 4


# ------------------------------------------------------------------------------------------------------- refusals


def test_language_model_is_no_reward_model(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match="is not a classifier \\(LlamaForCausalLM\\)") as raised:
        scorer(tiny_llama, tiny_llama)
    assert raised.value.problems[0].field == "reward.model.path"


@pytest.mark.parametrize("kind", KINDS)
def test_two_labels_are_refused(tiny_llama: Path, tmp_path: Path, kind: str) -> None:
    folder = write_classifier(tiny_llama, tmp_path / "rm", kind, labels=2)
    with pytest.raises(ModelError, match="does not have exactly one label") as raised:
        scorer(folder, tiny_llama)
    assert raised.value.problems[0].field == "reward.model.path"


def test_classifier_without_its_head_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """A language model whose config says it is a classifier: its score would be 0 for everything."""
    folder = tmp_path / "rm"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(ModelError, match="classification head"):
        scorer(folder, tiny_llama)


def test_another_tokenizer_needs_its_own_template(folders: dict[str, Path], tiny_llama: Path, tmp_path: Path) -> None:
    other = AutoTokenizer.from_pretrained(tiny_llama)
    other.add_tokens(["<tool>"])
    other.save_pretrained(tmp_path / "policy")
    with pytest.raises(ModelError, match=r"another tokenizer than the policy.*; set reward.model.own_template=true"):
        scorer(folders["token"], tmp_path / "policy")
    assert scorer(folders["token"], tmp_path / "policy", own_template=True).tokenizer is not None


def test_own_template_must_be_there(tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_classifier(tiny_llama, tmp_path / "rm", "token")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="has no chat template") as raised:
        scorer(folder, tiny_llama, own_template=True)
    assert raised.value.problems[0].field == "reward.model.own_template"


def test_folder_without_a_tokenizer(folders: dict[str, Path], tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rm"
    shutil.copytree(folders["token"], folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match=r"add tokenizer\.json and tokenizer_config\.json to its folder") as raised:
        scorer(folder, tiny_llama)
    assert raised.value.problems[0].field == "reward.model.path"
