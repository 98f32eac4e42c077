"""Each way of not reaching a node, made for real: its own finding, on both transports, in bounded time."""

from __future__ import annotations

import sys
import time

import pytest
from checked import TRANSPORTS, check, traces

pytestmark = [pytest.mark.cluster]

SOON = ("--ssh-timeout", "2")


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture(scope="module")
def healthy(running_bed):
    return traces(running_bed)


@pytest.fixture(autouse=True)
def nothing_is_left(running_bed, healthy):
    """Once its faults are healed (by `bed`), every node has the processes and files of a healthy one."""
    yield
    deadline = time.monotonic() + 10
    while (after := traces(running_bed)) != healthy and time.monotonic() < deadline:
        time.sleep(0.1)
    assert after == healthy


@pytest.fixture
def ssh_config(bed):
    """Writes the user's ~/.ssh/config; the bed's own is back after the test."""
    path = bed.directory / "head/home/.ssh/config"
    own = path.read_text(encoding="utf-8")
    yield lambda text: path.write_text(text + own, encoding="utf-8")
    path.write_text(own, encoding="utf-8")


@pytest.mark.parametrize(
    ("fault", "code", "why", "fix"),
    [
        ("unknown-host-key", "ssh.host_key_unknown", "SHA256:", "ssh-keyscan -t ed25519 node2 >> "),
        ("changed-host-key", "ssh.host_key_changed", "but known is", "ssh-keygen -R node2 -f "),
        ("refused-key", "ssh.auth", "refused the login as root; offered: ", "ssh-copy-id root@node2"),
        ("password-only", "ssh.password_only", "but by: password", "ssh-copy-id root@node2"),
        ("refuse-port", "ssh.refused", "port 22 refuses", "on node2: sudo systemctl start ssh"),
        ("no-sshd", "ssh.refused", "port 22 refuses", "on node2: sudo systemctl start ssh"),
        ("prohibit-port", "ssh.no_route", "No route to host", "ip route get 1"),
        ("not-ssh", "ssh.not_ssh", "it says 'HTTP/1.1 400 Bad Request'", "--ssh_port"),
        ("account-closed", "ssh.account", "account is currently not available", "getent passwd"),
        ("account-expired", "ssh.account", "account has expired", "on node2: getent passwd root"),
        ("no-python3", "ssh.python_missing", "no python3 on the PATH", "apt-get install python3"),
        ("old-python", "ssh.python_old", "its python3 is 3.6.8", "install python3"),
    ],
)
def test_a_fault_that_shows_at_once(safelaunch, transport, fault, code, why, fix):
    bed = safelaunch.bed
    bed.fault(fault, 2, *([sys.executable] if fault == "no-python3" else []))
    found = check(safelaunch, "--transport", transport, seconds=8)

    found.is_error(code, "node2", why=why, fix=fix)


@pytest.mark.parametrize(
    "faults",
    [
        {
            "drop-port": ("ssh.timeout", "no answer from node2", "ping -c 3 {address}"),
            "silent-banner": (
                "ssh.no_banner",
                "node3 ({address}) port 22 accepts",
                "on the console of node3: ",
            ),
            "refused-key": ("ssh.auth", "refused the login as root", "ssh-copy-id root@node4"),
        },
        {
            "link-down": ("ssh.timeout", "no answer from node2", "ping -c 3 {address}"),
            "frozen-sshd": (
                "ssh.no_banner",
                "node3 ({address}) port 22 accepts",
                "on the console of node3: ",
            ),
            "max-startups": (
                "ssh.throttled",
                "'Exceeded MaxStartups'",
                "on node4, in /etc/ssh/sshd_config: ",
            ),
        },
    ],
)
def test_faults_that_only_time_shows_are_told_apart(safelaunch, transport, faults):
    """On node2, node3 and node4, all at once: that is no slower than one."""
    bed = safelaunch.bed
    safelaunch.write("hosts", "".join(f"node{index} slots=2\n" for index in (1, 2, 3, 4)))
    for index, fault in enumerate(faults, start=2):
        bed.fault(fault, index)
    found = check(safelaunch, *SOON, "--transport", transport, seconds=8)

    assert found.status == 69
    assert found.failed == ["node2", "node3", "node4"]
    assert {finding["code"] for finding in found.findings} == {code for code, _, _ in faults.values()}
    by_code = {finding["code"]: finding for finding in found.findings}
    for index, (code, why, fix) in enumerate(faults.values(), start=2):
        finding, address = by_code[code], bed.address(index)
        assert (finding["severity"], finding["hosts"]) == ("error", [f"node{index}"]), finding
        assert why.format(address=address) in finding["observed"]
        assert fix.format(address=address) in finding["fix"]
    assert found.document["hosts"][0]["seconds"] < 2, "the fit node was held up by the others"


def test_an_unresolvable_name(safelaunch, transport):
    safelaunch.write("hosts", "node1 slots=2\nnodezwei.invalid slots=2\n")
    found = check(safelaunch, "--transport", transport)

    found.is_error("ssh.name", "nodezwei.invalid", fix="getent hosts nodezwei.invalid")


def test_a_noisy_shell_is_fit(safelaunch, transport):
    safelaunch.bed.fault("noisy-shell", 2, "Last login: Thu")
    found = check(safelaunch, "--transport", transport)

    found.is_warning("ssh.noise", "node2", why="Last login: Thu", fix="at the top of ~/.bashrc")


def test_a_throttled_node_is_fit_in_the_end(safelaunch, transport):
    safelaunch.bed.fault("max-startups", 2, 1)
    found = check(safelaunch, "--transport", transport)

    found.is_warning("ssh.throttled", "node2", why="turned us away", fix="MaxStartups 1000")


def test_a_python_beside_the_path_will_do(safelaunch, transport):
    safelaunch.bed.fault("bare-path", 2)

    assert check(safelaunch, "--transport", transport).findings == []


def test_a_slow_shell_is_fit(safelaunch):
    safelaunch.bed.fault("slow-shell", 2, 3)

    check(safelaunch).is_warning("node.slow_answer", "node2", fix="ssh node2 ")


def test_one_fault_of_several_nodes_is_one_finding(safelaunch):
    safelaunch.write("hosts", "".join(f"node{index} slots=2\n" for index in (1, 2, 3)))
    for index in (2, 3):
        safelaunch.bed.fault("unknown-host-key", index)

    found = check(safelaunch)
    found.is_error("ssh.host_key_unknown", "node2", "node3", fix="ssh-keyscan -t ed25519 node2 >> ")
    assert "ssh-keyscan -t ed25519 node3 >> " in found.finding["fix"]


def test_what_the_users_ssh_config_says_is_done(safelaunch, transport, ssh_config):
    """HostName, Port, User and IdentityFile; and a node that can only be reached through another one."""
    bed = safelaunch.bed
    bed.fault("extra-port", 2, 2222)
    bed.fault("refuse-port", 2)
    bed.fault("pair-cut", 3, "head")
    keys = bed.directory / "head/home/.ssh"
    known_hosts = keys / "known_hosts"
    own_known_hosts = known_hosts.read_text(encoding="ascii")
    (keys / "id_ed25519").rename(keys / "cluster_key")
    ssh_config(
        "Host zwei\n HostName node2\n Port 2222\n HostKeyAlias node2\n"
        "Host drei\n HostName node3\n ProxyJump node1\n HostKeyAlias node3\n"
        "Host *\n User root\n IdentityFile ~/.ssh/cluster_key\n"
    )
    safelaunch.write("hosts", "node1 slots=2\nzwei slots=2\ndrei slots=2\n")
    try:
        reached = check(safelaunch, "--transport", transport)
        bed.fault("pair-cut", 3, 1)
        cut = check(safelaunch, *SOON, "--transport", transport)
    finally:
        (keys / "cluster_key").rename(keys / "id_ed25519")
    assert known_hosts.read_text(encoding="ascii") == own_known_hosts

    assert reached.findings == []
    cut.is_error("ssh.proxy", "drei", why="node1", fix="ssh -v drei true")


def test_another_user_of_the_ssh_config(safelaunch, transport, ssh_config):
    ssh_config("Host node2\n User nosuchuser\n")
    found = check(safelaunch, "--transport", transport)

    found.is_error("ssh.auth", "node2", why="login as nosuchuser", fix="ssh-copy-id nosuchuser@node2")
