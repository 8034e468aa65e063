"""Chat templates of the prompts, by ROLL's names."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
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
_OF_PAIRS = "qwen2_5_dpo"  # the tokenizer's own, without the beginning of an answer
_PLANNED = ("base", "longCOT_qwen2.5", "longcot_V3", _OF_PAIRS)


def template(keys: Reader, section: str = "actor_train", *, pairs: bool = False) -> dict[str, Any]:
    """Return the settings of the template that global_template or data_args.template names, of prompts or of whole ``pairs``."""
    own = f"{section}.data_args.template"
    key = "global_template" if text_none(keys["global_template"]) else own
    name = keys[key]
    if key == "global_template":
        keys.ignore(own, "global_template goes before it")
    tags = _of_tags(keys)
    if name in TEMPLATES or (pairs and name == _OF_PAIRS):
        return TEMPLATES.get(name, {}) | tags
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


def _of_tags(keys: Reader) -> dict[str, Any]:
    """Return the options of tag_to_template, in place of the run's for prompts of a tag."""
    if not keys.ledger.find("tag_to_template"):
        return {}
    found: dict[str, dict[str, Any]] = {}
    for tag, name in (keys["tag_to_template"] or {}).items():
        key = f"tag_to_template.{tag}"
        if name in _PLANNED:
            keys.plan_only(f"{key}={name} is planned: a template with texts of its own", key=key, fix="use native")
        elif name not in TEMPLATES:
            keys.problem(
                f"there is no template {name!r}", key=key, fix=did_you_mean(str(name), (*TEMPLATES, *_PLANNED))
            )
        else:
            settings = TEMPLATES[name]
            text = settings.get("model.chat_template")
            thinking = settings.get("data.chat_template_options.enable_thinking")
            found[tag] = {"chat_template": text} if text else {} if thinking is None else {"enable_thinking": thinking}
    whole = TEMPLATES.get(keys["global_template"] or keys["actor_train.data_args.template"], {}).get(
        "model.chat_template"
    )
    if whole is not None and any("chat_template" not in options for options in found.values()):
        keys.plan_only(
            "tag_to_template with the tokenizer's own template for a tag, and another for the rest, is planned",
            key="tag_to_template",
            fix="name the tokenizer's own for the rest, and the other for its tags",
        )
    return {"data.source_template_options": found} if found else {}


def _of_pictures(name: str) -> bool:
    """Tell the names that examples of ROLL's vision pipelines write, where no template is looked up."""
    return "-vl" in name or "_vl" in name or "omni" in name


def of_episodes(keys: Reader) -> dict[str, Any]:
    """Return the template settings of agentic pipelines, which call the tokenizer's own template without thinking."""
    for key in ("global_template", "actor_train.data_args.template", "tag_to_template"):
        keys.ignore(key, "episodes are rendered by the tokenizer's own template, in ROLL too")
    return {"data.chat_template_options.enable_thinking": False}
