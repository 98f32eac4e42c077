"""Slurm's environment to an allocation. The environments are those of Slurm 22.05, as seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safelaunch import slurm
from safelaunch.plan import Node

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}


def nodes(*names):
    return [Node(name=name, slots=(0,), node_rank=i, first_rank=i) for i, name in enumerate(names)]


@pytest.mark.parametrize(
    ("environ", "hosts", "origin"),
    [
        # --nodes=2 --ntasks-per-node=1 --gpus-per-node=2
        ({"SLURM_GPUS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "2"}, [2, 2], "SLURM_GPUS_PER_NODE"),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, [4, 4], "SLURM_GPUS_PER_NODE"),
        ({"SLURM_GPUS_PER_NODE": "a100:2,v100:1"}, [3, 3], "SLURM_GPUS_PER_NODE"),
        # --gres=gpu:2
        ({"SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_GPUS": "0,1"}, [2, 2], "SLURM_GPUS_ON_NODE"),
        ({"SLURM_JOB_GPUS": "0-2,5"}, [4, 4], "SLURM_JOB_GPUS"),
        # --gpus=4, evenly spread as far as this node tells
        ({"SLURM_GPUS": "4", "SLURM_GPUS_ON_NODE": "2"}, [2, 2], "SLURM_GPUS_ON_NODE"),
        ({"SLURM_GPUS": "4", "SLURM_GPUS_PER_TASK": "2"}, [2, 2], "SLURM_GPUS_PER_TASK"),
        ({"SLURM_GPUS_PER_TASK": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}, [4, 4], "SLURM_GPUS_PER_TASK"),
        ({}, [1, 1], "SLURM_TASKS_PER_NODE"),
        ({"SLURM_TASKS_PER_NODE": "4,1"}, [4, 1], "SLURM_TASKS_PER_NODE"),
        ({"SLURM_TASKS_PER_NODE": "", "SLURM_NTASKS_PER_NODE": "3"}, [3, 3], "SLURM_NTASKS_PER_NODE"),
        ({"SLURM_GPUS_ON_NODE": "0"}, [1, 1], "SLURM_TASKS_PER_NODE"),
    ],
)  # fmt: skip
def test_slots(environ, hosts, origin):
    found = slurm.allocation({**JOB, **environ})

    assert [(host.name, host.slots) for host in found.hosts] == list(
        zip(["node1", "node2"], hosts, strict=True)
    )
    assert (found.slots_from, found.findings) == (origin, ())


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("node1", ["node1"]),
        ("node[2,4]", ["node2", "node4"]),
        ("login1,gpu[001-003,007],a1b2", ["login1", "gpu001", "gpu002", "gpu003", "gpu007", "a1b2"]),
        ("z1,a[1-2]", ["z1", "a1", "a2"]),
        ("a[1-2]b[1-2]", ["a1b1", "a1b2", "a2b1", "a2b2"]),
    ],
)
def test_names_keep_slurms_order(nodelist, names):
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodelist, "SLURM_GPUS_PER_NODE": "1"}

    assert [host.name for host in slurm.allocation(environ).hosts] == names


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_NODELIST": "node[1-2"},
        {"SLURM_JOB_NODELIST": "node[1-2]]"},
        {"SLURM_JOB_NODELIST": "node[a-b]"},
        {"SLURM_JOB_NODELIST": "node[1-999999]"},
        {"SLURM_JOB_NODELIST": ",,"},
        # --gpus=3: two on this node, and nothing tells of the other one
        {"SLURM_GPUS": "3", "SLURM_GPUS_ON_NODE": "2"},
        {"SLURM_GPUS": "4"},
        {"SLURM_TASKS_PER_NODE": "1"},
        {"SLURM_TASKS_PER_NODE": "many"},
        {"SLURM_TASKS_PER_NODE": "0(x2)"},
    ],
)
def test_what_is_not_known_is_not_guessed(environ):
    found = slurm.allocation({**JOB, **environ})

    assert found.hosts == ()
    assert [finding.code for finding in found.findings] == ["slurm.allocation_unclear"]


def test_outside_of_a_job():
    assert slurm.allocation({}) is None
    assert slurm.allocation({"SLURM_JOB_NODELIST": "node1"}) is None
    assert slurm.hostfile_findings({}, nodes("a")) == []
    assert slurm.job_start({"SLURM_JOB_START_TIME": "1700000000"}) is None
    assert slurm.job_start({**JOB, "SLURM_JOB_START_TIME": "1700000000"}) == 1_700_000_000
    assert slurm.job_start(JOB) is None


@pytest.mark.parametrize(
    ("environ", "no_ssh", "found"),
    [
        # The batch script has these too, and is started once.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, False, False),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False, False),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}, False, True),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}, True, False),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}, True, True),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "x"}, False, False),
    ],
)
def test_several_launchers(environ, no_ssh, found):
    codes = [finding.code for finding in slurm.step_findings({**JOB, **environ}, no_ssh=no_ssh)]

    assert codes == ["slurm.many_launchers"] * found


@pytest.mark.parametrize(
    ("names", "outside"),
    [
        (["node1", "node2"], ()),
        (["node2"], ()),
        (["root@node1.cluster.example", "NODE2"], ()),
        (["10.0.0.9", "::1"], ()),
        (["node1", "node3", "node4"], ("node3", "node4")),
    ],
)
def test_the_hostfile_against_the_allocation(names, outside):
    found = slurm.hostfile_findings(JOB, nodes(*names))

    assert [finding.hosts for finding in found] == ([outside] if outside else [])
    assert [finding.code for finding in found] == ["slurm.hostfile_mismatch"] * bool(outside)


@pytest.mark.parametrize(
    ("environ", "mpi4py", "codes"),
    [
        ({**JOB, "SLURM_NTASKS": "4"}, True, []),
        ({**JOB, "SLURM_NTASKS": "3"}, True, [("slurm.workers_missing", "error")]),
        ({**JOB, "SLURM_NTASKS": "4"}, False, [("slurm.no_mpi4py", "error")]),
        (JOB, True, []),
        ({}, True, [("slurm.workers_missing", "warning")]),
    ],
)
def test_what_the_stock_launcher_needs(environ, mpi4py, codes):
    found = slurm.stock_findings(environ, 4, mpi4py=mpi4py)

    assert [(finding.code, finding.severity.value) for finding in found] == codes


NAMES = """
    GPUS_PER_NODE GPUS_ON_NODE GPUS JOB_GPUS TASKS_PER_NODE NTASKS_PER_NODE GPUS_PER_TASK JOB_NODELIST STEP_ID
    STEP_NUM_TASKS NTASKS JOB_START_TIME
"""
names = st.sampled_from([f"SLURM_{name}" for name in NAMES.split()])
texts = st.one_of(st.text(max_size=8), st.text(alphabet="0123456789,-()x[]:an²", max_size=12))


@given(st.dictionaries(names, texts))
def test_any_environment_gives_findings_and_no_traceback(environ):
    environ = {**JOB, **environ}
    found = slurm.allocation(environ)
    assert found is None or all(host.slots for host in found.hosts)
    assert found is None or found.hosts or found.findings
    slurm.step_findings(environ, no_ssh=False)
    slurm.hostfile_findings(environ, nodes("a"))
    slurm.stock_findings(environ, 3, mpi4py=False)
    slurm.job_start(environ)
