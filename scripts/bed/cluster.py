"""A bed: the bridge, the head's view, and the nodes; its state is all in one directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bed import faults
from bed.node import Node, fstab, home, shadowed_home
from bed.slurm import Slurm
from bed.system import BedError, is_free, links, missing, mounts_below, networks, program, run, unused_subnet

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

LOCK = "/run/lock/safelaunch-testbed"
"""Held while a subnet is chosen and taken: two beds may be built at once."""
MOST_NODES = 200
LONGEST_PREFIX = 8
"""Names of network interfaces have 15 letters at most."""

SSH_CONFIG = """\
# What a user of this cluster has: a key, and known_hosts beside this file.
Host node*
    User root
"""


@dataclass(frozen=True)
class Layout:
    """What a bed was built as; `bed.json`, written before anything else is made."""

    nodes: int
    subnet: str
    prefix: str
    shares: list[str]


class Bed:
    """A cluster of nodes node1, node2 ... and the head, this machine as a user of theirs sees it."""

    def __init__(self, directory: Path) -> None:
        """Look at a directory; it may hold a bed or nothing yet."""
        self.directory = directory
        self._description = directory / "bed.json"

    @property
    def exists(self) -> bool:
        """Whether the directory holds a bed, or what is left of one."""
        return self._description.exists()

    @property
    def layout(self) -> Layout:
        """What the bed was built as."""
        if not self.exists:
            raise BedError(f"there is no test bed in {self.directory}: scripts/testbed up")
        return Layout(**json.loads(self._description.read_text(encoding="utf-8")))

    @property
    def nodes(self) -> list[Node]:
        """All nodes, up or down."""
        layout = self.layout
        return [self._node(index, layout) for index in range(1, layout.nodes + 1)]

    def node(self, index: int) -> Node:
        """Return one node by its number."""
        layout = self.layout
        if not 1 <= index <= layout.nodes:
            raise BedError(f"no node {index}: this bed has nodes 1 to {layout.nodes}")
        return self._node(index, layout)

    def _node(self, index: int, layout: Layout) -> Node:
        shares = [str(self.directory), *layout.shares]
        return Node(self.directory, index, subnet=layout.subnet, prefix=layout.prefix, shares=shares)

    @property
    def slurm(self) -> Slurm:
        """The bed's Slurm, running or not."""
        return Slurm(self.directory, self.nodes, f"{self.layout.subnet}.1")

    @property
    def bridge(self) -> str:
        """The name of the network bridge on this machine."""
        return f"{self.layout.prefix}br"

    # --- Up and down --------------------------------------

    def up(self, nodes: int, *, subnet: str | None, prefix: str | None, shares: Sequence[str]) -> None:
        """Build the bed and boot its nodes; whatever goes wrong on the way, nothing is left of it."""
        lacking = missing()
        if lacking:
            raise BedError(f"no test bed can be built here; missing: {'; '.join(lacking)}")
        if not 1 <= nodes <= MOST_NODES:
            raise BedError(f"--nodes is 1 to {MOST_NODES}")
        if self.exists:
            raise BedError(
                f"there is a test bed in {self.directory} already: scripts/testbed status (or down)"
            )
        if self.directory.is_dir() and any(self.directory.iterdir()):
            raise BedError(f"{self.directory} is not empty: give another --dir")
        try:
            self._build(nodes, subnet, prefix, shares)
            self._boot(self.nodes)
            self._check_peers()
        except BaseException:
            self.down()
            raise

    def _build(self, nodes: int, subnet: str | None, prefix: str | None, shares: Sequence[str]) -> None:
        with _machine_lock():
            subnet, prefix = _choose_network(subnet, prefix)
            self.directory.mkdir(parents=True, exist_ok=True)
            self.directory.chmod(0o755)
            layout = Layout(nodes, subnet, prefix, [os.path.abspath(share) for share in shares])
            self._description.write_text(json.dumps(asdict(layout)), encoding="utf-8")
            run("ip", "link", "add", self.bridge, "type", "bridge", "stp_state", "0", "forward_delay", "0")
            run("ip", "address", "add", f"{subnet}.1/24", "dev", self.bridge)
            run("ip", "link", "set", self.bridge, "up")
        for name in ("shared", "head/home/.ssh"):
            (self.directory / name).mkdir(parents=True)
        key = self._key
        key.parent.chmod(0o700)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testbed", "-f", key)
        self._write_head()
        self._write_nodes(self.nodes)

    @property
    def _key(self) -> Path:
        return self.directory / "head/home/.ssh/id_ed25519"

    def _write_head(self) -> None:
        head = self.directory / "head"
        subnet = self.layout.subnet
        names = [f"{subnet}.1 head", *(f"{node.address} {node.name}" for node in self.nodes)]
        hosts = "\n".join(["127.0.0.1 localhost", "::1 localhost ip6-localhost", *names]) + "\n"
        (self.directory / "hosts").write_text(hosts, encoding="ascii")
        (head / "hosts").write_text(hosts, encoding="ascii")
        (head / "home/.ssh/config").write_text(SSH_CONFIG, encoding="ascii")
        (head / "home/.ssh/config").chmod(0o600)
        mounts = [*shadowed_home(head / "home"), fstab(head / "home", home(), "rbind")]
        mounts += [fstab(head / "hosts", "/etc/hosts", "bind")]
        (head / "fstab").write_text("".join(mounts), encoding="utf-8")

    def _write_nodes(self, nodes: Sequence[Node]) -> None:
        hosts = (self.directory / "hosts").read_text(encoding="ascii")
        for node in nodes:
            node.write_files(hosts, self._key)
        known_hosts = "".join(node.known_hosts_line() for node in self.nodes if node.host_key.exists())
        for holder in ("head", *(node.name for node in self.nodes)):
            path = self.directory / holder / "home/.ssh/known_hosts"
            path.write_text(known_hosts, encoding="ascii")
            path.chmod(0o600)

    def _boot(self, nodes: Sequence[Node]) -> None:
        processes = [node.boot() for node in nodes]
        for node, process in zip(nodes, processes):  # noqa: B905 - `strict` needs Python 3.10; a system may have an older one
            node.plug(process)
        for node, process in zip(nodes, processes):  # noqa: B905 - `strict` needs Python 3.10; a system may have an older one
            node.wait_until_ready(process)

    def node_up(self, index: int) -> None:
        """Boot a node that is down; it comes up healthy."""
        node = self.node(index)
        if node.pid is not None:
            raise BedError(f"{node.name} is up already")
        node.down(links())  # what a node that died by itself has left behind
        self._write_nodes([node])
        self._boot([node])

    def down(self) -> None:
        """End everything of this bed and remove its files; does nothing where there is none."""
        if not self.exists:
            return
        inside = mounts_below(self.directory)
        if inside:
            raise BedError(f"leave the head's view first: here {inside[0]} is a mount")
        layout = self.layout
        nodes = self.nodes
        with contextlib.suppress(BedError):
            self.slurm.down()
        present = links()
        for node in nodes:
            node.down(present)
        if self.bridge in present:
            run("ip", "link", "delete", self.bridge)
        assert not (links() & {f"{layout.prefix}br", *(node.link for node in nodes)}), (
            "a link outlived its bed"
        )
        # Last of all, so that a `down` that was cut off can be done again.
        for entry in self.directory.iterdir():
            if entry != self._description:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self._description.unlink()
        self.directory.rmdir()

    # --- In use -------------------------------------------

    def head_command(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs argv as a user of the cluster, on this machine."""
        # Each step but the last is an exec: the caller's child is the command itself.
        enter = 'mount --all --fstab "$0/fstab" && echo head >/proc/sys/kernel/hostname'
        script = f'{enter} && cd "$1" && shift && exec "$@"'
        here = str(self.directory / "head")
        return [program("unshare"), "--mount", "--uts", "sh", "-c", script, here, os.getcwd(), *argv]

    def head_environment(self) -> dict[str, str]:
        """Return the environment of the head's view: the caller's, with its home."""
        return {**os.environ, "HOME": home(), "TESTBED_DIR": str(self.directory)}

    def status(self) -> dict[str, Any]:
        """Return what there is, as `status --json` prints it."""
        layout = self.layout
        return {
            "directory": str(self.directory),
            "shared": str(self.directory / "shared"),
            "subnet": f"{layout.subnet}.0/24",
            "head": f"{layout.subnet}.1",
            "slurm": self.slurm.configuration if self.slurm.running else None,
            "nodes": [
                {
                    "name": node.name,
                    "address": node.address,
                    "pid": node.pid,
                    "link": node.link,
                    "faults": [" ".join([name, *arguments]) for name, arguments in node.faults],
                }
                for node in self.nodes
            ],
        }

    def _check_peers(self) -> None:
        """Raise BedError where the first two nodes do not reach each other, for a firewall here."""
        if self.layout.nodes == 1:
            return
        first, second = self.nodes[:2]
        try:
            first.run("timeout", "5", "bash", "-c", f"exec 3<>/dev/tcp/{second.address}/22")
        except BedError as error:
            raise BedError(
                "the nodes do not reach each other: does this machine filter what passes its bridges? "
                "(sysctl net.bridge.bridge-nf-call-iptables=0 lets it through)"
            ) from error

    def fault(self, name: str, index: int, arguments: list[str]) -> None:
        """Make something go wrong on a node."""
        faults.apply(self.node(index), name, arguments)

    def heal(self, indices: Sequence[int]) -> None:
        """Undo all faults of some nodes, or of all."""
        for node in [self.node(index) for index in indices] or self.nodes:
            if node.pid is not None:
                faults.heal(node)


def _choose_network(subnet: str | None, prefix: str | None) -> tuple[str, str]:
    present = links()

    def taken(name: str) -> bool:
        return f"{name}br" in present

    if prefix is not None and (len(prefix) > LONGEST_PREFIX or not prefix.isalnum()):
        raise BedError(
            f"--prefix is at most {LONGEST_PREFIX} letters and digits: it begins names of interfaces"
        )
    if prefix is not None and taken(prefix):
        raise BedError(f"--prefix {prefix}: this machine has an interface {prefix}br already")
    if subnet is None:
        found, own_prefix = unused_subnet(taken)
        return found, prefix or own_prefix
    try:
        free = is_free(subnet, list(networks()))
    except ValueError as error:
        raise BedError(
            f"--subnet {subnet}: give the first three numbers of a /24, such as 10.77.5"
        ) from error
    if not free:
        raise BedError(
            f"--subnet {subnet}: this machine has an address in it or a route to it; leave --subnet out"
        )
    return subnet, prefix or f"sl{subnet.rpartition('.')[2]}"


@contextlib.contextmanager
def _machine_lock() -> Iterator[None]:
    os.makedirs(os.path.dirname(LOCK), exist_ok=True)
    with open(LOCK, "w", encoding="ascii") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
