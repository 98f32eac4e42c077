"""Which machines a job may use, before the filters: a hostfile, a Slurm job, or this machine."""

from __future__ import annotations

import ipaddress
import os
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safelaunch import deepspeed_cli, filters, hostfile, slurm
from safelaunch.findings import Finding, Severity, Where
from safelaunch.hostfile import Host
from safelaunch.hostnames import fold, host_part, is_loopback, nearest, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safelaunch.arguments import Invocation
    from safelaunch.here import Here
    from safelaunch.plan import Node

JOB_HOSTFILE = "/job/hostfile"
"""Where deepspeed looks without --hostfile."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
LOWEST_PORT, HIGHEST_PORT = 1024, 65_535
_THIS = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The hosts that can be selected, and the hostfile's name as it was given.

    `local` says that they are this machine, as nothing names any. `notes` are lines that the user should see.
    """

    hosts: tuple[Host, ...]
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    hostfile: str | None = None
    local: bool = False


def pool(invocation: Invocation, here: Here, *, job_hostfile: str = JOB_HOSTFILE) -> Pool:
    """Find the hosts: the hostfile given, else the Slurm job's, else /job/hostfile, else this machine."""
    given = invocation.deepspeed.get("hostfile")
    if isinstance(given, str):
        return _from_file(given, here)
    if not _wants_this_machine(invocation, here):
        allocation = slurm.allocation(here.environ)
        if allocation is not None:
            return _from_slurm(allocation, here)
        if here.is_file(job_hostfile):
            found = _from_file(job_hostfile, here)
            return Pool(
                hosts=found.hosts,
                findings=found.findings,
                notes=(f"no --hostfile: using {job_hostfile}",),
                hostfile=job_hostfile,
            )
    return _this_machine(invocation, here)


def port_findings(port: int, here: Here) -> list[Finding]:
    """Judge --master_port by its number alone."""
    low, high = here.ephemeral_ports()
    if LOWEST_PORT <= port <= HIGHEST_PORT and not low <= port <= high:
        return []
    usable = LOWEST_PORT <= port <= HIGHEST_PORT
    return [
        Finding(
            code="master.port_range",
            severity=Severity.WARNING if usable else Severity.ERROR,
            observed=f"--master_port {port} is "
            + (f"one of the ephemeral ports, {low} to {high}" if usable else "not a port from 1024 to 65535"),
            why="any outgoing connection may be given it, just before the job needs it"
            if usable
            else "ports run to 65535, and those under 1024 are the system's",
            fix="--master_port 29500, or leave it out: a free one is then found",
        )
    ]


def address_findings(address: str, nodes: Sequence[Node], *, local: bool) -> list[Finding]:
    """Judge --master_addr by name alone: rank 0, which listens there, is on the first node."""
    if not nodes:
        return []
    if is_loopback(address):
        shared = len(nodes) > 1 and not all(is_loopback(node.name) for node in nodes)
        return [_loopback_master(address, nodes)] if shared else []
    first, short = nodes[0], _short(address)
    if local or _is_address(address) or _is_address(host_part(first.name)) or short == _short(first.name):
        return []
    other = next((node for node in nodes if _short(node.name) == short), None)
    near = nearest(address, [node.name for node in nodes])
    names = show(fold(node.name for node in nodes), 200)
    observed = f"--master_addr {show(address)} is none of the selected nodes, {names}"
    if other is not None:
        observed = f"--master_addr {show(address)} is node {other.node_rank}, but rank 0 runs on {first.name}"
    elif near:
        observed += f"; nearest: {near[0]}"
    return [
        Finding(
            code="master.addr_unknown",
            severity=Severity.ERROR,
            observed=observed,
            why="rank 0 opens the port where it runs, and all ranks would wait at another address",
            fix=f"--master_addr {first.name}, or leave it out",
            hosts=(first.name,),
        )
    ]


def _wants_this_machine(invocation: Invocation, here: Here) -> bool:
    """Whether deepspeed's way of a single machine is meant: a filter names it, or it is all the job has.

    In a job of one node, slots and CUDA_VISIBLE_DEVICES mean what they mean without Slurm.
    """
    mentioned = {mention.host for mention in _mentions(invocation)}
    if _THIS in mentioned:
        return True
    allocation = slurm.allocation(here.environ)
    here_name = here.environ.get("SLURMD_NODENAME", "")
    return (
        allocation is not None and [host.name for host in allocation.hosts] == [here_name] and not mentioned
    )


def _mentions(invocation: Invocation) -> list[filters.Mention]:
    """Return what --include and --exclude name, as far as they can be read."""
    texts = [str(invocation.get(option)) for option in ("include", "exclude")]
    return [mention for text in texts if text for mention in filters.parse(text, [_THIS])[0]]


def _from_file(name: str, here: Here) -> Pool:
    where = Where(name) if name else None
    if not name or here.stat(name) is None:
        return Pool(hosts=(), findings=(_no_hostfile(name, here, where),), hostfile=name)
    try:
        text = here.read(name)
    except OSError as error:
        reason = "it is a directory" if here.is_folder(name) else error.strerror or str(error)
        finding = Finding(
            code="hostfile.unreadable",
            severity=Severity.ERROR,
            observed=f"{show(here.path(name), 200)} can't be read: {reason}",
            why="the nodes are unknown",
            fix=f"ls -l {shlex.quote(name)}",
            where=where,
        )
        return Pool(hosts=(), findings=(finding,), hostfile=name)
    parsed = hostfile.parse(text, name)
    status = here.stat(name)
    owner: tuple[Finding, ...] = ()
    if status is not None:
        owner = hostfile.ownership_findings(name, status, os.getuid(), slurm.job_start(here.environ))
    return Pool(hosts=parsed.hosts, findings=(*parsed.findings, *owner), hostfile=name)


def _no_hostfile(name: str, here: Here, where: Where | None) -> Finding:
    near = here.near(name) if name else []
    observed = f"there is no {show(here.path(name), 200)}" if name else "--hostfile has an empty name"
    fix = f"--hostfile {shlex.quote(near[0])}" if near else "correct the path of --hostfile"
    if name.startswith("~"):
        observed += "; nothing expanded the `~`"
        fix = '--hostfile "$HOME/..."'
        if name.startswith("~/"):
            fix = f"--hostfile {shlex.quote(os.path.join(here.home, name[2:]))}"
    elif "$" in name:
        observed += "; nothing expanded the `$`"
    elif near:
        observed += f"; near it: {', '.join(map(show, near))}"
    return Finding(
        code="hostfile.missing",
        severity=Severity.ERROR,
        observed=observed,
        why="the nodes are unknown; deepspeed would train on this machine alone and exit 0",
        fix=fix,
        where=where,
    )


def _from_slurm(allocation: slurm.Allocation, here: Here) -> Pool:
    notes: tuple[str, ...] = ()
    if allocation.hosts:
        slots = sorted({host.slots for host in allocation.hosts})
        each = " or ".join(map(str, slots)) + (" slot" if slots == [1] else " slots")
        job = here.environ.get("SLURM_JOB_ID") or here.environ.get("SLURM_JOBID")
        names = show(fold(host.name for host in allocation.hosts), 200)
        notes = (f"no --hostfile: using Slurm job {job}: {names}, {each} each ({allocation.slots_from})",)
    return Pool(hosts=allocation.hosts, findings=allocation.findings, notes=notes)


def _this_machine(invocation: Invocation, here: Here) -> Pool:
    wanted = invocation.get("num_gpus")
    if isinstance(wanted, int) and wanted > 0:
        slots = min(wanted, deepspeed_cli.MOST_DEVICES)
        return Pool(hosts=(Host(_THIS, slots),), local=True)
    on_cpu = here.environ.get("DS_ACCELERATOR") == "cpu"
    count = None if on_cpu else here.gpus()
    notes: tuple[str, ...] = ()
    if count is None:
        # Where devices can't be counted, those that the user names are taken to be there.
        visible = filters.parse(f"{_THIS}:{here.environ.get(VISIBLE, '')}", [_THIS])[0]
        named = [slot + 1 for m in (*_mentions(invocation), *visible) for slot, _ in m.slots or ()]
        count = min(max(named, default=0), deepspeed_cli.MOST_DEVICES) or _cpu_devices(here)
        if not named and not on_cpu:
            ranks = f"{count} rank{'s' * (count != 1)}"
            notes = (f"no GPU found on this machine: {ranks}; --num_gpus N for another number",)
    return Pool(hosts=(Host(_THIS, count),), notes=notes, local=True)


def _cpu_devices(here: Here) -> int:
    """Count as DeepSpeed's CPU accelerator does (accelerator/cpu_accelerator.py, device_count)."""
    try:
        chosen = int(here.environ.get("LOCAL_SIZE", "0"))
    except ValueError:
        chosen = 0
    return min(chosen, deepspeed_cli.MOST_DEVICES) if chosen > 0 else here.numa_nodes()


def _loopback_master(address: str, nodes: Sequence[Node]) -> Finding:
    return Finding(
        code="hostfile.loopback",
        severity=Severity.ERROR,
        observed=f"--master_addr {show(address)} with {len(nodes)} nodes",
        why="it means another machine on each node, so only the first one would find rank 0",
        fix=f"--master_addr {nodes[0].name}, or leave it out",
        hosts=tuple(node.name for node in nodes[1:]),
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def _short(name: str) -> str:
    return host_part(name).partition(".")[0].lower()
