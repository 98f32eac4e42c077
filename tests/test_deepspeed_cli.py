"""The table of DeepSpeed's options against the parser of the installed DeepSpeed."""

import json
import os
import random
import subprocess
import sys
from importlib import metadata

import pytest

from safelaunch import deepspeed_cli
from safelaunch.arguments import parse
from safelaunch.findings import Severity, errors

VERSION = metadata.version("deepspeed")

ORACLE = r"""
import argparse, contextlib, io, json, logging, sys
from deepspeed.launcher import launch, runner

def described(parser):
    names = {int: "int", str: "str", None: None}
    return [
        {
            "dest": a.dest, "flags": a.option_strings, "default": a.default, "type": names[a.type],
            "choices": a.choices, "nargs": a.nargs, "constant": a.const,
        }
        for a in parser._actions
        if a.dest != "help"
    ]

class Caught(Exception):
    pass

def caught(parser, args=None, namespace=None):
    raise Caught(parser)

def parser_of(module):
    kept = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = caught
    try:
        module.parse_args()
    except Caught as error:
        return error.args[0]
    finally:
        argparse.ArgumentParser.parse_args = kept

def verdict(argv):
    words = io.StringIO()
    try:
        with contextlib.redirect_stderr(words), contextlib.redirect_stdout(words):
            return {"values": vars(runner.parse_args(argv))}
    except SystemExit as error:
        return {"error": words.getvalue(), "status": error.code}

request = json.load(sys.stdin)
json.dump(
    {
        "runner": described(parser_of(runner)),
        "launch": described(parser_of(launch)),
        "verdicts": [verdict(argv) for argv in request],
    },
    sys.stdout,
)
"""

WORDS = [
    *(flag for option in deepspeed_cli.OPTIONS for flag in option.flags),
    *(
        "--num",
        "--num_g",
        "--num_a",
        "--ho",
        "--hostfil",
        "--no_s",
        "--no_ssh_",
        "--mas",
        "--master_p",
        "--incl",
    ),
    *(
        "--mod",
        "--m",
        "--l",
        "--launcher_",
        "--q",
        "--force_m",
        "--bind",
        "--b",
        "--ex",
        "--ssh",
        "--elastic_tr",
    ),
    *(
        "--hostfile=",
        "--num_gpus=3",
        "--num_g=3",
        "--num=3",
        "--quiet=1",
        "--master_port=x",
        "--include=a:0@b",
    ),
    *("--launcher_args=-n 3 --x", "--autotuning=run", "--autotuning=never", "--log_level=debug", "--log_l=x"),
    *(
        "-qq",
        "-qHfoo",
        "-Hfoo",
        "-H=foo",
        "-ia:1",
        "-qz",
        "-q=1",
        "-x",
        "-1",
        "-0.5",
        "-.5",
        "-5x",
        "-",
        "--",
        "---",
    ),
    *(
        "train.py",
        "hosts",
        "3",
        "2950",
        "0",
        "-1",
        "x y",
        "-n 3",
        "-q 3",
        "--num_gpus=3 x",
        "--no such",
        "",
        "é",
    ),
    *("--unknown", "--unknown=3", "run", "info", " 7", "1_0", "0x3"),
]


def command_lines(count):
    chooser = random.Random(20260101)
    return [[chooser.choice(WORDS) for _ in range(chooser.randint(0, 7))] for _ in range(count)]


@pytest.fixture(scope="module")
def oracle():
    lines = command_lines(6000)
    result = subprocess.run(
        [sys.executable, "-c", ORACLE],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"},
    )
    answer = json.loads(result.stdout[result.stdout.index("{") :])
    return {**answer, "lines": lines}


def shape(option):
    kinds = {"flag": None, "int": "int", "text": "str", "choice": "str"}
    return {
        "dest": option.dest,
        "flags": list(option.flags),
        "default": option.default,
        "type": kinds[option.kind],
        "choices": list(option.choices) or None,
        "nargs": 0 if option.kind == "flag" else None,
        "constant": True if option.kind == "flag" else None,
    }


@pytest.mark.deepspeed
def test_the_table_is_the_parser_of_the_installed_deepspeed(oracle):
    theirs = {action["dest"]: action for action in oracle["runner"]}
    script, rest = theirs.pop("user_script"), theirs.pop("user_args")
    ours = {option.dest: shape(option) for option in deepspeed_cli.OPTIONS if option.in_version(VERSION)}

    assert ours == theirs
    assert (script["flags"], script["nargs"], rest["nargs"]) == ([], None, "...")


@pytest.mark.deepspeed
def test_what_the_node_launcher_takes(oracle):
    given_by_us = {
        "node_rank",
        "master_addr",
        "master_port",
        "world_info",
        "training_script",
        "training_script_args",
    }
    theirs = {action["dest"] for action in oracle["launch"]} - given_by_us

    assert {option.dest for option in deepspeed_cli.OPTIONS if option.node_launcher} == theirs


@pytest.mark.deepspeed
def test_random_command_lines_mean_the_same(oracle):
    accepted = 0
    for argv, verdict in zip(oracle["lines"], oracle["verdicts"], strict=True):
        ours = parse(argv, installed=VERSION)
        wrong = [
            f for f in ours.findings if f.code in ("cli.unknown_option", "cli.value", "cli.version_option")
        ]
        wrong = [f for f in wrong if "numbers and ranges" not in f.observed]
        if any(word.startswith("--hostfile") for word in _behind_script(argv, ours)):
            continue  # ours on purpose
        if ours.command == "help":
            assert verdict.get("status") is not None, argv
        elif "values" in verdict:
            accepted += 1
            values = verdict["values"]
            assert not errors(wrong), (argv, wrong)
            assert ours.script == values.pop("user_script"), argv
            assert list(ours.script_args) == values.pop("user_args"), argv
            assert {dest: ours.get(dest) for dest in values} == values, argv
        elif "ambiguous" in verdict["error"] and not errors(wrong):
            # argparse looks for abbreviations in the script's own arguments too.
            assert any(word.startswith("--") for word in ours.script_args), (argv, verdict)
        else:
            assert errors(wrong), (argv, verdict)
    assert accepted > 300


def _behind_script(argv, ours):
    return argv[len(argv) - len(ours.script_args) - 2 :] if ours.script is not None else []


def codes(argv, installed="0.18.0", severity=None):
    found = parse(argv, installed=installed).findings
    return [finding.code for finding in found if severity in (None, finding.severity)]


@pytest.mark.parametrize(
    ("installed", "flag", "there"),
    [
        ("0.14.0", "--no_ssh", False),
        ("0.14.5", "--no_ssh", True),
        ("0.17.0", "--venv_script=x", False),
        ("0.17.1", "--venv_script=x", True),
        ("0.17.5+cu121", "--quiet", False),
        ("0.17.6", "-q", True),
        ("0.19.7", "--max_elastic_nodes=2", True),
        ("0.19.8", "--max_elastic_nodes=2", False),
        ("0.20.0.dev1", "--elastic_training", False),
        (None, "--elastic_training", True),
        ("unknown", "--hostfile=x", True),
    ],
)
def test_options_of_some_versions_only(installed, flag, there):
    found = parse([flag, "train.py"], installed=installed).findings

    refused = [finding for finding in found if finding.code == "cli.version_option"]
    assert (not refused) == there
    if not there:
        assert installed in refused[0].observed
        assert refused[0].severity is Severity.ERROR


def test_an_abbreviation_means_what_the_installed_version_has():
    assert codes(["--lo", "error", "t.py"], "0.17.6") == []
    assert codes(["--lo", "error", "t.py"], "0.17.5") == ["cli.version_option"]
    assert codes(["--no_s", "t.py"], "0.14.0") == []
    assert codes(["--no_s", "t.py"], "0.14.5") == ["cli.unknown_option"]
    # --min is short for an option of 0.19.7; --el of 0.19.8 would be nothing
    assert codes(["--el", "t.py"], "0.19.8") == ["cli.version_option"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--module", "--no_python", "x"], "cli.conflict"),
        (["--launcher", "slrum", "t.py"], "cli.launcher"),
        (["--bind_cores_to_rank", "--bind_core_list", "4-2", "t.py"], "cli.value"),
        (["--bind_cores_to_rank", "--bind_core_list", "0-3,2", "t.py"], "cli.value"),
        (["--bind_cores_to_rank", "--bind_core_list", "a", "t.py"], "cli.value"),
        (["--bind_cores_to_rank", "--bind_core_list", "0-3,3", "t.py"], "cli.value"),
        (["--num_gpus", "999999999", "t.py"], "cli.value"),
        (["--autotuning", "run", "t.py"], "cli.not_yet"),
        (["--elastic_training", "t.py"], "cli.not_yet"),
    ],
)
def test_options_that_can_not_be_served(argv, expected):
    assert codes(argv, severity=Severity.ERROR) == [expected]


@pytest.mark.parametrize(
    "argv",
    [
        ["--launcher", "OpenMPI", "t.py"],
        ["--bind_cores_to_rank", "--bind_core_list", "0,2-5", "t.py"],
        ["--no_ssh_check", "--force_multi", "t.py"],
        ["check", "--autotuning", "run", "t.py"],
        ["--check-only", "--elastic_training", "t.py"],
    ],
)
def test_options_that_are_no_error(argv):
    assert codes(argv, severity=Severity.ERROR) == []


@pytest.mark.parametrize("flag", ["--node_rank=1", "--bind_core_list=0", "--min_elastic_nodes=1"])
def test_options_without_the_one_that_makes_them_work(flag):
    assert codes([flag, "t.py"]) == ["cli.option_ignored"]


def test_other_launchers():
    def judge(argv, **how):
        given = parse(argv, installed="0.18.0").deepspeed
        found = deepspeed_cli.launcher_findings(given, **how)
        return [(finding.code, finding.severity.value) for finding in found]

    slurm = ["--launcher", "SLURM", "--module", "--num_gpus", "2", "t"]
    not_yet, ignored = ("cli.not_yet", "error"), ("cli.option_ignored", "warning")
    assert judge(slurm, several=True, checking=False) == [not_yet, ignored]
    assert judge(slurm, several=True, checking=True) == [("cli.not_yet", "warning"), ignored]
    assert judge(slurm, several=False, checking=False) == [ignored]
    mpi = ["--launcher", "openmpi", "--num_gpus", "2", "t"]
    assert judge(mpi, several=True, checking=False) == [not_yet, ("cli.conflict", "error")]
    assert judge(["--launcher_args=-v", "t"], several=True, checking=False) == [ignored]
    assert judge(["--launcher=pdsh", "t"], several=True, checking=False) == []


def test_what_is_passed_to_the_node_launcher():
    argv = [
        "--bind_cores_to_rank",
        "--bind_core_list=0-3",
        "-q",
        "--log_level",
        "debug",
        "--save_pid",
        "t.py",
    ]

    options = deepspeed_cli.node_launcher_options(parse(argv, installed=None).deepspeed)

    assert options == ("--bind_cores_to_rank", "--bind_core_list=0-3", "--log_level=debug", "--quiet")
