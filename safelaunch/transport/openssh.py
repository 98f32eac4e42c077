"""The `ssh` program, one shared connection a host: for what only it can do, and as a transport of its own.

One `ssh` a host is the master of the connection; it runs `cat` on the node, whose stdin is a pipe of ours. So
the connection ends when we do, even by SIGKILL, and nothing is left behind (a master put into the background
by ControlPersist would stay). Each command is a further `ssh` through the master's socket.
"""

from __future__ import annotations

import math
import os
import secrets
import shlex
import shutil
import tempfile
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from safelaunch.transport import failures, openssh_text
from safelaunch.transport.base import ChannelLostError, Unreachable
from safelaunch.transport.dial import pause_after
from safelaunch.transport.known_hosts import KnownHosts
from safelaunch.transport.process import ProcessChannel
from safelaunch.transport.ssh_config import SYSTEM_CONFIG, SshConfig, Target, UnsafeNameError, home_directory
from safelaunch.transport.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from safelaunch.transport.base import Remark, Session

_MASTER_OPTIONS = (
    "BatchMode=yes",
    "LogLevel=DEBUG1",
    "ControlMaster=yes",
    "ControlPersist=no",
    "ServerAliveInterval=10",
    "ServerAliveCountMax=3",
    "RequestTTY=no",
    "RemoteCommand=none",
    "ClearAllForwardings=yes",
    "PermitLocalCommand=no",
    "ForwardX11=no",
)

# Were the master gone, `ssh` would dial anew, with none of the user's settings: ProxyCommand forbids it.
_CLIENT_OPTIONS = ("ControlMaster=no", "ProxyCommand=false", "BatchMode=yes", "LogLevel=ERROR")

# $1 is the command, $2 the marker. The shell stays, so a command that a signal kills has a status too.
_WRAPPER = '/bin/sh -c "$1"; s=$?; printf "\\n%s %d\\n" "$2" $s >&2; exit $s'


class OpensshSession:
    """See `base.Session`. Commands are started by the login shell and run in /bin/sh."""

    def __init__(
        self, target: Target, master: ProcessChannel, client: list[str], environ: Mapping[str, str]
    ) -> None:
        self.host = target.name
        self.address = ""
        self.host_key: str | None = None
        self.seconds = 0.0
        self.remarks: tuple[Remark, ...] = ()
        self._master = master
        self._client = client
        self._environ = environ
        self._lock = threading.Lock()
        self._channels: list[ProcessChannel] = []

    def start(self, command: str) -> ProcessChannel:
        if not self._master.running:
            raise ChannelLostError(f"the connection to {self.host} is gone")
        marker = f"sl-exit-{secrets.token_hex(8)}"
        words = ["/bin/sh", "-c", _WRAPPER, "sh", command, marker]
        channel = ProcessChannel(
            [*self._client, "exec " + shlex.join(words)],
            environ=self._environ,
            marker=f"\n{marker} ".encode(),
        )
        with self._lock:
            self._channels = [*(c for c in self._channels if not c.closed), channel]
        if self._master.closed:
            channel.close()
            raise ChannelLostError("the session is closed")
        return channel

    def close(self) -> None:
        with self._lock:
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()
        self._master.close()


class Opening:
    """Hosts on their way, at most `fanout` at once."""

    def __init__(
        self,
        reach: Callable[[str], Session | Unreachable],
        on_open: Callable[[str, Session | Unreachable], None],
        fanout: int,
    ) -> None:
        self._reach = reach
        self._on_open = on_open
        self._fanout = fanout
        self._lock = threading.Lock()
        self._waiting: deque[str] = deque()
        self._threads: list[threading.Thread] = []
        self._busy = 0
        self._failed: BaseException | None = None

    def add(self, host: str) -> None:
        """Open a host; from any thread."""
        with self._lock:
            self._waiting.append(host)
            if self._busy == self._fanout:
                return
            self._busy += 1
            thread = threading.Thread(target=self._work, name="safelaunch-openssh", daemon=True)
            self._threads.append(thread)
            thread.start()

    def finish(self) -> None:
        """Wait for all that was added; raises what a callback raised."""
        for thread in self._threads:
            thread.join()
        if self._failed is not None:
            raise self._failed

    def stop(self) -> None:
        """Begin no further host."""
        with self._lock:
            self._waiting.clear()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy -= 1
                    return
                host = self._waiting.popleft()
            try:
                self._on_open(host, self._reach(host))
            except BaseException as error:  # noqa: BLE001 (raised again by `finish`, in the caller's thread)
                self._failed = error
                self.stop()


class OpensshTransport:
    """See `base.Transport`."""

    name = "openssh"

    def __init__(
        self,
        config: SshConfig,
        *,
        home: str,
        environ: Mapping[str, str],
        ssh_port: int | None = None,
        fanout: int = 64,
    ) -> None:
        self._config = config
        self._home = home
        self._environ = environ
        self._port = ssh_port
        self._fanout = fanout
        self._program = shutil.which("ssh", path=environ.get("PATH", os.defpath))
        self._known_hosts = KnownHosts()
        self._watchdog = Watchdog()
        self._lock = threading.Lock()
        self._directory: str | None = None
        self._masters = 0
        self._sessions: list[OpensshSession] = []
        self._under_way: set[ProcessChannel] = set()
        self._closed = False

    def open(
        self,
        hosts: Sequence[str],
        on_open: Callable[[str, Session | Unreachable], None],
        *,
        timeout: float,
    ) -> None:
        opening = self.opening(on_open, timeout=timeout)
        try:
            for host in dict.fromkeys(hosts):
                opening.add(host)
            opening.finish()
        except BaseException:
            opening.stop()
            raise

    def opening(self, on_open: Callable[[str, Session | Unreachable], None], *, timeout: float) -> Opening:
        """Begin to open hosts that will be named one by one."""
        return Opening(partial(self._open, timeout=timeout, started=time.monotonic()), on_open, self._fanout)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sessions, self._sessions = self._sessions, []
            under_way = list(self._under_way)
            directory, self._directory = self._directory, None
        for session in sessions:
            session.close()
        for master in under_way:
            master.close()
        self._watchdog.close()
        if directory:
            shutil.rmtree(directory, ignore_errors=True)

    def _open(self, host: str, *, timeout: float, started: float) -> OpensshSession | Unreachable:
        try:
            target = self._config.lookup(host, port=self._port)
        except UnsafeNameError:
            return failures.unsafe_name(host, time.monotonic() - started)
        if self._program is None:
            because = target.openssh_because or "--transport openssh"
            return failures.no_ssh_program(target, because, time.monotonic() - started)
        deadline = time.monotonic() + timeout
        drops = 0
        while True:
            result, story = self._log_in(target, deadline, timeout, drops, started)
            if isinstance(result, OpensshSession):
                self._keep(result)
                return result
            if not story.dropped or target.proxy or self._closed:
                return result
            drops += 1
            pause = pause_after(drops)
            if time.monotonic() + pause > deadline:
                return result
            time.sleep(pause)

    def _log_in(
        self, target: Target, deadline: float, timeout: float, drops: int, started: float
    ) -> tuple[OpensshSession | Unreachable, openssh_text.Story]:
        """Try once; with what `ssh` said on the way."""
        path = self._control_path()
        marker = f"sl-open-{secrets.token_hex(8)}"
        ready = f"exec /bin/sh -c {shlex.quote(f'echo {marker}; exec cat >/dev/null')}"
        left = max(0.1, deadline - time.monotonic())
        master = ProcessChannel([*self._master_line(target, path, left), ready], environ=self._environ)
        with self._lock:
            self._under_way.add(master)
            closed = self._closed
        if closed:
            master.close()
        try:
            with self._watchdog.limit(left, master.close) as alarm:
                opened, output = _wait_for_line(master, marker.encode())
            story = openssh_text.read(master.stderr())
            seconds = time.monotonic() - started
            if opened and not alarm.fired:
                session = OpensshSession(target, master, self._client_line(target, path), self._environ)
                session.address, session.seconds = story.address, seconds
                session.host_key = story.host_key.fingerprint if story.host_key else None
                session.remarks = self._remarks(target, story, drops)
                return session, story
        except BaseException:
            master.close()
            raise
        finally:
            with self._lock:
                self._under_way.discard(master)
        master.close()
        result = openssh_text.judge(
            story,
            target,
            self._known_hosts.find(target.host_key_names, target.known_hosts),
            locked=_locked(target) if "Permission denied" in story.text else (),
            late=timeout if alarm.fired else None,
            drops=drops + 1,
            output=output,
            seconds=seconds,
        )
        return result, story

    def _remarks(self, target: Target, story: openssh_text.Story, drops: int) -> tuple[Remark, ...]:
        remarks = [failures.got_through(target, drops)] if drops else []
        if target.weak and story.host_key and "Warning: Permanently added" in story.text:
            remarks.append(failures.host_key_accepted(target, story.host_key))
        return tuple(remarks)

    def _master_line(self, target: Target, path: str, left: float) -> list[str]:
        user, _, host = target.name.rpartition("@")
        # accept-new is what is left of `no`: an unknown key passes, a changed one does not.
        checking = "accept-new" if target.weak else "yes"
        options = [
            *_MASTER_OPTIONS,
            f"StrictHostKeyChecking={checking}",
            f"ControlPath={path}",
            f"ConnectTimeout={max(1, math.ceil(min(left, target.connect_timeout or left)))}",
        ]
        return [
            self._ssh,
            *self._config_file(),
            *(word for option in options for word in ("-o", option)),
            *(("-l", user) if user else ()),
            *(("-p", str(self._port)) if self._port else ()),
            "--",
            host,
        ]

    def _client_line(self, target: Target, path: str) -> list[str]:
        options = (word for option in (*_CLIENT_OPTIONS, f"ControlPath={path}") for word in ("-o", option))
        return [self._ssh, "-F", "none", "-T", *options, "--", target.name.rpartition("@")[2]]

    @property
    def _ssh(self) -> str:
        return self._program or "ssh"

    def _control_path(self) -> str:
        with self._lock:
            self._masters += 1
            return os.path.join(self._private(), str(self._masters))

    def _private(self) -> str:
        """Return our directory, for the owner alone; short, since a socket's path has 108 bytes."""
        if self._directory is None:
            runtime = self._environ.get("XDG_RUNTIME_DIR", "")
            candidates = [runtime] if runtime and len(runtime) < 40 and os.access(runtime, os.W_OK) else []
            self._directory = tempfile.mkdtemp(prefix="sl-", dir=[*candidates, "/tmp"][0])  # noqa: S108 (0700)
        return self._directory

    def _config_file(self) -> list[str]:
        """Make `ssh` look into the home that we were given; by itself it only knows the account's."""
        if os.path.realpath(self._home) == os.path.realpath(home_directory()):
            return []
        with self._lock:
            path = os.path.join(self._private(), "config")
            if not os.path.exists(path):
                own = os.path.join(self._home, ".ssh")
                keys = [os.path.join(own, f"id_{kind}") for kind in ("rsa", "ecdsa", "ed25519")]
                lines = [
                    f'Include "{own}/config"',
                    "Host *",
                    f'  UserKnownHostsFile "{own}/known_hosts" "{own}/known_hosts2"',
                    *(f'  IdentityFile "{key}"' for key in keys if os.path.exists(key)),
                    f"Include {SYSTEM_CONFIG}",
                ]
                with open(path, "w", encoding="utf-8") as file:
                    file.write("\n".join(lines) + "\n")
        return ["-F", path]

    def _keep(self, session: OpensshSession) -> None:
        with self._lock:
            self._sessions.append(session)
            closed = self._closed
        if closed:
            session.close()


def _wait_for_line(master: ProcessChannel, wanted: bytes) -> tuple[bool, bytes]:
    """Read until a line of ours; also return the beginning of what came instead."""
    output = b""
    for line in master.lines():
        if line.strip() == wanted:
            return True, output
        output = (output + line + b"\n")[:4096]
    # Its last words are on stderr when it has ended.
    master.wait()
    return False, output


def _locked(target: Target) -> tuple[str, ...]:
    """Return the key files that need a passphrase; `ssh` does not say so where nobody can type one."""
    from safelaunch.transport.keys import KeyRing  # noqa: PLC0415 (paramiko, only for a login that failed)

    ring = KeyRing()
    try:
        return ring.offer(target).locked
    finally:
        ring.close()
