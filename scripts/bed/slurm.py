"""Real Slurm on the nodes of a bed: one slurmd in each, munged and slurmctld on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bed.system import BedError, program, run, start_time, wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bed.node import Node

UP_DEADLINE = 60.0
STOP_DEADLINE = 10.0
FREEZER = Path("/sys/fs/cgroup/freezer")

# cred_expire is also how long a requeued job waits; below 15 s a slow peer makes steps fail.
# config_overrides lets a node claim more than this machine has; the rest makes jobs start and end at once.
SLURM_CONF = """\
ClusterName=testbed
SlurmctldHost=head({head})
SlurmctldPort=6817
SlurmdPort=6818
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=15
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
ProctrackType={proctrack}
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={root}/log/jobs.txt
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=0
ReturnToService=2
KillWait=5
MinJobAge=3600
SlurmctldTimeout=30
SlurmdTimeout=20
InactiveLimit=0
MessageTimeout=10
GresTypes=gpu
JobRequeue=1
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

CGROUP_CONF = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainCores=no
ConstrainRAMSpace=no
ConstrainDevices=no
"""


class Slurm:
    """The Slurm of a bed; its nodes have 4 CPUs and 2 GPUs that are copies of /dev/null."""

    def __init__(self, bed: Path, nodes: Sequence[Node], head: str) -> None:
        """Name a Slurm; nothing is started. `head` is the controller's address."""
        self._root = bed / "slurm"
        self._nodes = nodes
        self._head = head
        self._freezers = [FREEZER / f"slurm_{node.name}" for node in nodes]

    @property
    def configuration(self) -> str:
        """The path for $SLURM_CONF."""
        return str(self._root / "etc/slurm.conf")

    @property
    def running(self) -> bool:
        """Whether the controller runs."""
        pid = self._daemon("slurmctld")
        return pid is not None

    def up(self) -> None:
        """Start every daemon and return when all nodes are idle."""
        if self.running:
            raise BedError("Slurm is up already")
        for name in ("munged", "slurmctld", "slurmd", "sinfo"):
            program(name)
        self._write()
        munge = self._root / "munge"
        options = [f"--{name}={munge / name}" for name in ("key-file", "socket", "seed-file")]
        options += [f"--pid-file={self._pid_file('munged')}", f"--log-file={self._root}/log/munged.log"]
        run("munged", *options, "--num-threads=2", "--force")
        script = 'echo head >/proc/sys/kernel/hostname && exec slurmctld -c -f "$0"'
        run("unshare", "--uts", "sh", "-c", script, self.configuration)
        for node in self._nodes:
            node.run("env", f"SLURM_CONF={self.configuration}", "slurmd", "-f", self.configuration)
        wait_for(self._all_idle, UP_DEADLINE, f"Slurm's nodes to be idle (logs: {self._root}/log)")

    def _all_idle(self) -> bool:
        environment = {**os.environ, "SLURM_CONF": self.configuration}
        try:
            idle = run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", env=environment).split()
        except BedError:  # the controller is not listening yet
            idle = []
        time.sleep(0.05)
        return len(idle) == len(self._nodes)

    def down(self) -> None:
        """End every daemon; jobs that still run are killed with them."""
        for node in self._nodes:
            if node.pid is not None:
                with contextlib.suppress(BedError):
                    node.run("sh", "-c", 'kill "$(cat /run/slurmd.pid)" && rm /run/slurmd.pid')
        for name in ("slurmctld", "munged"):
            pid = self._daemon(name)
            if pid is not None:
                os.kill(pid, signal.SIGTERM)
                try:
                    wait_for(lambda pid=pid: start_time(pid) is None, STOP_DEADLINE, f"{name} to end")
                except BedError:
                    os.kill(pid, signal.SIGKILL)
            self._pid_file(name).unlink(missing_ok=True)
        for freezer in self._freezers if self._root.exists() else []:
            for place in [*sorted(freezer.rglob("*"), reverse=True), freezer]:
                with contextlib.suppress(OSError):
                    place.rmdir()

    def _pid_file(self, name: str) -> Path:
        return self._root / f"run/{name}.pid"

    def _daemon(self, name: str) -> int | None:
        """Return the pid of a daemon of ours: of that name, and started with our files."""
        try:
            pid = int(self._pid_file(name).read_text(encoding="ascii"))
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        ours = name.encode() in command and str(self._root).encode() in command
        return pid if ours and start_time(pid) is not None else None

    def _write(self) -> None:
        for name in ("munge", "state", "log", "run", "etc", "dev", "spool"):
            (self._root / name).mkdir(parents=True, exist_ok=True)
        key = self._root / "munge/key-file"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(os.urandom(1024))
        for name in ("nvidia0", "nvidia1"):
            if not (self._root / "dev" / name).exists():
                os.mknod(self._root / "dev" / name, 0o020666, os.makedev(1, 3))
        # Without control groups, or with another bed's Slurm in those of these names, orphans stay alive.
        grouped = FREEZER.is_dir() and not any(freezer.exists() for freezer in self._freezers)
        rows = [
            f"NodeName={node.name} NodeAddr={node.address} CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN"
            for node in self._nodes
        ]
        conf = SLURM_CONF.format(
            head=self._head,
            root=self._root,
            nodes="\n".join(rows),
            proctrack="proctrack/cgroup" if grouped else "proctrack/linuxproc",
        )
        gpus = f"NodeName=node[1-{len(self._nodes)}] Name=gpu File={self._root}/dev/nvidia[0-1]"
        (self._root / "etc/slurm.conf").write_text(conf, encoding="ascii")
        (self._root / "etc/cgroup.conf").write_text(CGROUP_CONF, encoding="ascii")
        (self._root / "etc/gres.conf").write_text(f"AutoDetect=off\n{gpus}\n", encoding="ascii")
