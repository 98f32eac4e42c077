"""Part of the agent: following the processes of the ranks, and learning how each of them ended."""

from __future__ import annotations

import os
import re
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from safelaunch.remote import agent_processes as procs

CGROUPS = "/sys/fs/cgroup"
LAUNCH_PY_SIGNALLED = 192
"""launch.py exits with the rank's return code, which is -n after signal n: 256-n as an exit status. No signal
goes beyond 64 (signal(7)), so a status from here on stands for one."""


class Rank:
    """A rank. It is not our child: its wait status is read from /proc while it is a zombie."""

    def __init__(self, rank: int, local_rank: int, pid: int, started: int) -> None:
        """Take what its shim recorded; it may have ended since."""
        self.rank = rank
        self.local_rank = local_rank
        self.pid = pid
        self.started = started
        self.pidfd = procs.open_pidfd(pid)
        self.unseen_since: float | None = None
        self.over = False

    def process(self) -> procs.Process | None:
        """Return it as long as it is there, as a zombie too."""
        found = procs.read(self.pid)
        return found if found is not None and found.started == self.started else None

    def look(self, now: float) -> int | None:
        """Return its wait status once it can be read; notes when it went without a trace."""
        process = self.process()
        if process is not None and process.alive:
            return None
        if process is not None and _may_see_status(self.pid):
            return process.wait_status
        self.unseen_since = self.unseen_since or now
        return None

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def _may_see_status(pid: int) -> bool:
    """Tell whether the kernel shows us how a zombie ended: where it may not, it shows 0 (proc(5))."""
    try:
        os.readlink("/proc/%d/exe" % pid)  # guarded by the same rule; a zombie has none
    except PermissionError:
        return False
    except OSError:
        pass
    return True


def describe(wait_status: int) -> dict[str, Any]:
    """Return exit status and signal of a wait status."""
    if os.WIFSIGNALED(wait_status):
        return {"status": None, "signal": os.WTERMSIG(wait_status)}
    return {"status": os.WEXITSTATUS(wait_status), "signal": None}


NOT_SEEN: dict[str, Any] = {"status": None, "signal": None}
SUCCESS: dict[str, Any] = {"status": 0, "signal": None}


def ended_well(log: bytes, pid: int) -> bool:
    """Tell whether launch.py logged that a rank exited 0."""
    return b"Process %d exits successfully" % pid in log


def first_failure(log: bytes, launcher: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return how launch.py says that its first failed rank ended: from its log, else from its own status.

    `launcher` is how it ended itself, as `describe` puts it, or None as long as it runs.
    """
    found = re.search(rb"exits with return code = (-?\d+)", log)
    if found:
        code = int(found.group(1))
        return {"status": None, "signal": -code} if code < 0 else {"status": code, "signal": None}
    if launcher is None or not launcher["status"]:
        return None
    if launcher["status"] >= LAUNCH_PY_SIGNALLED:
        return {"status": None, "signal": 256 - launcher["status"]}
    return launcher


class MemoryKills:
    """Tells whether a SIGKILL came from the kernel, for want of memory."""

    def __init__(self) -> None:
        """Remember how often it has happened so far, in our memory cgroup or, without one, on the machine."""
        self.path = self._counter()
        self.claimed = self._count()

    def _counter(self) -> str:
        try:
            with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as stream:
                rows = [line.rstrip("\n").split(":", 2) for line in stream]
        except OSError:
            rows = []
        for _, controllers, path in rows:
            # Version 2 counts what lies below as well; version 1 has a tree for each controller.
            places = {"": path + "/memory.events", "memory": "/memory" + path + "/memory.oom_control"}
            for controller, place in places.items():
                counter = CGROUPS + place
                if controller in controllers.split(",") and os.path.exists(counter):
                    return counter
        return "/proc/vmstat"

    def _count(self) -> int:
        try:
            with open(self.path, encoding="ascii") as stream:
                return sum(int(line.split()[1]) for line in stream if line.startswith("oom_kill "))
        except (OSError, ValueError):
            return 0

    def explain(self, end: dict[str, Any]) -> bool:
        """Tell whether one of the kernel's kills explains this end; each explains one."""
        if end["signal"] != signal.SIGKILL or self._count() <= self.claimed:
            return False
        self.claimed += 1
        return True
