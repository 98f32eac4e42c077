"""One login over a dialled socket, with fabric and paramiko.

fabric verifies no host key of its own (AutoAddPolicy), asks nobody before it offers keys, and has no limit
for a login as a whole: the policy, the keys and the watchdog given to it here do.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import fabric
import paramiko
from paramiko.common import MSG_CHANNEL_REQUEST
from paramiko.packet import Packetizer
from paramiko.ssh_exception import IncompatiblePeer

from safelaunch.transport import failures
from safelaunch.transport.base import ChannelLostError, Unreachable
from safelaunch.transport.channel import BROKEN, SshChannel, take_exit_signal
from safelaunch.transport.known_hosts import HostKey, fingerprint

if TYPE_CHECKING:
    from safelaunch.transport.base import Remark
    from safelaunch.transport.dial import Dialled, FastSocket
    from safelaunch.transport.keys import Identity, KeyRing, Offer
    from safelaunch.transport.known_hosts import Known, KnownHosts
    from safelaunch.transport.ssh_config import Target
    from safelaunch.transport.watchdog import Alarm, Watchdog

_POLL = 5.0
"""Seconds between looks of an idle connection's thread; paramiko's 0.1 costs a third of a core at 1,000.

Nothing waits for it: data wakes the thread, and closing shuts the socket down.
"""

_OTHER_LOGINS = frozenset({"gssapi-with-mic", "gssapi-keyex", "hostbased"})
"""Ways to log in without typing that paramiko does not know."""

_RSA = ("rsa-sha2-512", "rsa-sha2-256")

# paramiko reports each failed login with a traceback on stderr unless someone listens.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False


class NeedsOpensshError(Exception):
    """Only the `ssh` program can log in here; the text says why."""


class _HostKeyRefusedError(paramiko.SSHException):
    """Carries the finding of a host key that was not let through."""

    def __init__(self, reason: Unreachable) -> None:
        super().__init__(reason.observed)
        self.reason = reason


class _LoginRefusedError(paramiko.AuthenticationException):
    """No key was let in; `allowed` is what the server would take, `partial` if it took a key as well."""

    def __init__(self, allowed: list[str], *, partial: bool) -> None:
        super().__init__("refused")
        self.allowed = allowed
        self.partial = partial


class _Packetizer(Packetizer):
    def start_handshake(self, timeout: float) -> None:
        """Start no timer thread: the watchdog bounds the handshake, and a thread a host costs."""


class _Transport(paramiko.Transport):
    """paramiko's, with what it leaves out: exit signals, the server's farewell, the order of host keys."""

    _channel_handler_table = dict(paramiko.Transport._channel_handler_table)  # type: ignore[attr-defined]  # noqa: SLF001, RUF012 (the only place to hook in)

    def __init__(self, sock: Any, known: Known, timeout: float) -> None:
        super().__init__(sock, packetizer_class=_Packetizer)
        self.farewell = ""
        # The watchdog comes first; these only must not come before it.
        self.banner_timeout = self.auth_timeout = self.channel_timeout = timeout + 5
        algorithms = [key.algorithm for key in known.keys]
        wanted = [name for alg in algorithms for name in (_RSA if alg == "ssh-rsa" else (alg,))]
        offered = super()._preferred_keys  # type: ignore[misc]  # absent from the stubs
        self._preferred_keys = (
            *(name for name in dict.fromkeys(wanted) if name in offered),
            *(name for name in offered if name not in wanted),
        )

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        """Host key algorithms, those of known keys first; no certificates, which paramiko does not verify."""
        return tuple(self._preferred_keys)

    def _parse_disconnect(self, m: paramiko.Message) -> None:
        m.get_int()
        self.farewell = m.get_text()


def _channel_request(channel: Any, message: paramiko.Message) -> None:
    if not take_exit_signal(channel, message):
        message.rewind()
        message.get_int()
        channel._handle_request(message)  # noqa: SLF001 (paramiko's own handler)


_Transport._channel_handler_table[MSG_CHANNEL_REQUEST] = _channel_request  # noqa: SLF001 (our own class)


class _Connection(fabric.Connection):  # type: ignore[misc]  # fabric has no types
    # Set on the instance, fabric would write it into the Config that all connections share, and other
    # threads would see that Config half merged.
    inline_ssh_env = True


class _Policy(paramiko.MissingHostKeyPolicy):
    """Verifies the host key. paramiko asks it before any key of ours is offered."""

    def __init__(self, target: Target, known: Known, hosts: KnownHosts, started: float) -> None:
        self._target = target
        self._known = known
        self._hosts = hosts
        self._started = started
        self.fingerprint: str | None = None
        self.remarks: list[Remark] = []

    def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:  # noqa: ARG002 (paramiko's)
        target, blob = self._target, key.asbytes()
        self.fingerprint = fingerprint(blob)
        offered = HostKey(key.get_name(), blob, "")
        seconds = time.monotonic() - self._started
        for revoked in self._known.revoked:
            if revoked.blob == blob:
                raise _HostKeyRefusedError(failures.host_key_revoked(target, offered, revoked.place, seconds))
        if any(known.blob == blob for known in self._known.keys):
            return
        if self._known.keys:
            reason = failures.host_key_changed(target, offered, self._known.keys, seconds)
            raise _HostKeyRefusedError(reason)
        if not target.weak:
            raise _HostKeyRefusedError(failures.host_key_unknown(target, offered, seconds))
        self._hosts.accept(target.host_key_names[0], HostKey(offered.algorithm, blob, "this run"))
        self.remarks.append(failures.host_key_accepted(target, offered))


class _Login:
    """paramiko's "auth strategy": offers the keys one by one and remembers what it offered."""

    def __init__(self, user: str, offer: Offer) -> None:
        self._user = user
        self._identities: tuple[Identity, ...] = offer.identities
        self.offered: list[str] = []
        self.begun = False

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        self.begun = True
        for identity in self._identities:
            self.offered.append(identity.label)
            try:
                allowed = transport.auth_publickey(self._user, identity.key)
            except paramiko.BadAuthenticationType as error:
                raise _LoginRefusedError(list(error.allowed_types), partial=False) from error
            except paramiko.AuthenticationException:
                if not transport.is_active():
                    raise
                continue
            if allowed:
                raise _LoginRefusedError(list(allowed), partial=True)
            return []
        allowed = self._ask(transport)
        if allowed:
            raise _LoginRefusedError(allowed, partial=False)
        return []

    def _ask(self, transport: paramiko.Transport) -> list[str]:
        """Return what the server would take: it says so to who comes without a key. Empty: it let us in."""
        try:
            return transport.auth_none(self._user)
        except paramiko.BadAuthenticationType as error:
            return list(error.allowed_types)
        except paramiko.AuthenticationException:
            if not self.offered:
                raise
            # One attempt too many for its MaxAuthTries; it did take keys.
            return ["publickey"]


class SshSession:
    """See `base.Session`; a fabric connection that is kept open."""

    def __init__(
        self,
        target: Target,
        connection: Any,
        spare: paramiko.Channel,
        watchdog: Watchdog,
        timeout: float,
    ) -> None:
        self.host = target.name
        self.address = ""
        self.host_key: str | None = None
        self.seconds = 0.0
        self.remarks: tuple[Remark, ...] = ()
        self._connection = connection
        self._spare: paramiko.Channel | None = spare
        self._watchdog = watchdog
        self._timeout = timeout
        self._lock = threading.Lock()
        connection.transport.sock.settimeout(_POLL)

    def start(self, command: str) -> SshChannel:
        with self._lock:
            raw, self._spare = self._spare, None
        with self._watchdog.limit(self._timeout, self.close) as alarm:
            try:
                raw = raw or self._connection.transport.open_session(timeout=self._timeout + 5)
            except BROKEN as error:
                raise ChannelLostError(f"{self.host} opens no further session: {error}") from error
            channel = SshChannel(raw, self.close)
            channel.start(command.encode("utf-8", "surrogateescape"))
        if alarm.fired:
            raise ChannelLostError(f"{self.host} did not start a command within {self._timeout:g} s")
        return channel

    def close(self) -> None:
        hang_up(self._connection.client, self._connection.transport.sock)


class Handshake:
    """What all logins of one transport share; `connect` may run in many threads at once."""

    def __init__(self, keys: KeyRing, hosts: KnownHosts, watchdog: Watchdog) -> None:
        self._keys = keys
        self._hosts = hosts
        self._watchdog = watchdog
        # Lazy and with an empty ssh configuration: fabric's files and its reading of ~/.ssh are not for us.
        self._config = fabric.Config(ssh_config=paramiko.SSHConfig(), lazy=True)

    def connect(
        self, target: Target, dialled: Dialled, *, timeout: float, started: float
    ) -> SshSession | Unreachable:
        """Log in; `timeout` seconds from now, `started` is when the whole began. Raises NeedsOpensshError."""
        known, offer = self._prepare(target, dialled)
        policy = _Policy(target, known, self._hosts, started)
        login = _Login(target.user, offer)
        connection = _Connection(
            host=target.hostname,
            user=target.user,
            port=target.port,
            config=self._config,
            connect_kwargs={
                "sock": dialled.sock,
                "auth_strategy": login,
                "transport_factory": lambda sock, **_: _Transport(sock, known, timeout),
            },
        )
        connection.client.set_missing_host_key_policy(policy)
        broke: BaseException | None = None
        with self._watchdog.limit(timeout, lambda: _shut(dialled.sock)) as alarm:
            try:
                connection.open()
                spare = connection.transport.open_session(timeout=timeout + 5)
            except BROKEN as error:
                broke = error
            except BaseException:
                hang_up(connection.client, dialled.sock)
                raise
        seconds = time.monotonic() - started
        if broke is not None or alarm.fired:
            # Before hang_up, which would make every transport look dead.
            transport = connection.client.get_transport()
            try:
                return self._judge(target, offer, policy, login, broke, alarm, transport, timeout, seconds)
            finally:
                hang_up(connection.client, dialled.sock)
        session = SshSession(target, connection, spare, self._watchdog, timeout)
        session.address, session.host_key, session.seconds = dialled.address, policy.fingerprint, seconds
        drops = [failures.got_through(target, dialled.drops)] if dialled.drops else []
        session.remarks = (*drops, *policy.remarks)
        return session

    def _prepare(self, target: Target, dialled: Dialled) -> tuple[Known, Offer]:
        known = self._hosts.find(target.host_key_names, target.known_hosts)
        offer = self._keys.offer(target)
        reason = None
        if known.authorities and not known.keys:
            reason = f"its host key is vouched for by a certificate authority ({known.authorities[0].place})"
        elif not offer.identities and offer.foreign:
            reason = f"{offer.foreign[0]} is a kind of key that only ssh can use"
        elif not offer.identities and target.other_login:
            reason = "there is no key, but GSSAPI or host-based login is on"
        if reason:
            dialled.sock.close()
            raise NeedsOpensshError(reason)
        return known, offer

    def _judge(
        self,
        target: Target,
        offer: Offer,
        policy: _Policy,
        login: _Login,
        error: BaseException | None,
        alarm: Alarm,
        transport: Any,
        timeout: float,
        seconds: float,
    ) -> Unreachable:
        """Say why a login failed."""
        if isinstance(error, _HostKeyRefusedError):
            return error.reason
        if isinstance(error, IncompatiblePeer):
            raise NeedsOpensshError(f"no algorithm in common with our own client ({error})") from error
        if alarm.fired:
            step = "the key exchange" if policy.fingerprint is None else "the login itself"
            return failures.slow_login(target, step, timeout, seconds)
        if isinstance(error, _LoginRefusedError):
            if target.other_login and not error.partial and _OTHER_LOGINS & set(error.allowed):
                raise NeedsOpensshError("no key was taken, but GSSAPI or host-based login may be")
            if error.partial or "publickey" not in error.allowed:
                return failures.password_only(target, error.allowed, error.partial, seconds)
            return failures.key_refused(target, login.offered, offer.locked, "", seconds)
        said = _said(transport)
        if "authentication failures" in said:
            return failures.key_refused(target, login.offered, offer.locked, said, seconds)
        if transport is not None and transport.is_authenticated():
            return failures.account(target, f"the login worked, then: {error}{_aside(said)}", seconds)
        if login.begun:
            tried = ", ".join(login.offered) or "nothing"
            seen = f"the node closed the connection during the login as {target.user}, offered {tried}"
            return failures.account(target, seen + _aside(said), seconds)
        return failures.closed(target, (str(error) or "end of file") + _aside(said), seconds)


def hang_up(client: Any, sock: FastSocket) -> None:
    """Close a connection so that its thread ends now and not at its next look; never raises."""
    transport = client.get_transport()
    _shut(sock)
    with contextlib.suppress(Exception):
        client.close()
    sock.close()
    if transport is not None and transport.ident and transport is not threading.current_thread():
        transport.join(1.0)


def _shut(sock: FastSocket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _said(transport: Any) -> str:
    """Return what the server said in words: its farewell, and the banner of its login."""
    if transport is None:
        return ""
    banner = (getattr(transport.auth_handler, "banner", None) or b"").decode("utf-8", "replace")
    text = " ".join(f"{banner} {transport.farewell}".split())
    return "".join(char if char.isprintable() else "?" for char in text)[:200]


def _aside(said: str) -> str:
    return f"; it says: {said}" if said else ""
