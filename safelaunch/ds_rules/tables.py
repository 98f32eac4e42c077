"""The keys of DeepSpeed's config, by version.

In the text of `keys.TABLES`, a heading `[path]` begins a block (`.` is the whole config): `model` where a
pydantic model of DeepSpeed refuses unknown keys and wrong values (`model=` since that release),
`optional` where null stands for absent, `open` where more keys are used than those listed.

A line is a key: its name, its kind (see `kinds`, or `{}` for a block of its own), and, as far as they
apply, bounds (`>=0`), `alias=` another name for it, `since=` and `until=` the first and the last release
that has it so, `replaced=` the key it is an old name of, `refused` where DeepSpeed itself stops at a wrong
value although the block is no model, `gone=refused` where later releases stop at the key.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from safelaunch.ds_rules.keys import TABLES

Version = tuple[int, int, int]

OLDEST: Version = (0, 14, 0)
NEWEST: Version = (0, 19, 8)
"""The releases that the tables cover."""

PYDANTIC_2: Version = (0, 15, 0)
"""Up to here the models were of pydantic 1, which cuts fractions off and takes numbers for text."""


@dataclass(frozen=True, slots=True)
class Key:
    """One line of a table; `since` and `until` are inclusive, None is open."""

    name: str
    kind: str
    bounds: tuple[str, ...] = ()
    alias: str | None = None
    since: Version | None = None
    until: Version | None = None
    replaced: str | None = None
    refused: bool = False
    gone_refused: bool = False

    def exists_in(self, version: Version) -> bool:
        return (self.since is None or version >= self.since) and (self.until is None or version <= self.until)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name the key may be written with."""
        return (self.name,) if self.alias is None else (self.name, self.alias)


@dataclass(frozen=True, slots=True)
class Block:
    """The keys of one object of the config.

    `refuses_since` is the first release that refuses unknown keys and wrong values here (a pydantic model),
    None where none does. `optional`: null is taken for absent. `is_open`: other keys are used too.
    """

    path: tuple[str, ...]
    keys: tuple[Key, ...]
    refuses_since: Version | None = None
    optional: bool = False
    is_open: bool = False

    def in_version(self, version: Version) -> dict[str, Key]:
        """Return the keys of a release by each of their names."""
        return {name: key for key in self.keys if key.exists_in(version) for name in key.names}

    def refuses(self, version: Version) -> bool:
        """Tell whether this release refuses unknown keys and wrong values here."""
        return self.refuses_since is not None and version >= self.refuses_since


def version_of(text: str) -> Version | None:
    """Return the first three numbers of a version such as `0.16.9+abc`, or None."""
    numbers = []
    for part in text.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            return None
        numbers.append(int(digits))
    return (numbers[0], numbers[1], numbers[2]) if len(numbers) == 3 else None


def show(version: Version) -> str:
    """Return a version as people write it."""
    return ".".join(map(str, version))


def _key(line: str) -> Key:
    name, kind, *rest = line.split()
    options: dict[str, str] = {}
    bounds = []
    for word in rest:
        if word[0] in "<>":
            bounds.append(word)
        else:
            option, _, value = word.partition("=")
            options[option] = value
    return Key(
        name,
        kind,
        tuple(bounds),
        alias=options.get("alias"),
        since=version_of(options.get("since", "")),
        until=version_of(options.get("until", "")),
        replaced=options.get("replaced"),
        refused="refused" in options,
        gone_refused=options.get("gone") == "refused",
    )


@functools.lru_cache(maxsize=1)
def blocks() -> dict[tuple[str, ...], Block]:
    """Return every block by its path; the root has the empty path."""
    table = {}
    for heading, lines in _sections(TABLES):
        path, *options = heading.split()
        settings = dict(option.partition("=")[::2] for option in options)
        keys = tuple(_key(line) for line in lines)
        parts = () if path == "." else tuple(path.split("."))
        refuses = settings.get("model")
        table[parts] = Block(
            parts,
            keys,
            refuses_since=None if refuses is None else version_of(refuses) or OLDEST,
            optional="optional" in settings,
            is_open="open" in settings,
        )
    return table


def _sections(text: str) -> list[tuple[str, list[str]]]:
    sections: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("["):
            sections.append((line.strip("[]"), []))
        elif line.strip():
            sections[-1][1].append(line)
    return sections
