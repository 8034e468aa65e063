"""Chat templates of the prompts, by ROLL's names."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reading import Reader
from posttrain.dialects.roll.rules.look import text_none
from posttrain.errors import did_you_mean

_TURN = "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
_ANSWER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = f"{{% for message in messages %}}{_TURN}{{% endfor %}}{_ANSWER}"
# Templates of ROLL as settings here: those that the tokenizer's own renders, and Jinja texts in its place.
TEMPLATES: dict[str, dict[str, Any]] = {
    "native": {},
    "qwen2_5": {},
    "qwen3": {"data.chat_template_options.enable_thinking": True},
    "chatml": {"model.chat_template": CHATML},
    "empty": {"model.chat_template": CHATML},  # ROLL's takes a single user message, which is the same text
}
_PLANNED = ("base", "longCOT_qwen2.5", "longcot_V3", "qwen2_5_dpo")


def template(keys: Reader, section: str = "actor_train") -> dict[str, Any]:
    """Return the settings of the template that global_template or data_args.template names."""
    own = f"{section}.data_args.template"
    key = "global_template" if text_none(keys["global_template"]) else own
    name = keys[key]
    if key == "global_template":
        keys.ignore(own, "global_template goes before it")
    if name in TEMPLATES:
        return TEMPLATES[name]
    if _of_pictures(name):
        keys.ignore(key, "prompts with images are rendered by the model's own template, in ROLL too")
        return {}
    if name in _PLANNED:
        keys.plan_only(f"{key}={name} is planned: a template with texts of its own", key=key,
                       fix=f"use {key}=native, with a Jinja file in posttrain.model.chat_template_file if need be")  # fmt: skip
        return {}
    every = (*TEMPLATES, *_PLANNED)
    keys.problem(f"there is no template {name!r} (known: {', '.join(every)})", key=key,
                 fix=did_you_mean(name, every, listed=True))  # fmt: skip
    return {}


def _of_pictures(name: str) -> bool:
    """Tell the names that examples of ROLL's vision pipelines write, where no template is looked up."""
    return "-vl" in name or "_vl" in name or "omni" in name


def of_episodes(keys: Reader) -> dict[str, Any]:
    """Return the template settings of agentic pipelines, which call the tokenizer's own template without thinking."""
    for key in ("global_template", "actor_train.data_args.template", "tag_to_template"):
        keys.ignore(key, "episodes are rendered by the tokenizer's own template, in ROLL too")
    return {"data.chat_template_options.enable_thinking": False}
