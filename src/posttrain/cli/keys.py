"""``posttrain keys``: explain the keys of a dialect."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from posttrain.errors import ConfigError, Problem, did_you_mean


def keys(
    dialect: Annotated[str, typer.Argument(help="native, verl, verl@0.2, skyrl, skyrl@2025-08 or roll.")],
    key: Annotated[str | None, typer.Argument(help="A key, or its beginning; by default all keys.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page that make docs writes.")] = False,
) -> None:
    """Explain the keys of a dialect."""
    from posttrain.dialects.explain import ENTRIES, explained, key_row, listed, page
    from posttrain.dialects.ledger import Key

    ledger = find_ledger(dialect)
    rows: list[Key] = list(ledger.rows)
    exact: list[Key] = []
    if key is not None:
        exact = [row for row in rows if row.name == key] or list(
            {row.name: row for name in ENTRIES if (row := ledger.of(name).find(key)) is not None}.values()
        )
        rows = exact or [row for row in rows if row.name.startswith(f"{key}.")]
        if not rows:
            near = ledger.nearest(key)
            fix = f"did you mean {near[0]}?" if near else f"posttrain keys {dialect} lists them"
            raise ConfigError(Problem(f"{dialect} has no key {key}", fix=fix))
    if as_json:
        typer.echo(json.dumps([key_row(row) for row in rows], indent=2, default=str))
    elif markdown:
        typer.echo(page(ledger), nl=False)
    else:
        typer.echo(explained(rows, dialect) if exact or len(rows) <= 3 else listed(rows))


def find_ledger(dialect: str):  # type: ignore[no-untyped-def]
    """Return the key table of a dialect in the named version.

    Raises: ConfigError for an unknown dialect.
    """
    from posttrain.dialects.detect import NAMES, load_dialect
    from posttrain.dialects.native.ledger import native_ledger

    if dialect not in NAMES:
        raise ConfigError(
            Problem(f"there is no dialect {dialect!r} (known: {', '.join(NAMES)})", fix=did_you_mean(dialect, NAMES))
        )
    name, _, version = dialect.partition("@")
    if name == "native":
        return native_ledger()
    ledger = load_dialect(name).ledger
    return ledger.at(version) if version else ledger
