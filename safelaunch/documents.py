"""plan.json and outcome.json: values to documents. No secret gets past here."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

from safelaunch import __version__, timeouts
from safelaunch.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safelaunch.job import Job
    from safelaunch.launch import Rendezvous
    from safelaunch.plan import Plan, Variable

REDACTED = "<redacted>"
_SECRET_FLAG = re.compile(r"^--?[\w.-]*(token|secret|passw|api[-_]?key|credential)[\w.-]*$", re.IGNORECASE)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without the values of `--env` and of options whose name speaks of a secret."""
    result: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        before = result[-1] if result else ""
        shown = argument
        if equals and (before == "--env" or _SECRET_FLAG.match(name)):
            shown = f"{name}={REDACTED}"
        elif name == "--env" and "=" in value:
            shown = f"--env={value.partition('=')[0]}={REDACTED}"
        elif _SECRET_FLAG.match(before) and not argument.startswith("-"):
            shown = REDACTED
        result.append(shown)
    return result


def shell(arguments: Sequence[str]) -> str:
    """Return a command line as one would type it."""
    return " ".join(shlex.quote(argument) for argument in arguments)


def plan_document(
    plan: Plan,
    *,
    run_id: str,
    command: Sequence[str],
    meet: Rendezvous,
    variables: Mapping[str, Mapping[str, Variable]],
    versions: Mapping[str, str | None],
) -> dict[str, Any]:
    """Return plan.json; `variables` are the ranks' variables by host and name, `command` our argv."""
    first = next(iter(variables.values()))
    timeout = first["DEEPSPEED_TIMEOUT"].value if "DEEPSPEED_TIMEOUT" in first else None
    return {
        "schema": "safelaunch.plan/1",
        "run_id": run_id,
        "safelaunch": __version__,
        "versions": dict(versions),
        "command": redact_arguments(command),
        "cwd": plan.cwd,
        "interpreter": plan.interpreter,
        "hostfile": plan.hostfile,
        "transport": plan.transport,
        "world_size": plan.world_size,
        "nodes": [
            {
                "name": node.name,
                "node_rank": node.node_rank,
                "slots": list(node.slots),
                "ranks": list(node.ranks),
                "environment": [_variable(v) for v in variables.get(node.name, {}).values()],
            }
            for node in plan.nodes
        ],
        "only_node": plan.only_node,
        "ssh_port": plan.ssh_port,
        "master": {
            "address": meet.address,
            "port": meet.port,
            "address_reason": "given by the user" if plan.master_addr else "every other node reaches it",
            "port_reason": "given by the user" if plan.master_port else "free on the first node",
        },
        "program": _program(plan),
        "launcher_options": list(plan.launcher_options),
        "unset": list(plan.unset),
        "timeouts": timeouts.ladder(plan.limits, timeout),
        "forced": plan.force,
    }


def _program(plan: Plan) -> dict[str, Any] | None:
    program = plan.program
    if program is None:
        return None
    args = redact_arguments(program.args)
    return {"script": program.script, "kind": program.kind, "args": args, "local_rank": program.local_rank}


def _variable(variable: Variable) -> dict[str, str]:
    value = redact(variable.name, variable.value)
    return {"name": variable.name, "value": value, "origin": variable.origin}


def outcome_document(
    verdict: Mapping[str, Any], *, run_id: str, started: float, ended: float, job: Job | None
) -> dict[str, Any]:
    """Return outcome.json; times are UTC seconds since 1970, corrected by the nodes' clock offsets."""
    ranks = []
    survivors: list[dict[str, Any]] = []
    if job is not None:
        survivors = [{"host": host, "pid": pid} for host, pids in job.survivors.items() for pid in pids]
        for rank in job.ranks.values():
            end = rank.exit
            ranks.append(
                {
                    "rank": rank.rank,
                    "host": rank.host,
                    "pid": rank.pid,
                    "started": rank.started,
                    "ended": end.time if end else None,
                    "status": end.status if end else None,
                    "signal": end.signal if end else None,
                }
            )
    attempt = {
        "number": 1,
        "started": started,
        "ended": ended,
        "status": verdict["status"],
        "exit_status": verdict["exit_status"],
        "summary": verdict["summary"],
    }
    return {
        "schema": "safelaunch.outcome/1",
        "run_id": run_id,
        "reasons": [],
        **verdict,
        "ranks": ranks,
        "attempts": [attempt],
        "survivors": survivors,
        "unconfirmed": list(job.unconfirmed) if job is not None else [],
        "started": started,
        "ended": ended,
        "seconds": ended - started,
    }
