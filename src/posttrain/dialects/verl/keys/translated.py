"""Keys of the Chinese edition of verl's page that verl does not have: its evaluation and SFT blocks were translated with
their keys, and one block was made up. Whoever copies them is shown the real keys."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.ledger import ABSENT, Key, refused

_TRANSLATED = {
    "数据.路径": "data.path",
    "数据.提示键": "data.prompt_key",
    "数据.响应键": "data.response_key",
    "数据.数据源键": "data.data_source_key",
    "数据.奖励模型键": "data.reward_model_key",
    "自定义奖励函数.路径": "custom_reward_function.path",
    "自定义奖励函数.名称": "custom_reward_function.name",
    "优化器配置.学习率": "optim.lr",
    "优化器配置.权重衰减": "optim.weight_decay",
    "优化器配置.热身步数比例": "optim.warmup_steps_ratio",
    "优化器配置.梯度裁剪": "optim.clip_grad",
    "优化器配置.学习率调度器": "optim.lr_scheduler",
}
_MADE_UP = {
    "evaluation.dataset": "the file is data.path",
    "evaluation.metrics": "the scorer is custom_reward_function.path and .name",
    "evaluation.frequency": "an evaluation runs once, when it is started",
}


def _rows(entry: str) -> tuple[Key, ...]:
    return (
        *(
            refused(
                name,
                Any,
                ABSENT,
                f"verl has no such key, its page was translated with the keys in it; the key is {key}",
                f"{key}, translated",
                off=(),
                entry=entry,
            )
            for name, key in _TRANSLATED.items()
        ),
        *(
            refused(
                name,
                Any,
                ABSENT,
                f"verl has no such key, the translated page made it up; {what}. The keys of evaluation.yaml are data.path, "
                "data.prompt_key, data.response_key, data.data_source_key, data.reward_model_key, "
                "custom_reward_function.path and custom_reward_function.name",
                "made up by the translated page",
                entry=entry,
            )
            for name, what in _MADE_UP.items()
        ),
    )


ROWS: tuple[Key, ...] = tuple(row for entry in ("train", "sft", "evaluate", "generate") for row in _rows(entry))
