"""Values that no key takes: each is refused once, by the key's name, whatever the rules make of the default in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from posttrain.dialects.entries import ENTRIES
from posttrain.dialects.ledger import Key
from posttrain.dialects.value_types import fits, parse_type, type_text
from posttrain.errors import ConfigError, Problem

from .examples import PEERS, dialect_of, override, read, tables_of

EVERY = 29  # of the mapped rows: the others are of the same kinds
ON_TWO = ("actor_train.device_mapping=[0,1]", "actor_infer.device_mapping=[0,1]", "num_return_sequences_in_group=8")
WRONG = {"{a: 1}": {"a": 1}, "[[word]]": [["word"]]}


def _rows(dialect: str) -> Iterator[tuple[str, Key, tuple[str, ...]]]:
    tables = tables_of(dialect)
    ledgers = {entry: dialect_of(dialect).ledger.of(entry) for entry in ENTRIES}
    for table in tables.names:
        for row in tables.rows(table, examples=True):
            for entry in row.get("entry", "train").split():
                key = ledgers[entry].by_name[row["key"]]
                if key.status == "mapped" and "*" not in key.name and "no_example" not in row:
                    yield entry, key, tuple(row.get("given", ()))


CASES = [(dialect, *case) for dialect in PEERS for case in [*_rows(dialect)][::EVERY]]


def _problems(dialect: str, entry: str, given: tuple[str, ...], *written: str) -> list[Problem]:
    try:
        return list(read(dialect, entry, given, *written).problems)
    except ConfigError as error:
        return error.problems


@pytest.mark.parametrize(("dialect", "entry", "key", "given"), CASES, ids=lambda one: getattr(one, "name", None))
def test_a_value_of_the_wrong_type_is_refused_by_name(
    dialect: str, entry: str, key: Key, given: tuple[str, ...]
) -> None:
    for text, value in WRONG.items():
        if fits(value, key.type) or type_text(key.type) == "any":
            continue
        found = [one for one in _problems(dialect, entry, given, override(dialect, key, text)) if one.field == key.name]
        assert [one.what.startswith(f"{key.name} must be ") for one in found] == [True]


@pytest.mark.parametrize("wrong", ["{a: 1}", "[[word]]", "maybe"])
@pytest.mark.parametrize("dialect", PEERS)
def test_every_key_refuses_a_value_of_another_type_by_name(dialect: str, wrong: str) -> None:
    """Also those that are ignored or refused, and all at once: none hides another."""
    value = {**WRONG, "maybe": "maybe"}[wrong]
    for entry in ENTRIES:
        keys = dialect_of(dialect).ledger.of(entry).rows
        # A section with keys of its own is looked at below; ROLL's students are read as other workers
        plain = [
            key
            for key in keys
            if "*" not in key.name
            and not key.name.startswith("student")
            and not any(other.name.startswith(f"{key.name}.") for other in keys)
        ]
        takers = [key for key in plain if not fits(value, key.type)]
        if not takers:  # a peer without this entry
            continue
        found = _problems(dialect, entry, (), *(override(dialect, key, wrong) for key in takers))
        named = Counter(one.field for one in found if one.what.startswith(f"{one.field} must be "))
        assert {key.name: named[key.name] for key in takers if named[key.name] != 1} == {}


@pytest.mark.parametrize("dialect", PEERS)
def test_every_key_that_is_no_users_own_has_a_type(dialect: str) -> None:
    """But for keys of a translation of verl, which are refused whatever they hold."""
    for entry in ENTRIES:
        keys = dialect_of(dialect).ledger.of(entry).rows
        free = [key.name for key in keys if "*" not in key.name and key.status != "refused" and key.type is Any]
        assert free == []


@pytest.mark.parametrize(
    ("dialect", "entry", "written", "type"),
    [
        ("verl", "sft", "+engine.vanilla_mbridge=maybe", "bool | null"),
        ("verl", "train", "+actor_rollout_ref.actor.mindspeed.vanilla_mbridge=maybe", "bool | null"),
        (
            "verl",
            "train",
            "+actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=two",
            "int from 1 | null",
        ),
        ("verl", "train", "+actor_rollout_ref.actor.checkpoint.mbridge_config.memory_efficient=fast", "bool | null"),
        ("skyrl", "train", "environment.skyrl_gym.max_env_workers={a: 1}", "int"),
        ("roll", "train", "actor_train.sequence_packing_args.max_packed_sequence_length_train=long", "int | null"),
    ],
)
def test_an_option_below_a_section_of_any_names_is_refused_by_name(
    dialect: str, entry: str, written: str, type: str
) -> None:
    key, _, value = written.lstrip("+").partition("=")
    said = "a section" if value.startswith("{") else repr(value)
    assert f"{key} must be {type}, not {said}" in [one.what for one in _problems(dialect, entry, (), written)]


def test_a_section_in_the_place_of_a_number_is_one_problem() -> None:
    found = _problems("verl", "train", (), "actor_rollout_ref.actor.optim.lr={value: {is: 1}}")
    assert [str(one) for one in found] == [
        "actor_rollout_ref.actor.optim.lr must be float, not a section, at override "
        "actor_rollout_ref.actor.optim.lr={value: {is: 1}}; write the value itself, lr: ..."
    ]


@pytest.mark.parametrize(
    ("dialect", "given", "wrong", "named"),
    [
        # Sizes of which a plan makes lists
        ("verl", (), "trainer.nnodes=1000000000", "must be int from 1 up to 10000, not 1000000000"),
        (
            "verl",
            ("two", "megatron"),
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1000000000",
            "do not split",
        ),
        ("skyrl", (), "trainer.placement.policy_num_gpus_per_node=1000000000", "must be int up to 1000"),
        ("roll", (), "num_gpus_per_node=1000000000", "must be int up to 1000"),
        # A number whose switch is written too
        ("roll", (), "error_max_len_threshold=-1 error_max_len_clip=true", "must be at least 1, not -1"),
        # Numbers of a server's own
        ("verl", ("vllm",), "actor_rollout_ref.rollout.max_num_seqs=-1", "must be at least 1, not -1"),
        ("verl", ("vllm",), "+actor_rollout_ref.rollout.repetition_penalty=-1", "must be above 0, not -1"),
        ("verl", (), "actor_rollout_ref.actor.optim.lr=1e9", "at most 10"),
        ("verl", (), "actor_rollout_ref.actor.optim.weight_decay=1e9", "leaves nothing of the weights"),
        ("verl", (), "actor_rollout_ref.rollout.temperature=1e9", "at most 100"),
        # Numbers that a rule would turn into others
        ("verl", (), "trainer.critic_warmup=-1", "must be int from 0, not -1"),
        ("verl", (), "actor_rollout_ref.actor.tis_imp_ratio_cap=nan", "must be float from -1, not nan"),
        ("skyrl", (), "environment.skyrl_gym.search.topk=-1", "must be int from 1, not -1"),
        (
            "skyrl",
            ("trainer.algorithm.use_kl_in_reward=true", "trainer.algorithm.kl_ctrl.type=adaptive"),
            "trainer.algorithm.kl_ctrl.horizon=inf",
            "must be a whole number of sequences above 0, not inf",
        ),
        (
            "skyrl",
            (),
            "trainer.algorithm.dynamic_sampling.min_replace_ratio=inf trainer.algorithm.dynamic_sampling.type=replace",
            "must be a share from 0 to below 1, not inf",
        ),
        ("roll", (), "actor_train.training_args.num_train_epochs=inf", "must be float from 0, not inf"),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(dialect: str, given: tuple[str, ...], wrong: str, named: str) -> None:
    written = wrong.split()
    [problem] = _problems(dialect, "train", given, *written)
    key = written[0].partition("=")[0].lstrip("+")
    assert problem.field == key
    assert named in problem.what


# Fields for which -1 means something in the key's own dialect, or is a number like others. Options of engines and of servers are
# checked where the engine reads them, not by the dialect.
TAKE_MINUS_ONE = {
    *("data.max_prompts", "validation.max_prompts", "data.max_rows", "validation.max_rows", "run.total_steps"),  # all
    *(
        "validation.every_steps",
        "checkpoint.every_steps",
        "checkpoint.export_every_steps",
        "checkpoint.keep_last",
        "reference.update_every",
    ),  # never, all
    *("rollout.top_k", "validation.top_k", "group_filter.max_batches", "loss.rollout_correction.weights"),  # no bound
    *("policy.optimizer.max_grad_norm", "critic.optimizer.max_grad_norm"),  # no clipping
    *("policy.schedule.warmup_updates", "critic.schedule.warmup_updates"),  # the ratio counts
    "reward.process.schedule.warmup_updates",  # the same
    *("policy.lora.rank", "critic.lora.rank"),  # no adapter
    *("loss.covariance_low", "distillation.min_logprob", "group_filter.above_mean", "environment.named"),  # numbers
    *("advantage.episode_weight", "advantage.step_weight"),
    "tracking.validation_samples",  # none
    "environment.settings.port",  # checked with the settings of the environment
}
SIDES_OF_FORKS = ("actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high")  # -1: clip_ratio


@pytest.mark.slow
@pytest.mark.parametrize("dialect", PEERS)
def test_minus_one_and_what_is_no_number_are_refused_where_they_mean_nothing(dialect: str) -> None:
    accepted = []
    for entry, key, given in _rows(dialect):
        numbers = [part for part in type_text(key.type).split(" | ") if part.startswith(("int", "float", "share"))]
        is_name = "text" in type_text(key.type).split(" | ")  # which may look like a number
        if not numbers or is_name or any(".engine_" in field for field in key.fields):
            continue
        for text in ["-1", "nan"] if any(part != "int" for part in numbers) else ["-1"]:
            refused = _problems(dialect, entry, given, override(dialect, key, text))
            takes_it = key.fields[0] in TAKE_MINUS_ONE or key.name in SIDES_OF_FORKS
            if not refused and not (text == "-1" and takes_it):
                accepted.append(f"{key.name}={text}")
    assert accepted == []


def test_a_decay_that_leaves_nothing_is_refused_in_sft_too() -> None:
    [problem] = _problems("verl", "sft", (), "optim.weight_decay=1e9")
    assert (problem.field, "leaves nothing of the weights" in problem.what) == ("optim.weight_decay", True)


def test_finite_numbers_between_two_bounds() -> None:
    bounded = parse_type("float from 0 up to 2")
    assert type_text(bounded) == "float from 0 up to 2"
    inside, outside = (0, 2, 0.5), (-0.1, 2.1, float("nan"), float("inf"), True, "1", None)
    assert [fits(value, bounded) for value in (*inside, *outside)] == [True] * 3 + [False] * 7
    assert not fits(float("nan"), parse_type("float")) and fits(float("inf"), parse_type("float"))


def test_bounds_of_a_type() -> None:
    bounded = parse_type("int up to 1000 | null")
    assert type_text(bounded) == "int up to 1000 | null"
    assert [fits(value, bounded) for value in (1000, -3, None, 1001, True, 2.0)] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("dialect", "given", "wrong", "said"),
    [
        ("skyrl", (), "trainer.placement=abc", "trainer.placement must be a section, not 'abc'"),
        ("skyrl", (), "trainer.policy.optimizer_config=adam", "trainer.policy.optimizer_config must be a section, not 'adam'"),
        ("roll", (), "actor_train.strategy_args=fsdp", "actor_train.strategy_args must be a section, not 'fsdp'"),
        ("roll", (), "actor_train.training_args=[]", "actor_train.training_args must be a section, not an empty list"),
        ("roll", (), "rewards=[]", "rewards must be a section, not an empty list"),
        ("verl", (), "algorithm=abc", "algorithm must be a section, not 'abc'"),
    ],
)  # fmt: skip
def test_a_value_in_the_place_of_a_section_is_refused_once(
    dialect: str, given: tuple[str, ...], wrong: str, said: str
) -> None:
    [problem] = _problems(dialect, "train", given, wrong)
    assert problem.what == said
    assert problem.fix.startswith(f"write its keys below it, such as {problem.field}.")


@pytest.mark.parametrize(
    ("dialect", "given", "wrong", "fix"),
    [
        # The default, gae, would ask for a critic's devices
        ("roll", (*ON_TWO,), "adv_estimator=grpoo", "did you mean grpo?"),
        ("roll", (), "rollout_batch_size=0", "use at least 1, such as rollout_batch_size=128"),
    ],
)  # fmt: skip
def test_a_wrong_value_has_no_further_problems(dialect: str, given: tuple[str, ...], wrong: str, fix: str) -> None:
    [problem] = _problems(dialect, "train", given, wrong)
    assert problem.fix == fix
