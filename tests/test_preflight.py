"""The preflight over real processes of this machine, each standing for a node."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from safelaunch import preflight, runs
from safelaunch.findings import Finding, Severity, Where
from safelaunch.plan import Node, Plan, Program, Variable
from safelaunch.preflight import run_preflight, static_document
from safelaunch.transport.base import ChannelLostError, Remark, Unreachable
from safelaunch.transport.local import LocalTransport

SCHEMA = json.loads((Path(runs.__file__).parent / "schemas" / "preflight.json").read_text())
LONG = 60
ACCEPTED = {
    "hostfile.alias": "off",
    "net.own_name_loopback": "off",
    "storage.full": "off",
    "shm.small": "off",
}
"""What one machine under several names must show, and what depends on the machine that runs the tests."""


class Nodes:
    """A transport over LocalTransport whose nodes can be given faults, by host name.

    `start` maps a command line to another one, which is how a shell start-up or a missing Python looks.
    """

    name = "nodes"

    def __init__(self, *, environ=None, unreachable=(), start=None, remarks=(), address="", seconds=None):
        self._local = LocalTransport({**os.environ, **(environ or {})}, os.getcwd())
        self._unreachable = unreachable
        self._start = start or {}
        self._remarks = remarks
        self._address = address
        self._seconds = seconds or {}
        self.channels = []

    def open(self, hosts, on_open, *, timeout):
        def opened(host, session):
            if host in self._unreachable:
                fault = Unreachable(
                    host=host, code="ssh.timeout", observed="o", why="w", fix="f", seconds=1.0
                )
                on_open(host, fault)
                return
            session.remarks = self._remarks
            session.address = self._address
            session.seconds = self._seconds.get(host, session.seconds)
            start = session.start

            def changed(command):
                channel = start(self._start.get(host, lambda line: line)(command))
                self.channels.append(channel)
                return channel

            session.start = changed
            # As with real connections, hosts are reported from threads of their own.
            thread = threading.Thread(target=on_open, args=(host, session))
            thread.start()
            thread.join()

        self._local.open(hosts, opened, timeout=timeout)

    def close(self):
        self._local.close()


@pytest.fixture
def nodes():
    made = []

    def make(**options):
        made.append(Nodes(**options))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


def make_plan(tmp_path, *hosts, slots=1, **fields):
    (tmp_path / "train.py").write_text("import model\n")
    (tmp_path / "model.py").write_text("")
    rows = [
        Node(name=host, slots=tuple(range(slots)), node_rank=rank, first_rank=rank * slots)
        for rank, host in enumerate(hosts)
    ]
    plan = Plan(
        nodes=tuple(rows),
        program=Program(script="train.py", args=(), kind="python", local_rank=True),
        interpreter=sys.executable,
        cwd=str(tmp_path),
        level="quick",
        environment=(Variable(name="DS_ACCELERATOR", value="cpu", origin="test"),),
        checks=ACCEPTED,
    )
    return replace(plan, **fields)


def codes(result, severity=None):
    return sorted({f.code for f in result.findings if severity is None or f.severity is severity})


def validated(document):
    jsonschema.validate(json.loads(json.dumps(document)), SCHEMA)
    return document


def test_nodes_that_are_fit(tmp_path, nodes):
    transport = nodes()
    seen = []
    result = run_preflight(
        make_plan(tmp_path, "a", "b", slots=2),
        transport,
        on_progress=lambda host, what: seen.append((host, what)),
    )
    assert codes(result) == []
    assert [(host.name, host.slots, host.state) for host in result.hosts] == [("a", 2, "ok"), ("b", 2, "ok")]
    assert set(seen) == {(host, what) for host in "ab" for what in ("connected", "seen")}
    assert set(result.sessions) == {"a", "b"}
    assert abs(result.clock_offsets["a"]) < LONG
    assert set(result.timing) == {"connect", "probe", "network", "judge", "total"}
    document = validated(result.document())
    assert (document["ok"], document["exit_status"], document["level"]) == (True, 0, "quick")
    # The connection is still there for the launch.
    channel = result.sessions["b"].start("echo hello")
    assert list(channel.lines()) == [b"hello"]


def test_the_master_is_where_all_nodes_met(tmp_path, nodes):
    result = run_preflight(make_plan(tmp_path, "a", "b"), nodes())
    with socket.create_server(("", 0)) as server:
        # The address is one of this machine, and not one that only reaches itself.
        socket.create_connection((result.master_addr, server.getsockname()[1]), timeout=LONG).close()
    assert not result.master_addr.startswith("127.")
    assert result.master_port >= preflight.DEFAULT_PORT
    with socket.socket() as rank_0:
        rank_0.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank_0.bind(("", result.master_port))
        rank_0.listen()


def test_two_preflights_at_once_choose_different_ports(tmp_path, nodes):
    plan = make_plan(tmp_path, "a")
    first, second = run_preflight(plan, nodes()), run_preflight(plan, nodes())
    assert first.master_port != second.master_port
    assert first.master_addr == "127.0.0.1"


def test_a_taken_default_port_is_stepped_over(tmp_path, nodes, monkeypatch):
    with socket.create_server(("", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(preflight, "DEFAULT_PORT", taken)
        result = run_preflight(make_plan(tmp_path, "a"), nodes())
    assert codes(result) == []
    assert result.master_port not in (taken, 0)


def test_the_users_own_port_is_never_changed(tmp_path, nodes):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        result = run_preflight(make_plan(tmp_path, "a", "b", master_port=port), nodes())
    assert codes(result, Severity.ERROR) == ["port.busy"]
    (finding,) = [f for f in result.findings if f.code == "port.busy"]
    assert finding.hosts == ("a",)
    assert f"pid {os.getpid()}" in finding.observed
    assert result.master_port == port
    document = validated(result.document())
    assert (document["ok"], document["exit_status"]) == (False, 69)
    assert [host["state"] for host in document["hosts"]] == ["failed", "ok"]


def test_the_users_own_address_is_tried_and_never_changed(tmp_path, nodes):
    result = run_preflight(make_plan(tmp_path, "a", "b", master_addr="nowhere.invalid"), nodes())
    assert result.master_addr == "nowhere.invalid"
    (finding,) = [f for f in result.findings if f.code == "net.master_unreachable"]
    assert finding.hosts == ("a", "b")
    assert "nowhere.invalid" in finding.observed


def test_an_unreachable_node_is_one_finding_and_the_others_are_judged(tmp_path, nodes):
    plan = make_plan(tmp_path, "a", "b", "c", checks={**ACCEPTED, "ssh.*": "off"})
    (tmp_path / "train.py").unlink()
    result = run_preflight(plan, nodes(unreachable=("b",)))
    found = {(f.code, f.hosts) for f in result.findings}
    assert found == {("ssh.timeout", ("b",)), ("path.script", ("a", "c"))}
    assert [host.state for host in result.hosts] == ["failed", "failed", "failed"]
    assert set(result.sessions) == {"a", "c"}
    validated(result.document())


def test_the_first_node_unreachable(tmp_path, nodes):
    result = run_preflight(make_plan(tmp_path, "a", "b"), nodes(unreachable=("a",)))
    assert codes(result) == ["ssh.timeout"]
    assert result.master_port == preflight.DEFAULT_PORT


# --- how the start of the probe can fail


def prefix(text):
    return lambda command: f"{text}\n{command}"


def without_python(tmp_path, fake=None):
    """Return an environment in which no python3 is found, or a fake one."""
    place = tmp_path / "bin"
    place.mkdir()
    for name in ("sh", "echo", "cat"):
        (place / name).symlink_to(f"/bin/{name}")
    if fake is not None:
        (place / "python3").write_text(fake)
        (place / "python3").chmod(0o755)
    return f"PATH={place}; export PATH"


def test_noise_of_a_shell_start_up_does_no_harm_and_is_reported(tmp_path, nodes):
    transport = nodes(start={"b": prefix("echo Welcome; echo 'module: not found' >&2")})
    result = run_preflight(make_plan(tmp_path, "a", "b"), transport)
    (finding,) = result.findings
    assert (finding.code, finding.severity, finding.hosts) == ("ssh.noise", Severity.WARNING, ("b",))
    assert "Welcome" in finding.observed
    assert "module: not found" in finding.observed
    assert [host.state for host in result.hosts] == ["ok", "ok"]


def test_no_python(tmp_path, nodes):
    transport = nodes(start={"b": prefix(without_python(tmp_path))})
    result = run_preflight(make_plan(tmp_path, "a", "b", interpreter="/no/python"), transport)
    assert ("ssh.python_missing", ("b",)) in {(f.code, f.hosts) for f in result.findings}


def test_the_training_interpreter_serves_where_there_is_no_python3(tmp_path, nodes):
    transport = nodes(start={"a": prefix(without_python(tmp_path))})
    assert codes(run_preflight(make_plan(tmp_path, "a"), transport)) == []


def test_an_old_python(tmp_path, nodes):
    fake = "#!/bin/sh\necho '3.6.8 (default, Nov 16 2020)'\nexit 98\n"
    transport = nodes(start={"b": prefix(without_python(tmp_path, fake))})
    (finding,) = run_preflight(make_plan(tmp_path, "a", "b"), transport).findings
    assert (finding.code, finding.hosts) == ("ssh.python_old", ("b",))
    assert "3.6.8" in finding.observed


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (
            "echo 'sh: cannot create temp file: No space left on device' >&2; exit 1",
            "ssh.no_space",
            "No space",
        ),
        ("echo going down >&2; exit 7", "ssh.account", "status 7: going down"),
        ("exit 0", "ssh.account", "status 0"),
    ],
)
def test_a_shell_that_ends_before_the_probe_begins(tmp_path, nodes, line, code, words):
    result = run_preflight(make_plan(tmp_path, "a", "b"), nodes(start={"b": prefix(line)}))
    (finding,) = result.findings
    assert (finding.code, finding.hosts, finding.severity) == (code, ("b",), Severity.ERROR)
    assert words in finding.observed
    assert set(result.sessions) == {"a", "b"}, "the connection itself is sound"


def test_a_probe_that_never_ends_is_given_up(tmp_path, nodes, monkeypatch):
    monkeypatch.setattr(preflight, "PROBE_SECONDS", 0.5)
    monkeypatch.setattr(preflight, "GPU_SECONDS", 0.5)
    monkeypatch.setattr(preflight, "ANSWER_SECONDS", 4.0)
    transport = nodes(start={"b": lambda _command: "exec sleep 1000"})
    result = run_preflight(make_plan(tmp_path, "a", "b"), transport)
    (finding,) = [f for f in result.findings if f.hosts == ("b",)]
    assert finding.code == "node.probe_failed"
    assert "did not end within" in finding.observed
    assert set(result.sessions) == {"a"}


def test_a_connection_that_breaks_while_the_probe_runs(tmp_path, nodes):
    def broken(_command):
        raise ChannelLostError("broken pipe")

    (finding,) = run_preflight(make_plan(tmp_path, "a", "b"), nodes(start={"b": broken})).findings
    assert (finding.code, finding.hosts) == ("ssh.closed", ("b",))
    assert "broken pipe" in finding.observed


def test_remarks_of_the_transport_and_slow_nodes(tmp_path, nodes):
    remark = Remark(code="ssh.throttled", observed="o", why="w", fix="f")
    result = run_preflight(make_plan(tmp_path, "a", "b"), nodes(remarks=(remark,), seconds={"b": 1e4}))
    assert {(f.code, f.hosts) for f in result.findings} == {
        ("ssh.throttled", ("a", "b")),
        ("node.slow_answer", ("b",)),
    }


# --- what differs between nodes, made by real means


def test_versions_that_differ(tmp_path, nodes):
    (tmp_path / "old" / "deepspeed-0.0.1.dist-info").mkdir(parents=True)
    transport = nodes(start={"c": prefix(f"PYTHONPATH={tmp_path}/old; export PYTHONPATH")})
    (finding,) = run_preflight(make_plan(tmp_path, "a", "b", "c"), transport).findings
    assert (finding.code, finding.hosts, finding.severity) == ("software.deepspeed", ("c",), Severity.ERROR)
    assert "0.0.1 on c" in finding.observed


def nvidia_smi(tmp_path, name, text, status=0):
    """Put a fake nvidia-smi first on the PATH of a node."""
    place = tmp_path / name
    place.mkdir()
    (place / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
    (place / "nvidia-smi").chmod(0o755)
    return prefix(f'PATH="{place}:$PATH"; export PATH')


def test_gpus_that_fail_are_few_or_missing(tmp_path, nodes):
    two = "\n".join(f"GPU {i}: NVIDIA H100 (UUID: GPU-{i})" for i in range(2))
    transport = nodes(
        start={
            "a": nvidia_smi(tmp_path, "good", two),
            "b": nvidia_smi(tmp_path, "few", two.splitlines()[0]),
            "c": nvidia_smi(
                tmp_path, "bad", "Failed to initialize NVML: Driver/library version mismatch", 18
            ),
            "d": nvidia_smi(tmp_path, "none", "No devices were found", 6),
        }
    )
    plan = make_plan(tmp_path, "a", "b", "c", "d", slots=2, environment=())
    result = run_preflight(plan, transport)
    assert {(f.code, f.hosts) for f in result.findings} == {
        ("gpu.too_few", ("b",)),
        ("gpu.tool_failed", ("c",)),
        ("gpu.none", ("d",)),
    }
    assert [host.state for host in result.hosts] == ["ok", "failed", "failed", "failed"]


def test_leftovers_of_a_dead_run_are_seen(tmp_path, nodes):
    sleep = "import time; print(flush=True); time.sleep(1000)"
    mark = f"left-{os.getpid()}"
    env = {**os.environ, "SAFELAUNCH_RUN_ID": mark, "RANK": "0"}
    stray = subprocess.Popen([sys.executable, "-c", sleep], env=env, stdout=subprocess.PIPE)
    try:
        stray.stdout.readline()
        result = run_preflight(make_plan(tmp_path, "a", hostfile="hosts"), nodes())
    finally:
        stray.kill()
        stray.wait()
        stray.stdout.close()
    (finding,) = [f for f in result.findings if mark in f.observed]
    assert (finding.code, finding.severity) == ("process.leftover", Severity.WARNING)
    assert "safelaunch clean --hostfile hosts" in finding.fix


def test_two_names_of_this_machine_are_an_alias(tmp_path, nodes):
    result = run_preflight(make_plan(tmp_path, "a", "b", checks={}), nodes())
    assert ("hostfile.alias", ("a", "b")) in {(f.code, f.hosts) for f in result.findings}


def test_the_clock_of_the_launching_machine_is_compared_too(tmp_path, nodes):
    result = run_preflight(
        make_plan(tmp_path, "a", "b", checks=ACCEPTED), nodes(), wall=lambda: time.time() - 1000.0
    )
    (finding,) = result.findings
    assert (finding.code, finding.hosts, finding.severity) == ("clock.skew", (), Severity.WARNING)
    assert all(abs(offset - 1000) < LONG for offset in result.clock_offsets.values())


# --- levels and documents


def test_off_opens_the_nodes_and_looks_at_nothing(tmp_path, nodes):
    plan = make_plan(tmp_path, "a", "b", level="off", cwd="/no/such/directory")
    transport = nodes(unreachable=("b",), address="192.0.2.7")
    result = run_preflight(plan, transport)
    assert [(f.code, f.severity) for f in result.findings] == [
        ("ssh.timeout", Severity.ERROR),
        ("preflight.level", Severity.NOT_CHECKED),
    ]
    assert "192.0.2.7:29500" in result.findings[-1].observed
    assert (result.master_addr, result.master_port) == ("192.0.2.7", 29500)
    assert transport.channels == [], "nothing was run"
    assert set(result.sessions) == {"a"}
    validated(result.document())


@pytest.mark.parametrize(
    ("hosts", "fields", "address", "expected"),
    [
        (("a",), {}, "192.0.2.7", "127.0.0.1"),
        (("a", "b"), {}, "127.0.1.1", "a"),
        (("a", "b"), {}, "", "a"),
        (("a", "b"), {"master_addr": "boss", "master_port": 1234}, "192.0.2.7", "boss"),
    ],
)
def test_the_master_without_a_look(tmp_path, nodes, hosts, fields, address, expected):
    result = run_preflight(make_plan(tmp_path, *hosts, level="off", **fields), nodes(address=address))
    assert (result.master_addr, result.master_port) == (expected, fields.get("master_port", 29500))


@pytest.mark.parametrize("level", ["standard", "full"])
def test_deeper_levels_say_that_they_are_not_there_yet(tmp_path, nodes, level):
    result = run_preflight(make_plan(tmp_path, "a", level=level), nodes())
    assert [(f.code, f.severity) for f in result.findings] == [("preflight.level", Severity.NOT_CHECKED)]
    document = validated(result.document())
    assert (document["ok"], document["level"]) == (True, level)


def test_a_node_that_starts_itself_looks_at_itself_only(tmp_path, nodes):
    plan = make_plan(tmp_path, "a", "b", only_node=1, master_addr="127.0.0.1", master_port=29500)
    result = run_preflight(plan, nodes())
    assert [host.name for host in result.hosts] == ["b"]
    assert [(f.code, f.severity) for f in result.findings] == [
        ("net.master_unreachable", Severity.NOT_CHECKED)
    ]
    assert (result.master_addr, result.master_port) == ("127.0.0.1", 29500)


def test_no_secret_leaves_this_machine_for_the_probe(tmp_path, nodes, monkeypatch):
    sent = []
    payload = preflight.program.payload
    monkeypatch.setattr(
        preflight.program, "payload", lambda name, config: sent.append(config) or payload(name, config)
    )
    secret = Variable(name="HF_TOKEN", value="hidden", origin="test")
    run_preflight(make_plan(tmp_path, "a", environment=(secret,)), nodes())
    assert "hidden" not in json.dumps(sent)


def test_static_findings_stand_in_the_document_and_decide_the_status(tmp_path, nodes):
    where = Where("hosts", 3, 7)
    static = Finding(
        code="hostfile.syntax", severity=Severity.ERROR, observed="o", why="w", fix="f", where=where
    )
    plan = make_plan(tmp_path, "a", "b")
    document = validated(static_document([static], plan.nodes, "standard"))
    assert (document["exit_status"], document["ok"], document["timing"]) == (78, False, {})
    assert {host["state"] for host in document["hosts"]} == {"not_contacted"}
    assert document["findings"][0]["where"] == {"file": "hosts", "line": 3, "column": 7}
    document = validated(run_preflight(plan, nodes()).document([static]))
    assert document["exit_status"] == 78
    assert validated(static_document([], (), "off"))["ok"]


def test_no_process_stays_behind(tmp_path, nodes):
    transport = nodes()
    run_preflight(make_plan(tmp_path, "a", "b", "c"), transport)
    running = [channel for channel in transport.channels if channel.running]
    assert len(running) <= 1, "only the first node's probe stays, to reserve the port"
    transport.close()
    assert [channel for channel in transport.channels if channel.running] == []
