"""The pages of keys in the documentation."""

from __future__ import annotations

import re

from posttrain.dialects.explain import page
from posttrain.dialects.native.ledger import native_ledger


def test_placeholders_in_prose_are_no_tags() -> None:
    """<image> and runs/<name> are shown, in code as they are and elsewhere as &lt;."""
    text = page(native_ledger())
    assert "&lt;image>" in text and "runs/&lt;name>" in text
    assert "<" not in re.sub(r"`[^`]*`", "", text)
