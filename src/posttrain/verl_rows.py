"""Columns of the data that code written for verl reads from its batch, found in its source: nothing is imported."""

from __future__ import annotations

import ast

_BATCH = "non_tensor_batch"  # verl's mapping of columns to arrays of objects
# Columns that a batch has in any case.
USUAL = ("data_source", "reward_model", "extra_info", "uid", "index", "raw_prompt")
# Entries that verl's samplers add to a batch, and no data has: its own managers ask for them with a default
_OF_SAMPLERS = ("reward_scores", "__num_turns__", "tool_extra_fields", "turn_scores", "multi_modal_inputs")


def columns_read(tree: ast.Module) -> list[str]:
    """The further columns that a program reads: ``data.non_tensor_batch["answer"]`` and ``.get("answer")``, also of a variable
    that stands for the batch (``item = data[i].non_tensor_batch``)."""
    batches = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_batch(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        match node:
            case (
                ast.Subscript(value=batch, slice=ast.Constant(value=str(name)))
                | ast.Call(func=ast.Attribute(attr="get", value=batch), args=[ast.Constant(value=str(name)), *_])
            ) if name not in (*USUAL, *_OF_SAMPLERS) and _is_batch(batch, batches):
                found[name] = None
    return list(found)


def _is_batch(node: ast.expr, names: set[str]) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == _BATCH) or (
        isinstance(node, ast.Name) and node.id in names
    )
