"""Third-party libraries that more than one folder needs: one adapter file each, below all who use it.

A backend's library has its adapter in the backend's file. What lives here is shared by folders that stand side by side
(``data`` and ``rewards``), so by the rule of the floors it sinks below them. compilers.py, folders.py and git_lfs.py are there
for the same reason. Imports only errors and registry.
"""
