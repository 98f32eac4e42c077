"""Programs, processes and networks of the machine under the bed."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PROGRAMS = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "nft": "nftables",
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
}
"""What a bed needs, and the Debian package that has it."""

STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
KILL_DEADLINE = 10.0
"""Seconds for a killed process to go."""


class BedError(Exception):
    """The bed can't do what was asked; the text says why and what to do."""


def program(name: str) -> str:
    """Return the path of a program, also where the caller's PATH leaves out /usr/sbin."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{STANDARD_PATH}")
    if path is None:
        raise BedError(
            f"{name} is not installed (package {PROGRAMS.get(name, name)}): run scripts/setup-test-machine"
        )
    return path


def run(*argv: str | Path, stdin: str = "", env: dict[str, str] | None = None) -> str:
    """Run a program and return its stdout; raise BedError with its stderr where it fails."""
    command = [program(str(argv[0])), *map(str, argv[1:])]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise BedError(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def missing() -> list[str]:
    """Return what keeps a bed from being built here, in words; empty where nothing does."""
    if os.geteuid() != 0:
        return ["root: network and mount namespaces are made by root only (try sudo)"]
    absent = [
        f"{name} (package {package})"
        for name, package in PROGRAMS.items()
        if shutil.which(name, path=f"{os.environ.get('PATH', '')}:{STANDARD_PATH}") is None
    ]
    if absent:
        return [f"programs: {', '.join(absent)}: run scripts/setup-test-machine"]
    tried = subprocess.run(
        [program("unshare"), "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        reason = tried.stderr.strip()
        return [f"namespaces: {reason}; a container needs --privileged, or CAP_SYS_ADMIN and CAP_NET_ADMIN"]
    return []


def start_time(pid: int) -> int | None:
    """Return when a process started (clock ticks since boot), or None where there is none but a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold blanks and parentheses itself.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


class ProcessFile:
    """A process on record: its pid with its start time, so that a pid used again is never mistaken for it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def record(self, pid: int) -> None:
        """Write the pid of a process that has just been started."""
        started = start_time(pid)
        if started is None:
            raise BedError(f"process {pid} ended at once")
        self.path.write_text(f"{pid} {started}\n", encoding="ascii")

    @property
    def pid(self) -> int | None:
        """The recorded process, or None where it is not alive."""
        try:
            pid, started = map(int, self.path.read_text(encoding="ascii").split())
        except (OSError, ValueError):
            return None
        return pid if start_time(pid) == started else None

    def end(self) -> None:
        """Kill the process and its children, wait until they have gone, and forget it."""
        pid = self.pid
        if pid is not None:
            family = [*children(pid), pid]
            for member in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            wait_for(lambda: not any(map(start_time, family)), KILL_DEADLINE, f"process {pid} to end")
        self.path.unlink(missing_ok=True)


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text(encoding="ascii").split())
    return found


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until a condition holds; raise BedError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise BedError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(0.01)


def links() -> set[str]:
    """Return the names of this machine's network interfaces."""
    return {name.partition("@")[0] for name in os.listdir("/sys/class/net")}


def unused_subnet(taken_prefix: Callable[[str], bool]) -> tuple[str, str]:
    """Return the first three numbers of a /24 that nothing here uses, and a prefix for names."""
    busy = list(networks())
    for base in ("10.77", "172.29", "192.168"):
        for third in range(256):
            subnet, prefix = f"{base}.{third}", f"sl{third}"
            if is_free(subnet, busy) and not taken_prefix(prefix):
                return subnet, prefix
    raise BedError("no unused private subnet was found: give one by --subnet, such as --subnet 10.200.7")


def is_free(subnet: str, busy: Sequence[ipaddress.IPv4Network]) -> bool:
    """Tell whether a /24, given by its first three numbers, overlaps nothing in `busy`."""
    return not any(ipaddress.IPv4Network(f"{subnet}.0/24").overlaps(network) for network in busy)


def networks() -> Iterator[ipaddress.IPv4Network]:
    """Yield the IPv4 networks that this machine has addresses in or routes to, but for the default route."""
    for interface in json.loads(run("ip", "-json", "-4", "address", "show") or "[]"):
        for address in interface.get("addr_info", []):
            yield ipaddress.IPv4Network(f"{address['local']}/{address['prefixlen']}", strict=False)
    for route in json.loads(run("ip", "-json", "-4", "route", "show", "table", "all") or "[]"):
        with contextlib.suppress(ValueError):  # `default`
            yield ipaddress.IPv4Network(route["dst"], strict=False)


def mounts_below(directory: Path) -> list[str]:
    """Return the mount points that this process sees at or below a directory."""
    below = f"{directory}/"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
        points = [line.split()[4] for line in stream]
    return [point for point in points if point == str(directory) or point.startswith(below)]
