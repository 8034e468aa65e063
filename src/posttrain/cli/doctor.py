"""``posttrain doctor``: report what this machine can run, and how to install the rest. Imports torch only for ``--model``."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated

import typer

# What an optional library is for, by its import name.
PURPOSES = {
    "bitsandbytes": "policy.lora.quantize",
    "bm25s": "the tool search",
    "google.protobuf": "posttrain serve --api tinker",
    "gymnasium": "environments of gymnasium",
    "httpx2": "servers: rewards http and llm_judge, rollout.engine http, vllm, sglang",
    "langdetect": "the reward ifeval",
    "llguidance": "response_format of serve",
    "liger_kernel": "model.liger",
    "math_verify": "the reward math_verify",
    "mcp": "tools of MCP servers",
    "mlflow": "tracking.trackers=[mlflow]",
    "peft": "policy.lora",
    "ray": "several devices and machines",
    "reasoning_gym": "tasks of reasoning-gym",
    "s3fs": "checkpoints in S3",
    "sglang": "rollout.engine=sglang",
    "skyrl_gym": "environments of SkyRL",
    "starlette": "posttrain serve",
    "swanlab": "tracking.trackers=[swanlab]",
    "tensorboard": "tracking.trackers=[tensorboard]",
    "textual": "posttrain show",
    "uvicorn": "posttrain serve",
    "vllm": "rollout.engine=vllm",
    "wandb": "tracking.trackers=[wandb]",
    "zmq": "teachers of verl's recipe GKD",
}


def purpose_of(library: str) -> str:
    """Say what an optional library is for; a training engine's is called like the engine. Empty for an unknown one."""
    from posttrain.registry import TRAIN_ENGINES

    return PURPOSES.get(library) or (f"policy.engine={library}" if library in TRAIN_ENGINES.names() else "")


# Engines that bring a torch of their own: an environment of their own is the way to them.
APART = ("sglang", "vllm")


def fix_lines() -> list[str]:
    """The commands that install what is missing here: one for all optional libraries, one for a compiler."""
    from posttrain.libraries.compilers import find_compiler
    from posttrain.registry import is_installed, optional_libraries

    missing = {extra for library, extra in optional_libraries().items() if not is_installed(library)} - set(APART)
    lines = [f"pip install 'posttrain[{','.join(sorted(missing))}]'"] if missing else []
    return lines + ([] if find_compiler() else ["apt install g++"])


def doctor(
    fix: Annotated[
        bool, typer.Option("--fix", help="Print only the commands that install what is missing; nothing is run.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Only report how the native sampler computes this model: a folder or hub id."),
    ] = None,
) -> None:
    """Report what this machine can run, and how to install what is missing."""
    if fix:
        for line in fix_lines():
            typer.echo(line)
        return
    if model is not None:
        from posttrain.backends.rollout.native.outlook import sampling_outlook
        from posttrain.cli.given_model import check_given
        from posttrain.cli.hub import hub_folder

        check_given(model)
        given = Path(model).expanduser()
        found = str(given) if given.exists() else hub_folder(model, "--model", weights=False)
        typer.echo(f"sampling of {model} by rollout.engine=native on a CPU: {sampling_outlook(found)}")
        return
    from posttrain.cli.machine import accelerator_text, disk_text, installed, memory_text, torch_text
    from posttrain.libraries.compilers import find_compiler
    from posttrain.registry import is_installed, optional_libraries
    from posttrain.sandbox.layers import describe, probe

    typer.echo(f"Python {platform.python_version()}, {platform.system()} {platform.release()}, {platform.machine()}")
    typer.echo(f"{torch_text()}, transformers {installed('transformers') or 'not installed'}")
    typer.echo(accelerator_text())
    typer.echo(f"{os.cpu_count()} processors")
    typer.echo(memory_text())
    folders = {
        "this folder": Path(),
        "hub cache": Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser(),
        "/dev/shm (shared memory of workers)": Path("/dev/shm"),
    }
    for name, folder in folders.items():
        if folder.exists() or not name.startswith("/dev"):
            typer.echo(f"disk, {name}: {disk_text(folder)}")
    typer.echo()
    typer.echo(describe(probe()))
    missing = "not found: sampling on the CPU takes up to 1.8 times as long without one (apt install g++)"
    typer.echo(f"\nC++ compiler: {find_compiler() or missing}")
    typer.echo("\nOptional libraries:")
    libraries = {
        name: (purpose_of(name), f"pip install 'posttrain[{extra}]'") for name, extra in optional_libraries().items()
    }
    for library, (purpose, install) in sorted(libraries.items()):
        needed = f" (for {purpose})" if purpose else ""
        typer.echo(f"  {library:<16}" + ("installed" if is_installed(library) else f"not installed: {install}{needed}"))
