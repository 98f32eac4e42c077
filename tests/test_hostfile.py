"""Hostfiles: the samples, what people really use, what DeepSpeed itself reads, and the corrections."""

from __future__ import annotations

import json
import os
import re
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safelaunch import hostfile
from safelaunch.findings import Severity, errors
from safelaunch.selection import select

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "hostfiles"
REAL = ROOT.parent / "shared" / "data" / "real-inputs"
EXPECT = re.compile(r"# expect: (\S+) (\w+)(?: line=(\d+) column=(\d+))?")


def files(folder: Path) -> list[Path]:
    skipped = {"README.md", ".gitattributes"}
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and file.suffix != ".expect" and file.name not in skipped
    )


def stated(file: Path) -> list[tuple]:
    beside = file.with_name(file.name + ".expect")
    data = (beside if beside.exists() else file).read_bytes()
    text = data.decode("utf-16") if data.startswith(b"\xff\xfe") else data.decode("utf-8", "replace")
    return [
        (code, severity, int(line) if line else None, int(column) if column else None)
        for code, severity, line, column in EXPECT.findall(text)
    ]


def found(findings) -> list[tuple]:
    return [
        (f.code, f.severity.value, f.where.line, f.where.column)
        for f in findings
        if f.severity is not Severity.INFO
    ]


def judge(file: Path):
    """All that a hostfile alone gives, with no option chosen."""
    parsed = hostfile.parse(file.read_bytes(), str(file))
    selection = select(
        parsed.hosts,
        include="",
        exclude="",
        num_nodes=-1,
        num_gpus=-1,
        visible_devices=None,
        explicit_hostfile=True,
    )
    return parsed, selection, [*parsed.findings, *selection.findings]


def parse(text: str):
    return hostfile.parse(text.encode("utf-8", "surrogateescape"), "hosts")


@pytest.mark.parametrize("file", files(SAMPLES), ids=lambda file: file.name)
def test_good_sample_gives_exactly_what_it_states(file):
    _, selection, findings = judge(file)
    assert stated(file) == found(findings)
    assert not errors(findings)
    assert selection.nodes


@pytest.mark.parametrize("file", files(SAMPLES / "broken"), ids=lambda file: file.name)
def test_broken_sample_gives_what_it_states_and_no_other_error(file):
    expected = stated(file)
    _, _, findings = judge(file)
    assert any(severity == "error" for _, severity, _, _ in expected), "the file states no error"
    assert [one for one in expected if one not in found(findings)] == []
    assert [one for one in found(findings) if one[1] == "error" and one not in expected] == []
    for finding in findings:
        assert finding.observed
        assert finding.why
        assert finding.fix
        assert (finding.observed + finding.fix).replace("\n", "").isprintable()


def test_samples_say_what_they_show():
    for file in [*files(SAMPLES), *files(SAMPLES / "broken")]:
        beside = file.with_name(file.name + ".expect")
        data = (beside if beside.exists() else file).read_bytes()
        assert b"#" in data.replace(b"\0", b""), file


def test_samples_cover_every_code_that_a_file_can_give():
    given_codes = {code for file in files(SAMPLES / "broken") for code, *_ in stated(file)}
    given_codes |= {code for file in files(SAMPLES) for code, *_ in stated(file)}
    # missing and unreadable are about the path, foreign and stale about the owner and the time.
    assert given_codes == {
        "hostfile.duplicate",
        "hostfile.empty",
        "hostfile.ignored_field",
        "hostfile.loopback",
        "hostfile.pattern",
        "hostfile.syntax",
        "hostfile.uneven",
        "hostfile.zero_slots",
    }


def test_readme_names_every_good_sample():
    text = (SAMPLES / "README.md").read_text(encoding="utf-8")
    assert [file.name for file in files(SAMPLES) if f"`{file.name}`" not in text] == []


def test_all_bad_lines_are_reported_and_good_ones_read():
    parsed, _, _ = judge(SAMPLES / "broken" / "all-at-once")
    assert [(host.name, host.slots) for host in parsed.hosts] == [
        ("node1", 4),
        ("node4", 4),
        ("node6", 0),
        ("node7", 4),
    ]


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("node1 slots=8x", "node1 slots=8"),
        ("node1 slots=2.5 # rack 3", "node1 slots=2 # rack 3"),
        ("node1 slots = 8", "node1 slots=8"),
        ("node1 Slots=8", "node1 slots=8"),
        ("node1 slot=8", "node1 slots=8"),
        ("node1 gpus=8", "node1 slots=8"),
        ("node1 8", "node1 slots=8"),
        ("node1:8", "node1 slots=8"),
        ("node1:22 slots=8", "node1 slots=8"),
        ("[2001:db8::1] slots=8", "2001:db8::1 slots=8"),
        ("node1 max_slots=16 slots=8", "node1 slots=8"),
        ("node1 slots=8 max_slots=16", "node1 slots=8"),
        ("node1 slots=2,node2 slots=4", "node1 slots=2\nnode2 slots=4"),
        ("node1 slots=2 node2 slots=4", "node1 slots=2\nnode2 slots=4"),
        ("node1,node2 slots=4", "node1 slots=4\nnode2 slots=4"),
        ("- node1 slots=8", "node1 slots=8"),
        ('"node1" slots=8', "node1 slots=8"),
        ("node1 slots=8;", "node1 slots=8"),
        ("node\u20131 slots=8", "node-1 slots=8"),
        ("node1\u200b slots=8", "node1 slots=8"),
        ("node1 slots=\uff18", "node1 slots=8"),
        ("node1 slots=0", "# node1 slots=0"),
        ("n[1-2] slots=8", "n1 slots=8\nn2 slots=8"),
        ("n[1-20] slots=8", "# safelaunch: patterns\nn[1-20] slots=8"),
    ],
)
def test_the_fix_is_the_corrected_line(line, fix):
    parsed = parse(line)
    assert [fix] == [finding.fix for finding in parsed.findings]
    assert list(parse(f"other slots=1\n{fix}").findings) == []


def test_a_bare_name_gets_the_slots_of_the_others():
    parsed = parse("node1 slots=4\nnode2\nnode3 slots=4\n")
    assert [finding.fix for finding in parsed.findings] == ["node2 slots=4"]
    assert "slots=N" in parse("node2").findings[0].fix


def test_what_is_no_host_name_never_becomes_a_host():
    for name in (
        "-oProxyCommand=id",
        "u@-x",
        "$(id)",
        "a;b",
        "a`b`",
        "a/b",
        "a\\b",
        "a\x1bb",
        "a\0b",
        "*",
        "~",
    ):
        assert parse(f"{name} slots=1").hosts == (), name


def test_terminal_sequences_never_reach_the_terminal():
    for finding in parse(
        "n1\x1b[2J slots=1\nn2 slots=1 \x1b[2J\nn3 slots=0 \x1b[2J\nn2 slots=1 \x1b[2J"
    ).findings:
        assert (finding.observed + finding.fix).isprintable()


def test_a_duplicate_names_both_lines_and_the_first_one_stays():
    parsed = parse("a slots=1\nb slots=2\na slots=4\n")
    (finding,) = parsed.findings
    assert "line 3" in finding.observed
    assert "line 1" in finding.observed
    assert [(host.name, host.slots) for host in parsed.hosts] == [("a", 1), ("b", 2)]


def test_names_that_differ_in_case_alone_are_kept_with_a_warning():
    # ~/.ssh/config tells them apart, and deepspeed does; the preflight knows more.
    parsed = parse("Node1 slots=1\nnode1 slots=1\n")
    assert not errors(parsed.findings)
    assert len(parsed.hosts) == 2


def test_patterns_expand_in_numeric_order_with_their_place():
    parsed = parse("# safelaunch: patterns\n  n[10,8-9]x slots=2\nu@m[01-02] slots=1\n")
    assert parsed.findings == ()
    assert [host.name for host in parsed.hosts] == ["n8x", "n9x", "n10x", "u@m01", "u@m02"]
    assert {(2, 3), (3, 1)} == {(host.where.line, host.where.column) for host in parsed.hosts}


def test_a_pattern_before_digits_is_refused():
    # ClusterShell would put the digits into the range and multiply it.
    parsed = parse(f"# safelaunch: patterns\nn[1-3]{'9' * 30} slots=1\n")
    assert [(f.code, f.where.column) for f in parsed.findings] == [("hostfile.syntax", 2)]


@pytest.mark.timeout(60)  # 0.1 s where measured; it catches what grows with the square
def test_a_long_file_is_read_quickly():
    text = "".join(f"node{i}.example.org slots=8\n" for i in range(10_000)).encode()
    assert len(hostfile.parse(text, "hosts").hosts) == 10_000
    assert len(hostfile.parse(text.replace(b" slots=", b":"), "hosts").findings) == 10_000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ["a", " ", "[", "a[", "slots=", "slots ", "#", "@", ":", "\ufeff", "1,"])
def test_a_long_line_is_no_trap(piece):
    parse(piece * (100_000 // len(piece)) + " slots=2")


names = st.from_regex(r"[a-z][a-z0-9-]{0,12}(\.[a-z]{1,5}){0,2}", fullmatch=True)
entries = st.lists(st.tuples(names, st.integers(1, 4096)), min_size=1, unique_by=lambda entry: entry[0])


@given(entries, st.data())
def test_a_valid_file_gives_exactly_its_hosts(entries, data):
    blank = st.text(" \t", min_size=1, max_size=3)
    lines = []
    for name, slots in entries:
        lines += data.draw(st.lists(st.sampled_from(["", "   ", "# a comment", "\t# slots=3"]), max_size=2))
        tail = data.draw(st.sampled_from(["", " ", "\t# rack 3", " # slots=9", "#x"]))
        lines.append(
            data.draw(st.sampled_from(["", " "])) + name + data.draw(blank) + f"slots={slots}" + tail
        )
    text = data.draw(st.sampled_from(["\n", "\r\n", "\r"])).join(lines)
    parsed = parse(text)
    assert parsed.findings == ()
    assert entries == [(host.name, host.slots) for host in parsed.hosts]
    for host in parsed.hosts:
        line = re.split(r"\r\n|\r|\n", text)[host.where.line - 1]
        assert line[host.where.column - 1 :].startswith(host.name)


faults = st.sampled_from(
    [
        "{n}:{s}",
        "{n}:22 slots={s}",
        "{n} slots = {s}",
        "{n} Slots={s}",
        "{n} slot={s}",
        "{n} slots={s}x",
        "{n} slots={s}.5",
        "{n} slots={s};",
        "{n} slots={s},",
        "{n} slots={s} max_slots=4",
        "{n} max_slots=4 slots={s}",
        "{n} slots={s},zz slots=3",
        "{n} slots={s} zz slots=3",
        "{n},zz slots={s}",
        "{n}\u200b slots={s}",
        "'{n}' slots={s}",
        "- {n} slots={s}",
        "{n} {s}",
        "{n}",
        "{n}[1-3] slots={s}",
        "{n}[1-99] slots={s}",
        "{n} slots=0",
    ]
)


@given(entries, faults, names, st.integers(1, 4096))
def test_applying_the_fix_makes_the_fault_go(entries, fault, name, slots):
    taken = {entry[0] for entry in entries}
    if name in taken or "zz" in taken or name == "zz" or any(other.startswith(name) for other in taken):
        return
    lines = [f"{other} slots={count}" for other, count in entries]
    bad = [*lines, fault.format(n=name, s=slots)]
    before = parse("\n".join(bad))
    assert [finding.where.line for finding in before.findings] == [len(bad)]
    after = parse("\n".join([*lines, before.findings[0].fix]))
    assert after.findings == ()
    assert entries == [(host.name, host.slots) for host in after.hosts[: len(entries)]]


@given(st.text(alphabet=string.printable, max_size=60))
def test_a_line_that_we_accept_means_to_deepspeed_what_it_means_to_us(line):
    parsed = parse(line)
    if parsed.findings or "\n" in line or "\r" in line:
        return
    match = re.search(r"^(\S+)\s+slots=(\d+)", line.strip())  # DeepSpeed's own
    assert (match[1], int(match[2])) == (parsed.hosts[0].name, parsed.hosts[0].slots)


@pytest.mark.skipif(not REAL.is_dir(), reason="no ../shared/data/real-inputs here")
def test_real_hostfiles_are_judged_as_deepspeed_does():
    verdicts = json.loads((REAL / "expected.json").read_text(encoding="utf-8"))["hostfiles"]
    assert verdicts
    for name, verdict in verdicts.items():
        _, selection, findings = judge(REAL / "hostfiles" / name)
        if verdict["status"] == "accepted":
            assert errors(findings) == [], name
            assert verdict["hosts"] == len(selection.nodes), name
            assert verdict["slots"] == sum(len(node.slots) for node in selection.nodes), name
        else:
            assert errors(findings), name


@pytest.mark.deepspeed
def test_deepspeed_itself_reads_what_we_accept():
    from deepspeed.launcher import runner

    for file in files(SAMPLES):
        if file.name == "patterns":
            continue
        parsed, _, _ = judge(file)
        pool = runner._parse_hostfile(file.read_text(encoding="utf-8").splitlines(keepends=True))
        assert list(pool.items()) == [(host.name, host.slots) for host in parsed.hosts], file.name


def ownership(tmp_path, *, mode=0o644, owner=0, age=0.0, job_start=None, uid=0):
    file = tmp_path / "hosts"
    file.write_text("node1 slots=1\n")
    file.chmod(mode)
    os.utime(file, (1_000_000 - age, 1_000_000 - age))
    stat = list(file.stat())
    stat[4] = owner
    return hostfile.ownership_findings(str(file), os.stat_result(stat), uid, job_start)


def test_a_file_that_anyone_may_write_is_foreign(tmp_path):
    assert list(ownership(tmp_path, mode=0o666, owner=7, uid=7)) == []
    assert list(ownership(tmp_path, mode=0o664, owner=7, uid=8)) == []
    (finding,) = ownership(tmp_path, mode=0o666, owner=7, uid=8)
    assert (finding.code, finding.severity) == ("hostfile.foreign", Severity.WARNING)
    assert "7" in finding.observed


def test_a_file_older_than_the_slurm_job_is_stale(tmp_path):
    assert list(ownership(tmp_path, age=0, job_start=None)) == []
    assert list(ownership(tmp_path, age=0, job_start=999_000)) == []
    (finding,) = ownership(tmp_path, age=7200, job_start=1_000_000)
    assert (finding.code, finding.severity) == ("hostfile.stale", Severity.WARNING)
    assert "2.0 hours" in finding.observed


def test_a_pipe_has_no_owner_worth_a_word():
    read, write = os.pipe()
    try:
        assert hostfile.ownership_findings("/dev/fd/3", os.fstat(read), 12345, 2e12) == ()
    finally:
        os.close(read)
        os.close(write)
