"""Conversations of programs outside the run as its episodes.

program ──HTTP──▶ http.py ──▶ host.py (an EnvHost) ──▶ places.py: which conversation is which episode of which group
"""
