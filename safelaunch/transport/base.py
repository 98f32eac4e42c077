"""What the rest of the code knows of a connection to a node.

An implementation opens all hosts at once and keeps each connection for everything that follows: the
probe, the agent, the sweep. One blocking style, threads: `open` calls back from its workers, `Channel`
methods block and are freed by `close` from another thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

STDERR_KEPT = 65_536
"""Bytes of a channel's standard error that are kept for a message."""


class ChannelLostError(Exception):
    """The connection under a channel is gone; what was sent may not have arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """Why a host could not be opened: an `ssh.*` code with what was seen and the command that fixes it."""

    host: str
    code: str
    observed: str
    why: str
    fix: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """Something worth a warning about a host that could be opened (`ssh.throttled` ...)."""

    code: str
    observed: str
    why: str
    fix: str


class Channel(Protocol):
    """One running command on a node, with its own stdin, stdout and stderr."""

    def send(self, data: bytes) -> None:
        """Write all of `data` to the command's stdin; raise ChannelLostError when it can't arrive."""

    def send_eof(self) -> None:
        """Close the command's stdin."""

    def lines(self) -> Iterator[bytes]:
        """Yield stdout line by line without the newline, an unfinished last line too, until its end."""

    def stderr(self) -> bytes:
        """Return the last STDERR_KEPT bytes of stderr so far."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit status (128+s for signal s), or None if it was lost or is late."""

    def close(self) -> None:
        """Drop the channel; frees a blocked `send`, `lines` or `wait`. Never raises, never blocks."""


class Session(Protocol):
    """An open connection to one host.

    `address` is the peer's IP address ("" where there is none), `host_key` its key's fingerprint
    (`SHA256:...`) or None, `seconds` the time from `open` to here.
    """

    host: str
    address: str
    host_key: str | None
    seconds: float
    remarks: tuple[Remark, ...]

    def start(self, command: str) -> Channel:
        """Run a command line in the login shell of the node; raise ChannelLostError."""

    def close(self) -> None:
        """Drop the connection and all its channels. Never raises, never blocks for long."""


class Transport(Protocol):
    """A way to reach hosts."""

    name: str

    def open(
        self, hosts: Sequence[str], on_open: Callable[[str, Session | Unreachable], None], *, timeout: float
    ) -> None:
        """Open all hosts at once; return when each was reported through `on_open`.

        `on_open` is called from a worker thread, once a host, as soon as that host is decided, and must
        not block. No host takes longer than `timeout` seconds from its turn. Used again to reconnect.
        """

    def close(self) -> None:
        """Close every session."""
