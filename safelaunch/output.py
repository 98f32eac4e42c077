"""What the ranks print: to our stdout and stderr line by line, and to files of the run directory."""

from __future__ import annotations

import contextlib
import os
import re
from typing import IO, TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable

_HEADER = b"Traceback (most recent call last):"
_NUMBER = re.compile(rb"\d+")
HELD_LINES = 400
"""Lines of one traceback that are held back for comparison at most; a longer one is printed as it comes."""


LONGEST_PART = 65_536
"""Bytes of a line without an end that are kept before they are printed as they are."""
_LAUNCHER, _OURS = -1, -2
"""Sources beside the ranks: node launchers, and our own words."""


class LineMerger:
    """Lets many sources share one stream without mixing within a line.

    A carriage return ends a piece too, so that progress bars move.
    """

    def __init__(self, stream: BinaryIO) -> None:
        """Write to a binary stream; a closed one (`| head`) is silently given up."""
        self._stream: BinaryIO | None = stream
        self._parts: dict[int, bytes] = {}
        self._waiting: dict[int, bytes] = {}
        self._open_line_of: int | None = None

    def feed(self, source: int, data: bytes) -> None:
        """Take output of a source, and print its finished lines."""
        data = self._parts.pop(source, b"") + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > LONGEST_PART:
            end = len(data)
        if end < len(data):
            self._parts[source] = data[end:]
        if end:
            self._write(source, data[:end])

    def idle(self) -> None:
        """Print unfinished lines that have not grown since the last call: dots, a prompt."""
        for source, part in self._waiting.items():
            if self._parts.get(source) == part:
                self._write(source, self._parts.pop(source))
        self._waiting = dict(self._parts)

    def flush(self, *, end_line: bool) -> None:
        """Print unfinished lines, since nothing more comes; `end_line` makes room for our own words."""
        for source in list(self._parts):
            self._write(source, self._parts.pop(source))
        if end_line and self._open_line_of is not None:
            self._write(_OURS, b"")

    def _write(self, source: int, data: bytes) -> None:
        if self._stream is None:
            return
        if self._open_line_of not in (None, source):
            data = b"\n" + data
        if data:
            self._open_line_of = None if data.endswith(b"\n") else source
            try:
                self._stream.write(data)
                self._stream.flush()
            except (BrokenPipeError, ValueError):
                self._stream = None


class TracebackFold:
    """Passes a rank's stderr on, but one traceback that several ranks print is printed once.

    Two are one if their frames are, and their errors but for the numbers in them.
    """

    def __init__(self, emit: Callable[[int, bytes], None]) -> None:
        """Hand lines to `emit(rank, data)`."""
        self._emit = emit
        self._held: dict[int, list[bytes]] = {}
        self._tails: dict[int, bytes] = {}
        self._printed_by: dict[bytes, int] = {}
        self.repeats: dict[int, list[int]] = {}

    def feed(self, rank: int, data: bytes) -> None:
        """Take what a rank wrote to stderr."""
        lines = (self._tails.pop(rank, b"") + data).splitlines(keepends=True)
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            self._tails[rank] = lines.pop()
        for line in lines:
            self._line(rank, line)
        if self._tails.get(rank) and rank not in self._held and not _may_begin(self._tails[rank]):
            self._emit(rank, self._tails.pop(rank))

    def flush(self) -> None:
        """Let go of everything that is held back."""
        for rank in [*self._held, *self._tails]:
            held = b"".join(self._held.pop(rank, [])) + self._tails.pop(rank, b"")
            if held:
                self._emit(rank, held)

    def _line(self, rank: int, line: bytes) -> None:
        held = self._held.get(rank)
        if held is None:
            if line.rstrip().endswith(_HEADER):
                self._held[rank] = [line]
            else:
                self._emit(rank, line)
            return
        held.append(line)
        indent = len(held[0].rstrip()) - len(_HEADER)
        body = line[indent:]
        if body.strip() and not body.startswith(b" "):
            self._complete(rank, b"".join(self._held.pop(rank)))
        elif len(held) > HELD_LINES:
            self._emit(rank, b"".join(self._held.pop(rank)))

    def _complete(self, rank: int, block: bytes) -> None:
        # "[rank3]: " is what torch puts before each line of an uncaught exception.
        frames, end, error = block.replace(b"[rank%d]: " % rank, b"").rstrip(b"\r\n").rpartition(b"\n")
        # Ports, addresses and ranks make no other error of it.
        key = frames + end + _NUMBER.sub(b"0", error)
        first = self._printed_by.setdefault(key, rank)
        if first == rank:
            self._emit(rank, block)
        else:
            self.repeats.setdefault(first, []).append(rank)


def _may_begin(tail: bytes) -> bool:
    """Tell whether an unfinished line could still become the first line of a traceback."""
    return b"Trace" in tail or _HEADER.startswith(tail.lstrip()) or tail.startswith(b"[rank")


class RunOutput:
    """Everything the job prints: raw into one file a source, merged to the terminal."""

    def __init__(self, directory: str, stdout: BinaryIO, stderr: BinaryIO, *, echo_launcher: bool) -> None:
        """Write files under `directory`; `echo_launcher` shows node launchers' own words too."""
        self._directory = directory
        self._files: dict[str, IO[bytes]] = {}
        self._out = LineMerger(stdout)
        self._err = LineMerger(stderr)
        self._fold = TracebackFold(self._err.feed)
        self._echo_launcher = echo_launcher

    def feed(self, host: str, rank: int | None, stream: str, data: bytes) -> None:
        """Take output of a rank, or (rank None) of a node's launcher; `stream` is out or err."""
        name = f"node-{host.replace('/', '_')}.log" if rank is None else f"rank-{rank}.{stream}"
        if name not in self._files:
            self._files[name] = open(os.path.join(self._directory, name), "ab", buffering=0)  # noqa: SIM115
        with contextlib.suppress(OSError):  # a full disk here must not end a job that trains
            self._files[name].write(data)
        if rank is None:
            if self._echo_launcher:
                self._err.feed(_LAUNCHER, data)
        elif stream == "out":
            self._out.feed(rank, data)
        else:
            self._fold.feed(rank, data)

    def idle(self) -> None:
        """Call it now and then: prints unfinished lines that do not grow."""
        self._out.idle()
        self._err.idle()

    def close(self) -> None:
        """Print what is unfinished, say which tracebacks were folded, and close the files."""
        self._fold.flush()
        for first, ranks in self._fold.repeats.items():
            others = ", ".join(str(rank) for rank in sorted(set(ranks)))
            self._err.feed(
                _OURS,
                f"safelaunch: the traceback of rank {first} was printed by rank {others} too\n".encode(),
            )
        self._out.flush(end_line=False)
        self._err.flush(end_line=True)
        for stream in self._files.values():
            stream.close()
