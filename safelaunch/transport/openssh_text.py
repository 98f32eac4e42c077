"""What `ssh` said on stderr at LogLevel DEBUG1, read as a story: how far it came, and why it ended.

The texts are OpenSSH's (sshconnect.c, sshconnect2.c, kex.c, clientloop.c), the same since 7.x unless noted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safelaunch.transport import failures
from safelaunch.transport.dial import NotDialled

if TYPE_CHECKING:
    from safelaunch.transport.base import Unreachable
    from safelaunch.transport.dial import Kind
    from safelaunch.transport.known_hosts import Known
    from safelaunch.transport.ssh_config import Target

_CONNECT = re.compile(r"connect to (?:host|address) (\S+) port \d+: (.+)")
_CONNECT_KINDS: dict[str, Kind] = {
    "Connection refused": "refused",
    "Connection timed out": "timeout",
    "Operation timed out": "timeout",
}
_DROPPED = re.compile(r"(?i)(?:kex|ssh)_exchange_identification: .*(?:reset by peer|closed by remote host)")
_TURNED_AWAY = re.compile(r"banner line \d+: (Exceeded MaxStartups|Not allowed at this time)")
_OTHER_WORDS = re.compile(
    r"banner line \d+: (.*)|(banner line contains invalid characters)|(No banner received)"
)
_CONFIG = re.compile(
    r"(.*line \d+: .*|.*terminating, \d+ bad configuration options.*|Bad owner or permissions.*)"
)


@dataclass(frozen=True, slots=True)
class ShownKey:
    """A host key that a server showed."""

    algorithm: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Story:
    """How far one `ssh` came. `words` is what it said beside its debug lines and version."""

    text: str
    address: str
    connecting: bool
    banner: bool
    host_key: ShownKey | None
    offered: tuple[str, ...]
    allowed: tuple[str, ...]
    partial: bool
    logged_in: bool
    words: tuple[str, ...]

    @property
    def dropped(self) -> bool:
        """Whether the server hung up before it said what it is; one that said something else is none."""
        if self.banner or _TURNED_AWAY.search(self.text):
            return not self.banner
        return bool(_DROPPED.search(self.text)) and not _OTHER_WORDS.search(self.text)


def read(stderr: bytes) -> Story:
    """Read what `ssh` said so far."""
    text = stderr.decode("utf-8", "replace").replace("\r", "")
    address = re.search(r"(?m)^debug1: Connecting to \S+ \[(.+?)\] port", text)
    shown = re.search(r"(?m)^debug1: Server host key: (\S+) (\S+)", text)
    allowed = re.findall(r"(?m)^debug1: Authentications that can continue: (\S+)", text)
    denied = re.search(r"Permission denied \(([^)]*)\)", text)
    offers = re.findall(r"(?m)^debug1: Offering public key: (.*)", text)
    return Story(
        text=text,
        address=address[1] if address else "",
        connecting=bool(re.search(r"(?m)^debug1: (Connecting to|Executing proxy command)", text)),
        banner="\ndebug1: Remote protocol version" in "\n" + text,
        host_key=ShownKey(shown[1], shown[2]) if shown else None,
        offered=tuple(re.sub(r"( explicit| agent)+$", r"\1", offer) for offer in offers),
        allowed=tuple((denied[1] if denied else allowed[-1] if allowed else "").split(",")),
        partial="with partial success" in text,
        logged_in=bool(re.search(r"(?m)^(debug1: )?(Authenticated to|Authentication succeeded)", text)),
        words=tuple(
            line for line in text.split("\n") if line and not re.match(r"debug\d: |OpenSSH_\d", line)
        ),
    )


def judge(
    story: Story,
    target: Target,
    known: Known,
    *,
    locked: tuple[str, ...],
    late: float | None,
    drops: int,
    output: bytes,
    seconds: float,
) -> Unreachable:
    """Say why a login did not get to run our command.

    `locked` are key files that need a passphrase; `late` is the limit in seconds that it ran into, or None;
    `drops` says how often the server turned us away; `output` is what the login printed.
    """
    last = story.words[-1] if story.words else "it said nothing"
    if not story.connecting and (config := next(filter(None, map(_CONFIG.fullmatch, story.words)), None)):
        return failures.bad_config(target, config[0], seconds)
    if not story.banner:
        if target.proxy:
            silent = f"no answer within {late:g} s" if late else ""
            own = [
                word
                for word in story.words
                if not re.match(r"kex_exchange|Connection closed by UNKNOWN", word)
            ]
            return failures.proxy(target, "; ".join(own[-3:]) or silent or last, seconds)
        return failures.not_dialled(target, _not_dialled(story, late, drops), seconds)
    if verdict := _host_key(story, target, known, seconds):
        return verdict
    if late is not None and not story.logged_in:
        step = "the key exchange" if story.host_key is None else "the login itself"
        return failures.slow_login(target, step, late, seconds)
    if story.logged_in:
        if output.strip() or late is None:
            return failures.not_started(
                target.name, target.user, output or story.text[-200:].encode(), seconds
            )
        return failures.slow_login(target, "the start of a command", late, seconds)
    if "Too many authentication failures" in story.text:
        return failures.key_refused(
            target, story.offered, locked, "Too many authentication failures", seconds
        )
    if "Permission denied" in story.text:
        if story.partial or "publickey" not in story.allowed:
            return failures.password_only(target, story.allowed, story.partial, seconds)
        return failures.key_refused(target, story.offered, locked, "", seconds)
    if story.offered:
        tried, said = ", ".join(story.offered), "; ".join(story.words[-2:]) or last
        seen = f"the node closed the connection during the login as {target.user}, offered {tried}: {said}"
        return failures.account(target, seen, seconds)
    return failures.closed(target, last, seconds)


def _host_key(story: Story, target: Target, known: Known, seconds: float) -> Unreachable | None:
    shown = story.host_key or ShownKey("host", "unknown")
    if "Host key verification failed" not in story.text and "REVOKED" not in story.text:
        return None
    if "REVOKED HOST KEY DETECTED" in story.text or "marked as revoked" in story.text:
        place = next((key.place for key in known.revoked), "known_hosts")
        return failures.host_key_revoked(target, shown, place, seconds)
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in story.text:
        return failures.host_key_changed(target, shown, known.keys, seconds)
    return failures.host_key_unknown(target, shown, seconds)


def _not_dialled(story: Story, late: float | None, drops: int) -> NotDialled:
    """Say why no SSH server spoke."""
    if unknown := re.search(r"Could not resolve hostname .*?: (.*)", story.text):
        return NotDialled("name", unknown[1], "")
    if story.dropped:
        turned = _TURNED_AWAY.search(story.text)
        return NotDialled(
            "throttled" if turned else "closed", turned[1] if turned else "", story.address, drops
        )
    if other := _OTHER_WORDS.search(story.text):
        return NotDialled("not_ssh", next(filter(None, other.groups())), story.address)
    if "\ndebug1: Connection established" in story.text:
        return NotDialled("no_banner", f"silent for {late:g} s" if late else "silent", story.address)
    if failed := _CONNECT.search(story.text):
        return NotDialled(_CONNECT_KINDS.get(failed[2], "no_route"), failed[2], story.address)
    return NotDialled("timeout", f"no answer within {late:g} s" if late else "no answer", story.address)
