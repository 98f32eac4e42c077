"""Part of the agent: its directory on the node, and the output files that stand there."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SOCKET = "s"
SPACE = 1_048_576
"""Bytes that must go into a directory before the output of a run does."""
CHUNK = 65_536
"""Bytes of one file that are sent at once at most."""
PARTIAL_LINE = 0.2
"""Seconds that an unfinished line waits for its end before it is sent."""
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
BLOCK = 4096

_libc = ctypes.CDLL(None, use_errno=True)


def bases() -> list[str]:
    """Return the places where run directories may be, in order."""
    name = "safelaunch-%d" % os.geteuid()
    places = [os.environ.get("TMPDIR"), "/tmp", "/var/tmp", "/dev/shm"]  # noqa: S108 - 0700, checked by is_ours
    return list(dict.fromkeys(os.path.join(place, name) for place in places if place))


def is_ours(path: str) -> bool:
    """Tell whether a directory is really one, ours, and closed to others (nothing planted in /tmp)."""
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077


def make_directory(run_id: str, node: str) -> str:
    """Create the directory of a run's node; raise OSError if no place takes it, or an agent is there."""
    for path in [path for key, path in directories().items() if key[:2] == (run_id, node)]:
        try:
            dial(path).close()
        except OSError:  # what an earlier attempt left
            remove_directory(path)
        else:
            raise OSError("an agent of run %s is on this node already" % run_id)
    problems = []
    for base in bases():
        try:
            return _make_in(base, "%s.%s" % (run_id, node))
        except OSError as error:
            problems.append(str(error))
    raise OSError("no place for the run's directory on this node: %s" % "; ".join(problems))


def _make_in(base: str, name: str) -> str:
    try:
        os.mkdir(base, 0o700)
    except FileExistsError:
        if not is_ours(base):
            raise PermissionError("%s is not a directory of ours alone" % base) from None
    path = os.path.join(base, name)
    os.mkdir(path, 0o700)
    try:
        trial = os.path.join(path, "space")
        with open(trial, "wb") as stream:
            stream.write(b"x" * SPACE)
        os.unlink(trial)
    except OSError:
        remove_directory(path)
        raise
    return path


def directories() -> dict[tuple[str, str, str], str]:
    """Return {(run id, node, base): directory} of all that this user has here."""
    found = {}
    for base in bases():
        for name in os.listdir(base) if is_ours(base) else ():
            run, dot, node = name.rpartition(".")
            if dot and is_ours(os.path.join(base, name)):
                found[run, node, base] = os.path.join(base, name)
    return found


def remove_directory(path: str) -> None:
    """Remove a run's directory, and the place it stood in if that was the last one."""
    try:
        for name in os.listdir(path):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)
        os.rmdir(os.path.dirname(path))
    except OSError:
        pass


def listen(directory: str) -> socket.socket:
    """Open the agent's socket."""
    listener = socket.socket(socket.AF_UNIX)
    with _Held(directory) as fd:
        listener.bind("/proc/self/fd/%d/%s" % (fd, SOCKET))
    listener.listen(8)
    return listener


def dial(directory: str) -> socket.socket:
    """Connect to the agent of a directory; raise OSError if none listens there."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _Held(directory) as fd:
            connection.connect("/proc/self/fd/%d/%s" % (fd, SOCKET))
    except OSError:
        connection.close()
        raise
    return connection


class _Held:
    """A directory under a short name: the path of a Unix socket has room for 107 bytes (unix(7))."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def write_json(path: str, value: Any) -> None:
    """Replace a file in one step."""
    with open(path + ".new", "w", encoding="ascii") as stream:
        json.dump(value, stream)
    os.replace(path + ".new", path)


def read_json(path: str) -> Any:
    """Return what a file holds, or None where it is not there."""
    try:
        with open(path, encoding="ascii") as stream:
            return json.load(stream)
    except (OSError, ValueError):
        return None


def recorded(directory: str) -> dict[str, tuple[int, int]]:
    """Return {"launcher" or "rank-<R>": (pid, start)} of the processes that are on record."""
    found = {}
    try:
        names = os.listdir(directory)
    except OSError:
        return {}
    for name in names:
        row = read_json(os.path.join(directory, name)) if name.endswith(".json") else None
        if row and "started" in row:
            found[name[: -len(".json")]] = (int(row["pid"]), int(row["started"]))
    return found


class Tail:
    """Follows a file that others append to, and frees the disk space of what is not needed any more.

    `rank` is None for the node launcher's. Offsets are in bytes: `sent` is how far it was handed out,
    `confirmed` how far the launcher has it.
    """

    def __init__(self, path: str, rank: int | None, stream: str, log: RankLog | None = None) -> None:
        self.rank = rank
        self.stream = stream
        self.log = log
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.sent = self.confirmed = 0
        self._logged = self._freed = 0
        self._waiting_since: float | None = None

    def read(self, start: int, end: int) -> bytes:
        return os.pread(self.fd, end - start, start)

    def last(self) -> bytes:
        """Return the end of the file."""
        size = os.fstat(self.fd).st_size
        return os.pread(self.fd, CHUNK, max(0, size - CHUNK))

    def next_end(self, now: float, *, final: bool) -> int:
        """Return up to where to send: after whole lines, or after a part of one that has waited long enough.

        It is `sent` where there is nothing to send.
        """
        data = os.pread(self.fd, CHUNK, self.sent)
        length = data.rfind(b"\n") + 1
        if data and not length:
            self._waiting_since = self._waiting_since or now
            if final or len(data) == CHUNK or now - self._waiting_since >= PARTIAL_LINE:
                length = whole_characters(data) or (len(data) if final else 0)
        if length:
            self._waiting_since = None
        return self.sent + length

    def copy_to_log(self) -> None:
        """Bring the rank's log up to date."""
        while self.log is not None and self.log.fd is not None:
            data = os.pread(self.fd, CHUNK, self._logged)
            if not data:
                return
            self._logged += self.log.write(data)
            self._free()

    def confirm(self, end: int) -> None:
        """Note that nobody will ask for what is before `end`."""
        self.confirmed = end
        self._free()

    def _free(self) -> None:
        """Give back disk space. A hole, unlike a truncation, can't lose what is written at the moment."""
        logged = self.log is None or self.log.fd is None
        end = (self.confirmed if logged else min(self.confirmed, self._logged)) // BLOCK * BLOCK
        # What the node launcher logged may be asked for again: `last`.
        if self.rank is not None and end - self._freed >= SPACE:
            start, size = ctypes.c_long(self._freed), ctypes.c_long(end - self._freed)
            _libc.fallocate(self.fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, start, size)
            self._freed = end


class RankLog:
    """The file of `--enable_each_rank_log`, named as DeepSpeed names it; `error` is why it ended early."""

    def __init__(self, directory: str, began: float, rank: int) -> None:
        """Create it; raise OSError, as DeepSpeed refuses to start then too."""
        os.makedirs(directory, exist_ok=True)
        name = "%s_rank%d.log" % (time.strftime("%Y%m%d%H%M%S", time.localtime(began)), rank)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self.path = os.path.join(directory, name)
        self.fd: int | None = os.open(self.path, flags, 0o666)
        self.error: str | None = None

    def write(self, data: bytes) -> int:
        """Append; a copy that can't be written ends, and not the job that trains."""
        if self.fd is None:
            return 0
        try:
            return os.write(self.fd, data)
        except OSError as error:
            os.close(self.fd)
            self.fd, self.error = None, error.strerror
            return 0


def whole_characters(data: bytes) -> int:
    """Return the length without an unfinished UTF-8 character at the end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return len(data) - back if needed > back else len(data)
    return len(data)
