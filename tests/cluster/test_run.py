"""The main job on real nodes: train, fail, be killed, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest
from testbed import BIN, user_environment

from safelaunch import runs

pytestmark = [pytest.mark.cluster, pytest.mark.deepspeed, pytest.mark.timeout(300)]

TRAIN = """
import argparse, os
import deepspeed, torch
from deepspeed.ops import __compatible_ops__
__compatible_ops__["deepspeed_shm_comm"] = False  # saves a compilation of half a minute
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--deepspeed_config")
args = parser.parse_args()
model = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=args.deepspeed_config
)
for step in range(3):
    loss = engine(torch.ones(2, 8, dtype=torch.float32)).square().mean()
    engine.backward(loss)
    engine.step()
print("trained rank", os.environ["RANK"], "of", torch.distributed.get_world_size(), flush=True)
torch.distributed.barrier()  # or a thread of torch's gloo may abort when Python is gone
torch.distributed.destroy_process_group()
"""
CONFIG = json.dumps(
    {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
)
WHO = "import os, sys; print('rank', os.environ['RANK'], os.uname().nodename, sys.argv[1:], flush=True)\n"
SLEEP = WHO + "import time; time.sleep(300)\n"


def check_documents(result):
    for name in ("plan", "preflight", "outcome", "launcher"):
        jsonschema.validate(result.document(name), runs.schema(name))
    for event in result.events:
        jsonschema.validate(event, runs.schema("event"))


def test_trains_on_two_nodes(safelaunch):
    safelaunch.write("train.py", TRAIN)
    safelaunch.write("ds.json", CONFIG)
    result = safelaunch.run("train.py", "--hostfile", "hosts", "--deepspeed_config", "ds.json")

    assert result.status == 0, result.stderr
    assert result.outcome["status"] == "success"
    check_documents(result)
    for rank in range(4):
        assert result.log(rank).count(f"trained rank {rank} of 4\n") == 1
    assert result.stdout.count("trained rank") == 4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--num_nodes", "1"], {0: "node1", 1: "node1"}),
        (["--include", "node2:1"], {0: "node2"}),
        (["--exclude", "node1:0"], {0: "node1", 1: "node2", 2: "node2"}),
    ],
)
def test_selection(safelaunch, options, expected):
    safelaunch.write("who.py", WHO)
    result = safelaunch.run(*options, "--hostfile", "hosts", "who.py")

    assert result.status == 0, result.stderr
    for rank, node in expected.items():
        assert result.log(rank).startswith(f"rank {rank} {node} ['--local_rank=")
    assert len(list((result.run_dir / "logs").glob("rank-*.out"))) == len(expected)


def test_uneven_slots(safelaunch):
    safelaunch.write("hosts", "node1 slots=1\nnode2 slots=3\n")
    safelaunch.write("who.py", WHO)
    result = safelaunch.run("--hostfile", "hosts", "who.py")

    assert result.status == 0, result.stderr
    assert result.log(0).startswith("rank 0 node1 ")
    # launch.py's rule is rank modulo local count
    assert [result.log(r).split("--local_rank=")[1][:1] for r in (1, 2, 3)] == ["1", "2", "0"]


def test_module_no_python_no_local_rank(safelaunch):
    safelaunch.write("mod.py", WHO)
    by_module = safelaunch.run("--hostfile", "hosts", "--module", "mod", "x")
    without = safelaunch.run("--hostfile", "hosts", "--no_local_rank", "mod.py", "x")
    program = safelaunch.run(
        "--hostfile", "hosts", "--no_python", "--no_local_rank", "/bin/sh", "-c", 'echo "$RANK $0"', "y"
    )

    assert by_module.status == without.status == program.status == 0
    assert "['--local_rank=1', 'x']" in by_module.log(1)
    assert "['x']" in without.log(1)
    assert program.log(3) == "3 y\n"


def test_no_ssh_on_each_node(safelaunch):
    safelaunch.write("train.py", TRAIN)
    safelaunch.write("ds.json", CONFIG)
    options = "--hostfile hosts --no_ssh --master_addr node1 train.py --deepspeed_config ds.json"
    text = f"cd {safelaunch.cwd} && SAFELAUNCH_RUN_ROOT=runs$0 exec {BIN}/safelaunch --node_rank $0 {options}"
    with ThreadPoolExecutor() as pool:
        sh = safelaunch.bed.sh
        parts = [
            pool.submit(sh, rank + 1, "sh", "-c", text, str(rank), env=user_environment(), timeout=200)
            for rank in range(2)
        ]
    # `sh` has checked that both ended with 0.
    assert [part.result().count("trained rank") for part in parts] == [2, 2]


def test_a_missing_hostfile_starts_nothing(safelaunch):
    safelaunch.write("who.py", WHO)
    result = safelaunch.run("who.py", "--hostfile", "hots")

    assert result.status == 78
    assert str(safelaunch.cwd / "hots") in result.stderr
    assert "hosts" in result.stderr
    assert result.run_dir is None
    assert result.stdout == ""


FAIL = (
    WHO
    + """
import signal, time
if "ignore" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "3":
    time.sleep(1)
    if "raise" in sys.argv: raise ValueError("no such sample")
    if "kill" in sys.argv: os.kill(os.getpid(), 9)
    sys.exit(3)
time.sleep(300)
"""
)


@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [("exit", 3, "rank_exited"), ("raise", 1, "rank_exited"), ("kill", 137, "rank_signalled")],
)
def test_a_failing_rank_ends_the_job(safelaunch, how, status, reason):
    safelaunch.write("fail.py", FAIL)
    result = safelaunch.run("--hostfile", "hosts", "fail.py", how)

    assert result.status == status
    check_documents(result)
    culprit = result.outcome["culprit"]
    assert (culprit["ranks"], culprit["hosts"], culprit["reason"]) == ([3], ["node2"], reason)
    assert "rank 3 on node2" in result.stderr
    assert result.outcome["survivors"] == []
    if how == "raise":
        assert culprit["location"] == f"{safelaunch.cwd}/fail.py:7"
        assert "ValueError: no such sample" in result.stderr
    ended = {row["rank"]: row["ended"] for row in result.outcome["ranks"]}
    assert max(ended.values()) - ended[3] < 30


def test_ranks_that_ignore_term_are_killed_after_the_grace(safelaunch):
    safelaunch.write("fail.py", FAIL)
    result = safelaunch.run("--hostfile", "hosts", "--grace", "1", "fail.py", "ignore")

    assert result.status == 3
    assert {row["signal"] for row in result.outcome["ranks"] if row["rank"] != 3} == {9}


def started(safelaunch, *options, script=SLEEP, ranks=4):
    safelaunch.write("sleep.py", script)
    job = safelaunch.start("--hostfile", "hosts", *options, "sleep.py")
    job.wait_for_output("rank ", count=ranks)
    return job


def test_kill_9_of_a_node_launcher(safelaunch):
    job = started(safelaunch)
    os.kill(safelaunch.bed.pid(2, "deepspeed.launcher.launch"), signal.SIGKILL)
    result = job.wait()

    assert result.status == 137
    assert result.outcome["culprit"]["reason"] == "launcher_died"
    assert result.outcome["culprit"]["hosts"] == ["node2"]
    assert safelaunch.bed.wait_until_nobody_is_left(1) == []


def agent_pid(bed, node):
    """The agent proper: the one of our processes that the node launcher is a child of."""
    stat = Path(f"/proc/{bed.pid(node, 'deepspeed.launcher.launch')}/stat").read_text(encoding="utf-8")
    return int(stat.rpartition(") ")[2].split()[1])


def test_kill_9_of_an_agent(safelaunch):
    job = started(safelaunch)
    os.kill(agent_pid(safelaunch.bed, 2), signal.SIGKILL)
    result = job.wait()

    assert result.status == 74
    assert result.outcome["status"] == "node_lost"
    assert result.outcome["culprit"]["hosts"] == ["node2"]
    assert safelaunch.bed.wait_until_nobody_is_left(1) == []


COUNT = (
    WHO
    + """
import time
for i in range(80):
    print('count', os.environ['RANK'], i, flush=True)
    time.sleep(0.1)
"""
)


def test_kill_9_of_sshds_child_is_survived(safelaunch):
    job = started(safelaunch, script=COUNT)
    for pid, command in safelaunch.bed.processes(2).items():
        if command.startswith("sshd: root"):
            os.kill(pid, signal.SIGKILL)
    job.wait_for_event(event="connection_back", host="node2")
    result = job.wait()

    assert result.status == 0, result.stderr
    for rank in range(4):
        lines = [line for line in result.log(rank).splitlines() if line.startswith("count")]
        assert lines == [f"count {rank} {i}" for i in range(80)]
    assert sorted(line for line in result.stdout.splitlines() if line.startswith("count")) == sorted(
        f"count {rank} {i}" for rank in range(4) for i in range(80)
    )


def test_a_lost_link_ends_the_job_on_both_sides(safelaunch):
    safelaunch.write("safelaunch.toml", "reconnect_grace = 4\n")
    job = started(safelaunch)
    safelaunch.bed.fault("link-down", 2)
    result = job.wait()

    assert result.status == 74
    assert result.outcome["culprit"]["hosts"] == ["node2"]
    assert result.outcome["culprit"]["reason"] == "node_unreachable"
    assert safelaunch.bed.wait_until_nobody_is_left(20) == []


def test_kill_9_of_safelaunch(safelaunch):
    safelaunch.write("safelaunch.toml", "reconnect_grace = 2\n")
    job = started(safelaunch)
    job.signal(signal.SIGKILL)
    assert job.wait().status == -signal.SIGKILL
    listing = safelaunch.run("ps")
    assert "launcher died" in listing.stdout
    assert safelaunch.bed.wait_until_nobody_is_left(20) == []
    cleaned = safelaunch.run("clean")
    after = safelaunch.run("ps")

    assert cleaned.status == 0, cleaned.stderr
    assert "launcher died" not in after.stdout


def test_clean_ends_what_is_left(safelaunch):
    job = started(safelaunch)
    job.signal(signal.SIGKILL)
    assert job.wait().status == -signal.SIGKILL
    seen = safelaunch.run("clean", "--dry-run")
    assert seen.stderr.count("would end") >= 4
    assert safelaunch.bed.survivors()
    cleaned = safelaunch.run("clean", "--hostfile", "hosts")

    assert cleaned.status == 0, cleaned.stderr
    assert safelaunch.bed.survivors() == []


@pytest.mark.parametrize(("signum", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_signals_end_the_job(safelaunch, signum, status):
    job = started(safelaunch)
    job.signal(getattr(signal, signum))
    result = job.wait()

    assert result.status == status
    assert result.outcome["status"] == "interrupted"
    assert safelaunch.bed.survivors() == []


def test_usr1_and_usr2_reach_every_rank(safelaunch):
    script = WHO + (
        "import signal, time\n"
        "def note(number, _): print('got', number, flush=True)\n"
        "signal.signal(signal.SIGUSR1, note); signal.signal(signal.SIGUSR2, note)\n"
        "print('ready', flush=True)\n"
        "for _ in range(3000): time.sleep(0.1)\n"
    )
    job = started(safelaunch, script=script)
    job.wait_for_output("ready", count=4)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        job.signal(number)
        job.wait_for_output(f"got {int(number)}", count=4)
    job.signal(signal.SIGTERM)

    assert job.wait().status == 143


def test_two_jobs_do_not_touch_each_other(safelaunch):
    one = started(safelaunch)
    two = started(safelaunch)
    listing = safelaunch.run("ps", "--json")
    names = [row["run_id"] for row in json.loads(listing.stdout)["runs"]]
    assert sorted(names) == sorted([one.run_dir.name, two.run_dir.name])
    stopped = safelaunch.run("stop", one.run_dir.name)

    assert stopped.status == 0, stopped.stderr
    assert one.wait().status == 143
    time.sleep(1)
    assert two.alive
    left = safelaunch.bed.survivors(two.run_dir.name)
    assert len([survivor for survivor in left if "sleep.py" in survivor.command]) == 4
    assert safelaunch.run("stop", two.run_dir.name).status == 0
    assert two.wait().status == 143


def test_arguments_arrive_byte_for_byte(safelaunch):
    safelaunch.write(
        "args.py", "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
    )
    given = [
        "a ",
        "it's",
        "$HOME",
        "%h",
        "*",
        '{"k": [1]}',
        "new\nline",
        "",
        "\udcff\udcfe",
        "--hostfil",
        "-x",
    ]
    result = safelaunch.run("--hostfile", "hosts", "--no_local_rank", "args.py", *given)

    assert result.status == 0, result.stderr
    for rank in range(4):
        assert result.log(rank) == "\0".join(given)


def test_secrets_are_nowhere(safelaunch):
    secrets = {"flag": "s3cr3t-flag-4711", "file": "s3cr3t-file-4712", "shell": "s3cr3t-shell-4713"}
    safelaunch.write(".deepspeed_env", f"FILE_TOKEN={secrets['file']}\nWANDB_API_KEY={secrets['shell']}\n")
    safelaunch.write(
        "secret.py",
        "import os, time\n"
        "names = 'FLAG_SECRET', 'FILE_TOKEN', 'HF_TOKEN'\n"
        "print('rank lengths', *(len(os.environ[name]) for name in names), flush=True)\n"
        "time.sleep(300)\n",
    )
    job = safelaunch.start(
        "--hostfile",
        "hosts",
        "--env",
        f"FLAG_SECRET={secrets['flag']}",
        "--env",
        "HF_TOKEN",
        "--verbose",
        "secret.py",
        env={"HF_TOKEN": secrets["shell"]},
    )
    job.wait_for_output("rank lengths 16 16 17", count=4)
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as stream:
                words = stream.read()
        except OSError:
            continue
        for secret in secrets.values():
            assert secret.encode() not in words, words
    job.signal(signal.SIGTERM)
    result = job.wait()
    for path in result.run_dir.rglob("*"):
        if path.is_file():
            for secret in secrets.values():
                assert secret.encode() not in path.read_bytes(), path
    for secret in secrets.values():
        assert secret not in result.stderr


def test_stdout_holds_what_the_script_printed(safelaunch):
    safelaunch.write("quiet.py", "import os\nif os.environ['RANK'] == '0': print('only this')\n")
    result = safelaunch.run("--hostfile", "hosts", "--env", "DS_ACCELERATOR=cpu", "quiet.py")

    assert result.status == 0
    assert result.stdout == "only this\n"
    assert len(result.stderr.splitlines()) <= 5


def test_a_refused_preflight_starts_nothing(safelaunch):
    safelaunch.write("who.py", WHO)
    safelaunch.bed.fault("refuse-port", 2)
    result = safelaunch.run("--hostfile", "hosts", "who.py")

    assert result.status == 69
    assert result.outcome["status"] == "refused"
    assert "ssh.refused" in result.stderr
    assert "node2" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("transport", ["openssh"])
def test_other_transports(safelaunch, transport):
    safelaunch.write("fail.py", FAIL)
    result = safelaunch.run("--hostfile", "hosts", "--transport", transport, "fail.py", "exit")

    assert result.status == 3
    assert safelaunch.bed.survivors() == []


def test_rank_logs_and_saved_pid(safelaunch):
    safelaunch.write("who.py", WHO)
    result = safelaunch.run(
        "--hostfile", "hosts", "--enable_each_rank_log", "ranklogs", "--save_pid", "who.py"
    )

    assert result.status == 0, result.stderr
    names = sorted(path.name for path in (safelaunch.cwd / "ranklogs").iterdir())
    assert [name.rpartition("_")[2] for name in names] == [f"rank{r}.log" for r in range(4)] or len(
        names
    ) == 4
