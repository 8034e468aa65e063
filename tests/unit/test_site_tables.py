"""Tables of the site: where names break, and which tables a phone stacks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_tables", ROOT / "tools/site_tables.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(*cells: str) -> str:
    head = "<thead>\n<tr>\n<th>key</th>\n<th>meaning</th>\n</tr>\n</thead>"
    return f"<table>\n{head}\n<tbody>\n<tr>\n{''.join(f'<td>{cell}</td>' for cell in cells)}\n</tr>\n</tbody>\n</table>"


def test_names_break_behind_dots_and_underscores_only(hook: ModuleType) -> None:
    made = hook.on_page_content(table("<code>model.master_dtype</code>", "<code>a &lt; b</code> is_small"))
    assert "<code>model.<wbr>master_<wbr>dtype</code>" in made
    assert "<code>a &lt; b</code> is_small" in made and 'class="stacked"' not in made
    assert hook.on_page_content("<p><code>model.path</code></p>") == "<p><code>model.path</code></p>"


def test_tables_of_sentences_are_stacked_with_their_columns_names(hook: ModuleType) -> None:
    made = hook.on_page_content(table("<code>x</code>", "A sentence. " * 6))
    assert '<table class="stacked">' in made
    assert '<td data-label="key"><code>x</code></td><td data-label="meaning">A sentence.' in made
    assert "<th>meaning</th>" in made


def test_the_site_loads_its_own_files_only() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    own = [*site["extra_css"], *site["extra"]["polyfills"]]
    assert own == ["site.css", "iframe-worker.js"] and all((ROOT / "docs" / name).is_file() for name in own)
    assert "offline" in site["plugins"]  # its search works in pages that are opened from the disk
    assert "MIT License" in (ROOT / "docs/iframe-worker.js").read_text(encoding="utf-8")[:200]
