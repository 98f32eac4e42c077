"""The same promises, kept by all three transports against real processes and a real sshd."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import sshd as sshds

from safelaunch.transport import choose, program
from safelaunch.transport.base import STDERR_KEPT, ChannelLostError

pytestmark = [pytest.mark.sshd, pytest.mark.timeout(120)]
LATE = 30.0
HOST = "127.71.0.1"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if reason := sshds.missing():
        pytest.skip(reason)
    with sshds.Sshd(tmp_path_factory.mktemp("sshd"), [HOST, "127.71.0.2"]) as server:
        yield server


@pytest.fixture(params=["local", "ssh", "openssh"])
def transport(request, server):
    before = set(threading.enumerate())
    transport = choose.make(
        request.param, [HOST], ssh_port=None, fanout=4, environ=os.environ, home=str(server.home)
    )
    yield transport
    transport.close()
    assert wait_for(lambda: not set(threading.enumerate()) - before), set(threading.enumerate()) - before


def opened(transport, host=HOST):
    results = {}
    transport.open([host], results.__setitem__, timeout=LATE)
    assert hasattr(results[host], "start"), results[host]
    return results[host]


@pytest.fixture
def session(transport):
    return opened(transport)


def wait_for(condition, seconds=LATE):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def flood(channel):
    with pytest.raises(ChannelLostError):
        channel.send(bytes(50_000_000))


def result(channel):
    lines = list(channel.lines())
    return lines, channel.wait(LATE), channel.stderr()


@pytest.mark.parametrize(
    ("command", "status"),
    [("true", 0), ("exit 3", 3), ("exit 255", 255), ("kill -9 $$", 137), ("kill -TERM $$", 143)],
)
def test_exit_status(session, command, status):
    assert result(session.start(command))[1] == status


def test_stdout_and_stderr_stay_apart(session):
    lines, status, stderr = result(session.start("echo out; echo err >&2; echo more"))
    assert (lines, status, stderr) == ([b"out", b"more"], 0, b"err\n")


def test_lines_of_any_length_and_content(session):
    script = (
        "import sys; w=sys.stdout.buffer.write; w(bytes(range(256))+b'\\n\\n'); "
        "w(b'x'*3000000+b'\\n'); w(b'rest')"
    )
    lines, status, _ = result(session.start(f'exec "{sys.executable}" -c "{script}"'))
    first, second = bytes(range(256)).split(b"\n")
    assert lines == [first, second, b"", b"x" * 3_000_000, b"rest"]
    assert status == 0


def test_a_long_lived_program_that_answers(session):
    source = (
        b"import sys\nfor line in sys.stdin.buffer:\n"
        b"    sys.stdout.buffer.write(b'got ' + line)\n    sys.stdout.buffer.flush()\n"
    )
    channel = session.start(program.command("echo", sys.executable))
    channel.send(b"%d\n%s" % (len(source), source))
    lines = channel.lines()
    for number in range(50):
        channel.send(b"%d\n" % number)
        assert next(lines) == b"got %d" % number
    assert channel.wait(0.05) is None
    channel.send_eof()
    assert list(lines) == []
    assert channel.wait(LATE) == 0


def test_large_stdin_arrives_unchanged(session):
    data = random.Random(1).randbytes(5_000_000)
    channel = session.start("sha256sum")
    channel.send(data)
    channel.send_eof()
    lines, status, _ = result(channel)
    assert (lines[0].split()[0].decode(), status) == (hashlib.sha256(data).hexdigest(), 0)


def test_large_data_both_ways_at_once(session):
    data = random.Random(2).randbytes(5_000_000)
    channel = session.start("exec cat")
    sender = threading.Thread(target=lambda: (channel.send(data), channel.send_eof()))
    sender.start()
    assert b"\n".join(channel.lines()) + (b"\n" if data.endswith(b"\n") else b"") == data
    sender.join(LATE)
    assert channel.wait(LATE) == 0


def test_messages_of_two_threads_stay_whole(session):
    channel = session.start("exec cat")
    threads = [
        threading.Thread(target=lambda c=char: [channel.send(c * 50_000 + b"\n") for _ in range(20)])
        for char in (b"a", b"b")
    ]
    for thread in threads:
        thread.start()
    lines = channel.lines()
    got = [next(lines) for _ in range(40)]
    assert sorted(got) == [b"a" * 50_000] * 20 + [b"b" * 50_000] * 20
    channel.close()
    for thread in threads:
        thread.join(LATE)


def test_stderr_is_bounded_and_blocks_nobody(session):
    script = "import sys; sys.stderr.write('e'*4000000 + 'end'); print('done')"
    channel = session.start(f'exec "{sys.executable}" -c "{script}"')
    lines, status, stderr = result(channel)
    assert (lines, status) == ([b"done"], 0)
    assert len(stderr) <= STDERR_KEPT
    assert stderr.endswith(b"eeend")


def test_stderr_flows_while_only_wait_is_called(session):
    script = "import sys; sys.stderr.write('e'*4000000)"
    channel = session.start(f'exec "{sys.executable}" -c "{script}"')
    assert channel.wait(LATE) == 0
    assert channel.stderr() == b"e" * STDERR_KEPT


def test_exit_status_comes_while_a_child_holds_the_output(session):
    channel = session.start("sleep 300 & echo $!; exit 4")
    pid = int(next(channel.lines()))
    try:
        assert channel.wait(LATE) == 4
    finally:
        channel.close()
        sshds.kill(pid, signal.SIGKILL)


def test_close_frees_who_waits(session):
    for blocked in (
        lambda channel: list(channel.lines()),
        lambda channel: channel.wait(),
        lambda channel: channel.send(bytes(20_000_000)),
    ):
        channel = session.start("exec sleep 300")
        ended = []

        def run(blocked=blocked, channel=channel, ended=ended):
            try:
                ended.append(blocked(channel))
            except ChannelLostError as error:
                ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.2)
        assert thread.is_alive()
        channel.close()
        thread.join(LATE)
        assert not thread.is_alive()
        assert ended[0] in ([], None) or isinstance(ended[0], ChannelLostError)
        channel.close()


def test_sending_to_a_command_that_has_ended(session):
    channel = session.start("true")
    assert channel.wait(LATE) == 0

    def refused():
        try:
            channel.send(b"x" * 100_000)
        except ChannelLostError:
            return True
        return False

    assert wait_for(refused)


def test_closing_the_session_ends_its_channels(session):
    channel = session.start("exec cat")
    other = session.start("exec sleep 300")
    session.close()
    assert list(channel.lines()) == []
    assert channel.wait(LATE) is None
    assert other.wait(LATE) is None
    with pytest.raises(ChannelLostError):
        channel.send(b"x" * 100_000)
    with pytest.raises(ChannelLostError):
        session.start("true")


def test_several_channels_at_once(session):
    channels = [session.start(f"read x; echo {n} $x") for n in range(8)]
    for channel in reversed(channels):
        channel.send(b"here\n")
    assert [result(channel)[0] for channel in channels] == [[b"%d here" % n] for n in range(8)]


def test_the_command_line_arrives_byte_for_byte(session):
    text = "a'b\"c $HOME %h * \\ü\udcff"
    quoted = "'" + text.replace("'", "'\\''") + "'"
    lines, _, _ = result(session.start(f"printf %s {quoted}"))
    assert lines == [text.encode("utf-8", "surrogateescape")]


def test_commands_start_in_the_home_directory(session):
    lines, _, _ = result(session.start("pwd -P; cd; pwd -P"))
    if session.host_key:
        assert lines[0] == lines[1]


@pytest.mark.parametrize("transport", ["ssh", "openssh"], indirect=True)
class TestConnection:
    def test_what_is_known_of_the_peer(self, session, server):
        assert (session.host, session.address, session.host_key) == (HOST, HOST, server.fingerprint)
        assert 0 < session.seconds < LATE
        assert session.remarks == ()

    def test_killed_connection_is_lost_not_an_exit(self, transport, server):
        before = set(server.children())
        session = opened(transport)
        channel = session.start("echo ready; exec cat")
        lines = channel.lines()
        assert next(lines) == b"ready"
        for pid in set(server.children()) - before:
            sshds.kill(pid, signal.SIGKILL)
        assert list(lines) == []
        assert channel.wait(LATE) is None
        with pytest.raises(ChannelLostError):
            channel.send(bytes(8_000_000))

        def refuses():
            try:
                session.start("true").close()
            except ChannelLostError:
                return True
            return False

        assert wait_for(refuses)
        again = opened(transport)
        assert result(again.start("echo back"))[0] == [b"back"]

    def test_close_does_not_wait_for_a_frozen_peer(self, transport, server):
        before = set(server.children())
        session = opened(transport)
        channel = session.start("exec sleep 300")
        frozen = set(server.children()) - before
        for pid in frozen:
            sshds.kill(pid, signal.SIGSTOP)
        try:
            sender = threading.Thread(target=flood, args=(channel,))
            sender.start()
            time.sleep(0.5)
            started = time.monotonic()
            channel.close()
            session.close()
            assert time.monotonic() - started < 10
            sender.join(LATE)
            assert not sender.is_alive()
        finally:
            for pid in frozen:
                sshds.kill(pid, signal.SIGKILL)

    def test_start_on_a_frozen_node_ends(self, server, transport):
        before = set(server.children())
        results = {}
        transport.open([HOST], results.__setitem__, timeout=3)
        session = results[HOST]
        frozen = set(server.children()) - before
        for pid in frozen:
            sshds.kill(pid, signal.SIGSTOP)
        try:
            # `openssh` learns of it only from its keep-alives; a deadline of the caller's closes the channel.
            if transport.name == "openssh":
                channel = session.start("true")
                assert channel.wait(1) is None
                channel.close()
            else:
                with pytest.raises(ChannelLostError):
                    session.start("true")
        finally:
            for pid in frozen:
                sshds.kill(pid, signal.SIGKILL)


def test_nothing_stays_when_the_launcher_is_killed(server, tmp_path):
    """SIGKILL of a process that holds an `openssh` connection leaves no ssh behind."""
    script = tmp_path / "hold.py"
    script.write_text(
        "import os, sys\n"
        "from safelaunch.transport import choose\n"
        f"t = choose.make('openssh', ['{HOST}'], ssh_port=None, fanout=1,\n"
        "                environ=os.environ, home=sys.argv[1])\n"
        f"got = {{}}\nt.open(['{HOST}'], got.__setitem__, timeout=30)\n"
        f"c = got['{HOST}'].start('echo $$; exec cat')\n"
        "print(next(c.lines()).decode(), t._directory, flush=True)\nsys.stdin.read()\n"
    )
    before = set(server.children())
    root = str(program.__file__).rsplit("/safelaunch/", 1)[0]
    process = subprocess.Popen(
        [sys.executable, script, server.home],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    )
    with process:
        remote, directory = process.stdout.readline().decode().split()
        process.kill()
    assert wait_for(lambda: not os.path.exists(f"/proc/{remote}"))
    assert wait_for(lambda: set(server.children()) <= before)
    assert wait_for(lambda: os.listdir(directory) == ["config"]), "a control socket is still there"
    shutil.rmtree(directory)
