"""The words that the reader finds are those that bash passes to the trainer; what it cannot know it says."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from posttrain.dialects.scripts.launch import read_script
from posttrain.errors import ConfigError

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="needs bash")
TRAINER = "python3 -m verl.trainer.main_ppo"
STUB = '#!/bin/bash\nfor word in "${@:3}"; do printf "%s\\0" "$word" >> "$WORDS"; done\nprintf "\\1" >> "$WORDS"\n'

# Followed exactly.
SAME = [
    "N=3\\\n    2>&1\nM=4",
    "N=1\n((N++))\n((N += 4))\n((--N))",
    "((N = 3, M = N * 2))\nN=$N$M",
    "let N=3+4\nlet N*=2",
    "N=5\nif ((N > 4 && N != 6)); then N=$N.big; fi",
    "M=2\nN=$((M++))$M$((M += 3))",
    "for i in {1..300}; do N=$i; done",
    "for ((i = 0; i < 4; i++)); do N=$i; done",
    "M=2\nN=$((M++ + 1))$M",
    "for i in {5..2}; do N=$N$i; done",
    "declare -A M\nM[a]=1\nM[b]=2\nN=${M[b]}${#M[@]}",
    "A=(1 2)\nA+=(3 4)\nA[1]=9\nN=${A[*]}",
    "A=(x y)\nA+=z\nN=${A[0]}",
    "printf -v N %s-%s a 3",
    "(N=5; exit 3)\nN=$N.",
    "N=1\necho a | N=2\nN=$N.",
    'f() { local x=$1; echo "$x$2"; }\nN=$(f a b)',
    "f() { N=$1; return 0; N=never; }\nf 4",
    "set -- a 'b c'\nN=$2$#\nshift\nN=$N$1",
    "X=abc.tar.gz\nN=${X%%.*}${X#*.}${X/b/B}${X^^}${X:1:2}${#X}",
    "X='a  b'\nN=\"$X\"",
    "N=$(echo a; echo b)",
    "N=`basename /x/y.sh .sh`$(dirname /x/y.sh)",
    "case abc in a*) N=1 ;; *) N=2 ;; esac",
    "case x in [ab]|x) N=1 ;; esac",
    "i=0\nwhile [ $i -lt 5 ]; do i=$((i + 1)); [[ $i == 3 ]] && continue; N=$N$i; done",
    "until [[ $N == aaa ]]; do N=a$N; done",
    "eval 'N=3'\neval \"N=\\${N}$N\"",
    "[[ -z $U && 3 -lt 10 || x == y ]] && N=yes || N=no",
    "N=${U:-d}${U-e}${V:=f}$V",
    "D=0,1,5\nIFS=',' read -r -a L <<< \"$D\"\nN=${#L[@]}${L[2]}",
    "read -r A B C <<< 'one two  three four '\nN=\"$A|$B|$C|\"",
    "IFS=: read -r A B <<< host:80:x\nIFS=, read -ra L <<< 'a,,b,'\nN=$A$B${#L[@]}${L[1]}",
    "IFS=', ' read -ra L <<< ' a, b ,c  d'\nread A B <<< only\nread <<< 'x y'\nN=${#L[@]}${L[3]}$A$B${REPLY// /_}",
    "IFS=, read -r A B <<< 'a,b,'\nread -ra L <<< ''\nN=\"$A|$B|${#L[@]}\"",
    "IFS=,\nA='1,2,3'\nfor x in $A; do N=$x$N; done\nunset IFS",
    "f() { local -n r=$1; r=(a b); r+=(c); }\nL=()\nf L\nN=${L[*]}",
    "f() { local -n r=$1; N=$r; r=new; }\nV=old\nf V\nN=$N$V",
    "g() { local -n r=$1; r+=(x); }\nf() { local -n r=$1; local in=(1); g in; r=(${in[@]} 2); }\nf L\nN=${L[*]}",
    'N="a\\"b\\$c\\`d"',
    "N=$'a\\tb'",
    "N='it'\"'\"'s'",
    "cat <<END >/dev/null\nN=5\n$N\nEND\nN=after",
    "X=N\nN=4\nN=${!X}5",
    "seqs=$(seq 3)\nfor s in $seqs; do N=$N$s; done",
    "export N=7\nbash -c 'exit 1'\nN=$N.",
    "N=3; N=$(( N > 2 ? N * 10 : 1 ))",
    "if false; then N=1; elif [ 1 = 1 ]; then N=2; else N=3; fi",
    "X={a:1,b:2}\nset -- k=$X {1,2}$X\nN=$#$1$3",
    "X='{1..3}'\nset -- $X y{1..3}\nN=$#$1",
    "A=(a=1 'b=[1, 2]')\nN=\"${A[@]:1}\"",
    "X=0.2_0.28_c\nN=$(echo $X | cut -d'_' -f2)$(echo $X | cut -d_ -f 1,3)$(echo $X | cut -c2-4)$(echo $X | cut -d. -f2-)",
    "N=$(echo Qwen/Qwen2.5-7B | tr '/' '_' | tr '[:upper:]' '[:lower:]')$(echo a1b2 | tr -d 0-9)$(echo abc | tr a-c x)",
    "N=$(echo a/b/c | sed 's/\\//_/g')$(echo a.b.c | sed 's|\\.|+|')$(echo 'x+y' | sed 's/+/p/')$(echo aab | sed -E 's/a+/c/')",
    "N=$(echo 'one two  three' | awk '{print $2}')$(echo a:b | awk -F: '{print $NF}')$(echo a b | awk '{ print $5 }')",
    "N=$(printf '%s' 1,2,3 | tr ',' '\\n' | wc -l)$(echo a b c | wc -w)$(seq 5 | tail -1)$(seq 5 | head -n 2 | xargs)",
    'X=0.0\nif (( $(echo "$X == 0" | bc -l) )); then N=zero; else N=more; fi\nN=$N$(echo "1.5 > 2" | bc)',
    "N=$(echo '7 / 2 + 3 * 4' | bc)$(bc <<< '2 * (3 + 4)')$(echo '6/2' | bc -l)$(echo 'scale=2; 6/4*2' | bc)",
    "N=$(awk \"BEGIN {print 3 * 8}\")$(awk 'BEGIN{printf \"%d\", 7/2}')$(awk 'BEGIN {print 1/3}')$(awk 'BEGIN{print 2.50}')",
    "if echo Qwen-VL | grep -q 'VL'; then N=a; else N=b; fi\nif echo Qwen | grep -qi vl; then N=${N}c; else N=${N}d; fi",
    "echo a | grep -qE 'a|b' && N=1\necho 'c' | grep -q 'a|b' || N=${N}2",
    'N=$(cut -d= -f2 <<< a=b)$(echo x | cat)$(tr a b <<< "$(echo aa)")',
    "N=$(( $(echo 3 | tr 3 4) * 2 + $(seq 2 | wc -l) ))",
]
# What only running something tells: an error, never another value.
UNKNOWN = [
    "N=$(<version.txt)",
    "N=$(cat missing.txt)",
    "N=$(if grep -q x /etc/hostname; then echo 8; else echo 4; fi)",
    "N=0\nfor f in $(ls); do N=$((N + 1)); done",
    "for f in $(ls /nowhere 2>/dev/null); do N=$f; done\nN=$f",
    "N=1\nwhile read -r x; do N=$x; done < /dev/null",
    "N=$(date +%s | md5sum)",
    "read -r N < /dev/null",
    "for i in {1..3000}; do N=$i; done",
    "N=1\nif grep -q x /etc/hostname; then N=2; fi",
    "N=$((U + $(wc -l < /dev/null)))",
    "N=$(echo 7/3 | bc -l)",
    "N=$(echo abc | sed -n 's/b/x/p')",
    "N=$(echo abc | rev)",
    "if hostname | grep -q x; then N=1; fi",
    "N=$(cat missing.txt | cut -c1)",
]


def passed_by_bash(folder: Path, text: str) -> list[list[str]]:
    """The words that each call of the trainer gets."""
    place = folder / "bin"
    place.mkdir(exist_ok=True)
    stub, said = place / "python3", folder / "words"
    stub.write_text(STUB)
    stub.chmod(0o755)
    said.write_bytes(b"")
    (folder / "run.sh").write_text(text)
    assert BASH is not None
    environment = {"PATH": f"{place}:{os.environ['PATH']}", "WORDS": str(said), "HOME": str(folder), "LC_ALL": "C"}
    subprocess.run([BASH, "run.sh"], cwd=folder, env=environment, capture_output=True, timeout=20, check=False)
    calls = said.read_bytes().decode().split("\1")[:-1]
    return [call.split("\0")[:-1] for call in calls]


def read(folder: Path) -> list[str]:
    return list(read_script(str(folder / "run.sh"), (), {"HOME": str(folder)}, folder=folder).arguments)


@pytest.mark.parametrize("script", SAME)
def test_what_is_followed_is_what_bash_does(tmp_path: Path, script: str) -> None:
    [words] = passed_by_bash(tmp_path, f'{script}\n{TRAINER} a="$N" "b=$N"\n')
    assert read(tmp_path) == words


@pytest.mark.parametrize("script", UNKNOWN)
def test_what_is_not_known_is_reported(tmp_path: Path, script: str) -> None:
    passed_by_bash(tmp_path, f'{script}\n{TRAINER} a="x$N"\n')
    with pytest.raises(ConfigError, match=r"line \d+"):
        read(tmp_path)


PIECES = [
    "N={n}",
    "N=${{N}}{w}",
    'N="$N {w}"',
    "M={n}",
    "N=$((M + {n}))",
    "((M += {n}))",
    "((M++))",
    "A=({w} {n})",
    "A+=({w})",
    "N=${{A[0]}}${{#A[@]}}",
    "N=${{N%{w}}}",
    "N=${{N/{w}/{n}}}",
    "N=${{M:-{w}}}",
    'if [ "$M" -gt {n} ]; then\n{s}\nelse\n{s}\nfi',
    "if [[ $N == *{w}* ]]; then\n{s}\nfi",
    "for x in {w} {n} $M; do\n{s}\nN=$N$x\ndone",
    "case $N in *{w}*)\n{s}\n;;\n*)\n{s}\n;;\nesac",
    "f() {{\n{s}\n}}\nf {w}",
    "(\n{s}\n)",
    "{{\n{s}\n}} > /dev/null",
    "{s} | cat",
    "N=$(\n{s}\necho $N{w})",
    "[ {n} -lt {n} ] && N={w} || N={n}",
    "set -- {w} {n}\nN=$1$#",
    "export M={n}",
    "while [ $M -lt {n} ]; do\nM=$((M + 1))\nN=$N.\ndone",
    "N={{{w},{n}}}",
    "unset N\nN=u",
    'N="${{A[@]}}"',
    "{s} && N=${{N}}{w}",
]


def written(source: random.Random, depth: int) -> str:
    piece = source.choice(PIECES if depth else [each for each in PIECES if "{s}" not in each])
    while "{s}" in piece:
        piece = piece.replace("{s}", written(source, depth - 1).replace("{", "{{").replace("}", "}}"), 1)
    while "{w}" in piece:
        piece = piece.replace("{w}", source.choice(["a", "b", "abc", "x.y"]), 1)
    while "{n}" in piece:
        piece = piece.replace("{n}", str(source.randint(0, 9)), 1)
    return piece.replace("{{", "{").replace("}}", "}")


def test_random_scripts_are_read_as_bash_runs_them(tmp_path: Path) -> None:
    """A hundred scripts of nested statements; what is unknown is an error, and anything else is the same."""
    source = random.Random(7)
    exact = 0
    for _ in range(int(os.environ.get("POSTTRAIN_TRIALS", "100"))):
        script = (
            "N=0\nM=1\nA=(q)\n"
            + "\n".join(written(source, 2) for _ in range(5))
            + f'\n{TRAINER} a="$N" b=$M c="${{A[*]}}"\n'
        )
        calls = passed_by_bash(tmp_path, script)
        try:
            words = read(tmp_path)
        except ConfigError:
            continue
        assert calls == [words], script
        exact += 1
    assert exact >= 80
