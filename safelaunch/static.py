"""Everything that can be judged before a node is contacted, and the plan that comes out of it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Literal

from safelaunch import deepspeed_cli, environment, nodes, script, settings, slurm
from safelaunch.findings import Finding, Severity, Where, errors, override
from safelaunch.here import Here
from safelaunch.hostnames import nearest, show
from safelaunch.plan import Plan, Program
from safelaunch.selection import Selection, select

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from safelaunch.arguments import Invocation
    from safelaunch.nodes import Pool
    from safelaunch.plan import Variable
    from safelaunch.settings import Settings


def _codes(names: str) -> frozenset[str]:
    return frozenset(names.split())


UNFORCED = _codes("""
    cli.unknown_option cli.version_option cli.value cli.conflict cli.launcher cli.not_yet
    hostfile.missing hostfile.unreadable hostfile.empty hostfile.syntax hostfile.pattern
    select.conflict select.syntax select.unknown_host select.no_such_slot select.empty select.too_few_nodes
    select.too_many_gpus
    settings.syntax settings.unknown_key settings.value settings.unreadable
    slurm.allocation_unclear
""")
"""Errors that leave no plan, so that `--force` has nothing to start."""
UNSILENCED = UNFORCED | _codes("""
    script.missing hostfile.zero_slots hostfile.duplicate hostfile.loopback env_file.unreadable
    slurm.many_launchers config.unreadable config.syntax config.duplicate_key config.precision
""")
"""Errors that `[checks]` can't turn into less: they are wrong whatever one says of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """What static validation found; `plan` is None where nothing could be started, even by --force.

    `notes` are lines for the user about what was chosen for want of an option.
    """

    plan: Plan | None
    settings: Settings
    origins: Mapping[str, str]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    def settings_text(self) -> str:
        """Return what --show-settings prints."""
        return settings.show(self.settings, self.origins)


def validate(
    invocation: Invocation,
    environ: Mapping[str, str],
    cwd: str,
    *,
    home: str | None = None,
    job_hostfile: str = nodes.JOB_HOSTFILE,
) -> Static:
    """Read the user's files, judge everything together, and plan what to start where.

    All faults of all parts are found in one go. `home` is the user's, by default this one's.
    """
    here = Here(cwd=cwd, home=home or os.path.expanduser("~"), environ=environ)
    loaded = settings.load(
        invocation.flags,
        environ,
        script=_script_path(invocation),
        cwd=cwd,
        home=here.home,
        read=here.read_if_there,
    )
    pool = nodes.pool(invocation, here, job_hostfile=job_hostfile)
    chosen = _selected(invocation, pool, here)
    variables, env_findings = _variables(invocation, loaded.settings, here)
    world = sum(len(node.slots) for node in chosen.nodes) or None
    program = _program(invocation)
    findings = [*invocation.findings, *loaded.findings, *pool.findings, *chosen.findings]
    findings += _meeting(invocation, pool, chosen, here)
    findings += _scheduler(invocation, pool, chosen, here)
    findings += [*_node_names(loaded.settings, pool), *env_findings]
    findings += environment.check_values(variables, environ, world)
    other_python = bool(loaded.settings.interpreter or invocation.get("venv_script"))
    if program is not None:
        findings += script.findings(program, here, other_python=other_python)
    config_findings, configs = script.config_findings(
        invocation.script_args,
        here,
        deepspeed_version=deepspeed_version(),
        world_size=_judged_world(world, findings),
    )
    findings += config_findings
    plan = None
    unclear = any(finding.code in UNFORCED for finding in errors(findings))
    if chosen.nodes and not unclear and 0 < _number(invocation, "master_port") <= nodes.HIGHEST_PORT:
        plan = _plan(invocation, loaded.settings, pool, chosen, variables, here, configs)
    return Static(
        plan=plan,
        settings=loaded.settings,
        origins=loaded.origins,
        findings=tuple(_overridden(findings, loaded.settings.checks, planned=plan is not None)),
        notes=(*pool.notes, *_no_ssh_notes(invocation, chosen)),
    )


def deepspeed_version() -> str | None:
    """Return the version of DeepSpeed beside us, from its metadata; None where there is none."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None


def _script_path(invocation: Invocation) -> str | None:
    return None if invocation.get("module") else invocation.script


def _selected(invocation: Invocation, pool: Pool, here: Here) -> Selection:
    if not pool.hosts:
        return Selection((), ())
    return select(
        pool.hosts,
        include=str(invocation.get("include")),
        exclude=str(invocation.get("exclude")),
        num_nodes=_number(invocation, "num_nodes"),
        num_gpus=min(_number(invocation, "num_gpus"), deepspeed_cli.MOST_DEVICES),
        visible_devices=here.environ.get(nodes.VISIBLE),
        explicit_hostfile=not pool.local,
    )


def _number(invocation: Invocation, dest: str) -> int:
    value = invocation.get(dest)
    return value if isinstance(value, int) else -1


def _judged_world(world: int | None, findings: Iterable[Finding]) -> int | None:
    """Return the world size for the config's sums; None where the nodes are in doubt."""
    doubtful = any(finding.code.startswith(("hostfile.", "select.")) for finding in errors(findings))
    return None if doubtful else world


def _meeting(invocation: Invocation, pool: Pool, chosen: Selection, here: Here) -> list[Finding]:
    """Judge where the ranks are to meet, and --no_ssh with its node rank."""
    given, found = invocation.deepspeed, []
    if "master_port" in given:
        found += nodes.port_findings(_number(invocation, "master_port"), here)
    if given.get("master_addr"):
        found += nodes.address_findings(str(given["master_addr"]), chosen.nodes, local=pool.local)
    port = given.get("ssh_port")
    if isinstance(port, int) and not 0 < port <= nodes.HIGHEST_PORT:
        found.append(_value(f"--ssh_port {port} is no port", "ports run from 1 to 65535", "--ssh_port 22"))
    rank, count = _number(invocation, "node_rank"), len(chosen.nodes)
    if given.get("no_ssh") and count and not 0 <= rank < count:
        observed = "--no_ssh without --node_rank" if rank == -1 else f"--node_rank {rank} with {count} nodes"
        fix = "--node_rank 0 on the first node" + (f", up to {count - 1} on the last" if count > 1 else "")
        found.append(_value(observed, "with --no_ssh each node is told which one it is", fix))
    return found


def _scheduler(invocation: Invocation, pool: Pool, chosen: Selection, here: Here) -> list[Finding]:
    """Judge the job against Slurm, and DeepSpeed's other launchers."""
    found = slurm.step_findings(here.environ, no_ssh=bool(invocation.get("no_ssh")))
    if pool.hostfile is not None:
        found += slurm.hostfile_findings(here.environ, chosen.nodes)
    several = bool(invocation.get("force_multi")) or len(chosen.nodes) != 1
    found += deepspeed_cli.launcher_findings(
        invocation.deepspeed, several=several, checking=invocation.checking
    )
    slurm_launcher = str(invocation.get("launcher")).lower() == "slurm"
    if slurm_launcher and several and chosen.nodes and not invocation.get("no_ssh"):
        world = sum(len(node.slots) for node in chosen.nodes)
        found += slurm.stock_findings(here.environ, world, mpi4py=here.package("mpi4py"))
    return found


def _variables(
    invocation: Invocation, chosen: Settings, here: Here
) -> tuple[tuple[Variable, ...], list[Finding]]:
    """Return what the ranks get, the later one winning: shell, environment files, settings, --env."""
    items = invocation.flags.get("env")
    by_flag, findings = environment.from_flags(items if isinstance(items, tuple) else (), here.environ)
    from_files: list[Variable] = []
    found = list(findings)
    paths = environment.env_file_paths(here.environ, here.cwd, here.home)
    for path, explicit in paths:
        if not here.is_file(path) and not (explicit and here.stat(path) is not None):
            continue
        try:
            variables, faults = environment.parse_env_file(here.read(path), path, here.environ)
        except OSError as error:
            found.append(_unreadable_env_file(path, error.strerror or str(error)))
        else:
            from_files += variables
            found += faults
    if any(explicit for _, explicit in paths) and all(here.stat(path) is None for path, _ in paths):
        found.append(_no_env_file(here))
    names = {variable.name for variable in by_flag}
    from_settings = [v for v in chosen.variables if v.node is None or v.name not in names]
    shell = environment.exported(here.environ, chosen.export, cwd=here.cwd)
    return (*shell, *from_files, *from_settings, *by_flag), found


def _node_names(chosen: Settings, pool: Pool) -> list[Finding]:
    """Name the nodes of the settings that no host has; they may be another cluster's, so it is a warning."""
    known = [host.name for host in pool.hosts]
    strange = dict.fromkeys(v.node for v in chosen.variables if v.node is not None and v.node not in known)
    return [
        Finding(
            code="settings.value",
            severity=Severity.WARNING,
            observed=f"[nodes.{show(name)}] names no host of this job",
            why="its variables reach nobody",
            fix=", ".join(nearest(name, known)) or "the name as it stands in the hostfile",
        )
        for name in (strange if known and not pool.local else ())
    ]


def _program(invocation: Invocation) -> Program | None:
    if invocation.script is None:
        return None
    kind: Literal["python", "module", "program"] = "program" if invocation.get("no_python") else "python"
    if invocation.get("module"):
        kind = "module"
    return Program(
        script=invocation.script,
        args=invocation.script_args,
        kind=kind,
        local_rank=not invocation.get("no_local_rank"),
    )


def _plan(
    invocation: Invocation,
    chosen: Settings,
    pool: Pool,
    selection: Selection,
    variables: tuple[Variable, ...],
    here: Here,
    configs: tuple[str, ...],
) -> Plan:
    given = invocation.deepspeed
    alone = bool(given.get("no_ssh"))
    here_only = alone or (pool.local and chosen.transport == "auto")
    port, ssh_port = given.get("master_port"), given.get("ssh_port")
    log_dir = given.get("enable_each_rank_log", "None")
    address = str(given.get("master_addr") or "") or (
        selection.nodes[0].name if _must_name(alone, selection) else None
    )
    return Plan(
        nodes=selection.nodes,
        program=_program(invocation),
        interpreter=chosen.interpreter or sys.executable,
        cwd=here.cwd,
        transport="local" if here_only else chosen.transport,
        level=chosen.preflight,
        limits=chosen.limits,
        master_addr=address,
        # Each node of --no_ssh is started by itself: a free port can't be agreed on.
        master_port=port if isinstance(port, int) else _number(invocation, "master_port") if alone else None,
        ssh_port=ssh_port if isinstance(ssh_port, int) else None,
        only_node=_number(invocation, "node_rank") if alone else None,
        launcher_options=deepspeed_cli.node_launcher_options(given),
        rank_log_dir=None if log_dir in ("None", "") else str(log_dir),
        save_pid=bool(given.get("save_pid")),
        venv_script=str(given["venv_script"]) if given.get("venv_script") else None,
        rank_hook=not chosen.no_rank_hook,
        environment=variables,
        unset=environment.scrub(here.environ),
        deepspeed_configs=configs,
        hostfile=pool.hostfile,
        checks=chosen.checks,
        checkpoint_dirs=chosen.checkpoint_dirs,
        force=chosen.force,
    )


def _must_name(alone: bool, selection: Selection) -> bool:
    return alone and len(selection.nodes) > 1


def _no_ssh_notes(invocation: Invocation, selection: Selection) -> tuple[str, ...]:
    alone = bool(invocation.get("no_ssh"))
    if not _must_name(alone, selection) or invocation.deepspeed.get("master_addr"):
        return ()
    return (f"--no_ssh without --master_addr: the ranks meet on {selection.nodes[0].name}, by that name",)


def _overridden(findings: Iterable[Finding], rules: Mapping[str, str], *, planned: bool) -> list[Finding]:
    """Apply `[checks]`, except to errors that no setting can undo; without a plan, to no error."""
    result = []
    for finding in findings:
        firm = finding.severity is Severity.ERROR and (finding.code in UNSILENCED or not planned)
        result += [finding] if firm else override([finding], rules)
    return result


def _value(observed: str, why: str, fix: str) -> Finding:
    return Finding(code="cli.value", severity=Severity.ERROR, observed=observed, why=why, fix=fix)


def _no_env_file(here: Here) -> Finding:
    name = here.environ.get("DS_ENV_FILE", "")
    near = here.near(name)
    return Finding(
        code="env_file.missing",
        severity=Severity.ERROR,
        observed=f"DS_ENV_FILE names {show(name)}, which is neither in {here.home} nor in {here.cwd}"
        if not os.path.isabs(name)
        else f"DS_ENV_FILE names {show(name)}, which does not exist",
        why="deepspeed would start the ranks without those variables, and not say so",
        fix=f"export DS_ENV_FILE={near[0]}" if near else "correct DS_ENV_FILE, or unset it",
    )


def _unreadable_env_file(path: str, reason: str) -> Finding:
    return Finding(
        code="env_file.unreadable",
        severity=Severity.ERROR,
        observed=f"{show(path, 200)} can't be read: {reason}",
        why="the ranks would start without its variables",
        fix=f"ls -l {path}",
        where=Where(path),
    )
