"""A real sshd for tests, benchmarks and the demo: keys and configuration of its own, on loopback addresses.

    with Sshd(directory, ["127.3.0.1", "127.3.0.2"]) as sshd:
        sshd.home            # a home whose .ssh/config, known_hosts and id_ed25519 fit this server
        sshd.port

Runs as the current user, in the foreground, and is ended by its recorded pid.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
LISTEN_MAX = 16
"""Addresses that one sshd can listen on (MAX_LISTEN_SOCKS of OpenSSH)."""


def missing() -> str | None:
    """Say what is not there for a real sshd, or None."""
    if sys.platform != "linux":
        return "loopback addresses other than 127.0.0.1 need Linux"
    for program in ("ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return None if os.access(SSHD, os.X_OK) else "sshd is not installed"


def free_port() -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", path.name, "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return path


@dataclass
class Sshd:
    """One server. `options` are lines of sshd_config, `config` lines of the home's ~/.ssh/config."""

    directory: Path
    addresses: list[str]
    port: int = 0
    options: list[str] = field(default_factory=list)
    host_key: str = "ed25519"
    config: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.addresses) > LISTEN_MAX:
            raise ValueError(f"one sshd listens on {LISTEN_MAX} addresses at most")
        self.port = self.port or free_port()
        self.log = self.directory / "sshd.log"
        self.home = self.directory / "home"
        self.known_hosts = self.home / ".ssh" / "known_hosts"
        self.user_key = self.home / ".ssh" / "id_ed25519"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Sshd:  # noqa: PYI034 (Self needs Python 3.11)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def public_host_key(self) -> str:
        return " ".join((self.directory / "host_key.pub").read_text().split()[:2])

    @property
    def fingerprint(self) -> str:
        shown = subprocess.run(
            ["ssh-keygen", "-lf", self.directory / "host_key.pub"], check=True, capture_output=True, text=True
        )
        return shown.stdout.split()[1]

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if not (self.directory / "host_key").exists():
            make_key(self.directory / "host_key", self.host_key)
        if not self.user_key.exists():
            make_key(self.user_key)
            (self.directory / "authorized_keys").write_text(self.user_key.with_suffix(".pub").read_text())
        self.trust()
        self.write_config(*self.config)
        self._write_sshd_config()
        if os.geteuid() == 0:
            # sshd will not start as root without it.
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self.process = subprocess.Popen(
            [SSHD, "-D", "-f", self.directory / "sshd_config", "-E", self.log],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._wait_until_listening()

    def stop(self) -> None:
        """End the server and the sessions it still has."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGCONT)
        for pid in self.children():
            kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.process = None

    def children(self) -> list[int]:
        """Pids of the processes that serve a connection now."""
        assert self.process is not None
        try:
            with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as file:
                return [int(pid) for pid in file.read().split()]
        except OSError:
            return []

    def trust(self, *addresses: str) -> None:
        """Write known_hosts so that it knows these addresses (all of them by default)."""
        known = [
            f"[{address}]:{self.port} {self.public_host_key}\n" for address in addresses or self.addresses
        ]
        self.known_hosts.write_text("".join(known))

    def write_config(self, *lines: str) -> None:
        """Write ~/.ssh/config: the given lines, then what makes ssh use this home and nothing else."""
        common = [
            "Host *",
            f"  Port {self.port}",
            f"  UserKnownHostsFile {self.known_hosts}",
            "  GlobalKnownHostsFile none",
            f"  IdentityFile {self.user_key}",
            "  IdentitiesOnly yes",
        ]
        (self.home / ".ssh" / "config").write_text("\n".join([*lines, *common]) + "\n")

    def _write_sshd_config(self) -> None:
        lines = [
            f"Port {self.port}",
            *(f"ListenAddress {address}" for address in self.addresses),
            f"HostKey {self.directory / 'host_key'}",
            f"AuthorizedKeysFile {self.directory / 'authorized_keys'}",
            "PidFile none",
            *self.options,
        ]
        given = {option.split()[0] for option in self.options}
        # bash started by sshd reads ~/.bashrc unless it takes itself for an inner shell: SHLVL.
        defaults = [
            "LogLevel VERBOSE",
            "StrictModes no",
            "UsePAM no",
            "UseDNS no",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "MaxStartups 1000",
            "MaxSessions 20",
            "PrintMotd no",
            "PrintLastLog no",
            "SetEnv SHLVL=1",
        ]
        lines += [line for line in defaults if line.split()[0] not in given]
        (self.directory / "sshd_config").write_text("\n".join(lines) + "\n")

    def _wait_until_listening(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                for address in self.addresses:
                    socket.create_connection((address, self.port), timeout=5).close()
            except OSError:
                time.sleep(0.01)
            else:
                return
        said = self.log.read_text() if self.log.exists() else ""
        self.stop()
        raise RuntimeError(f"sshd did not start: {said}")


def kill(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
