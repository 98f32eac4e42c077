"""Part of the agent: following a rank's process and its output files."""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CHUNK = 262_144
"""Bytes of one file that are read at once at most."""
PARTIAL_LINE = 0.2
"""Seconds that an unfinished line waits for its end before it is sent."""
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
PIDFD_OPEN = 434
"""Number of the system call; os.pidfd_open came with Python 3.9."""
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Adopt whatever of our descendants loses its parent (prctl(2))."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends, or None on an old kernel."""
    fd = int(_libc.syscall(PIDFD_OPEN, pid, 0))
    return fd if fd >= 0 else None


class Tail:
    """Follows a file that a rank appends to, and frees the disk space of what was read."""

    def __init__(self, path: str, rank: int | None, stream: str) -> None:
        self.rank = rank
        self.stream = stream
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._offset = self._freed = 0
        self._waiting_since: float | None = None

    def read(self, now: float, *, final: bool) -> bytes:
        """Return what can be sent: whole lines, or an unfinished one that has waited long enough."""
        data = os.pread(self.fd, CHUNK, self._offset)
        if not data:
            return b""
        end = data.rfind(b"\n") + 1
        if end == 0:
            if self._waiting_since is None:
                self._waiting_since = now
            if final or len(data) == CHUNK or now - self._waiting_since >= PARTIAL_LINE:
                end = len(data)
        if end:
            self._offset += end
            self._waiting_since = None
            self._free()
        return data[:end]

    @property
    def drained(self) -> bool:
        """Whether everything in the file has been read."""
        return os.fstat(self.fd).st_size <= self._offset

    def _free(self) -> None:
        # Punching a hole, unlike truncating, can't lose what is written at the same moment.
        if self._offset - self._freed >= 4 * CHUNK:
            start, size = ctypes.c_long(self._freed), ctypes.c_long(self._offset - self._freed)
            _libc.fallocate(self.fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, start, size)
            self._freed = self._offset


def memory_kills() -> int:
    """Return how often the kernel has killed for want of memory, on this machine and in our memory cgroup."""
    count = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            with open(path, encoding="ascii") as stream:
                count += sum(int(line.split()[1]) for line in stream if line.startswith("oom_kill "))
        except (OSError, ValueError, IndexError):
            pass
    return count


class RankProcess:
    """A rank: not our child, so its wait status is read from /proc while it is a zombie."""

    def __init__(self, rank: int, pid: int, started: int) -> None:
        self.rank = rank
        self.pid = pid
        self.started = started
        self.gone_since: float | None = None
        self.over = False

    def wait_status(self) -> int | str | None:
        """Return its wait status once it has ended, "unseen" if it ended without a trace, else None."""
        try:
            with open("/proc/%d/stat" % self.pid, "rb") as stream:
                fields = stream.read().rpartition(b") ")[2].split()
        except OSError:
            return "unseen"
        if int(fields[19]) != self.started:
            return "unseen"
        return int(fields[49]) if fields[0] in (b"Z", b"X") else None


def describe(wait_status: int) -> dict[str, Any]:
    """Return exit status and signal of a wait status."""
    if os.WIFSIGNALED(wait_status):
        return {"status": None, "signal": os.WTERMSIG(wait_status)}
    return {"status": os.WEXITSTATUS(wait_status), "signal": None}
