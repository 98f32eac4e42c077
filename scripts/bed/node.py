"""One node of a bed: its files, its first process, its sshd."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from bed.system import STANDARD_PATH, BedError, ProcessFile, children, program, run, start_time, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HERE = Path(__file__).resolve().parent
BOOT_DEADLINE = 30.0
SSHD_DEADLINE = 15.0

PRIVATE_MOUNTS = {
    "/tmp": "mode=1777,size=16g",
    "/dev/shm": "mode=1777,size=8g",
    "/run": "mode=755,size=64m",
}
"""Each node's own, as large as a healthy machine's (a tmpfs takes memory only for what is in it)."""

PRIVATE_HOME = {
    ".ssh",
    ".bashrc",
    ".profile",
    ".bash_profile",
    ".bash_login",
    ".bash_logout",
    ".config",
    ".deepspeed_env",
    ".nccl.conf",
}
"""What nodes do not see of the machine's home directory: it would bring the machine's habits into the bed."""

SSHD_CONFIG = """\
Port 22
HostKey /etc/ssh/ssh_host_ed25519_key
PidFile /run/sshd.pid
PermitRootLogin yes
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""

BASHRC = """\
# The test bed's own: short and silent, unlike what the machine's may be.
"""


def home() -> str:
    """Return root's home directory, whatever $HOME says."""
    return pwd.getpwuid(0).pw_dir


def shadowed_home(directory: Path) -> list[str]:
    """Fill `directory` with places for what the machine's home holds; return fstab lines that show it."""
    lines = []
    for entry in sorted(os.scandir(home()), key=lambda e: e.name):
        place = directory / entry.name
        if entry.name in PRIVATE_HOME or place.is_symlink():
            continue
        if entry.is_symlink():
            place.symlink_to(os.readlink(entry.path))
        elif entry.is_dir():
            place.mkdir(exist_ok=True)
            lines.append(fstab(entry.path, place, "rbind"))
        elif entry.is_file():
            place.touch()
            lines.append(fstab(entry.path, place, "bind"))
    return lines


def fstab(source: str | Path, target: str | Path, options: str, kind: str = "none") -> str:
    """Return a line for `mount --all --fstab`."""
    names = [
        str(name).replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")
        for name in (source, target)
    ]
    return f"{names[0]} {names[1]} {kind} {options} 0 0\n"


class Node:
    """A machine of its own: network, mount, host name, ipc and pid namespaces with a sshd on port 22."""

    def __init__(self, bed: Path, index: int, *, subnet: str, prefix: str, shares: Sequence[str]) -> None:
        """Name a node; nothing is made. `index` counts from 1."""
        self.index = index
        self.name = f"node{index}"
        self.bed = bed
        self.directory = bed / self.name
        self.address = f"{subnet}.{10 + index}"
        self.link = f"{prefix}v{index}"
        self.bridge = f"{prefix}br"
        self.shares = shares
        self._process = ProcessFile(self.directory / "process")

    # --- Files --------------------------------------------

    def write_files(self, hosts: str, key: Path) -> None:
        """Write all that the node has of its own, in its healthy state; identity and host key are kept."""
        for name in (
            "etc_ssh",
            "home/.ssh",
            "log",
            "stage/tmp",
            "stage/dev_shm",
            "stage/run",
            "stage/sys",
        ):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        (self.directory / "home/.ssh").chmod(0o700)
        if not self.host_key.exists():
            run(
                "ssh-keygen",
                "-q",
                "-t",
                "ed25519",
                "-N",
                "",
                "-C",
                self.name,
                "-f",
                self.host_key.with_suffix(""),
            )
        for name, identity in (("machine-id", uuid.uuid4().hex), ("boot-id", str(uuid.uuid4()))):
            if not (self.directory / name).exists():
                self.write(name, f"{identity}\n")
        public = Path(f"{key}.pub").read_text(encoding="ascii")
        self.write("hostname", f"{self.name}\n")
        self.write("hosts", hosts)
        self.write("passwd", _passwd())
        self.write("shadow", _shadow(), mode=0o600)
        self.write("etc_ssh/sshd_config", SSHD_CONFIG + _newer_sshd_options())
        self.write("etc_ssh/ssh_config", "")
        self.write("home/.bashrc", BASHRC)
        self.write("home/.profile", BASHRC)
        self.write("home/.ssh/authorized_keys", public, mode=0o600)
        self.write("home/.ssh/id_ed25519", key.read_text(encoding="ascii"), mode=0o600)
        self.write("home/.ssh/id_ed25519.pub", public, mode=0o600)
        self.write("fstab", self._fstab())

    @property
    def host_key(self) -> Path:
        """The node's public host key."""
        return self.directory / "etc_ssh/ssh_host_ed25519_key.pub"

    def known_hosts_line(self) -> str:
        """Return what a client's known_hosts has for this node."""
        kind, key = self.host_key.read_text(encoding="ascii").split()[:2]
        return f"{self.name},{self.address} {kind} {key}\n"

    def write(self, name: str, text: str, mode: int | None = None) -> None:
        """Write a file of the node in place: what is mounted from it sees the change."""
        path = self.directory / name
        path.write_text(text, encoding="utf-8")
        if mode is not None:
            path.chmod(mode)

    def read(self, name: str) -> str:
        """Return the text of a file of the node."""
        return (self.directory / name).read_text(encoding="utf-8")

    def _fstab(self) -> str:
        here, stage = self.directory, self.directory / "stage"
        lines = shadowed_home(here / "home")
        lines += [fstab(here / "home", home(), "rbind")]
        files = {
            "hosts": "/etc/hosts",
            "hostname": "/etc/hostname",
            "passwd": "/etc/passwd",
            "shadow": "/etc/shadow",
            "machine-id": "/etc/machine-id",
            "boot-id": "/proc/sys/kernel/random/boot_id",
        }
        lines += [fstab(here / name, path, "bind") for name, path in files.items() if os.path.exists(path)]
        lines += [fstab(here / "etc_ssh", "/etc/ssh", "bind")]
        # A sysfs mounted in here shows this network's interfaces; Slurm wants the control groups in it.
        lines += [fstab("sysfs", stage / "sys", "defaults", "sysfs")]
        if os.path.isdir("/sys/fs/cgroup"):
            lines += [fstab("/sys/fs/cgroup", stage / "sys/fs/cgroup", "rbind")]
        lines += [fstab(stage / "sys", "/sys", "rbind")]
        for path, options in PRIVATE_MOUNTS.items():
            staged = stage / path.strip("/").replace("/", "_")
            lines += [fstab("tmpfs", staged, options, "tmpfs")]
            for share in self.shares:
                if Path(path) in Path(share).parents:
                    lines += [fstab(share, staged / Path(share).relative_to(path), "rbind,X-mount.mkdir")]
            lines += [fstab(staged, path, "rbind")]
        return "".join(lines)

    # --- Life ---------------------------------------------

    @property
    def pid(self) -> int | None:
        """The node's first process as this machine numbers it, or None where the node is down."""
        outer = self._process.pid
        inner = children(outer) if outer is not None else []
        return inner[0] if inner else None

    def boot(self) -> subprocess.Popen[str]:
        """Start the node's first process, which waits for `plug`; hand the result to `wait_until_ready`."""
        if self.pid is not None:
            raise BedError(f"{self.name} is up already")
        namespaces = [
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--fork",
            "--kill-child=KILL",
            "--mount-proc",
        ]
        command = [
            program("unshare"),
            *namespaces,
            str(HERE / "node-init.sh"),
            str(self.directory),
            self.name,
        ]
        environment = {"PATH": STANDARD_PATH, "HOME": home(), "LANG": "C.UTF-8"}
        with open(self.directory / "log/init.log", "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [*command, f"{self.address}/24"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,
            )
        self._process.record(process.pid)
        return process

    def plug(self, process: subprocess.Popen[str]) -> None:
        """Give a booting node its network card."""
        wait_for(
            lambda: self.pid is not None or process.poll() is not None, BOOT_DEADLINE, f"{self.name} to start"
        )
        if self.pid is None:
            raise BedError(f"{self.name} did not start: {self.read('log/init.log').strip()}")
        # A fixed address: peers still know it when the node comes up again.
        mac = f"02:77:00:00:{self.index // 256:02x}:{self.index % 256:02x}"
        card = ["type", "veth", "peer", "name", "eth0", "address", mac, "netns", str(self.pid)]
        run("ip", "link", "add", self.link, *card)
        run("ip", "link", "set", self.link, "master", self.bridge, "up")

    def wait_until_ready(self, process: subprocess.Popen[str]) -> None:
        """Let a booting node go on, and return when its sshd answers."""
        assert process.stdin is not None, "boot() makes the pipes"
        assert process.stdout is not None, "boot() makes the pipes"
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write("go\n")
        with process.stdout as stdout:
            said = stdout.readline()
        if said != "ready\n":
            raise BedError(f"{self.name} did not come up: {said}{self.read('log/init.log').strip()}")
        self.wait_for_sshd()

    def down(self, existing_links: Iterable[str], *, silent: bool = False) -> None:
        """End the node at once; `silent` cuts its cable first, so that nobody hears of it."""
        if silent and self.link in existing_links:
            run("ip", "link", "set", self.link, "down")
        for record in self.directory.glob("fault-*.process"):
            ProcessFile(record).end()
        inner = self.pid
        self._process.end()
        if inner is not None:
            wait_for(lambda: start_time(inner) is None, BOOT_DEADLINE, f"{self.name} to end")
        if self.link in existing_links:
            # With its last process the node's network goes too, and takes the link along, whenever it likes.
            with contextlib.suppress(BedError):
                run("ip", "link", "delete", self.link)
        self.faults_file.unlink(missing_ok=True)

    # --- Inside -------------------------------------------

    def inside(self, argv: Sequence[str], *, mounts: bool = True) -> list[str]:
        """Return the command line that runs argv inside the node, in the same directory where it has that."""
        pid = self.pid
        if pid is None:
            raise BedError(f"{self.name} is down: scripts/testbed node-up {self.index}")
        enter = [program("nsenter"), "--target", str(pid), "--net", "--uts", "--ipc", "--pid"]
        if not mounts:
            return [*enter, "--", *argv]
        environment = [f"HOME={home()}", f"PATH={STANDARD_PATH}", f"TERM={os.environ.get('TERM', 'dumb')}"]
        change = 'cd "$0" 2>/dev/null || cd; exec "$@"'
        shell = ["env", "-i", *environment, "LANG=C.UTF-8", "USER=root", "sh", "-c", change, os.getcwd()]
        return [*enter, "--mount", "--", *shell, *argv]

    def run(self, *argv: str, stdin: str = "") -> str:
        """Run a program inside the node and return its stdout."""
        return run(*self.inside(argv), stdin=stdin)

    def spawn(self, name: str, *argv: str) -> None:
        """Start a Python program of ours inside the node for a fault, and return when it says it is ready."""
        with open(self.directory / f"log/{name}.log", "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                # Without the node's mounts: this Python may be just what a fault has hidden there.
                self.inside([sys.executable, *argv], mounts=False),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._fault_process(name).record(process.pid)
        assert process.stdout is not None, "it is a pipe"
        with process.stdout as stdout:
            said = stdout.readline()
        if said != "ready\n":
            raise BedError(f"{name}: {self.read(f'log/{name}.log').strip()}")

    def end(self, name: str) -> None:
        """End what `spawn` started under a name, if it runs."""
        self._fault_process(name).end()

    def _fault_process(self, name: str) -> ProcessFile:
        return ProcessFile(self.directory / f"fault-{name}.process")

    # --- sshd ---------------------------------------------

    def stop_sshd(self) -> None:
        """End the listening sshd; open sessions go on. Nothing happens where it isn't running."""
        script = 'p=$(cat /run/sshd.pid) && kill "$p" && while kill -0 "$p"; do sleep 0.02; done'
        with contextlib.suppress(BedError):
            self.run("sh", "-c", script)

    def start_sshd(self) -> None:
        """Start sshd where it isn't running, and return when it answers."""
        script = 'kill -0 "$(cat /run/sshd.pid)" 2>/dev/null || exec /usr/sbin/sshd -E "$0"'
        self.run("sh", "-c", script, str(self.directory / "log/sshd.log"))
        self.wait_for_sshd()

    def restart_sshd(self) -> None:
        """Make sshd read its configuration again."""
        self.stop_sshd()
        self.start_sshd()

    def wait_for_sshd(self) -> None:
        """Return when a connection from the head gets sshd's greeting."""

        def greeted() -> bool:
            try:
                with socket.create_connection((self.address, 22), timeout=SSHD_DEADLINE) as connection:
                    return connection.recv(4).startswith(b"SSH-")
            except ConnectionRefusedError:
                return False
            except OSError as error:
                raise BedError(
                    f"{self.name} ({self.address}) does not answer on port 22: {error}; "
                    f"is there a firewall on this machine that drops what comes from {self.bridge}?"
                ) from error

        wait_for(greeted, SSHD_DEADLINE, f"the sshd of {self.name}")

    # --- Faults -------------------------------------------

    @property
    def faults_file(self) -> Path:
        """Where the faults that are in force stand, oldest first: [[name, arguments], ...]."""
        return self.directory / "faults.json"

    @property
    def faults(self) -> list[tuple[str, list[str]]]:
        """The faults in force."""
        if not self.faults_file.exists():
            return []
        return [
            (name, arguments) for name, arguments in json.loads(self.faults_file.read_text(encoding="utf-8"))
        ]

    @faults.setter
    def faults(self, faults: list[tuple[str, list[str]]]) -> None:
        self.faults_file.write_text(json.dumps(faults), encoding="utf-8")


def _passwd() -> str:
    """Return the machine's accounts, with a root that has a shell."""
    lines = Path("/etc/passwd").read_text(encoding="utf-8").splitlines()
    root = f"root:x:0:0:root:{home()}:/bin/bash"
    return "\n".join([root, *(line for line in lines if not line.startswith("root:"))]) + "\n"


def _shadow() -> str:
    """Return a shadow file in which root has no password but is not locked: sshd refuses locked accounts."""
    return "root:*:19000:0:99999:7:::\nnobody:*:19000:0:99999:7:::\nsshd:!:19000::::::\n"


def _newer_sshd_options() -> str:
    """Return what OpenSSH from 9.8 on needs so as not to lock out a client whose failures are wanted."""
    option = "PerSourcePenalties no"
    known = subprocess.run(
        [program("sshd"), "-G", "-f", "/dev/null", "-o", option], capture_output=True, check=False
    )
    return f"{option}\n" if known.returncode == 0 else ""


def system_directories() -> list[str]:
    """Return the directories of STANDARD_PATH that there are, each once, under its real name."""
    real = (os.path.realpath(place) for place in STANDARD_PATH.split(":"))
    return sorted({place for place in real if os.path.isdir(place)})
