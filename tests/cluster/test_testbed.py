"""The test bed itself: it leaves nothing behind, refuses what it can't do, and stands beside others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from testbed import TOOL, Bed

pytestmark = [pytest.mark.cluster]

NEEDED_ARGUMENTS = {
    "pair-cut": ["2"],
    "unknown-name": ["2"],
    "port-busy": ["29500"],
    "extra-port": ["2222"],
    "clone": ["2", "machine-id"],
    "slow-shell": ["1"],
    "clock-skew": ["100"],
    "hidden-path": [__file__],
    "different-file": [__file__],
}


TOGETHER = [
    "noisy-shell",
    "bare-path",
    "old-python",
    "slow-shell",
    "different-file",
    "no-python3",
    "small-shm",
    "full-tmp",
    "password-only",
    "clock-skew",
    "extra-port",
    "account-closed",
    "account-expired",
    "loopback-hostname",
    "unknown-name",
    "unknown-host-key",
    "clone",
    "port-busy",
    "max-startups",
    "drop-port",
    "pair-cut",
    "link-down",
]
"""Faults that share files, mounts or the sshd; the last ones would keep others from being made."""


class OwnBed(Bed):
    """A bed of a test's own, with a memory of the network interfaces that it had."""

    links: frozenset[tuple[str, str]] = frozenset()

    def up(self, nodes=2):
        self.tool("up", "--nodes", nodes)
        self.remember()

    def remember(self):
        names = [node["link"] for node in self.status["nodes"]]
        # With its number: beside us, another bed may take the name at once.
        self.links |= interfaces() & {(name, number(name)) for name in [*names, bridge(names[0])]}

    def remains(self):
        """Return all that is left of it on this machine, in words."""
        found = [f"link {name}" for name, _ in self.links & interfaces()]
        for pid in filter(str.isdigit, os.listdir("/proc")):
            command, mounts = read(f"/proc/{pid}/cmdline"), read(f"/proc/{pid}/mountinfo")
            # Every process of a node sees mounts from the bed's directory.
            if str(self.directory) in mounts or (int(pid) != os.getpid() and str(self.directory) in command):
                found.append(f"process {pid}: {command}")
        if self.directory.exists():
            found.append(f"files: {sorted(map(str, self.directory.rglob('*')))}")
        return found

    def is_gone(self, seconds=10.0):
        deadline = time.monotonic() + seconds
        while (left := self.remains()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == []

    def refuses(self, *arguments):
        """Run the tool, which must fail with a message and nothing else; return that."""
        command = [*TOOL, "--dir", str(self.directory), *map(str, arguments)]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
        )
        assert done.returncode == 1, f"{command}: {done}"
        assert done.stdout == ""
        assert re.fullmatch(r"testbed: .+\n", done.stderr), done.stderr
        return done.stderr


def namespaces(pid):
    """Return the namespaces of a process; none where it has ended."""
    names = (link_target(f"/proc/{pid}/ns/{kind}") for kind in ("net", "pid", "mnt", "uts", "ipc"))
    return {name for name in names if name}


def interfaces():
    return {(name, number(name)) for name in os.listdir("/sys/class/net")}


def number(interface):
    return read(f"/sys/class/net/{interface}/ifindex")


def link_target(path):
    try:
        return os.readlink(path)
    except OSError:
        return None


def bridge(link):
    return re.sub(r"v\d+$", "br", link)


def read(path):
    try:
        return Path(path).read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def make():
    """Makes beds (not booted yet) that are gone after the test."""
    beds = []

    def make():
        beds.append(OwnBed(Path(tempfile.mkdtemp(prefix="safelaunch-testbed-", dir="/var/tmp")) / "bed"))
        return beds[-1]

    yield make
    for bed in beds:
        bed.tool("down")
        bed.directory.parent.rmdir()


@pytest.fixture
def own(make):
    return make()


def healthy(_bed):
    pass


def kill_init(bed):
    os.kill(bed.status["nodes"][1]["pid"], signal.SIGKILL)


def with_faults(bed):
    for fault in ("changed-host-key", "silent-banner", "no-python3", "full-tmp", "link-down"):
        bed.fault(fault, 1)
    for fault in ("max-startups", "frozen-sshd", "old-python"):
        bed.fault(fault, 2)
    bed.fault("hidden-path", 2, __file__)
    bed.fault("port-busy", 2, 29500)


def with_processes(bed):
    detached = "setsid sleep 100 </dev/null >/dev/null 2>&1 &"
    bed.sh(1, "sh", "-c", detached)
    bed.head("ssh", "node2", detached)
    assert bed.pid(1, "sleep 100")
    assert bed.pid(2, "sleep 100")


def half_down(bed):
    bed.tool("node-down", 1)
    bed.tool("node-down", 2, "--silent")


@pytest.mark.parametrize(
    "state", [healthy, kill_init, with_faults, with_processes, half_down], ids=lambda state: state.__name__
)
def test_nothing_is_left(own, state):
    own.up()
    assert own.remains(), "it would find what is left"
    state(own)
    own.tool("down")

    own.is_gone()
    own.tool("down")  # there is nothing to do, and that is no error


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_an_up_that_is_cut_off(own, signum):
    command = [*TOOL, "--dir", str(own.directory), "up", "--nodes", "8"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 30
    while not (own.directory / "node3").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    prefix = json.loads((own.directory / "bed.json").read_text(encoding="utf-8"))["prefix"]
    own.links |= {(name, number) for name, number in interfaces() if name == f"{prefix}br"}
    assert own.links
    process.send_signal(signum)

    assert process.wait(60) != 0
    if signum == signal.SIGKILL:
        assert own.remains()
        own.tool("down")
    own.is_gone()


def test_status_and_nodes_that_go_and_come_back(own):
    own.up(2)
    own.fault("noisy-shell", 2)
    status = own.status
    assert status["directory"] == str(own.directory)
    assert status["shared"] == str(own.shared)
    assert own.shared.is_dir()
    assert [node["name"] for node in status["nodes"]] == ["node1", "node2"]
    assert [node["faults"] for node in status["nodes"]] == [[], ["noisy-shell"]]
    assert status["slurm"] is None
    for index, node in enumerate(status["nodes"], start=1):
        assert node["address"] == f"{status['subnet'].removesuffix('.0/24')}.{10 + index}"
        assert own.sh(index, "hostname").strip() == node["name"]
        assert os.path.exists(f"/sys/class/net/{node['link']}")
    listing = own.tool("status")
    assert "node2" in listing
    assert "faults: noisy-shell" in listing
    identity = own.sh(2, "cat", "/etc/machine-id", "/proc/sys/kernel/random/boot_id")

    own.tool("node-down", 2)
    assert [node["pid"] is None for node in own.status["nodes"]] == [False, True]
    assert "node2 is down: scripts/testbed node-up 2" in own.refuses("sh", 2, "true")
    assert "node1 is up already" in own.refuses("node-up", 1)
    assert own.head("ssh", "-o", "ConnectTimeout=2", "node2", "true").returncode == 255
    own.tool("node-up", 2)
    own.remember()

    assert own.status["nodes"][1]["faults"] == []
    assert own.sh(2, "cat", "/etc/machine-id", "/proc/sys/kernel/random/boot_id") == identity
    there = own.head("ssh", "node2", "hostname; cat")
    assert (there.returncode, there.stdout) == (0, "node2\n"), there.stderr

    os.kill(own.status["nodes"][0]["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while own.status["nodes"][0]["pid"] is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    own.tool("node-up", 1)
    own.remember()
    assert own.head("ssh", "node1", "hostname").stdout == "node1\n"
    own.tool("down")
    own.is_gone()


def test_what_is_refused(own):
    for arguments, message in (
        (["status"], f"there is no test bed in {own.directory}: scripts/testbed up"),
        (["sh", 1, "true"], "there is no test bed"),
        (["up", "--nodes", 0], "--nodes is 1 to 200"),
        (["up", "--nodes", 201], "--nodes is 1 to 200"),
        (["up", "--prefix", "muchtoolong"], "--prefix is at most 8 letters and digits"),
        (["up", "--prefix", "a/b"], "--prefix is at most 8 letters and digits"),
        (["up", "--subnet", "10.77"], "give the first three numbers of a /24"),
        (["up", "--subnet", "127.0.0"], "leave --subnet out"),
    ):
        assert message in own.refuses(*arguments)
        own.is_gone(0)
    own.directory.mkdir()
    (own.directory / "precious").touch()
    assert "is not empty: give another --dir" in own.refuses("up")
    assert [path.name for path in own.directory.iterdir()] == ["precious"]
    (own.directory / "precious").unlink()

    own.up(2)
    subnet = own.status["subnet"].removesuffix(".0/24")
    for arguments, message in (
        (["up"], "there is a test bed in"),
        (["sh", 3, "true"], "no node 3: this bed has nodes 1 to 2"),
        (["node-down", 0], "no node 0"),
        (["heal", 7], "no node 7"),
        (["fault", "nonsense", 1], "no fault 'nonsense'; there are: account-closed, "),
        (["fault", "drop-port"], "usage: scripts/testbed fault drop-port N"),
        (["fault", "pair-cut", 1], "usage: scripts/testbed fault pair-cut N PEER"),
        (["fault", "pair-cut", 1, 1], "there is no other node 1"),
        (["fault", "clone", 1, 3, "boot-id"], "there is no other node 3"),
        (["fault", "drop-port", 1, "ssh"], "usage: scripts/testbed fault drop-port N [PORT]"),
        (["fault", "clock-skew", 1, "much"], "usage: scripts/testbed fault clock-skew N SECONDS"),
        (["fault", "hidden-path", 1, "/tmp/nothing"], "/tmp/nothing does not exist"),
        (["fault", "hidden-path", 1, "/etc"], "stands at the top"),
        (["fault", "different-file", 1, "/etc"], "/etc is no file"),
    ):
        assert message in own.refuses(*arguments)
    assert own.status["nodes"][0]["faults"] == []
    listing = own.tool("fault")
    assert "refuse-port N [PORT]" in listing
    inside = own.head(*TOOL, "--dir", str(own.directory), "down")
    assert inside.returncode == 1
    assert "leave the head's view first" in inside.stderr
    other = OwnBed(own.directory.parent / "other")
    assert "leave --subnet out" in other.refuses("up", "--subnet", subnet)
    other.is_gone(0)


def test_two_beds_beside_each_other(make):
    beds = [make(), make()]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda bed: bed.up(2), beds))
    one, two = beds
    assert one.status["subnet"] != two.status["subnet"]
    assert not one.links & two.links
    of_each = [set().union(*(namespaces(node["pid"]) for node in bed.status["nodes"])) for bed in beds]
    assert not of_each[0] & of_each[1]
    seen = [bed.head("ssh", "node1", "cat /etc/machine-id").stdout for bed in beds]
    assert seen[0]
    assert seen == [bed.sh(1, "cat", "/etc/machine-id") for bed in beds]
    assert seen[0] != seen[1]
    one.fault("refuse-port", 1)
    assert two.head("ssh", "node1", "true").returncode == 0
    one.tool("down")
    one.is_gone()

    assert two.head("ssh", "node2", "hostname").stdout == "node2\n"


def test_every_fault_is_undone(own):
    """Each alone, then all that go together: files, mounts and firewall are as they were."""
    own.up(2)
    names = [line.split()[0] for line in own.tool("fault").splitlines()]
    assert set(NEEDED_ARGUMENTS) <= set(names)
    before = condition(own)
    for name in names:
        own.fault(name, 1, *NEEDED_ARGUMENTS.get(name, []))
        own.heal()
        assert condition(own) == before, name
    for name in TOGETHER:
        own.fault(name, 1, *NEEDED_ARGUMENTS.get(name, []))
    own.heal(1)
    assert condition(own) == before
    assert own.head("ssh", "node1", "hostname").stdout == "node1\n"


def condition(bed):
    """Return what faults change of node1: its files, its mounts, its firewall, its processes, its link."""
    status = bed.status["nodes"][0]
    node, head, pid = bed.directory / "node1", bed.directory / "head", status["pid"]
    files = [*node.glob("*"), *node.glob("home/.*"), *node.glob("home/.ssh/*"), *node.glob("etc_ssh/*")]
    files += [head / "home/.ssh/known_hosts", head / "hosts"]
    texts = {str(file): file.read_text("utf-8") for file in files if file.is_file()}
    texts.pop(str(node / "faults.json"), None)
    mounts = [line.split(" - ")[0].split()[3:] for line in read(f"/proc/{pid}/mountinfo").splitlines()]
    here = [other for other in os.listdir("/proc") if other.isdigit() and in_one_place(other, pid)]
    commands = [read(f"/proc/{other}/cmdline") for other in here]
    inside = "df --output=size,used /tmp /dev/shm; nft list ruleset"
    return {
        "files": {name: sorted(text.splitlines()) for name, text in texts.items()},
        "mounts": sorted(mounts),
        "inside": bed.sh(1, "sh", "-c", inside),
        "processes": sorted(line for line in commands if line and not line.startswith("sshd: ")),
        "link": read(f"/sys/class/net/{status['link']}/operstate"),
    }


def in_one_place(one, other):
    return link_target(f"/proc/{one}/ns/pid") == link_target(f"/proc/{other}/ns/pid")
