"""Read JSON and Hjson as DeepSpeed does, and remember where each key stands.

DeepSpeed reads its config with the hjson library, which tells no positions. The scalars and key names are
left to that library here too, so that they cannot be read differently; only objects and arrays are walked
by us, through the two hooks that its decoder has for them.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hjson import decoder as hjson_decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

KeyPath = tuple[str, ...]
"""Keys from the root to a value; an array's index is written as its decimal digits."""


# How hjson's messages begin, and what they mean to somebody who does not know its grammar.
_REASONS = (
    ("Found a punctuator", "a value is missing here"),
    ("Expecting value", "a value is missing here"),
    ("Expecting ':'", "a ':' is missing after a key"),
    ("Found whitespace in your key name", "a key with a blank in it needs quotes"),
    ("Found ':' but no key name", "a key is missing before ':'"),
    ("Found '", "a key is missing here"),
    ("Bad key name", "the file ends within an object: a '}' is missing"),
    ("End of input while parsing an array", "the file ends within a list: a ']' is missing"),
    ("Extra data", "more text follows the closing '}'"),
    ("Unterminated string", "a string is not closed"),
    ("Bad multiline string", "a ''' string is not closed"),
    ("Invalid control character", "a string holds a line break or another control character"),
    ("Invalid", "a string holds a wrong escape sequence"),
)


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a text; both count from 1, columns in characters."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A key given again in one object."""

    path: KeyPath
    first: Place
    again: Place


@dataclass(frozen=True, slots=True)
class Document:
    """A text's value, the place of every key in it, and the keys given more than once.

    Of a key given twice, value and place are those of the last.
    """

    value: Any
    places: Mapping[KeyPath, Place]
    duplicates: tuple[Duplicate, ...] = ()


class UnreadableError(ValueError):
    """The text is no Hjson; `reason` says why, `place` where."""

    def __init__(self, reason: str, place: Place) -> None:
        super().__init__(f"{reason} (line {place.line}, column {place.column})")
        self.reason = reason
        self.place = place


def read(text: str) -> Document:
    """Read a text whose line ends are newlines only.

    Raises:
        UnreadableError: hjson cannot read it, for whatever reason.

    """
    reader = _Reader()
    places = _Lines(text)
    try:
        value = reader.decode(text)
    except hjson_decoder.HjsonDecodeError as error:
        reason = next((plain for start, plain in _REASONS if error.msg.startswith(start)), str(error.msg))
        # Of a control character hjson tells the place behind it.
        offset = error.pos - error.msg.startswith("Invalid control character")
        raise UnreadableError(reason, places.at(offset)) from error
    except RecursionError as error:
        raise UnreadableError("objects or lists are nested too deeply", places.at(reader.last)) from error
    except IndexError as error:
        # hjson runs off the end of a comment or a ''' string that is never closed.
        raise UnreadableError("a comment or string is not closed", places.at(reader.last)) from error
    except (OverflowError, ValueError) as error:
        raise UnreadableError(f"a number cannot be read: {error}", places.at(reader.last)) from error
    return Document(
        value,
        {path: places.at(offset) for path, offset in reader.keys.items()},
        tuple(
            Duplicate(path, places.at(first), places.at(again)) for path, first, again in reader.duplicates
        ),
    )


class _Lines:
    """Turns an offset into line and column."""

    def __init__(self, text: str) -> None:
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def at(self, offset: int) -> Place:
        line = bisect.bisect_right(self._starts, offset)
        return Place(line, offset - self._starts[line - 1] + 1)


class _Reader(hjson_decoder.HjsonDecoder):  # type: ignore[misc]  # the library has no types
    """hjson's decoder with its object and array readers exchanged; `last` is the offset read last."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[KeyPath, int] = {}
        self.duplicates: list[tuple[KeyPath, int, int]] = []
        self.last = 0
        self._path: list[str] = []
        self.parse_object = self._object
        self.parse_array = self._array
        self.scan_once, self.scan_object_once = hjson_decoder.make_scanner(self)

    def _object(
        self,
        state: tuple[str, int],
        encoding: str,
        strict: bool,
        scan: Callable[[str, int], tuple[Any, int]],
        _hook: object,
        _pairs_hook: object,
        _memo: object,
        without_braces: bool = False,
    ) -> tuple[dict[str, Any], int]:
        text, end = state
        result: dict[str, Any] = {}
        mine: dict[str, int] = {}
        character, end = hjson_decoder.getNext(text, end)
        if not without_braces and character == "}":
            return result, end + 1
        while True:
            self.last = end
            start = end
            key, end = hjson_decoder.scanKeyName(text, end, encoding, strict)
            character, end = hjson_decoder.getNext(text, end)
            if character != ":":
                raise hjson_decoder.HjsonDecodeError("Expecting ':' delimiter", text, end)
            _, end = hjson_decoder.getNext(text, end + 1)
            result[key], end = self._value(scan, text, end, key)
            path = (*self._path, key)
            if key in mine:
                self.duplicates.append((path, mine[key], start))
            self.keys[path] = mine[key] = start
            character, end = self._after_value(text, end)
            if character == ("" if without_braces else "}"):
                return result, end + (not without_braces)

    def _array(
        self, state: tuple[str, int], scan: Callable[[str, int], tuple[Any, int]]
    ) -> tuple[list[Any], int]:
        text, end = state
        values: list[Any] = []
        character, end = hjson_decoder.getNext(text, end)
        if character == "]":
            return values, end + 1
        if character == "":
            raise hjson_decoder.HjsonDecodeError("End of input while parsing an array", text, end)
        while True:
            self.last = end
            value, end = self._value(scan, text, end, str(len(values)))
            values.append(value)
            character, end = self._after_value(text, end)
            if character == "]":
                return values, end + 1

    def _value(
        self, scan: Callable[[str, int], tuple[Any, int]], text: str, end: int, step: str
    ) -> tuple[Any, int]:
        self._path.append(step)
        try:
            return scan(text, end)
        finally:
            self._path.pop()

    @staticmethod
    def _after_value(text: str, end: int) -> tuple[str, int]:
        """Skip blanks, comments and one comma; a comma may be missing or the last thing in its list."""
        character, end = hjson_decoder.getNext(text, end)
        if character == ",":
            character, end = hjson_decoder.getNext(text, end + 1)
        return character, end
