"""Keys of data and environment: where prompts come from, and what scores the responses."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.ledger import ABSENT, Key, mapped

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
        "reward.terms environment.settings",
        "what scores responses, for rows without an env_class of their own: gsm8k, aime, search, lcb, text2sql, "
        "llm_as_a_judge, or a reward of this program; with several turns what is played: an environment of the package "
        "skyrl-gym, or package.module:Class",
        by_rule=True,
        change="gsm8k: the scorer gsm8k, first match; aime: math_dapo with SkyRL's reading of the answer; search; lcb: code; "
        "text2sql, with the columns db_id and data; llm_as_a_judge: llm_judge, with the key in OPENAI_API_KEY",
        note="With generator.max_turns=1 a row's own env_class is not read as a scorer: the run has one. search and text2sql "
        "then score without a retriever or queries. With more turns, and for gsm8k_multi_turn, searchcode and classes of "
        "your own, the package plays (pip install 'posttrain[skyrl-gym]'), and rows name theirs.",
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
    mapped(
        "environment.skyrl_gym.max_env_workers",
        int,
        32,
        "environment.workers",
        "threads that step environments; 0 steps them inline",
        by_rule=True,
        change="processes, one for each environment that lives; not read where generator.max_turns is 1",
        since="2025-08",
    ),
    mapped(
        "environment.skyrl_gym.search.log_requests",
        bool,
        False,
        "environment.settings",
        "search: write every request to the log",
        by_rule=True,
        change="settings.configs.search.log_requests; not read where generator.max_turns is 1",
        since="2025-08",
    ),
    mapped(
        "environment.skyrl_gym.search.search_url",
        str,
        "http://127.0.0.1:8000/retrieve",
        "environment.settings",
        "search: address of the retriever",
        by_rule=True,
        change="settings.configs.search.search_url; not read where generator.max_turns is 1",
        since="2025-08",
    ),
    mapped(
        "environment.skyrl_gym.search.topk",
        int,
        3,
        "environment.settings",
        "search: documents per query",
        by_rule=True,
        change="settings.configs.search.topk; not read where generator.max_turns is 1",
        since="2025-08",
    ),
    mapped(
        "environment.skyrl_gym.search.timeout",
        int | float,
        30,
        "environment.settings",
        "search: limit of a request, in seconds",
        by_rule=True,
        change="settings.configs.search.timeout; not read where generator.max_turns is 1",
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
        change="the scorer that env_class names gets it as its options; with several turns: settings.configs",
    ),
)
