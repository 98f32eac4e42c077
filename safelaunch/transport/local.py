"""Commands on this machine, without ssh: children of ours, each in a session of its own."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

from safelaunch.transport.base import ChannelLostError
from safelaunch.transport.process import ProcessChannel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from safelaunch.transport.base import Remark, Session, Unreachable


class LocalSession:
    """See `base.Session`. Commands run in /bin/sh with our own environment, from the home directory.

    That is what DeepSpeed does on one machine: what the launching shell has set up, the ranks see.
    """

    host_key: str | None = None
    remarks: tuple[Remark, ...] = ()

    def __init__(self, host: str, environ: Mapping[str, str], home: str, seconds: float) -> None:
        self.host = host
        self.address = ""
        self.seconds = seconds
        self._environ = environ
        self._home = home
        self._lock = threading.Lock()
        self._channels: list[ProcessChannel] = []
        self._closed = False

    def start(self, command: str) -> ProcessChannel:
        with self._lock:
            if self._closed:
                raise ChannelLostError("the session is closed")
            channel = ProcessChannel(["/bin/sh", "-c", command], environ=self._environ, cwd=self._home)
            self._channels = [*(c for c in self._channels if not c.closed), channel]
        return channel

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()


class LocalTransport:
    """See `base.Transport`."""

    name = "local"

    def __init__(self, environ: Mapping[str, str], home: str) -> None:
        self._environ = environ
        self._home = home
        self._sessions: list[LocalSession] = []

    def open(
        self,
        hosts: Sequence[str],
        on_open: Callable[[str, Session | Unreachable], None],
        *,
        timeout: float,  # noqa: ARG002 (nothing here can be late)
    ) -> None:
        started = time.monotonic()
        for host in dict.fromkeys(hosts):
            session = LocalSession(host, self._environ, self._home, time.monotonic() - started)
            self._sessions.append(session)
            on_open(host, session)

    def close(self) -> None:
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.close()


def is_this_machine(hostname: str) -> bool:
    """Say whether a name or address is surely this machine; asks no name server, which could hang."""
    own = socket.gethostname()
    name = hostname.lower().rstrip(".")
    return (
        name in {"localhost", "localhost.localdomain", "ip6-localhost", "::1", own.lower()}
        or name == own.split(".")[0].lower()
        or _is_loopback(name)
    )


def _is_loopback(name: str) -> bool:
    try:
        return socket.inet_pton(socket.AF_INET, name)[0] == 127
    except OSError:
        return False
