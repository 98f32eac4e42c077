"""Part of the agent: finding the processes of a run, and ending them."""

from __future__ import annotations

import ctypes
import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

RUN_VARIABLE, NODE_VARIABLE = "SAFELAUNCH_RUN_ID=", "SAFELAUNCH_NODE="
"""What every process of a run carries. The node rank tells two nodes apart that share a process table
(two names of one machine, containers with the host's pids)."""
KILLED_FOR = 10.0
"""Seconds after SIGKILL at which a process that is still there counts as a survivor: one that pinned a lot
of memory takes seconds to die."""
ASKING_PAUSE, KILLING_PAUSE = 0.05, 0.01
"""Seconds between two looks at who is alive, before and after the grace."""
PIDFD_SEND_SIGNAL, PIDFD_OPEN = 424, 434
"""System calls, with the same number on every machine; the os module has them from Python 3.9 on."""
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


class Process:
    """A line of /proc/PID/stat. `started` is in clock ticks since boot: with the pid it names one process."""

    __slots__ = ("cpu", "group", "parent", "pid", "session", "started", "state", "threads", "wait_status")

    def __init__(self, pid: int, fields: list[bytes]) -> None:
        """Take the fields from the state on: proc(5) counts it as number 3."""
        self.pid = pid
        self.state = fields[0]
        self.parent, self.group, self.session = (int(field) for field in fields[1:4])
        self.threads = int(fields[17])
        self.started = int(fields[19])
        self.wait_status = int(fields[49])
        self.cpu = int(fields[11]) + int(fields[12])  # clock ticks, its own and not its children's

    @property
    def alive(self) -> bool:
        """Whether it can still do something: a zombie can, if only its first thread has ended."""
        return self.state not in (b"Z", b"X") or self.threads > 1

    @property
    def key(self) -> tuple[int, int]:
        """The pid and when it started."""
        return self.pid, self.started


def read(pid: int) -> Process | None:
    """Look at a process, zombies included."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as stream:
            return Process(pid, stream.read().rpartition(b") ")[2].split())
    except OSError:
        return None


def read_all() -> dict[int, Process]:
    """Look at all that are alive on this machine, by pid."""
    rows = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {row.pid: row for row in rows if row is not None and row.alive}


def environment(pid: int) -> list[bytes]:
    """Return the `NAME=value` pairs that a process started with; none where that may not be read."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as stream:
            return stream.read().split(b"\0")
    except OSError:
        return []


def command_line(pid: int) -> bytes:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as stream:
            return stream.read()
    except OSError:
        return b""


def carries(pid: int, run_id: str, node: str | None) -> bool:
    """Tell whether a process is marked as one of a run, and of a node where `node` is given."""
    pairs = environment(pid)
    wanted = [RUN_VARIABLE + run_id] + ([] if node is None else [NODE_VARIABLE + node])
    return all(os.fsencode(pair) in pairs for pair in wanted)


def members(
    run_id: str,
    node: str | None = None,
    *,
    above: Collection[int] = (),
    spare: Collection[int] = (),
    known: Collection[tuple[int, int]] = (),
    sessions: Collection[int] = (),
    patient: bool = False,
) -> dict[int, Process]:
    """Find the living processes of a run: those that carry its id, and all that descend from one of them.

    Descent is by parent or by session, so a process that cleared or overwrote its environment is found too.
    `above` are pids whose descendants belong to the run though they do not (the agent, to which all orphans
    come). `spare` are left out. `known` are processes on record, as pid and start. `sessions` are sessions
    of the run whose leader may be dead. `node` limits it to one node rank. To read the environment of a
    process in uninterruptible sleep can take as long as that sleep: only who is `patient` does it.
    """
    table = read_all()
    for pid in (os.getpid(), *spare):
        table.pop(pid, None)
    found = {pid for pid, row in table.items() if row.key in known}
    found |= {pid for pid, row in table.items() if row.session in sessions and row.session not in table}
    _grow(found, table, above)
    for pid in table.keys() - found - set(above):
        if (patient or table[pid].state != b"D") and carries(pid, run_id, node):
            found.add(pid)
    _grow(found, table, above)
    return {pid: table[pid] for pid in found if pid not in above}


def descendants(pid: int) -> list[Process]:
    """Return the living processes below one, by parent."""
    table, found = read_all(), {pid}
    more = {0}
    while more:
        more = {row.pid for row in table.values() if row.parent in found} - found
        found |= more
    return [table[child] for child in found - {pid}]


def _grow(found: set[int], table: dict[int, Process], above: Collection[int]) -> None:
    """Add the descendants of `found` and `above`."""
    more = {0}
    while more:
        parents = found.union(above)
        rest = [row for pid, row in table.items() if pid not in parents]
        more = {row.pid for row in rest if row.parent in parents or row.session in found}
        found |= more


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None on a kernel before 5.3."""
    fd = int(_libc.syscall(PIDFD_OPEN, pid, 0))
    return fd if fd >= 0 else None


def send_signal(process: Process, signum: int) -> None:
    """Signal this very process, never a later one with its pid. That it is gone or not ours is no error."""
    fd = open_pidfd(process.pid)
    now = read(process.pid)
    try:
        if now is not None and now.started == process.started:
            if fd is None:
                os.kill(process.pid, signum)
            else:
                _libc.syscall(PIDFD_SEND_SIGNAL, fd, signum, None, 0)
    except OSError:
        pass
    finally:
        if fd is not None:
            os.close(fd)


def become_subreaper() -> None:
    """Adopt whatever of our descendants loses its parent (prctl(2))."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def hide_from_memory_killer() -> None:
    """Let the kernel kill others first when memory runs out; only privileged users may ask for that."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as stream:
            stream.write("-900")
    except OSError:
        pass


def is_helper(process: Process, others: dict[int, Process]) -> bool:
    """Tell whether multiprocessing made it for its parent (a data loader's worker, a resource tracker)."""
    parent = others.get(process.parent)
    if parent is None or b"D" in (process.state, parent.state):
        return False
    words = command_line(process.pid)
    return b"from multiprocessing." in words or words == command_line(parent.pid)


class Ending:
    """Ends what `find()` returns, step by step: TERM, after `grace` seconds KILL, until nothing is found.

    TERM goes once to each process, a stopped one is woken for it. Helpers of a living parent get none: they
    end with it, and a rank that lost its workers could not write the checkpoint that the grace is for. The
    process `last` gets it when only that one is left.
    """

    def __init__(self, find: Callable[[], dict[int, Process]], grace: float, last: int | None = None) -> None:
        self.find = find
        self.kill_at = time.monotonic() + grace
        self.last = last
        self.told: set[tuple[int, int]] = set()
        self.ended: set[int] = set()
        self.survivors: list[int] = []

    def step(self) -> float | None:
        """Do one round; return the pause before the next, or None at the end, when `survivors` is known."""
        began = time.monotonic()
        alive = self.find()
        self.ended |= set(alive)
        if not alive or began > self.kill_at + KILLED_FOR:
            self.survivors = sorted(alive)
            self.ended -= set(alive)
            return None
        if began < self.kill_at:
            self._ask(alive)
        else:
            self._kill(alive)
        pause = ASKING_PAUSE if began < self.kill_at else KILLING_PAUSE
        # On a machine with many processes a look is dear: it may take a fifth of a core at most.
        return max(pause, 4 * (time.monotonic() - began))

    def _ask(self, alive: dict[int, Process]) -> None:
        for process in alive.values():
            if process.pid == self.last and len(alive) > 1:
                continue
            if process.key not in self.told and not is_helper(process, alive):
                self.told.add(process.key)
                send_signal(process, signal.SIGTERM)
            if process.key in self.told and process.state == b"T":
                send_signal(process, signal.SIGCONT)

    def _kill(self, alive: dict[int, Process]) -> None:
        # A group gets it in one instant: the one way to catch processes that fork faster than we look.
        for group in {process.group for process in alive.values()} & set(alive):
            try:
                os.killpg(group, signal.SIGKILL)
            except OSError:
                pass
        for process in alive.values():
            send_signal(process, signal.SIGKILL)

    def finish(self) -> list[int]:
        """Do all rounds; return the pids of those that could not be ended."""
        for pause in iter(self.step, None):
            time.sleep(pause)
        return self.survivors


def keepers() -> Iterator[tuple[Process, str]]:
    """Yield the agents and guardians of this user with their directories, deleted ones too."""
    for process in read_all().values():
        words = command_line(process.pid).split(b"\0") if process.state != b"D" else []
        if b"safelaunch-agent" not in words or process.pid == os.getpid():
            continue
        try:
            if os.stat("/proc/%d" % process.pid).st_uid == os.geteuid():
                directory = os.readlink("/proc/%d/cwd" % process.pid)
                suffix = " (deleted)"
                yield process, directory.removesuffix(suffix)
        except OSError:
            pass
