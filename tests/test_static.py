"""Static validation over real files: all faults at once, and the plan that comes out of it."""

import base64
import os
import re
import shlex
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safelaunch import catalogue, nodes, static
from safelaunch.arguments import parse
from safelaunch.findings import Severity, errors
from safelaunch.here import Here
from safelaunch.plan import Limits

ROOT = Path(__file__).parents[1]
BATCH = '{"train_micro_batch_size_per_gpu": 1}'


class Place:
    """A user's machine: a directory with files, a home and an environment."""

    def __init__(self, root):
        self.cwd, self.home, self.bin = root / "work", root / "home", root / "bin"
        for folder in (self.cwd, self.home, self.bin):
            folder.mkdir()
        self.environ = {"PATH": str(self.bin), "HOME": str(self.home)}
        self.write("train.py", "print()\n")
        self.write("hosts", "node1 slots=2\nnode2 slots=2\n")

    def write(self, name, text, mode=0o644):
        path = self.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)
        return path

    def tool(self, name, text):
        self.write(self.bin / name, f"#!/bin/sh\n{text}\n", 0o755)

    def gpus(self, count):
        lines = "\n".join(f"echo 'GPU {i}: Stub (UUID: GPU-{i})'" for i in range(count))
        self.tool("nvidia-smi", lines)

    def check(self, line, **environ):
        argv = shlex.split(line) if isinstance(line, str) else line
        return static.validate(
            parse(argv, installed="0.18.0"),
            {**self.environ, **environ},
            str(self.cwd),
            home=str(self.home),
            job_hostfile=str(self.home / "job-hostfile"),
        )


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def codes(result, severity=Severity.ERROR):
    return [finding.code for finding in result.findings if finding.severity is severity]


def one(result, code):
    (finding,) = [finding for finding in result.findings if finding.code == code]
    return finding


def hosts(result):
    return [(node.name, node.slots) for node in result.plan.nodes]


def test_a_plan(place):
    place.write("ds.json", BATCH)
    line = (
        "--num_gpus 1 --master_addr node1 --master_port 29400 --ssh_port 2222 --venv_script env.sh "
        "--save_pid --enable_each_rank_log logs -q --bind_cores_to_rank --grace 3 --fanout 5 "
        "--preflight quick --force "
        "--env A=1 train.py --hostfile hosts --deepspeed_config ds.json 'a b'"
    )
    result = place.check(line)
    plan = result.plan

    assert errors(result.findings) == []
    assert hosts(result) == [("node1", (0,)), ("node2", (0,))]
    assert (plan.program.script, plan.program.args) == ("train.py", ("--deepspeed_config", "ds.json", "a b"))
    assert (plan.program.kind, plan.program.local_rank) == ("python", True)
    assert (plan.master_addr, plan.master_port, plan.ssh_port) == ("node1", 29400, 2222)
    assert (plan.venv_script, plan.save_pid, plan.rank_log_dir) == ("env.sh", True, "logs")
    assert plan.launcher_options == ("--bind_cores_to_rank", "--quiet")
    assert plan.limits == Limits(grace=3.0, fanout=5)
    assert (plan.level, plan.transport, plan.force) == ("quick", "auto", True)
    assert (plan.deepspeed_configs, plan.hostfile, plan.cwd) == (("ds.json",), "hosts", str(place.cwd))
    assert plan.variables_for("node1")["A"].value == "1"
    assert plan.variables_for("node1")["PYTHONPATH"].value == str(place.cwd)
    assert "RANK" in plan.unset


def test_what_was_not_given_is_left_open(place):
    plan = place.check("--hostfile hosts --enable_each_rank_log None --module --no_local_rank train").plan

    assert (plan.master_addr, plan.master_port, plan.ssh_port, plan.only_node) == (None, None, None, None)
    assert (plan.rank_log_dir, plan.save_pid, plan.level) == (None, False, "standard")
    assert (plan.program.kind, plan.program.local_rank) == ("module", False)


def test_all_faults_of_all_parts_at_once(place):
    place.write("bad.json", '{"a": }')
    place.write("safelaunch.toml", "grase = 3\n")
    line = "--frob --hostfile hots --master_port 80 --env =x trian.py --deepspeed_config bad.json"

    result = place.check(line, DEEPSPEED_TIMEOUT="10m", DS_ENV_FILE="none.env", SAFELAUNCH_FANOUT="x")

    assert set(codes(result)) == {
        "cli.unknown_option",
        "settings.unknown_key",
        "settings.value",
        "hostfile.missing",
        "master.port_range",
        "cli.value",
        "env_file.missing",
        "env.value",
        "script.missing",
        "config.syntax",
    }
    assert result.plan is None
    assert catalogue.exit_status(result.findings) == 2


def test_a_missing_hostfile_is_never_a_local_run(place):
    result = place.check("--hostfile host train.py")
    finding = one(result, "hostfile.missing")

    assert result.plan is None
    assert catalogue.exit_status(result.findings) == 78
    assert str(place.cwd / "host") in finding.observed
    assert finding.fix == "--hostfile hosts"


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("~/hosts", "hostfile.missing", "nothing expanded the `~`"),
        ("~nobody/hosts", "hostfile.missing", "nothing expanded the `~`"),
        ("$DIR/hosts", "hostfile.missing", "nothing expanded the `$`"),
        ("", "hostfile.missing", "empty name"),
        ("sub", "hostfile.unreadable", "directory"),
        ("subb/hosts2", "hostfile.missing", "near it: sub/hosts2"),
        ("empty", "hostfile.empty", ""),
    ],
)
def test_hostfiles_that_are_none(place, name, code, words):
    place.write("sub/hosts2", "node1 slots=1\n")
    place.write("empty", "")

    result = place.check(["--hostfile", name, "train.py"])

    assert codes(result) == [code]
    assert words in one(result, code).observed
    assert result.plan is None


def test_a_hostfile_without_end(place):
    with open(place.cwd / "big", "wb") as stream:
        stream.truncate(1 << 40)

    result = place.check("--hostfile big train.py")

    assert codes(result) == ["hostfile.unreadable"]
    assert "16 MiB" in one(result, "hostfile.unreadable").observed


def test_a_pipe_is_read_once(place):
    os.mkfifo(place.cwd / "pipe")
    writer = threading.Thread(target=(place.cwd / "pipe").write_text, args=("node7 slots=1\n",))
    writer.start()
    try:
        result = place.check("train.py --hostfile pipe")
    finally:
        writer.join(timeout=30)

    assert hosts(result) == [("node7", (0,))]
    assert not writer.is_alive()


def test_process_substitution(place):
    read, write = os.pipe()
    try:
        os.write(write, b"node7 slots=1\n")
        os.close(write)
        assert hosts(place.check(f"--hostfile /dev/fd/{read} train.py")) == [("node7", (0,))]
    finally:
        os.close(read)


def broken_samples():
    """Yield each sample of hostfiles/broken that states findings of the hostfile alone, and those."""
    for file in sorted((ROOT / "hostfiles" / "broken").iterdir()):
        expect = file.with_suffix(".expect")
        text = (expect if expect.exists() else file).read_text(errors="surrogateescape")
        stated = re.findall(r"expect: (hostfile\.\S+) (error|warning)(?: line=(\d+))?", text)
        if stated and file != expect:
            yield pytest.param(file, stated, id=file.name)


@pytest.mark.parametrize(("file", "stated"), list(broken_samples()))
def test_broken_samples_give_their_findings(place, file, stated):
    result = place.check(["check", "--hostfile", str(file)])
    found = {(f.code, f.severity.value, str(f.where.line or "") if f.where else "") for f in result.findings}

    assert set(stated) <= found
    assert catalogue.exit_status(result.findings) == (78 if any(s == "error" for _, s, _ in stated) else 0)


def test_the_job_hostfile_is_taken_and_said(place):
    (place.home / "job-hostfile").write_text("node3 slots=1\n")

    result = place.check("train.py")

    assert hosts(result) == [("node3", (0,))]
    assert str(place.home / "job-hostfile") in result.notes[0]
    # A filter that names this machine means this machine.
    assert hosts(place.check("--include localhost:0 train.py")) == [("localhost", (0,))]


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_GPUS_PER_NODE": "2"}


def test_the_slurm_job_is_taken_and_said(place):
    (place.home / "job-hostfile").write_text("node3 slots=1\n")

    result = place.check("train.py", **SLURM)

    assert hosts(result) == [("node1", (0, 1)), ("node2", (0, 1))]
    assert "Slurm job 7: node[1-2], 2 slots each" in result.notes[0]
    assert result.plan.hostfile is None


def test_a_slurm_job_of_this_node_alone_is_this_machine(place):
    place.gpus(4)
    job = {**SLURM, "SLURM_JOB_NODELIST": "node1", "SLURMD_NODENAME": "node1", "CUDA_VISIBLE_DEVICES": "2,3"}

    result = place.check("train.py", **job)

    assert hosts(result) == [("localhost", (2, 3))]
    assert result.plan.transport == "local"
    assert hosts(place.check("--include localhost:1 train.py", **job)) == [("localhost", (1,))]
    assert hosts(place.check("--include node1:1 train.py", **job)) == [("node1", (1,))]


def test_slurm_against_the_hostfile_and_srun(place):
    place.write("hosts", "node1 slots=2\nnode9 slots=2\n")
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}

    found = codes(place.check("--hostfile hosts train.py", **SLURM, **step))

    assert found == ["slurm.many_launchers", "slurm.hostfile_mismatch"]
    assert codes(place.check("--hostfile hosts --include node1 train.py", **SLURM)) == []


def test_a_slurm_job_that_does_not_tell_its_slots(place):
    result = place.check("train.py", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node[1-2]", SLURM_GPUS="3")

    assert codes(result) == ["slurm.allocation_unclear"]
    assert result.plan is None


@pytest.mark.parametrize(
    ("line", "environ", "slots"),
    [
        ("train.py", {}, (0, 1, 2)),
        ("--num_gpus 2 train.py", {}, (0, 1)),
        ("--num_gpus 5 train.py", {}, (0, 1, 2, 3, 4)),
        ("--num_gpus 0 train.py", {}, (0, 1, 2)),
        ("--include localhost:1,2 train.py", {}, (1, 2)),
        ("--exclude localhost:1 train.py", {}, (0, 2)),
        ("train.py", {"CUDA_VISIBLE_DEVICES": "2,0"}, (0, 2)),
        ("train.py", {"CUDA_VISIBLE_DEVICES": ""}, (0, 1, 2)),
        ("train.py", {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4"}, (0, 1, 2, 3)),
        ("train.py", {"DS_ACCELERATOR": "cpu"}, (0,)),
    ],
)
def test_this_machine(place, line, environ, slots):
    place.gpus(3)
    result = place.check(line, **environ)

    assert hosts(result) == [("localhost", slots)]
    assert (result.plan.transport, result.notes) == ("local", ())


def test_this_machine_without_gpus(place):
    assert "no GPU found on this machine: 1 rank;" in place.check("train.py").notes[0]
    # What can't be counted is taken from the user.
    assert hosts(place.check("--include localhost:4,5 train.py")) == [("localhost", (4, 5))]
    assert hosts(place.check("train.py", CUDA_VISIBLE_DEVICES="1,3")) == [("localhost", (1, 3))]
    place.tool("nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert hosts(place.check("train.py")) == [("localhost", (0,))]
    place.tool(
        "numactl",
        "echo 'available: 3 nodes'; echo 'node 0 cpus: 0 1'; echo 'node 1 cpus: 2'; echo 'node 2 cpus:'",
    )
    assert hosts(place.check("train.py")) == [("localhost", (0, 1))]


def test_several_nodes_without_a_hostfile(place):
    assert codes(place.check("--num_nodes 2 train.py")) == ["select.too_few_nodes"]
    assert codes(place.check("--include node1 train.py")) == ["select.unknown_host"]


@pytest.mark.parametrize(
    ("line", "errors_", "only", "address", "port"),
    [
        ("--node_rank 1 train.py", [], 1, "node1", 29500),
        ("--node_rank 0 --master_addr 10.0.0.1 --master_port 30000 train.py", [], 0, "10.0.0.1", 30000),
        ("train.py", ["cli.value"], None, None, None),
        ("--node_rank 2 train.py", ["cli.value"], None, None, None),
        ("--node_rank -2 train.py", ["cli.value"], None, None, None),
        ("--node_rank 0 --num_nodes 1 train.py", [], 0, None, 29500),
        ("--node_rank 0 --launcher slurm train.py", [], 0, "node1", 29500),
    ],
)
def test_no_ssh(place, line, errors_, only, address, port):
    result = place.check(f"--hostfile hosts --no_ssh {line}")

    assert codes(result) == errors_
    if errors_:
        assert result.plan is None
        return
    plan = result.plan
    assert (plan.only_node, plan.master_addr, plan.master_port) == (only, address, port)
    assert plan.transport == "local"
    assert any("--master_addr" in note for note in result.notes) == (address == "node1")


@pytest.mark.parametrize(
    ("line", "errors_", "warnings"),
    [
        ("--master_port 29500", [], []),
        ("--master_port 1024", [], []),
        ("--master_port 1023", ["master.port_range"], []),
        ("--master_port 0", ["master.port_range"], []),
        ("--master_port 65536", ["master.port_range"], []),
        ("--master_port 40000", [], ["master.port_range"]),
        ("--ssh_port 0", ["cli.value"], []),
        ("--master_addr 10.1.2.3", [], []),
        ("--master_addr node1.cluster.example", [], []),
        ("--master_addr node2", ["master.addr_unknown"], []),
        ("--master_addr nod1", ["master.addr_unknown"], []),
        ("--master_addr localhost", ["hostfile.loopback"], []),
        ("--master_addr 127.0.1.1", ["hostfile.loopback"], []),
        ("--master_addr localhost --num_nodes 1", [], []),
    ],
)
def test_where_the_ranks_meet(place, line, errors_, warnings):
    if Here(cwd="/", home="/", environ={}).ephemeral_ports() != (32768, 60999):
        pytest.skip("this machine has other ephemeral ports")
    result = place.check(f"--hostfile hosts {line} train.py")

    assert codes(result) == errors_
    assert codes(result, Severity.WARNING) == warnings


def test_a_master_address_can_not_be_judged_by_name_where_hosts_are_addresses(place):
    place.write("hosts", "10.0.0.1 slots=1\n10.0.0.2 slots=1\n")

    assert codes(place.check("--hostfile hosts --master_addr head train.py")) == []
    assert codes(place.check("--master_addr anything train.py")) == []


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("trian.py", "script.missing", "train.py"),
        ("ls", "script.missing", "--no_python ls"),
        ("pkg.mod", "script.missing", "--module pkg.mod"),
        ("run.sh", "script.not_python", "--no_python ./run.sh"),
        ("tool", "script.not_python", "bash"),
        ("tool3", "script.not_python", "bash"),
        ("elf", "script.not_python", "compiled"),
        ("folder", "script.not_python", "__main__.py"),
        ("--no_python run.sh", "script.missing", "./run.sh"),
        ("--no_python ./run.sh", "script.missing", "chmod +x"),
        ("--no_python nothing", "script.missing", "PATH"),
        ("--module pkg/mod.py", "script.module_missing", "--module pkg.mod"),
        ("--module pkg.nothing", "script.module_missing", ""),
        ("--module pkg", "script.module_missing", "__main__.py"),
        ("--module nothing.at.all", "script.module_missing", ""),
        ("--module ''", "script.module_missing", ""),
    ],
)
def test_scripts_that_can_not_run(place, line, code, words):
    prepare_scripts(place)
    result = place.check(f"--num_gpus 1 {line}")

    assert codes(result) == [code]
    finding = one(result, code)
    assert words in finding.observed + finding.fix
    assert catalogue.exit_status(result.findings) == 2


@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "./tool2",
        "unnamed",
        "app",
        "zipped.pyz",
        "--no_python ls",
        "--no_python ./tool",
        "--module train",
        "--module pkg.mod",
        "--module pkg2",
        "--module json.tool",
    ],
)
def test_scripts_that_can_run(place, line):
    prepare_scripts(place)

    assert codes(place.check(f"--num_gpus 1 {line}")) == []


def prepare_scripts(place):
    place.tool("ls", "")
    place.write("run.sh", "echo\n")
    place.write("tool", "#!/usr/bin/env -S bash -e\n", 0o755)
    place.write("tool3", "#!/usr/bin/env -S PYTHON_py=1 bash\n")
    place.write("tool2", "#!/usr/bin/env python3\n")
    place.write("unnamed", "print()\n")
    place.write("elf", b"\x7fELF\0\0")
    place.write("folder/x.py", "")
    place.write("app/__main__.py", "")
    place.write("zipped.pyz", b"PK\x03\x04\0\0")
    place.write("pkg/__init__.py", "raise SystemExit('a check must not import this')\n")
    place.write("pkg/mod.py", "raise SystemExit('nor this')\n")
    place.write("pkg2/__main__.py", "")


def test_what_another_python_would_find_is_not_known(place):
    for line in ("--venv_script v --module nothing", "--venv_script v --no_python nothing"):
        result = place.check(f"--num_gpus 1 {line}")
        assert codes(result) == []
        assert len(codes(result, Severity.NOT_CHECKED)) == 1


def encoded(text):
    return base64.urlsafe_b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("args", "error", "configs"),
    [
        (["--deepspeed_config", "ds.json"], [], ("ds.json",)),
        (["--deepspeed_config=ds.json", "--deepspeed"], [], ("ds.json",)),
        (["--deepspeed", "--deepspeed_config", "ds.json"], [], ("ds.json",)),
        (["--deepspeed", "ds.json"], [], ("ds.json",)),
        (["--deepspeed=ds.conf"], [], ("ds.conf",)),
        (["--deepspeed"], [], ()),
        (["--deepspeed", "true"], [], ()),
        (["--deepspeed", "data.txt"], [], ()),
        (["--deepspeed", "data.json", "--deepspeed_config", "ds.json"], [], ("ds.json",)),
        (["--deepspeed", "none.json"], ["config.missing"], ()),
        (["--deepspeed_config", "none"], ["config.missing"], ()),
        (["--deepspeed_config", ""], ["config.missing"], ()),
        (["--deepspeed_config", "sub"], ["config.unreadable"], ()),
        (["--deepspeed_config", "bad.json"], ["config.syntax"], ("bad.json",)),
        (["--deepspeed_config", encoded(BATCH)], [], ()),
        (["--deepspeed_config", encoded("{")], ["config.syntax"], ()),
        (["--deepspeed", BATCH], [], ()),
        (["--deepspeed", "{"], ["config.syntax"], ()),
    ],
)
def test_configs_of_the_script(place, args, error, configs):
    place.write("ds.json", BATCH)
    place.write("ds.conf", BATCH)
    place.write("bad.json", '{"a": }')
    place.write("data.txt", "some text")
    place.write("data.json", "[1, 2]")
    (place.cwd / "sub").mkdir()

    result = place.check(["--hostfile", "hosts", "train.py", *args])

    assert codes(result) == error
    if result.plan is not None:
        assert result.plan.deepspeed_configs == configs


def test_a_config_in_a_pipe_is_left_for_the_ranks(place):
    os.mkfifo(place.cwd / "pipe")

    result = place.check("--num_gpus 1 train.py --deepspeed_config pipe")

    assert codes(result, Severity.NOT_CHECKED) == ["config.unreadable"]


def test_the_batch_is_judged_by_the_world_of_the_plan(place):
    place.write(
        "ds.json",
        '{"train_batch_size": 6, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}',
    )

    assert codes(place.check("--hostfile hosts train.py --deepspeed_config ds.json")) == ["config.batch"]
    # Where the nodes are in doubt, so is the sum.
    doubtful = place.check("--hostfile hosts --include node3 train.py --deepspeed_config ds.json")
    assert codes(doubtful) == ["select.unknown_host"]
    place.write("odd", "node1 slots=2\nnode2 slots=2x\n")
    assert codes(place.check("--hostfile odd train.py --deepspeed_config ds.json")) == ["hostfile.syntax"]


def test_the_order_of_variables(place):
    (place.home / ".deepspeed_env").write_text(
        "NCCL_A=home\nNCCL_B=home\nNCCL_C=home\nNCCL_D=home\nNCCL_E=home\n"
    )
    place.write(".deepspeed_env", "NCCL_B=cwd\nNCCL_C=cwd\nNCCL_D=cwd\nNCCL_E=cwd\n")
    place.write(
        "safelaunch.toml",
        '[env]\nNCCL_C = "toml"\nNCCL_D = "toml"\nNCCL_E = "toml"\n'
        '[nodes.node2.env]\nNCCL_D = "node2"\nNCCL_E = "node2"\n',
    )
    shell = {f"NCCL_{letter}": "shell" for letter in "ABCDEF"}

    plan = place.check("--hostfile hosts --env NCCL_E=flag --env NCCL_G train.py", NCCL_G="g", **shell).plan

    first, second = (
        {name: v.value for name, v in plan.variables_for(node).items() if name.startswith("NCCL_")}
        for node in ("node1", "node2")
    )
    expected = {
        "NCCL_A": "home",
        "NCCL_B": "cwd",
        "NCCL_C": "toml",
        "NCCL_D": "toml",
        "NCCL_E": "flag",
        "NCCL_F": "shell",
    }
    assert first == {**expected, "NCCL_G": "g"}
    assert second == {**first, "NCCL_D": "node2"}


def test_environment_files(place):
    place.write("mine.env", "NCCL_A=1\nbroken\n")

    named = place.check("--hostfile hosts train.py", DS_ENV_FILE=str(place.cwd / "mine.env"))
    assert codes(named) == ["env_file.syntax"]
    missing = place.check("--hostfile hosts train.py", DS_ENV_FILE="mine.emv")
    assert codes(missing) == ["env_file.missing"]
    assert "mine.env" in one(missing, "env_file.missing").fix
    (place.cwd / "folder").mkdir()
    assert codes(place.check("--hostfile hosts train.py", DS_ENV_FILE="folder")) == ["env_file.unreadable"]


def test_a_node_of_the_settings_that_is_no_host(place):
    place.write("safelaunch.toml", '[nodes.nod1.env]\nA = "1"\n[nodes.node2.env]\nA = "1"\n')
    result = place.check("--hostfile hosts --include node1 train.py")

    assert codes(result) == []
    assert "node1" in one(result, "settings.value").fix


def test_severities_can_be_changed_but_not_those_of_what_is_simply_wrong(place):
    place.write(
        "safelaunch.toml",
        '[checks]\n"hostfile.*" = "off"\n"script.not_python" = "warning"\n'
        '"cli.option_after_script" = "error"\n"cli.value" = "off"\n',
    )
    place.write("uneven", "node1 slots=1\nnode2 slots=2\n")
    place.write("run.sh", "")

    changed = place.check("--hostfile uneven run.sh --num_nodes 1")
    assert codes(changed) == ["cli.option_after_script"]
    assert codes(changed, Severity.WARNING) == ["script.not_python"]
    assert codes(place.check("--hostfile none --num_gpus x train.py")) == ["cli.value", "hostfile.missing"]
    assert codes(place.check("--hostfile hosts --master_port 99999 train.py")) == ["master.port_range"]


def test_an_error_can_not_be_silenced_where_there_is_no_plan(place):
    place.write("safelaunch.toml", '[checks]\n"*" = "off"\n')

    result = place.check("--hostfile hosts --master_port 99999 train.py")

    assert result.plan is None
    assert codes(result) == ["master.port_range"]


def test_force_passes_what_could_be_started(place):
    forced = place.check("--force --hostfile hosts --master_addr node2 run.sh")
    assert forced.plan.force
    assert set(codes(forced)) == {"master.addr_unknown", "script.missing"}
    assert place.check("--force --hostfile none train.py").plan is None
    assert place.check("--force --num_gpus x train.py").plan is None


def test_the_pages_say_which_errors_stay():
    pages = "".join(path.read_text() for path in sorted((ROOT / "safelaunch" / "explain").glob("*.md")))
    said, unforced = set(), set()
    for page in re.split(r"^## ", pages, flags=re.MULTILINE)[1:]:
        code, silence = page.split("\n", 1)[0], page.partition("**How to silence:**")[2]
        if (
            code in catalogue.CODES
            and catalogue.CODES[code].level == "static"
            and "cannot be silenced" in silence
        ):
            said.add(code)
            if "`--force` does not pass it" in silence:
                unforced.add(code)

    assert said == static.UNSILENCED
    assert unforced <= static.UNFORCED <= unforced | {"cli.not_yet"}


def test_settings_are_shown(place):
    text = place.check("check --show-settings --grace 3").settings_text()

    assert re.search(r"grace = 3 +# command line", text)


def test_check_needs_no_script(place):
    result = place.check("check --hostfile hosts")

    assert (result.findings, result.plan.program) == ((), None)


WORDS = """
    --hostfile hosts none train.py --include node1 node1:0@node2 localhost:0 --num_gpus 3 -1 --num_nodes 0
    --no_ssh --node_rank 1 --master_addr localhost --master_port 70000 --module --no_python --deepspeed
    ds.json --deepspeed_config --launcher slurm -- --force --env A=1 --config check --exclude ~ --transport
    --venv_script local .
"""
words = st.sampled_from([*WORDS.split(), "", "\udcff", "a\0b"])
NAMES = """
    CUDA_VISIBLE_DEVICES SLURM_JOB_NODELIST SLURM_JOB_ID SLURM_GPUS DS_ENV_FILE LOCAL_SIZE DEEPSPEED_TIMEOUT
    DS_ACCELERATOR SAFELAUNCH_GRACE PYTHONPATH WORLD_SIZE SLURMD_NODENAME
"""
texts = ["", "0", "1", "2,x", "node[1-2]", "node1", "cpu", "10m", "ds.json", "hosts", "."]
environs = st.dictionaries(st.sampled_from(NAMES.split()), st.sampled_from(texts))


@given(st.lists(words, max_size=9), environs)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_command_line_gives_findings_or_a_plan(place, argv, environ):
    place.write("ds.json", BATCH)
    result = place.check(argv, **environ)

    status = catalogue.exit_status(result.findings)
    assert result.plan is not None or status in (2, 78)
    assert status in (0, 2, 78)


@pytest.mark.parametrize("name", ["hostfile.missing", "cli.value"])
def test_constants_are_codes(name):
    assert name in static.UNFORCED
    assert catalogue.CODES.keys() >= static.UNSILENCED >= static.UNFORCED


def test_the_places_deepspeed_looks_at():
    assert nodes.JOB_HOSTFILE == "/job/hostfile"
