"""The command line of scripts/testbed."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bed.cluster import Bed
from bed.faults import FAULTS
from bed.system import BedError, links, missing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_DIRECTORY = "/var/tmp/safelaunch-testbed"
UNAVAILABLE = 69
"""Exit status after sysexits.h: a bed can't be built on this machine."""

DESCRIPTION = """\
A cluster on one machine: nodes node1, node2 ... are namespaces with their own network, host name, processes,
/tmp, /dev/shm and sshd on port 22. All else they share with this machine, as over a network file system.

  scripts/testbed up                             boot four nodes
  scripts/testbed head ssh node2 hostname        a user's view: names, keys and known_hosts of the cluster
  scripts/testbed head safelaunch check --hostfile hosts
  scripts/testbed fault refuse-port 2            make something go wrong on node2
  scripts/testbed heal                           undo it
  scripts/testbed down                           end it all; nothing is left
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="scripts/testbed", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = os.environ.get("TESTBED_DIR", DEFAULT_DIRECTORY)
    top.add_argument("--dir", default=default, help="where the bed lives; a bed each (%(default)s)")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="build a bed and boot its nodes")
    up.add_argument("-n", "--nodes", type=int, default=4, help="how many (%(default)s)")
    up.add_argument("--subnet", help="first three numbers of an unused /24 (default: one is looked for)")
    up.add_argument("--prefix", help="what names of network interfaces begin with (default: one is made up)")
    up.add_argument(
        "--share",
        action="append",
        default=[],
        metavar="DIR",
        help="a directory below /tmp, /run or "
        "/dev/shm that nodes are to see too (the repository and --dir always are)",
    )
    commands.add_parser("down", help="end the bed and remove all of it")
    status = commands.add_parser("status", help="show nodes, addresses and faults")
    status.add_argument("--json", action="store_true", help="for programs")
    commands.add_parser(
        "check", help=f"say whether a bed can be built here; exit status {UNAVAILABLE} if not"
    )

    _with_command(commands, "sh", "run a command (a shell) inside a node", node=True)
    _with_command(
        commands, "head", "run a command (a shell) as the cluster's user, on this machine", node=False
    )

    fault = commands.add_parser("fault", help="make something go wrong; alone: list what can")
    fault.add_argument("name", nargs="?", metavar="NAME")
    fault.add_argument("node", nargs="?", type=int, metavar="N")
    fault.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    heal = commands.add_parser("heal", help="undo all faults of some nodes, or of all")
    heal.add_argument("node", nargs="*", type=int, metavar="N")
    node_up = commands.add_parser("node-up", help="boot a node that is down")
    node_up.add_argument("node", type=int, metavar="N")
    node_down = commands.add_parser("node-down", help="pull a node's plug")
    node_down.add_argument("node", type=int, metavar="N")
    node_down.add_argument("--silent", action="store_true", help="cut its cable first: peers get no farewell")
    slurm = commands.add_parser("slurm", help="start or end a real Slurm on the nodes")
    slurm.add_argument("state", choices=["up", "down"])
    return top


def _with_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, *, node: bool
) -> None:
    command = commands.add_parser(name, help=text)
    if node:
        command.add_argument("node", type=int, metavar="N")
    command.add_argument("argv", nargs=argparse.REMAINDER, metavar="CMD ...")


def main(argv: Sequence[str]) -> int:
    """Carry out one command line and return its exit status."""
    options = parser().parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _give_up)
    try:
        return _carry_out(options, Bed(Path(options.dir).resolve()))
    except BedError as error:
        sys.stderr.write(f"testbed: {error}\n")
        return UNAVAILABLE if missing() else 1
    except KeyboardInterrupt:
        return 130


def _give_up(number: int, _frame: FrameType | None) -> None:
    # An exception: `up` takes back what it has built so far.
    raise SystemExit(128 + number)


def _carry_out(options: argparse.Namespace, bed: Bed) -> int:
    command = options.command
    if command == "check":
        lacking = missing()
        print("\n".join(f"missing: {text}" for text in lacking) or "a test bed can be built here")
        return UNAVAILABLE if lacking else 0
    if command == "up":
        bed.up(
            options.nodes,
            subnet=options.subnet,
            prefix=options.prefix,
            shares=[str(REPOSITORY), *options.share],
        )
        _print_status(bed)
    elif command == "down":
        bed.down()
    elif command == "status":
        print(json.dumps(bed.status(), indent=1)) if options.json else _print_status(bed)
    elif command == "sh":
        _become(bed.node(options.node).inside(options.argv or ["bash", "-i"]), dict(os.environ))
    elif command == "head":
        _become(bed.head_command(options.argv or ["bash", "-i"]), bed.head_environment())
    elif command == "fault":
        _fault(options, bed)
    elif command == "heal":
        bed.heal(options.node)
    elif command == "node-up":
        bed.node_up(options.node)
    elif command == "node-down":
        bed.node(options.node).down(links(), silent=options.silent)
    else:
        bed.slurm.up() if options.state == "up" else bed.slurm.down()
    return 0


def _become(argv: Sequence[str], environment: dict[str, str]) -> None:
    """Turn this process into the command: its pid, its terminal, its exit status."""
    os.execve(argv[0], list(argv), environment)


def _fault(options: argparse.Namespace, bed: Bed) -> None:
    if options.name is None:
        for fault in FAULTS.values():
            print(f"{fault.name + ' N ' + fault.usage:32} {fault.text}")
    elif options.node is None:
        raise BedError(f"usage: scripts/testbed fault {options.name} N")
    else:
        bed.fault(options.name, options.node, options.arguments)


def _print_status(bed: Bed) -> None:
    status = bed.status()
    print(f"test bed in {status['directory']}, network {status['subnet']}, head {status['head']}")
    for node in status["nodes"]:
        state = "up" if node["pid"] else "down"
        faults = f"  faults: {'; '.join(node['faults'])}" if node["faults"] else ""
        print(f"  {node['name']:8} {node['address']:16} {state}{faults}")
    print(f"  shared directory: {status['shared']}")
    if status["slurm"]:
        print(f"  Slurm: export SLURM_CONF={status['slurm']}")
