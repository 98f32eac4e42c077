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

RUN_VARIABLE = b"SAFELAUNCH_RUN_ID="
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


def processes() -> dict[int, tuple[int, int, str | None]]:
    """Return {pid: (parent, session, run id or None)} of this user's processes that are no zombies."""
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
        if not fields or fields[0] in (b"Z", b"X"):
            continue
        found = [row for row in environ.split(b"\0") if row.startswith(RUN_VARIABLE)]
        run = found[-1][len(RUN_VARIABLE) :].decode("utf-8", "replace") if found else None
        table[int(name)] = (int(fields[1]), int(fields[3]), run)
    return table


def members(run_id: str, roots: Collection[int] = (), spare: Collection[int] = ()) -> set[int]:
    """Return the pids of a run: those that carry its id, their descendants, and their sessions.

    `roots` are pids whose children belong to it as well (the agent is the subreaper of what lost its
    parent); `spare` are left out.
    """
    table = processes()
    spare = {*spare, os.getpid()}
    sessions_kept = {table[pid][1] for pid in spare if pid in table}
    found = {pid for pid, row in table.items() if row[2] == run_id and pid not in spare}
    while True:
        parents = {*found, *roots}
        sessions = {table[pid][1] for pid in found} - sessions_kept
        more = {
            pid
            for pid, (parent, session, run) in table.items()
            if pid not in found
            and pid not in spare
            and run in (None, run_id)
            and (parent in parents or session in sessions)
        }
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


def make_directory(run_id: str) -> str:
    """Create the run's directory on this node; raise OSError if no place takes it."""
    problems = []
    for base in bases():
        path = os.path.join(base, run_id)
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


def directories() -> dict[str, str]:
    """Return {run id: directory} of all runs of this user that have one here."""
    found: dict[str, str] = {}
    for base in bases():
        if is_ours(base):
            for name in os.listdir(base):
                if is_ours(os.path.join(base, name)):
                    found.setdefault(name, os.path.join(base, name))
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
    known = directories()
    runs = {row[2] for row in processes().values() if row[2]} | set(known)
    runs = {run for run in runs if run not in spare and (only is None or run in only)}
    # The launcher that asks may itself carry an id, where it was started from a rank of another run.
    runs.discard(os.environ.get("SAFELAUNCH_RUN_ID", ""))
    found: list[dict[str, Any]] = []
    ended: list[int] = []
    survivors: list[int] = []
    for run in sorted(runs):
        directory = known.get(run)
        ours = recorded(directory) if directory else {}
        connected = bool(ours.get("agent")) and is_connected(directory or "")
        pids = members(run, roots=ours.values())
        for pid in sorted(pids | set(ours.values())):
            row = {"run_id": run, "pid": pid, "command": command_line(pid)}
            found.append({**row, "agent": pid in ours.values(), "connected": connected})
        if config.get("kill"):
            send_signal(ours.values(), signal.SIGKILL)
            left = end_all(partial(members, run), config["grace"])
            survivors += left
            ended += sorted((pids | set(ours.values())) - set(left))
            if directory and not left:
                remove_directory(directory)
    return {"found": found, "ended": ended, "survivors": survivors}
