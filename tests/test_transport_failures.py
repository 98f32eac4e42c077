"""Every way not to get onto a node, made to happen for real, and what the user is told then."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time

import paramiko
import pytest
import sshd as sshds

from safelaunch.transport import choose, dial, failures
from safelaunch.transport.base import Unreachable

pytestmark = [pytest.mark.sshd, pytest.mark.timeout(180)]
HOST, OTHER = "127.72.0.1", "127.72.0.2"
LONG = 30.0
SHORT = 2.0


@pytest.fixture(autouse=True)
def _needs_sshd():
    if reason := sshds.missing():
        pytest.skip(reason)


@pytest.fixture(params=["ssh", "openssh"])
def name(request):
    return request.param


@pytest.fixture
def serve(tmp_path):
    """Start a server with options; all are ended with the test."""
    with contextlib.ExitStack() as stack:

        def start(*options, addresses=(HOST,), where="a", **more):
            server = sshds.Sshd(tmp_path / where, list(addresses), options=list(options), **more)
            return stack.enter_context(server)

        yield start


@contextlib.contextmanager
def reaching(name, home, hosts, *, timeout=LONG, environ=None, port=None, fanout=64):
    """Open hosts with a transport; yields the results by host."""
    before = set(threading.enumerate())
    transport = choose.make(
        name, hosts, ssh_port=port, fanout=fanout, environ={**os.environ, **(environ or {})}, home=str(home)
    )
    results = {}
    try:
        transport.open(hosts, results.__setitem__, timeout=timeout)
        assert set(results) == set(hosts)
        yield results
    finally:
        transport.close()
    deadline = time.monotonic() + LONG
    while left := [t for t in set(threading.enumerate()) - before if t.name != "safelaunch-resolve"]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def reach(name, home, host=HOST, **options):
    with reaching(name, home, [host], **options) as results:
        return results[host]


def failure(name, home, code, host=HOST, **options):
    result = reach(name, home, host, **options)
    assert isinstance(result, Unreachable), f"{host} could be opened"
    assert (result.host, result.code) == (host, code), result
    assert result.observed
    assert result.why
    assert result.fix
    return result


def opens(name, home, host=HOST, **options):
    with reaching(name, home, [host], **options) as results:
        assert not isinstance(results[host], Unreachable), results[host]
        channel = results[host].start("echo in")
        assert b"in" in list(channel.lines())
        assert channel.wait(LONG) == 0
        return results[host]


def shell(command):
    subprocess.run(
        ["bash", "-c", command], check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=60
    )


def home_for(tmp_path, port):
    """Make a home for a port where no sshd listens."""
    server = sshds.Sshd(tmp_path / "home-only", [HOST], port=port)
    sshds.make_key(server.user_key)
    server.write_config("LogLevel INFO")
    return server.home


class Listener:
    """A TCP server that is no sshd; `answer` gets each connection."""

    def __init__(self, answer, address=HOST):
        self._answer = answer
        self._server = socket.create_server((address, 0))
        self.port = self._server.getsockname()[1]
        self._taken = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()
        for taken in self._taken:
            taken.close()

    def _run(self):
        with contextlib.suppress(OSError):
            while True:
                taken, _ = self._server.accept()
                self._taken.append(taken)
                self._answer(taken)


def hold(server):
    """Take one of the places that MaxStartups counts."""
    while True:
        taken = socket.create_connection((HOST, server.port), timeout=LONG)
        if taken.recv(4) == b"SSH-":
            return taken
        taken.close()


class TestBeforeSsh:
    def test_name_that_does_not_resolve(self, name, tmp_path):
        found = failure(name, home_for(tmp_path, 22), "ssh.name", "no-such-node.invalid")
        assert "no-such-node.invalid" in found.observed
        assert found.fix.startswith("getent hosts no-such-node.invalid")

    @pytest.mark.parametrize(
        "host", ["-oProxyCommand=touch x", "a;b", "$(touch x)", "user@-Fx", "x y", "-l@node"]
    )
    def test_name_that_is_an_option_or_a_command(self, name, tmp_path, host, monkeypatch):
        monkeypatch.chdir(tmp_path)
        failure(name, home_for(tmp_path, 22), "ssh.name", host)
        assert not (tmp_path / "x").exists()

    def test_closed_port(self, name, tmp_path):
        port = sshds.free_port()
        found = failure(name, home_for(tmp_path, port), "ssh.refused")
        assert f"{HOST} port {port}" in found.observed

    def test_no_route(self, name, tmp_path):
        # 240.0.0.0/4 is reserved: the kernel has no way there, or nobody answers.
        result = reach(name, home_for(tmp_path, 22), "255.255.255.255", timeout=SHORT)
        assert result.code == "ssh.no_route"
        assert "255.255.255.255" in result.fix

    def test_dropped_packets(self, name, tmp_path):
        # Behind a full queue the kernel drops a SYN, as a firewall does.
        with socket.socket() as full, contextlib.ExitStack() as stack:
            full.bind((HOST, 0))
            full.listen(0)
            for _ in range(4):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(full.getsockname())
            found = failure(name, home_for(tmp_path, full.getsockname()[1]), "ssh.timeout", timeout=SHORT)
        assert "2 s" in found.observed
        assert SHORT <= found.seconds < LONG

    def test_silent_server(self, name, tmp_path):
        with Listener(lambda taken: None) as silent:
            found = failure(name, home_for(tmp_path, silent.port), "ssh.no_banner", timeout=SHORT)
        assert "silent for 2 s" in found.observed

    def test_dripping_banner(self, name, tmp_path):
        with Listener(lambda taken: taken.sendall(b"SSH-2.0-slow")) as silent:
            failure(name, home_for(tmp_path, silent.port), "ssh.no_banner", timeout=SHORT)

    def test_something_else_on_the_port(self, name, tmp_path):
        with Listener(lambda taken: taken.sendall(b"220 mail.example.com ESMTP\r\n")) as mail:
            # ssh waits for more lines until its limit; ours knows after a second.
            found = failure(name, home_for(tmp_path, mail.port), "ssh.not_ssh", timeout=4)
        assert "220 mail.example.com" in found.observed

    def test_frozen_sshd(self, name, serve):
        server = serve()
        server.process.send_signal(signal.SIGSTOP)
        found = failure(name, server.home, "ssh.no_banner", timeout=SHORT)
        assert "frozen" in found.why
        server.process.send_signal(signal.SIGCONT)
        opens(name, server.home)

    def test_frozen_after_the_banner(self, name, tmp_path):
        with Listener(lambda taken: taken.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")) as stuck:
            found = failure(name, home_for(tmp_path, stuck.port), "ssh.timeout", timeout=SHORT)
        assert "key exchange" in found.observed

    def test_closed_without_a_word(self, name, tmp_path):
        with Listener(lambda taken: taken.close()) as closing:
            found = failure(name, home_for(tmp_path, closing.port), "ssh.closed", timeout=SHORT)
        assert "times" in found.observed

    def test_turned_away_at_first(self, name, serve):
        server = serve("MaxStartups 2:100:2")
        holders = [hold(server) for _ in range(2)]
        release = threading.Timer(1.0, lambda: [holder.close() for holder in holders])
        release.start()
        session = opens(name, server.home)
        release.join()
        assert [remark.code for remark in session.remarks] == ["ssh.throttled"]
        assert "MaxStartups" in session.remarks[0].fix

    def test_turned_away_for_good(self, name, serve):
        server = serve("MaxStartups 2:100:2")
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(hold(server))
            found = failure(name, server.home, "ssh.throttled", timeout=SHORT)
        assert "Exceeded MaxStartups" in found.observed
        assert "MaxStartups" in found.fix

    def test_many_logins_behind_a_low_limit_all_get_in(self, name, serve):
        addresses = [f"127.72.1.{n}" for n in range(1, 13)]
        server = serve("MaxStartups 3:100:3", addresses=addresses)
        with reaching(name, server.home, addresses) as results:
            assert not [r for r in results.values() if isinstance(r, Unreachable)]


class TestHostKey:
    def test_unknown(self, name, serve):
        server = serve()
        server.known_hosts.write_text("")
        found = failure(name, server.home, "ssh.host_key_unknown")
        assert server.fingerprint in found.observed
        command = found.fix.split("   #")[0]
        assert command == f"ssh-keyscan -p {server.port} -t ed25519 {HOST} >> {server.known_hosts}"
        shell(command)
        opens(name, server.home)

    def test_changed(self, name, serve, tmp_path):
        server = serve()
        other = sshds.make_key(tmp_path / "other")
        kind, blob = other.with_suffix(".pub").read_text().split()[:2]
        server.known_hosts.write_text(f"[{HOST}]:{server.port} {kind} {blob}\n")
        found = failure(name, server.home, "ssh.host_key_changed")
        shown = subprocess.run(
            ["ssh-keygen", "-lf", other], check=True, capture_output=True, text=True
        ).stdout
        assert server.fingerprint in found.observed
        assert shown.split()[1] in found.observed
        assert f"{server.known_hosts}:1" in found.observed
        shell(found.fix.split("   #")[0])
        opens(name, server.home)

    def test_revoked(self, name, serve):
        server = serve()
        with open(server.known_hosts, "a") as file:
            file.write(f"@revoked * {server.public_host_key}\n")
        found = failure(name, server.home, "ssh.host_key_changed")
        assert "@revoked" in found.observed

    @pytest.mark.parametrize("line", ["hashed", "pattern", "plain name without the port", "alias"])
    def test_every_form_of_a_known_name(self, name, serve, line):
        server = serve()
        key = server.public_host_key
        if line == "hashed":
            shell(f"ssh-keygen -H -f {server.known_hosts}")
            assert HOST not in server.known_hosts.read_text()
        elif line == "pattern":
            server.known_hosts.write_text(f"[127.72.*]:{server.port},!nothing {key}\n")
        elif line == "alias":
            server.known_hosts.write_text(f"node7 {key}\n")
            server.write_config("HostKeyAlias node7")
        else:
            server.known_hosts.write_text(f"{HOST} {key}\n")
        opens(name, server.home)

    def test_the_known_kind_of_key_is_asked_for(self, name, serve, tmp_path):
        rsa = sshds.make_key(tmp_path / "rsa", "rsa")
        server = serve(f"HostKey {rsa}")
        kind, blob = rsa.with_suffix(".pub").read_text().split()[:2]
        server.known_hosts.write_text(f"[{HOST}]:{server.port} {kind} {blob}\n")
        opens(name, server.home)

    def test_a_key_of_another_kind_is_a_change(self, name, serve, tmp_path):
        server = serve()
        kind, blob = sshds.make_key(tmp_path / "rsa", "rsa").with_suffix(".pub").read_text().split()[:2]
        server.known_hosts.write_text(f"[{HOST}]:{server.port} {kind} {blob}\n")
        found = failure(name, server.home, "ssh.host_key_changed")
        assert "ssh-rsa" in found.observed
        assert f"ssh-ed25519 {server.fingerprint}" in found.observed

    def test_the_users_own_leave_to_accept(self, name, serve):
        server = serve()
        server.known_hosts.write_text("")
        server.write_config("StrictHostKeyChecking accept-new")
        session = opens(name, server.home)
        assert [remark.code for remark in session.remarks] == ["ssh.host_key_unknown"]
        assert server.fingerprint in session.remarks[0].observed
        assert f"{server.home}/.ssh/config:1" in session.remarks[0].observed

    def test_no_leave_covers_a_changed_key(self, name, serve, tmp_path):
        server = serve()
        other = sshds.make_key(tmp_path / "other").with_suffix(".pub").read_text().split()[:2]
        server.known_hosts.write_text(f"[{HOST}]:{server.port} {' '.join(other)}\n")
        server.write_config("StrictHostKeyChecking no")
        failure(name, server.home, "ssh.host_key_changed")

    def test_a_key_let_through_is_held_to(self, serve, tmp_path):
        server = serve()
        server.known_hosts.write_text("")
        server.write_config("StrictHostKeyChecking no")
        transport = choose.make(
            "ssh", [HOST], ssh_port=None, fanout=1, environ=os.environ, home=str(server.home)
        )
        results = {}
        transport.open([HOST], results.__setitem__, timeout=LONG)
        assert results[HOST].remarks
        server.stop()
        for part in ("host_key", "host_key.pub"):
            (server.directory / part).unlink()
        server.start()
        server.known_hosts.write_text("")
        server.write_config("StrictHostKeyChecking no")
        transport.open([HOST], results.__setitem__, timeout=LONG)
        transport.close()
        assert results[HOST].code == "ssh.host_key_changed"

    def test_certificate_authority_goes_by_openssh(self, serve, tmp_path):
        ca = sshds.make_key(tmp_path / "ca")
        server = serve(f"HostCertificate {tmp_path / 'a' / 'host_key-cert.pub'}")
        server.stop()
        shell(f"ssh-keygen -q -s {ca} -I host -h -n {HOST} {server.directory / 'host_key.pub'}")
        server.start()
        public = " ".join(ca.with_suffix(".pub").read_text().split()[:2])
        server.known_hosts.write_text(f"@cert-authority [127.72.*]:* {public}\n")
        opens("ssh", server.home)


class TestLogin:
    def test_refused_key(self, name, serve):
        server = serve()
        server.user_key.unlink()
        server.user_key.with_suffix(".pub").unlink()
        sshds.make_key(server.user_key)
        shown = subprocess.run(
            ["ssh-keygen", "-lf", server.user_key], check=True, capture_output=True, text=True
        )
        found = failure(name, server.home, "ssh.auth")
        assert shown.stdout.split()[1] in found.observed
        assert str(server.user_key) in found.observed
        assert found.fix.startswith("ssh-copy-id -p")

    def test_refused_user(self, name, serve):
        server = serve("DenyUsers *")
        found = failure(name, server.home, "ssh.auth")
        assert "DenyUsers" in found.why

    def test_no_key_at_all(self, name, serve):
        server = serve()
        server.user_key.unlink()
        server.user_key.with_suffix(".pub").unlink()
        found = failure(name, server.home, "ssh.auth", environ={"SSH_AUTH_SOCK": ""})
        assert "no key at all" in found.observed
        assert "ssh-keygen -t ed25519" in found.fix

    def test_key_that_needs_a_passphrase(self, name, serve):
        server = serve()
        shell(f"ssh-keygen -q -p -P '' -N secret -f {server.user_key}")
        found = failure(name, server.home, "ssh.auth", environ={"SSH_AUTH_SOCK": ""})
        assert "needs a passphrase" in found.observed
        assert found.fix == f"ssh-add {server.user_key}"

    def test_password_only(self, name, serve):
        server = serve("PubkeyAuthentication no", "PasswordAuthentication yes")
        found = failure(name, server.home, "ssh.password_only")
        assert "password" in found.observed

    @pytest.mark.parametrize("offered", [False, True])
    def test_login_that_only_openssh_can_try(self, serve, offered):
        server = serve(f"HostbasedAuthentication {'yes' if offered else 'no'}")
        server.write_config("HostbasedAuthentication yes")
        server.user_key.unlink()
        server.user_key.with_suffix(".pub").unlink()
        sshds.make_key(server.user_key)
        found = failure("ssh", server.home, "ssh.auth")
        # How ssh itself names a key that a file of the configuration gave it.
        assert ("explicit" in found.observed) is offered

    def test_certificate_of_a_key(self, name, serve, tmp_path):
        ca = sshds.make_key(tmp_path / "ca")
        user = subprocess.run(["id", "-un"], check=True, capture_output=True, text=True).stdout.strip()
        server = serve(f"TrustedUserCAKeys {ca}.pub")
        shell(f"ssh-keygen -q -s {ca} -I me -n {user} {server.user_key}.pub")
        (server.directory / "authorized_keys").write_text("")
        opens(name, server.home)
        assert "ED25519-CERT" in server.log.read_text()
        # A server that does not trust the authority still knows the key.
        plain = serve(addresses=[OTHER], where="b")
        (plain.directory / "authorized_keys").write_text(server.user_key.with_suffix(".pub").read_text())
        known = f"[{OTHER}]:{plain.port} {plain.public_host_key}\n"
        server.known_hosts.write_text(known)
        opens(name, server.home, OTHER, port=plain.port)

    def test_second_factor(self, name, serve):
        server = serve("AuthenticationMethods publickey,password", "PasswordAuthentication yes")
        found = failure(name, server.home, "ssh.password_only")
        assert "takes the key" in found.observed

    def test_too_many_keys(self, name, serve, tmp_path):
        server = serve("MaxAuthTries 2")
        others = [sshds.make_key(tmp_path / f"key{n}") for n in range(3)]
        server.write_config(*(f"IdentityFile {key}" for key in others))
        found = failure(name, server.home, "ssh.auth")
        assert "IdentitiesOnly" in found.fix

    def test_right_key_among_several(self, name, serve, tmp_path):
        server = serve()
        server.write_config(f"IdentityFile {sshds.make_key(tmp_path / 'wrong', 'ecdsa')}")
        opens(name, server.home)

    @pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
    def test_kinds_of_user_keys(self, serve, tmp_path, kind):
        server = serve()
        key = sshds.make_key(tmp_path / "k" / "id", kind)
        (server.directory / "authorized_keys").write_text(key.with_suffix(".pub").read_text())
        server.write_config(f"IdentityFile {key}")
        opens("ssh", server.home)

    def test_agent_shared_by_many_logins(self, serve, tmp_path):
        addresses = [f"127.72.2.{n}" for n in range(1, 17)]
        server = serve(addresses=addresses)
        with agent(server.user_key) as path:
            server.user_key.unlink()
            with reaching("ssh", server.home, addresses, environ={"SSH_AUTH_SOCK": path}) as results:
                assert not [r for r in results.values() if isinstance(r, Unreachable)]
            server.write_config(f"IdentityAgent {path}")
            opens("ssh", server.home, addresses[0], environ={"SSH_AUTH_SOCK": ""})

    def test_identities_only_leaves_the_agents_other_keys_out(self, serve, tmp_path):
        server = serve()
        with agent(server.user_key) as path:
            server.user_key.unlink()
            server.user_key.with_suffix(".pub").unlink()
            failure("ssh", server.home, "ssh.auth", environ={"SSH_AUTH_SOCK": path})

    def test_no_shell(self, name, serve):
        server = serve(f"ForceCommand {shutil.which('nologin') or '/usr/sbin/nologin'}")
        with reaching(name, server.home, [HOST]) as results:
            result = results[HOST]
            if name == "ssh":
                # What a login does with a command shows with the first command.
                channel = result.start("echo in")
                said = b"\n".join(channel.lines())
                assert channel.wait(LONG) == 1
                result = failures.not_started(HOST, "root", said, 0.0)
        assert result.code == "ssh.account"
        assert "not available" in result.observed

    def test_no_session_allowed(self, name, serve):
        failure(name, serve("MaxSessions 0").home, "ssh.account")

    def test_closed_right_after_the_login(self, name, tmp_path):
        home = home_for(tmp_path, 0)
        key = paramiko.RSAKey.generate(2048)
        with Listener(lambda taken: close_after_login(taken, key)) as closing:
            server = sshds.Sshd(tmp_path / "home-only", [HOST], port=closing.port)
            server.write_config("StrictHostKeyChecking no")
            found = failure(name, home, "ssh.account", timeout=SHORT * 5)
        assert "login" in found.observed

    def test_noisy_shell_opens(self, name, serve):
        server = serve("ForceCommand printf 'Welcome!\\n'; exec /bin/sh -c \"$SSH_ORIGINAL_COMMAND\"")
        opens(name, server.home)

    def test_user_and_port_of_the_command_line(self, name, serve):
        server = serve()
        user = subprocess.run(["id", "-un"], check=True, capture_output=True, text=True).stdout.strip()
        server.write_config("Port 1", "User nobody")
        opens(name, server.home, f"{user}@{HOST}", port=server.port)


def test_ipv6(name, serve):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no ::1 ({error})")
    session = opens(name, serve(addresses=["::1"]).home, "::1")
    assert session.address == "::1"


class TestProxy:
    @pytest.fixture
    def jump(self, serve):
        return serve(addresses=[OTHER], where="jump")

    @pytest.fixture
    def behind(self, serve, jump):
        """A server reached through another one; the home knows both."""
        server = serve()
        jump_known = f"[{OTHER}]:{jump.port} {jump.public_host_key}\n"
        server.known_hosts.write_text(server.known_hosts.read_text() + jump_known)
        (jump.directory / "authorized_keys").write_text(server.user_key.with_suffix(".pub").read_text())
        server.write_config(f"Host {OTHER}", f"  Port {jump.port}", f"Host {HOST}", f"  ProxyJump {OTHER}")
        return server

    def test_jump_host(self, name, behind, jump):
        session = opens(name, behind.home)
        assert session.host_key == behind.fingerprint
        assert "Accepted publickey" in jump.log.read_text()

    def test_jump_and_direct_hosts_in_one_transport(self, behind, serve, jump):
        with reaching("ssh", behind.home, [HOST, OTHER]) as results:
            kinds = {host: type(session).__name__ for host, session in results.items()}
        assert kinds == {HOST: "OpensshSession", OTHER: "SshSession"}

    def test_jump_host_is_down(self, name, behind, jump):
        jump.stop()
        found = failure(name, behind.home, "ssh.proxy")
        assert "Connection refused" in found.observed

    def test_host_behind_is_down(self, name, behind):
        behind.stop()
        found = failure(name, behind.home, "ssh.proxy")
        assert "efused" in found.observed

    def test_unknown_key_behind_a_jump_host(self, name, behind, jump):
        behind.known_hosts.write_text(f"[{OTHER}]:{jump.port} {jump.public_host_key}\n")
        found = failure(name, behind.home, "ssh.host_key_unknown")
        assert behind.fingerprint in found.observed
        assert "keyscan -p" not in found.fix

    def test_proxy_command(self, name, serve, tmp_path):
        server = serve()
        server.write_config("ProxyCommand exit 3")
        failure(name, server.home, "ssh.proxy")
        relay = tmp_path / "relay.py"
        relay.write_text(
            "import os, socket, sys, threading\n"
            "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
            "def up():\n    while data := os.read(0, 65536): s.sendall(data)\n"
            "threading.Thread(target=up, daemon=True).start()\n"
            "while data := s.recv(65536): os.write(1, data)\n"
        )
        server.write_config(f"ProxyCommand python3 {relay} %h %p")
        opens(name, server.home)

    def test_match_exec_goes_by_openssh(self, serve):
        server = serve()
        server.write_config('Match host node7 exec "true"', f"  HostName {HOST}")
        with reaching("ssh", server.home, ["node7"]) as results:
            assert type(results["node7"]).__name__ == "OpensshSession"

    def test_bad_configuration(self, name, serve):
        server = serve()
        server.write_config("Port twelve")
        found = failure(name, server.home, "ssh.config")
        assert "line 1" in found.observed

    def test_no_ssh_program(self, serve, tmp_path):
        server = serve()
        server.write_config("ProxyCommand exit 3")
        found = failure("ssh", server.home, "ssh.config", environ={"PATH": str(tmp_path)})
        assert "proxycommand" in found.observed
        found = failure("openssh", server.home, "ssh.config", environ={"PATH": str(tmp_path)})
        assert "openssh-client" in found.fix


class TestManyHosts:
    def test_stuck_hosts_hold_nobody_up(self, serve):
        good = [f"127.72.3.{n}" for n in range(1, 9)]
        server = serve(addresses=good)
        stuck = [f"127.72.4.{n}" for n in range(1, 21)]
        with contextlib.ExitStack() as stack:
            for host in stuck:
                # Silent, or frozen in the middle of a login, on the port of the good ones.
                stack.enter_context(
                    silent_at(host, server.port, b"" if host[-1] in "02468" else b"SSH-2.0-x\r\n")
                )
            with reaching("ssh", server.home, [*stuck, *good], timeout=8) as results:
                seconds = {host: result.seconds for host, result in results.items()}
                codes = {host: getattr(results[host], "code", None) for host in stuck}
        assert not [host for host in good if isinstance(results[host], Unreachable)]
        assert max(seconds[host] for host in good) < 7
        assert set(codes.values()) == {"ssh.no_banner", "ssh.timeout"}

    def test_interrupted_while_it_waits(self, name, serve):
        server = serve()

        def interrupt(*_):
            raise KeyboardInterrupt

        with contextlib.ExitStack() as stack:
            stack.enter_context(silent_at(OTHER, server.port, b""))
            before = set(threading.enumerate())
            transport = choose.make(
                name, [HOST, OTHER], ssh_port=None, fanout=8, environ=os.environ, home=str(server.home)
            )
            stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, interrupt))
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                transport.open([HOST, OTHER], lambda *_: None, timeout=60)
            transport.close()
            while left := set(threading.enumerate()) - before:
                assert time.monotonic() - started < LONG, left
                time.sleep(0.01)

    def test_each_host_is_reported_once(self, name, serve):
        server = serve()
        calls = []
        transport = choose.make(
            name, [HOST, HOST, OTHER], ssh_port=None, fanout=2, environ=os.environ, home=str(server.home)
        )
        transport.open([HOST, HOST, OTHER], lambda host, _: calls.append(host), timeout=LONG)
        transport.close()
        assert sorted(calls) == [HOST, OTHER]

    def test_an_error_of_the_caller_comes_back(self, name, serve):
        server = serve()
        transport = choose.make(
            name, [HOST], ssh_port=None, fanout=2, environ=os.environ, home=str(server.home)
        )

        def broken(host, result):
            raise LookupError(host)

        with pytest.raises(LookupError):
            transport.open([HOST], broken, timeout=LONG)
        transport.close()

    def test_next_address_of_a_name_is_tried(self, serve, monkeypatch):
        server = serve()
        addresses = [("127.72.9.9", server.port), (HOST, server.port)]
        monkeypatch.setattr(dial, "_look_up", lambda *_: [(socket.AF_INET, address) for address in addresses])
        opens("ssh", server.home)
        with silent_at("127.72.9.9", server.port, b""):
            session = opens("ssh", server.home)
        assert session.address == HOST
        assert session.seconds < 7

    def test_a_name_server_that_hangs(self, serve, monkeypatch):
        server = serve()
        release = threading.Event()
        real = dial._look_up

        def hanging(endpoint, flags):
            if endpoint.hostname.startswith("hang"):
                release.wait(60)
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
            if endpoint.hostname == "good":
                if flags:
                    raise socket.gaierror(socket.EAI_NONAME, "not a number")
                return [(socket.AF_INET, (HOST, server.port))]
            return real(endpoint, flags)

        def look_up(endpoint, flags):
            if endpoint.hostname.startswith("hang") and flags:
                raise socket.gaierror(socket.EAI_NONAME, "not a number")
            return hanging(endpoint, flags)

        monkeypatch.setattr(dial, "_look_up", look_up)
        server.write_config(f"HostKeyAlias {HOST}")
        server.known_hosts.write_text(f"{HOST} {server.public_host_key}\n")
        hosts = [*(f"hang{n}" for n in range(40)), "good"]
        try:
            with reaching("ssh", server.home, hosts, timeout=6) as results:
                assert results["good"].seconds < 5.5
                assert {results[host].code for host in hosts[:-1]} == {"ssh.name"}
        finally:
            release.set()


@contextlib.contextmanager
def agent(key):
    """Run a real ssh-agent that holds a key; yields its socket."""
    path = os.path.join("/tmp", f"sl-test-agent-{os.getpid()}")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + LONG
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.01)
        subprocess.run(
            ["ssh-add", "-q", key], check=True, capture_output=True, env={**os.environ, "SSH_AUTH_SOCK": path}
        )
        yield path
    finally:
        process.terminate()
        process.wait()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


@contextlib.contextmanager
def silent_at(address, port, words):
    """Accept connections at an address, say some words, and then nothing."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((address, port))
    server.listen(8)
    taken = []

    def run():
        with contextlib.suppress(OSError):
            while True:
                taken.append(server.accept()[0])
                taken[-1].sendall(words)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()
        for connection in taken:
            connection.close()


class _TakesAnyKey(paramiko.ServerInterface):
    def get_allowed_auths(self, username):
        return "publickey"

    def check_auth_publickey(self, username, key):
        return paramiko.AUTH_SUCCESSFUL


def close_after_login(taken, key):
    """Serve one login, as an sshd whose session set-up fails does: accept it and hang up."""
    transport = paramiko.Transport(taken)
    transport.add_server_key(key)
    done = threading.Event()
    with contextlib.suppress(paramiko.SSHException, EOFError):
        transport.start_server(event=done, server=_TakesAnyKey())
        deadline = time.monotonic() + LONG
        while not transport.is_authenticated() and transport.is_active() and time.monotonic() < deadline:
            time.sleep(0.005)
    transport.close()
    transport.join(LONG)
