"""Chat templates that SkyRL has names for, written here as Jinja: ChatML, which differs in the thoughts of earlier turns and in
the system's message. Source: skyrl_train/generators/utils.py, December 2025."""

from __future__ import annotations

_OPENED = "{{ '<|im_start|>' + message['role'] + '\\n' }}"
_ALL = f"{_OPENED}{{{{ message['content'] + '<|im_end|>\\n' }}}}"
_EARLIER = "message['role'] == 'assistant' and not loop.last and '</think>' in message['content']"
_ANSWER = "message['content'].split('</think>')[-1].lstrip('\\n')"
# The last answer stays whole
_SHORT = f"({_ANSWER} if {_EARLIER} else message['content'])"
_WITHOUT_THOUGHTS = f"{_OPENED}{{{{ {_SHORT} + '<|im_end|>\\n' }}}}"
_WITHOUT_FIRST_SYSTEM = f"{{% if not (loop.first and message['role'] == 'system') %}}{_ALL}{{% endif %}}"


def _conversation(message: str) -> str:
    prompt = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    return f"{{% for message in messages %}}{message}{{% endfor %}}{prompt}"


TEMPLATES = {
    "qwen3_with_thinking": _conversation(_ALL),
    "qwen3_without_thinking": _conversation(_WITHOUT_THOUGHTS),
    "qwen2_5_with_generation_tag_simplified": _conversation(_WITHOUT_FIRST_SYSTEM),
}
