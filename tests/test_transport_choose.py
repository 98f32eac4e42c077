"""Which transport reaches which host, and what the parts promise on their own."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

import pytest

from safelaunch.transport import choose
from safelaunch.transport.base import STDERR_KEPT
from safelaunch.transport.known_hosts import Known
from safelaunch.transport.openssh_text import judge, read
from safelaunch.transport.ssh_config import SshConfig, Target
from safelaunch.transport.streams import Tail, split_lines
from safelaunch.transport.watchdog import Watchdog


def chosen(home, hosts, name="auto", port=None):
    transport = choose.make(name, hosts, ssh_port=port, fanout=4, environ=os.environ, home=str(home))
    transport.close()
    return transport.name


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.4.5.6", "::1", socket.gethostname()])
def test_this_machine_alone_needs_no_ssh(tmp_path, host):
    assert chosen(tmp_path, [host]) == "local"
    assert chosen(tmp_path, [host], "ssh") == "ssh"
    assert chosen(tmp_path, [host], "openssh") == "openssh"
    assert chosen(tmp_path, [host, "node2"]) == "ssh"
    assert chosen(tmp_path, [host], port=2222) == "ssh"
    assert chosen(tmp_path, [f"alice@{host}"]) == "ssh"


@pytest.mark.parametrize("host", ["node1", "10.0.0.1", "-x", "localhost.example"])
def test_any_other_host_goes_by_ssh(tmp_path, host):
    assert chosen(tmp_path, [host]) == "ssh"


def test_a_name_of_this_machine_that_leads_elsewhere(tmp_path):
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host localhost\n HostName 10.0.0.1\n")
    assert chosen(tmp_path, ["localhost"]) == "ssh"


def test_a_transport_that_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match="srun"):
        chosen(tmp_path, ["node1"], "srun")


@pytest.mark.parametrize(
    "chunks",
    [[b"a\nb\n"], [b"a", b"\n", b"b\n"], [b"a\n", b"b", b"\n"], [b"a\nb", b"\n"], [b"a\nb"]],
)
def test_lines_do_not_depend_on_chunks(chunks):
    rest = iter([*chunks, b""])
    assert list(split_lines(lambda: next(rest))) == [b"a", b"b"]


def test_tail_keeps_the_end():
    tail = Tail()
    for number in range(100_000):
        tail.feed(b"%06d" % number)
    assert tail.bytes().endswith(b"099999")
    assert len(tail.bytes()) == STDERR_KEPT


def test_watchdog_acts_once_and_in_time():
    dog = Watchdog()
    acted = []
    with (
        dog.limit(30, lambda: acted.append("late")) as slow,
        dog.limit(0.05, lambda: acted.append("soon")) as soon,
    ):
        deadline = time.monotonic() + 20
        while not acted and time.monotonic() < deadline:
            time.sleep(0.01)
    assert acted == ["soon"]
    assert (slow.fired, soon.fired) == (False, True)
    with dog.limit(0.01, lambda: acted.append("never")) as ended:
        pass
    time.sleep(0.1)
    assert not ended.fired
    assert acted == ["soon"]
    dog.close()
    assert "safelaunch-watchdog" not in {thread.name for thread in threading.enumerate()}


def test_connections_are_made_in_many_threads_at_once(tmp_path):
    """fabric writes an attribute of a connection into the Config that all share, unless the class has it."""
    import fabric

    from safelaunch.transport.handshake import Handshake, _Connection
    from safelaunch.transport.keys import KeyRing
    from safelaunch.transport.known_hosts import KnownHosts

    shared = Handshake(KeyRing(), KnownHosts(), Watchdog())._config
    failed = []

    def many(kind):
        try:
            for number in range(20):
                kind(host=f"10.0.0.{number}", user="u", port=22, config=shared)
        except AttributeError as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=many, args=(_Connection,)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert issubclass(_Connection, fabric.Connection)
    assert not failed


DIALLING = "debug1: Connecting to node1 [10.0.0.1] port 22.\n"
ESTABLISHED = DIALLING + "debug1: Connection established.\n"
CONNECTED = ESTABLISHED + (
    "debug1: Remote protocol version 2.0, remote software version OpenSSH_8.0\n"
    "debug1: Server host key: ssh-ed25519 SHA256:abc\n"
)
DENIED = CONNECTED + "user@node1: Permission denied "


@pytest.mark.parametrize(
    ("text", "code", "seen"),
    [
        ("ssh: Could not resolve hostname node1: Name or service not known", "name", "service not known"),
        (DIALLING + "ssh: connect to host node1 port 22: No route to host", "no_route", "No route to host"),
        (DIALLING + "ssh: connect to host node1 port 22: Connection timed out", "timeout", "10.0.0.1"),
        (ESTABLISHED + "ssh_exchange_identification: Connection closed by remote host", "closed", "a word"),
        (
            ESTABLISHED + "debug1: kex_exchange_identification: banner line 0: HTTP/1.1 400 Bad Request\n"
            "kex_exchange_identification: Connection closed by remote host",
            "not_ssh",
            "HTTP/1.1 400",
        ),
        (
            ESTABLISHED + "debug1: kex_exchange_identification: banner line 0: Exceeded MaxStartups\n"
            "kex_exchange_identification: Connection closed by remote host",
            "throttled",
            "3 times",
        ),
        (ESTABLISHED + "Connection timed out during banner exchange", "no_banner", "silent"),
        (
            CONNECTED + "Unable to negotiate with 10.0.0.1 port 22: no matching cipher",
            "closed",
            "no matching",
        ),
        (
            CONNECTED + "debug1: Offering public key: /k RSA\nConnection closed by 10.0.0.1",
            "account",
            "/k RSA",
        ),
        (
            "OpenSSH_9.2p1, OpenSSL 3.0\n" + CONNECTED + "debug1: Offering public key: /k RSA\n"
            "Your account has expired.\nConnection closed by 10.0.0.1",
            "account",
            "/k RSA: Your account has expired.; Connection closed",
        ),
        (DENIED + "(password,keyboard-interactive).", "password_only", "password"),
        (DENIED + "(publickey,gssapi-with-mic).", "auth", "no key at all"),
        ("/home/u/.ssh/config: line 3: Bad configuration option: foo\n", "config", "line 3"),
        ("Bad owner or permissions on /home/u/.ssh/config\n", "config", "permissions"),
    ],
)
def test_what_the_ssh_program_says(text, code, seen):
    target = Target(name="node1", hostname="node1", user="user")
    found = judge(
        read(text.encode()), target, Known(), locked=(), late=None, drops=3, output=b"", seconds=1.0
    )
    assert (found.code, found.host) == (f"ssh.{code}", "node1")
    assert seen in found.observed


def test_no_configuration_at_all(tmp_path):
    target = SshConfig(str(tmp_path), {}, system="/nonexistent").lookup("node1")
    assert (target.hostname, target.port, target.openssh_because) == ("node1", 22, None)
    assert [os.path.basename(path) for path in target.identity_files][-2:] == ["id_ed25519", "id_ed25519_sk"]
