"""One run from validation to outcome: validate, preflight, launch, supervise, conclude."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, TextIO

from safelaunch import catalogue, diagnose, documents, runs, static, timeouts, verdicts
from safelaunch import preflight as preflights
from safelaunch.console import Console
from safelaunch.hang import Hangs
from safelaunch.job import Job, Note
from safelaunch.launch import Links, Rendezvous, agent_config
from safelaunch.output import RunOutput
from safelaunch.supervise import STOP_SIGNALS, Events, Watch, signals_as_events, supervise
from safelaunch.transport import choose

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from safelaunch.arguments import Invocation
    from safelaunch.findings import Finding
    from safelaunch.job import Failure
    from safelaunch.plan import Plan, Variable
    from safelaunch.preflight import Preflight
    from safelaunch.static import Static
    from safelaunch.transport.base import Transport

LOG_TAIL = 65_536
"""Bytes of a failed rank's log that are searched for its traceback."""


class InterruptedRunError(Exception):
    """A stop signal came before there was a job to stop."""

    def __init__(self, signum: int) -> None:
        """Keep the signal's number."""
        super().__init__(f"signal {signum}")
        self.signum = signum


def check(invocation: Invocation) -> int:
    """Validate and preflight; start nothing."""
    checked = _validate(invocation)
    if invocation.flags.get("show_settings"):
        print(checked.settings_text())  # noqa: T201 - asked for on stdout
        return catalogue.exit_status(checked.findings)
    return _check(checked, _console(checked))


def _check(checked: Static, console: Console) -> int:
    plan = checked.plan
    if plan is None or catalogue.exit_status(checked.findings) or plan.level == "off":
        nodes = plan.nodes if plan is not None else ()
        document = preflights.static_document(checked.findings, nodes, checked.settings.preflight)
        findings: Sequence[Finding] = checked.findings
    else:
        transport = _transport(plan)
        try:
            preflight = preflights.run_preflight(plan, transport)
        finally:
            transport.close()
        findings = [*checked.findings, *preflight.findings]
        document = preflight.document(checked.findings)
    if checked.settings.json:
        print(json.dumps(document, indent=2))  # noqa: T201
    else:
        for note in checked.notes:
            console.say(note)
        console.findings(findings)
        console.say(_check_summary(document))
    return int(document["exit_status"])


def _check_summary(document: dict[str, Any]) -> str:
    counts = {
        severity: sum(finding["severity"] == severity for finding in document["findings"])
        for severity in ("error", "warning", "not_checked")
    }
    words = [
        f"{n} {name.replace('_', ' ')}{'s' * (n != 1 and name != 'not_checked')}"
        for name, n in counts.items()
        if n
    ]
    hosts = len(document["hosts"])
    away = {
        name
        for finding in document["findings"]
        if finding["code"].startswith("ssh.") and finding["severity"] == "error"
        for name in finding["hosts"]
    }
    reached = sum(host["state"] != "not_contacted" and host["name"] not in away for host in document["hosts"])
    reach = f"{reached} of {hosts} node{'s' * (hosts != 1)} reached" if hosts else "no node contacted"
    verdict = "fit to run" if document["ok"] else "not fit to run"
    return f"{verdict}: {', '.join(words) or 'nothing found'}; {reach}"


def launch(invocation: Invocation) -> int:
    """Validate, preflight, launch and supervise; return the exit status of the run."""
    checked = _validate(invocation)
    console = _console(checked)
    if checked.settings.check_only:
        return _check(checked, console)
    console.findings(checked.findings)
    status = catalogue.exit_status(checked.findings)
    plan = checked.plan
    if plan is None or plan.program is None or (status and not plan.force):
        console.say("nothing was started", "bold red")
        return status or catalogue.CONFIGURATION
    for note in checked.notes:
        console.say(note)
    if checked.settings.dry_run:
        print(_dry_run(plan))  # noqa: T201 - asked for on stdout
        return 0
    root = runs.root(os.environ)
    run, lock = runs.create(root, plan.program.script, checked.settings.run_dir)
    try:
        with contextlib.closing(lock), open(run.file("events.jsonl"), "a", encoding="utf-8") as events:
            outcome = _Running(run, plan, checked, console, Recorder(events), invocation.argv).whole_run()
    except Exception as error:
        error.run_directory = run.path  # type: ignore[attr-defined]  # tells the boundary where to put the traceback
        raise
    finally:
        runs.prune(root, checked.settings.keep_runs)
    if checked.settings.json:
        console.line(json.dumps(outcome))
    return int(outcome["exit_status"])


def _console(checked: Static) -> Console:
    chosen = checked.settings
    return Console(sys.stderr, plain=chosen.plain or chosen.no_color, verbosity=chosen.verbose)


class Recorder:
    """Writes events.jsonl: one object a line, flushed at once, so that a kill loses nothing."""

    def __init__(self, stream: TextIO) -> None:
        """Append to an open text stream."""
        import structlog  # noqa: PLC0415 - only a run writes events

        self._log = structlog.wrap_logger(
            structlog.WriteLogger(stream), processors=[structlog.processors.JSONRenderer(ensure_ascii=True)]
        )

    def note(self, note: Note) -> None:
        """Write one event."""
        fields = {"host": note.host, "rank": note.rank, **note.fields}
        self._log.info(note.event, ts=time.time(), level=note.level, **fields)


@dataclass(frozen=True, slots=True)
class _Running:
    """A run in its directory, from preflight to outcome."""

    run: runs.Run
    plan: Plan
    checked: Static
    console: Console
    recorder: Recorder
    argv: Sequence[str]

    def whole_run(self) -> dict[str, Any]:
        """Run all stages; whatever happens, outcome.json is written and no connection stays open."""
        started = time.time()
        job: Job | None = None
        transport = _transport(self.plan)
        self.recorder.note(Note("run_started", fields={"run_id": self.run.run_id}))
        try:
            with _signals_as_exceptions():
                preflight = self._preflight(transport)
            refused = catalogue.exit_status(preflight.findings)
            # No --force starts ranks on a node that can't be reached.
            away = [node.name for node in self.plan.local_nodes if node.name not in preflight.sessions]
            if away or (refused and not self.plan.force):
                refused = refused or catalogue.PREFLIGHT
                summary = "the preflight found the nodes unfit; nothing was started"
                return self._conclude(_no_job("refused", refused, summary), None, started)
            job = self._job(preflight)
            verdict = self._supervised(job, transport, preflight)
        except InterruptedRunError as error:
            name = diagnose.signal_name(error.signum)
            summary = f"stopped by {name} before anything was started"
            return self._conclude(_no_job("interrupted", 128 + error.signum, summary), None, started)
        except Exception as error:
            summary = f"internal error of safelaunch: {type(error).__name__}: {error}"
            self._conclude(_no_job("internal_error", diagnose.INTERNAL, summary), job, started)
            raise
        finally:
            transport.close()
        return self._conclude(verdict, job, started)

    def _preflight(self, transport: Transport) -> Preflight:
        preflight = preflights.run_preflight(self.plan, transport)
        self.run.write("preflight", preflight.document(self.checked.findings))
        self.console.findings(preflight.findings)
        self.recorder.note(Note("preflight_ended", fields={"timing": dict(preflight.timing)}))
        return preflight

    def _job(self, preflight: Preflight) -> Job:
        limits = self.plan.limits
        return Job(
            self.plan.local_nodes,
            grace=limits.grace,
            reconnect_grace=limits.reconnect_grace,
            clock_offsets=preflight.clock_offsets,
            now=time.time(),
        )

    def _supervised(self, job: Job, transport: Transport, preflight: Preflight) -> dict[str, Any]:
        plan = self.plan
        meet = Rendezvous(address=preflight.master_addr, port=preflight.master_port)
        variables = {node.name: self._variables(node.name) for node in plan.local_nodes}
        self._write_plan(meet, variables)
        output = RunOutput(
            self.run.file("logs"),
            sys.stdout.buffer,
            sys.stderr.buffer,
            echo_launcher=self.checked.settings.verbose > 0,
        )
        events: Events = Events()

        def emit(kind: str, host: str, value: Any) -> None:
            events.put((kind, host, value))

        links = Links(preflight.sessions, transport, plan, self.run.run_id, emit)
        watch = self._watch()
        self.console.say(_start_line(plan, meet))
        try:
            with signals_as_events(events):
                links.start(
                    {
                        node.name: agent_config(plan, node, meet, variables[node.name], self.run.run_id)
                        for node in plan.local_nodes
                    }
                )
                supervise(job, links, events, output, self.recorder.note, watch)
        finally:
            if not job.over:  # only an internal error gets here; nothing may stay behind for it
                for node in plan.local_nodes:
                    links.tell(
                        node.name, {"do": "stop", "grace": plan.limits.grace, "reason": "internal error"}
                    )
            links.close()
            output.close()
        return self._verdict(job, watch)

    def _watch(self) -> Watch | None:
        chosen, plan = self.checked.settings, self.plan
        # With --no_ssh the other nodes' ranks are out of sight, and the one at fault may be among them.
        if chosen.hang_timeout == "off" or plan.only_node is not None:
            return None
        hangs = Hangs(
            {rank: node.name for node in plan.local_nodes for rank in node.ranks},
            timeout=None if chosen.hang_timeout == "auto" else float(chosen.hang_timeout),
            busy_factor=chosen.busy_factor,
            now=time.monotonic(),
        )
        return Watch(hangs, self.run.keep_evidence, kill=chosen.on_hang == "kill")

    def _variables(self, host: str) -> dict[str, Variable]:
        variables = self.plan.variables_for(host)
        taken = {*variables, *os.environ} if self.plan.transport == "local" else set(variables)
        for tuned in timeouts.debug_settings(taken, _version("torch"), self.checked.settings.verbose):
            variables[tuned.name] = tuned
        return variables

    def _write_plan(self, meet: Rendezvous, variables: dict[str, dict[str, Variable]]) -> None:
        document = documents.plan_document(
            self.plan,
            run_id=self.run.run_id,
            command=["safelaunch", *self.argv],
            meet=meet,
            variables=variables,
            versions={name: _version(name) for name in ("deepspeed", "torch")},
        )
        self.run.write("plan", document)

    def _verdict(self, job: Job, watch: Watch | None) -> dict[str, Any]:
        failed = [failure.rank for failure in job.failures if failure.rank is not None]
        logs = {rank: _tail(self.run.file("logs", f"rank-{rank}.err")) for rank in failed}
        node_logs = {host: _tail(self.run.file("logs", f"node-{host}.log")) for host in job.nodes}
        cause, behind = job.root_cause(), None
        if watch is not None and cause is not None and cause.rank is not None and _may_follow(cause):
            behind = verdicts.at_failure(cause.rank, watch.hangs.views, watch.hangs.members)
        return diagnose.outcome(job, logs, node_logs, behind)

    def _conclude(self, verdict: dict[str, Any], job: Job | None, started: float) -> dict[str, Any]:
        outcome = documents.outcome_document(
            verdict, run_id=self.run.run_id, started=started, ended=time.time(), job=job
        )
        self.run.write("outcome", outcome)
        fields = {key: outcome[key] for key in ("status", "exit_status", "summary")}
        self.recorder.note(
            Note("run_ended", "info" if outcome["exit_status"] == 0 else "error", fields=fields)
        )
        self.console.verdict(outcome, self.run.path)
        return outcome


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Turn stop signals into InterruptedRunError as long as the block runs."""

    def throw(signum: int, _frame: FrameType | None) -> None:
        raise InterruptedRunError(signum)

    wanted = [s for s in STOP_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, throw) for signum in wanted}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _validate(invocation: Invocation) -> Static:
    return static.validate(invocation, os.environ, os.getcwd())


def _transport(plan: Plan) -> Transport:
    hosts = [node.name for node in plan.local_nodes]
    return choose.make(
        plan.transport,
        hosts,
        ssh_port=plan.ssh_port,
        fanout=plan.limits.fanout,
        environ=os.environ,
        home=os.path.expanduser("~"),
    )


def _start_line(plan: Plan, meet: Rendezvous) -> str:
    nodes = plan.local_nodes
    count = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
    ranks = sum(len(node.slots) for node in nodes)
    return f"starting {ranks} rank{'s' * (ranks != 1)} on {count}, master {meet.address}:{meet.port}"


def _dry_run(plan: Plan) -> str:
    meet = Rendezvous(address=plan.master_addr or "<chosen in the preflight>", port=plan.master_port or 29500)
    lines = []
    for node in plan.local_nodes:
        config = agent_config(plan, node, meet, {}, "<run id>")
        command = [plan.interpreter, "-u", "-m", "deepspeed.launcher.launch", *config["launcher_options"]]
        program = [*config["program"]["argv"], *documents.redact_arguments(config["program"]["args"])]
        ranks = ", ".join(f"{rank}: device {slot}" for rank, slot in zip(node.ranks, node.slots, strict=True))
        lines += [
            f"{node.name}  ranks {ranks}",
            f"  {documents.shell(command)}",
            f"  each rank: {documents.shell(program)}",
        ]
    return "\n".join(lines)


def _no_job(status: str, exit_status: int, summary: str) -> dict[str, Any]:
    nobody: dict[str, Any] = {"culprit": None, "first_failure": None, "others": []}
    return {**nobody, "status": status, "exit_status": exit_status, "summary": summary}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _may_follow(cause: Failure) -> bool:
    """Tell whether other ranks can lie behind a failure: torch raises or aborts, it does not kill."""
    return cause.exit is not None and cause.exit.signal in (None, signal.SIGABRT)


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - LOG_TAIL))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
