"""Conversations of programs outside the run as its episodes.

program ──HTTP──▶ http.py ──▶ host.py (an EnvHost) ──▶ places.py: which conversation is which episode of which group
                                  │               names.py: the conversation of a name, journal.py: the same on the disk
                                  ▼
                               scores.py ──▶ environments of the run that set tasks and score conversations
"""
