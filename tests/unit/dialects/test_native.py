"""The native dialect: every key of RunConfig, and every mistake in words with its place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.config.reading import keys
from posttrain.config.reading.sources import SourceMap
from posttrain.config.reading.validate import EXPECTED, validate
from posttrain.dialects.native import load, read
from posttrain.errors import ConfigError

SMALL = "model: {path: org/name}\ndata: {train_files: a.parquet}\n"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(SMALL)
    return tmp_path


def problems(text: str, *overrides: str) -> list[str]:
    Path("run.yaml").write_text(text)
    return [str(problem) for problem in read("run.yaml", overrides).problems]


def test_a_small_file_and_overrides_without_a_plus() -> None:
    loaded = load("run.yaml", ["policy.optimizer.lr=1e-5", "reward.terms=[{name: exact_match, weight: 2}]"])
    assert loaded.config.model.path == "org/name"
    assert loaded.config.data.train_files == ["a.parquet"]
    assert loaded.config.policy.optimizer.lr == 1e-5
    assert loaded.config.reward.terms[0].weight == 2.0
    assert loaded.config.rollout == RunConfig.model_fields["rollout"].default
    assert (loaded.dialect, loaded.warnings, loaded.problems) == ("native", (), ())


def test_everything_from_the_command_line() -> None:
    assert load(None, ["model.path=org/name", "data.train_files=a.parquet"]).config == load("run.yaml").config


def test_a_chat_template_is_a_text_or_a_file() -> None:
    text = ["model.chat_template='{{ messages }}'"]
    assert load("run.yaml", text).config.model.chat_template == "{{ messages }}"
    with pytest.raises(ConfigError) as refused:
        load("run.yaml", [*text, "model.chat_template_file=c.jinja"])
    [problem] = refused.value.problems
    assert problem.field == "model.chat_template_file"
    assert problem.what.endswith("model.chat_template is a template, too; keep one of the two")


def test_home_is_expanded_in_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    text = """\
model: {path: ~/m, tokenizer_path: ~/t, chat_template_file: ~/c.jinja}
data: {train_files: [~/a.parquet, b.parquet], validation_files: ~/v.parquet}
reference: {path: ~/r}
run: {folder: ~/runs/x}
reward: {terms: [{name: score, path: ~/my.py}]}
"""
    Path("run.yaml").write_text(text)
    config = load("run.yaml").config
    assert (config.model.path, config.model.tokenizer_path) == ("/home/ada/m", "/home/ada/t")
    assert config.model.chat_template_file == "/home/ada/c.jinja"
    assert config.data.train_files == ["/home/ada/a.parquet", "b.parquet"]
    assert config.data.validation_files == ["/home/ada/v.parquet"]
    assert (config.reference.path, config.folder) == ("/home/ada/r", "/home/ada/runs/x")
    assert config.reward.terms[0].path == "/home/ada/my.py"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # unknown keys: the same name elsewhere, a like name here, a like name elsewhere, all there are
        (
            "data.samples_per_prompt=4",
            "there is no key data.samples_per_prompt, at {}; did you mean rollout.samples_per_",
        ),
        ("data.prompts_per_stp=4", "did you mean data.prompts_per_step?"),
        ("policy.optimizer.weight_decy=0", "did you mean policy.optimizer.weight_decay?"),
        ("lr=1e-5", "there is no key lr, at {}; did you mean policy.optimizer.lr?"),
        ("rolout.temperature=1", "there is no key rolout, at {}; did you mean rollout?"),
        ("data.max_respons_tokens=1", "did you mean rollout.max_response_tokens?"),
        ("policy.optimizer.zzz=1", "known in policy.optimizer: name, lr, betas, eps, "),
        ("zzz.yyy=1", "known sections: model, data, run"),
        ("reward.terms=[{name: exact_match, wieght: 2}]", "did you mean reward.terms.0.weight?"),
        # wrong types
        ("data.prompts_per_step=eight", "prompts_per_step must be a whole number, not 'eight', at {}"),
        ("data.prompts_per_step=8.5", "prompts_per_step must be a whole number, not 8.5"),
        ("data.prompts_per_step=true", "prompts_per_step must be a number, not true"),
        ("policy.optimizer.lr=fast", "lr must be a number, not 'fast'"),
        ("policy.optimizer.lr=nan", "lr must be a finite number, not nan"),
        ("policy.optimizer.betas=[0.9]", "betas has 1 values, which are too few"),
        ("policy.optimizer.betas=[0.9,0.9,0.9]", "betas must be a list of at most 2, not a list of 3"),
        ("data.shuffle=perhaps", "shuffle must be true or false, not 'perhaps'"),
        ("run.name=7", 'name must be text, not 7, at {}; put it in quotes: "7"'),
        ("run.name=null", "name must be text, not null"),
        ("data.train_files=7", "train_files must be a list, not 7"),
        ("data.train_files=[7]", "train_files.0 must be text, not 7"),
        ("data.chat_template_options={think: [1]}", "think must be text or a number or true or false, not a list of 1"),
        ("policy={optimizer: 3}", "optimizer must be a section of key: value lines, not 3"),
        ("++rollout=null", "the section rollout is empty, at {}; write keys below it, or remove the line"),
        # values out of their set or range
        ("placement.device=gpu", "device must be auto, cpu or cuda, not 'gpu'"),
        ("rollout.top_p=1.5", "top_p must be at most 1, not 1.5"),
        ("rollout.top_p=0", "top_p must be above 0, not 0"),
        ("rollout.samples_per_prompt=0", "samples_per_prompt must be at least 1, not 0"),
        ("asynchronous.max_staleness_steps=1e300", "max_staleness_steps must be at most 1000000, not 1e+300"),
        ("asynchronous.max_staleness_steps=inf", "max_staleness_steps must be a finite number, not inf"),
        ("loss.clip_ratio_low=1.5", "clip_ratio_low must be at most 1, not 1.5"),
        ("run.total_steps=100000000000000000000", "total_steps must be at most 10000000, not 100000000000000000000"),
        ("checkpoint.every_steps=10000000000000000000", "every_steps must be a whole number of at most 18 digits"),
        # missing
        ("~model.path", "model.path must be given (Folder or hub id of a Hugging Face causal language model)"),
        ("~data", "there is no training file, at {}; write data.train_files: [FILE, ...]"),
        ("reward.terms=[{weight: 1}]", "reward.terms.0.name must be given (A built-in reward)"),
        # names that nobody knows, and rules between keys
        ("advantage.name=grop", "there is no advantage estimator called 'grop' (known: "),
        ("loss.name=ppo", "there is no policy loss called 'ppo'"),
        ("policy.engine=local2", "there is no training engine called 'local2'"),
        ("rollout.engine=natve", "there is no rollout engine called 'natve'"),
        ("tracking.trackers=[console,wand]", "there is no tracker called 'wand'"),
        ("reward.terms=[{name: exact}]", "there is no reward called 'exact'"),
        ("rollout.temperature=0", "temperature 0 samples the same response every time"),
        ("rollout.samples_per_prompt=1", "with 1 sample per prompt every advantage is 0"),
        ("data.train_files=[]", "there is no training file"),
    ],
)
def test_mistakes_in_words_with_the_override_as_their_place(override: str, message: str) -> None:
    place = f"override {override}"
    found = problems(SMALL, override)
    assert len(found) == 1, found
    assert message.format(place) in found[0]
    assert f"at {place}" in found[0]
    assert "pydantic" not in found[0].lower()


def test_mistakes_in_a_file_carry_line_and_key() -> None:
    found = problems(
        "model: {path: org/name}\ndata:\n  train_files: a.parquet\n  samples_per_prompt: 4\n  shuffle: 7\n"
    )
    assert found == [
        "shuffle must be true or false, not 7, at run.yaml:5 data.shuffle",
        "there is no key data.samples_per_prompt, at run.yaml:4 data.samples_per_prompt; "
        "did you mean rollout.samples_per_prompt? There is also validation.samples_per_prompt.",
    ]


def test_an_empty_file_asks_for_what_must_be_given() -> None:
    assert problems("") == [
        "model.path must be given (Folder or hub id of a Hugging Face causal language model), at run.yaml; "
        "write it, or add model.path=... to the command",
        "there is no training file, at data.train_files (a default; run.yaml does not set it); "
        "write data.train_files: [FILE, ...]; environments without data have environment.train_episodes",
    ]


def test_mistakes_of_every_kind_come_together() -> None:
    text = "data: {train_files: a.parquet, shufle: true}\nrollout: {temperature: 0}\nloss: {name: ppo, kl_coef: -1}\n1: 2\n"
    found = problems(text)
    assert len(found) == 6
    for part in (
        "model.path must",
        "data.shufle",
        "temperature 0",
        "'ppo'",
        "kl_coef must be at least 0",
        "keys are names",
    ):
        assert sum(part in message for message in found) == 1, part


def test_what_follows_from_a_mistake_is_not_reported_again() -> None:
    assert problems("model: 5\ndata: {train_files: [a.parquet, 3]}\n", "rollout.temperature=warm") == [
        "model must be a section of key: value lines, not 5, at run.yaml:1 model",
        'train_files.1 must be text, not 3, at run.yaml:2 data.train_files.1; put it in quotes: "3"',
        "temperature must be a number, not 'warm', at override rollout.temperature=warm",
    ]


def test_load_refuses_with_every_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        load("run.yaml", ["lr=1", "rollout.top_p=2"])
    assert len(caught.value.problems) == 2
    assert caught.value.exit_code == 2


def test_a_user_function_is_not_looked_up_among_the_rewards() -> None:
    assert problems(SMALL, "reward.terms=[{name: score, path: my.py}]") == []


def test_sampling_filters_are_fine() -> None:
    assert problems(SMALL, "rollout.top_k=20", "rollout.top_p=0.9", "rollout.min_p=0.05") == []


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["validation.every_steps=5"], "validation.every_steps has no effect"),
        (["validation.trainer_logprobs=true"], "validation.trainer_logprobs has no effect"),
        (["reference.path=org/other"], "reference.path has no effect"),
        (["policy.schedule.warmup_updates=0", "policy.schedule.warmup_ratio=0.1"], "warmup_ratio has no effect"),
        (["policy.schedule.min_lr_ratio=0.1"], "min_lr_ratio has no effect"),
    ],
)
def test_what_has_no_effect_is_said(overrides: list[str], warning: str) -> None:
    (text,) = load("run.yaml", overrides).warnings
    assert warning in text
    assert load("run.yaml").warnings == ()


WRONG: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    1e400,
    float("nan"),
    "word",
    [],
    [1],
    ["word"],
    {},
    {"word": 1},
    {"word": [1]},
]


@pytest.mark.parametrize("value", [None, [], 3, {}])
def test_a_list_that_must_not_be_empty_is_one_problem(value: Any) -> None:
    """What stands in for it while the rest is read must be long enough, or it would be repaired for ever."""
    values = {"model": {"path": "x"}, "data": {"train_files": ["x"], "domains": {"sums": {"sources": value}}}}
    _, found = validate(values, SourceMap("run.yaml", {}), RunConfig)
    assert [problem.field.rsplit(".", 1)[0] for problem in found] in (["data.domains.sums"], ["data.domains.sums"] * 2)


@pytest.mark.slow
def test_no_value_of_any_key_gets_past_the_words() -> None:
    """Whatever is written at whatever key: it is accepted, or refused in our own words (none of pydantic's)."""
    refused = 0
    for key in keys.known_keys():
        for value in WRONG:
            values: dict[str, Any] = {
                "model": {"path": "x"},
                "data": {"train_files": ["x"]},
                "reward": {"terms": [{"name": "x"}], "model": {"path": "x"}},
            }
            if key.startswith("reward.judge."):
                values["reward"]["judge"] = {"path": "x"}
            if key.startswith("reward.served."):
                values["reward"]["served"] = {"path": "x"}
            if key.startswith("reward.more_judges."):
                values["reward"]["more_judges"] = {"maze": {"path": "x"}}
            if key.startswith("data.domains."):
                values["data"]["domains"] = {"maze": {"sources": ["x"], "prompts_per_step": 1}}
            node: Any = values
            *parents, leaf = key.replace("#", "0").replace("*", "maze").split(".")
            for part in parents:
                node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
            node[leaf] = value
            _, found = validate(values, SourceMap("run.yaml", {}), RunConfig)
            refused += bool(found)
            for problem in found:
                text = str(problem)
                assert not any(
                    word in text.lower()
                    for word in ("input should", "extra inputs", "pydantic", "instance of", "value error")
                ), (key, value, text)
                assert problem.field.startswith(re.split(r"\.[#*]", key)[0]), (key, value, text)
    assert refused > 5 * len(keys.known_keys())


def test_every_kind_of_constraint_in_the_schema_has_words() -> None:
    kinds = {type(rule).__name__.lower() for field in keys.known_keys().values() for rule in field.metadata}
    kinds -= {"aftervalidator", "withjsonschema"}  # of whole numbers, however they are written: it refuses nothing
    words = {
        "ge": "greater_than_equal",
        "gt": "greater_than",
        "le": "less_than_equal",
        "lt": "less_than",
        "minlen": "too_short",
    }
    assert kinds <= set(words)
    assert {words[kind] for kind in kinds} <= set(EXPECTED)


def test_home_is_written_out_in_every_field_that_holds_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {path: ~/m}\ndata: {train_files: [~/a, ~/b]}\ncheckpoint: {folder: ~/c}\n"
        "run: {name: ~/n, resume_path: ~/r}\npolicy: {lora: {adapter_path: ~/l}}\n"
    )
    config = read(str(file)).config
    assert config.model.path == "/home/ann/m"
    assert config.data.train_files == ["/home/ann/a", "/home/ann/b"]
    assert (config.checkpoint.folder, config.run.resume_path) == ("/home/ann/c", "/home/ann/r")
    assert config.policy.lora.adapter_path == "/home/ann/l"
    assert config.run.name == "~/n"
