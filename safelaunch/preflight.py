"""The preflight: open all nodes, let the probe look at each, let them try to reach each other, and judge.

The connections stay open for the launch. What is decided here by pure functions stands in `checks`.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from safelaunch import catalogue, checks
from safelaunch.checks import network, reach
from safelaunch.facts import ENVIRONMENT, Cluster, NodeFacts, is_loopback
from safelaunch.findings import Finding, Severity, errors
from safelaunch.probing import Conversation, Gate
from safelaunch.transport import program
from safelaunch.transport.base import Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from safelaunch.plan import Level, Node, Plan
    from safelaunch.transport.base import Session, Transport

DEFAULT_PORT = 29_500
"""The master port of DeepSpeed and torch where the user names none."""
PROBE_SECONDS, GPU_SECONDS = 10.0, 30.0
"""What a collector may take; nvidia-smi starts the driver of eight GPUs where no daemon keeps it loaded."""
LINGER_SECONDS = 120.0
"""How long a probe lives that nobody speaks to: long enough for rank 0 to listen on the port it reserves."""
DIAL_SECONDS = 3.0
"""What connections between nodes may take; looking up names has as long."""
ANSWER_SECONDS = 10.0
"""What the answer of a node may take beyond the time that its work may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """A host as it stands in the document; `seconds` until all was known, None if it was not contacted.

    `state` is failed where the host could not be reached or an error names it.
    """

    name: str
    slots: int
    state: str
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What the preflight found, and what it leaves for the launch.

    `sessions` are still open. `clock_offsets` are seconds that a node's clock is ahead of ours; `timing` is
    seconds of each stage. `master_addr` and `master_port` are the user's own where the plan has them.
    """

    level: Level
    findings: tuple[Finding, ...]
    hosts: tuple[HostState, ...]
    master_addr: str
    master_port: int
    clock_offsets: Mapping[str, float]
    sessions: Mapping[str, Session]
    timing: Mapping[str, float]

    def document(self, static: Iterable[Finding] = ()) -> dict[str, Any]:
        """Return preflight.json; `static` are the findings of the validation that went before."""
        return _document([*static, *self.findings], self.hosts, self.level, self.timing)


def static_document(findings: Iterable[Finding], nodes: Iterable[Node], level: Level) -> dict[str, Any]:
    """Return preflight.json of a validation after which no node was contacted."""
    hosts = [
        HostState(name=node.name, slots=len(node.slots), state="not_contacted", seconds=None)
        for node in nodes
    ]
    return _document(list(findings), hosts, level, {})


def _document(
    findings: Sequence[Finding], hosts: Iterable[HostState], level: Level, timing: Mapping[str, float]
) -> dict[str, Any]:
    status = catalogue.exit_status(findings)
    return {
        "schema": "safelaunch.preflight/1",
        "ok": status == 0,
        "exit_status": status,
        "level": level,
        "hosts": [
            {"name": host.name, "slots": host.slots, "state": host.state, "seconds": host.seconds}
            for host in hosts
        ],
        "findings": [finding.document() for finding in findings],
        "timing": dict(timing),
    }


def run_preflight(
    plan: Plan,
    transport: Transport,
    *,
    on_progress: Callable[[str, str], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> Preflight:
    """Open every host of the plan, look at it as far as the plan's level says, and judge.

    `on_progress(host, what)` is called from several threads, `what` being connected, seen or failed. Problems
    are findings; an exception of the transport (InterruptedError and the like) passes through.
    """
    run = _Run(plan, transport, on_progress or (lambda _host, _what: None), clock, wall)
    run.open_all()
    if plan.level == "off":
        master = _without_probe(run)
        return run.conclude(master, checks.run(run.cluster(), reach.CHECKS))
    run.settle()
    port = run.measure()
    cluster = run.cluster()
    address = network.master_address(cluster) or _without_probe(run)[0]
    return run.conclude((address, port), checks.run(cluster))


class _Run:
    """One preflight: its conversations, in the order of the plan, and its stop-watch."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        on_progress: Callable[[str, str], None],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.plan = plan
        self.names = [node.name for node in plan.local_nodes]
        self.sessions: dict[str, Session] = {}
        self.unreachable: dict[str, Unreachable] = {}
        self.talks: dict[str, Conversation] = {}
        self.measured: dict[str, dict[str, Any]] = {name: {} for name in self.names}
        self.failed_measures: dict[str, dict[str, str]] = {name: {} for name in self.names}
        self._transport = transport
        self._progress = on_progress
        self._clock = clock
        self._wall = wall
        self._started = self._mark = clock()
        self._timing: dict[str, float] = {}
        self._all_seen = Gate(len(self.names))
        self._marker = program.new_marker()

    def open_all(self) -> None:
        """Open all hosts; the probe of each starts as soon as it is open, unless the preflight is off."""
        nodes = {node.name: index for index, node in enumerate(self.plan.nodes)}
        command = program.command("probe", self.plan.interpreter)

        def on_open(host: str, result: Session | Unreachable) -> None:
            if isinstance(result, Unreachable):
                self.unreachable[host] = result
                self._progress(host, "failed")
                self._all_seen.count_down()
                return
            self.sessions[host] = result
            self._progress(host, "connected")
            if self.plan.level != "off":
                talk = Conversation(result, self._marker, clock=self._clock, wall=self._wall)
                self.talks[host] = talk
                config = _config(self.plan, nodes[host], self._marker)
                talk.start(command, program.payload("probe", config), self._seen(host))

        self._transport.open(self.names, on_open, timeout=self.plan.limits.ssh_timeout)
        self._stage("connect")

    def _seen(self, host: str) -> Callable[[bool], None]:
        def seen(complete: bool) -> None:
            self._progress(host, "seen" if complete else "failed")
            self._all_seen.count_down()

        return seen

    def settle(self) -> None:
        """Wait for all probes; give up those that are later than any collector may be."""
        begin = self._clock()
        self._all_seen.wait(max(PROBE_SECONDS, GPU_SECONDS) + ANSWER_SECONDS)
        for host, talk in self.talks.items():
            if talk.complete:
                continue
            if not talk.ended:
                talk.give_up(self._clock() - begin)
            self.unreachable[host] = reach.probe_failure(
                host,
                status=talk.status,
                output=talk.output(),
                late=talk.late,
                seconds=self._clock() - self._started,
            )
        self._stage("probe")

    @property
    def healthy(self) -> dict[str, Conversation]:
        """The conversations that can be asked."""
        return {
            host: self.talks[host] for host in self.names if host in self.talks and self.talks[host].complete
        }

    def measure(self) -> int:
        """Let the nodes listen and dial; return the master port. What was measured becomes facts."""
        token = secrets.token_hex(8)
        master = self.plan.nodes[0].name
        wanted = self.plan.master_port or DEFAULT_PORT
        self._ask({host: [{"do": "clock"}] for host in self.healthy})
        answer = self._listen(master, wanted, token)
        if answer.get("error") and self.plan.master_port is None:
            answer = self._listen(master, 0, token)
        port = answer.get("port")
        if master in self.healthy:
            self._keep(master, "port", {**answer, "wanted": wanted} if answer else None)
        before = self.cluster()
        targets = [[address, port] for address in network.candidates(before)] if port else []
        names = network.names_to_resolve(before)
        dial = {"do": "dial", "targets": targets, "timeout": DIAL_SECONDS, "token": token}
        self._ask({host: _questions(dial, names[host]) for host in self.healthy}, DIAL_SECONDS)
        for host, talk in self.healthy.items():
            self._keep(host, "dial", talk.reply("dial", "results") if targets else [])
            self._keep(host, "peers", talk.reply("resolve") if names[host] else {"results": {}, "late": []})
            self._keep(host, "clock", talk.clock())
        if master in self.healthy and port:
            self._ask({master: [{"do": "unlisten"}]})
        for host, talk in self.healthy.items():
            if host != master:  # there the probe stays for a while, to reserve the port
                talk.close()
        self._stage("network")
        return int(port or wanted)

    def _stage(self, name: str) -> None:
        """Write down how long the stage took that ends here."""
        now = self._clock()
        self._timing[name] = now - self._mark
        self._mark = now

    def _listen(self, master: str, port: int, token: str) -> dict[str, Any]:
        if master not in self.healthy:
            return {}
        self._ask({master: [{"do": "listen", "port": port, "token": token}]})
        return self.healthy[master].reply("listen") or {}

    def _ask(self, commands: Mapping[str, Sequence[Mapping[str, Any]]], work: float = 0.0) -> None:
        gate = Gate(len(commands))
        for host, wanted in commands.items():
            self.talks[host].ask(wanted, gate.count_down)
        gate.wait(work + ANSWER_SECONDS)

    def _keep(self, host: str, fact: str, value: Any) -> None:
        if value is None:
            self.failed_measures[host][fact] = "no answer from the probe, which had answered before"
        else:
            self.measured[host][fact] = value

    def cluster(self) -> Cluster:
        """Return all that is known by now."""
        hosts: dict[str, NodeFacts | Unreachable] = {}
        for host in self.names:
            if host in self.unreachable:
                hosts[host] = self.unreachable[host]
            elif host in self.talks:
                known = self.talks[host].node_facts()
                facts = {**known.facts, **self.measured[host]}
                failures = {**known.errors, **self.failed_measures[host]}
                hosts[host] = replace(known, facts=facts, errors=failures)
            else:
                hosts[host] = _unprobed(self.sessions[host])
        return Cluster(plan=self.plan, hosts=hosts)

    def conclude(self, master: tuple[str, int], findings: Sequence[Finding]) -> Preflight:
        """Put everything together."""
        findings = [*findings, *_not_looked_at(self.plan, master)]
        self._stage("judge")
        bad = {host for finding in errors(findings) for host in finding.hosts} | set(self.unreachable)
        hosts = [
            HostState(
                name=node.name,
                slots=len(node.slots),
                state="failed" if node.name in bad else "ok",
                seconds=self._seconds(node.name),
            )
            for node in self.plan.local_nodes
        ]
        lost = {host for host, talk in self.talks.items() if talk.late is not None}
        offsets = {
            host: facts["clock"]["offset"] for host, facts in self.measured.items() if "clock" in facts
        }
        return Preflight(
            level=self.plan.level,
            findings=tuple(findings),
            hosts=tuple(hosts),
            master_addr=master[0],
            master_port=master[1],
            clock_offsets=offsets,
            sessions={
                host: self.sessions[host] for host in self.names if host in self.sessions and host not in lost
            },
            timing={**self._timing, "total": self._clock() - self._started},
        )

    def _seconds(self, host: str) -> float:
        if host in self.unreachable:
            return self.unreachable[host].seconds
        talk = self.talks.get(host)
        return self.sessions[host].seconds if talk is None else talk.settled - self._started


def _config(plan: Plan, index: int, marker: str) -> dict[str, Any]:
    """Return what the probe of a node is told (docs/reference/node-programs.md)."""
    ours = plan.variables_for(plan.nodes[index].name)
    return {
        "marker": marker,
        "deadline": PROBE_SECONDS,
        "deadlines": {"gpus": GPU_SECONDS},
        "linger": LINGER_SECONDS,
        "interpreter": plan.interpreter,
        "cwd": plan.cwd,
        "program": {"kind": plan.program.kind, "script": plan.program.script} if plan.program else None,
        "venv_script": plan.venv_script,
        "files": list(plan.deepspeed_configs),
        "places": [
            *(["checkpoints", path] for path in plan.checkpoint_dirs),
            *([["rank logs", plan.rank_log_dir]] if plan.rank_log_dir else []),
        ],
        "environment": list(ENVIRONMENT),
        "env": {name: ours[name].value for name in ENVIRONMENT if name in ours},
        "unset": [name for name in plan.unset if name in ENVIRONMENT],
    }


def _questions(dial: Mapping[str, Any], names: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return what a node is asked at once: its clock, and what there is to dial and to look up."""
    resolve = {"do": "resolve", "names": names}
    return [{"do": "clock"}, *([dial] if dial["targets"] else []), *([resolve] if names else [])]


def _unprobed(session: Session) -> NodeFacts:
    return NodeFacts(
        host=session.host,
        address=session.address,
        host_key=session.host_key,
        seconds=session.seconds,
        remarks=session.remarks,
    )


def _without_probe(run: _Run) -> tuple[str, int]:
    """Return where the ranks will meet as far as one can tell without looking at the nodes."""
    plan, first = run.plan, run.plan.nodes[0].name
    address = plan.master_addr or ("127.0.0.1" if len(plan.nodes) == 1 else "")
    if not address:
        session = run.sessions.get(first)
        reached = session.address if session is not None else ""
        address = reached if reached and not is_loopback(reached) else first
    return address, plan.master_port or DEFAULT_PORT


def _not_looked_at(plan: Plan, master: tuple[str, int]) -> list[Finding]:
    """Say what this preflight could not know by its nature."""
    found = []
    why = "What was not looked at does not count as fit."
    if plan.level == "off":
        observed = (
            "the preflight is off: nothing was looked at on the nodes, nor whether they reach"
            f" {master[0]}:{master[1]} and that port is free"
        )
        found.append(_not_checked("preflight.level", observed, why, "--preflight quick"))
    elif plan.level != "quick":
        observed = (
            f"this release looks at what '--preflight quick' looks at, also for '{plan.level}': neither was"
            " torch imported nor a collective run on the nodes"
        )
        found.append(
            _not_checked("preflight.level", observed, why, "--preflight quick   # says what it does")
        )
    if plan.only_node is not None and len(plan.nodes) > 1:
        observed = f"--no_ssh: only {plan.nodes[plan.only_node].name} was looked at, which is this machine"
        why = "Whether the nodes reach the master, and agree with each other, is not known."
        fix = f"safelaunch check --hostfile {plan.hostfile or 'HOSTFILE'}   # where ssh is possible"
        found.append(_not_checked("net.master_unreachable", observed, why, fix))
    return found


def _not_checked(code: str, observed: str, why: str, fix: str) -> Finding:
    return Finding(code=code, severity=Severity.NOT_CHECKED, observed=observed, why=why, fix=fix)
