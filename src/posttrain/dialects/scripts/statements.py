"""Read a script statement by statement: keep its variables, follow its conditions, collect its commands. Nothing is run."""

from __future__ import annotations

import re

from posttrain.dialects.scripts import control
from posttrain.dialects.scripts.arithmetic import computed
from posttrain.dialects.scripts.assignments import assign, declare, unset
from posttrain.dialects.scripts.commands import command, name_of_program
from posttrain.dialects.scripts.conditions import Truth, holds
from posttrain.dialects.scripts.expansion import source, text_of, words_of
from posttrain.dialects.scripts.state import Node, Shell


def statement(shell: Shell, node: Node) -> Truth:
    """Follow one statement. Returns: whether it succeeds; None where that is not known."""
    shell.count_statement(node)
    match node.type:
        case "command":
            return command(shell, node)
        case "variable_assignment":
            assign(shell, node)
        case "variable_assignments":
            for child in node.named_children:
                assign(shell, child)
        case "declaration_command":
            declare(shell, node)
        case "unset_command":
            unset(shell, [word for child in node.named_children for word in words_of(shell, child)])
        case "redirected_statement":
            return _redirected(shell, node)
        case "pipeline":
            return _pipeline(shell, node)
        case "list":
            return control.follow_list(shell, node)
        case "negated_command":
            inner = statement(shell, node.named_children[0])
            return None if inner is None else not inner
        case "test_command":
            return _test(shell, node)
        case "compound_statement" if source(node).startswith("(("):
            number = computed(shell, source(node)[2:-2])
            return None if number is None else bool(number)
        case "compound_statement" | "do_group" | "program" | "else_clause":
            return control.body(shell, node.children)
        case "subshell":
            ended: list[Truth] = []
            with control.subshell(shell):
                ended.append(control.body(shell, node.children))
            return ended[0] if ended else None
        case "if_statement":
            return control.follow_if(shell, node)
        case "for_statement":
            return control.follow_for(shell, node)
        case "while_statement":
            return control.follow_while(shell, node)
        case "c_style_for_statement":
            return control.follow_counting(shell, node)
        case "case_statement":
            return control.follow_case(shell, node)
        case "function_definition":
            shell.functions[source(node.child_by_field_name("name"))] = node.child_by_field_name("body")
        case "ERROR":
            control.body(shell, node.children)
    return True


def _redirected(shell: Shell, node: Node) -> Truth:
    kept, shell.output = shell.output, shell.output if shell.output is None else []
    inner = node.child_by_field_name("body")
    piped = shell.piped
    shell.piped = next((text for child in node.children if (text := _here_document(child)) is not None), piped)
    status = statement(shell, inner) if inner is not None else True
    shell.piped = piped
    captured, shell.output = shell.output, kept
    away = [child for child in node.children if child.type == "file_redirect" and re.match(r"1?>|&>", source(child))]
    for child in away:
        target = child.child_by_field_name("destination")
        name = text_of(shell, target) if target is not None else ""
        if shell.as_tested(name) and not name.startswith("/dev/"):
            shell.written[shell.path(name)] = shell.line(node)
    if kept is not None and not away:
        kept.extend(captured or [])
    return status


def _here_document(node: Node) -> str | None:
    """The text of ``<<EOF`` that a shell passes as it is; None for another redirection, and for one with expansions."""
    if node.type != "heredoc_redirect":
        return None
    start = next((source(child) for child in node.children if child.type == "heredoc_start"), "")
    body = next((source(child) for child in node.children if child.type == "heredoc_body"), "")
    quoted = start[:1] in ("'", '"', "\\")
    return body if quoted or not re.search(r"[$`\\]", body) else None


def _pipeline(shell: Shell, node: Node) -> Truth:
    """Read commands whose output is the next one's input; that of the last is known where all are programs that are read."""
    kept, given = shell.output, shell.piped
    status: Truth = None
    try:
        for child in node.named_children:
            shell.output = []
            with control.subshell(shell):
                status = statement(shell, child)
            shell.piped = "".join(shell.output)
        said = shell.piped or ""
    finally:
        shell.output, shell.piped = kept, given
    known = status is not None and shell.as_tested(said) == said
    if kept is not None and known:
        kept.append(said)
    elif kept is not None:
        what = f"{source(node)} of line {shell.line(node)} is the output of a program, and reading a script runs none"
        last = source(node.named_children[-1]).split()
        fix = "write its value into the script, or set the key behind the script: KEY=VALUE"
        kept.append(shell.hole(what, fix, program=name_of_program(last[0] if last else "")))
    return status if known else None


def _test(shell: Shell, node: Node) -> Truth:
    if source(node).startswith("(("):
        number = computed(shell, source(node)[2:-2])
        return None if number is None else bool(number)
    return holds(shell, node.named_children[0]) if node.named_children else False
