"""Environment variables that children see: those on the list of their kind, and never a secret that nobody named."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from posttrain.processes import start
from posttrain.processes.environment import PASSED_ON, Kind, is_secret, names_in, variables_for

SECRETS = ("WANDB_API_KEY", "JUDGE_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "POSTTRAIN_SERVE_TOKEN", "DB_PASSWORD")


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(PASSED_ON, raising=False)
    for name in (*SECRETS, "SOMETHING_ELSE"):
        monkeypatch.setenv(name, "secret")
    yield


@pytest.mark.parametrize("kind", list(Kind))
def test_secrets_stay_with_the_trainer(kind: Kind) -> None:
    seen = set(variables_for(kind))
    assert seen & {*SECRETS, "SOMETHING_ELSE"} == ({"HF_TOKEN"} if kind is not Kind.USER_CODE else set())


def test_settings_of_libraries_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "OMP_NUM_THREADS": "2",
        "LC_ALL": "C",
        "HF_HOME": "/h",
        "TOKENIZERS_PARALLELISM": "false",
        "https_proxy": "p",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert given.items() <= variables_for(Kind.USER_CODE).items()
    assert variables_for(Kind.USER_CODE)["PATH"] == os.environ["PATH"]


def test_a_variable_that_is_named_is_passed_on_to_the_child_and_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = variables_for(Kind.USER_CODE, named=["JUDGE_KEY", "NOT_SET"], withheld=["PATH"])
    assert (
        seen["JUDGE_KEY"] == "secret" and "NOT_SET" not in seen and "PATH" not in seen and "WANDB_API_KEY" not in seen
    )
    for name in os.environ.keys() - seen.keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv(PASSED_ON, seen[PASSED_ON])  # as in the child
    assert variables_for(Kind.USER_CODE)["JUDGE_KEY"] == "secret"


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("WANDB_API_KEY", True),
        ("HF_TOKEN", True),
        ("APIKEY", True),
        ("PGPASSWORD", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("PYTHONHASHSEED", False),
        ("XAUTHORITY", False),
    ],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


def test_settings_name_the_variable_of_their_key() -> None:
    settings = {
        "tools": [{"name": "mcp", "url": "u", "token_env": "MCP_KEY"}, "calculator"],
        "deep": {"api_key_env": "K"},
    }
    assert names_in(settings) == ["MCP_KEY", "K"]


def test_a_program_is_started_with_exactly_what_it_is_given() -> None:
    command = ["env"]
    with start.start(command, environment={"A": "1", "PATH": os.environ["PATH"]}, stdout=subprocess.PIPE) as program:
        said, _ = program.communicate()
    assert sorted(said.decode().split()) == sorted(["A=1", f"PATH={os.environ['PATH']}"])
