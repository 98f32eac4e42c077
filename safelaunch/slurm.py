"""What Slurm says of the job we are in: environment to allocation and findings; pure.

The variables are those of Slurm 22.05 to 24.11 (sbatch(1), srun(1), "OUTPUT ENVIRONMENT VARIABLES").
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safelaunch.findings import Finding, Severity
from safelaunch.hostfile import Host
from safelaunch.hostnames import expand, fold, host_part, show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safelaunch.plan import Node

_PIECE = re.compile(r"[^,\[\]]*(?:\[[^\[\]]*\][^,\[\]]*)+|[^,\[\]]+")
_COUNT = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?", re.ASCII)
_DIGITS = re.compile(r"\d{1,12}", re.ASCII)
_ADDRESS = re.compile(r"[\d.]+|.*:.*")
_MOST_NODES = 65_536


@dataclass(frozen=True, slots=True)
class Allocation:
    """The nodes of a job in Slurm's order; `slots_from` names the variable that gave the slots.

    No hosts, and a finding, where the job does not say how many ranks each node is to have.
    """

    hosts: tuple[Host, ...]
    slots_from: str
    findings: tuple[Finding, ...] = ()


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return what the job we run in was given; None outside of a job."""
    text = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not text or not in_job(environ):
        return None
    try:
        names = _names(text)
    except ValueError as error:
        return Allocation((), "", (_unclear(f"SLURM_JOB_NODELIST={show(text)} can't be read: {error}"),))
    slots, origin = _slots(environ, len(names))
    if slots is None:
        return Allocation((), "", (_unclear(origin),))
    return Allocation(tuple(Host(name, n) for name, n in zip(names, slots, strict=True)), origin)


def in_job(environ: Mapping[str, str]) -> bool:
    """Whether we run inside a Slurm job."""
    return bool(environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID"))


def job_start(environ: Mapping[str, str]) -> float | None:
    """Return when the job started, in seconds since the epoch; None where Slurm does not say."""
    return _number(environ.get("SLURM_JOB_START_TIME", "")) or None if in_job(environ) else None


def step_findings(environ: Mapping[str, str], *, no_ssh: bool) -> list[Finding]:
    """Tell whether srun started this command several times (slurm.many_launchers).

    SLURM_PROCID proves nothing, since the batch script has it too; only a step has SLURM_STEP_ID. With
    --no_ssh, one task a node is right.
    """
    tasks = _number(environ.get("SLURM_STEP_NUM_TASKS", ""))
    wanted = max(1, _number(environ.get("SLURM_STEP_NUM_NODES", ""))) if no_ssh else 1
    if "SLURM_STEP_ID" not in environ or tasks <= wanted:
        return []
    return [
        Finding(
            code="slurm.many_launchers",
            severity=Severity.ERROR,
            observed=f"srun started this command {tasks} times (SLURM_STEP_NUM_TASKS={tasks}); "
            f"this is task {environ.get('SLURM_PROCID', '?')}",
            why="every copy would start the whole job, and they fight for the master port",
            fix="run safelaunch without srun, straight in the batch script; or one copy a node: "
            "srun --ntasks-per-node=1 bash -c 'safelaunch --no_ssh --node_rank $SLURM_NODEID ...'",
        )
    ]


def hostfile_findings(environ: Mapping[str, str], nodes: Sequence[Node]) -> list[Finding]:
    """Compare the selected hosts with the allocation; an IP address in their place can't be compared."""
    text = environ.get("SLURM_JOB_NODELIST", "")
    if not in_job(environ) or not text:
        return []
    try:
        allocated = _names(text)
    except ValueError:
        return []
    short = {_short(name) for name in allocated}
    outside = [
        node
        for node in nodes
        if not _ADDRESS.fullmatch(host_part(node.name)) and _short(host_part(node.name)) not in short
    ]
    if not outside:
        return []
    return [
        Finding(
            code="slurm.hostfile_mismatch",
            severity=Severity.ERROR,
            observed=f"{fold(node.name for node in outside)} of the hostfile is not among the nodes of this "
            f"Slurm job, {show(text)}",
            why="a node outside of the allocation refuses the login, or is another job's",
            fix="leave --hostfile out to use the nodes of the job, or write it anew: "
            "scontrol show hostnames | sed 's/$/ slots=8/' (8 GPUs a node)",
            hosts=tuple(node.name for node in outside),
            where=outside[0].where,
        )
    ]


def stock_findings(environ: Mapping[str, str], world_size: int, *, mpi4py: bool) -> list[Finding]:
    """Judge what DeepSpeed's own `--launcher slurm` needs.

    `mpi4py` tells whether the training's Python has it.
    """
    findings = []
    tasks = _number(environ.get("SLURM_NTASKS", ""))
    fix = "leave --launcher slurm out: safelaunch starts the nodes of the allocation by itself"
    if not in_job(environ):
        findings.append(
            Finding(
                code="slurm.workers_missing",
                severity=Severity.WARNING,
                observed="--launcher slurm outside of a Slurm job",
                why="its srun asks for an allocation of its own, which need not be the nodes of the hostfile",
                fix="submit the command with sbatch, or start it under salloc",
            )
        )
    elif 0 < tasks < world_size:
        findings.append(
            Finding(
                code="slurm.workers_missing",
                severity=Severity.ERROR,
                observed=f"the job has {tasks} tasks (SLURM_NTASKS), and {world_size} ranks are planned",
                why="the srun of --launcher slurm can't start more tasks than the job was given",
                fix=f"sbatch --ntasks={world_size}, or {fix}",
            )
        )
    if not mpi4py:
        findings.append(
            Finding(
                code="slurm.no_mpi4py",
                severity=Severity.ERROR,
                observed="the Python of the training has no mpi4py",
                why="--launcher slurm gives ranks no RANK: DeepSpeed asks mpi4py for it",
                fix=f"pip install mpi4py, or {fix}",
            )
        )
    return findings


def _names(text: str) -> list[str]:
    """Expand `gpu[001-003,7],login1`; raises ValueError with a reason."""
    names: list[str] = []
    pieces = [match[0] for match in _PIECE.finditer(text)]
    if ",".join(pieces) != text:
        raise ValueError("its brackets don't match")
    for piece in pieces:
        if "[" not in piece:
            names.append(piece)
        elif (expanded := expand(piece)) is not None:
            names += expanded
        else:
            raise ValueError(f"{show(piece)} is no list of nodes")
        if len(names) > _MOST_NODES:
            raise ValueError(f"it stands for more than {_MOST_NODES} nodes")
    return names


def _slots(environ: Mapping[str, str], nodes: int) -> tuple[list[int] | None, str]:
    """Return the slots of each node and the variable that tells them, or None and what is not known.

    GPUs go before tasks. SLURM_GPUS_ON_NODE and SLURM_JOB_GPUS speak of this node only, so they stand for
    all only where the job's total (--gpus) does not contradict.
    """
    for name, number in (
        ("SLURM_GPUS_PER_NODE", _gpus(environ.get("SLURM_GPUS_PER_NODE", ""))),
        ("SLURM_GPUS_ON_NODE", _gpus(environ.get("SLURM_GPUS_ON_NODE", ""))),
        ("SLURM_JOB_GPUS", _indices(environ.get("SLURM_JOB_GPUS", ""))),
    ):
        if number:
            total = _gpus(environ.get("SLURM_GPUS", ""))
            if total and name != "SLURM_GPUS_PER_NODE" and total != number * nodes:
                return None, f"the job has {total} GPUs on {nodes} nodes, {number} of them on this node"
            return [number] * nodes, name
    tasks = _counts(environ.get("SLURM_TASKS_PER_NODE", ""))
    a_task = _gpus(environ.get("SLURM_GPUS_PER_TASK", ""))
    if len(tasks) == nodes and all(tasks) and (a_task or not environ.get("SLURM_GPUS")):
        name = "SLURM_GPUS_PER_TASK" if a_task else "SLURM_TASKS_PER_NODE"
        return [count * (a_task or 1) for count in tasks], name
    if environ.get("SLURM_GPUS"):
        return (
            None,
            f"the job has {show(environ['SLURM_GPUS'])} GPUs on {nodes} nodes, but not so many on each",
        )
    if per_node := _number(environ.get("SLURM_NTASKS_PER_NODE", "")):
        return [per_node] * nodes, "SLURM_NTASKS_PER_NODE"
    return (
        None,
        "no SLURM_GPUS_PER_NODE, SLURM_GPUS_ON_NODE or SLURM_TASKS_PER_NODE tells the slots of a node",
    )


def _number(text: str) -> int:
    """Read a whole number; 0 where it is none."""
    return int(text) if _DIGITS.fullmatch(text) else 0


def _gpus(text: str) -> int:
    """Read `4`, `a100:4` or `a100:2,v100:2`; 0 where a number is missing."""
    numbers = [_number(part.rpartition(":")[2]) for part in text.split(",")]
    return sum(numbers) if all(numbers) else 0


def _indices(text: str) -> int:
    """Count `0,1` or `0-3,6`; 0 where it is no such list."""
    total = 0
    for part in text.split(","):
        low, _, high = part.partition("-")
        last = high or low
        if not (_DIGITS.fullmatch(low) and _DIGITS.fullmatch(last)) or int(last) < int(low):
            return 0
        total += int(last) - int(low) + 1
    return total


def _counts(text: str) -> list[int]:
    """Expand `4(x2),1`; nothing where it is no such list."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None or len(counts) > _MOST_NODES:
            return []
        counts += [int(match[1])] * min(int(match[2] or 1), _MOST_NODES)
    return counts


def _short(name: str) -> str:
    return name.partition(".")[0].lower()


def _unclear(observed: str) -> Finding:
    return Finding(
        code="slurm.allocation_unclear",
        severity=Severity.ERROR,
        observed=observed,
        why="without a --hostfile the nodes and slots are those of the Slurm job, and they are not guessed",
        fix="ask Slurm with --gpus-per-node=N, or give --hostfile FILE",
    )
