"""A YAML file and overrides become plain values, and every key keeps its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config.reading.compose import Composed, compose
from posttrain.errors import ConfigError

RUN = """\
# a comment
model:
  path: here
data:
  train_files:
    - a.parquet
    - b.parquet
  prompts_per_step: 8
policy: {optimizer: {lr: 1e-6}}
"""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def composed(text: str, *overrides: str, struct: bool = False) -> Composed:
    Path("run.yaml").write_text(text)
    return compose("run.yaml", overrides, struct=struct)


def refusal(text: str, *overrides: str, struct: bool = False) -> list[str]:
    """The messages of a configuration that is refused."""
    with pytest.raises(ConfigError) as caught:
        composed(text, *overrides, struct=struct)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.usefixtures("in_folder")
class TestValues:
    def test_numbers_are_read_as_omegaconf_reads_them(self) -> None:
        values = composed("a: 1e-6\nb: 1_000\nc: yes\nd: 2024-01-01\ne: '1e-6'\nf:\n").values
        assert values == {"a": 1e-6, "b": 1000, "c": True, "d": "2024-01-01", "e": "1e-6", "f": None}

    def test_interpolations_are_resolved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WIDTH", "12")
        text = "a: {b: 3, c: '${.b}'}\nd: ${a}\ne: ${oc.env:WIDTH}\nf: ${oc.env:ABSENT,9}\ng: x${a.b}y\nh: \\${a}\n"
        values = composed(text).values
        assert values["d"] == {"b": 3, "c": 3}
        assert (values["e"], values["f"], values["g"], values["h"]) == ("12", "9", "x3y", "${a}")

    def test_an_override_is_seen_by_interpolations(self) -> None:
        assert composed("a: 1\nb: ${a}\n", "a=5").values == {"a": 5, "b": 5}

    def test_anchors_and_merge_keys(self) -> None:
        text = "base: &base {x: 1, y: 2}\nmore:\n  <<: *base\n  y: 3\n"
        result = composed(text)
        assert result.values["more"] == {"x": 1, "y": 3}
        assert result.sources.where("more.y") == "run.yaml:4 more.y"
        assert result.sources.where("more.x") == "run.yaml:1 more.x"

    def test_an_empty_file_is_an_empty_configuration(self) -> None:
        assert composed("# nothing\n").values == {}

    def test_no_file_at_all(self) -> None:
        result = compose(None, ["a.b=1"])
        assert result.values == {"a": {"b": 1}}
        assert result.sources.where("a.c") == "a.c (a default; the command line does not set it)"


@pytest.mark.usefixtures("in_folder")
class TestPlaces:
    def test_lines_of_keys_and_items(self) -> None:
        sources = composed(RUN).sources
        assert sources.where("model.path") == "run.yaml:3 model.path"
        assert sources.where("data.train_files.1") == "run.yaml:7 data.train_files.1"
        assert sources.where("policy.optimizer.lr") == "run.yaml:9 policy.optimizer.lr"

    def test_a_default_says_that_it_is_one(self) -> None:
        assert composed(RUN).sources.where("run.seed") == "run.seed (a default; run.yaml does not set it)"

    def test_an_override_is_the_place_of_what_it_gives(self) -> None:
        sources = composed(RUN, "model.path=there", "policy={optimizer: {eps: 1}}").sources
        assert sources.where("model.path") == "override model.path=there"
        assert sources.where("policy.optimizer.eps") == "override policy={optimizer: {eps: 1}}"
        assert sources.where("policy.optimizer.lr") == "run.yaml:9 policy.optimizer.lr"

    def test_what_an_interpolation_brings_was_written_at_the_interpolation(self) -> None:
        assert composed("a: {x: 1}\nb: ${a}\n").sources.where("b.x") == "run.yaml:2 b"

    def test_a_shorter_list_forgets_the_items_of_the_longer(self) -> None:
        sources = composed(RUN, "data.train_files=[c.parquet]").sources
        assert "data.train_files.1" not in sources.places

    def test_what_is_missing_belongs_into_its_section(self) -> None:
        sources = composed(RUN).sources
        assert sources.where_missing("data.validation_files") == "run.yaml:4 data"
        assert sources.where_missing("run.name") == "run.yaml"


@pytest.mark.usefixtures("in_folder")
class TestOverrides:
    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("a.b=2", {"a": {"b": 2}}),
            ("a.b=1e-6", {"a": {"b": 1e-6}}),
            ("a.b='1, 2'", {"a": {"b": "1, 2"}}),
            ("a.b=[1,x,{y: 2}]", {"a": {"b": [1, "x", {"y": 2}]}}),
            ("a.b=null", {"a": {"b": None}}),
            ("a.b=", {"a": {"b": ""}}),
            ("a.c.d=2", {"a": {"b": 1, "c": {"d": 2}}}),
            ("+a.c=2", {"a": {"b": 1, "c": 2}}),
            ("++a.b=2", {"a": {"b": 2}}),
            ("a={c: 3}", {"a": {"b": 1, "c": 3}}),
            ("~a.b", {"a": {}}),
            ("~a.b=1", {"a": {}}),
            ("~a", {}),
        ],
    )
    def test_grammar(self, override: str, expected: dict[str, object]) -> None:
        assert composed("a: {b: 1}\n", override).values == expected

    def test_list_items_can_be_replaced(self) -> None:
        assert composed("a: [{w: 1}, {w: 2}]\n", "a.1.w=5").values == {"a": [{"w": 1}, {"w": 5}]}

    def test_they_apply_in_order(self) -> None:
        assert composed("a: 1\n", "a=2", "a=3", "~a", "+a=4").values == {"a": 4}

    def test_in_struct_mode_a_new_key_needs_a_plus(self) -> None:
        messages = refusal("alpha: {beta: 1}\n", "alpha.bta=2", struct=True)
        assert messages == [
            "alpha.bta is not there, at override alpha.bta=2; "
            "did you mean alpha.beta? A new key needs a +: +alpha.bta=2"
        ]
        assert composed("a: {b: 1}\n", "+a.c=2", struct=True).values == {"a": {"b": 1, "c": 2}}

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("run2.yaml", "'run2.yaml' is not an override (there is no =)"),
            ("", "'' is not an override (there is no =)"),
            ("d/train.parquet", "'d/train.parquet' is not an override (there is no =)"),
            ("a=b=c", "'a=b=c' is not an override"),
            ("a=~x", "'a=~x' is not an override (a character that needs quotes)"),
            ("a=1,2", "a sweep over several values is not one run, at override a=1,2"),
            ("a=range(1,3)", "a sweep over several values"),
            ("=1", "the key must be a dotted name"),
            ("a@b=1", "the key must be a dotted name"),
            ("+a=2", "a is there already, at override +a=2; without the + it is replaced: a=2"),
            ("~nope", "nope is not there, at override ~nope"),
            ("~no.pe", "no.pe is not there, at override ~no.pe"),
            ("~a=2", "a is 1, so nothing was deleted"),
            ("a.b=2", "a is 1, which has nothing below it"),
            ("l.7=2", "l is a list of 2; its items can be replaced"),
            ("l.7.x=2", "l is a list of 2, it has no item 7"),
            ("~l.0", "its items can be replaced, not added or deleted"),
            ("i.x=2", "i is '${a}', which has nothing below it"),
        ],
    )
    def test_refusals(self, override: str, message: str) -> None:
        messages = refusal("a: 1\nl: [1, 2]\ni: ${a}\n", override)
        assert len(messages) == 1
        assert message in messages[0]

    def test_all_refusals_come_together(self) -> None:
        assert len(refusal("a: 1\n", "a=1,2", "nothing", "b c=1")) == 3
        assert len(refusal("a: 1\n", "+a=2", "~b")) == 2


@pytest.mark.usefixtures("in_folder")
class TestBadFiles:
    def test_the_file_is_not_there(self) -> None:
        Path("run.yaml").write_text("a: 1\n")
        with pytest.raises(ConfigError, match=r"there is no file rum\.yaml; did you mean run\.yaml\?"):
            compose("rum.yaml", [])

    def test_a_folder_is_not_a_file(self) -> None:
        with pytest.raises(ConfigError, match="is a folder"):
            compose(".", [])

    def test_not_text(self) -> None:
        Path("run.yaml").write_bytes(b"a: \xff\n")
        with pytest.raises(ConfigError, match=r"run\.yaml is not a text file in UTF-8: byte 0xff, at run\.yaml:1"):
            compose("run.yaml", [])
        Path("run.yaml").write_text("a: 1\n", encoding="utf-16")
        with pytest.raises(ConfigError, match=r"run\.yaml is a text file in UTF-16; save it in UTF-8"):
            compose("run.yaml", [])

    def test_a_link_that_leads_nowhere(self) -> None:
        Path("link.yaml").symlink_to("gone.yaml")
        with pytest.raises(ConfigError, match=r"link\.yaml is a link to gone\.yaml, and there is no such file$"):
            compose("link.yaml", [])

    def test_a_value_in_the_place_of_a_section_is_reported_alone(self) -> None:
        Path("run.yaml").write_text("a: [1]\n", encoding="utf-8")
        what = (
            r"^a must be a section of key: value lines, not a list of 1, at run\.yaml:1 a; write its keys .* as a\.b$"
        )
        with pytest.raises(ConfigError, match=what):
            compose("run.yaml", [], base={"a": {"b": 1}, "c": "${a.b}", "d": "${a.b}"})

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a: 1\nyes: 2\n", 'the key yes is a truth value in YAML, and keys are names, at run.yaml:2; put it in quotes'),
            ("a:\n  ~: 2\n", 'the key a.~ is null in YAML, and keys are names, at run.yaml:2; put it in quotes: "~"'),
            ("a: 1\n---\nb: 1\n", "a second document begins here, at run.yaml:2; keep one"),
            ("a: {<<: [1]}\n", "<< takes a section, or a list of sections, at run.yaml:1; write <<: \\*NAME"),
            ("a: 1\nb: \0\n", "not readable as YAML: .*, at run.yaml:2; remove the character"),
            ("a: ${b.c}\nb: {cd: 1}\n", "refers to b.c, .* did you mean \\${b.cd}"),
        ],
    )  # fmt: skip
    def test_further_slips(self, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            composed(text)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a: 1\nb: [1, 2\nc: 3\n", "not valid YAML: .*, at run.yaml:2"),
            ("a: 1\n\tb: 2\n", "a tab, at run.yaml:2"),
            ("a: 1\nb: 2: 3\n", "not valid YAML: this line cannot hold a key: .* two `: `, at run.yaml:2; .*in quotes"),
            (
                "a:\n  b: 1\n c: 2\n",
                "indented otherwise than its section, which begins on line 1, at run.yaml:3; indent all",
            ),
            (
                "a: 1\n  b: 2\n",
                "this line cannot hold a key: it is indented deeper than the line above, .* at run.yaml:2; indent",
            ),
            ("  a: 1\nb: 2\n", "this line is indented otherwise than the lines above, at run.yaml:2; indent"),
            ("a:\n  - 1\n - 2\n", "indented otherwise than its section, which begins on line 1, at run.yaml:3"),
            ("a: 1\nb\nc: 2\n", "line 2 is no `key: value`, at run.yaml:2; put a colon"),
            ("a: 'x\nb: 2\n", "the quote that opens on line 1 is not closed, at run.yaml:1"),
            (
                "a: {x: 1\nb: 3\n",
                "the list or mapping that opens on line 1 is not closed, at run.yaml:1; close it with }",
            ),
            ("a: @x\n", "a value cannot begin with @, at run.yaml:1; put it in quotes"),
            ('a: "\\q"\n', r"\\q means nothing in double quotes, at run.yaml:1; write"),
            ("a: x # c\n}: 3", "the } closes nothing, at run.yaml:2"),
            ("- a\n- b\n", "this file holds a list, at run.yaml:1"),
            ("\njust text\n", "this file holds a single value, at run.yaml:2"),
            ("a: !!python/object:os.system x\n", "tags such as .*os.system.* are not allowed here, at run.yaml:1"),
            ("a: *nobody\n", "undefined alias.*, at run.yaml:1"),
            ("a: 1\n---\nb: 2\n", "not valid YAML: .*, at run.yaml:2"),
            ("a: &x\n  b: *x\n", "a.b contains itself through an alias, at run.yaml"),
            ("a: \x07\n", "not readable as YAML: .*, at run.yaml"),
        ],
    )
    def test_broken_yaml_names_the_line(self, text: str, message: str) -> None:
        Path("run.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            compose("run.yaml", [])

    def test_keys_written_twice_are_all_reported(self) -> None:
        assert refusal("a: 1\nb: {c: 1, c: 2}\na: 2\n") == [
            "b.c is written twice, on lines 2 and 2, at run.yaml:2; keep one of them",
            "a is written twice, on lines 1 and 3, at run.yaml:3; keep one of them",
        ]

    def test_names_stand_for_unset_variables_on_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SET_HERE", "value")
        text = "a: ${oc.env:NO_SUCH_VARIABLE}\nb: ['x/${oc.env:NO_SUCH_VARIABLE}', '${oc.env:SET_HERE}']\nc: ${oc.env:OTHER,d}\n"
        Path("run.yaml").write_text(text)
        composed = compose("run.yaml", [], name_unset=True)
        assert composed.values == {"a": "NO_SUCH_VARIABLE", "b": ["x/NO_SUCH_VARIABLE", "value"], "c": "d"}
        assert composed.unset == ("NO_SUCH_VARIABLE",)

    def test_interpolations_that_lead_nowhere_are_all_reported(self) -> None:
        messages = refusal(
            "alpha: 1\nb:\n  c: ${alhpa}\nd: ${oc.env:NO_SUCH_VARIABLE}\ne: ${nope:1}\nf: ${f}\ng: ???\n"
        )
        assert messages[0].startswith(
            "${alhpa} refers to alhpa, which is not written anywhere, at run.yaml:3 b.c; did you"
        )
        assert "did you mean ${alpha}? Or is alpha (" in messages[0] and messages[0].endswith("meant to be alhpa?")
        assert messages[1].startswith("the environment variable NO_SUCH_VARIABLE is not set")
        assert messages[2].startswith("${nope:1} asks for a resolver 'nope' that does not exist, at run.yaml:5 e")
        assert messages[3].startswith("${f} leads back to itself, at run.yaml:6 f; write a value")
        assert messages[4] == "g must be given: ??? stands in its place, at run.yaml:7 g"

    @pytest.mark.parametrize(("text", "overrides"), [("a: {b: '${x'}\n", []), ("a: {b: 1}\n", ["a.b='${x'"])])
    def test_an_interpolation_that_is_not_closed(self, text: str, overrides: list[str]) -> None:
        (message,) = refusal(text, *overrides)
        assert "${x" in message
        place = "override a.b='${x'" if overrides else "run.yaml:1 a.b"
        assert message.endswith(f"{place}; close it with }}, or write \\${{ for the plain characters")


@pytest.mark.usefixtures("in_folder")
def test_what_is_left_open_takes_the_value_below_or_is_reported() -> None:
    Path("run.yaml").write_text("a:\n  b: ???\n  c: 2\nd: ???\n")
    base = {"a": {"b": 1, "c": 1}, "d": 4}
    composed = compose("run.yaml", [], base=base)
    assert composed.values == {"a": {"b": 1, "c": 2}, "d": 4}
    assert composed.open == ("a.b", "d")
    assert compose("run.yaml", ["a.b=5", "d=6"], base=base).open == ()
    with pytest.raises(ConfigError, match=r"d must be given: \?\?\? stands in its place, at run\.yaml:4 d"):
        compose("run.yaml", [], base={"a": {"b": 1}})
