"""The fast transport: dial all hosts at once, log in on the dialled sockets, keep the connections.

Stages: `dial` (one thread), a queue, and a bounded pool of logins. More than 64 logins at once make each of
them dearer (the interpreter lock), so the pool is small and never holds a host that has not spoken yet.
"""

from __future__ import annotations

import contextlib
import queue
import resource
import threading
import time
from typing import TYPE_CHECKING

from safelaunch.transport import failures
from safelaunch.transport.base import Unreachable
from safelaunch.transport.dial import Dialled, Dialler, Endpoint
from safelaunch.transport.known_hosts import KnownHosts
from safelaunch.transport.ssh_config import SshConfig, Target, UnsafeNameError
from safelaunch.transport.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from safelaunch.transport.base import Session
    from safelaunch.transport.dial import NotDialled
    from safelaunch.transport.handshake import Handshake, SshSession
    from safelaunch.transport.keys import KeyRing

    OnOpen = Callable[[str, Session | Unreachable], None]

_FILES_PER_HOST = 2
_FILES_BESIDE = 256


class SshTransport:
    """See `base.Transport`."""

    name = "ssh"

    def __init__(
        self,
        config: SshConfig,
        *,
        ssh_port: int | None = None,
        fanout: int = 64,
    ) -> None:
        self._config = config
        self._port = ssh_port
        self._fanout = fanout
        self._known_hosts = KnownHosts()
        self._watchdog = Watchdog()
        self._lock = threading.Lock()
        self._sessions: list[SshSession] = []
        self._shared: tuple[Handshake, KeyRing] | None = None
        self._closed = False

    def open(
        self,
        hosts: Sequence[str],
        on_open: OnOpen,
        *,
        timeout: float,
        hand_over: Callable[[str], None] | None = None,
    ) -> None:
        """Open all hosts at once; `hand_over` gets those that only the `ssh` program can log in to."""
        _Round(self, dict.fromkeys(hosts), on_open, timeout, hand_over).run()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sessions, self._sessions = self._sessions, []
            shared, self._shared = self._shared, None
        for session in sessions:
            session.close()
        self._watchdog.close()
        if shared:
            shared[1].close()

    def target(self, host: str) -> Target:
        """Return where a name of the hostfile leads; raises UnsafeNameError."""
        return self._config.lookup(host, port=self._port)

    def handshake(self) -> Handshake:
        """Return what logins share, made on first use: loading paramiko takes 0.2 s."""
        from safelaunch.transport.handshake import Handshake  # noqa: PLC0415 (as said)
        from safelaunch.transport.keys import KeyRing  # noqa: PLC0415

        with self._lock:
            if self._shared is None:
                keys = KeyRing()
                self._shared = Handshake(keys, self._known_hosts, self._watchdog), keys
            return self._shared[0]

    def keep(self, session: SshSession) -> None:
        """Close a session together with this transport, which may have happened by now."""
        with self._lock:
            self._sessions.append(session)
            closed = self._closed
        if closed:
            session.close()

    @property
    def fanout(self) -> int:
        return self._fanout


class _Round:
    """One call of `open`."""

    def __init__(
        self,
        transport: SshTransport,
        hosts: Mapping[str, None],
        on_open: OnOpen,
        timeout: float,
        hand_over: Callable[[str], None] | None,
    ) -> None:
        self._transport = transport
        self._hosts = hosts
        self._on_open = on_open
        self._timeout = timeout
        self._hand_over_to = hand_over
        self._started = time.monotonic()
        self._targets: dict[str, Target] = {}
        self._ready: queue.SimpleQueue[tuple[Target, Dialled] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._undecided = set(hosts)
        self._failure: BaseException | None = None

    def run(self) -> None:
        endpoints = self._endpoints()
        _allow_files(_FILES_PER_HOST * len(endpoints) + _FILES_BESIDE)
        dialler = Dialler(self._dialled)
        threads = [threading.Thread(target=self._dial, args=(dialler, endpoints), daemon=True)]
        threads[0].start()
        try:
            # While the servers answer: the library that the logins need.
            handshake = self._transport.handshake() if endpoints else None
            for _ in range(min(self._transport.fanout, len(endpoints))):
                threads.append(threading.Thread(target=self._log_in, args=(handshake,), daemon=True))
                threads[-1].start()
            with self._changed:
                while self._undecided and self._failure is None:
                    self._changed.wait()
        finally:
            dialler.stop()
            threads[0].join()
            for _ in threads[1:]:
                self._ready.put(None)
            # Interrupted, or broken: whoever is in the middle of a login has the watchdog behind it.
            if not self._undecided:
                for thread in threads[1:]:
                    thread.join()
            self._drop_leftovers()
        if self._failure is not None:
            raise self._failure

    def _endpoints(self) -> list[Endpoint]:
        endpoints = []
        for host in self._hosts:
            try:
                target = self._transport.target(host)
            except UnsafeNameError:
                self._report(host, failures.unsafe_name(host, self._seconds()))
                continue
            if target.openssh_because:
                self._hand_over(target, target.openssh_because)
                continue
            self._targets[host] = target
            limit = min(self._timeout, target.connect_timeout or self._timeout)
            endpoints.append(Endpoint(host, target.hostname, target.port, target.family, limit))
        return endpoints

    def _dial(self, dialler: Dialler, endpoints: list[Endpoint]) -> None:
        try:
            dialler.run(endpoints)
        except BaseException as error:  # noqa: BLE001 (raised again by `run`, in the caller's thread)
            self._fail(error)

    def _dialled(self, host: str, result: Dialled | NotDialled) -> None:
        target = self._targets[host]
        if isinstance(result, Dialled):
            self._ready.put((target, result))
        else:
            self._report(host, failures.not_dialled(target, result, self._seconds()))

    def _log_in(self, handshake: Handshake) -> None:
        from safelaunch.transport.handshake import NeedsOpensshError  # noqa: PLC0415 (see `handshake`)

        while (job := self._ready.get()) is not None:
            target, dialled = job
            try:
                result = handshake.connect(target, dialled, timeout=self._timeout, started=self._started)
            except NeedsOpensshError as reason:
                self._hand_over(target, str(reason))
            except BaseException as error:  # noqa: BLE001 (raised again by `run`, in the caller's thread)
                dialled.sock.close()
                self._fail(error)
            else:
                if not isinstance(result, Unreachable):
                    self._transport.keep(result)
                self._report(target.name, result)

    def _hand_over(self, target: Target, because: str) -> None:
        if self._hand_over_to is not None:
            self._hand_over_to(target.name)
            self._decided(target.name)
        else:
            detail = f"only the ssh program can log in: {because}; use --transport openssh"
            self._report(target.name, failures.bad_config(target, detail, self._seconds()))

    def _report(self, host: str, result: Session | Unreachable) -> None:
        try:
            self._on_open(host, result)
        except BaseException as error:  # noqa: BLE001 (raised again by `run`, in the caller's thread)
            self._fail(error)
        self._decided(host)

    def _decided(self, host: str) -> None:
        with self._changed:
            self._undecided.discard(host)
            self._changed.notify()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify()

    def _drop_leftovers(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._ready.get_nowait()
                if job is None:
                    self._ready.put(None)
                    return
                job[1].sock.close()

    def _seconds(self) -> float:
        return time.monotonic() - self._started


def _allow_files(wanted: int) -> None:
    """Raise the soft limit of open files if so many hosts need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted and soft != resource.RLIM_INFINITY:
        with contextlib.suppress(ValueError, OSError):
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
