"""Connect to all hosts at once, up to the server's first words.

One thread and one selector: a dead host costs no thread, delays nobody, and is told apart exactly (refused,
no route, no answer, silent, not SSH, turned away). Names are resolved beside it, because `getaddrinfo` can
hang and knows no time limit. What comes out is a connected socket with the banner still unread in it.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import os
import queue
import random
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Kind = Literal["name", "no_route", "refused", "timeout", "no_banner", "not_ssh", "throttled", "closed"]

_RESOLVERS = 32
"""Names looked up at once; as many more join each time all of them have been stuck for a second."""

_STAGGER = 0.25
"""Seconds before the next address of a host is tried beside the first (RFC 8305, section 5)."""

_GRACE = 1.0
"""Seconds that a server may take from other words to its version line (RFC 4253, section 4.2)."""

_RECHECK = 0.05

_DEAD_PEER_MS = 30_000
"""How long sent data may stay unacknowledged before the kernel gives a connection up."""

_TCP_OPTIONS = (
    (socket.TCP_NODELAY, 1),
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 4),
    (socket.TCP_USER_TIMEOUT, _DEAD_PEER_MS),
)

_TURNED_AWAY = (b"Exceeded MaxStartups", b"Not allowed at this time")
"""What sshd says before it drops a connection (sshd.c: MaxStartups, PerSourcePenalties)."""

_Address = tuple[Any, ...]


class FastSocket(socket.socket):
    """A TCP socket that waits neither to send nor to acknowledge.

    paramiko sends small packets and sets no option; with the kernel's defaults Nagle and delayed
    acknowledgements cost 80 ms in each login. The kernel forgets TCP_QUICKACK, so it is set before each read.
    """

    @classmethod
    def open(cls, family: int) -> FastSocket:
        sock = cls(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _TCP_OPTIONS:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        return sock

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return super().recv(bufsize, flags)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to connect to, and for how many seconds at most; `name` is what results are reported under."""

    name: str
    hostname: str
    port: int
    family: int
    timeout: float


@dataclass(frozen=True, slots=True)
class Dialled:
    """A connection on which an SSH server has spoken; `drops` counts how often it was turned away before."""

    sock: FastSocket
    address: str
    drops: int


@dataclass(frozen=True, slots=True)
class NotDialled:
    """Why there is none; `detail` is what was seen, in words that follow "host port:"."""

    kind: Kind
    detail: str
    address: str
    drops: int = 0


@dataclass(slots=True)
class _Attempt:
    endpoint: Endpoint
    deadline: float
    addresses: deque[_Address] = field(default_factory=deque)
    resolved: list[_Address] = field(default_factory=list)
    open: dict[FastSocket, str] = field(default_factory=dict)
    talking: set[FastSocket] = field(default_factory=set)
    heard: dict[FastSocket, float] = field(default_factory=dict)
    failures: list[NotDialled] = field(default_factory=list)
    drops: int = 0
    dropped_with: str = ""
    done: bool = False


class Dialler:
    """One round of dialling; `run` reports each endpoint once, then returns."""

    def __init__(self, report: Callable[[str, Dialled | NotDialled], None]) -> None:
        self._report = report
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._left = 0
        self._stopped = False
        # Sockets, not a pipe: one that was closed stays closed for a late caller, whatever reuses its number.
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._names = _Names(self._wake)

    def run(self, endpoints: Sequence[Endpoint]) -> None:
        """Dial all; raises OSError when this process has no file descriptors left."""
        now = time.monotonic()
        attempts = [_Attempt(endpoint, now + endpoint.timeout) for endpoint in endpoints]
        self._left = len(attempts)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        try:
            for attempt in attempts:
                self._at(attempt.deadline, partial(self._expire, attempt))
                self._resolve(attempt)
            while self._left and not self._stopped:
                self._turn()
        finally:
            for attempt in attempts:
                self._hang_up(attempt)
            self._selector.close()
            self._names.close()
            self._wake_in.close()
            self._wake_out.close()

    def stop(self) -> None:
        """Make `run` return early; from any thread."""
        self._stopped = True
        self._wake()

    def _wake(self) -> None:
        # A full buffer has woken us already; a closed socket means that we are done.
        with contextlib.suppress(OSError):
            self._wake_out.send(b"x")

    def _turn(self) -> None:
        wait = self._timers[0][0] - time.monotonic() if self._timers else 1.0
        for key, events in self._selector.select(max(0.0, wait)):
            if key.fileobj is self._wake_in:
                self._wake_in.recv(4096)
                continue
            attempt, sock = key.data, cast("FastSocket", key.fileobj)
            if attempt.done or sock not in attempt.open:
                continue
            if events & selectors.EVENT_WRITE:
                self._connected(attempt, sock)
            else:
                self._listen(attempt, sock)
        for attempt, addresses in self._names.answers():
            if not attempt.done:
                self._addresses(attempt, addresses)
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (when, next(self._order), action))

    def _resolve(self, attempt: _Attempt) -> None:
        endpoint = attempt.endpoint
        with contextlib.suppress(socket.gaierror, UnicodeError):
            # A number needs no resolver.
            found = _look_up(endpoint, socket.AI_NUMERICHOST)
            self._addresses(attempt, found)
            return
        if self._names.ask(attempt):
            self._at(time.monotonic() + 1.0, self._hurry)

    def _hurry(self) -> None:
        if self._names.more_helpers():
            self._at(time.monotonic() + 1.0, self._hurry)

    def _addresses(self, attempt: _Attempt, found: list[_Address] | str) -> None:
        if isinstance(found, str):
            self._finish(attempt, NotDialled("name", found, ""))
            return
        attempt.resolved = found
        attempt.addresses = deque(found)
        self._next_address(attempt)

    def _next_address(self, attempt: _Attempt) -> None:
        """Start on the next address; with none left and none under way, settle."""
        while attempt.addresses and not attempt.done:
            family, sockaddr = attempt.addresses.popleft()
            address = str(sockaddr[0])
            sock = FastSocket.open(family)
            code = sock.connect_ex(sockaddr)
            if code in {0, errno.EINPROGRESS}:
                attempt.open[sock] = address
                self._selector.register(sock, selectors.EVENT_WRITE, attempt)
                if attempt.addresses:
                    self._at(time.monotonic() + _STAGGER, lambda: self._stagger(attempt))
                return
            sock.close()
            attempt.failures.append(_failure(code, address))
        if not attempt.open and not attempt.done:
            self._settle(attempt)

    def _stagger(self, attempt: _Attempt) -> None:
        if attempt.open:
            self._next_address(attempt)

    def _connected(self, attempt: _Attempt, sock: FastSocket) -> None:
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            attempt.failures.append(_failure(code, self._drop(attempt, sock)))
            self._next_address(attempt)
            return
        attempt.talking.add(sock)
        self._selector.modify(sock, selectors.EVENT_READ, attempt)

    def _listen(self, attempt: _Attempt, sock: FastSocket) -> None:
        """Look at what the server has said, without taking it from paramiko."""
        try:
            said = sock.recv(512, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        now = time.monotonic()
        banner = said if said.startswith(b"SSH-") else said.partition(b"\nSSH-")[2]
        if b"\n" in banner:
            self._won(attempt, sock)
        elif not said or said.startswith(_TURNED_AWAY):
            attempt.drops += 1
            attempt.dropped_with = _printable(said)
            self._drop(attempt, sock)
            self._next_address(attempt)
        elif banner or b"SSH-".startswith(said) or now < attempt.heard.setdefault(sock, now) + _GRACE:
            # Words are there to be read until the end: ask again later instead of spinning on them.
            self._selector.unregister(sock)
            self._at(now + _RECHECK, lambda: self._listen_again(attempt, sock))
        else:
            address = self._drop(attempt, sock)
            attempt.failures.append(NotDialled("not_ssh", _printable(said), address))
            self._next_address(attempt)

    def _listen_again(self, attempt: _Attempt, sock: FastSocket) -> None:
        if not attempt.done and sock in attempt.open:
            self._selector.register(sock, selectors.EVENT_READ, attempt)

    def _won(self, attempt: _Attempt, sock: FastSocket) -> None:
        self._selector.unregister(sock)
        address = attempt.open.pop(sock)
        self._finish(attempt, Dialled(sock, address, attempt.drops))

    def _settle(self, attempt: _Attempt) -> None:
        """All addresses have failed: dial again if the server only turned us away, else report the worst."""
        if attempt.drops and not any(failure.kind == "not_ssh" for failure in attempt.failures):
            attempt.failures.clear()
            self._at(time.monotonic() + pause_after(attempt.drops), lambda: self._again(attempt))
            return
        self._finish(attempt, _most_telling(attempt.failures))

    def _again(self, attempt: _Attempt) -> None:
        if not attempt.done and not attempt.open:
            attempt.addresses = deque(attempt.resolved)
            self._next_address(attempt)

    def _expire(self, attempt: _Attempt) -> None:
        if attempt.done:
            return
        seconds = f"{attempt.endpoint.timeout:g} s"
        if not attempt.resolved:
            failure = NotDialled("name", f"no answer from the resolver within {seconds}", "")
        elif attempt.drops:
            kind: Kind = "throttled" if attempt.dropped_with else "closed"
            address = str(attempt.resolved[0][1][0])
            failure = NotDialled(kind, attempt.dropped_with, address, attempt.drops)
        elif attempt.talking:
            address = attempt.open[next(iter(attempt.talking))]
            failure = NotDialled("no_banner", f"silent for {seconds}", address)
        else:
            address = next(iter(attempt.open.values()), str(attempt.resolved[0][1][0]))
            failure = NotDialled("timeout", f"no answer within {seconds}", address)
        self._finish(attempt, failure)

    def _finish(self, attempt: _Attempt, result: Dialled | NotDialled) -> None:
        attempt.done = True
        self._left -= 1
        self._hang_up(attempt)
        self._report(attempt.endpoint.name, result)

    def _drop(self, attempt: _Attempt, sock: FastSocket) -> str:
        """Close one connection of an attempt; return its address."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)
        sock.close()
        attempt.talking.discard(sock)
        return attempt.open.pop(sock)

    def _hang_up(self, attempt: _Attempt) -> None:
        for sock in list(attempt.open):
            self._drop(attempt, sock)


def pause_after(drops: int) -> float:
    """Return how many seconds to wait when turned away; random, so that what collided does not again."""
    return float(min(2.0, 0.1 * 2 ** min(drops, 5))) * random.uniform(0.5, 1.5)  # noqa: S311 (no secret)


class _Names:
    """Looks names up in threads of its own.

    A thread that hangs in `getaddrinfo` cannot be freed; being a daemon it holds nothing up, not even exit.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._questions: queue.SimpleQueue[_Attempt | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[_Attempt, list[_Address] | str]] = queue.SimpleQueue()
        self._asked = 0
        self._answered = 0
        self._seen = 0
        self._helpers = 0

    def ask(self, attempt: _Attempt) -> bool:
        """Queue a question; True for the first one."""
        self._asked += 1
        self._questions.put(attempt)
        if self._helpers < min(self._asked, _RESOLVERS):
            self._start()
        return self._asked == 1

    def answers(self) -> list[tuple[_Attempt, list[_Address] | str]]:
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._answers.get_nowait())
        self._answered += len(found)
        return found

    def more_helpers(self) -> bool:
        """Add helpers if nothing was answered since the last call; say whether questions are open."""
        if self._answered == self._seen:
            for _ in range(min(_RESOLVERS, self._questions.qsize())):
                self._start()
        self._seen = self._answered
        return self._answered < self._asked

    def close(self) -> None:
        for _ in range(self._helpers):
            self._questions.put(None)

    def _start(self) -> None:
        self._helpers += 1
        threading.Thread(target=self._help, name="safelaunch-resolve", daemon=True).start()

    def _help(self) -> None:
        while (attempt := self._questions.get()) is not None:
            try:
                found: list[_Address] | str = _look_up(attempt.endpoint, 0)
            except (OSError, UnicodeError) as error:
                found = getattr(error, "strerror", None) or str(error)
            self._answers.put((attempt, found))
            self._wake()


def _look_up(endpoint: Endpoint, flags: int) -> list[_Address]:
    found = socket.getaddrinfo(
        endpoint.hostname, endpoint.port, endpoint.family, socket.SOCK_STREAM, socket.IPPROTO_TCP, flags
    )
    return [(family, sockaddr) for family, _, _, _, sockaddr in found]


def _failure(code: int, address: str) -> NotDialled:
    if code in {errno.EMFILE, errno.ENFILE}:
        raise OSError(code, os.strerror(code))
    kinds: dict[int, Kind] = {errno.ECONNREFUSED: "refused", errno.ETIMEDOUT: "timeout"}
    return NotDialled(kinds.get(code, "no_route"), os.strerror(code), address)


def _most_telling(failures: list[NotDialled]) -> NotDialled:
    """Of what happened at a host's addresses, return what says most about the host."""
    order: tuple[Kind, ...] = ("not_ssh", "refused", "timeout", "no_route")
    return min(failures, key=lambda failure: order.index(failure.kind))


def _printable(said: bytes) -> str:
    """Return the first line of what a server said, short and harmless to a terminal."""
    line = said.split(b"\n", 1)[0].strip().decode("utf-8", "replace")
    return "".join(char if char.isprintable() else "?" for char in line)[:80]
