"""Every finding code there is: its level and, when it refuses a launch, the exit status it gives.

The codes are stable names that users write in `[checks]` of safelaunch.toml.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from safelaunch.findings import errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from safelaunch.findings import Finding

USAGE, PREFLIGHT, CONFIGURATION = 2, 69, 78
"""Exit statuses after sysexits.h: wrong command line, EX_UNAVAILABLE, EX_CONFIG."""


@dataclass(frozen=True, slots=True)
class Code:
    """A finding code; `level` is static, quick, standard or full."""

    name: str
    level: str
    status: int


def _codes(level: str, status: int, names: str) -> dict[str, Code]:
    return {name: Code(name, level, status) for name in names.split()}


CODES: dict[str, Code] = {
    **_codes(
        "static",
        USAGE,
        """
        cli.unknown_option cli.version_option cli.value cli.conflict cli.option_after_script
        cli.option_ignored cli.launcher cli.not_yet
        script.missing script.not_python script.module_missing
        select.conflict select.syntax
        master.port_range
        """,
    ),
    **_codes(
        "static",
        CONFIGURATION,
        """
        hostfile.missing hostfile.unreadable hostfile.empty hostfile.syntax hostfile.ignored_field
        hostfile.zero_slots hostfile.duplicate hostfile.pattern hostfile.loopback hostfile.uneven
        hostfile.foreign hostfile.stale
        select.unknown_host select.no_such_slot select.empty select.too_few_nodes select.too_many_gpus
        select.visible_devices
        master.addr_unknown
        settings.syntax settings.unknown_key settings.value settings.unreadable
        env.value env.stale_rendezvous env_file.missing env_file.unreadable env_file.syntax env_file.quotes
        env_file.duplicate
        slurm.hostfile_mismatch slurm.many_launchers slurm.workers_missing slurm.no_mpi4py
        slurm.allocation_unclear
        config.missing config.unreadable config.syntax config.duplicate_key config.unknown_key
        config.removed_key config.template config.batch config.batch_derived config.precision config.zero
        config.offload config.elastic config.cli_conflict config.value
        """,
    ),
    **_codes(
        "quick",
        PREFLIGHT,
        """
        ssh.name ssh.no_route ssh.refused ssh.timeout ssh.no_banner ssh.not_ssh ssh.host_key_unknown
        ssh.host_key_changed ssh.auth ssh.password_only ssh.account ssh.throttled ssh.noise ssh.python_missing
        ssh.python_old ssh.no_space ssh.closed ssh.proxy ssh.config
        node.slow_answer node.probe_failed
        hostfile.alias identity.duplicate
        path.interpreter path.cwd path.script path.venv_script
        code.differs config.differs
        software.torch software.deepspeed software.python software.nccl software.cuda
        shm.small clock.skew process.leftover port.busy storage.full
        gpu.none gpu.too_few gpu.tool_failed gpu.tool_stuck
        net.own_name_loopback net.name_resolution net.master_unreachable
        preflight.level
        """,
    ),
}


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 0, or the status of the worst kind of error: 2 goes before 78, and 78 before 69."""
    statuses = {CODES[finding.code].status for finding in errors(findings)}
    return next((status for status in (USAGE, CONFIGURATION, PREFLIGHT) if status in statuses), 0)
