"""Selection: DeepSpeed's grammar and meaning, and what is said where it would go wrong."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safelaunch.findings import Severity, Where, errors
from safelaunch.hostfile import Host
from safelaunch.selection import rank_map, select

LOCAL = [Host("localhost", 4)]


def hosts(*entries):
    return [Host(name, slots, Where("hosts", line, 1)) for line, (name, slots) in enumerate(entries, 1)]


TWO = hosts(("node1", 2), ("node2", 2))


def choose(pool, *, include="", exclude="", nodes=-1, gpus=-1, visible=None, explicit=True):
    return select(
        pool,
        include=include,
        exclude=exclude,
        num_nodes=nodes,
        num_gpus=gpus,
        visible_devices=visible,
        explicit_hostfile=explicit,
    )


def chosen(selection):
    return {node.name: node.slots for node in selection.nodes}


def codes(selection):
    return [(finding.code, finding.severity.value) for finding in selection.findings]


def only(selection):
    (finding,) = selection.findings
    return finding


def test_everything_is_chosen_in_the_order_of_the_file():
    selection = choose(hosts(("b", 2), ("a", 2)))
    assert chosen(selection) == {"b": (0, 1), "a": (0, 1)}
    assert [(node.node_rank, list(node.ranks)) for node in selection.nodes] == [(0, [0, 1]), (1, [2, 3])]
    assert [node.where.line for node in selection.nodes] == [1, 2]
    assert selection.findings == ()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include": "node2"}, {"node2": (0, 1)}),
        ({"include": "node2@node1"}, {"node1": (0, 1), "node2": (0, 1)}),
        ({"include": "node2:1"}, {"node2": (1,)}),
        ({"include": "node1:1,0,1@node2: 0, 1"}, {"node1": (0, 1), "node2": (0, 1)}),
        ({"include": "node1:0@node1:1"}, {"node1": (0, 1)}),
        ({"include": "node1:+1"}, {"node1": (1,)}),
        ({"exclude": "node1"}, {"node2": (0, 1)}),
        ({"exclude": "node1:0@node2:0"}, {"node1": (1,), "node2": (1,)}),
        ({"exclude": "node1:0,1"}, {"node2": (0, 1)}),
        ({"nodes": 1}, {"node1": (0, 1)}),
        ({"gpus": 1}, {"node1": (0,), "node2": (0,)}),
        ({"nodes": 1, "gpus": 1}, {"node1": (0,)}),
        ({"nodes": 0, "gpus": 0}, {"node1": (0, 1), "node2": (0, 1)}),
        ({"nodes": -5, "gpus": -5}, {"node1": (0, 1), "node2": (0, 1)}),
    ],
)
def test_options_choose_as_in_deepspeed(options, expected):
    selection = choose(TWO, **options)
    assert chosen(selection) == expected
    assert selection.findings == ()


@pytest.mark.parametrize(
    ("filter_", "column", "fix"),
    [
        ("node1:", 7, "node1"),
        ("node1:0,", 9, "node1:0"),
        ("node1:,0", 7, "node1:0"),
        ("node1:0-1", 8, "node1:0,1"),
        ("node1:0:1", 8, "node1:0,1"),
        ("node1:a", 7, "node1"),
        ("node1:1_0", 8, None),
        ("node1@", 7, "node1"),
        ("@node1", 1, "node1"),
        ("node1@@node2", 7, "node1@node2"),
        ("node1 @node2", 6, "node1@node2"),
        ("node1,node2", 6, "node1@node2"),
        ("node1:0,node2:1", 9, "node1:0@node2:1"),
        ("node*", 5, "node1@node2"),
        ("node[1-2]:0", 5, "node1:0@node2:0"),
        ("node1=0", 6, "node1:0"),
        (" ", 1, None),
        ("node1:" + "0" * 20, 7, None),
    ],
)
@pytest.mark.parametrize("option", ["include", "exclude"])
def test_bad_grammar_is_shown_with_its_column_and_corrected(option, filter_, column, fix):
    finding = next(f for f in choose(TWO, **{option: filter_}).findings if f.code == "select.syntax")
    assert finding.severity is Severity.ERROR
    assert finding.where == Where(f"--{option}", 1, column)
    if fix:
        assert finding.fix == f"--{option} {fix}"
        assert not [f for f in choose(TWO, **{option: fix}).findings if f.code == "select.syntax"]


def test_all_faults_of_a_filter_come_at_once():
    selection = choose(TWO, include="node1:x@node3@node2:7@node2:0")
    assert sorted(finding.code for finding in selection.findings) == [
        "select.no_such_slot",
        "select.syntax",
        "select.unknown_host",
    ]
    assert chosen(selection) == {"node2": (0,)}


def test_an_unknown_host_is_named_with_the_nearest():
    finding = only(choose(hosts(("gpu1.example.org", 1), ("gpu2.example.org", 1)), include="gpu2"))
    assert (finding.code, finding.where) == ("select.unknown_host", Where("--include", 1, 1))
    assert finding.fix == "--include gpu2.example.org"
    assert "node[1-2]" in only(choose(TWO, include="zebra:0")).fix


@pytest.mark.parametrize(("slot", "column"), [("2", 7), ("-1", 7), ("0,9", 9)])
def test_a_slot_that_is_not_there_is_refused(slot, column):
    finding = only(choose(TWO, include=f"node1:{slot}"))
    assert (finding.code, finding.hosts) == ("select.no_such_slot", ("node1",))
    assert finding.where == Where("--include", 1, column)
    assert "0-1" in finding.observed


def test_names_that_hold_the_separators_can_be_chosen():
    pool = hosts(("alice@node1", 2), ("2001:db8::1", 2), ("node1", 1))
    assert chosen(choose(pool, include="alice@node1:1@2001:db8::1")) == {
        "alice@node1": (1,),
        "2001:db8::1": (0, 1),
    }
    assert chosen(choose(pool, include="2001:db8::1:0@node1")) == {"2001:db8::1": (0,), "node1": (0,)}


def test_a_whole_host_and_its_slots_contradict_each_other():
    finding = only(choose(TWO, include="node1:0@node2@node1"))
    assert (finding.code, finding.where) == ("select.conflict", Where("--include", 1, 15))


@pytest.mark.parametrize(
    "options",
    [
        {"include": "node1", "exclude": "node2"},
        {"include": "node1", "nodes": 1},
        {"include": "node1", "gpus": 0},
        {"exclude": "node1", "nodes": 0},
    ],
)
def test_conflicts_as_in_deepspeed(options):
    assert codes(choose(TWO, **options)) == [("select.conflict", "error")]


def test_conflicting_filters_are_judged_each_by_itself():
    assert codes(choose(TWO, include="node1:", exclude="node9", nodes=1)) == [
        ("select.conflict", "error"),
        ("select.conflict", "error"),
        ("select.syntax", "error"),
        ("select.unknown_host", "error"),
    ]


def test_nothing_left():
    finding = only(choose(TWO, exclude="node1@node2"))
    assert (finding.code, finding.severity) == ("select.empty", Severity.ERROR)


def test_more_nodes_than_there_are():
    finding = only(choose(TWO, nodes=3))
    assert (finding.code, finding.fix) == ("select.too_few_nodes", "--num_nodes 2")
    assert only(choose(LOCAL, nodes=2, explicit=False)).code == "select.too_few_nodes"


def test_more_gpus_than_slots():
    selection = choose(hosts(("a", 2), ("b", 8), ("c", 4)), gpus=8)
    finding = selection.findings[0]
    assert (finding.code, finding.hosts) == ("select.too_many_gpus", ("a", "c"))
    assert finding.fix.startswith("--num_gpus 2,")


def test_without_a_hostfile_the_user_knows_the_number_of_devices():
    # On a machine without GPUs there is one "device", and people train with --num_gpus 2.
    selection = choose([Host("localhost", 1)], gpus=2, explicit=False)
    assert chosen(selection) == {"localhost": (0, 1)}
    assert selection.findings == ()


@pytest.mark.parametrize(
    ("visible", "options", "expected", "finding"),
    [
        (None, {}, (0, 1, 2, 3), None),
        ("2,0", {}, (0, 2), None),
        (" 1 , 3", {}, (1, 3), None),
        ("1\x1c,\u00a03", {}, (1, 3), None),
        ("0,1", {"nodes": 1}, (0, 1), None),
        ("", {}, (0, 1, 2, 3), ("select.visible_devices", "warning")),
        ("7", {}, (), ("select.no_such_slot", "error")),
        ("-1", {}, (), ("select.no_such_slot", "error")),
        ("GPU-8932f937-d72c", {}, (0, 1, 2, 3), ("select.visible_devices", "error")),
        ("MIG-8932f937-d72c", {}, (0, 1, 2, 3), ("select.visible_devices", "error")),
        ("all", {}, (0, 1, 2, 3), ("select.visible_devices", "error")),
        ("0,1", {"gpus": 4}, (0, 1, 2, 3), ("select.visible_devices", "warning")),
        ("0,1,2,3", {"gpus": 4}, (0, 1, 2, 3), None),
        ("0", {"include": "localhost:2"}, (2,), ("select.visible_devices", "warning")),
        ("MIG-1", {"include": "localhost:2"}, (2,), ("select.visible_devices", "warning")),
        ("2", {"include": "localhost:2"}, (2,), None),
        ("2", {"exclude": "localhost:2"}, (0, 1, 3), ("select.visible_devices", "warning")),
    ],
)
def test_visible_devices_without_a_hostfile(visible, options, expected, finding):
    selection = choose(LOCAL, visible=visible, explicit=False, **options)
    assert chosen(selection) == ({"localhost": expected} if expected else {})
    assert codes(selection) == ([finding] if finding else [])


def test_the_place_of_a_bad_visible_device():
    assert only(choose(LOCAL, visible="0,x", explicit=False)).where == Where("CUDA_VISIBLE_DEVICES", 1, 3)
    assert only(choose(LOCAL, visible="0,9", explicit=False)).where == Where("CUDA_VISIBLE_DEVICES", 1, 3)


@pytest.mark.parametrize(
    ("visible", "warned"), [(None, 0), ("", 0), ("0,1", 0), ("0,1,2", 0), ("0", 1), ("GPU-1", 1), ("5", 1)]
)
@pytest.mark.parametrize("pool", [TWO, hosts(("localhost", 2))], ids=["two", "localhost"])
def test_with_a_hostfile_its_slots_win(pool, visible, warned):
    selection = choose(pool, visible=visible)
    assert set(chosen(selection).values()) == {(0, 1)}
    assert codes(selection) == [("select.visible_devices", "warning")] * warned


def test_the_default_hostfile_counts_as_one():
    # /job/hostfile with localhost: hosts from a file, though the user did not name it.
    assert chosen(choose(hosts(("localhost", 4)), visible="1", explicit=False)) == {"localhost": (0, 1, 2, 3)}


@pytest.mark.parametrize(
    ("names", "severity"),
    [
        (["localhost"], None),
        (["127.0.0.1"], None),
        (["node1", "localhost"], "error"),
        (["node1", "127.0.1.1"], "error"),
        (["::1", "node1"], "error"),
        (["alice@LocalHost.localdomain", "node1"], "error"),
        (["node1", "ip6-localhost"], "error"),
        (["localhost", "127.0.0.1"], "error"),
        (["localhost", "::1"], "error"),
        # Nodes made of loopback addresses of one machine, as for a trial: it means the same to all of them.
        (["127.0.0.1", "127.0.0.2"], "warning"),
        (["node1", "localhostess"], None),
    ],
)
def test_loopback_among_several_hosts(names, severity):
    selection = choose(hosts(*((name, 1) for name in names)))
    assert codes(selection) == ([("hostfile.loopback", severity)] if severity else [])


def test_loopback_is_judged_on_what_is_chosen():
    pool = hosts(("node1", 1), ("localhost", 1))
    assert choose(pool, include="localhost").findings == ()
    assert choose(pool, exclude="localhost").findings == ()
    assert only(choose(pool)).where == Where("hosts", 2, 1)


def test_uneven_hosts_are_mapped():
    finding = only(choose(hosts(("a", 1), ("b", 2), ("c", 4), ("d", 4), ("e", 2))))
    assert (finding.code, finding.severity) == ("hostfile.uneven", Severity.WARNING)
    assert finding.observed.splitlines()[1:] == [
        "a: rank 0 on device 0",
        "b: ranks 1-2 on devices 1,0",
        "c,d: ranks 3-10, 4 each, on devices 3,0-2",
        "e: ranks 11-12 on devices 1,0",
    ]
    assert "LOCAL_RANK" in finding.why


def test_uneven_by_choice():
    finding = only(choose(TWO, include="node1@node2:1"))
    assert finding.observed.splitlines()[1:] == [
        "node1: ranks 0-1 on devices 0-1",
        "node2: rank 2 on device 1",
    ]
    assert "--num_gpus" not in finding.fix


def test_the_map_of_many_hosts_is_folded():
    finding = only(choose(hosts(*((f"n{i:03}", 8 if i < 100 else 4) for i in range(120)))))
    assert finding.observed.splitlines()[1:] == [
        "n[000-099]: ranks 0-799, 8 each, on devices 0-7",
        "n[100-119]: ranks 800-879, 4 each, on devices 0-3",
    ]
    mixed = choose(hosts(*((f"n{i}", 1 + i % 2) for i in range(1000))))
    lines = rank_map(mixed.nodes)
    assert len(lines) == 17
    assert lines[-1] == "and 984 more nodes"


pools = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(
    lambda slots: hosts(*((f"n{index}", count) for index, count in enumerate(slots)))
)


@given(pools)
def test_the_map_says_where_each_rank_really_runs(pool):
    nodes = choose(pool).nodes
    told = {}
    for line in rank_map(nodes):
        ranks, _, devices = line.partition(" on device")
        first, _, last = ranks.split(": rank")[1].split(",")[0].lstrip("s ").partition("-")
        order = []
        for run in devices.lstrip("s ").split(","):
            low, _, high = run.partition("-")
            order += range(int(low), int(high or low) + 1)
        for index, rank in enumerate(range(int(first), int(last or first) + 1)):
            told[rank] = order[index % len(order)]
    # launch.py: LOCAL_RANK = RANK % local count, CUDA_VISIBLE_DEVICES = all slots of the node
    real = {rank: node.slots[rank % len(node.slots)] for node in nodes for rank in node.ranks}
    assert told == real


def test_hosts_without_slots_are_no_nodes():
    pool = hosts(("a", 0), ("b", 1))
    assert chosen(choose(pool)) == {"b": (0,)}
    assert chosen(choose(pool, gpus=1)) == {"b": (0,)}
    assert choose([]).nodes == ()
    assert choose([]).findings == ()


@pytest.mark.timeout(60)  # a fraction of a second where measured; it catches what grows with the square
def test_ten_thousand_hosts():
    pool = hosts(*((f"n{i}", 8) for i in range(10_000)))
    assert len(choose(pool, include="@".join(f"n{i}:0" for i in range(10_000))).nodes) == 10_000
    assert len(choose(pool, include="@".join(f"x{i}:0" for i in range(5_000))).findings) == 5_000
    assert len(choose(pool, include="n1:" * 5_000).findings) == 1
    assert len(choose(pool, include="@" * 5_000).findings) == 5_001


pieces = st.builds(
    lambda name, slots: name + (":" + ",".join(map(str, slots)) if slots else ""),
    st.sampled_from(["n0", "n1", "n2", "n9"]),
    st.lists(st.integers(-1, 5), max_size=3),
)


@pytest.mark.deepspeed
@settings(deadline=None)
@given(
    pools,
    st.lists(pieces, max_size=4).map("@".join),
    st.lists(pieces, max_size=3).map("@".join),
    st.integers(-1, 3),
    st.integers(-1, 3),
)
def test_deepspeed_itself_chooses_the_same(pool, include, exclude, nodes, gpus):
    from deepspeed.launcher import runner

    ours = choose(pool, include=include, exclude=exclude, nodes=nodes, gpus=gpus)
    try:
        if (nodes >= 0 or gpus >= 0) and (include or exclude):
            raise ValueError  # noqa: TRY301 - runner.main does, before these functions
        slots = collections.OrderedDict((host.name, host.slots) for host in pool)
        theirs = runner.parse_inclusion_exclusion(slots, include, exclude)
        theirs = runner.apply_num_nodes_and_gpus(theirs, nodes, gpus)
    except ValueError:
        assert errors(ours.findings)
        return
    if not errors(ours.findings):
        assert {name: list(devices) for name, devices in chosen(ours).items()} == dict(theirs)
        return
    # What it accepts and gets wrong.
    refused = {finding.code for finding in errors(ours.findings)}
    assert refused <= {"select.conflict", "select.empty", "select.too_few_nodes", "select.too_many_gpus"}
