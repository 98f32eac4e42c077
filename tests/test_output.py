"""Rank output: whole lines on shared streams, every byte in the files, one traceback once."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from safelaunch.output import HELD_LINES, LONGEST_PART, LineMerger, RunOutput, TracebackFold

TRACE = b'Traceback (most recent call last):\n  File "t.py", line 1, in f\n    x\nValueError: boom\n'


def test_lines_of_two_sources_never_mix():
    stream = io.BytesIO()
    merger = LineMerger(stream)
    merger.feed(0, b"ze")
    merger.feed(1, b"one\n")
    merger.feed(0, b"ro\nhalf")
    merger.flush(end_line=False)

    assert stream.getvalue() == b"one\nzero\nhalf"


def test_a_line_that_does_not_grow_is_shown_and_then_closed():
    stream = io.BytesIO()
    merger = LineMerger(stream)
    merger.feed(0, b"name? ")
    merger.idle()
    assert stream.getvalue() == b""
    merger.idle()
    assert stream.getvalue() == b"name? "
    merger.feed(1, b"other\n")

    assert stream.getvalue() == b"name? \nother\n"


def test_progress_bars_move():
    stream = io.BytesIO()
    merger = LineMerger(stream)
    merger.feed(0, b"10%\r20%\r3")

    assert stream.getvalue() == b"10%\r20%\r"


def test_a_line_without_end_does_not_grow_for_ever():
    stream = io.BytesIO()
    merger = LineMerger(stream)
    merger.feed(0, b"x" * (LONGEST_PART + 1))

    assert len(stream.getvalue()) == LONGEST_PART + 1


def test_a_closed_stream_is_given_up():
    stream = io.BytesIO()
    stream.close()
    LineMerger(stream).feed(0, b"x\n")


@given(st.lists(st.binary(min_size=1, max_size=30), max_size=20))
def test_one_source_arrives_byte_for_byte(pieces):
    stream = io.BytesIO()
    merger = LineMerger(stream)
    for piece in pieces:
        merger.feed(0, piece)
    merger.flush(end_line=False)

    assert stream.getvalue() == b"".join(pieces)


def fold():
    got = []
    return TracebackFold(lambda rank, data: got.append((rank, data))), got


def test_the_same_traceback_is_printed_once():
    folder, got = fold()
    for rank in (2, 0, 1):
        folder.feed(rank, b"before\n" + TRACE + b"after\n")

    assert sum(data == TRACE for _, data in got) == 1
    assert folder.repeats == {2: [0, 1]}
    assert sum(data == b"after\n" for _, data in got) == 3


def test_torchs_rank_prefix_does_not_hide_that_they_are_equal():
    folder, got = fold()
    for rank in (0, 1):
        folder.feed(rank, b"".join(b"[rank%d]: " % rank + line for line in TRACE.splitlines(keepends=True)))

    assert folder.repeats == {0: [1]}
    assert len(got) == 1


def test_errors_that_differ_in_numbers_are_one_and_others_are_not():
    folder, got = fold()
    start = b'Traceback (most recent call last):\n  File "t.py", line 4, in f\n'
    folder.feed(0, start + b"RuntimeError: closed by peer [10.0.0.1]:5000\n")
    folder.feed(1, start + b"RuntimeError: closed by peer [10.0.0.12]:44012\n")
    folder.feed(2, start.replace(b"4", b"5") + b"RuntimeError: closed by peer [10.0.0.1]:5000\n")
    folder.feed(3, start + b"RuntimeError: refused by peer [10.0.0.1]:5000\n")

    assert [rank for rank, _ in got] == [0, 2, 3]
    assert folder.repeats == {0: [1]}


def test_different_tracebacks_are_all_printed():
    folder, got = fold()
    folder.feed(0, TRACE)
    folder.feed(1, TRACE.replace(b"boom", b"other"))

    assert len(got) == 2
    assert not folder.repeats


@given(
    st.lists(st.sampled_from([TRACE[:20], TRACE[20:50], TRACE[50:], b"x", b"x\n", b"\r", TRACE]), max_size=12)
)
def test_nothing_of_a_single_rank_is_lost(pieces):
    folder, got = fold()
    for piece in pieces:
        folder.feed(0, piece)
    folder.flush()
    text = b"".join(pieces)
    seen = b"".join(data for _, data in got)

    assert seen == text or folder.repeats or text.count(TRACE) > 1


def test_an_endless_traceback_is_not_held_for_ever():
    folder, got = fold()
    folder.feed(0, TRACE.splitlines(keepends=True)[0] + b"  more\n" * (HELD_LINES + 5))

    assert got


def test_files_hold_every_byte(tmp_path):
    out, err = io.BytesIO(), io.BytesIO()
    output = RunOutput(str(tmp_path), out, err, echo_launcher=False)
    output.feed("n1", 0, "out", b"a\xff\n")
    output.feed("n1", 0, "err", TRACE)
    output.feed("n2", 1, "err", TRACE)
    output.feed("n2", None, "err", b"launch.py\n")
    output.close()

    assert (tmp_path / "rank-0.out").read_bytes() == b"a\xff\n"
    assert (tmp_path / "rank-1.err").read_bytes() == TRACE
    assert (tmp_path / "node-n2.log").read_bytes() == b"launch.py\n"
    assert out.getvalue() == b"a\xff\n"
    assert err.getvalue().count(b"ValueError") == 1
    assert b"the traceback of rank 0 was printed by rank 1 too" in err.getvalue()
    assert b"launch.py" not in err.getvalue()
