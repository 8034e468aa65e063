"""Third-party libraries used by several folders: one adapter file each, below all their users.

A library with one user has its adapter there. The adapters here are shared by folders that must not import each other
(``data`` and ``rewards``). compilers.py, folders.py and git_lfs.py are here for the same reason. Imports only errors and
registry.
"""
