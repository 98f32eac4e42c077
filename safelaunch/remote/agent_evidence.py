"""Part of the agent: the stacks of a rank and of its children, taken without ptrace and without waiting."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from safelaunch.remote import agent_processes as procs
    from safelaunch.remote import agent_progress as progress
    from safelaunch.remote import agent_ranks as ranks

DUMP_SECONDS = 0.8
"""How long faulthandler may take to write; a process in uninterruptible sleep, or stopped, never does."""
QUIET_SECONDS = 0.06
"""A file that has not grown for so long is complete."""
MOST_CHILDREN = 12
"""Children of one rank that are asked for their stacks."""
MOST_TEXT = 65_536
"""Bytes of stacks that are kept of one process."""


class Gathering:
    """Asks one process of a rank after the other; `step` returns True when all have had their time."""

    def __init__(self, number: int, rank: ranks.Rank, reader: progress.MarkReader) -> None:
        """Begin to gather for the request of that number."""
        self.number = number
        self.rank = rank
        self.processes: list[dict[str, Any]] = []
        self._mark = reader.read()
        self._base = reader.base
        self._left = self._all()
        self._now: dict[str, Any] | None = None
        self._file, self._start, self._size = "", 0, 0
        self._until = self._grown = 0.0

    def _all(self) -> Iterator[procs.Process]:
        process = self.rank.process()
        if process is None:
            return
        yield process
        # `procs.descendants` includes wrappers' children; the one with the mark comes first among them.
        owner = self._mark["pid"] if self._mark else 0
        children = sorted(procs.descendants(process.pid), key=lambda child: (child.pid != owner, child.pid))
        yield from children[:MOST_CHILDREN]

    def step(self, now: float) -> bool:
        if self._now is not None and not self._is_complete(now):
            return False
        if self._now is not None:
            self._now["stacks"] = self._text()
        process = next(self._left, None)
        if process is None:
            self._now = None
            return True
        self._now = {
            "pid": process.pid,
            **progress.usage(process),
            "command": self._command(process),
            "stacks": "",
        }
        self.processes.append(self._now)
        self._ask(process, now)
        return False

    def _command(self, process: procs.Process) -> str:
        return (
            procs.command_line(process.pid)
            .rstrip(b"\0")
            .replace(b"\0", b" ")[:200]
            .decode("utf-8", "replace")
        )

    def _ask(self, process: procs.Process, now: float) -> None:
        signum = self._mark["signal"] if self._mark else 0
        self._until = self._grown = now
        if not signum or process.state in (b"T", b"D") or not catches(process.pid, signum):
            return
        own = "%s.%d.stacks" % (self._base, process.pid)
        self._file = own if os.path.exists(own) else self._base + ".stacks"
        self._start = self._size = size_of(self._file)
        self._until = now + DUMP_SECONDS
        procs.send_signal(process, signum)

    def _is_complete(self, now: float) -> bool:
        size = size_of(self._file)
        if size != self._size:
            self._size, self._grown = size, now
        return now >= self._until or (size > self._start and now - self._grown >= QUIET_SECONDS)

    def _text(self) -> str:
        if self._size <= self._start:
            return ""
        try:
            with open(self._file, "rb") as stream:
                stream.seek(self._start)
                return stream.read(min(self._size - self._start, MOST_TEXT)).decode("utf-8", "replace")
        except OSError:  # a child has ended, and taken its file along
            return ""

    def event(self) -> dict[str, Any]:
        """Return the fields of the `evidence` event."""
        return {
            "id": self.number,
            "rank": self.rank.rank,
            "taken": time.time(),
            "mark": self._mark,
            "processes": self.processes,
        }


def size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def catches(pid: int, signum: int) -> bool:
    """Tell whether a process has a handler for a signal: without one, it would die of it."""
    try:
        with open("/proc/%d/status" % pid, encoding="ascii", errors="replace") as stream:
            line = next(line for line in stream if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
