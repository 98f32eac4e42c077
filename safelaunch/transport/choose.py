"""Which transport reaches which host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safelaunch.transport.local import LocalTransport, is_this_machine
from safelaunch.transport.openssh import OpensshTransport
from safelaunch.transport.ssh import SshTransport
from safelaunch.transport.ssh_config import SshConfig, UnsafeNameError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from safelaunch.plan import TransportName
    from safelaunch.transport.base import Session, Transport, Unreachable


def make(
    name: TransportName,
    hosts: Sequence[str],
    *,
    ssh_port: int | None,
    fanout: int,
    environ: Mapping[str, str],
    home: str,
) -> Transport:
    """Return the transport for these hosts (all that this run will ever open).

    `auto` is `local` where the only host is this machine, else `ssh`. `ssh` hands a host whose configuration
    our own client cannot honour to the `ssh` program. `home` is where `.ssh` is looked for; `environ` tells
    the agent's socket, and is what commands on this machine see. Raises ValueError for a name without an
    implementation.
    """
    if name == "local":
        return LocalTransport(environ, home)
    config = SshConfig(home, environ)
    if name == "auto" and _alone(hosts, config, ssh_port):
        return LocalTransport(environ, home)
    openssh = OpensshTransport(config, home=home, environ=environ, ssh_port=ssh_port, fanout=fanout)
    if name == "openssh":
        return openssh
    if name in {"auto", "ssh"}:
        return MixedTransport(SshTransport(config, ssh_port=ssh_port, fanout=fanout), openssh)
    raise ValueError(f"there is no transport {name!r}")


class MixedTransport:
    """`ssh`, with `openssh` for the hosts that need it; both at once."""

    name = "ssh"

    def __init__(self, ssh: SshTransport, openssh: OpensshTransport) -> None:
        self._ssh = ssh
        self._openssh = openssh

    def open(
        self,
        hosts: Sequence[str],
        on_open: Callable[[str, Session | Unreachable], None],
        *,
        timeout: float,
    ) -> None:
        others = self._openssh.opening(on_open, timeout=timeout)
        try:
            self._ssh.open(hosts, on_open, timeout=timeout, hand_over=others.add)
        except BaseException:
            others.stop()
            raise
        others.finish()

    def close(self) -> None:
        self._ssh.close()
        self._openssh.close()


def _alone(hosts: Sequence[str], config: SshConfig, ssh_port: int | None) -> bool:
    """Say whether the only host is this machine, and nothing asks to reach it in a way of its own."""
    if len(hosts) != 1 or ssh_port is not None or "@" in hosts[0]:
        return False
    try:
        return is_this_machine(hosts[0]) and is_this_machine(config.lookup(hosts[0]).hostname)
    except UnsafeNameError:
        return False
