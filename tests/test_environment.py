"""Environment files, what is sent to the ranks, what is wrong with it, and what may be shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safelaunch import environment
from safelaunch.environment import (
    check_values,
    env_file_paths,
    exported,
    from_flags,
    parse_env_file,
    redact,
    scrub,
)
from safelaunch.findings import Severity, errors
from safelaunch.plan import Variable

REAL = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "real-inputs"
SHELL = {"HOME": "/home/me", "LD_LIBRARY_PATH": "/opt/lib", "PWD": "/data/run"}
TOKEN = "hf_" + "AbCdEfGh12345678" * 2


def read(text, environ=SHELL):
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    variables, findings = parse_env_file(data, ".deepspeed_env", environ)
    return {variable.name: variable.value for variable in variables}, findings


def places(findings):
    return [(f.code, f.severity.value, f.where.line, f.where.column) for f in findings]


# The file


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        ("\n  \n# A=1\n\t# B=2\n", {}),
        ("A=1\nB=2", {"A": "1", "B": "2"}),
        ("A=1\r\nB=2\r\n", {"A": "1", "B": "2"}),
        (" A = 1 \n", {"A": "1"}),
        ("A=b=c", {"A": "b=c"}),
        ("A=", {"A": ""}),
        ("A=two words", {"A": "two words"}),
        ('A={"k": [1]}', {"A": '{"k": [1]}'}),
        ("A=$HOME/x:${LD_LIBRARY_PATH}", {"A": "/home/me/x:/opt/lib"}),
        ("A=/x\nB=$A/y", {"A": "/x", "B": "/x/y"}),
        ("LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/x", {"LD_LIBRARY_PATH": "/opt/lib:/x"}),
        (r"A=pa\$HOME", {"A": "pa$HOME"}),
        ("A=5$ and $1", {"A": "5$ and $1"}),
        ("A=\xe4", {"A": "\xe4"}),
        ("# caf\udce9\nA=1", {"A": "1"}),
    ],
)
def test_what_is_read_without_a_word(text, values):
    read_values, findings = read(text)
    assert read_values == values
    assert findings == ()


@pytest.mark.parametrize(
    ("text", "values", "place", "fix"),
    [
        ("A=1\nNCCL_DEBUG", {"A": "1"}, ("syntax", "error", 2, 11), None),
        ("NCCL_DEBUG WARN", {}, ("syntax", "error", 1, 11), "NCCL_DEBUG=WARN"),
        ("NCCL_DEBUG: WARN", {}, ("syntax", "error", 1, 11), "NCCL_DEBUG=WARN"),
        ("  =1", {}, ("syntax", "error", 1, 3), None),
        ("A=\0", {}, ("syntax", "error", 1, 3), None),
        ("A=x\udce9", {}, ("syntax", "error", 1, 4), None),
        (" export NCCL_DEBUG=INFO", {"NCCL_DEBUG": "INFO"}, ("syntax", "warning", 1, 2), "NCCL_DEBUG=INFO"),
        (
            "declare -x NCCL_DEBUG=INFO",
            {"NCCL_DEBUG": "INFO"},
            ("syntax", "warning", 1, 1),
            "NCCL_DEBUG=INFO",
        ),
        ("my.name=1", {"my.name": "1"}, ("syntax", "warning", 1, 3), None),
        ("\ufeffA=1", {"A": "1"}, ("syntax", "warning", 1, 1), None),
        ("NCCL_DEBUG=INFO # x", {"NCCL_DEBUG": "INFO # x"}, ("syntax", "warning", 1, 17), "NCCL_DEBUG=INFO"),
        ("A=$NOT_SET/x", {"A": "/x"}, ("syntax", "warning", 1, 3), None),
        ("A=x`date`", {"A": "x`date`"}, ("syntax", "warning", 1, 4), None),
        ("A=$(date)", {"A": "$(date)"}, ("syntax", "warning", 1, 3), None),
        ("A=${HOME:-x}", {"A": "${HOME:-x}"}, ("syntax", "warning", 1, 3), None),
        ('NCCL_DEBUG="INFO"', {"NCCL_DEBUG": "INFO"}, ("quotes", "warning", 1, 12), "NCCL_DEBUG=INFO"),
        ("NCCL_IB_HCA='=mlx5'", {"NCCL_IB_HCA": "=mlx5"}, ("quotes", "warning", 1, 13), "NCCL_IB_HCA==mlx5"),
        ('A=""', {"A": ""}, ("quotes", "warning", 1, 3), None),
        ('A="$HOME"', {"A": "/home/me"}, ("quotes", "warning", 1, 3), None),
        ("A='$HOME'", {"A": "$HOME"}, ("quotes", "warning", 1, 3), None),
        ('A="x', {"A": '"x'}, ("quotes", "warning", 1, 3), None),
        ("A=x'", {"A": "x'"}, ("quotes", "warning", 1, 4), None),
        ("A=1\nB=1\nA=2", {"A": "2", "B": "1"}, ("duplicate", "info", 3, 1), None),
    ],
)
def test_what_is_read_with_a_finding(text, values, place, fix):
    read_values, findings = read(text)
    assert read_values == values
    kind, *rest = place
    assert places(findings) == [(f"env_file.{kind}", *rest)]
    if fix:
        assert findings[0].fix == fix
        assert read(fix) == ({fix.partition("=")[0]: fix.partition("=")[2]}, ())


def test_all_bad_lines_come_at_once():
    _, findings = read("A\nB=1\nC\nexport D=1\n=x\n")
    assert [finding.where.line for finding in findings] == [1, 3, 4, 5]


def test_without_a_shell_references_stay_and_are_said():
    values, findings = read("A=$HOME", None)
    assert values == {"A": "$HOME"}
    assert places(findings) == [("env_file.syntax", "warning", 1, 3)]


def test_the_origin_is_the_line_that_won():
    variables, _ = parse_env_file(b"A=1\n\nA=2\n", "/x/.deepspeed_env")
    assert [(v.name, v.value, v.origin) for v in variables] == [("A", "2", "/x/.deepspeed_env:3")]


def test_many_duplicates_are_one_finding():
    _, findings = read("".join(f"N{i}=1\n" for i in range(100)) * 3)
    (finding,) = findings
    assert "and 92 more" in finding.observed


@pytest.mark.parametrize(
    "line",
    [
        "export HF_TOKEN={}",
        "HF_TOKEN {}",
        "HF_TOKEN='{}'",
        'HF_TOKEN="{}',
        "HF_TOKEN={} # mine",
        "{}",
        "NCCL_X {}",
        "my.token={}",
        "HF_TOKEN=${}",
        "HF_TOKEN=x`{}`",
        "A={}\nA={}",
        "HF_TOKEN={}\0",
        "HF TOKEN={}",
    ],
)
def test_no_finding_shows_a_secret(line):
    _, findings = read(line.replace("{}", TOKEN))
    assert findings
    for finding in findings:
        assert TOKEN not in json.dumps(finding.document())


def test_paths_are_those_of_deepspeed():
    assert env_file_paths({}, "/job", "/home/me") == [
        ("/home/me/.deepspeed_env", False),
        ("/job/.deepspeed_env", False),
    ]
    assert env_file_paths({"DS_ENV_FILE": "e"}, "/job", "/home/me") == [
        ("/home/me/e", True),
        ("/job/e", True),
    ]
    assert env_file_paths({"DS_ENV_FILE": "/x/e"}, "/job", "/home/me") == [("/x/e", True)]
    assert env_file_paths({"DS_ENV_FILE": ""}, "/job", "/home/me") == []
    assert env_file_paths({}, "/same", "/same") == [("/same/.deepspeed_env", False)]


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,10}", fullmatch=True)
values = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters="\"'$`\\#"))


@given(st.dictionaries(names, values))
def test_a_plain_file_gives_exactly_its_variables(pairs):
    found, findings = read("".join(f"{name}={value}\n" for name, value in pairs.items()))
    assert found == pairs
    assert findings == ()


@pytest.mark.skipif(not REAL.is_dir(), reason="no ../shared/data/real-inputs here")
def test_real_files_get_no_error_and_keep_every_name():
    verdicts = json.loads((REAL / "expected.json").read_text(encoding="utf-8"))["deepspeed-env"]
    assert verdicts
    for file, verdict in verdicts.items():
        data = (REAL / "deepspeed-env" / file).read_bytes()
        variables, findings = parse_env_file(data, file, {})
        assert bool(errors(findings)) is (verdict["status"] == "rejected"), file
        comments = verdict.get("comment_lines_taken_as_names", 0)
        assert len(variables) == verdict["distinct_names"] - comments, file
        warned = [f for f in findings if f.code == "env_file.syntax" and "`export`" in f.observed]
        assert len(warned) == verdict.get("export_prefix", 0), file
        assert errors(check_values(variables, {}, 8)) == [], file


# What is sent


def test_what_stock_deepspeed_sends_is_sent():
    environ = dict.fromkeys(("MLFLOW_RUN", "PYTHONHASHSEED", "MV2_DEBUG", "UCX_TLS", "NCCL_DEBUG"), "x")
    environ |= {"HOME": "/", "PATH": "/bin", "SECRET": "x", "LS_COLORS": "x"}
    sent = {variable.name for variable in exported(environ, [])}
    assert sent == set(environ) - {"HOME", "PATH", "SECRET", "LS_COLORS"}
    assert {variable.origin for variable in exported(environ, [])} == {"the launching shell"}


@pytest.mark.deepspeed
def test_every_prefix_of_the_installed_deepspeed_is_in_the_table():
    import deepspeed.accelerator
    from deepspeed.launcher import runner

    prefixes = set(runner.EXPORT_ENVS)
    for module in Path(deepspeed.accelerator.__file__).parent.glob("*_accelerator.py"):
        for names_ in re.findall(
            r"def export_envs.*?return \[(.*?)\]", module.read_text(encoding="utf-8"), re.DOTALL
        ):
            prefixes |= set(re.findall(r"['\"](\w+)['\"]", names_))
    assert {"NCCL", "PYTHON", "UCX"} <= prefixes
    for prefix in prefixes - {"PATH"}:  # goes along with those accelerators alone
        name = (
            prefix
            if prefix == "NEUWARE_HOME"
            else f"{prefix}_PATH"
            if prefix == "LD_LIBRARY"
            else f"{prefix}_X"
        )
        assert [v.name for v in exported({name: "1"}, [])] == [name]
    assert "PATH" in {v.name for v in exported({"PATH": "/bin", "ASCEND_HOME_PATH": "/x"}, [])}


def test_what_libraries_of_the_ranks_read_is_sent():
    environ = dict.fromkeys(
        [
            "TORCH_NCCL_BLOCKING_WAIT",
            "PYTORCH_CUDA_ALLOC_CONF",
            "TORCHINDUCTOR_CACHE_DIR",
            "GLOO_SOCKET_IFNAME",
            "FI_PROVIDER",
            "OMP_NUM_THREADS",
            "MKL_NUM_THREADS",
            "KMP_AFFINITY",
            "CUDA_LAUNCH_BLOCKING",
            "DS_ACCELERATOR",
            "DEEPSPEED_TIMEOUT",
            "TRITON_CACHE_DIR",
            "HF_HOME",
            "TRANSFORMERS_OFFLINE",
            "TOKENIZERS_PARALLELISM",
            "ACCELERATE_X",
            "WANDB_MODE",
            "LD_LIBRARY_PATH",
        ],
        "1",
    )
    assert {variable.name for variable in exported(environ, [])} == set(environ)


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_VISIBLE_DEVICES",
        "ASCEND_RT_VISIBLE_DEVICES",
        "RANK",
        "MASTER_ADDR",
        "TORCHELASTIC_RUN_ID",
        "MV2_COMM_WORLD_RANK",
        "PMI_RANK",
        "LD_PRELOAD",
        "DS_ENV_FILE",
    ],
)
def test_what_would_mislead_a_rank_is_never_sent(name):
    assert exported({name: "1"}, []) == ()


def test_extra_names_and_prefixes():
    environ = {"MY_A": "1", "MY_B": "2", "OTHER": "3", "RANK": "0", "HOME": "/"}
    assert {v.name for v in exported(environ, ["MY_*", "OTHER", "RANK"])} == {"MY_A", "MY_B", "OTHER"}
    assert exported(environ, ["*"]) == ()


def test_pythonpath_begins_with_the_working_directory():
    (new,) = exported({}, [], cwd="/run")
    assert (new.name, new.value) == ("PYTHONPATH", "/run")
    (joined,) = exported({"PYTHONPATH": "/a:/b"}, [], cwd="/run")
    assert joined.value == "/run:/a:/b"
    (plain,) = exported({"PYTHONPATH": "/a"}, [])
    assert plain.value == "/a"


def test_nodes_with_their_own_values_keep_them():
    environ = {"AISC_JOB_NAME": "j", "NCCL_IB_HCA": "a", "UCX_NET_DEVICES": "b", "NCCL_DEBUG": "c"}
    assert [v.name for v in exported(environ, [])] == ["NCCL_DEBUG"]
    assert "NCCL_IB_HCA" in {v.name for v in exported(environ, ["NCCL_IB_HCA"])}


def test_flags():
    variables, findings = from_flags(["A=1", "B=x=y", "A=2", "HOME", "E="], SHELL)
    assert {v.name: v.value for v in variables} == {"A": "2", "B": "x=y", "HOME": "/home/me", "E": ""}
    assert findings == ()


@pytest.mark.parametrize("item", ["NOT_SET", "=x", "", "a b=1", "A=\0"])
def test_bad_flags(item):
    variables, findings = from_flags([item, "B=1"], {})
    assert [v.name for v in variables] == ["B"]
    assert [(f.code, f.severity) for f in findings] == [("cli.value", Severity.ERROR)]


def test_a_bad_flag_does_not_show_its_value():
    _, findings = from_flags([f"={TOKEN}", f"my token={TOKEN}"], {})
    assert TOKEN not in "".join(json.dumps(finding.document()) for finding in findings)


# What is wrong with it


def judged(environ=(), given_by_user=(), world_size=4):
    variables = [
        Variable(name=name, value=value, origin="e:1") for name, value in dict(given_by_user).items()
    ]
    return check_values(variables, dict(environ), world_size)


@pytest.mark.parametrize(
    ("name", "value", "severity"),
    [
        *(("DEEPSPEED_TIMEOUT", good, None) for good in ("1", "30", " 30 ", "1439")),
        *(("DEEPSPEED_TIMEOUT", bad, "error") for bad in ("", "10m", "0.5", "0", "-1", "9" * 30, "9" * 5000)),
        ("DEEPSPEED_TIMEOUT", "1800", "warning"),
        *(("DS_ACCELERATOR", good, None) for good in ("cpu", "cuda", "xpu")),
        *(("DS_ACCELERATOR", bad, "error") for bad in ("CUDA", "gpu", "", " cpu")),
    ],
)
def test_values_that_crash_or_mislead(name, value, severity):
    expected = [("env.value", severity)] if severity else []
    for findings in (judged({name: value}), judged({}, {name: value}), judged({name: "x"}, {name: value})):
        assert [(f.code, f.severity.value) for f in findings] == expected
        assert all(finding.fix and finding.why for finding in findings)


@pytest.mark.deepspeed
def test_the_accelerators_of_the_installed_deepspeed_are_known():
    from deepspeed.accelerator import real_accelerator

    assert set(real_accelerator.SUPPORTED_ACCELERATOR_LIST) <= set(environment.ACCELERATORS)


def test_local_size_is_read_by_the_cpu_accelerator():
    assert [f.severity.value for f in judged({"LOCAL_SIZE": "x"}) if f.code == "env.value"] == ["warning"]
    severities = [
        f.severity.value
        for f in judged({"LOCAL_SIZE": "x", "DS_ACCELERATOR": "cpu"})
        if f.code == "env.value"
    ]
    assert severities == ["error"]


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({}, []),
        ({"WORLD_SIZE": "4"}, []),
        ({"WORLD_SIZE": "8"}, ["WORLD_SIZE=8"]),
        ({"RANK": "0", "MASTER_ADDR": "x"}, ["RANK", "MASTER_ADDR"]),
        ({"TORCHELASTIC_RUN_ID": "x"}, ["TORCHELASTIC_RUN_ID"]),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
            ["OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK"],
        ),
        ({"PMI_RANK": "1"}, ["PMI_RANK"]),
        # An interactive srun: a world of one process.
        ({"PMI_SIZE": "1", "PMI_RANK": "0", "PMIX_RANK": "0"}, []),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "s"}, []),
        # Settings of Open MPI, not traces of a run.
        ({"OMPI_MCA_btl_tcp_if_include": "eno1", "OMPI_ALLOW_RUN_AS_ROOT": "1"}, []),
    ],
)
def test_traces_of_another_launcher_in_the_shell(environ, named):
    findings = judged(environ)
    assert [(f.code, f.severity.value) for f in findings] == (
        [("env.stale_rendezvous", "warning")] if named else []
    )
    for name in named:
        assert name in findings[0].observed


def test_what_the_node_launcher_writes_over_is_said():
    findings = judged({}, {"MASTER_PORT": "38325", "CUDA_VISIBLE_DEVICES": "0"})
    assert [f.code for f in findings] == ["env.stale_rendezvous", "env.value"]
    assert findings[0].fix == "--master_port 38325"
    assert not errors(findings)
    # People give this one to their own code; the ranks get it.
    assert judged({}, {"LOCAL_WORLD_SIZE": "2"}) == ()


def test_traces_of_mpi_in_the_users_own_file():
    (finding,) = judged({}, {"PMIX_RANK": "0", "OMPI_MCA_x": "1"})
    assert finding.code == "env.stale_rendezvous"
    assert "OMPI_MCA_x" not in finding.observed


def test_scrub():
    names_ = scrub(["OMPI_COMM_WORLD_NODE_RANK", "OMPI_MCA_x", "TORCHELASTIC_X", "PATH", "PMIX_GDS"])
    assert {
        "RANK",
        "MASTER_ADDR",
        "LOCAL_WORLD_SIZE",
        "OMPI_COMM_WORLD_NODE_RANK",
        "TORCHELASTIC_X",
        "PMIX_GDS",
    } <= set(names_)
    assert not {"OMPI_MCA_x", "PATH"} & set(names_)
    assert not any("*" in name for name in names_)
    assert len(names_) == len(set(names_))


# What may be shown


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_IB_HCA", "=mlx5_1:1,mlx5_2:1"),
        ("MASTER_ADDR", "10.0.0.1"),
        ("MASTER_ADDR", "2001:db8::1"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
        (
            "LD_LIBRARY_PATH",
            "/opt/cray/pe/gcc/11.2.0/lib64:/soft/x86_64-conda-linux-gnu/lib:/home/U1/my_Project/lib",
        ),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("DS_ACCELERATOR", "cpu"),
        ("GLOO_SOCKET_IFNAME", ""),
        ("UCX_NET_DEVICES", "mlx5_0:1"),
        ("PYTHONPATH", "/data/run:/home/me/src"),
    ],
)
def test_technical_values_are_shown(name, value):
    assert redact(name, value) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "x"),
        ("WANDB_API_KEY", "x"),
        ("ANYTHING", "at all"),
        ("NCCL_SECRET", "x"),
        ("DS_API_KEY", "x"),
        ("MASTER_PASSWORD", "x"),
        ("TORCH_AUTH", "x"),
        ("NCCL_NET", TOKEN),
        ("NCCL_NET", "http://user:pass@proxy:3128"),
        ("NCCL_NET", "me:pass@host"),
        ("NCCL_NET", "https://host/x?sig=abc"),
        ("NCCL_NET", "sk-abcdefgh1234"),
        ("NCCL_NET", "0123456789abcdef" * 2),
        ("NCCL_NET", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
        ("NCCL_NET", "abcdefgh0123456789ijklmnop"),
        ("NCCL_NET", "AKIAIOSFODNN7EXAMPLE"),
        ("NCCL_NET", "eyJhbGciOiJIUzI1NiJ9.e30.x"),
        ("NCCL_NET", "Bearer abcdefgh"),
        ("NCCL_NET", "-----BEGIN OPENSSH PRIVATE KEY-----"),
        ("NCCL_NET", "two\nlines"),
        ("NCCL_NET", "\x1b[2J"),
        ("NCCL_NET", "a" * 100_000),
    ],
)
def test_everything_else_is_not(name, value):
    assert redact(name, value) == "<redacted>"


@given(st.text(), st.text())
def test_only_the_value_itself_or_nothing_is_shown(name, value):
    assert redact(name, value) in (value, "<redacted>")
