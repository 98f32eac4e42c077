"""A conversation with the probe of one node, over its open connection."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import TYPE_CHECKING, Any

from safelaunch.facts import NodeFacts
from safelaunch.transport.base import ChannelLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from safelaunch.transport.base import Channel, Session

STATUS_SECONDS = 5.0
"""How long an exit status may come after the end of the output."""
NOISE_KEPT = 4096
"""Bytes of what a shell start-up prints that are kept for a message."""


class Gate:
    """Opens when it was counted down to nothing."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._changed = threading.Condition()

    def count_down(self) -> None:
        """Count one less."""
        with self._changed:
            self._left -= 1
            if self._left <= 0:
                self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait for the gate to open, at most `timeout` seconds; tell whether it did."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left <= 0, timeout)


class Conversation:
    """The probe of one node: a thread reads what it says, `ask` sends commands.

    `complete` says that every collector has ended, `ended` that nothing more will come; `status` is the exit
    status then (None: the connection broke). `late` is set by `give_up`; `settled` is when it was complete
    or ended. `clock` is monotonic, `wall` is seconds since 1970.
    """

    def __init__(
        self, session: Session, marker: str, *, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self.complete = False
        self.ended = False
        self.status: int | None = None
        self.late: float | None = None
        self.settled = self._begin = clock()
        self._session = session
        self._marker = marker.encode()
        self._clock = clock
        self._wall = wall
        self._channel: Channel | None = None
        self._first_word: float | None = None
        self._noise = bytearray()
        self._facts: dict[str, Any] = {}
        self._errors: dict[str, str] = {}
        self._lock = threading.Lock()
        self._number = 0
        self._asked: dict[int, tuple[str, float]] = {}
        self._replies: dict[str, dict[str, Any]] = {}
        self._clocks: list[tuple[float, float]] = []
        self._waiting: tuple[set[int], Callable[[], None]] | None = None

    def start(self, command: str, payload: bytes, on_seen: Callable[[bool], None]) -> None:
        """Start the probe; `on_seen(complete)` is called once, from the reader's thread."""
        name = f"probe-{self._session.host}"
        threading.Thread(target=self._read, args=(command, payload, on_seen), name=name, daemon=True).start()

    def ask(self, commands: Sequence[Mapping[str, Any]], on_answered: Callable[[], None]) -> None:
        """Send commands; `on_answered` is called once, when all are answered or no answer can come any more.

        Commands that were sent before and not answered are no longer waited for.
        """
        with self._lock:
            first = self._number + 1
            self._number += len(commands)
            numbers = range(first, self._number + 1)
            rows = [{**command, "id": number} for number, command in zip(numbers, commands, strict=True)]
            self._waiting = (set(numbers), on_answered)
            channel = None if self.ended else self._channel
            now = self._wall()
            self._asked.update({row["id"]: (str(row["do"]), now) for row in rows})
        if channel is not None:
            with contextlib.suppress(ChannelLostError):
                channel.send("".join(json.dumps(row) + "\n" for row in rows).encode())
                return
        self._release()

    def reply(self, command: str, key: str | None = None) -> Any:
        """Return the last answer to a command, or what it holds under `key`; None without one."""
        with self._lock:
            answer = self._replies.get(command)
            return answer if key is None or answer is None else answer.get(key)

    def clock(self) -> dict[str, float] | None:
        """Return how far the node's clock is ahead: {offset, uncertainty} in seconds; None if unknown.

        The node's answer lies somewhere between our question and its arrival: the shortest way is the surest.
        """
        with self._lock:
            if not self._clocks:
                return None
            uncertainty, offset = min(self._clocks)
            return {"offset": offset, "uncertainty": uncertainty}

    def node_facts(self) -> NodeFacts:
        """Return what the probe said so far."""
        session = self._session
        answered = self._begin if self._first_word is None else self._first_word
        return NodeFacts(
            host=session.host,
            address=session.address,
            host_key=session.host_key,
            seconds=session.seconds,
            answer_seconds=answered - self._begin,
            remarks=session.remarks,
            noise=self.output(),
            facts=dict(self._facts),
            errors=dict(self._errors),
        )

    def output(self) -> str:
        """Return what came beside facts: noise of the shell start-up, error messages."""
        channel = self._channel
        stderr = channel.stderr() if channel is not None else b""
        return (bytes(self._noise) + stderr).decode(errors="replace")

    def give_up(self, seconds: float) -> None:
        """Drop the connection of a probe that is late after so many seconds."""
        self.late = seconds
        self._session.close()

    def close(self) -> None:
        """End the probe; the connection stays."""
        if self._channel is not None:
            self._channel.send_eof()
            self._channel.close()

    def _read(self, command: str, payload: bytes, on_seen: Callable[[bool], None]) -> None:
        try:
            self._channel = channel = self._session.start(command)
        except ChannelLostError as error:
            self._noise += str(error).encode()
        else:
            with contextlib.suppress(
                ChannelLostError
            ):  # it may end before it reads all; the status tells how
                channel.send(payload)
            for line in channel.lines():
                if self._hear(line, self._wall()):
                    self.settled, self.complete = self._clock(), True
                    on_seen(True)
            self.status = channel.wait(STATUS_SECONDS)
        self.ended = True
        if not self.complete:
            self.settled = self._clock()
            on_seen(False)
        self._release()

    def _hear(self, line: bytes, now: float) -> bool:
        """Keep what one line says; tell whether it was the last of the facts."""
        if not line.startswith(self._marker):
            self._noise += line[: max(0, NOISE_KEPT - len(self._noise))] + b"\n"
            return False
        if self._first_word is None:
            self._first_word = self._clock()
        try:
            message = json.loads(line[len(self._marker) :])
        except ValueError:  # cut off by the end of the connection
            return False
        if "value" in message:
            self._facts[message["fact"]] = message["value"]
        elif "fact" in message:
            self._errors[message["fact"]] = message["error"]
        elif "reply" in message:
            self._answered(message, now)
        return "done" in message

    def _answered(self, message: dict[str, Any], now: float) -> None:
        with self._lock:
            command, sent = self._asked.pop(message.pop("reply"))
            self._replies[command] = message
            if command == "clock" and "time" in message:
                self._clocks.append(((now - sent) / 2, message["time"] - (sent + now) / 2))
            over = self._waiting is not None and not self._waiting[0] & self._asked.keys()
        if over:
            self._release()

    def _release(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting[1]()
