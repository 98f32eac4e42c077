"""The user's private keys, each loaded once for all hosts.

Order as in OpenSSH (sshconnect2.c, pubkey_prepare): keys of the agent that a file names, the agent's other
keys unless IdentitiesOnly, then the files.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.agent import AgentSSH
from paramiko.pkey import UnknownKeyType

from safelaunch.transport.known_hosts import fingerprint

if TYPE_CHECKING:
    from typing import Any

    from safelaunch.transport.ssh_config import Target

_AGENT_TIMEOUT = 10.0
"""Seconds that an agent may take to sign; one that asks its user on a screen takes some."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A key that can sign; `label` names it to the user."""

    key: paramiko.PKey
    label: str


@dataclass(frozen=True, slots=True)
class Offer:
    """What a login may offer.

    `locked` are files that need a passphrase nobody can type here, `foreign` those that only the `ssh`
    program can use (security keys and kinds that paramiko does not know).
    """

    identities: tuple[Identity, ...] = ()
    locked: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    identities: tuple[Identity, ...] = ()
    blob: bytes | None = None
    problem: str = ""


class KeyRing:
    """Loads keys on first use; safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}
        self._agents: dict[str, tuple[Identity, ...]] = {}
        self._open_agents: list[_SharedAgent] = []
        self._offers: dict[Any, Offer] = {}

    def offer(self, target: Target) -> Offer:
        """Return what to offer a host, the best first."""
        wanted = (target.identity_files, target.identities_only, target.agent)
        with self._lock:
            if wanted not in self._offers:
                self._offers[wanted] = self._make_offer(*wanted)
            return self._offers[wanted]

    def close(self) -> None:
        """Hang up on the agents; their keys cannot sign any more."""
        with self._lock:
            for agent in self._open_agents:
                agent.hang_up()
            self._open_agents.clear()
            self._agents.clear()
            self._offers.clear()

    def _make_offer(self, paths: tuple[str, ...], only: bool, agent_path: str | None) -> Offer:
        files = [self._file(path) for path in paths]
        held = {identity.key.asbytes(): identity for identity in self._agent(agent_path)}
        named = [held[file.blob] for file in files if file.blob in held]
        others = [] if only else [identity for identity in held.values() if identity not in named]
        left = [file for file in files if file.blob not in held]
        from_files = [identity for file in left for identity in file.identities]
        return Offer(
            identities=(*named, *others, *from_files),
            locked=tuple(file.path for file in left if file.problem == "locked"),
            foreign=tuple(file.path for file in left if file.problem == "foreign"),
        )

    def _file(self, path: str) -> _File:
        if path not in self._files:
            self._files[path] = _load(path)
        return self._files[path]

    def _agent(self, path: str | None) -> tuple[Identity, ...]:
        if path is None:
            return ()
        if path not in self._agents:
            self._agents[path] = ()
            # No agent, or one that does not answer, is one that has no keys: as for OpenSSH.
            with contextlib.suppress(OSError, paramiko.SSHException):
                agent = _SharedAgent(path)
                self._open_agents.append(agent)
                self._agents[path] = tuple(
                    Identity(key, f"agent key {key.comment or key.get_name()} ({fingerprint(key.asbytes())})")
                    for key in agent.get_keys()
                )
        return self._agents[path]


class _SharedAgent(AgentSSH):
    """An agent connection that many logins sign with at once; paramiko's own would mix their answers up."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._turn = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(_AGENT_TIMEOUT)
            self._socket.connect(path)
            self._connect(self._socket)  # type: ignore[attr-defined]  # as paramiko.Agent does
        except BaseException:
            self._socket.close()
            raise

    def hang_up(self) -> None:
        self._socket.close()

    def _send_message(self, msg: Any) -> Any:
        with self._turn:
            return super()._send_message(msg)  # type: ignore[misc]  # absent from the stubs


def _load(path: str) -> _File:
    blob = _public_part(path + ".pub")
    if not os.path.isfile(path):
        # A public key alone names a key of the agent.
        return _File(path, blob=blob)
    try:
        key = paramiko.PKey.from_path(path)
    except (paramiko.PasswordRequiredException, TypeError):
        # TypeError is how the cryptography library asks for a passphrase.
        return _File(path, blob=blob, problem="locked")
    except (UnknownKeyType, UnsupportedAlgorithm, paramiko.SSHException, ValueError):
        blob = blob or _public_part(path)
        return _File(path, blob=blob, problem="" if _public_part(path) else "foreign")
    except OSError:
        return _File(path, blob=blob)
    label = f"{path} ({fingerprint(key.asbytes())})"
    identities = [Identity(key, label)]
    if key.public_blob is not None:
        # A certificate lies beside it: OpenSSH offers the certificate, then the key alone.
        identities = [
            Identity(key, f"{path}-cert.pub"),
            Identity(type(key).from_private_key_file(path), label),
        ]
    return _File(path, tuple(identities), key.asbytes())


def _public_part(path: str) -> bytes | None:
    """Return the key of a `.pub` file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            words = file.read(20_000).split()
        return base64.b64decode(words[1], validate=True)
    except (OSError, IndexError, binascii.Error):
        return None
