"""known_hosts files, read once for all hosts.

Format after sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT". Keys are compared as bytes and never decoded, so a file
of ten thousand lines costs milliseconds; only hashed names have to be tried one by one.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safelaunch.transport.ssh_config import matches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@dataclass(frozen=True, slots=True)
class HostKey:
    """A line of a known_hosts file; `marker` is "", "cert-authority" or "revoked"."""

    algorithm: str
    blob: bytes
    place: str
    marker: str = ""

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.blob)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one host."""

    keys: tuple[HostKey, ...] = ()
    revoked: tuple[HostKey, ...] = ()
    authorities: tuple[HostKey, ...] = ()


def fingerprint(blob: bytes) -> str:
    """Return a public key's fingerprint as OpenSSH writes it: `SHA256:...`."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class _Hashed:
    salt: bytes
    digest: bytes
    key: HostKey


class KnownHosts:
    """The files of one user; `find` may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}
        self._accepted: dict[str, HostKey] = {}

    def find(self, names: Sequence[str], files: Iterable[str]) -> Known:
        """Return what the files know under the first of the names that they know at all."""
        with self._lock:
            parsed = [self._file(path) for path in files]
            for name in names:
                entries = [key for file in parsed for key in file.find(name)]
                if name in self._accepted:
                    entries.append(self._accepted[name])
                if entries:
                    return Known(
                        keys=tuple(key for key in entries if not key.marker),
                        revoked=tuple(key for key in entries if key.marker == "revoked"),
                        authorities=tuple(key for key in entries if key.marker == "cert-authority"),
                    )
        return Known()

    def accept(self, name: str, key: HostKey) -> None:
        """Hold a host to a key that the user's own settings let through, for as long as we run."""
        with self._lock:
            self._accepted[name] = key

    def _file(self, path: str) -> _File:
        if path not in self._files:
            self._files[path] = _File(path)
        return self._files[path]


class _File:
    def __init__(self, path: str) -> None:
        self._plain: dict[str, list[HostKey]] = {}
        self._hashed: list[_Hashed] = []
        self._patterns: list[tuple[str, HostKey]] = []
        self._found: dict[str, list[HostKey]] = {}
        for names, key in _lines(path):
            self._add(names, key)

    def _add(self, names: str, key: HostKey) -> None:
        if names.startswith("|1|"):
            salt, _, digest = names[3:].partition("|")
            with contextlib.suppress(binascii.Error):
                self._hashed.append(_Hashed(base64.b64decode(salt), base64.b64decode(digest), key))
        elif set(names) & set("*?!"):
            self._patterns.append((names.lower(), key))
        else:
            for name in names.lower().split(","):
                self._plain.setdefault(name, []).append(key)

    def find(self, name: str) -> list[HostKey]:
        if name not in self._found:
            data = name.encode(errors="surrogateescape")
            hits = [h for h in self._hashed if hmac.digest(h.salt, data, "sha1") == h.digest]
            if hits:
                # A hash stands for one name only: what was found need not be tried for the next host.
                self._hashed = [h for h in self._hashed if h not in hits]
            self._found[name] = [
                *self._plain.get(name, []),
                *(h.key for h in hits),
                *(key for patterns, key in self._patterns if matches(patterns, name)),
            ]
        return self._found[name]


def _lines(path: str) -> Iterator[tuple[str, HostKey]]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().split("\n")
    except OSError:
        # As for OpenSSH: what cannot be read knows no host.
        return
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        marker = words.pop(0)[1:] if words[0].startswith("@") else ""
        if len(words) < 3 or marker not in {"", "revoked", "cert-authority"}:
            continue
        try:
            blob = base64.b64decode(words[2], validate=True)
        except binascii.Error:
            continue
        yield words[0], HostKey(words[1], blob, f"{path}:{number}", marker)
