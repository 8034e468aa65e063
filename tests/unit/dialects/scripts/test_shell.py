"""The reader of scripts against bash: the same words, or one error."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from posttrain.dialects.scripts.launch import read_script
from posttrain.errors import ConfigError

CALL = "python3 -m verl.trainer.main_ppo "


def read(folder: Path, text: str) -> list[str]:
    script = folder / "run.sh"
    script.write_text(text, encoding="utf-8")
    return list(read_script(str(script), (), {}, folder=folder).arguments)


def bash(folder: Path, text: str) -> list[str]:
    """The words that bash hands to a stand-in for python3, behind the module's name."""
    stub = folder / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text('#!/bin/bash\nprintf "%s\\0" "$@" >words\n', encoding="utf-8")
    stub.chmod(0o755)
    (folder / "run.sh").write_text(text, encoding="utf-8")
    environment = {"PATH": f"{stub.parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", "run.sh"], cwd=folder, env=environment, check=True, timeout=20)
    return (folder / "words").read_text(encoding="utf-8").split("\0")[2:-1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    "text",
    [
        "N=1\n((N++))\n((N += 3))\n" + CALL + "a=$N b=$((N > 2 ? 0x10 : 010)) c=$((-7 % 3))",
        "for ((i = 0; i < 3; i++)); do S+=$i; done\n" + CALL + "a=$S b=$i",
        "X=1\nf() { local X=2; Y=$X; }\nf\n" + CALL + "a=$X b=$Y",
        "X=1\ntrue | X=2\n(X=3; exit 0)\n" + CALL + "a=$X",
        "X=1\nexport Y=2\nbash -c 'python3 -m verl.trainer.main_ppo a=${X:-no} b=$Y'",
        "A=(p q r)\ni=1\n" + CALL + "a=${A[$i]} b=${A[i+1]} c=${A[-1]}",
        "printf -v X '%s-%s' a 3\nexport X\nIFS=,\nL=a,b\n" + CALL + "x=$X $L",
        ": \"${U:=['x','y']}\"\n" + CALL + 'u="$U"',
        'case "*" in "*") X=star ;; *) X=any ;; esac\n[[ abc == "a*" ]] && X=wrong\n' + CALL + "a=$X",
        "for i in 1 2; do for j in 1 2; do S+=$i$j; break 2; done; done\n" + CALL + "a=$S",
        "f() { return 1; }\nf || X=2\nX=$(echo hidden >&2)$X\n" + CALL + "a=$X",
        "set -a\nX=1\nset +a\nprintf 'python3 -m verl.trainer.main_ppo a=$X $*' >inner.sh\nbash ./inner.sh b=2 c=3",
        "A=1 eval 'B=$A'\n" + CALL + "a=${A:-none} b=$B",
        "exec " + CALL + "a=1\n" + CALL + "a=2",
        "X=1\nexport Y=2\nprintf 'python3 -m verl.trainer.main_ppo a=${X:-no} b=$Y' >inner.sh\n"
        "nohup env X=4 Y='5 6' bash inner.sh d=1",
        "echo 9 | sort | cat >/dev/null # a\nX=1\nexport Y=2\n" + CALL + "a=$X b=$Y 2>&1 | cat",
        "echo 9 | sort | xargs echo -n\nX=1\nulimit -c 0\n" + CALL + "a=$X \\\n  b=2 2>&1 | cat",
        "if true; then\n  echo 9 | sort | grep -v 9\n  Y=1 X=3\n  " + CALL + "a=$X b=$Y > log 2>&1\nfi",
    ],
)
def test_words_are_those_of_bash(tmp_path: Path, text: str) -> None:
    words = bash(tmp_path, text)
    assert words and read(tmp_path, text) == words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("for i in {1..3000}; do X=$i; done\n" + CALL + "a=$X", "the `loop` of line 1"),
        ("for i in {1..3000}; do :; done\n" + CALL + "a=$i", "takes 3000 values, more than are followed"),
        ("for i in {1..100000000}; do X=$i; done\n" + CALL + "a=$X", "run.sh:1"),
        ("A=xx\nfor i in {1..40}; do A=$A$A; done\n" + CALL + "a=$A", "131072 characters"),
        (CALL + "{a,b}" * 24, "the words that braces make"),
        ("while true; do X=$((X+1)); done\n" + CALL + "a=$X", "more than 1000 turns"),
        (CALL + "a='unclosed", "the quote that opens at line 1 is not closed"),
        ("X=1\n" + CALL + 'a="unclosed b=2\nc=3\n', "the quote that opens at line 2 is not closed"),
        ("f() { f; }\nf\n" + CALL + "a=1", "f() calls f(): they call each other in a circle"),
        ("bash run.sh\n", "run.sh calls run.sh: they call each other in a circle"),
        (CALL + "a=$? b=$RANDOM", "known only to a running shell"),
        ("nvidia-smi && X=2\n" + CALL + "a=$X", "depends on the `&&` of line 1"),
        ("X=$(< file)\n" + CALL + "a=$X", "is the text of a file"),
        ("cat > own.yaml <<END\na: 1\nEND\npython start_rlvr_pipeline.py own.yaml\n", "written by the script itself"),
        ("pip install x\npython foo.py a=1\n", "it calls pip install x (line 1), python foo.py a=1 (line 2)"),
    ],
)
def test_what_is_not_followed_is_one_error(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    assert said in str(raised.value)


WAITS = """N=0
while [ $N -lt 600 ]; do
    if curl -s http://localhost:8000/health; then break; fi
    A=1; B=1; C=1; D=1; E=1; F=1; G=1; H=1; I=1; J=1; K=1; L=1; M=1; O=1; P=1; Q=1; R=1; S=1; T=1; U=1
    sleep 10
    N=$((N + 1))
done
"""


def test_a_loop_that_waits_for_a_server_is_read_once(tmp_path: Path) -> None:
    """Six such loops of 600 turns are more statements than a script may have; how many turns they take is not known."""
    assert read(tmp_path, WAITS * 6 + CALL + "a=1") == ["a=1"]
    with pytest.raises(ConfigError, match=r"\$N depends on the `loop` of line 2"):
        read(tmp_path, WAITS + CALL + "a=$N")


def test_a_loop_that_only_sleeps_between_launches_is_followed(tmp_path: Path) -> None:
    assert read(tmp_path, "N=0\nwhile [ $N -lt 3 ]; do\nsleep 1\nN=$((N + 1))\ndone\n" + CALL + "a=$N") == ["a=3"]
