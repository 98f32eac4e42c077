"""Small parts that every kind of channel needs: lines out of chunks, and a bounded tail of stderr."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from safelaunch.transport.base import STDERR_KEPT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHUNK = 65_536
"""Bytes read or written at a time."""


def split_lines(read: Callable[[], bytes]) -> Iterator[bytes]:
    """Yield lines without their newline from chunks, and an unfinished last one.

    `read` returns b"" at the end. A line of any length costs time in proportion to it, not to its square.
    """
    pieces: list[bytes] = []
    while chunk := read():
        first, *rest = chunk.split(b"\n")
        pieces.append(first)
        if rest:
            yield b"".join(pieces)
            yield from rest[:-1]
            pieces = [rest[-1]]
    if last := b"".join(pieces):
        yield last


class Tail:
    """The last STDERR_KEPT bytes of a stream; safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept = bytearray()

    def feed(self, data: bytes) -> None:
        with self._lock:
            self._kept += data
            # Trimming at twice the size keeps the cost of a chatty stream proportional to what it says.
            if len(self._kept) > 2 * STDERR_KEPT:
                del self._kept[:-STDERR_KEPT]

    def bytes(self) -> bytes:
        with self._lock:
            return bytes(self._kept[-STDERR_KEPT:])
