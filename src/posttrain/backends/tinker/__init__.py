"""A server with Tinker's API: clients train low-rank adapters of their own over one base model, with loops of their own.

``app`` answers HTTP and turns requests into jobs; ``worker`` runs them, one at a time; ``adapters``, ``training`` and
``sampling`` compute; ``store`` keeps what is saved; ``messages`` and ``requests`` read and write what clients send.
"""
