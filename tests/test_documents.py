"""plan.json and outcome.json fit their schemas and hold no secret."""

from __future__ import annotations

import json

import jsonschema
import pytest

from safelaunch import documents, runs
from safelaunch.job import Job
from safelaunch.launch import Rendezvous
from safelaunch.plan import Node, Plan, Program, Variable


def make_plan():
    return Plan(
        nodes=(Node(name="a", slots=(0, 2), node_rank=0, first_rank=0),),
        program=Program(script="t.py", args=("--hf_token", "hf_abc", "x"), kind="python", local_rank=True),
        interpreter="/usr/bin/python3",
        cwd="/",
        environment=(Variable(name="MY_SECRET", value="s3cr3t", origin="--env"),),
    )


def test_plan_document():
    plan = make_plan()
    document = documents.plan_document(
        plan,
        run_id="r",
        command=["safelaunch", "--env", "MY_SECRET=s3cr3t", "--env=OTHER=s3cr3t", "t.py"],
        meet=Rendezvous(address="10.0.0.1", port=29500),
        variables={"a": plan.variables_for("a")},
        versions={"torch": None},
    )

    jsonschema.validate(document, runs.schema("plan"))
    text = json.dumps(document)
    assert "s3cr3t" not in text
    assert "hf_abc" not in text
    assert "MY_SECRET" in text


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--env", "A=b"], ["--env", "A=<redacted>"]),
        (["--env", "A"], ["--env", "A"]),
        (["--api-key=abc"], ["--api-key=<redacted>"]),
        (["--api_key", "abc", "c"], ["--api_key", "<redacted>", "c"]),
        (["--token", "--next"], ["--token", "--next"]),
        (["--lr=1", "tokenizer.json"], ["--lr=1", "tokenizer.json"]),
    ],
)
def test_redact_arguments(given, shown):
    assert documents.redact_arguments(given) == shown


def test_outcome_document():
    job = Job(make_plan().nodes, grace=1, reconnect_grace=1, clock_offsets={}, now=0)
    verdict = {
        "status": "refused",
        "exit_status": 69,
        "summary": "no",
        "culprit": None,
        "first_failure": None,
        "others": [],
    }
    for known in (job, None):
        document = documents.outcome_document(verdict, run_id="r", started=1.0, ended=2.0, job=known)
        jsonschema.validate(document, runs.schema("outcome"))
        assert document["seconds"] == 1.0
