"""Names of sections that a dialect reads under another name, put back into everything that is reported about them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from posttrain.dialects.loaded import Ignored, LoadedConfig, UserWords
from posttrain.errors import Problem


def in_their_names(loaded: LoadedConfig[Any], names: Mapping[str, str]) -> LoadedConfig[Any]:
    """The same with the sections' own names in every message. Args: ``names``, by the name under which the dialect read each."""
    if not names:
        return loaded
    theirs = _Names(names)
    return replace(
        loaded,
        warnings=tuple(map(theirs.text, loaded.warnings)),
        problems=theirs.problems(loaded.problems),
        ignored=tuple(map(theirs.ignored, loaded.ignored)),
        unsupported=theirs.problems(loaded.unsupported),
        changes=tuple(map(theirs.text, loaded.changes)),
        slips=theirs.problems(loaded.slips),
        words=None if loaded.words is None else _TheirWords(words=loaded.words, names=theirs),
    )


def problems_in_their_names(problems: Iterable[Problem], names: Mapping[str, str]) -> list[Problem]:
    """The problems with the sections' own names."""
    return list(_Names(names).problems(problems)) if names else list(problems)


class _Names:
    """Replaces the first part of keys, in texts and alone."""

    def __init__(self, names: Mapping[str, str]):
        self._names = names
        self._section = re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, names))})(?![\w-])")

    def text(self, text: str) -> str:
        return self._section.sub(lambda match: self._names[match[0]], text)

    def problems(self, problems: Iterable[Problem]) -> tuple[Problem, ...]:
        return tuple(
            replace(
                one,
                what=self.text(one.what),
                fix=self.text(one.fix),
                where=self.text(one.where),
                field=self.text(one.field),
            )
            for one in problems
        )

    def ignored(self, one: Ignored) -> Ignored:
        return replace(one, key=self.text(one.key), reason=self.text(one.reason), where=self.text(one.where))


@dataclass(frozen=True, slots=True, kw_only=True)
class _TheirWords:
    """The words of a dialect, with the sections' own names."""

    words: UserWords
    names: _Names

    def key(self, field: str) -> str:
        return self.names.text(self.words.key(field))

    def text(self, text: str) -> str:
        return self.names.text(self.words.text(text))

    def counts(self, field: str) -> list[str]:
        return [self.names.text(text) for text in self.words.counts(field)]

    def value(self, key: str) -> Any:
        return self.words.value(key)

    def translate(self, problems: Iterable[Problem]) -> list[Problem]:
        return list(self.names.problems(self.words.translate(problems)))
