"""What a model may write, against the rewards that run in workers: those that calculate, and those that run what was written."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterator

import pytest

from posttrain.config.reward import RewardConfig
from posttrain.data.reasoning_gym import _row
from posttrain.libraries import reasoning_gym as library
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Outcome, Reward, StopReason, Trajectory, TrajectoryGroup
from posttrain.rewards.scorer import Scorer, start_rewards

pytest.importorskip("math_verify")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="boxes are made by Linux")]

LONG = 5_000  # characters
TEXTS = [
    *(
        "",
        " ",
        "\n",
        "\\",
        "{",
        "}",
        "$",
        "####",
        "\\boxed",
        "\\boxed{",
        "\\boxed{}",
        "\\frac{1}{0}",
        "1/0",
        "nan",
        "inf",
        "-",
    ),
    *(
        "\\boxed{" * (LONG // 7),
        "{" * LONG,
        "(" * LONG,
        "[" * LONG,
        "$" * LONG,
        "1" * LONG,
        "1," * LONG,
        "\\frac" * (LONG // 5),
    ),
    *(
        "\\sqrt" * (LONG // 5),
        "=" * LONG,
        "\x00" * 99,
        "\ud800",
        "\u202e",
        "\\boxed{9^{9^{9^{9^9}}}}",
        "\\boxed{10**10**10}",
    ),
    *(
        "$x_{__import__('os')._exit(0)}$",
        "__import__('os')._exit(0)",
        "raise SystemExit",
        "</answer><answer>",
        "</solution>",
    ),
    *(
        "select 1; drop table item",
        "';--",
        "pragma writable_schema=1",
        "attach '/etc/passwd' as p",
        "select load_extension('x')",
    ),
    *("with recursive r(n) as (select 1 union all select n+1 from r) select * from r", "select zeroblob(1000000000)"),
]
CALCULATE = ("math_verify", "math_rule")  # by libraries that may calculate for long
FORMS = {
    "math_verify": "so {}",
    "math_rule": "<think>so</think>{}",
    "reasoning_gym": "<answer>{}</answer>",
    "code": "```python\n{}\n```",
    "text2sql": "<think>so</think><solution>{}</solution>",
}


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scorer]:
    folder = tmp_path_factory.mktemp("sql")
    database = folder / "spider/database/shop/shop.sqlite"
    database.parent.mkdir(parents=True)
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    with sqlite3.connect(database) as opened:
        opened.execute("create table item (name text)")
        opened.execute("insert into item values ('a')")
    opened.close()
    options = {"text2sql": {"db_path": str(folder), "timeout_s": 0.4}, "code": {"timeout_s": 0.5}}
    terms = [{"name": name, "options": options.get(name, {}), "data_sources": [name]} for name in FORMS]
    started = start_rewards(RewardConfig(terms=terms, workers=2, timeout_s=1.0))
    yield started
    started.close()


def prompt(name: str) -> Prompt:
    truth: object = {"code": {"inputs": ["1"], "outputs": ["72"]}, "text2sql": "select name from item"}.get(name, "72")
    extra: dict[str, object] = {"db_id": "shop", "data": "spider"}
    if name == "reasoning_gym":
        row = _row("lcm", "train", 0, next(library.entries("lcm", seed=3, options={})), {}, None)
        truth, extra = row["reward_model"]["ground_truth"], row["extra_info"]
    return Prompt(
        prompt_id="a:0",
        token_ids=(1,),
        text="?",
        data_source=name,
        ground_truth=json.dumps(truth) if isinstance(truth, dict) else truth,
        extra_info=extra,
    )


def outcomes(scorer: Scorer, name: str, texts: list[str]) -> tuple[Outcome, ...]:
    trajectories = tuple(
        Trajectory(
            sample_id=f"a/{number}",
            token_ids=(1,),
            logprobs=(0.0,),
            text=FORMS[name].format(text),
            stop_reason=StopReason.EOS,
            policy_version=0,
        )
        for number, text in enumerate(texts)
    )
    [found] = scorer.score([TrajectoryGroup(prompt=prompt(name), trajectories=trajectories)])
    return found


@pytest.mark.parametrize("name", FORMS)
def test_no_text_is_right_or_does_harm(scorer: Scorer, name: str) -> None:
    """Each is wrong, or, where a library calculates for longer than scoring may take, without a score; never right."""
    found = outcomes(scorer, name, TEXTS)
    assert len(TEXTS) >= 30
    for text, outcome in zip(TEXTS, found, strict=True):
        if isinstance(outcome, Invalid) and name not in CALCULATE:  # beside other work a second is short: once more
            (outcome,) = outcomes(scorer, name, [text])
        if isinstance(outcome, Invalid):
            assert name in CALCULATE and outcome.reason == "timeout", (text[:50], outcome)
        else:
            assert outcome.value <= 0.01, text[:50]  # reasoning-gym pays 0.01 for any attempt


RIGHT = {
    "math_verify": "$72$",
    "math_rule": "\\boxed{72}",
    "reasoning_gym": None,
    "code": "print(72)",
    "text2sql": "select name from item",
}


@pytest.mark.parametrize("name", FORMS)
def test_the_same_forms_with_the_right_answer(scorer: Scorer, name: str) -> None:
    """So that the test above can fail."""
    [outcome] = outcomes(scorer, name, [RIGHT[name] or str(prompt(name).ground_truth)])
    assert isinstance(outcome, Reward) and outcome.value == 1.0
