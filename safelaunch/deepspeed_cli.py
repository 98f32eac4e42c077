"""The command line of `deepspeed`, 0.14 to 0.19.8, as one table, and what its options mean with us.

Read in `deepspeed/launcher/{runner,launch,multinode_runner}.py` of the releases; tests compare the table with
the parser of the installed one.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safelaunch.findings import Finding, Severity
from safelaunch.options import Option

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from safelaunch.options import Value

MPI = frozenset({"openmpi", "mpich", "impi", "mvapich"})
FOREIGN = MPI | {"slurm"}
LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm")

_NO_BINDING = frozenset({"openmpi", "mpich", "mvapich", "slurm"})
_NO_MASTER = frozenset({"openmpi", "mvapich", "slurm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOption(Option):
    """An option of `deepspeed`.

    `since` and `until` are the first and the last release that has it (none: all from 0.14 on).
    `node_launcher` says that `deepspeed.launcher.launch` takes it too, so that it can be passed on.
    `ignored_by` and `refused_by` are the launchers (values of --launcher) that drop it without a word, or
    stop with an error, when they start several nodes.
    """

    since: str | None = None
    until: str | None = None
    node_launcher: bool = False
    ignored_by: frozenset[str] = frozenset()
    refused_by: frozenset[str] = frozenset()
    unmistakable: bool = True

    def in_version(self, installed: str | None) -> bool:
        """Whether a DeepSpeed of that version has the option; True where the version is not known."""
        if installed is None:
            return True
        version = _release(installed)
        return not (self.since and version < _release(self.since)) and not (
            self.until and version > _release(self.until)
        )


OPTIONS: tuple[DeepSpeedOption, ...] = (
    DeepSpeedOption(
        dest="hostfile",
        flags=("-H", "--hostfile"),
        kind="text",
        default="/job/hostfile",
        metavar="FILE",
        help="the nodes and their slots, a line each: NAME slots=N",
    ),
    DeepSpeedOption(
        dest="include",
        flags=("-i", "--include"),
        kind="text",
        default="",
        metavar="FILTER",
        help="only these: NAME[:SLOT[,SLOT...]][@NAME...]",
        refused_by=MPI,
    ),
    DeepSpeedOption(
        dest="exclude",
        flags=("-e", "--exclude"),
        kind="text",
        default="",
        metavar="FILTER",
        help="all but these, in the same form",
        refused_by=MPI,
    ),
    DeepSpeedOption(
        dest="num_nodes",
        flags=("--num_nodes",),
        kind="int",
        default=-1,
        metavar="N",
        help="only the first N nodes of the hostfile",
        refused_by=MPI,
    ),
    DeepSpeedOption(
        dest="min_elastic_nodes",
        flags=("--min_elastic_nodes",),
        kind="int",
        default=-1,
        metavar="N",
        help="fewest nodes of an elastic job",
        until="0.19.7",
    ),
    DeepSpeedOption(
        dest="max_elastic_nodes",
        flags=("--max_elastic_nodes",),
        kind="int",
        default=-1,
        metavar="N",
        help="most nodes of an elastic job",
        until="0.19.7",
    ),
    DeepSpeedOption(
        dest="num_gpus",
        flags=("--num_gpus", "--num_accelerators"),
        kind="int",
        default=-1,
        metavar="N",
        help="devices 0 to N-1 of each node",
        refused_by=MPI,
    ),
    DeepSpeedOption(
        dest="master_port",
        flags=("--master_port",),
        kind="int",
        default=29500,
        metavar="PORT",
        help="where the ranks meet; without it a free port is chosen",
        ignored_by=_NO_MASTER,
    ),
    DeepSpeedOption(
        dest="master_addr",
        flags=("--master_addr",),
        kind="text",
        default="",
        metavar="ADDR",
        help="where the ranks meet; without it an address of the first node that all others reach",
        ignored_by=_NO_MASTER,
    ),
    DeepSpeedOption(
        dest="node_rank",
        flags=("--node_rank",),
        kind="int",
        default=-1,
        metavar="I",
        help="with --no_ssh: the number of this node, from 0",
        since="0.14.5",
    ),
    DeepSpeedOption(
        dest="launcher",
        flags=("--launcher",),
        kind="text",
        default="pdsh",
        metavar="NAME",
        help="pdsh (the default) stands for safelaunch's own way; openmpi, mpich, impi, mvapich and slurm "
        "can be checked, not started, in this version",
    ),
    DeepSpeedOption(
        dest="launcher_args",
        flags=("--launcher_args",),
        kind="text",
        default="",
        metavar="ARGS",
        help="options for the launcher's own command",
    ),
    DeepSpeedOption(
        dest="module",
        flags=("--module",),
        kind="flag",
        default=False,
        help="SCRIPT is a module, run as by `python -m`",
        node_launcher=True,
        ignored_by=frozenset({"slurm"}),
        unmistakable=False,
    ),
    DeepSpeedOption(
        dest="no_python",
        flags=("--no_python",),
        kind="flag",
        default=False,
        help="SCRIPT is a program, run without Python",
        node_launcher=True,
        ignored_by=frozenset({"slurm"}),
    ),
    DeepSpeedOption(
        dest="no_local_rank",
        flags=("--no_local_rank",),
        kind="flag",
        default=False,
        help="do not give --local_rank=N to the script",
        node_launcher=True,
        ignored_by=FOREIGN,
    ),
    DeepSpeedOption(
        dest="no_ssh",
        flags=("--no_ssh",),
        kind="flag",
        default=False,
        help="start this node only; the same command is to run on every node, with its --node_rank",
        since="0.14.5",
    ),
    DeepSpeedOption(
        dest="no_ssh_check",
        flags=("--no_ssh_check",),
        kind="flag",
        default=False,
        help="accepted: there is no separate ssh test to leave out",
    ),
    DeepSpeedOption(
        dest="force_multi",
        flags=("--force_multi",),
        kind="flag",
        default=False,
        help="accepted: a single node is always started where it is",
    ),
    DeepSpeedOption(
        dest="save_pid",
        flags=("--save_pid",),
        kind="flag",
        default=False,
        help="have the node launchers write their ranks' pids to /tmp/PID.deepspeed, PID being safelaunch's",
        node_launcher=True,
        ignored_by=FOREIGN,
    ),
    DeepSpeedOption(
        dest="enable_each_rank_log",
        flags=("--enable_each_rank_log",),
        kind="text",
        default="None",
        metavar="DIR",
        help="also write each rank's output to a file of its own in DIR, on its node",
        node_launcher=True,
        ignored_by=FOREIGN,
    ),
    DeepSpeedOption(
        dest="autotuning",
        flags=("--autotuning",),
        kind="choice",
        choices=("tune", "run"),
        default="",
        help="DeepSpeed's search for a good configuration; not started by this version",
    ),
    DeepSpeedOption(
        dest="elastic_training",
        flags=("--elastic_training",),
        kind="flag",
        default=False,
        help="DeepSpeed's elastic jobs; not started by this version",
        until="0.19.7",
    ),
    DeepSpeedOption(
        dest="bind_cores_to_rank",
        flags=("--bind_cores_to_rank",),
        kind="flag",
        default=False,
        help="give each rank cores of its own (numactl)",
        node_launcher=True,
        ignored_by=_NO_BINDING,
    ),
    DeepSpeedOption(
        dest="bind_core_list",
        flags=("--bind_core_list",),
        kind="text",
        metavar="LIST",
        help="the cores to share out, such as 0,2-5",
        node_launcher=True,
        ignored_by=_NO_BINDING,
    ),
    DeepSpeedOption(
        dest="ssh_port",
        flags=("--ssh_port",),
        kind="int",
        metavar="PORT",
        help="port of sshd on the nodes",
        ignored_by=FOREIGN,
    ),
    DeepSpeedOption(
        dest="venv_script",
        flags=("--venv_script",),
        kind="text",
        metavar="FILE",
        help="a shell script to source on each node, such as a virtual environment's bin/activate",
        since="0.17.1",
        ignored_by=FOREIGN,
    ),
    DeepSpeedOption(
        dest="log_level",
        flags=("--log_level",),
        kind="choice",
        choices=("debug", "info", "warning", "error", "critical"),
        default="info",
        help="how much the node launchers log",
        since="0.17.6",
        node_launcher=True,
        unmistakable=False,
    ),
    DeepSpeedOption(
        dest="quiet",
        flags=("-q", "--quiet"),
        kind="flag",
        default=False,
        help="the same as --log_level error",
        since="0.17.6",
        node_launcher=True,
        unmistakable=False,
    ),
)

BY_DEST: dict[str, DeepSpeedOption] = {option.dest: option for option in OPTIONS}
_CORES = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", re.ASCII)
MOST_DEVICES = 4096
"""Devices of a node that --num_gpus may ask for; a larger number is a slip."""


def findings(given: Mapping[str, Value], installed: str | None, *, checking: bool) -> list[Finding]:
    """Judge DeepSpeed's options among themselves.

    `given` holds what the user gave, by dest; `installed` is DeepSpeed's version, None where not known.
    `checking` softens what this version of safelaunch can't start, as nothing is to be started.
    """
    found = [
        _version(BY_DEST[dest], installed or "") for dest in given if not BY_DEST[dest].in_version(installed)
    ]
    if given.get("module") and given.get("no_python"):
        found.append(
            _conflict("--module", "--no_python", "one runs a Python module, the other no Python at all")
        )
    if str(given.get("launcher", "pdsh")).lower() not in LAUNCHERS:
        found.append(_no_launcher(str(given["launcher"])))
    found += _values(given)
    stock = {dest for dest in ("autotuning", "elastic_training") if given.get(dest)}
    found += [
        _not_yet(BY_DEST[dest], checking) for dest in sorted(stock) if BY_DEST[dest].in_version(installed)
    ]
    return [*found, *_useless(given)]


def launcher_findings(given: Mapping[str, Value], *, several: bool, checking: bool) -> list[Finding]:
    """Judge --launcher and what it does with the other options.

    `several` says whether `deepspeed` would use it at all: it does for several nodes, and with --force_multi.
    """
    name = str(given.get("launcher", "pdsh")).lower()
    if name not in FOREIGN:
        return [_ignored("--launcher_args", "they belong to pdsh, which is not used")] * bool(
            given.get("launcher_args")
        )
    if not several or given.get("no_ssh"):
        return [_ignored(f"--launcher {name}", "a single node is started without it, as with deepspeed")]
    stock = _not_yet(BY_DEST["launcher"], checking, f"--launcher {name}")
    used = [BY_DEST[dest] for dest, value in given.items() if value != BY_DEST[dest].default]
    return [
        stock,
        *(
            _ignored(option.spelled, f"DeepSpeed's {name} launcher drops it")
            for option in used
            if name in option.ignored_by
        ),
        *(
            _conflict(
                option.spelled,
                f"--launcher {name}",
                f"DeepSpeed's {name} launcher always takes the whole hostfile",
            )
            for option in used
            if name in option.refused_by
        ),
    ]


def node_launcher_options(given: Mapping[str, Value]) -> tuple[str, ...]:
    """Return those of the user's options that `deepspeed.launcher.launch` gets as they are.

    What each rank runs, its log and the pid file are parts of the plan, and not among them.
    """
    passed = []
    for dest in ("bind_cores_to_rank", "bind_core_list", "log_level", "quiet"):
        value, option = given.get(dest), BY_DEST[dest]
        if value is True:
            passed.append(option.spelled)
        elif isinstance(value, str):
            passed.append(f"{option.spelled}={value}")
    return tuple(passed)


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _ascending(cores: str) -> bool:
    """Whether a list is one that deepspeed/utils/numa.py takes: ranges in order that do not overlap."""
    if not _CORES.fullmatch(cores):
        return False
    last = -1
    for part in cores.split(","):
        low, _, high = part.partition("-")
        if int(low) <= last or int(high or low) < int(low):
            return False
        last = int(high or low)
    return True


def _values(given: Mapping[str, Value]) -> Iterator[Finding]:
    devices, cores = given.get("num_gpus"), given.get("bind_core_list")
    if isinstance(devices, int) and devices > MOST_DEVICES:
        yield _value("--num_gpus", str(devices), f"at most {MOST_DEVICES} devices of a node can be used")
    if isinstance(cores, str) and given.get("bind_cores_to_rank") and not _ascending(cores):
        yield _value("--bind_core_list", cores, "numbers and ranges that go up, such as 0,2-5, are wanted")


def _useless(given: Mapping[str, Value]) -> Iterator[Finding]:
    if "node_rank" in given and not given.get("no_ssh"):
        yield _ignored(
            "--node_rank", "only --no_ssh uses it, and nodes are numbered in the order of the hostfile"
        )
    if "bind_core_list" in given and not given.get("bind_cores_to_rank"):
        yield _ignored("--bind_core_list", "only --bind_cores_to_rank uses it")
    if not given.get("elastic_training"):
        for dest in ("min_elastic_nodes", "max_elastic_nodes"):
            if dest in given:
                yield _ignored(f"--{dest}", "only --elastic_training uses it")


def _version(option: DeepSpeedOption, installed: str) -> Finding:
    gone = option.until is not None and _release(installed) > _release(option.until)
    wish = f"deepspeed<={option.until}" if gone else f"deepspeed>={option.since}"
    history = f"the last release with it is {option.until}" if gone else f"it came with {option.since}"
    return Finding(
        code="cli.version_option",
        severity=Severity.ERROR,
        observed=f"{option.spelled} is no option of DeepSpeed {installed}, which is installed; {history}",
        why="DeepSpeed refuses an option that it does not know",
        fix=f"leave {option.spelled} out, or: pip install '{wish}'",
    )


def _conflict(one: str, other: str, why: str) -> Finding:
    return Finding(
        code="cli.conflict",
        severity=Severity.ERROR,
        observed=f"{one} and {other} exclude each other",
        why=why,
        fix=f"leave out {one} or {other}",
    )


def _value(flag: str, text: str, wanted: str) -> Finding:
    return Finding(
        code="cli.value",
        severity=Severity.ERROR,
        observed=f"{flag} {text!r}: {wanted}",
        why="the node launcher would stop with a bare error on every node",
        fix=f"correct the value of {flag}",
    )


def _no_launcher(name: str) -> Finding:
    near = difflib.get_close_matches(name.lower(), LAUNCHERS, n=1)
    return Finding(
        code="cli.launcher",
        severity=Severity.ERROR,
        observed=f"--launcher {name!r} is none of {', '.join(LAUNCHERS)}",
        why="deepspeed notices only when it starts several nodes",
        fix=f"--launcher {near[0]}" if near else "leave --launcher out",
    )


def _not_yet(option: DeepSpeedOption, checking: bool, named: str = "") -> Finding:
    named = named or option.spelled
    return Finding(
        code="cli.not_yet",
        severity=Severity.WARNING if checking else Severity.ERROR,
        observed=f"this version of safelaunch can't start a job with {named}",
        why="it can check one: the rest of what you gave is judged all the same",
        fix=f"leave {named} out, or start it by the stock command: deepspeed {named} ...",
    )


def _ignored(what: str, why: str) -> Finding:
    return Finding(
        code="cli.option_ignored",
        severity=Severity.WARNING,
        observed=f"{what} has no effect here",
        why=why,
        fix=f"leave {what} out",
    )
