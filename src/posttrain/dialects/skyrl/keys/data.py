"""Keys of data and environment: where prompts come from, and what scores the responses."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned

_ENVIRONMENTS = "environments with settings of their own (multi-turn, tools, judges)"

ROWS: tuple[Key, ...] = (
    mapped(
        "data.train_data",
        list[str] | str,
        ["${oc.env:HOME}/data/gsm8k/train.parquet"],
        "data.train_files",
        "training files (.parquet, .json, .jsonl), concatenated in order",
        by_rule=True,
        change="one name becomes a list of one",
        note="SkyRL's page indents train_data and val_data as if they were top-level keys; both belong below data. "
        "Names on the Hugging Face hub (since September 2025) are planned.",
    ),
    mapped(
        "data.val_data",
        list[str] | str | None,
        ["${oc.env:HOME}/data/gsm8k/validation.parquet"],
        "data.validation_files",
        "files of held-out prompts; empty, null or trainer.eval_interval <= 0: none",
        by_rule=True,
        note="SkyRL's page says every file is evaluated on its own; its code and this program split metrics by the rows' "
        "data_source instead.",
    ),
    mapped(
        "environment.env_class",
        str,
        "gsm8k",
        "reward.terms",
        "what scores responses, for rows without an env_class of their own: gsm8k, aime, search, lcb, text2sql, "
        "llm_as_a_judge, or a reward of this program",
        by_rule=True,
        change="gsm8k: the scorer gsm8k, first match; aime: math_dapo with SkyRL's reading of the answer; search; lcb: code; "
        "text2sql, with the columns db_id and data; llm_as_a_judge: llm_judge, with the key in OPENAI_API_KEY",
        note="A row's own env_class is not read as a scorer: the run has one. search and text2sql score conversations of one "
        "turn (generator.max_turns=1), without a retriever or queries on the way. Other environments are planned.",
    ),
    mapped(
        "environment.skyrl_gym.text2sql.db_path",
        str,
        "/home/ray/default/sql_data",
        "reward.terms",
        "folder of the SQLite databases of the text2sql environment",
        by_rule=True,
        change="option db_path of the reward text2sql",
    ),
    ignored(
        "environment.skyrl_gym.max_env_workers",
        int,
        32,
        "scorers run in worker processes of this program's own",
        "threads that step environments; 0 steps them inline",
        since="2025-08",
    ),
    planned(
        "environment.skyrl_gym.search.log_requests",
        bool,
        False,
        _ENVIRONMENTS,
        "search: write every request to the log",
        since="2025-08",
    ),
    planned(
        "environment.skyrl_gym.search.search_url",
        str,
        "http://127.0.0.1:8000/retrieve",
        _ENVIRONMENTS,
        "search: address of the retriever",
        since="2025-08",
    ),
    planned(
        "environment.skyrl_gym.search.topk",
        int,
        3,
        _ENVIRONMENTS,
        "search: documents per query",
        since="2025-08",
    ),
    planned(
        "environment.skyrl_gym.search.timeout",
        int | float,
        30,
        _ENVIRONMENTS,
        "search: limit of a request, in seconds",
        since="2025-08",
    ),
    mapped(
        "environment.skyrl_gym.llm_as_a_judge.model",
        str,
        "gpt-4o-mini",
        "reward.terms",
        "judge: name of the judging model",
        by_rule=True,
        change="option model of the reward llm_judge",
        since="2025-08",
    ),
    mapped(
        "environment.skyrl_gym.llm_as_a_judge.base_url",
        str | None,
        None,
        "reward.terms",
        "judge: address of the server",
        by_rule=True,
        change="option base_url of the reward llm_judge; null: OpenAI's",
        since="2025-08",
    ),
    mapped(
        "environment.skyrl_gym.*.**",
        Any,
        ABSENT,
        "reward.terms",
        "what the environment of that name receives as env_config",
        by_rule=True,
        change="the scorer that env_class names gets it as its options",
    ),
)
