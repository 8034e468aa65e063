"""The tools themselves, and the environment that offers them."""

from __future__ import annotations

import json
import re
import resource
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from posttrain.envs.tools import shortened, tools, tools_of
from posttrain.errors import ConfigError, DataError
from posttrain.interfaces.env import EnvSpec
from posttrain.interfaces.tool import ToolFailed
from posttrain.registry import TOOLS

ASKED = [{"role": "user", "content": "What is 6 times 7?"}]
SPEC = EnvSpec(name="tools", messages=ASKED, max_turns=4)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    texts = ["The otter swims in the river.", "Bread is baked in an oven.", "The river flows to the sea."]
    lines = [json.dumps({"text": text}) for text in texts] + ["", json.dumps({"title": "Whales", "contents": "Blue."})]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table fruit (name text, price real)")
        connection.executemany("insert into fruit values (?, ?)", [("apple", 1.5), ("fig", 4.0), ("plum", 2.0)])
    connection.close()
    return path


@pytest.mark.parametrize(
    ("expression", "value"),
    [("(17 + 5) * 3 / 4", "16.5"), ("2^10", "1024"), ("sqrt(16) + 2*pi", "10.2831853072"), ("1/3", "0.333333333333")],
)
def test_the_calculator(expression: str, value: str) -> None:
    assert TOOLS.get("calculator")().run({"expression": expression}) == value


@pytest.mark.parametrize("expression", ["1/0", "2 +", "x + 1", "__import__('os')", "9^9^9^9", "ln(-1)", "(" * 1000])
def test_what_the_calculator_cannot_do(expression: str) -> None:
    with pytest.raises(ToolFailed, match="the expression has no"):
        TOOLS.get("calculator")().run({"expression": expression})


def test_search_finds_what_fits_best(corpus: Path) -> None:
    tool = TOOLS.get("search")(corpus=str(corpus), results=2, max_characters=20)
    assert tool.run({"query": "otter in a river"}) == "[1] The otter swims in t\n\n[2] The river flows to t"
    assert tool.run({"query": "whales"}) == "[1] Whales\nBlue."
    assert tool.run({"query": "zebra"}) == tool.run({"query": ""}) == "Nothing was found."


def test_a_corpus_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "a"}\n{"test": "b"}')
    with pytest.raises(DataError, match=r"corpus.jsonl:2 is no JSON object with a text; write"):
        TOOLS.get("search")(corpus=str(path))
    path.write_text("\n")
    with pytest.raises(DataError, match="holds no text"):
        TOOLS.get("search")(corpus=str(path))
    with pytest.raises(ConfigError, match="there is no file nowhere"):
        TOOLS.get("search")(corpus="nowhere")


def test_sql_reads(shop: Path) -> None:
    tool = TOOLS.get("sql")(database=str(shop), max_rows=2)
    assert "create table fruit" in tool.description.lower()
    dear = "select name, price from fruit where price > 1.9 order by price"
    assert tool.run({"query": dear}) == "name | price\nplum | 2.0\nfig | 4.0"
    assert tool.run({"query": "select * from fruit"}).endswith("(more than 2 rows)")
    assert tool.run({"query": "select name from fruit where price > 9"}) == "name\n(no rows)"
    tool.close()


@pytest.mark.parametrize(
    "query",
    [
        "delete from fruit",
        "attach database '/tmp/other.db' as other",
        "pragma writable_schema = 1",
        "select load_extension('x')",
        "select 1; select 2",
        "selekt",
        "select zeroblob(100000000)",
        "select fts3_tokenizer('simple', x'4141414141414141')",  # a function pointer: SQLite jumps there
        "select fts3_tokenizer('simple')",
        "create temp table t as select 1",
        "pragma table_info(fruit)",
        "select '\ud800'",
        "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n",
    ],
)
def test_sql_does_nothing_else(shop: Path, query: str) -> None:
    tool = TOOLS.get("sql")(database=str(shop), timeout_s=0.5)
    with pytest.raises(ToolFailed, match=r"SQL error|longer than 0\.5 s"):
        tool.run({"query": query})
    assert tool.run({"query": "select count(*) as n from fruit"}) == "n\n3"
    tool.close()


def test_sql_that_takes_memory_is_ended(shop: Path) -> None:
    """Two gigabytes of rows that are sorted, and an answer of many megabytes."""
    tool = TOOLS.get("sql")(database=str(shop), timeout_s=20.0, memory_mib=128)
    rows = "with recursive n(i) as (select 1 union all select i + 1 from n limit 30000)"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ToolFailed, match=r"SQL error: (out of memory|database or disk is full)"):
        tool.run(
            {"query": f"{rows} select count(*) from (select printf('%.*c', 100000, 'x') as x, i from n order by x, i)"}
        )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB, of this process
    assert tool.run({"query": f"{rows} select printf('%.*c', 40000, 'x') from n"}).endswith(
        "(the other rows are too long)"
    )


def test_sql_knows_json_and_full_text(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    with sqlite3.connect(path) as connection:
        for version in (4, 5):
            connection.execute(f"create virtual table notes{version} using fts{version}(body)")
            connection.execute(f"insert into notes{version} values ('an otter swims'), ('a whale sings')")
    connection.close()
    tool = TOOLS.get("sql")(database=str(path))
    assert tool.run({"query": "select value from json_each('[1, 2]')"}) == "value\n1\n2"
    assert tool.run({"query": """select json_extract('{"a": 3}', '$.a') as a"""}) == "a\n3"
    for version in (4, 5):
        query = f"select body from notes{version} where notes{version} match 'otter'"
        assert tool.run({"query": query}) == "body\nan otter swims"
    assert (
        tool.run({"query": "select snippet(notes5, 0, '<', '>', '', 5) as s from notes5('whale')"})
        == "s\na <whale> sings"
    )


def test_a_database_with_changes_beside_it(shop: Path) -> None:
    """They would not be seen."""
    shop.with_name("shop.db-wal").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"has changes that are not in it yet, in shop.db-wal; merge them: sqlite3"):
        TOOLS.get("sql")(database=str(shop))


def test_a_database_that_is_none(corpus: Path) -> None:
    with pytest.raises(ConfigError, match="is no SQLite database"):
        TOOLS.get("sql")(database=str(corpus))


def test_python_prints_or_says_why_not() -> None:
    tool = TOOLS.get("python")(timeout_s=2.0, allow_unboxed=True)
    assert tool.run({"code": "print(6 * 7)"}) == "42\n"
    assert tool.run({"code": "x = 1"}) == "(nothing was printed)"
    assert tool.run({"code": "print(1)\n1 / 0"}) == "1\n\nZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (
            {"name": "python", "timeout_s": 0},
            "the option timeout_s of the tool python is 0: input should be greater than 0",
        ),
        ({"name": "python", "memory_mib": -1}, "the option memory_mib of the tool python is -1"),
        ({"name": "retrieve", "url": "http://h/", "results": 0}, "the option results of the tool retrieve is 0"),
        (
            {"name": "retrieve", "url": "http://h/", "timeout_s": "soon"},
            "the option timeout_s of the tool retrieve is 'soon'",
        ),
        ({"name": "sql", "database": "a.db", "max_rows": 1.5}, "the option max_rows of the tool sql is 1.5"),
        (
            {"name": "search", "corpus": "a.jsonl", "max_characters": 0},
            "the option max_characters of the tool search is 0",
        ),
        ({"name": "mcp", "url": "http://h/", "timeout_s": -3}, "the option timeout_s of the tool mcp is -3"),
        ({"name": "retrieve"}, "the tool retrieve needs the option 'url'"),
        ({"name": "python", "timeout": 3}, "did you mean timeout_s"),
    ],
)
def test_options_out_of_range(tool: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        tools_of([tool])


def test_an_option_is_converted_to_its_type() -> None:
    [tool] = tools_of([{"name": "python", "timeout_s": "2", "allow_unboxed": True}])
    assert tool.run({"code": "print(6 * 7)"}) == "42\n"


def test_a_conversation_with_calls() -> None:
    env = tools(SPEC, tools=["calculator"], call_reward=0.25, failed_call_reward=-1.0)
    start = env.reset(0)
    assert start.messages == ASKED
    assert start.tools[0]["function"]["name"] == "calculator"
    assert start.tools[0]["function"]["parameters"]["required"] == ["expression"]
    step = env.step(call("calculator", expression="6*7") + call("calculator", expression="1+") + call("abacus"))
    assert [message["content"] for message in step.messages] == [
        "42",
        "Error: the expression has no value: ends too early",
        "Error: there is no tool 'abacus' (known: calculator)",
    ]
    assert step.messages[0]["role"] == "tool" and step.messages[0]["name"] == "calculator"
    assert (step.reward, step.done) == (0.25 - 2.0, False)
    end = env.step("42")
    assert (end.reward, end.done, end.stop) == (None, True, "answered")
    assert env.close() == {"tool_calls": 3.0, "failed_tool_calls": 2.0, "num_actions": 2.0}


def test_malformed_calls_and_limits_become_observations() -> None:
    env = tools(SPEC, tools=["calculator"], max_calls_per_turn=1, max_calls=3, role="user", max_result_characters=30)
    env.reset(0)
    texts = [
        message["content"]
        for reply in ("<tool_call>{oops</tool_call>", 2 * call("calculator", expression="1"), call("calculator", n=1))
        for message in env.step(reply).messages
    ]
    assert texts[0] == "Error: the tool call is not JS...(truncated)"
    assert texts[1] == "1"
    assert texts[2] == "Error: only 1 calls of a turn ...(truncated)"
    assert texts[3] == "Error: all 3 calls are used up...(truncated)"
    last = env.step(call("calculator", expression="1"))  # the fourth turn of four: nobody would read the result
    assert (last.done, last.stop, list(last.messages)) == (True, "max_turns", [])


def test_results_are_cut_where_asked() -> None:
    assert shortened("abcdef", 6, "end") == "abcdef"
    assert shortened("abcdef", 4, "end") == "abcd...(truncated)"
    assert shortened("abcdef", 4, "start") == "(truncated)...cdef"
    assert shortened("abcdef", 4, "middle") == "ab...(truncated)...ef"
    assert shortened("abcdef", 0, "start") == "(truncated)..."


def test_everything_wrong_with_the_tools_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        tools(
            SPEC, tools=["calculater", {"name": "search"}, {"name": "sql", "databse": "x"}, "calculator", "calculator"]
        )
    text = str(caught.value)
    assert "there is no tool called 'calculater'" in text and "did you mean calculator?" in text
    assert "the tool search needs the option 'corpus'" in text
    assert "the tool sql has no option 'databse'" in text and "did you mean database?" in text
    assert "two tools are called calculator" in text
    with pytest.raises(ConfigError, match="tools is empty; name some"):
        tools(SPEC, tools=[])
    with pytest.raises(ConfigError, match="cut is 'front'"):
        tools(SPEC, tools=["calculator"], cut="front")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="role is 'system'"):
        tools(SPEC, tools=["calculator"], role="system")  # type: ignore[arg-type]
