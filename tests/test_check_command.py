"""`safelaunch check` as users call it, on hostfiles that must not get past it."""

from __future__ import annotations

import json
import subprocess
import sys

import jsonschema
import pytest
from test_hostfile import REAL, SAMPLES, files, stated

from safelaunch import cli, running, runs


@pytest.fixture
def check(capsys, monkeypatch, tmp_path):
    """Run `safelaunch check --json ARGUMENTS` in an empty directory; return its status and document."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAFELAUNCH_RUN_ROOT", str(tmp_path / "runs"))

    def run(*arguments):
        status = cli.main(["check", "--json", *map(str, arguments)])
        document = json.loads(capsys.readouterr().out)
        jsonschema.validate(document, runs.schema("preflight"))
        assert document["exit_status"] == status
        assert not (tmp_path / "runs").exists()
        return status, document

    return run


def places(document):
    return [
        (
            finding["code"],
            finding["severity"],
            finding["where"] and finding["where"]["line"],
            finding["where"] and finding["where"]["column"],
        )
        for finding in document["findings"]
    ]


@pytest.mark.parametrize("file", files(SAMPLES / "broken"), ids=lambda file: file.name)
def test_broken_hostfiles_are_refused(check, file):
    status, document = check("--hostfile", file)

    assert status == 78
    assert document["ok"] is False
    assert [one for one in stated(file) if one not in places(document)] == []
    assert {finding["where"]["file"] for finding in document["findings"] if finding["where"]} == {str(file)}
    assert {host["state"] for host in document["hosts"]} <= {"not_contacted"}


def test_a_missing_hostfile_names_what_lies_beside_it(check, tmp_path):
    (tmp_path / "hosts").write_text("node1 slots=1\n")
    status, document = check("--hostfile", "hots")

    assert status == 78
    (finding,) = document["findings"]
    assert finding["code"] == "hostfile.missing"
    assert str(tmp_path / "hots") in finding["observed"]
    assert "hosts" in finding["fix"]


def accepted(kind):
    if not REAL.is_dir():
        return [pytest.param(None, marks=pytest.mark.skip(reason="no ../shared/data/real-inputs here"))]
    verdicts = json.loads((REAL / "expected.json").read_text(encoding="utf-8"))[kind]
    return [REAL / kind / name for name, verdict in verdicts.items() if verdict["status"] == "accepted"]


@pytest.mark.parametrize("file", accepted("hostfiles"), ids=lambda file: getattr(file, "name", None))
def test_hostfiles_that_people_use_pass(check, file):
    status, document = check("--preflight", "off", "--hostfile", file)

    assert status == 0, document["findings"]


@pytest.mark.parametrize("file", accepted("ds-configs"), ids=lambda file: getattr(file, "name", None))
def test_configs_that_people_use_pass(check, tmp_path, file):
    (tmp_path / "hosts").write_text("node1 slots=8\n")  # the world for which expected.json was made
    (tmp_path / "train.py").write_text("")
    options = "--preflight", "off", "--hostfile", "hosts"
    status, document = check(*options, "train.py", "--deepspeed", "--deepspeed_config", file)

    assert status == 0, document["findings"]


def test_only_nodes_that_answered_count_as_reached():
    document = {
        "ok": False,
        "hosts": [{"name": name, "state": "ok" if name == "a" else "failed"} for name in "abc"],
        "findings": [
            {"code": "ssh.refused", "severity": "error", "hosts": ["b"]},
            {"code": "shm.small", "severity": "error", "hosts": ["c"]},
            {"code": "ssh.noise", "severity": "warning", "hosts": ["a"]},
        ],
    }
    assert running._check_summary(document).endswith("; 2 of 3 nodes reached")


def test_the_command_itself(tmp_path):
    file = SAMPLES / "broken" / "misspelt-keyword"
    done = subprocess.run(
        [sys.executable, "-m", "safelaunch", "check", "--hostfile", file],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
    )

    assert done.returncode == 78
    assert "hostfile.syntax" in done.stderr
    assert "not fit to run" in done.stderr
    assert done.stdout == ""
