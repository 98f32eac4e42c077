"""A channel over a child process of this machine: a command run here, or an `ssh` that runs it there."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from safelaunch.transport.base import ChannelLostError
from safelaunch.transport.streams import CHUNK, Tail, split_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_STDERR_AFTER_EXIT = 0.25
"""Seconds in which the last of stderr may come in behind the exit status."""

_LONGEST_NAP = 0.05


class ProcessChannel:
    """See `base.Channel`.

    The exit status is the process's own or, with a `marker`, the number behind it in a line on stderr: `ssh`
    gives 255 for a lost connection, a killed command and a command that exits 255 alike. A process that ends
    without the marker is lost.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        environ: Mapping[str, str],
        cwd: str | None = None,
        marker: bytes | None = None,
    ) -> None:
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=environ,
                cwd=cwd,
                start_new_session=True,
            )
        except OSError as error:
            raise ChannelLostError(f"{argv[0]}: {error.strerror}") from error
        self._stdin, self._stdout, self._stderr = self._pipes()
        # Written to by `close`: it ends every wait, since closing a descriptor wakes nobody.
        self._wake, self._waker = os.pipe()
        self._marker = marker
        self._reported: int | None = None
        self._tail = Tail()
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._users = 1
        self._closed = False
        self._eof_sent = False
        self._news = threading.Event()
        self._stderr_done = threading.Event()
        threading.Thread(target=self._keep_stderr, name="safelaunch-stderr", daemon=True).start()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def running(self) -> bool:
        return not self._closed and self._process.poll() is None

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        with self._using(), self._sending:
            while view:
                if self._eof_sent:
                    raise ChannelLostError("the command's stdin is closed")
                try:
                    view = view[os.write(self._stdin, view) :]
                except BlockingIOError:
                    self._await(self._stdin, select.POLLOUT)
                except OSError as error:
                    raise ChannelLostError(f"the command has ended ({error.strerror})") from error

    def send_eof(self) -> None:
        with contextlib.suppress(ChannelLostError), self._using(), self._lock:
            if not self._eof_sent:
                self._eof_sent = True
                os.close(self._stdin)

    def lines(self) -> Iterator[bytes]:
        return split_lines(self._read)

    def stderr(self) -> bytes:
        return self._tail.bytes()

    def wait(self, timeout: float | None = None) -> int | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        nap = 0.0005
        while not self._closed:
            self._news.clear()
            ended = self._process.poll()
            if ended is not None or self._reported is not None:
                self._stderr_done.wait(_STDERR_AFTER_EXIT)
                if self._marker is not None:
                    return self._reported
                return ended if ended is None or ended >= 0 else 128 - ended
            left = nap if deadline is None else min(nap, deadline - time.monotonic())
            if left <= 0:
                return None
            self._news.wait(left)
            nap = min(2 * nap, _LONGEST_NAP)
        return None

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        os.write(self._waker, b"x")
        self._news.set()
        if self._process.poll() is None:
            # What a terminal would say; a command that ignores it lives on, as it would behind sshd.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGHUP)
            threading.Thread(target=self._process.wait, name="safelaunch-reap", daemon=True).start()
        self._leave()

    def _pipes(self) -> tuple[int, int, int]:
        """Take the pipes over from Popen, as descriptors that never block."""
        numbers = []
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None  # noqa: S101 (all three were asked for)
            number = os.dup(pipe.fileno())
            pipe.close()
            os.set_blocking(number, False)
            numbers.append(number)
        self._process.stdin = self._process.stdout = self._process.stderr = None
        return numbers[0], numbers[1], numbers[2]

    def _read(self) -> bytes:
        with contextlib.suppress(ChannelLostError), self._using():
            return self._read_some(self._stdout)
        return b""

    def _read_some(self, descriptor: int) -> bytes:
        self._await(descriptor, select.POLLIN)
        return os.read(descriptor, CHUNK)

    def _keep_stderr(self) -> None:
        with contextlib.suppress(ChannelLostError), self._using():
            held = b""
            while data := self._read_some(self._stderr):
                held = self._take_report(held + data)
                self._news.set()
            self._tail.feed(held)
        self._stderr_done.set()
        self._news.set()

    def _take_report(self, data: bytes) -> bytes:
        """Keep stderr without our own line; return what may be the beginning of that line."""
        marker = self._marker
        if marker is None or self._reported is not None:
            self._tail.feed(data)
            return b""
        before, found, after = data.partition(marker)
        if found:
            number, newline, rest = after.partition(b"\n")
            if not newline:
                self._tail.feed(before)
                return found + after
            self._reported = int(number)
            self._tail.feed(before + rest)
            return b""
        keep = next(
            (n for n in range(min(len(marker) - 1, len(data)), 0, -1) if marker.startswith(data[-n:])), 0
        )
        self._tail.feed(data[: len(data) - keep])
        return data[len(data) - keep :]

    def _await(self, descriptor: int, events: int) -> None:
        """Wait until a descriptor is ready; raise ChannelLostError when `close` comes first."""
        poll = select.poll()
        poll.register(descriptor, events)
        poll.register(self._wake, select.POLLIN)
        if any(number == self._wake for number, _ in poll.poll()):
            raise ChannelLostError("the channel was closed")

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Keep the descriptors open meanwhile: a closed number may belong to another file at once."""
        with self._lock:
            if self._closed:
                raise ChannelLostError("the channel was closed")
            self._users += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            descriptors = [self._stdout, self._stderr, self._wake, self._waker]
            if not self._eof_sent:
                descriptors.append(self._stdin)
                self._eof_sent = True
        for descriptor in descriptors:
            os.close(descriptor)
