"""What each way of not reaching a node means, in the user's words: observed, why it matters, what to type.

Both `ssh` transports end here, so that a fault reads the same whichever of them met it.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Protocol

from safelaunch.transport.base import Remark, Unreachable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safelaunch.transport.dial import NotDialled
    from safelaunch.transport.known_hosts import HostKey
    from safelaunch.transport.ssh_config import Target

_THROTTLE_FIX = "on {node}, in /etc/ssh/sshd_config: MaxStartups 1000   # then: sudo systemctl reload ssh"

# Kind of failure: what was observed, why it matters, what to do.
_DIALLING = {
    "name": (
        "the name {host} does not resolve: {detail}",
        "Without an address nothing can be started there.",
        "getent hosts {host_word}   # prints nothing: correct the name, or add it to DNS or /etc/hosts",
    ),
    "no_route": (
        "no way to {where}: {detail}",
        "The network between here and the node is down or filtered, or the address is wrong.",
        "ip route get {address}; ping -c 3 {address}",
    ),
    "refused": (
        "{where} refuses connections",
        "The machine is up, but no sshd listens on that port, or a firewall rejects it.",
        "on {node}: sudo systemctl start ssh || sudo systemctl start sshd   # or: --ssh_port PORT",
    ),
    "timeout": (
        "no answer from {where}: {detail}",
        "The machine is down, or a firewall drops what we send.",
        "ping -c 3 {address}   # no reply: start the machine; a reply: open port {port}",
    ),
    "no_banner": (
        "{where} accepts the connection and then is {detail}",
        "sshd is frozen, the machine has no memory or processes left, or it is no sshd that listens.",
        "on the console of {node}: sudo systemctl restart ssh || sudo systemctl restart sshd",
    ),
    "not_ssh": (
        "{where} is not an SSH server: it says {detail!r}",
        "Something else listens on that port.",
        "--ssh_port PORT   # the port of sshd, or a `Port` line in ~/.ssh/config",
    ),
    "throttled": (
        "{where} turned us away{times}: {detail!r}",
        "sshd limits how many may log in at once, and the limit stayed reached.",
        "{throttle}",
    ),
    "closed": (
        "{where} closes the connection{times} without a word",
        "sshd's MaxStartups is reached, or a firewall, a port forwarder or hosts.deny turns us away.",
        "on {node}: sudo journalctl -u ssh -u sshd -n 20",
    ),
}


class Shown(Protocol):
    """A host key that a server showed."""

    @property
    def algorithm(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...


def unsafe_name(host: str, seconds: float) -> Unreachable:
    return Unreachable(
        host=host,
        code="ssh.name",
        observed=f"{host!r} cannot be a host name: a program would take it for an option or a command",
        why="Such a name is never passed on.",
        fix="correct the name in the hostfile",
        seconds=seconds,
    )


def not_dialled(target: Target, failure: NotDialled, seconds: float) -> Unreachable:
    """Put what happened before SSH began into words."""
    host, address = target.hostname, failure.address or target.hostname
    words = {
        "host": host,
        "host_word": _word(host),
        "address": _word(address),
        "where": f"{host}{f' ({address})' if address != host else ''} port {target.port}",
        "port": target.port,
        "node": target.name,
        "detail": failure.detail,
        "times": f" ({failure.drops} times)" if failure.drops else "",
        "throttle": _THROTTLE_FIX.format(node=target.name),
    }
    observed, why, fix = (text.format(**words) for text in _DIALLING[failure.kind])
    return _unreachable(target, f"ssh.{failure.kind}", observed, why, fix, seconds)


def got_through(target: Target, drops: int) -> Remark:
    """Say that a server turned us away before it let us in."""
    return Remark(
        code="ssh.throttled",
        observed=f"sshd turned us away {drops} time{'s' * (drops != 1)} before it let us in",
        why="Its MaxStartups is too low for this many logins at once; every start is slower for it.",
        fix=_THROTTLE_FIX.format(node=target.name),
    )


def host_key_unknown(target: Target, offered: Shown | None, seconds: float) -> Unreachable:
    """`offered` is the key that the host showed, or None where it could not be seen."""
    shown = f"its {offered.algorithm} key {offered.fingerprint}" if offered else "its key"
    file = target.known_hosts[0] if target.known_hosts else "known_hosts"
    return _unreachable(
        target,
        "ssh.host_key_unknown",
        f"{shown} is not in {file}",
        "A key that nobody has compared may be an impostor's; nothing is accepted silently.",
        f"{keyscan(target, offered)}   # then compare its fingerprint with the one shown on the node by: "
        "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub",
        seconds,
    )


def host_key_accepted(target: Target, offered: Shown) -> Remark:
    """Say that the user's own settings let an unknown key through."""
    return Remark(
        code="ssh.host_key_unknown",
        observed=f"its {offered.algorithm} key {offered.fingerprint} is unknown; allowed by {target.weak}",
        why="Nobody has compared this key; for as long as this command runs the node is held to it.",
        fix=keyscan(target, offered),
    )


def host_key_changed(target: Target, offered: Shown, known: Sequence[HostKey], seconds: float) -> Unreachable:
    """Say that the host shows another key than one of those known."""
    same_kind = [key for key in known if key.algorithm == offered.algorithm] or known
    expected = ", ".join(f"{key.algorithm} {key.fingerprint} ({key.place})" for key in same_kind)
    files = [key.place.rpartition(":")[0] for key in same_kind] or [*target.known_hosts[:1], "known_hosts"]
    return _unreachable(
        target,
        "ssh.host_key_changed",
        f"the host shows {offered.algorithm} {offered.fingerprint}, but known is {expected or 'another key'}",
        "The machine was installed anew, its address belongs to another machine now, or someone listens in.",
        f"ssh-keygen -R {_word(target.host_key_names[0])} -f {_word(files[0])} && {keyscan(target, None)}   "
        f"# only after {offered.fingerprint} was compared with the node's own",
        seconds,
    )


def host_key_revoked(target: Target, offered: Shown, place: str, seconds: float) -> Unreachable:
    return _unreachable(
        target,
        "ssh.host_key_changed",
        f"the host shows the key {offered.fingerprint}, which is marked @revoked ({place})",
        "A revoked key is known to be in the wrong hands.",
        f"on {target.name}: sudo ssh-keygen -A after removing the old /etc/ssh/ssh_host_*_key files; "
        f"then here: {keyscan(target, None)}",
        seconds,
    )


def key_refused(
    target: Target, offered: Sequence[str], locked: Sequence[str], said: str, seconds: float
) -> Unreachable:
    """No key let us in; `said` is what the server said beside, or ""."""
    login = f"{target.user}@{target.hostname}"
    tried = ", ".join(offered) or "no key at all (there is none to offer)"
    asks = f"; {', '.join(locked)} needs a passphrase and is in no agent" if locked else ""
    note = f"; the server says: {said}" if said else ""
    port = f"-p {target.port} " if target.port != 22 else ""
    fix = f"ssh-copy-id {port}{_word(login)}"
    if locked:
        fix = f"ssh-add {_word(locked[0])}"
    elif not offered:
        fix = f"ssh-keygen -t ed25519 && {fix}"
    elif "oo many authentication failures" in said:
        fix = f"in ~/.ssh/config, under `Host {target.name}`: IdentitiesOnly yes, and IdentityFile KEY"
    return _unreachable(
        target,
        "ssh.auth",
        f"the node refused the login as {target.user}; offered: {tried}{asks}{note}",
        "No offered key is in that account's authorized_keys, or the account may not log in "
        "(AllowUsers, DenyUsers).",
        fix,
        seconds,
    )


def password_only(target: Target, allowed: Sequence[str], after_key: bool, seconds: float) -> Unreachable:
    """Say that the server wants something typed; `after_key` if it took the key and that did not do."""
    methods = ", ".join(allowed) or "nothing we have"
    login = f"{target.user}@{target.hostname}"
    port = f"-p {target.port} " if target.port != 22 else ""
    return _unreachable(
        target,
        "ssh.password_only",
        f"the node {'takes the key and then asks for' if after_key else 'lets nobody in but by'}: {methods}",
        "Nobody can type a password on every node; a launch needs a key.",
        f"ssh-copy-id {port}{_word(login)}   # and in the node's sshd_config: PubkeyAuthentication yes, "
        "AuthenticationMethods any",
        seconds,
    )


def account(target: Target, observed: str, seconds: float) -> Unreachable:
    """Say that the login was accepted and is of no use."""
    return _unreachable(
        target,
        "ssh.account",
        observed,
        f"The account {target.user} is closed, has no shell, or is tied to one command.",
        f"on {target.name}: getent passwd {_word(target.user)}; sudo journalctl -u ssh -u sshd -n 20",
        seconds,
    )


def not_started(target_name: str, user: str, output: bytes, seconds: float) -> Unreachable:
    """Judge a start line that ended without a word of ours: no shell, a forced command, a closed account.

    `output` is what the login printed instead. Public for the preflight, which sees it first.
    """
    said = " ".join(output.decode("utf-8", "replace").split())
    shown = "".join(char if char.isprintable() else "?" for char in said)[:200]
    return Unreachable(
        host=target_name,
        code="ssh.account",
        observed=f"the login as {user} works, but our command did not run; the node printed {shown!r}",
        why=f"The account {user} has no shell (nologin), is tied to one command, or its start-up exits.",
        fix=f"ssh {_word(target_name)} true; on the node: getent passwd {_word(user)}",
        seconds=seconds,
    )


def slow_login(target: Target, step: str, timeout: float, seconds: float) -> Unreachable:
    """Say that the server spoke, then stopped in the middle of a login."""
    return _unreachable(
        target,
        "ssh.timeout",
        f"sshd answered, but the login was not done within {timeout:g} s; it stopped at {step}",
        "The machine is overloaded, or a directory service or home directory that logins need hangs.",
        f"ssh -v {_word(target.name)} true   # shows where it stops; --ssh-timeout S allows more time",
        seconds,
    )


def closed(target: Target, detail: str, seconds: float) -> Unreachable:
    return _unreachable(
        target,
        "ssh.closed",
        f"the connection broke during the login: {detail}",
        "Nothing can be started on this node.",
        f"ssh -v {_word(target.name)} true; on {target.name}: sudo journalctl -u ssh -u sshd -n 20",
        seconds,
    )


def proxy(target: Target, detail: str, seconds: float) -> Unreachable:
    return _unreachable(
        target,
        "ssh.proxy",
        f"the way through {target.proxy} does not work: {detail}",
        "The node is reached through another machine or command, and that failed before the node was asked.",
        f"ssh -v {_word(target.name)} true",
        seconds,
    )


def bad_config(target: Target, detail: str, seconds: float) -> Unreachable:
    return _unreachable(
        target,
        "ssh.config",
        detail,
        "The ssh configuration for this host cannot be used as it stands.",
        f"ssh -G {_word(target.name)}   # names the line; correct it in ~/.ssh/config",
        seconds,
    )


def no_ssh_program(target: Target, because: str, seconds: float) -> Unreachable:
    return _unreachable(
        target,
        "ssh.config",
        f"the ssh program is needed and not installed here: {because}",
        "Our own client cannot honour that setting, and it is not left out silently.",
        "sudo apt-get install openssh-client || sudo dnf install openssh-clients",
        seconds,
    )


def keyscan(target: Target, offered: Shown | None) -> str:
    """Return the command that adds the host's keys to the user's known_hosts."""
    file = target.known_hosts[0] if target.known_hosts else "~/.ssh/known_hosts"
    kind = f"-t {_scan_type(offered.algorithm)} " if offered else ""
    port = f"-p {target.port} " if target.port != 22 else ""
    scan = f"ssh-keyscan {port}{kind}{_word(target.hostname)}"
    if target.proxy:
        return f"ssh {_word(target.name)} true   # asks whether to add it; ssh-keyscan goes through no proxy"
    if target.host_key_alias:
        scan += f" | sed 's/^[^ ]*/{target.host_key_alias}/'"
    return f"{scan} >> {_word(file)}"


def _scan_type(algorithm: str) -> str:
    return "ecdsa" if algorithm.startswith("ecdsa") else algorithm.removeprefix("ssh-")


def _unreachable(target: Target, code: str, observed: str, why: str, fix: str, seconds: float) -> Unreachable:
    return Unreachable(host=target.name, code=code, observed=observed, why=why, fix=fix, seconds=seconds)


def _word(text: str) -> str:
    return shlex.quote(text)
