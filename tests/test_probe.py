"""The probe as a real process, started as the transports start it: a shell line, then bytes on stdin."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from safelaunch.facts import ENVIRONMENT
from safelaunch.transport import program

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parent.parent
DATA = ROOT.parent / "shared" / "data" / "nvidia"
PARTS = sorted((ROOT / "safelaunch" / "remote").glob("probe*.py"))
LONG = 60
"""Seconds after which a test gives up: far more than anything here takes, even on a busy machine."""


class Probe:
    """One probe process, its facts by name, and its answers by command id."""

    def __init__(self, *, env=None, python=sys.executable, **config):
        self.marker = program.new_marker()
        self.config = {
            "marker": self.marker,
            "deadline": LONG,
            "linger": LONG,
            "interpreter": sys.executable,
            "cwd": "/",
            "env": {},
            "unset": [],
            "environment": list(ENVIRONMENT),
            **config,
        }
        bin_directory = os.path.dirname(python)
        environ = {**os.environ, "PATH": f"{bin_directory}:{os.environ['PATH']}", **(env or {})}
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", program.command("probe", python)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
        )
        self.facts, self.errors, self.replies, self.stray = {}, {}, {}, []
        self.done, self.ended = threading.Event(), threading.Event()
        self.news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.process.stdin.write(program.payload("probe", self.config))
        self.process.stdin.flush()

    def _read(self):
        for line in self.process.stdout:
            if not line.startswith(self.marker.encode()):
                self.stray.append(line)
                continue
            message = json.loads(line[len(self.marker) :])
            with self.news:
                if "value" in message:
                    self.facts[message["fact"]] = message["value"]
                elif "fact" in message:
                    self.errors[message["fact"]] = message["error"]
                elif "reply" in message:
                    self.replies[message["reply"]] = message
                self.news.notify_all()
            if "done" in message:
                self.done.set()
        self.ended.set()

    def fact(self, name):
        assert self.done.wait(LONG), self.process.poll()
        assert name not in self.errors, self.errors[name]
        return self.facts[name]

    def ask(self, do, **fields):
        number = len(self.replies) + 1
        self.process.stdin.write(json.dumps({"do": do, "id": number, **fields}).encode() + b"\n")
        self.process.stdin.flush()
        with self.news:
            assert self.news.wait_for(lambda: number in self.replies, LONG)
            return self.replies[number]

    def end(self):
        """Close its stdin; return its exit status and what it wrote to stderr."""
        self.process.stdin.close()
        status = self.process.wait(LONG)
        assert self.ended.wait(LONG)
        return status, self.process.stderr.read()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.ended.wait(LONG)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.stderr.close()


def collect(*want, **options):
    """Run a probe with some collectors and return the value of the first."""
    with Probe(want=list(want), **options) as probe:
        return probe.fact(want[0])


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def gone(pid: int) -> bool:
    """Wait until a process is no more than a zombie."""
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def documented_facts():
    text = (ROOT / "docs/reference/node-programs.md").read_text()
    return set(re.findall(r"`(\w+)`", text.partition("The facts:")[2].partition("The launcher adds")[0]))


# --- the conversation


def test_every_fact_of_the_contract_comes_and_nothing_else_is_said(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print()\n")
    before = sorted(tmp_path.rglob("*"))
    with Probe(
        cwd=str(tmp_path),
        program={"kind": "python", "script": "train.py"},
        files=[],
        env={"HOME": str(tmp_path), "DS_ACCELERATOR": "cpu"},
    ) as probe:
        assert probe.done.wait(LONG)
        assert probe.errors == {}
        assert set(probe.facts) == documented_facts()
        assert probe.end() == (0, b"")
        assert probe.stray == []
    assert sorted(tmp_path.rglob("*")) == before, "it only reads"


@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.stem)
def test_it_is_written_for_python_3_8(path):
    ast.parse(path.read_text(), feature_version=(3, 8))


def other_pythons(minor):
    """Return interpreters of that minor version, those of pyenv too."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [shutil.which(f"python3.{minor}"), *sorted(pyenv.glob(f"versions/3.{minor}.*/bin/python3"))]
    return [str(path) for path in found if path]


@pytest.mark.parametrize("minor", [8, 9, 10, 12, 13])
def test_it_runs_on_other_pythons(minor):
    for candidate in other_pythons(minor):
        show = [candidate, "-c", "import sys; print(sys.executable)"]
        real = subprocess.run(show, capture_output=True, text=True, check=False)
        if real.returncode == 0:
            break
    else:
        pytest.skip(f"no Python 3.{minor} on this machine")
    with Probe(python=real.stdout.strip(), env={"PATH": os.path.dirname(real.stdout.strip())}) as probe:
        assert probe.done.wait(LONG)
        assert set(probe.errors) <= {"code"}, probe.errors
        assert probe.ask("clock")["time"] == pytest.approx(time.time(), abs=LONG)
        assert probe.end()[0] == 0


def test_it_ends_by_itself_when_nobody_speaks_to_it():
    with Probe(want=["host"], linger=0.2) as probe:
        assert probe.process.wait(LONG) == 0


def test_one_that_fails_ends_and_says_why():
    """It would be waited for otherwise: the thread that collects is not the one that keeps it alive."""
    with Probe(want=["host"], deadline="soon") as probe:
        assert probe.process.wait(LONG) == 1
        assert b"could not convert string to float: 'soon'" in probe.process.stderr.read()


def test_a_stuck_collector_loses_only_itself(tmp_path):
    os.mkfifo(tmp_path / "ds.json")  # opening it waits for a writer, as a dead network file system does
    with Probe(
        cwd=str(tmp_path), files=["ds.json"], deadlines={"configs": 0.3}, want=["configs", "host"]
    ) as probe:
        assert probe.done.wait(LONG)
        assert probe.errors == {"configs": "no answer in 0 s"}
        assert set(probe.facts) == {"host"}
        assert "time" in probe.ask("clock")
        assert probe.end()[0] == 0


def test_a_collector_that_fails_says_why(tmp_path):
    interpreter = executable(tmp_path / "bin" / "python", "#!/bin/sh\necho broken >&2\nexit 3\n")
    with Probe(interpreter=str(interpreter), want=["software"]) as probe:
        assert probe.done.wait(LONG)
        assert "exited 3: broken" in probe.errors["software"]


def test_an_unknown_command_is_answered_and_the_next_one_too():
    with Probe(want=[]) as probe:
        assert "error" in probe.ask("dance")
        assert "time" in probe.ask("clock")


def test_bytes_that_are_no_utf8_arrive_as_they_were(tmp_path):
    name = os.fsdecode(b"b\xff.json")
    (tmp_path / name).write_text("{}")
    value = collect("configs", cwd=str(tmp_path), files=[name])
    assert list(value) == [name]
    assert "hash" in value[name]


# --- ports and connections


def test_a_listener_is_reached_and_known_by_its_token():
    with Probe(want=[]) as probe:
        port = probe.ask("listen", port=0, token="secret")["port"]
        targets = [["127.0.0.1", port], ["localhost", port], ["nowhere.invalid", port], ["127.0.0.1", 1]]
        rows = probe.ask("dial", targets=targets, timeout=5, token="secret")["results"]
        by_address = {(row["address"], row["port"]): row for row in rows}
        assert by_address["127.0.0.1", port]["ok"]
        assert by_address["localhost", port]["ok"]
        assert by_address["nowhere.invalid", port]["kind"] == "name"
        assert by_address["127.0.0.1", 1]["kind"] == "refused"
        probe.ask("unlisten")
        (row,) = probe.ask("dial", targets=[["127.0.0.1", port]], timeout=5, token="secret")["results"]
        assert row["kind"] == "refused"


def test_somebody_else_behind_the_address_is_no_success():
    with Probe(want=[]) as probe, socket.create_server(("127.0.0.1", 0)) as other:

        def greet():
            with other.accept()[0] as caller:
                caller.sendall(b"SSH-2.0-other\r\n")

        threading.Thread(target=greet, daemon=True).start()
        target = ["127.0.0.1", other.getsockname()[1]]
        (row,) = probe.ask("dial", targets=[target], timeout=5, token="secret")["results"]
        assert (row["ok"], row["kind"]) == (False, "stranger")


def test_silence_is_a_timeout():
    with Probe(want=[]) as probe, socket.create_server(("127.0.0.1", 0)) as other:
        target = ["127.0.0.1", other.getsockname()[1]]  # accepts, but never says a word
        (row,) = probe.ask("dial", targets=[target], timeout=0.3, token="secret")["results"]
        assert (row["ok"], row["kind"]) == (False, "timeout")


def test_the_holder_of_a_port_is_named():
    with Probe(want=[]) as probe, socket.create_server(("127.0.0.1", 0)) as other:
        reply = probe.ask("listen", port=other.getsockname()[1], token="t")
        assert "in use" in reply["error"]
        assert reply["holder"]["pid"] == os.getpid()
        assert reply["holder"]["user"]
        assert "pytest" in reply["holder"]["command"] or "python" in reply["holder"]["command"]


def test_a_chosen_port_is_reserved_against_another_preflight_but_not_against_rank_0():
    with Probe(want=[]) as first, Probe(want=[]) as second:
        port = first.ask("listen", port=0, token="t")["port"]
        assert port >= 29501
        first.ask("unlisten")
        reply = second.ask("listen", port=port, token="t")
        assert "another safelaunch" in reply["error"]
        assert second.ask("listen", port=0, token="t")["port"] != port
        with socket.socket() as rank_0:
            rank_0.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            rank_0.bind(("", port))
            rank_0.listen()
        first.end()
        assert second.ask("listen", port=port, token="t")["port"] == port


def test_names_are_looked_up():
    with Probe(want=[]) as probe:
        reply = probe.ask("resolve", names=["localhost", "nowhere.invalid"])
        assert set(reply["results"]["localhost"]) <= {"127.0.0.1", "::1"}
        assert reply["results"]["nowhere.invalid"] is None or "nowhere.invalid" in reply["late"]


def test_addresses_hold_the_loopback_of_this_machine():
    rows = collect("addresses")
    assert {"interface": "lo", "address": "127.0.0.1", "up": True} in rows


# --- the environment


def test_no_variable_is_told_that_was_not_asked_for(tmp_path):
    (tmp_path / ".nccl.conf").write_text("#NCCL_SOCKET_IFNAME=no\nNCCL_SOCKET_IFNAME=ib\nNCCL_TOKEN=hidden\n")
    env = {"HOME": str(tmp_path), "GLOO_SOCKET_IFNAME": "eth7", "MY_SECRET": "hidden"}
    with Probe(env=env, want=["environment"]) as probe:
        value = probe.fact("environment")
    assert value["values"]["GLOO_SOCKET_IFNAME"] == "eth7"
    assert set(value["values"]) <= set(ENVIRONMENT)
    assert value["nccl_conf"] == {"NCCL_SOCKET_IFNAME": "ib"}
    assert "hidden" not in json.dumps(value)


# --- GPUs


@pytest.fixture
def nvidia_smi(tmp_path):
    def make(text, status=0):
        (tmp_path / "said").write_text(text)
        body = f'#!/bin/sh\n[ "$1" = -L ] || exit 2\ncat {tmp_path}/said\nexit {status}\n'
        executable(tmp_path / "bin" / "nvidia-smi", body)
        return {"PATH": f"{tmp_path}/bin:{os.path.dirname(sys.executable)}:/usr/bin:/bin"}

    return make


def test_what_nvidia_smi_says_is_passed_on(nvidia_smi):
    value = collect("gpus", env=nvidia_smi("GPU 0: X (UUID: GPU-1)\n", status=14))
    assert (value["status"], value["output"]) == (14, "GPU 0: X (UUID: GPU-1)\n")


def test_a_stuck_nvidia_smi_is_given_up_and_killed(tmp_path):
    pid_file = tmp_path / "pid"
    executable(
        tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\ntrap '' TERM\necho $$ > {pid_file}\nsleep 1000\n"
    )
    env = {"PATH": f"{tmp_path}/bin:{os.path.dirname(sys.executable)}:/usr/bin:/bin"}
    with Probe(env=env, deadlines={"gpus": 3}, want=["gpus", "host"]) as probe:
        assert probe.fact("gpus")["status"] is None
        assert "hostname" in probe.fact("host")
        assert gone(int(pid_file.read_text()))


def test_nvidia_smi_goes_with_the_probe(tmp_path):
    pid_file = tmp_path / "pid"
    executable(tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\necho $$ > {pid_file}\nsleep 1000\n")
    env = {"PATH": f"{tmp_path}/bin:{os.path.dirname(sys.executable)}:/usr/bin:/bin"}
    with Probe(env=env, want=["gpus"]) as probe:
        end = time.monotonic() + LONG
        while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < end:
            time.sleep(0.02)
        assert probe.end()[0] == 0
        assert gone(int(pid_file.read_text()))


def test_gpus_are_not_looked_for_where_the_job_wants_none(tmp_path):
    executable(tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\ntouch {tmp_path}/called\n")
    env = {"PATH": f"{tmp_path}/bin:{os.path.dirname(sys.executable)}:/usr/bin:/bin"}
    with Probe(env=env, want=["gpus"]) as probe:
        probe.done.wait(LONG)
    (tmp_path / "called").unlink()
    with Probe(env={**env, "DS_ACCELERATOR": "cpu"}, want=["gpus"]) as probe:
        assert probe.fact("gpus") == {"accelerator": "cpu"}
    assert not (tmp_path / "called").exists()


# --- what the ranks will run


def test_only_what_the_script_imports_is_hashed(tmp_path):
    files = {
        "train.py": "import os, a\nimport pkg.deep as d\nfrom pkg import (\n    b,  # here\n    c,\n)\n",
        "a.py": "if True:\n    import late\n",
        "late.py": "",
        "unused.py": "",
        "pkg/__init__.py": "",
        "pkg/deep.py": "from . import sibling\nfrom .. import nothing\nfrom .sub.leaf import x\n",
        "pkg/sibling.py": "",
        "pkg/b.py": "",
        "pkg/c.py": "",
        "pkg/sub/__init__.py": "",
        "pkg/sub/leaf.py": "",
        "pkg/unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    script = {"kind": "python", "script": str(tmp_path / "train.py")}
    value = collect("code", program=script)
    assert set(value["files"]) == {name for name in files if "unused" not in name}
    assert value["complete"]
    assert value["git"] is None
    (tmp_path / "pkg/sub/leaf.py").write_text("changed")
    changed = collect("code", program=script)["files"]
    assert {name for name in changed if changed[name] != value["files"][name]} == {"pkg/sub/leaf.py"}


def test_a_module_is_found_from_the_working_directory(tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__main__.py").write_text("from job import model\n")
    (tmp_path / "job" / "model.py").write_text("")
    want = {"cwd": str(tmp_path), "program": {"kind": "module", "script": "job"}}
    assert set(collect("code", **want)["files"]) == {"job/__main__.py", "job/model.py"}
    assert collect("paths", **want)["script"]["state"] == "ok"
    want["program"]["script"] = "nothing.there"
    assert collect("paths", **want)["script"]["state"] == "not_found"


def test_a_program_from_elsewhere_is_not_the_users_code(tmp_path):
    assert collect("code", cwd=str(tmp_path), program={"kind": "program", "script": "sh"})["files"] == {}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_git_commit_is_read_loose_packed_and_detached(tmp_path):
    def git(*arguments):
        names = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        run = ["git", *names, "-C", str(tmp_path), *arguments]
        return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "HEAD")
    script = {"kind": "python", "script": str(tmp_path / "src" / "train.py")}
    assert collect("code", program=script)["git"] == commit
    git("pack-refs", "--all")
    assert collect("code", program=script)["git"] == commit
    git("checkout", "-q", "--detach")
    assert collect("code", program=script)["git"] == commit


def test_paths_that_are_not_what_they_must_be(tmp_path):
    (tmp_path / "plain").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "away" / "python")
    options = {"cwd": str(tmp_path), "interpreter": str(tmp_path / "link"), "venv_script": "env/bin/activate"}
    value = collect("paths", program={"kind": "program", "script": "./plain"}, **options)
    assert value["cwd"]["state"] == "ok"
    assert value["interpreter"] == {
        "path": str(tmp_path / "link"),
        "state": "dangling",
        "target": str(tmp_path / "away" / "python"),
    }
    assert value["script"]["state"] == "not_executable"
    assert value["venv_script"] == {
        "path": str(tmp_path / "env/bin/activate"),
        "state": "missing",
        "exists": str(tmp_path),
    }
    assert collect("paths", cwd=str(tmp_path / "plain"))["cwd"]["state"] == "not_a_directory"


def make_venv(place: Path, *distributions: str, cuda="'12.1'") -> Path:
    """Make what looks like a virtual environment; its interpreter leaves a file when it is started."""
    site = place / "lib" / "python3.11" / "site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "version.py").write_text(f"cuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n")
    for distribution in distributions:
        (site / f"{distribution}.dist-info").mkdir()
    (place / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    return executable(
        place / "bin" / "python", f"#!/bin/sh\ntouch {place}/started\necho layout 3.11\necho {site}\n"
    )


def test_versions_are_read_without_starting_the_interpreter(tmp_path):
    python = make_venv(
        tmp_path, "torch-2.4.0+cu121", "deepspeed-0.15.1", "nvidia_nccl_cu12-2.20.5", "numpy-2.0"
    )
    assert collect("software", interpreter=str(python)) == {
        "python": "3.11",
        "torch": "2.4.0+cu121",
        "deepspeed": "0.15.1",
        "cuda": "12.1",
        "nccl": "2.20.5",
    }
    assert not (tmp_path / "started").exists()


def test_the_interpreter_is_asked_before_a_package_is_called_missing(tmp_path):
    python = make_venv(tmp_path, "torch-2.4.0", cuda="None")
    value = collect("software", interpreter=str(python))
    assert (value["torch"], value["deepspeed"], value["cuda"]) == ("2.4.0", None, None)
    assert (tmp_path / "started").exists()


def test_a_package_on_the_pythonpath_goes_first(tmp_path):
    python = make_venv(tmp_path / "venv", "torch-2.4.0", "deepspeed-0.15.1")
    (tmp_path / "own" / "deepspeed-0.16.0.dist-info").mkdir(parents=True)
    value = collect("software", interpreter=str(python), env={"PYTHONPATH": str(tmp_path / "own")})
    assert value["deepspeed"] == "0.16.0"


def test_this_very_interpreter_is_read_right():
    from importlib import metadata

    value = collect("software", interpreter=sys.executable)
    assert value["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert value["torch"] == metadata.version("torch")
    assert value["deepspeed"] == metadata.version("deepspeed")


# --- room and processes


def test_room_is_measured_where_the_ranks_will_write(tmp_path):
    (tmp_path / "ds.json").write_text(
        textwrap.dedent("""
        {"zero_optimization": {"stage": 3, # a comment, as DeepSpeed allows
         "offload_param": {"device": "nvme", "nvme_path": "/local/nvme0"}}}
        """)
    )
    rows = collect(
        "storage",
        cwd=str(tmp_path),
        files=["ds.json"],
        places=[["checkpoints", "out/later"]],
        env={"TMPDIR": str(tmp_path), "TRITON_CACHE_DIR": "/proc"},
    )
    by_use = {row["use"]: row for row in rows}
    assert by_use["NVMe offload"]["path"] == "/local/nvme0"
    assert by_use["checkpoints"]["path"] == str(tmp_path / "out/later")
    assert by_use["checkpoints"]["at"] == str(tmp_path)
    assert by_use["temporary files"]["free"] > 0
    assert by_use["Triton's cache"]["total"] == 0


def test_ranks_without_an_agent_are_seen_and_those_with_one_are_not():
    mark = f"test-{os.getpid()}"
    rank = {**os.environ, "SAFELAUNCH_RUN_ID": mark, "RANK": "3", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}
    sleep = "import time; print(flush=True); time.sleep(1000)"
    spawn = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
    stray = subprocess.Popen([sys.executable, "-c", sleep], env=rank, stdout=subprocess.PIPE)
    agent = subprocess.Popen(
        [sys.executable, "-c", spawn, "safelaunch-agent"],
        env={**rank, "RANK": "7"},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        stray.stdout.readline()
        agent.stdout.readline()
        rows = [row for row in collect("processes") if row["run_id"] == mark]
        assert [(row["pid"], row["rank"]) for row in rows] == [(stray.pid, "3")]
        assert rows[0]["gpus"] == []
        assert "time.sleep" in rows[0]["command"]
    finally:
        stray.kill()
        os.killpg(agent.pid, 9)
        for process in (stray, agent):
            process.wait()
            process.stdout.close()


def test_the_probe_takes_no_job_for_a_leftover_that_it_runs_in_itself():
    mark = f"self-{os.getpid()}"
    env = {"SAFELAUNCH_RUN_ID": mark, "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}
    with Probe(env=env, want=["processes"]) as probe:
        assert [row for row in probe.fact("processes") if row["run_id"] == mark] == []
