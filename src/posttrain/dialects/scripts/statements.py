"""Read a script statement by statement: keep its variables, follow its conditions, collect its commands. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from os.path import normpath
from pathlib import Path

from posttrain.dialects.scripts.arithmetic import computed
from posttrain.dialects.scripts.conditions import Truth, differing, holds, of_words
from posttrain.dialects.scripts.expansion import source, text_of, words_of
from posttrain.dialects.scripts.parsing import parse
from posttrain.dialects.scripts.programs import output_of
from posttrain.dialects.scripts.state import Call, Leave, Node, Shell, Value

MAX_TURNS = 1000  # of a loop
MAX_DEPTH = 40  # of functions and sourced files


def run_text(shell: Shell, text: str) -> Truth:
    """Read a script's text. Returns: its exit status as a truth; an ``exit`` leaves as Leave."""
    return body(shell, parse(text).children)


def body(shell: Shell, nodes: Iterable[Node]) -> Truth:
    status: Truth = True
    for node in nodes:
        if node.is_named and node.type != "comment":
            status = statement(shell, node)
    return status


def statement(shell: Shell, node: Node) -> Truth:
    """Follow one statement. Returns: whether it succeeds; None where that is not known."""
    match node.type:
        case "command":
            return command(shell, node)
        case "variable_assignment":
            assign(shell, node)
        case "variable_assignments":
            for child in node.named_children:
                assign(shell, child)
        case "declaration_command":
            for child in node.named_children:
                if child.type == "variable_assignment":
                    assign(shell, child)
        case "unset_command":
            for child in node.named_children:
                shell.variables.pop(source(child), None)
        case "redirected_statement":
            kept, shell.output = shell.output, shell.output if shell.output is None else []
            inner = node.child_by_field_name("body")
            status = statement(shell, inner) if inner is not None else True
            captured, shell.output = shell.output, kept
            if kept is not None and not any(
                "file_redirect" in child.type and ">" in source(child)[:1] for child in node.children
            ):
                kept.extend(captured or [])
            return status
        case "pipeline":
            return _pipeline(shell, node)
        case "list":
            return _list(shell, node)
        case "negated_command":
            inner_status = statement(shell, node.named_children[0])
            return None if inner_status is None else not inner_status
        case "test_command":
            return _test(shell, node)
        case "compound_statement" if source(node).startswith("(("):
            number = computed(shell, source(node)[2:-2])
            return None if number is None else bool(number)
        case "compound_statement" | "do_group" | "program" | "else_clause":
            return body(shell, node.children)
        case "subshell":
            kept_variables, kept_folder = dict(shell.variables), shell.folder
            status = body(shell, node.children)
            shell.variables, shell.folder = kept_variables, kept_folder
            return status
        case "if_statement":
            return _if(shell, node)
        case "for_statement":
            return _for(shell, node)
        case "while_statement":
            return _while(shell, node)
        case "c_style_for_statement":
            _lost(shell, node, "loop")
            return None
        case "case_statement":
            return _case(shell, node)
        case "function_definition":
            shell.functions[source(node.child_by_field_name("name"))] = node.child_by_field_name("body")
        case "ERROR":
            body(shell, node.children)
    return True


def assign(shell: Shell, node: Node) -> None:
    """``name=value``, ``name+=value``, ``name=(a b)`` and ``name[index]=value``."""
    target = node.child_by_field_name("name")
    given = node.child_by_field_name("value")
    adds = any(child.type == "+=" for child in node.children)
    if target.type == "subscript":
        name = source(target.child_by_field_name("name"))
        index = text_of(shell, target.child_by_field_name("index"))
        array = shell.variables.get(name)
        array = dict(array) if isinstance(array, dict) else {}
        array[index] = text_of(shell, given) if given is not None else ""
        shell.variables[name] = array
        return
    name = source(target)
    if given is not None and given.type == "array":
        items = [word for child in given.named_children if child.type != "comment" for word in words_of(shell, child)]
        old = shell.variables.get(name)
        kept = [*old.values()] if isinstance(old, dict) else [old] if isinstance(old, str) else []
        shell.variables[name] = {str(number): item for number, item in enumerate([*(kept if adds else []), *items])}
        return
    if given is not None and name not in shell.variables and source(given).strip('"${}') != name:
        shell.variables[name] = ""  # A="$A more" begins empty
    text = text_of(shell, given) if given is not None else ""
    old = shell.variables.get(name, "")
    shell.variables[name] = (old if isinstance(old, str) else "") + text if adds else text


def command(shell: Shell, node: Node) -> Truth:
    _assignments(shell, node)
    words = [word for child in _arguments(node) for word in words_of(shell, child)]
    if not words:
        for child in node.named_children:
            if child.type == "variable_assignment":
                assign(shell, child)
        return True
    return _called(shell, words, node)


def _arguments(node: Node) -> list[Node]:
    apart = ("variable_assignment", "file_redirect", "herestring_redirect", "heredoc_redirect", "comment")
    return [child for child in node.named_children if child.type not in apart]


def _assignments(shell: Shell, node: Node) -> None:
    """Assign what stands before a command on lines of its own; the grammar takes ``A=1 B=2`` for part of the next line."""
    given = [child for child in node.named_children if child.type == "variable_assignment"]
    name = node.child_by_field_name("name")
    if not given or name is None:
        return
    between = node.text[given[-1].end_byte - node.start_byte : name.start_byte - node.start_byte]
    if re.search(rb"(?<!\\)\n", between):
        for child in given:
            assign(shell, child)


def _called(shell: Shell, words: list[str], node: Node) -> Truth:
    name, *rest = words
    match name:
        case "exit":
            shell.ended = shell.line(node)
            raise Leave("exit")
        case "return" | "break" | "continue":
            raise Leave(name)
        case "shift":
            count = int(rest[0]) if rest and rest[0].isdigit() else 1
            del shell.positional[:count]
        case "set":
            if "--" in rest:
                shell.positional[:] = rest[rest.index("--") + 1 :]
        case "cd" if rest:
            shell.folder = Path(normpath(shell.path(rest[-1])))
            shell.variables["PWD"] = str(shell.folder)
        case "export" | "local" | "declare" | "readonly":
            for word in rest:
                variable, equals, value = word.partition("=")
                if equals:
                    shell.variables[variable] = value
        case "read" | "mapfile" | "readarray":
            for word in rest:
                if not word.startswith("-"):
                    shell.variables[word] = shell.hole(
                        f"{name} of line {shell.line(node)} asks for {word}", f"set {word}"
                    )
            return None
        case "test" | "[":
            return of_words(shell, [word for word in rest if word != "]"])
        case "true" | ":":
            return True
        case "false":
            return False
        case "source" | ".":
            return _sourced(shell, rest)
        case "eval":
            return _nested(shell, " ".join(rest), node)
        case "bash" | "sh" if len(rest) > 1 and rest[0] in ("-c", "-lc", "-ec"):
            return _nested(shell, rest[1], node)
        case _ if name in shell.functions and shell.depth < MAX_DEPTH:
            return _function(shell, name, rest)
        case _:
            shell.calls.append(
                Call(tuple(words), shell.line(node), int(node.end_point[0]) + 1 + shell.line_offset, shell.folder)
            )
            if shell.output is not None:
                shell.output.append(_output(shell, words, node))
            return True if output_of(shell, words) is not None else None
    return True


def _output(shell: Shell, words: list[str], node: Node) -> str:
    said = output_of(shell, words)
    if said is not None:
        return said
    what = f"$({words[0]} ...) of line {shell.line(node)} is the output of a program, and reading a script runs none"
    return shell.hole(what, "write its value into the script, or set the key behind the script: KEY=VALUE")


def substitute(shell: Shell, node: Node) -> str:
    """The output of ``$(...)``, read in a shell of its own."""
    kept = shell.output, dict(shell.variables), shell.folder, list(shell.calls)
    shell.output = []
    try:
        body(shell, node.children)
    except Leave:
        pass
    finally:
        said = "".join(shell.output)
        shell.output, shell.variables, shell.folder, shell.calls = kept
    return said.rstrip("\n")


def _nested(shell: Shell, text: str, node: Node) -> Truth:
    """Read the text of ``eval`` or ``bash -c``; its lines count from the command's own."""
    kept, shell.line_offset = shell.line_offset, shell.line(node) - 1
    try:
        return run_text(shell, text)
    finally:
        shell.line_offset = kept


def _sourced(shell: Shell, rest: list[str]) -> Truth:
    if not rest or shell.as_tested(rest[0]) is None:
        return None
    file = shell.path(rest[0])
    if not file.is_file() or shell.depth >= MAX_DEPTH:
        return None
    shell.depth += 1
    try:
        return run_text(shell, file.read_text(encoding="utf-8", errors="replace"))
    except Leave as left:
        if left.kind == "exit":
            raise
        return None
    finally:
        shell.depth -= 1


def _function(shell: Shell, name: str, rest: list[str]) -> Truth:
    kept, shell.positional = shell.positional, rest
    shell.depth += 1
    try:
        return statement(shell, shell.functions[name])
    except Leave as left:
        if left.kind != "return":
            raise
        return None
    finally:
        shell.positional = kept
        shell.depth -= 1


def _pipeline(shell: Shell, node: Node) -> Truth:
    kept, shell.output = shell.output, None
    for child in node.named_children:
        statement(shell, child)
    shell.output = kept
    if kept is not None:
        what = f"{source(node)} of line {shell.line(node)} is the output of a program, and reading a script runs none"
        kept.append(shell.hole(what, "write its value into the script, or set the key behind the script: KEY=VALUE"))
    return None


def _list(shell: Shell, node: Node) -> Truth:
    """``a && b``, ``a || b``; a program whose status is not known is taken to succeed."""
    left, sign, right = node.children[0], source(node.children[1]), node.children[-1]
    status = statement(shell, left)
    if sign == "&&":
        return status if status is False else statement(shell, right)
    if sign == "||":
        return statement(shell, right) if status is False else status
    return statement(shell, right)


def _test(shell: Shell, node: Node) -> Truth:
    if source(node).startswith("(("):
        number = computed(shell, source(node)[2:-2])
        return None if number is None else bool(number)
    return holds(shell, node.named_children[0]) if node.named_children else False


def _if(shell: Shell, node: Node) -> Truth:
    branches: list[tuple[list[Node], list[Node]]] = [([], [])]
    after_then = False
    for child in node.children:
        if child.type in ("elif_clause", "else_clause"):
            inner = child.children
            then = next((place for place, each in enumerate(inner) if each.type == "then"), 0)
            branches.append((list(inner[:then]), list(inner[then:])))
        elif child.type == "then":
            after_then = True
        elif child.is_named:
            branches[0][1 if after_then else 0].append(child)
    for number, (condition, then_part) in enumerate(branches):
        truth = body(shell, condition) if condition else True
        if truth:
            return body(shell, then_part)
        if truth is None:
            return _either_way(shell, [part for _, part in branches[number:]], node, "if", branches[-1][0] != [])
    return True


def _either_way(shell: Shell, parts: list[list[Node]], node: Node, kind: str, may_skip: bool) -> Truth:
    """Follow every branch; a variable that they leave with different values is unknown afterwards."""
    before = dict(shell.variables)
    positional = list(shell.positional)
    ends: list[dict[str, Value]] = [dict(before)] if may_skip else []
    for part in parts:
        shell.variables, shell.positional = dict(before), list(positional)
        try:
            body(shell, part)
        except Leave:
            continue
        ends.append(shell.variables)
    shell.variables, shell.positional = dict(ends[0]) if ends else before, positional
    for name in differing(before, ends) if ends else ():
        what = f"${name} depends on the `{kind}` of line {shell.line(node)}, which runs a program"
        shell.variables[name] = shell.hole(what, f"set {name} without a condition")
    return None


def _for(shell: Shell, node: Node) -> Truth:
    name = source(node.child_by_field_name("variable"))
    inner = node.child_by_field_name("body")
    values = [word for child in node.children_by_field_name("value") for word in words_of(shell, child)]
    if not any(child.type == "in" for child in node.children):
        values = list(shell.positional)
    for value in values[:MAX_TURNS]:
        shell.variables[name] = value
        if _turn(shell, inner):
            break
    return True


def _while(shell: Shell, node: Node) -> Truth:
    inner = node.child_by_field_name("body")
    until = node.children[0].type == "until"
    conditions = [child for child in node.named_children if child != inner]
    for _ in range(MAX_TURNS):
        truth = body(shell, conditions)
        if truth is None:
            break
        if truth == until:
            return True
        if _turn(shell, inner):
            return True
    _lost(shell, node, "loop")
    return None


def _turn(shell: Shell, inner: Node) -> bool:
    """One turn of a loop. Returns: True when it breaks."""
    try:
        body(shell, inner.children)
    except Leave as left:
        if left.kind == "break":
            return True
        if left.kind != "continue":
            raise
    return False


def _lost(shell: Shell, node: Node, kind: str) -> None:
    """Follow a loop whose turns are unknown once; what it changes is unknown afterwards."""
    _either_way(shell, [list((node.child_by_field_name("body") or node).children)], node, kind, may_skip=True)


def _case(shell: Shell, node: Node) -> Truth:
    value = shell.as_tested(text_of(shell, node.child_by_field_name("value")))
    items = [child for child in node.named_children if child.type == "case_item"]
    if value is None:
        return _either_way(shell, [_item_body(item) for item in items], node, "case", may_skip=True)
    for item in items:
        patterns = [text_of(shell, child) for child in item.children_by_field_name("value")]
        if any(fnmatchcase(value, pattern) for pattern in patterns):
            return body(shell, _item_body(item))
    return True


def _item_body(item: Node) -> list[Node]:
    place = next((number for number, child in enumerate(item.children) if child.type == ")"), 0)
    return list(item.children[place + 1 :])
