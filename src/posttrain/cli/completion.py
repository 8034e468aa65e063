"""Completion in the shell, which typer installs."""

from __future__ import annotations

from typer import _completion_shared

# Completes when the file is loaded, which zsh does at the first Tab; later ones call the function.
_AT_THE_FIRST_TAB = '[[ $zsh_eval_context[-1] == loadautofunc ]] && %(complete_func)s "$@"'


def mend_zsh() -> None:
    """Let the first Tab of a zsh complete: the script of typer (0.29) only defines its function then, so the second one did."""
    scripts = getattr(_completion_shared, "_completion_scripts", {})
    script = scripts.get("zsh", "")
    if script and "loadautofunc" not in script:
        scripts["zsh"] = f"{script.rstrip()}\n\n{_AT_THE_FIRST_TAB}\n"
