"""Checks are pure: a case is a JSON file `checks/<code>/<case>.json` with a plan, facts and the findings.

Facts of a host are `{"facts": {...}, "errors": {...}, "address", ...}` as in `NodeFacts`, or
`{"unreachable": {...}}`. A finding of a case names severity and hosts, and parts of its texts.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safelaunch import checks
from safelaunch.catalogue import CODES
from safelaunch.checks import Check, fold, gpus, network
from safelaunch.checks.base import ERROR, INFO, NOT_CHECKED, WARNING, duration, size
from safelaunch.facts import Cluster, NodeFacts
from safelaunch.findings import Finding
from safelaunch.plan import Node, Plan, Program, Variable
from safelaunch.transport.base import Remark, Unreachable

HERE = Path(__file__).parent
CASES = sorted((HERE / "checks").glob("*/*.json"))
DATA = HERE.parent.parent / "shared" / "data" / "nvidia"
SCHEMA = json.loads((HERE.parent / "safelaunch" / "schemas" / "preflight.json").read_text())


def make_plan(nodes, *, program=None, environment=None, interpreter="/usr/bin/python3", cwd="/", **fields):
    """Build a plan; a node's slots are a count or a list of devices."""
    rows, first = [], 0
    for rank, (name, slots) in enumerate(nodes.items()):
        devices = tuple(range(slots)) if isinstance(slots, int) else tuple(slots)
        rows.append(Node(name=name, slots=devices, node_rank=rank, first_rank=first))
        first += len(devices)
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return Plan(
        nodes=tuple(rows),
        program=Program(args=(), kind="python", local_rank=True, **program) if program else None,
        environment=tuple(Variable(name=n, value=v, origin="test") for n, v in (environment or {}).items()),
        interpreter=interpreter,
        cwd=cwd,
        **values,
    )


def make_node(host, row):
    if "unreachable" in row:
        return Unreachable(host=host, seconds=1.0, **row["unreachable"])
    remarks = tuple(Remark(**remark) for remark in row.get("remarks", ()))
    return NodeFacts(host=host, **{**row, "remarks": remarks})


def make_cluster(nodes, facts, **plan):
    hosts = {host: make_node(host, row) for host, row in facts.items()}
    return Cluster(plan=make_plan(nodes, **plan), hosts=hosts)


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_case(path):
    code, case = path.parent.name, json.loads(path.read_text())
    plan = case["plan"]
    cluster = make_cluster(plan.pop("nodes"), case["facts"], **plan)
    before = copy.deepcopy(cluster)
    responsible = [check for check in checks.CHECKS if code in check.codes]
    found = [finding for finding in checks.run(cluster, responsible) if finding.code == code]
    assert [(f.severity.value, list(f.hosts)) for f in found] == [
        (expected["severity"], expected["hosts"]) for expected in case["findings"]
    ]
    for finding, expected in zip(found, case["findings"], strict=True):
        assert finding.why
        assert finding.fix
        for part in ("observed", "why", "fix"):
            assert expected.get(part, "") in getattr(finding, part)
        jsonschema.validate(finding.document(), {**SCHEMA["$defs"]["finding"], "$defs": SCHEMA["$defs"]})
    assert cluster == before, "a check changed its input"


def test_every_code_of_the_preflight_has_cases():
    preflight = {name for name, code in CODES.items() if code.level == "quick"} - {"preflight.level"}
    assert {path.parent.name for path in CASES} == preflight


def test_every_code_is_given_by_a_check_and_every_check_gives_known_codes():
    given_codes = {code for check in checks.CHECKS for code in check.codes}
    assert given_codes == {name for name, code in CODES.items() if code.level == "quick"} - {
        "preflight.level"
    }
    assert {code for check in checks.CHECKS for code in check.requires} <= given_codes


def healthy(host, address):
    gpu = {"tool": "/usr/bin/nvidia-smi", "status": 0, "limit": 27.0}
    facts = {
        "host": {"hostname": host, "boot_id": f"b-{host}", "machine_id": f"m-{host}", "user": "u"},
        "environment": {"values": {}, "nccl_conf": {}},
        "addresses": [{"interface": "eth0", "address": address, "up": True}],
        "own_name": {"name": host, "addresses": [address], "late": False},
        "shm": {"free": 1 << 40, "total": 1 << 40},
        "processes": [],
        "storage": [
            {"use": "u", "path": "/", "at": "/", "device": 1, "free": 1 << 40, "total": 1 << 40},
        ],
        "gpus": {**gpu, "output": "GPU 0: X (UUID: GPU-0)\nGPU 1: X (UUID: GPU-1)\n"},
        "paths": {
            role: {"path": f"/{role}", "state": "ok"}
            for role in ("interpreter", "cwd", "script", "venv_script")
        },
        "code": {"files": {"train.py": "1"}, "complete": True, "git": "c"},
        "configs": {"ds.json": {"hash": "1"}},
        "software": {"python": "3.11", "torch": "2", "deepspeed": "1", "nccl": "2", "cuda": "12"},
        "dial": [
            {"address": "10.0.0.1", "port": 29500, "ok": True, "kind": "", "error": None, "seconds": 0.1},
        ],
        "peers": {"results": {"n1": ["10.0.0.1"], "n2": ["10.0.0.2"]}, "late": []},
        "clock": {"offset": 0.001, "uncertainty": 0.001},
    }
    if host == "n1":
        facts["port"] = {"port": 29500, "wanted": 29500}
    return {"address": address, "host_key": f"key of {host}", "facts": facts}


def healthy_cluster():
    facts = {"n1": healthy("n1", "10.0.0.1"), "n2": healthy("n2", "10.0.0.2")}
    program = {"script": "/script"}
    return make_cluster({"n1": 2, "n2": 2}, facts, program=program, deepspeed_configs=["ds.json"])


def test_a_healthy_cluster_gives_no_finding():
    assert checks.run(healthy_cluster()) == []


def test_nothing_passes_that_was_not_seen():
    facts = {"n1": healthy("n1", "10.0.0.1"), "n2": {"facts": {}, "errors": {}}}
    cluster = make_cluster(
        {"n1": 2, "n2": 2}, facts, program={"script": "/script"}, deepspeed_configs=["ds.json"]
    )
    found = checks.run(cluster)
    assert {finding.severity for finding in found} == {NOT_CHECKED}
    assert {finding.hosts for finding in found} == {("n2",)}
    named = " ".join(f"{finding.code} {finding.why}" for finding in found)
    needs_facts = {code for check in checks.CHECKS if check.facts for code in check.codes}
    hidden = {code for check in checks.CHECKS if check.requires for code in check.codes}
    assert {code for code in needs_facts - hidden if code not in named} == set()


# --- the engine


def report(code, severity=ERROR, hosts=("n1",), observed="o"):
    return Finding(code=code, severity=severity, hosts=hosts, observed=observed, why="w", fix="f")


def engine(*rows, nodes=("n1", "n2"), **plan):
    cluster = make_cluster(dict.fromkeys(nodes, 1), {host: {"facts": {"x": host}} for host in nodes}, **plan)
    return checks.run(cluster, rows)


def each(code, **fields):
    """Return a check's function that reports every host it sees."""
    return lambda cluster: [report(code, hosts=(host,), **fields) for host in cluster.nodes]


def test_a_broken_cause_hides_what_requires_it_on_its_host_only():
    cause = Check(("a.cause",), lambda _cluster: [report("a.cause", hosts=("n1",))])
    effect = Check(("a.effect",), each("a.effect"), requires=("a.cause",))
    later = Check(("a.later",), each("a.later"), requires=("a.effect",))
    expected = [("a.cause", ("n1",)), ("a.effect", ("n2",)), ("a.later", ("n1",))]
    for rows in ((cause, effect, later), (later, effect, cause)):
        found = engine(*rows)
        assert sorted((finding.code, finding.hosts) for finding in found) == expected


@pytest.mark.parametrize(
    ("severity", "hidden"), [(WARNING, False), (INFO, False), (ERROR, True), (NOT_CHECKED, True)]
)
def test_only_what_is_broken_or_unknown_hides(severity, hidden):
    cause = Check(("a.cause",), lambda _cluster: [report("a.cause", severity, ("n1", "n2"))])
    effect = Check(("a.effect",), each("a.effect"), requires=("a.cause",))
    codes = {finding.code for finding in engine(cause, effect)}
    assert ("a.effect" not in codes) is hidden


def test_a_cause_that_the_user_silenced_still_hides_its_effects():
    cause = Check(("a.cause",), each("a.cause"))
    effect = Check(("a.effect",), each("a.effect"), requires=("a.cause",))
    assert engine(cause, effect, checks={"a.cause": "off"}) == []


def test_a_missing_fact_is_said_with_its_reason_and_hides_effects():
    cluster = make_cluster(
        {"n1": 1, "n2": 1}, {"n1": {"facts": {"x": 1}}, "n2": {"errors": {"x": "no answer in 10 s"}}}
    )
    cause = Check(("a.one", "a.two"), each("a.one", severity=WARNING), facts=("x",))
    effect = Check(("a.effect",), each("a.effect", severity=WARNING), requires=("a.two",))
    found = checks.run(cluster, [effect, cause])
    assert [(f.code, f.severity, f.hosts) for f in found] == [
        ("a.one", WARNING, ("n1",)),
        ("a.effect", WARNING, ("n1",)),
        ("a.one", NOT_CHECKED, ("n2",)),
    ]
    assert "no answer in 10 s" in found[-1].observed
    assert "a.two" in found[-1].why


def test_equal_findings_merge_in_the_order_of_the_plan_and_errors_come_first():
    check = Check(
        ("a.x",),
        lambda _cluster: [
            report("a.x", INFO, ("n3",)),
            report("a.x", ERROR, ("n3",)),
            report("a.x", ERROR, ("n1",)),
            report("a.x", ERROR, ("n2",), observed="other"),
        ],
    )
    found = engine(check, nodes=("n1", "n2", "n3"))
    assert [(f.severity, f.hosts, f.observed) for f in found] == [
        (ERROR, ("n1", "n3"), "o"),
        (ERROR, ("n2",), "other"),
        (INFO, ("n3",), "o"),
    ]


def test_checks_that_require_each_other_are_a_mistake():
    with pytest.raises(ValueError, match="cycle"):
        engine(
            Check(("a.x",), each("a.x"), requires=("a.y",)), Check(("a.y",), each("a.y"), requires=("a.x",))
        )


# --- texts


@pytest.mark.parametrize(
    ("hosts", "folded"),
    [
        (["node1", "node2", "node3", "node10"], "node[1-3,10]"),
        (["node01", "node02"], "node[01-02]"),
        (["a", "b"], "a,b"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
        (["user@n1", "n2", "n3"], "n[2-3],user@n1"),
        (["a,b", "n[1", "n[1-4]", "x!y", "fd00::1"], "a,b,n[1,n[1-4],x!y,fd00::1"),
        ([], ""),
    ],
)
def test_fold(hosts, folded):
    assert fold(hosts) == folded


@given(st.lists(st.from_regex(r"[a-z0-9][a-z0-9.-]{0,12}[a-z0-9]", fullmatch=True), unique=True, max_size=20))
def test_fold_loses_no_host(hosts):
    from ClusterShell.NodeSet import NodeSet

    assert set(NodeSet(fold(hosts))) == set(hosts)


@given(st.text())
def test_fold_takes_any_name(name):
    assert fold([name]) or not name


def test_sizes_and_times_read_well():
    assert [size(n) for n in (0, 64 << 20, 3 << 30)] == ["0 bytes", "64 MiB", "3.0 GiB"]
    assert [duration(s) for s in (0.5, 90, 600, 90000)] == ["0.5 s", "90.0 s", "10 min", "25.0 h"]


# --- where the ranks meet


def dialled(**ok_by_host):
    """Build a cluster whose hosts reached exactly these addresses of n1."""
    own = [{"interface": "eth0", "address": a, "up": True} for a in ("10.0.0.1", "10.9.0.1", "127.0.0.1")]
    own.append({"interface": "eth0", "address": "fe80::1", "up": True})
    own.append({"interface": "down0", "address": "10.8.0.1", "up": False})
    facts = {
        host: {
            "address": "10.0.0.1" if host == "n1" else "",
            "facts": {
                "addresses": own,
                "dial": [
                    {"address": a, "port": 1, "ok": a in ok, "kind": "timeout", "error": "e", "seconds": 1}
                    for a in ("10.0.0.1", "10.9.0.1")
                ],
            },
        }
        for host, ok in ok_by_host.items()
    }
    return make_cluster(dict.fromkeys(ok_by_host, 1), facts)


def test_the_address_that_we_connected_to_is_preferred():
    both = ["10.0.0.1", "10.9.0.1"]
    cluster = dialled(n1=both, n2=both)
    assert network.candidates(cluster) == both
    assert network.master_address(cluster) == "10.0.0.1"


def test_an_address_that_every_node_reaches_goes_before_one_that_most_do():
    assert network.master_address(dialled(n1=["10.0.0.1", "10.9.0.1"], n2=["10.9.0.1"])) == "10.9.0.1"


def test_without_an_address_for_all_the_one_for_most_is_taken():
    cluster = dialled(n1=["10.0.0.1"], n2=["10.9.0.1"], n3=["10.9.0.1"])
    assert network.master_address(cluster) == "10.9.0.1"


def test_a_single_node_meets_itself_and_the_users_choice_is_never_replaced():
    assert network.master_address(dialled(n1=[])) == "127.0.0.1"
    cluster = make_cluster({"n1": 1, "n2": 1}, {"n1": {}, "n2": {}}, master_addr="boss")
    assert network.candidates(cluster) == ["boss"]


def test_names_are_looked_up_by_some_neighbours_only_and_aliases_by_nobody():
    nodes = [f"n{i}" for i in range(50)]
    facts = {
        host: {"facts": {"own_name": {"name": f"{host}.cluster", "addresses": None, "late": False}}}
        for host in nodes
    }
    facts["alias"] = {"facts": {"own_name": {"name": "vm", "addresses": None, "late": False}}}
    wanted = network.names_to_resolve(make_cluster(dict.fromkeys(facts, 1), facts, master_addr="boss"))
    assert set(wanted) == set(facts)
    assert max(len(names) for names in wanted.values()) == network.NEIGHBOURS + 2
    asked = [name for names in wanted.values() for name in names]
    assert "alias" not in asked
    assert all(asked.count(name) > network.NEIGHBOURS for name in nodes)
    assert all("boss" in names for names in wanted.values())


# --- recorded output of nvidia-smi


def listing(name):
    """Return the recorded `nvidia-smi -L` of a capture."""
    path = DATA / "captures" / name
    if not path.exists():
        pytest.skip("the recorded GPU data is not beside this repository")
    text = path.read_text()
    section = re.search(r"\$ nvidia-smi -L\n#+\n(.*?)\n\n#{10}", text, re.DOTALL)
    assert section, "the capture has a listing"
    return section.group(1) + "\n"


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("linux-x86_64__nvidia-h100-80gb-hbm3__590.48.01.txt", 1),
        ("linux-x86_64__nvidia-h100-mig__590.48.01.txt", 4),
        ("linux-x86_64__nvidia-l40s__595.80.txt", 1),
    ],
)
def test_recorded_listings_are_counted(name, devices):
    assert gpus.count({"output": listing(name)}) == devices


def test_published_failure_texts_are_failures():
    path = DATA / "failure-messages.json"
    if not path.exists():
        pytest.skip("the recorded GPU data is not beside this repository")
    texts = [
        row["text"]
        for row in json.loads(path.read_text())
        if row["tool"] == "nvidia-smi" and row["verdict"] == "fail"
    ]
    assert len(texts) > 5
    for text in texts:
        facts = {
            "gpus": {"tool": "t", "status": 0, "output": text, "limit": 1, "nvidia_devices": 1, "amd_gpus": 0}
        }
        (finding,) = checks.run(make_cluster({"n1": 1}, {"n1": {"facts": facts}}), gpus.CHECKS[:1])
        assert (finding.code, finding.severity) == ("gpu.tool_failed", ERROR), text
