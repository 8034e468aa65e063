"""The answer of ``posttrain plan --fit GIB``: how a run fits into one device."""

from __future__ import annotations

from pathlib import Path

from posttrain.config import RunConfig
from posttrain.dialects.loaded import LoadedConfig
from posttrain.errors import ConfigError, Problem
from posttrain.plan.fit import GIB, RESERVE, Fit, fits
from posttrain.plan.model_shape import NEEDED
from posttrain.plan.rounding import unroundable

ASSUMED = (
    "one device that does everything; bfloat16 compute; Adam; activations as in arXiv:2205.05198; the sampler shares the",
    "policy's weights where its engine can; responses as long as allowed. Good to tell 10 GiB from 20, not 10 from 11. With",
    "QLoRA the native sampler unpacks the 4-bit weights while it samples; rollout.engine=hf does not, and is slower.",
)


def fit_text(loaded: LoadedConfig[RunConfig], gib: float) -> str:
    """Write a line per method, and the overrides of the most exact one that fits.

    Raises: ConfigError for a model whose shape is not known, or another configuration than one of reinforcement learning.
    """
    if loaded.entry != "train":
        raise ConfigError(Problem(f"--fit is for posttrain train; this is a configuration of posttrain {loaded.entry}"))
    config = loaded.config
    found = fits(config, gib)
    if not found:
        path, fix = config.model.path, "name a local model folder"
        what = f"the memory of {path} is not known: its config.json is not here"
        if (Path(path).expanduser() / "config.json").is_file():
            what = f"the memory of {path} is not known: its config.json lacks one of {', '.join(NEEDED)} as a number"
            fix = "estimates are for decoders whose layers are alike"
        raise ConfigError(Problem(what, fix=fix, field="model.path"))
    response = config.rollout.max_response_tokens
    lines = [f"{gib:g} GiB, of which {1 - RESERVE:.0%} are used; prompts up to {config.data.max_prompt_tokens} tokens"]
    lines += [f"  {each.method:<58} {_sizes(each, response)}" for each in found]
    best = next((each for each in found if each.settings), None)
    if best is None:
        lines += [
            "nothing fits: shorten rollout.max_response_tokens or data.max_prompt_tokens, or take a smaller model"
        ]
    else:
        lines += [f"add, for {best.method}:", *(f"  {each}" for each in best.settings)]
    if reason := unroundable(config.model.path):
        lines.append(f"without QLoRA: the model {reason}")
    return "\n".join([*lines, "", "assumed: " + "\n  ".join(ASSUMED)])


def _sizes(fit: Fit, response: int) -> str:
    if fit.sequences is None:
        return f"does not fit: at least {fit.smallest / GIB:.1f} GiB"
    return (
        f"micro-batches of {fit.sequences} with responses of {response} tokens, {fit.sampled} sampled at once; "
        f"responses up to {fit.response_tokens} tokens one by one"
    )
