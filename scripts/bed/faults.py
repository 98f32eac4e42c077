"""What can be made to go wrong on a node, each with its undo.

A fault is one line in FAULTS. `apply` and `undo` get the node and the fault's arguments; `apply` raises
ValueError for wrong ones before it does anything; `undo` must not mind finding only half of what it does.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bed.node import HERE, PRIVATE_MOUNTS, fstab, system_directories
from bed.system import BedError, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from bed.node import Node

IMPOSTOR = str(HERE / "impostor.py")
SSHD_CONFIG = "etc_ssh/sshd_config"
BASHRC = "home/.bashrc"
_PYTHON = re.compile(r"python[0-9.]*")


@dataclass(frozen=True)
class Fault:
    """Something to go wrong; `usage` names the arguments after the node's number."""

    name: str
    usage: str
    text: str
    apply: Callable[..., None]
    undo: Callable[..., None]


# --- Small parts ------------------------------------------


def _block(node: Node, file: str, name: str, text: str) -> None:
    """Put a named block before what a file of the node holds: sshd takes the first value it meets."""
    _unblock(node, file, name)
    node.write(file, f"# fault {name}\n{text}\n# end of {name}\n{node.read(file)}")


def _unblock(node: Node, file: str, name: str) -> None:
    before, start, rest = node.read(file).partition(f"# fault {name}\n")
    if start:
        node.write(file, before + rest.partition(f"# end of {name}\n")[2])


def _sshd_fault(name: str, text: str) -> tuple[Callable[..., None], Callable[..., None]]:
    def apply(node: Node) -> None:
        _block(node, SSHD_CONFIG, name, text)
        node.restart_sshd()

    def undo(node: Node) -> None:
        _unblock(node, SSHD_CONFIG, name)
        node.restart_sshd()

    return apply, undo


def _firewall(node: Node, name: str, rule: str) -> None:
    # As firewalls do, it lets a machine talk to itself.
    chain = f'chain incoming {{\n type filter hook input priority 0;\n iifname "lo" accept\n {rule}\n}}\n'
    node.run("nft", "-f", "-", stdin=f"table inet fault_{name} {{\n{chain}}}\n")


def _no_firewall(node: Node, name: str) -> None:
    with contextlib.suppress(BedError):
        node.run("nft", "delete", "table", "inet", f"fault_{name}")


def _bind(node: Node, source: str | Path, target: str) -> None:
    node.run("mount", "--bind", str(source), target)


def _unbind(node: Node, *targets: str) -> None:
    for target in targets:
        with contextlib.suppress(BedError):
            node.run("umount", "--recursive", "--lazy", target)


def _head_file(node: Node, name: str) -> Path:
    return node.bed / "head/home/.ssh" / name


def _known_hosts(node: Node, line: str) -> None:
    """Set the head's known_hosts line of one node."""
    path = _head_file(node, "known_hosts")
    others = [
        row
        for row in path.read_text("ascii").splitlines(keepends=True)
        if not row.startswith(f"{node.name},")
    ]
    path.write_text("".join(others) + line, encoding="ascii")


# --- Network ----------------------------------------------


def _link_down(node: Node) -> None:
    run("ip", "link", "set", node.link, "down")


def _link_up(node: Node) -> None:
    run("ip", "link", "set", node.link, "up")


def _drop_port(node: Node, port: str = "22") -> None:
    _firewall(node, f"drop_{int(port)}", f"tcp dport {int(port)} drop")


def _undo_drop_port(node: Node, port: str = "22") -> None:
    _no_firewall(node, f"drop_{int(port)}")


def _refuse_port(node: Node, port: str = "22") -> None:
    _firewall(node, f"refuse_{int(port)}", f"tcp dport {int(port)} reject with tcp reset")


def _undo_refuse_port(node: Node, port: str = "22") -> None:
    _no_firewall(node, f"refuse_{int(port)}")


def _prohibit_port(node: Node, port: str = "22") -> None:
    _firewall(node, f"prohibit_{int(port)}", f"tcp dport {int(port)} reject with icmp type host-prohibited")


def _undo_prohibit_port(node: Node, port: str = "22") -> None:
    _no_firewall(node, f"prohibit_{int(port)}")


def _peer(node: Node, peer: str) -> Path:
    """Return the directory of another node."""
    directory = node.bed / f"node{int(peer)}"
    if not directory.is_dir() or directory == node.directory:
        raise ValueError(f"there is no other node {peer}")
    return directory


def _peer_address(node: Node, peer: str) -> str:
    if peer == "head":
        return f"{node.address.rpartition('.')[0]}.1"
    _peer(node, peer)
    return f"{node.address.rpartition('.')[0]}.{10 + int(peer)}"


def _pair_cut(node: Node, peer: str) -> None:
    _firewall(node, f"cut_{peer}", f"ip saddr {_peer_address(node, peer)} drop")


def _undo_pair_cut(node: Node, peer: str) -> None:
    _no_firewall(node, f"cut_{peer}")


def _port_busy(node: Node, port: str) -> None:
    node.spawn(f"port-busy-{int(port)}", IMPOSTOR, "silent", "0.0.0.0", port)


def _undo_port_busy(node: Node, port: str) -> None:
    node.end(f"port-busy-{int(port)}")


def _loopback_hostname(node: Node) -> None:
    kept = [line for line in node.read("hosts").splitlines() if not line.endswith(f" {node.name}")]
    node.write("hosts", "\n".join([f"127.0.1.1 {node.name}", *kept]) + "\n")


def _unknown_name(node: Node, peer: str) -> None:
    name = _peer(node, peer).name
    kept = [line for line in node.read("hosts").splitlines() if not line.endswith(f" {name}")]
    node.write("hosts", "\n".join(kept) + "\n")


def _right_names(node: Node, _peer: str = "") -> None:
    node.write("hosts", (node.bed / "hosts").read_text(encoding="ascii"))


# --- sshd -------------------------------------------------


def _signal_sshd(node: Node, name: str) -> None:
    node.run("sh", "-c", f'kill -{name} "$(cat /run/sshd.pid)"')


def _thaw_sshd(node: Node) -> None:
    with contextlib.suppress(BedError):
        _signal_sshd(node, "CONT")


def _impostor(mode: str) -> tuple[Callable[..., None], Callable[..., None]]:
    def apply(node: Node) -> None:
        node.stop_sshd()
        node.spawn("impostor", IMPOSTOR, mode, "0.0.0.0", "22")

    def undo(node: Node) -> None:
        node.end("impostor")
        node.start_sshd()

    return apply, undo


def _extra_port(node: Node, port: str) -> None:
    _block(node, SSHD_CONFIG, f"extra-port-{int(port)}", f"Port {int(port)}")
    node.restart_sshd()


def _undo_extra_port(node: Node, port: str) -> None:
    _unblock(node, SSHD_CONFIG, f"extra-port-{int(port)}")
    node.restart_sshd()


def _max_startups(node: Node, seconds: str = "0") -> None:
    _block(node, SSHD_CONFIG, "max-startups", "MaxStartups 1:100:1")
    node.restart_sshd()
    node.spawn("max-startups", IMPOSTOR, "hold", node.address, "22", seconds)


def _undo_max_startups(node: Node) -> None:
    node.end("max-startups")
    _unblock(node, SSHD_CONFIG, "max-startups")
    node.restart_sshd()


# --- Keys and accounts ------------------------------------


def _changed_host_key(node: Node) -> None:
    with tempfile.TemporaryDirectory() as directory:
        key = Path(directory) / "key"
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
        kind, other = Path(f"{key}.pub").read_text(encoding="ascii").split()[:2]
    _known_hosts(node, f"{node.name},{node.address} {kind} {other}\n")


def _right_host_key(node: Node) -> None:
    _known_hosts(node, node.known_hosts_line())


def _accept_key(node: Node) -> None:
    node.write("home/.ssh/authorized_keys", _head_file(node, "id_ed25519.pub").read_text(encoding="ascii"))


def _set_shell(node: Node, shell: str) -> None:
    first, rest = node.read("passwd").split("\n", 1)
    node.write("passwd", f"{first.rpartition(':')[0]}:{shell}\n{rest}")


def _expire_account(node: Node, day: str) -> None:
    """Set the day, counted from 1970, on which root's account ends; sshd leaves the judgement to PAM."""
    first, rest = node.read("shadow").split("\n", 1)
    fields = first.split(":")
    node.write("shadow", f"{':'.join([*fields[:7], day, *fields[8:]])}\n{rest}")


def _account_expired(node: Node) -> None:
    _expire_account(node, "1")
    _block(node, SSHD_CONFIG, "account-expired", "UsePAM yes")
    node.restart_sshd()


def _undo_account_expired(node: Node) -> None:
    _expire_account(node, "")
    _unblock(node, SSHD_CONFIG, "account-expired")
    node.restart_sshd()


def _clone(node: Node, peer: str, identity: str) -> None:
    if identity not in ("machine-id", "boot-id"):
        raise ValueError(f"{identity!r} is neither machine-id nor boot-id")
    other, own = _peer(node, peer) / identity, node.directory / f"own-{identity}"
    if not own.exists():
        own.write_text(node.read(identity), encoding="ascii")
    node.write(identity, other.read_text(encoding="ascii"))


def _undo_clone(node: Node, _peer: str, identity: str) -> None:
    own = node.directory / f"own-{identity}"
    if own.exists():
        node.write(identity, own.read_text(encoding="ascii"))
        own.unlink()


# --- Software, files, clock -------------------------------


def _without(node: Node, directory: str, hidden: set[str]) -> None:
    """Put a stand-in over a directory that has all its entries, as symbolic links, but for some names."""
    names = [name for name in os.listdir(directory) if name not in hidden]
    label = directory.strip("/").replace("/", "_")
    original, stand_in = (node.directory / "stage" / f"{kind}-{label}" for kind in ("original", "without"))
    shutil.rmtree(stand_in, ignore_errors=True)
    stand_in.mkdir()
    original.mkdir(exist_ok=True)
    for name in names:
        (stand_in / name).symlink_to(original / name)
    _bind(node, directory, str(original))
    _bind(node, stand_in, directory)


def _interpreters(more: tuple[str, ...]) -> dict[str, set[str]]:
    """Return names of Python interpreters by directory: the system's, and all names of those in `more`."""
    found = {place: {n for n in os.listdir(place) if _PYTHON.fullmatch(n)} for place in system_directories()}
    for file in more:
        place = os.path.dirname(os.path.abspath(file))
        real = os.path.realpath(file)
        same = {name for name in os.listdir(place) if os.path.realpath(os.path.join(place, name)) == real}
        found[place] = found.get(place, set()) | same
    return {place: names for place, names in found.items() if names}


def _no_python3(node: Node, *more: str) -> None:
    for directory, names in _interpreters(more).items():
        _without(node, directory, names)


def _undo_no_python3(node: Node, *more: str) -> None:
    for directory in _interpreters(more):
        _unbind(
            node,
            directory,
            str(node.directory / "stage" / f"original-{directory.strip('/').replace('/', '_')}"),
        )


def _bare_path(node: Node) -> None:
    """Give sessions a PATH where every program but python is."""
    farm = node.directory / "stage/bin"
    shutil.rmtree(farm, ignore_errors=True)
    farm.mkdir()
    for place in system_directories():
        for name in os.listdir(place):
            if not _PYTHON.fullmatch(name) and not (farm / name).is_symlink():
                (farm / name).symlink_to(os.path.join(place, name))
    _block(node, BASHRC, "bare-path", f"PATH={farm}")


def _old_python(node: Node) -> None:
    """Put a python3 on the PATH that says it is 3.6 and knows it: all else is this machine's python3."""
    real = run("sh", "-c", "command -v python3").strip()
    farm = node.directory / "stage/old"
    farm.mkdir(exist_ok=True)
    # -c CODE is what a program sent to a node starts with; the version is set before that code is run.
    (farm / "python3").write_text(
        "#!/bin/sh\n"
        'code=; options=; while [ "$#" -gt 0 ]; do case $1 in -c) code=$2; shift 2; break;;'
        ' *) options="$options $1"; shift;; esac; done\n'
        f"exec {real} $options -c \"import sys; sys.version_info = (3, 6, 8, 'final', 0); "
        'sys.version = \'3.6.8 (default)\'\n$code" "$@"\n',
        encoding="ascii",
    )
    (farm / "python3").chmod(0o755)
    _block(node, BASHRC, "old-python", f"PATH={farm}:$PATH")


def _noisy_shell(node: Node, text: str = "Welcome to the cluster!") -> None:
    quoted = text.replace("'", "'\\''")
    _block(node, BASHRC, "noisy-shell", f"printf '%s\\n' '{quoted}'; printf '%s\\n' '{quoted}' >&2")


def _clock_skew(node: Node, seconds: str) -> None:
    ahead = float(seconds)
    library = node.directory / "stage/clock.so"
    run("gcc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "clock.c")
    setting = f"LD_PRELOAD={library} TESTBED_CLOCK_AHEAD={ahead:g}"
    _block(node, SSHD_CONFIG, "clock-skew", f"SetEnv {setting}")
    node.restart_sshd()


def _undo_clock_skew(node: Node, _seconds: str) -> None:
    _unblock(node, SSHD_CONFIG, "clock-skew")
    node.restart_sshd()


def _resize(node: Node, path: str, options: str) -> None:
    node.run("mount", "-t", "tmpfs", "-o", f"remount,{options}", "tmpfs", path)


def _full_tmp(node: Node) -> None:
    _resize(node, "/tmp", "size=1m")
    # All that fits; head's complaint about the rest is the point of it.
    node.run("sh", "-c", "head -c 2m /dev/zero >/tmp/.fault-full 2>/dev/null || true")


def _undo_full_tmp(node: Node) -> None:
    node.run("rm", "-f", "/tmp/.fault-full")
    _resize(node, "/tmp", PRIVATE_MOUNTS["/tmp"])


def _hidden_path(node: Node, path: str) -> None:
    """Put a stand-in over the path's directory that has all its entries but this one."""
    target = os.path.abspath(path)
    parent = os.path.dirname(target)
    if not os.path.lexists(target):
        raise ValueError(f"{target} does not exist")
    if os.path.dirname(parent) == parent:
        raise ValueError(f"{target} stands at the top: hide something in it")
    stand_in = Path(tempfile.mkdtemp(prefix=_hidden_prefix(target), dir=node.directory / "stage"))
    stand_in.chmod(0o755)
    mounts = [fstab(stand_in, stand_in, "bind")]
    for entry in sorted(os.scandir(parent), key=lambda e: e.name):
        place = stand_in / entry.name
        if entry.path == target:
            continue
        if entry.is_symlink():
            place.symlink_to(os.readlink(entry.path))
            continue
        place.mkdir() if entry.is_dir() else place.touch()
        mounts.append(fstab(entry.path, place, "rbind" if entry.is_dir() else "bind"))
    table = stand_in.with_suffix(".fstab")
    table.write_text("".join([*mounts, fstab(stand_in, parent, "rbind")]), encoding="utf-8")
    node.run("mount", "--all", "--fstab", str(table))


def _hidden_prefix(target: str) -> str:
    return f"hidden-{target.strip('/').replace('/', '_')}-"


def _undo_hidden_path(node: Node, path: str) -> None:
    target = os.path.abspath(path)
    stand_ins = [
        place for place in (node.directory / "stage").glob(_hidden_prefix(target) + "*") if place.is_dir()
    ]
    _unbind(node, os.path.dirname(target), *map(str, stand_ins))


def _different_file(node: Node, path: str, source: str = "") -> None:
    target = os.path.abspath(path)
    for file in (target, source or target):
        if not os.path.isfile(file):
            raise ValueError(f"{file} is no file")
    copy = Path(tempfile.mkdtemp(prefix="different-", dir=node.directory / "stage")) / os.path.basename(
        target
    )
    shutil.copyfile(source or target, copy)
    shutil.copymode(target, copy)
    if not source:
        with open(copy, "a", encoding="utf-8") as stream:
            stream.write(f"\n# not the same on {node.name}\n")
    _bind(node, copy, target)


def _undo_different_file(node: Node, path: str, _source: str = "") -> None:
    _unbind(node, os.path.abspath(path))


_password_only = _sshd_fault("password-only", "PubkeyAuthentication no\nPasswordAuthentication yes")

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("link-down", "", "its network cable is out", _link_down, _link_up),
        Fault("drop-port", "[PORT]", "packets to a port (22) vanish", _drop_port, _undo_drop_port),
        Fault(
            "refuse-port", "[PORT]", "connections to a port (22) are refused", _refuse_port, _undo_refuse_port
        ),
        Fault(
            "prohibit-port",
            "[PORT]",
            "a firewall answers for a port (22) that the host is out of bounds, as firewalld does",
            _prohibit_port,
            _undo_prohibit_port,
        ),
        Fault(
            "pair-cut",
            "PEER",
            "this node and node PEER (or the head) do not reach each other",
            _pair_cut,
            _undo_pair_cut,
        ),
        Fault("port-busy", "PORT", "something else listens on PORT", _port_busy, _undo_port_busy),
        Fault(
            "loopback-hostname",
            "",
            "its own name resolves to 127.0.1.1, as Debian's installer sets it",
            _loopback_hostname,
            _right_names,
        ),
        Fault("unknown-name", "PEER", "it does not know the name of node PEER", _unknown_name, _right_names),
        Fault(
            "frozen-sshd",
            "",
            "sshd is stopped: connected, but silent",
            lambda node: _signal_sshd(node, "STOP"),
            _thaw_sshd,
        ),
        Fault(
            "no-sshd",
            "",
            "sshd is not running",
            lambda node: node.stop_sshd(),
            lambda node: node.start_sshd(),
        ),
        Fault("extra-port", "PORT", "sshd listens on PORT too", _extra_port, _undo_extra_port),
        Fault("silent-banner", "", "something on port 22 accepts and says nothing", *_impostor("silent")),
        Fault("not-ssh", "", "a web server answers on port 22", *_impostor("http")),
        Fault(
            "max-startups",
            "[SECONDS]",
            "sshd takes no new connection while one is held open, for SECONDS or until healed",
            _max_startups,
            lambda node, _seconds="0": _undo_max_startups(node),
        ),
        Fault(
            "changed-host-key",
            "",
            "the head knows another key for this node",
            _changed_host_key,
            _right_host_key,
        ),
        Fault(
            "unknown-host-key",
            "",
            "the head does not know this node's key",
            lambda node: _known_hosts(node, ""),
            _right_host_key,
        ),
        Fault(
            "refused-key",
            "",
            "the head's key is not accepted",
            lambda node: node.write("home/.ssh/authorized_keys", ""),
            _accept_key,
        ),
        Fault("password-only", "", "sshd wants a password", *_password_only),
        Fault(
            "account-closed",
            "",
            "root's shell is nologin",
            lambda node: _set_shell(node, "/usr/sbin/nologin"),
            lambda node: _set_shell(node, "/bin/bash"),
        ),
        Fault(
            "account-expired",
            "",
            "root's account has expired",
            _account_expired,
            _undo_account_expired,
        ),
        Fault(
            "clone",
            "PEER machine-id|boot-id",
            "it has the machine id, or the boot id, of node PEER",
            _clone,
            _undo_clone,
        ),
        Fault(
            "slow-shell",
            "SECONDS",
            "~/.bashrc takes SECONDS",
            lambda node, seconds: _block(node, BASHRC, "slow-shell", f"sleep {float(seconds):g}"),
            lambda node, _seconds: _unblock(node, BASHRC, "slow-shell"),
        ),
        Fault(
            "noisy-shell",
            "[TEXT]",
            "~/.bashrc prints TEXT to stdout and stderr",
            _noisy_shell,
            lambda node, _text="": _unblock(node, BASHRC, "noisy-shell"),
        ),
        Fault(
            "no-python3",
            "[FILE ...]",
            "no system Python can be run, nor the interpreters FILE",
            _no_python3,
            _undo_no_python3,
        ),
        Fault(
            "bare-path",
            "",
            "no python is on the PATH (but it is on the disk)",
            _bare_path,
            lambda node: _unblock(node, BASHRC, "bare-path"),
        ),
        Fault(
            "old-python",
            "",
            "python3 on the PATH says it is 3.6",
            _old_python,
            lambda node: _unblock(node, BASHRC, "old-python"),
        ),
        Fault(
            "clock-skew", "SECONDS", "clocks of new sessions are SECONDS ahead", _clock_skew, _undo_clock_skew
        ),
        Fault(
            "small-shm",
            "[SIZE]",
            "/dev/shm holds only SIZE (64m)",
            lambda node, size="64m": _resize(node, "/dev/shm", f"size={size}"),
            lambda node, _size="": _resize(node, "/dev/shm", PRIVATE_MOUNTS["/dev/shm"]),
        ),
        Fault("full-tmp", "", "/tmp is full", _full_tmp, _undo_full_tmp),
        Fault("hidden-path", "PATH", "PATH does not exist there", _hidden_path, _undo_hidden_path),
        Fault(
            "different-file",
            "PATH [SOURCE]",
            "the file PATH has other contents there: SOURCE's, or a line more",
            _different_file,
            _undo_different_file,
        ),
    )
}


def apply(node: Node, name: str, arguments: list[str]) -> None:
    """Make something go wrong on a node; on record first, so that `heal` undoes half of it too."""
    fault = FAULTS.get(name)
    if fault is None:
        raise BedError(f"no fault {name!r}; there are: {', '.join(sorted(FAULTS))}")
    try:
        inspect.signature(fault.apply).bind(node, *arguments)
    except TypeError as error:
        raise BedError(f"usage: scripts/testbed fault {name} N {fault.usage} ({error})") from error
    earlier = node.faults
    node.faults = [*earlier, (name, arguments)]
    try:
        fault.apply(node, *arguments)
    except ValueError as error:  # raised for arguments before anything is done: there is nothing to undo
        node.faults = earlier
        raise BedError(f"usage: scripts/testbed fault {name} N {fault.usage} ({error})") from error


def heal(node: Node) -> None:
    """Undo every fault of a node, the latest first."""
    while node.faults:
        *earlier, (name, arguments) = node.faults
        FAULTS[name].undo(node, *arguments)
        node.faults = earlier
