"""A command on a node over a paramiko channel.

paramiko's own waits (`exec_command`, `recv_exit_status`, `sendall`) ignore every timeout or spin when the
other side is gone, and stdout and stderr would need a thread each. So one bell rings for whatever happens on
a channel, and whoever calls us looks what it was.
"""

from __future__ import annotations

import contextlib
import select
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import paramiko

from safelaunch.transport.base import ChannelLostError
from safelaunch.transport.streams import CHUNK, Tail, split_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_STDERR_AFTER_EXIT = 0.25
"""Seconds in which the last of stderr may come in behind the exit status; sshd does not order the two."""

BROKEN = (OSError, EOFError, paramiko.SSHException)
"""What paramiko raises when a connection is gone."""


class _Bell(threading.Event):
    """An Event that also counts: who reads the count, looks, and waits past it, misses nothing."""

    def __init__(self, rung: threading.Condition) -> None:
        super().__init__()
        self._rung = rung
        self.count = 0

    def set(self) -> None:
        super().set()
        with self._rung:
            self.count += 1
            self._rung.notify_all()


class SshChannel:
    """See `base.Channel`; `drop` closes the connection that the channel is on."""

    def __init__(self, channel: paramiko.Channel, drop: Callable[[], None]) -> None:
        self._channel = channel
        self._drop = drop
        self._tail = Tail()
        self._draining = threading.Lock()
        self._sending = threading.Lock()
        self._rung = threading.Condition()
        self._bell = _Bell(self._rung)
        channel.in_buffer.set_event(self._bell)
        channel.in_stderr_buffer.set_event(self._bell)
        self._status = _Bell(self._rung)
        channel.status_event = self._status

    def start(self, command: bytes) -> None:
        """Run the command; blocks until the node has taken it, or the connection is closed under it."""
        try:
            self._channel.exec_command(command)
        except BROKEN as error:
            raise ChannelLostError(str(error) or "the connection is gone") from error

    def send(self, data: bytes) -> None:
        sent = 0
        try:
            with self._sending:
                while sent < len(data):
                    taken = self._channel.send(data[sent : sent + CHUNK])
                    if not taken:
                        break
                    sent += taken
        except BROKEN as error:
            raise ChannelLostError(str(error) or "the connection is gone") from error
        # paramiko drops what is sent on a dead connection without a word.
        if sent < len(data) or self._channel.closed:
            raise ChannelLostError("the command or the connection has ended")

    def send_eof(self) -> None:
        with contextlib.suppress(*BROKEN):
            self._channel.shutdown_write()

    def lines(self) -> Iterator[bytes]:
        return split_lines(self._read)

    def stderr(self) -> bytes:
        self._drain()
        return self._tail.bytes()

    def wait(self, timeout: float | None = None) -> int | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            seen = self._count()
            self._drain()
            if self._status.is_set() or self._channel.closed:
                break
            if not self._wait_past(seen, deadline):
                return None
        status = self._channel.exit_status
        if status < 0:
            return None
        settled = time.monotonic() + _STDERR_AFTER_EXIT
        while not (self._channel.eof_received or self._channel.closed):
            seen = self._count()
            self._drain()
            if not self._wait_past(seen, settled):
                break
        self._drain()
        return status

    def close(self) -> None:
        transport = self._channel.transport
        if self._channel.closed or transport is None:
            return
        with contextlib.suppress(*BROKEN, ValueError):
            writable = select.poll()
            writable.register(transport.sock, select.POLLOUT)
            if writable.poll(0):
                self._channel.close()
                return
        # What was sent before is stuck: so would be our farewell, and with it whoever closes.
        self._drop()

    def _read(self) -> bytes:
        """Return some stdout, b"" at its end; keeps stderr flowing meanwhile."""
        channel = self._channel
        while True:
            seen = self._count()
            self._drain()
            with contextlib.suppress(*BROKEN):
                if channel.recv_ready():
                    return channel.recv(CHUNK)
                if channel.eof_received or channel.closed:
                    # What came between the two looks.
                    return channel.recv(CHUNK) if channel.recv_ready() else b""
            self._wait_past(seen, None)

    def _drain(self) -> None:
        with self._draining, contextlib.suppress(*BROKEN):
            while self._channel.recv_stderr_ready():
                self._tail.feed(self._channel.recv_stderr(CHUNK))

    def _count(self) -> int:
        with self._rung:
            return self._bell.count + self._status.count

    def _wait_past(self, seen: int, deadline: float | None) -> bool:
        """Wait until a bell rang that was not seen; False if the deadline came first."""
        with self._rung:
            while self._bell.count + self._status.count == seen:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._rung.wait(left)
        return True


def take_exit_signal(channel: Any, message: paramiko.Message) -> bool:
    """Record `exit-signal` as status 128+s; False for any other channel request.

    paramiko knows no such request and would report a killed command as lost. RFC 4254, section 6.10; sshd
    sends names of its own (`SIG@openssh.com`) for signals without one there, which become 128.
    """
    message.rewind()
    message.get_int()
    if message.get_text() != "exit-signal":
        return False
    message.get_boolean()
    number = getattr(signal, "SIG" + message.get_text(), 0)
    channel.exit_status = 128 + number
    channel.status_event.set()
    return True
