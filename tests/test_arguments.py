"""argv to Invocation."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safelaunch import deepspeed_cli, helptext, options
from safelaunch.arguments import COMMANDS, LATER, parse
from safelaunch.findings import Severity

COMMAND_LINES = Path(__file__).parents[2] / "shared" / "data" / "real-inputs" / "command-lines.txt"
INSTALLED = "0.18.0"
FLAGS = [flag for option in (*deepspeed_cli.OPTIONS, *options.OWN) for flag in option.flags]


def read(line, **how):
    return parse(shlex.split(line), installed=how.get("installed", INSTALLED))


def found(invocation, severity=None):
    return [finding.code for finding in invocation.findings if severity in (None, finding.severity)]


@pytest.mark.parametrize(
    ("line", "deepspeed", "script", "args"),
    [
        ("train.py", {}, "train.py", []),
        (
            "-H hosts --num_gpus=2 train.py --lr 1",
            {"hostfile": "hosts", "num_gpus": 2},
            "train.py",
            ["--lr", "1"],
        ),
        ("-Hhosts -q train.py", {"hostfile": "hosts", "quiet": True}, "train.py", []),
        ("-qHhosts train.py", {"hostfile": "hosts", "quiet": True}, "train.py", []),
        ("-qH=hosts train.py", {"hostfile": "hosts", "quiet": True}, "train.py", []),
        ("-qH hosts train.py", {"hostfile": "hosts", "quiet": True}, "train.py", []),
        ("--hostf hosts --no_ssh_ch train.py", {"hostfile": "hosts", "no_ssh_check": True}, "train.py", []),
        ("--num_acc 3 train.py", {"num_gpus": 3}, "train.py", []),
        ("--num_nodes -1 train.py", {"num_nodes": -1}, "train.py", []),
        ("--launcher_args='-n 3' train.py", {"launcher_args": "-n 3"}, "train.py", []),
        ("--launcher_args '-n 3 --x' train.py", {"launcher_args": "-n 3 --x"}, "train.py", []),
        ("--num_gpus 2 --num_gpus 4 train.py", {"num_gpus": 4}, "train.py", []),
        ("-- --odd x", {}, "--odd", ["x"]),
        ("train.py -- --hostfile x", {}, "train.py", ["--hostfile", "x"]),
        ("-- train.py --hostfile x", {}, "train.py", ["--hostfile", "x"]),
        ("train.py a -- --hostfile x", {}, "train.py", ["a", "--", "--hostfile", "x"]),
        ("train.py -- a -- b", {}, "train.py", ["a", "--", "b"]),
        (
            "train.py -H x -e y --config z --json",
            {},
            "train.py",
            ["-H", "x", "-e", "y", "--config", "z", "--json"],
        ),
        ("train.py --hostfile hosts --lr 1", {"hostfile": "hosts"}, "train.py", ["--lr", "1"]),
        ("train.py a --hostfile=hosts -x", {"hostfile": "hosts"}, "train.py", ["a", "-x"]),
        ("--hostfile hosts train.py --hostfile hosts", {"hostfile": "hosts"}, "train.py", []),
        ("train.py --hostfile=", {"hostfile": ""}, "train.py", []),
        ("train.py --hostfil x --hostfiles=y", {}, "train.py", ["--hostfil", "x", "--hostfiles=y"]),
        ("./check --x", {}, "./check", ["--x"]),
        ("train.py check stop", {}, "train.py", ["check", "stop"]),
        ("'' -x", {}, "", ["-x"]),
        ("--module pkg.train --num 3", {"module": True}, "pkg.train", ["--num", "3"]),
    ],
)
def test_what_a_command_line_means(line, deepspeed, script, args):
    invocation = read(line)

    assert (invocation.command, invocation.deepspeed) == ("run", deepspeed)
    assert (invocation.script, list(invocation.script_args)) == (script, args)
    assert found(invocation, Severity.ERROR) == []


def test_script_arguments_stay_as_they_are():
    args = [
        "a b",
        "it's",
        "$HOME",
        "%h",
        "*",
        '{"k": [1]}',
        "new\nline",
        "",
        "--x=\udcff\udc80",
        "-q",
        "--",
        "--hostfile",
    ]

    assert parse(["train.py", *args], installed=None).script_args == tuple(args)


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("--force t.py", {"force": True}),
        ("--preflight quick --transport=local t.py", {"preflight": "quick", "transport": "local"}),
        ("--env A=1 --env B=x=y --env C t.py", {"env": ("A=1", "B=x=y", "C")}),
        ("--verbose --verbose t.py", {"verbose": 2}),
        ("--ssh-timeout 2.5 --fanout 8 --grace 0 t.py", {"ssh_timeout": 2.5, "fanout": 8, "grace": 0.0}),
        ("--max-restarts 0 --hang-timeout off --sync-checks off --no-rank-hook t.py",
         {"max_restarts": 0, "hang_timeout": "off", "sync_checks": "off", "no_rank_hook": True}),
        ("check --json --show-settings", {"json": True, "show_settings": True}),
        ("check --run-dir d t.py --json", {"run_dir": "d"}),
    ],
)  # fmt: skip
def test_our_own_options(line, flags):
    invocation = read(line)

    assert invocation.flags == flags
    assert invocation.findings == ()


def test_force_is_ours_and_not_short_for_force_multi():
    assert read("--force --force_m t.py").flags == {"force": True}
    assert read("--force --force_m t.py").deepspeed == {"force_multi": True}


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("--num 3 t.py", "cli.unknown_option", "--num_nodes, --num_gpus"),
        ("--no_s t.py", "cli.unknown_option", "--no_ssh, --no_ssh_check"),
        ("--num-gpus 3 t.py", "cli.unknown_option", "--num_gpus"),
        ("--nproc_per_node 3 t.py", "cli.unknown_option", "--num_gpus"),
        ("--dry t.py", "cli.unknown_option", "--dry-run"),
        ("--prefl quick t.py", "cli.unknown_option", "--preflight"),
        ("--frobnicate t.py", "cli.unknown_option", "--frobnicate"),
        ("-x t.py", "cli.unknown_option", "-x"),
        ("--show-settings t.py", "cli.unknown_option", "safelaunch check"),
        ("ps --grace 3", "cli.unknown_option", "safelaunch ps"),
        ("--num_gpus two t.py", "cli.value", "whole number"),
        ("--fanout 0 t.py", "cli.value", "not under 1"),
        ("--grace nan t.py", "cli.value", "number"),
        ("--hang-timeout soon t.py", "cli.value", "auto or off"),
        ("--preflight deep t.py", "cli.value", "quick, standard or full"),
        ("--quiet=1 t.py", "cli.value", "no value"),
        ("-qz t.py", "cli.value", "no value"),
        ("--log_level loud t.py", "cli.value", "debug"),
        ("--hostfile --quiet t.py", "cli.value", "'--quiet'"),
        ("--hostfile -- t.py", "cli.value", "no value"),
        ("t.py --hostfile", "cli.value", "no value"),
        ("t.py --hostfile --lr 1", "cli.value", "'--lr'"),
        ("", "cli.value", "no script"),
        ("--quiet", "cli.value", "no script"),
        ("--hostfile train.py", "cli.value", "took 'train.py'"),
        ("stop", "cli.value", "needs a run"),
        ("stop a b", "cli.value", "'b'"),
        ("explain", "cli.value", "needs a code"),
        ("clean hosts", "cli.value", "'hosts'"),
        ("--hostfile a t.py --hostfile b", "cli.conflict", "'a' and 'b'"),
        ("t.py --hostfile a --hostfile=b", "cli.conflict", "'a' and 'b'"),
        ("--transport srun t.py", "cli.not_yet", "srun"),
        ("stacks latest", "cli.not_yet", "./stacks"),
        ("report", "cli.not_yet", "./report"),
    ],
)
def test_what_is_wrong(line, code, words):
    wrong = [finding for finding in read(line).findings if finding.severity is Severity.ERROR]

    assert [finding.code for finding in wrong] == [code]
    assert words in f"{wrong[0].observed} {wrong[0].why} {wrong[0].fix}"
    assert wrong[0].why
    assert wrong[0].fix


def test_the_value_of_an_unknown_option_is_not_the_script():
    assert read("--num-gpus 3 train.py").script == "train.py"
    assert read("--num 3 train.py").script == "train.py"
    assert read("ps --grace 3").run is None


def test_everything_wrong_is_said_at_once():
    line = (
        "--frob --num_gpus x --preflight y --hostfile a --launcher zzz --module --no_python t.py --hostfile b"
    )

    assert found(read(line)) == [
        "cli.unknown_option",
        "cli.value",
        "cli.value",
        "cli.conflict",
        "cli.conflict",
        "cli.launcher",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "--max-restarts 1",
        "--use-spares",
        "--sync-checks on",
        "--preflight full",
    ],
)
def test_what_this_version_does_not_do_is_said(line):
    invocation = read(f"{line} t.py")

    assert [(f.code, f.severity) for f in invocation.findings] == [("cli.not_yet", Severity.WARNING)]
    assert "this version" in invocation.findings[0].why


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("--num_nodes 2 --x", ["--num_nodes"]),
        ("--include=a:0", ["--include"]),
        ("--preflight off", ["--preflight"]),
        (
            "--local_rank 0 -e x -i y --module m --log_level info --config c --json --env e --num_node 2",
            [],
        ),
        ("-- --num_nodes 2", []),
        ("x -- --num_nodes 2", []),
    ],
)
def test_launcher_options_behind_the_script_get_a_hint(args, named):
    invocation = read(f"t.py {args}")

    assert found(invocation) == ["cli.option_after_script"] * len(named)
    assert [finding.observed.split()[0] for finding in invocation.findings] == named
    assert invocation.script_args[-1] == args.split()[-1]


@pytest.mark.parametrize(
    ("line", "command", "fields"),
    [
        ("ps", "ps", {}),
        ("ps --json latest", "ps", {"run": "latest"}),
        ("stop --grace 3 abc", "stop", {"run": "abc"}),
        ("clean --hostfile h --dry-run", "clean", {}),
        ("explain hostfile.syntax", "explain", {"code": "hostfile.syntax"}),
        ("check", "check", {}),
        ("check t.py a", "check", {"script": "t.py", "script_args": ("a",)}),
        ("-h", "help", {"topic": "run"}),
        ("--num 3 --help", "help", {"topic": "run"}),
        ("check --help", "help", {"topic": "check"}),
        ("--version", "version", {}),
    ],
)
def test_commands(line, command, fields):
    invocation = read(line)

    assert invocation.command == command
    assert invocation.findings == ()
    for name, value in fields.items():
        assert getattr(invocation, name) == value


def test_help_behind_the_script_is_the_scripts():
    assert read("t.py --help").script_args == ("--help",)


def test_get_falls_back_to_deepspeeds_default():
    invocation = read("--num_gpus 3 t.py")

    assert (invocation.get("num_gpus"), invocation.get("num_nodes")) == (3, -1)
    with pytest.raises(KeyError):
        invocation.get("no_such")


def real_command_lines():
    """Return argv of each `deepspeed` line, with every variable of the shell replaced by 2."""
    if not COMMAND_LINES.exists():
        pytest.skip(f"{COMMAND_LINES} is not there")
    lines = []
    for line in COMMAND_LINES.read_text().splitlines():
        match = re.match(r"(?!#)(?:.* )?(?:deepspeed(?:\.launcher\.runner)?) (.*)", line)
        if match and not re.match(r"accelerate|torchrun|srun python|mpirun|python3? -m torch", line):
            text = re.sub(r"\$\(\(.*?\)\)|\$\{[^}]*\}|\$\w+|\$@", "2", match[1]).replace("=2 ", "=2 ")
            lines.append((line, shlex.split(text.replace("--autotuning=2", "--autotuning=run"))))
    return lines


def test_real_command_lines_have_no_error():
    lines = real_command_lines()
    assert len(lines) > 150
    for line, argv in lines:
        # The variable that holds all options would hold the script too.
        if all(word.startswith("-") for word in argv):
            argv.append("train.py")
        for command in ([], ["check"]):
            wrong = [
                f
                for f in parse([*command, *argv], installed=INSTALLED).findings
                if f.severity is Severity.ERROR
            ]
            # These two are DeepSpeed's own, and we can't start them yet.
            later = {"--autotuning", "--elastic_training"} & {word.partition("=")[0] for word in argv}
            assert {f.code for f in wrong} == ({"cli.not_yet"} if later and not command else set()), (
                line,
                wrong,
            )


words = st.one_of(
    st.sampled_from(
        [*FLAGS, *COMMANDS, *LATER, "--", "-", "", "train.py", "--num", "-qHx", "-1", "--hostfile=x"]
    ),
    st.builds("{}={}".format, st.sampled_from(FLAGS), st.text(max_size=5)),
    st.text(max_size=8),
    st.text(alphabet="-=qHie ", max_size=6),
    st.binary(max_size=6).map(lambda raw: raw.decode("utf-8", "surrogateescape")),
)


@given(st.lists(words, max_size=12), st.sampled_from([None, "0.14.0", "0.19.8", "garbage"]))
def test_any_argv_gives_findings_and_no_traceback(argv, installed):
    invocation = parse(argv, installed=installed)

    assert invocation.argv == tuple(argv)
    for finding in invocation.findings:
        assert finding.observed
        assert finding.why
        assert finding.fix
    assert {option.dest for option in deepspeed_cli.OPTIONS} >= invocation.deepspeed.keys()
    for dest, value in invocation.deepspeed.items():
        kind = {"flag": bool, "int": int}.get(deepspeed_cli.BY_DEST[dest].kind, str)
        assert type(value) is kind


@given(st.lists(words, max_size=8))
def test_behind_two_dashes_everything_is_the_scripts(args):
    assert parse(["--quiet", "--", "train.py", *args], installed=None).script_args == tuple(args)


def test_help_names_every_option_and_only_what_exists():
    text = helptext.help_text()

    for flag in FLAGS:
        assert re.search(rf"(?m)(^|[\s,]){re.escape(flag)}\b", text), flag
    for command in COMMANDS:
        assert f"safelaunch {command}" in text
        assert f"safelaunch {command}" in helptext.help_text(command)
    assert not re.search(rf"safelaunch ({'|'.join(LATER)})", text)
    assert max(map(len, text.splitlines())) <= 100


def test_help_imports_nothing_heavy():
    program = (
        "import sys; from safelaunch import cli; cli.main(['--help']);"
        "heavy = 'torch deepspeed pydantic paramiko fabric ClusterShell hjson tomli structlog rich'.split();"
        "print(sorted(set(heavy) & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert result.stderr.strip() == "[]"
