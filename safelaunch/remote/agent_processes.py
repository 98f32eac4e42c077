"""Part of the agent: finding and ending the processes of a run, and its directory on the node."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import time
from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Any

RUN_VARIABLE, NODE_VARIABLE = b"SAFELAUNCH_RUN_ID=", b"SAFELAUNCH_NODE="
"""What every process of a run carries. The node rank tells two nodes apart that share a process table
(two names of one machine, containers with the host's pids)."""
PAUSE = 0.02
"""Seconds between two looks at who is still alive."""
KILLED_FOR = 5.0
"""Seconds after SIGKILL at which a process that is still there counts as a survivor."""
SOCKET_PATH_LIMIT = 107
"""Bytes of a Unix socket's path (unix(7): sun_path holds 108 with its end)."""


def stat_fields(pid: int) -> list[bytes] | None:
    """Return /proc/PID/stat from the state on (field 3), or None if there is no such process."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as stream:
            return stream.read().rpartition(b") ")[2].split()
    except OSError:
        return None


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot: with the pid it names one process."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


class Row:
    """A process of this user: whose child it is, its session, and the run and node it carries, if any."""

    def __init__(self, parent: int, session: int, environ: bytes) -> None:
        self.parent = parent
        self.session = session
        self.run = carried(environ, RUN_VARIABLE)
        self.node = carried(environ, NODE_VARIABLE)


def carried(environ: bytes, variable: bytes) -> str | None:
    """Return the value of a variable in the bytes of an environment; the last one counts."""
    found = [row for row in environ.split(b"\0") if row.startswith(variable)]
    return found[-1][len(variable) :].decode("utf-8", "replace") if found else None


def processes() -> dict[int, Row]:
    """Return this user's processes that are no zombies, by pid."""
    mine = os.geteuid()
    table = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat("/proc/" + name).st_uid != mine:
                continue
            with open("/proc/%s/environ" % name, "rb") as stream:
                environ = stream.read()
        except FileNotFoundError:
            continue
        except OSError:
            environ = b""
        fields = stat_fields(int(name))
        if fields and fields[0] not in (b"Z", b"X"):
            table[int(name)] = Row(int(fields[1]), int(fields[3]), environ)
    return table


def members(
    run_id: str, node: str | None = None, roots: Collection[int] = (), spare: Collection[int] = ()
) -> set[int]:
    """Return the pids of a run: those that carry its id, their descendants, and their sessions.

    `node` limits it to one node rank. `roots` are pids whose children belong to it as well (the agent is
    the subreaper of what lost its parent); `spare` are left out.
    """
    table = processes()
    spare = {*spare, os.getpid()}
    sessions_kept = {table[pid].session for pid in spare if pid in table}
    ours = {
        pid
        for pid, row in table.items()
        if pid not in spare and row.run in (None, run_id) and (node is None or row.node in (None, node))
    }
    found = {pid for pid in ours if table[pid].run == run_id}
    while True:
        parents = {*found, *roots}
        sessions = {table[pid].session for pid in found} - sessions_kept
        rest = ours - found
        more = {pid for pid in rest if table[pid].parent in parents or table[pid].session in sessions}
        if not more:
            return found
        found |= more


def send_signal(pids: Iterable[int], signum: int) -> None:
    """Signal processes, waking stopped ones that are to end."""
    for pid in pids:
        try:
            os.kill(pid, signum)
            if signum == signal.SIGTERM:
                os.kill(pid, signal.SIGCONT)
        except OSError:
            pass


def end_all(find: Callable[[], set[int]], grace: float) -> list[int]:
    """TERM, then KILL after `grace` seconds, until `find()` is empty; return who could not be ended."""
    killing = time.monotonic() + grace
    told: set[int] = set()
    while True:
        alive = find()
        now = time.monotonic()
        if not alive or now > killing + KILLED_FOR:
            return sorted(alive)
        if now >= killing:
            send_signal(alive, signal.SIGKILL)
        else:
            send_signal(alive - told, signal.SIGTERM)
            told |= alive
        time.sleep(PAUSE)


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
    """Create the directory of a run's node; raise OSError if no place takes it."""
    problems = []
    for base in bases():
        path = os.path.join(base, "%s.%s" % (run_id, node))
        if len(os.fsencode(path)) + 2 > SOCKET_PATH_LIMIT:
            problems.append("%s is too long for a socket" % path)
            continue
        try:
            os.makedirs(base, mode=0o700, exist_ok=True)
            if not is_ours(base):
                problems.append("%s is not ours alone" % base)
                continue
            os.mkdir(path, 0o700)
        except OSError as error:
            problems.append(str(error))
            continue
        try:
            with open(os.path.join(path, "space"), "wb") as stream:
                stream.write(b"x" * 65_536)
            os.unlink(os.path.join(path, "space"))
        except OSError as error:
            problems.append(str(error))
            remove_directory(path)
        else:
            return path
    raise OSError("no place for the run's directory on this node (%s)" % "; ".join(problems))


def directories() -> dict[tuple[str, str], str]:
    """Return {(run id, node): directory} of all runs of this user that have one here."""
    found: dict[tuple[str, str], str] = {}
    for base in bases():
        if is_ours(base):
            for name in os.listdir(base):
                run, dot, node = name.rpartition(".")
                if dot and is_ours(os.path.join(base, name)):
                    found.setdefault((run, node), os.path.join(base, name))
    return found


def remove_directory(path: str) -> None:
    """Remove a run's directory, and the place it stood in if that was the last one."""
    shutil.rmtree(path, ignore_errors=True)
    try:
        os.rmdir(os.path.dirname(path))
    except OSError:
        pass


def write_json(path: str, value: Any) -> None:
    """Replace a file in one step."""
    with open(path + ".new", "w", encoding="utf-8", errors="surrogateescape") as stream:
        json.dump(value, stream)
    os.replace(path + ".new", path)


def read_json(path: str) -> Any:
    """Return what a file holds, or None where it is not there or not whole."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as stream:
            return json.load(stream)
    except (OSError, ValueError):
        return None


def recorded(directory: str) -> dict[str, int]:
    """Return {"agent": pid, "guardian": pid}, as far as they are still the processes that were recorded."""
    rows = read_json(os.path.join(directory, "agent.json")) or {}
    return {name: pid for name, (pid, started) in rows.items() if start_time(pid) == started}


def is_connected(directory: str) -> bool:
    """Ask a run's agent whether its launcher is there."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(3)
    try:
        connection.connect(os.path.join(directory, "s"))
        connection.sendall(b'{"do": "status"}\n')
        return bool(json.loads(connection.makefile("rb").readline() or b"{}").get("connected"))
    except (OSError, ValueError):
        return False
    finally:
        connection.close()


def command_line(pid: int) -> str:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as stream:
            return stream.read(400).rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def sweep(config: dict[str, Any]) -> dict[str, Any]:
    """List all that belongs to runs of this user here, and end it if asked to; return the event's fields."""
    only, spare = config.get("only"), set(config.get("spare") or ())
    # The launcher that asks may itself carry an id, where it was started from a rank of another run.
    spare.add(os.environ.get("SAFELAUNCH_RUN_ID", ""))
    known = directories()
    runs = {row.run for row in processes().values() if row.run} | {run for run, _ in known}
    found: list[dict[str, Any]] = []
    ended: set[int] = set()
    survivors: list[int] = []
    for run in sorted(run for run in runs if run not in spare and (only is None or run in only)):
        places = [path for (owner, _), path in known.items() if owner == run]
        ours = {pid for path in places for pid in recorded(path).values()}
        connected = any(is_connected(path) for path in places if "agent" in recorded(path))
        pids = members(run, roots=ours) | ours
        row = {"run_id": run, "connected": connected}
        found += [{**row, "pid": p, "command": command_line(p), "agent": p in ours} for p in sorted(pids)]
        if config.get("kill"):
            send_signal(ours, signal.SIGKILL)
            left = end_all(partial(members, run), config["grace"])
            survivors += left
            ended |= pids - set(left)
            for path in places if not left else ():
                remove_directory(path)
    return {"found": found, "ended": sorted(ended), "survivors": survivors}
