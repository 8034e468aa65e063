"""Accounts and what moves between them."""
