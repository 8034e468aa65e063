"""Balances of accounts, and statements of one."""

from __future__ import annotations

from .entries import parse, shown


def balances(lines: list[str]) -> dict[str, int]:
    """Sum the cents of every account; accounts whose sum is 0 are left out."""
    found: dict[str, int] = {}
    for line in lines:
        _, account, amount = parse(line)
        found[account] = found.get(account, 0) + amount
    return {account: amount for account, amount in found.items() if amount != 0}


def statement(lines: list[str], account: str, first: str, last: str) -> list[str]:
    """List an account's entries from a first to a last day, both included, by day, with the balance after each."""
    entries = sorted(entry for entry in map(parse, lines) if entry[1] == account)
    balance, written = 0, []
    for day, _, amount in entries:
        balance += amount
        if first <= day and day <= last:
            written.append(f"{day} {shown(amount)} {shown(balance)}")
    return written


def lowest(lines: list[str], account: str) -> int:
    """Return the lowest balance that the account ever has at the end of an entry; 0 without entries."""
    entries = sorted(entry for entry in map(parse, lines) if entry[1] == account)
    balance, found = 0, 0
    for number, (_, _, amount) in enumerate(entries):
        balance += amount
        found = balance if number == 0 else min(found, balance)
    return found
