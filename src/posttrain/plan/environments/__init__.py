"""Checks of environments whose settings name programs, files, servers or code of the user's: a file each, named as in ``envs``.

Each registers a function (settings, field) -> problems, which starts and imports nothing that the settings name. An
environment without a file here is checked by building it: building the games costs nothing, and imports only their library.
"""
