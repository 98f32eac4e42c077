"""Whatever the user hands over: findings, never a traceback, and nothing that a terminal would obey."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safelaunch import catalogue, hostfile
from safelaunch.environment import check_values, exported, from_flags, parse_env_file
from safelaunch.findings import Finding, Where, errors
from safelaunch.hostfile import Host
from safelaunch.selection import rank_map, select

pytestmark = pytest.mark.timeout(300)
fuzz = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])


def soup(*tokens: str) -> st.SearchStrategy[str]:
    """Text made of the words of a grammar and of anything else."""
    return st.lists(st.sampled_from(tokens) | st.text(max_size=4), max_size=25).map("".join)


def as_bytes(text: st.SearchStrategy[str]) -> st.SearchStrategy[bytes]:
    return text.map(lambda one: one.encode("utf-8", "surrogatepass")) | st.binary(max_size=200)


odd = ("\ufeff", "\u200b", "\u00a0", "\u2028", "\x0b", "\x1c", "\x1b[2J", "\0", "\udcff", "\uff18", "\u2013")
hostfiles = as_bytes(
    soup(
        *(
            "node1",
            "node2",
            "localhost",
            "::1",
            "[::1]",
            "u@",
            "a:22",
            "n[1-3]",
            "n[08-1]",
            "[",
            "]",
            "1-2/0",
        ),
        *(
            " ",
            "\t",
            "\n",
            "\r",
            " slots=",
            "slots=4",
            " slots=0",
            "SLOTS",
            "=",
            "8",
            "-",
            ",",
            ";",
            "#",
            "%",
        ),
        *("# safelaunch: patterns\n", " max_slots=4", "-oProxyCommand=x", "$(id)", "9" * 30, *odd),
    )
)
filters = soup(
    *("node1", "node2", "u@h", "::1", "fe80::1%eth0", "localhost", "@", ":", ",", "0", "1", "-1", "0-3", " "),
    *("*", "n[1-3]", "[", "9" * 30, "+1", "1_0", "=", ";", *odd),
)
env_files = as_bytes(
    soup(
        *(
            "NCCL_DEBUG",
            "HF_TOKEN",
            "PATH",
            "=",
            "export ",
            "declare -x ",
            "#",
            " ",
            "\n",
            "\r\n",
            '"',
            "'",
            "$",
        ),
        *("${", "}", "$HOME", "\\$", "`", "$(", "my.name", "INFO", "1", *odd),
    )
)
configs = as_bytes(
    soup(
        *(
            "{",
            "}",
            "[",
            "]",
            ":",
            ",",
            '"',
            "'''",
            "train_batch_size",
            '"zero_optimization"',
            "stage",
            "auto",
        ),
        *(
            "true",
            "null",
            "1e400",
            "-",
            "0",
            "1" * 30,
            "# x\n",
            "// x\n",
            "/*",
            "*/",
            "\n",
            " ",
            "${x}",
            "NaN",
        ),
        *("\\u", *odd),
    )
)


def judge(findings) -> None:
    """Every finding must be one that can be printed, written to a document, and looked up."""
    for finding in findings:
        assert isinstance(finding, Finding)
        assert finding.code in catalogue.CODES
        assert finding.observed
        assert finding.why
        assert finding.fix
        told = f"{finding.observed}{finding.why}{finding.fix}".replace("\n", "")
        assert told.isprintable(), repr(told)
        where = finding.where
        if where is not None:
            assert where.line is None or where.line >= 1
            assert where.column is None or where.column >= 1
        finding.document()


@fuzz
@given(hostfiles)
def test_hostfiles(data):
    parsed = hostfile.parse(data, "hosts")
    judge(parsed.findings)
    assert parsed.hosts or parsed.findings
    for host in parsed.hosts:
        assert 0 <= host.slots <= hostfile.MAX_SLOTS
        assert host.name.isprintable()
        assert not set(host.name) & set(" ,;$`\"'\\|&<>(){}[]*?!^/#~=")
        assert not host.name.startswith("-")
        assert "@-" not in host.name
    lines = len(data.splitlines()) + data.count(b"\r") + 1
    assert all(f.where is not None and (f.where.line or 1) <= lines for f in parsed.findings)


@fuzz
@given(
    hostfiles, filters, filters, st.integers(-3, 9), st.integers(-3, 9), st.none() | filters, st.booleans()
)
def test_hostfile_and_selection_together(data, include, exclude, num_nodes, num_gpus, visible, explicit):
    choose(hostfile.parse(data, "hosts").hosts, include, exclude, num_nodes, num_gpus, visible, explicit)


pools = st.lists(
    st.builds(
        Host,
        st.sampled_from(["node1", "node2", "u@h", "::1", "fe80::1%eth0", "localhost", "127.0.0.2"]),
        st.integers(0, 4),
        st.none() | st.just(Where("hosts", 1, 1)),
    ),
    max_size=4,
    unique_by=lambda host: host.name,
)


@fuzz
@given(pools, filters, filters, st.integers(-3, 9), st.integers(-3, 9), st.none() | filters, st.booleans())
def test_selection(pool, include, exclude, num_nodes, num_gpus, visible, explicit):
    choose(pool, include, exclude, num_nodes, num_gpus, visible, explicit)


@fuzz
@given(filters, st.booleans())
def test_visible_devices_alone(visible, explicit):
    choose([Host("localhost", 2)], "", "", -1, -1, visible, explicit)


def choose(pool, include, exclude, num_nodes, num_gpus, visible, explicit):
    selection = select(
        pool,
        include=include,
        exclude=exclude,
        num_nodes=num_nodes,
        num_gpus=num_gpus,
        visible_devices=visible,
        explicit_hostfile=explicit,
    )
    judge(selection.findings)
    rank_map(selection.nodes)
    ranks = [rank for node in selection.nodes for rank in node.ranks]
    assert ranks == list(range(len(ranks)))
    assert [node.node_rank for node in selection.nodes] == list(range(len(selection.nodes)))
    if not errors(selection.findings) and any(host.slots for host in pool):
        assert selection.nodes
    slots = {host.name: host.slots for host in pool}
    for node in selection.nodes:
        assert node.slots
        assert num_gpus > 0 or max(node.slots) < slots[node.name]


@fuzz
@given(env_files, st.none() | st.dictionaries(st.sampled_from(["HOME", "PATH", "A"]), st.text(max_size=5)))
def test_environment_files(data, environ):
    variables, findings = parse_env_file(data, ".deepspeed_env", environ)
    judge(findings)
    assert all(finding.where is not None for finding in findings)
    for variable in variables:
        # What execve takes.
        assert variable.name
        assert "=" not in variable.name
        assert "\0" not in variable.name + variable.value
    judge(check_values(variables, environ or {}, 4))


words = soup(
    "DEEPSPEED_TIMEOUT",
    "DS_ACCELERATOR",
    "LOCAL_SIZE",
    "WORLD_SIZE",
    "PMIX_RANK",
    "=",
    "1",
    "x",
    " ",
    *odd,
)


@fuzz
@given(st.lists(words, max_size=5), st.dictionaries(words, words, max_size=8), st.lists(words, max_size=3))
def test_environment_of_the_shell_and_flags(items, environ, extra):
    variables, findings = from_flags(items, environ)
    judge(findings)
    judge(check_values([*exported(environ, extra, cwd="/"), *variables], environ, None))


@fuzz
@given(configs, st.none() | st.integers(1, 64))
def test_deepspeed_configs(data, world_size):
    from safelaunch import ds_config

    findings = ds_config.check(
        data, "ds.json", deepspeed_version="0.19.8", world_size=world_size, script_args=["--fp16", "true"]
    )
    judge(findings)
