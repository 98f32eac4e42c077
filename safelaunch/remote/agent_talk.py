"""Part of the agent: what it has to tell the launcher, and the socket to the relay that carries it."""

from __future__ import annotations

import json
import selectors
import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

    from safelaunch.remote import agent_files as files

FAREWELL = b'{"event": "farewell"}\n'
"""The last line to a relay that is not needed any more; without it, the agent has died."""
BACKLOG = 8_388_608
"""Bytes of output that may be on their way unconfirmed; beyond that they wait in the files. It bounds what a
launcher holds in memory for one node."""
MOST_EVENTS = 20_000
"""Unconfirmed events beyond which no output is taken either."""
LINE = 1_048_576
"""Bytes that a command may have."""
ANSWER_SECONDS = 3.0
"""An agent that has not answered by then is taken to be without a launcher."""


def ask(directory: str) -> dict[str, Any] | None:
    """Return the status of the agent of a directory, or None where none answers."""
    try:
        connection = files.dial(directory)
    except OSError:
        return None
    try:
        connection.settimeout(ANSWER_SECONDS)
        connection.sendall(b'{"do": "status"}\n')
        with connection.makefile("rb") as stream:
            status: dict[str, Any] | None = json.loads(stream.readline() or b"null")
    except (OSError, ValueError):
        status = None
    connection.close()
    return status


class Event:
    """A numbered event. Output is not kept: it stands in its file from `start` to `end`."""

    __slots__ = ("end", "fields", "seq", "start", "tail")

    def __init__(
        self, seq: int, fields: dict[str, Any], tail: files.Tail | None = None, start: int = 0, end: int = 0
    ) -> None:
        self.seq = seq
        self.fields = fields
        self.tail = tail
        self.start = start
        self.end = end

    def line(self) -> bytes:
        message = {"seq": self.seq, **self.fields}
        if self.tail is not None:
            data = self.tail.read(self.start, self.end)
            message["data"] = data.decode("utf-8", "surrogateescape")
        return json.dumps(message).encode() + b"\n"


class Outbox:
    """Events in their order, kept until the launcher has confirmed them."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._seq = 0
        self._sent = 0  # how many of the events were handed to the present connection
        self._unconfirmed = 0  # bytes of output

    def add(self, name: str, **fields: Any) -> None:
        self._add({"event": name, "time": time.time(), **fields})

    def add_output(self, tail: files.Tail, end: int) -> None:
        fields = {"event": "output", "time": time.time(), "rank": tail.rank, "stream": tail.stream}
        self._add(fields, tail, tail.sent, end)
        self._unconfirmed += end - tail.sent
        tail.sent = end

    def _add(
        self, fields: dict[str, Any], tail: files.Tail | None = None, start: int = 0, end: int = 0
    ) -> None:
        self._seq += 1
        self._events.append(Event(self._seq, fields, tail, start, end))

    @property
    def takes_output(self) -> bool:
        return self._unconfirmed < BACKLOG and len(self._events) < MOST_EVENTS

    @property
    def all_sent(self) -> bool:
        return self._sent == len(self._events)

    def confirm(self, seq: int) -> None:
        """Forget what has arrived."""
        while self._events and self._events[0].seq <= seq:
            event = self._events.popleft()
            self._sent = max(0, self._sent - 1)
            if event.tail is not None:
                self._unconfirmed -= event.end - event.start
                event.tail.confirm(event.end)

    def rewind(self, after: int) -> None:
        """Begin anew, for a new connection, behind the last event that arrived."""
        self.confirm(after)
        self._sent = 0

    def next_line(self) -> bytes:
        """Return the next event to send."""
        self._sent += 1
        return self._events[self._sent - 1].line()


class Connection:
    """The socket to a relay. Nothing here waits."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.closed = False
        self._incoming = b""
        self._outgoing = b""

    def is_crowded(self) -> bool:
        """Whether enough is under way."""
        return len(self._outgoing) > files.CHUNK

    def receive(self) -> list[bytes] | None:
        """Return the lines that have come, or None at the end of the connection."""
        try:
            data = self.sock.recv(files.CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        return lines if data and len(self._incoming) <= LINE else None

    def say(self, data: bytes) -> None:
        self._outgoing += data

    def flush(self) -> bool:
        """Send what the socket takes; return False if it is broken."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self.sock.send(self._outgoing) :]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    @property
    def wanted(self) -> int:
        """What to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)

    def close(self, last_words: bytes = b"") -> None:
        """Close, after everything was sent if the other side still takes it."""
        try:
            if last_words:
                self.sock.settimeout(1)
                self.sock.sendall(self._outgoing + last_words)
        except OSError:
            pass
        self.closed = True
        self.sock.close()
