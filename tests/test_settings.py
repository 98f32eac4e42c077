"""Settings: sources, precedence, origins, and what is wrong with a file."""

import dataclasses
import os

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from safelaunch import settings
from safelaunch.findings import Severity
from safelaunch.options import SETTINGS
from safelaunch.settings import Settings

HOME, CWD = "/home/u", "/job/dir"
USER, PROJECT, PYPROJECT = (
    "/home/u/.config/safelaunch/config.toml",
    f"{CWD}/safelaunch.toml",
    f"{CWD}/pyproject.toml",
)


def load(files=None, *, flags=None, environ=None, script="train.py"):
    def read(path):
        content = (files or {}).get(path)
        if isinstance(content, OSError):
            raise content
        return content.encode() if isinstance(content, str) else content

    return settings.load(flags or {}, environ or {}, script=script, cwd=CWD, home=HOME, read=read)


def places(loaded):
    return [
        (f.code, f.where.file, f.where.line, f.where.column) if f.where else (f.code, None, None, None)
        for f in loaded.findings
    ]


def test_defaults():
    loaded = load()

    assert loaded.settings == Settings()
    assert set(loaded.origins) == set(SETTINGS)
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.findings == ()


def test_every_key_is_a_field_and_every_field_a_key():
    fields = {field.name for field in dataclasses.fields(Settings)} - {"checks", "variables"}

    assert fields == set(SETTINGS)


def test_flags_go_before_variables_before_the_project_before_the_user():
    files = {
        USER: "grace = 1\nfanout = 1\nssh_timeout = 1\nkeep_runs = 1",
        PROJECT: "\n\ngrace = 2\nfanout = 2\nssh_timeout = 2",
    }
    environ = {"SAFELAUNCH_GRACE": "3", "SAFELAUNCH_FANOUT": "3"}

    loaded = load(files, environ=environ, flags={"grace": 4.0, "env": ("A=1",)})

    found = loaded.settings
    assert (found.grace, found.fanout, found.ssh_timeout, found.keep_runs) == (4, 3, 2, 1)
    origins = [loaded.origins[key] for key in ("grace", "fanout", "ssh_timeout", "keep_runs", "plain")]
    assert origins == ["command line", "SAFELAUNCH_FANOUT", f"{PROJECT}:5", f"{USER}:4", "default"]
    assert loaded.settings.limits.grace == 4


@pytest.mark.parametrize(
    ("files", "script", "grace"),
    [
        ({PROJECT: "grace = 1", f"{CWD}/sub/safelaunch.toml": "grace = 2"}, "sub/train.py", 2),
        ({PROJECT: "grace = 1", "/else/safelaunch.toml": "grace = 2"}, "/else/train.py", 2),
        ({PROJECT: "grace = 1", "/else/pyproject.toml": "[tool.safelaunch]\ngrace = 2"}, "/else/train.py", 1),
        ({PYPROJECT: "[tool.safelaunch]\ngrace = 3"}, "train.py", 3),
        ({PYPROJECT: "[tool.other]\ngrace = 3"}, "train.py", 10),
        ({PYPROJECT: "[tool.safelaunch]\ngrace = 3"}, None, 3),
        ({PYPROJECT: "[[[ not toml"}, "train.py", 10),
        ({PYPROJECT: OSError(13, "Permission denied")}, "train.py", 10),
        ({PROJECT: "", PYPROJECT: "[tool.safelaunch]\ngrace = 3"}, "train.py", 10),
    ],
)
def test_which_file_is_the_projects(files, script, grace):
    loaded = load(files, script=script)

    assert loaded.settings.grace == grace
    assert loaded.findings == ()


def test_a_file_that_is_named_takes_the_place_of_the_others():
    files = {PROJECT: "grace = 1", f"{CWD}/mine.toml": "grace = 2"}

    assert load(files, flags={"config": "mine.toml"}).settings.grace == 2
    assert load(files, environ={"SAFELAUNCH_CONFIG": "mine.toml"}).settings.grace == 2
    missing = load(files, flags={"config": "none.toml"})
    assert places(missing) == [("settings.unreadable", f"{CWD}/none.toml", None, None)]


def test_the_users_file_follows_xdg():
    assert (
        load({"/x/safelaunch/config.toml": "grace = 5"}, environ={"XDG_CONFIG_HOME": "/x"}).settings.grace
        == 5
    )


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ('run_dir = "runs/a"', "run_dir", f"{CWD}/runs/a"),
        ('run_dir = "~/runs"', "run_dir", "/home/u/runs"),
        ("grace = 2.5", "grace", 2.5),
        ('preflight = "quick"', "preflight", "quick"),
        ("force = true", "force", True),
        ('export = ["A", "B*"]', "export", ("A", "B*")),
        ('checkpoint_dirs = [\n  "/a b", # c\n  "/c",\n]', "checkpoint_dirs", ("/a b", "/c")),
        ('interpreter = "/opt/py"', "interpreter", "/opt/py"),
        ("verbose = 2", "verbose", 2),
    ],
)
def test_values_of_a_file(text, key, value):
    loaded = load({PROJECT: text})

    assert getattr(loaded.settings, key) == value
    assert loaded.origins[key] == f"{PROJECT}:1"
    assert loaded.findings == ()


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("SAFELAUNCH_GRACE", "2.5", "grace", 2.5),
        ("SAFELAUNCH_FORCE", "1", "force", True),
        ("SAFELAUNCH_FORCE", "No", "force", False),
        ("SAFELAUNCH_EXPORT", "A, B* C", "export", ("A", "B*", "C")),
        ("SAFELAUNCH_TRANSPORT", "local", "transport", "local"),
        ("SAFELAUNCH_FANOUT", "", "fanout", 64),
        ("SAFELAUNCH_RUN_ID", "x", "fanout", 64),
        ("SAFELAUNCH_RUN_ROOT", "x", "fanout", 64),
    ],
)
def test_values_of_variables(name, text, key, value):
    loaded = load(environ={name: text})

    assert getattr(loaded.settings, key) == value
    assert loaded.findings == ()


@pytest.mark.parametrize(
    ("environ", "code", "words"),
    [
        ({"SAFELAUNCH_GRACES": "1"}, "settings.unknown_key", "SAFELAUNCH_GRACE"),
        ({"SAFELAUNCH_XYZZY": "1"}, "settings.unknown_key", "unset SAFELAUNCH_XYZZY"),
        ({"SAFELAUNCH_GRACE": "soon"}, "settings.value", "a number"),
        ({"SAFELAUNCH_FORCE": "maybe"}, "settings.value", "true or false"),
        ({"SAFELAUNCH_TRANSPORT": "pigeon"}, "settings.value", "srun or local"),
    ],
)
def test_what_is_wrong_with_variables(environ, code, words):
    (finding,) = load(environ=environ).findings

    assert (finding.code, finding.severity) == (code, Severity.ERROR)
    assert words in finding.observed + finding.fix


@pytest.mark.parametrize(
    ("text", "code", "line", "column", "words"),
    [
        ("a = 1\ngrase = 3\n", "settings.unknown_key", 1, 1, ""),
        ("# c\n\n  grase = 3\n", "settings.unknown_key", 3, 3, "grace"),
        ("hang-timeout = 3\n", "settings.unknown_key", 1, 1, "hang_timeout"),
        ('hostfile = "h"\n', "settings.unknown_key", 1, 1, "--hostfile"),
        ('grace = "10"\n', "settings.value", 1, 1, "a number"),
        ("grace = -1\n", "settings.value", 1, 1, "not under 0"),
        ("grace = nan\n", "settings.value", 1, 1, "number"),
        ("fanout = 2.5\n", "settings.value", 1, 1, "whole number"),
        ("force = 1\n", "settings.value", 1, 1, "true or false"),
        ("fanout = true\n", "settings.value", 1, 1, "whole number"),
        ('export = "A"\n', "settings.value", 1, 1, "list of strings"),
        ("export = [1]\n", "settings.value", 1, 1, "list of strings"),
        ("preflight = 1\n", "settings.value", 1, 1, "quick"),
        ('checks = "off"\n', "settings.value", 1, 1, "a table"),
        ('[checks]\n"hostfile.unevn" = "off"\n', "settings.unknown_key", 2, 1, "hostfile.uneven"),
        ('[checks]\n"nonsense.*" = "off"\n', "settings.unknown_key", 2, 1, ""),
        ('[checks]\n\n"hostfile.*" = "silent"\n', "settings.value", 3, 1, "error, warning, info, off"),
        ('[checks]\n"hostfile.uneven" = []\n', "settings.value", 2, 1, "error, warning, info, off"),
        ('[checks]\nhostfile.uneven = "off"\n', "settings.value", 2, 1, '"hostfile.uneven" = "off"'),
        ("[env]\nA = true\n", "settings.value", 2, 1, "string or a number"),
        ('[env]\n"A B" = "x"\n', "settings.value", 2, 1, "no name"),
        ('[env]\nA = "x\\u0000"\n', "settings.value", 2, 1, ""),
        ('[nodes."n1"]\nenvs = {}\n', "settings.unknown_key", 2, 1, "env"),
        ('[nodes]\nn1 = "x"\n', "settings.value", 2, 1, "a table"),
        ('[nodes.n1.env]\nA = """\nx"""\nB = [1]\n', "settings.value", 4, 1, ""),
        ("grace = 1\ngrace = 2\n", "settings.syntax", 2, 10, ""),
        ("grace = \n", "settings.syntax", 1, 9, "grace = ..."),
        ("grace = 1\n[env\n", "settings.syntax", 2, 5, ""),
        ('grace = "', "settings.syntax", 1, 1, ""),
        ("\ufeffgrace = 1\n", "settings.syntax", 1, 1, ""),
        ("transport = 'srun'\n", "cli.not_yet", 1, 1, "srun"),
    ],
)
def test_what_is_wrong_with_a_file(text, code, line, column, words):
    loaded = load({PROJECT: text})
    finding = next(f for f in loaded.findings if f.code == code)

    assert finding.severity is Severity.ERROR
    assert (finding.where.file, finding.where.line) == (PROJECT, line)
    assert finding.where.column == column or code == "settings.syntax"
    assert words in f"{finding.observed} {finding.why} {finding.fix}"


def test_line_ends_of_windows_and_tables_of_others_do_not_shift_the_place():
    text = "[tool.x]\r\nrace = '''\r\n[tool.safelaunch]\r\n'''"
    text += "\r\n[tool.safelaunch]\r\n\r\ngrase = 3\r\n[a.b]\r\ngrase = 4"

    assert places(load({PYPROJECT: text})) == [("settings.unknown_key", PYPROJECT, 7, 1)]


def test_text_that_is_not_utf8():
    assert places(load({PROJECT: b"grace = 1\n# \xff"})) == [("settings.unreadable", PROJECT, 2, None)]


def test_a_file_that_can_not_be_read():
    loaded = load({PROJECT: OSError(13, "Permission denied")})

    assert places(loaded) == [("settings.unreadable", PROJECT, None, None)]
    assert "Permission denied" in loaded.findings[0].observed


def test_values_that_this_version_can_not_serve():
    def codes(**how):
        return [(f.code, f.severity) for f in load(**how).findings]

    warning = [("cli.not_yet", Severity.WARNING)]
    assert codes(files={PROJECT: 'sync_checks = "on"'}) == warning
    assert codes(environ={"SAFELAUNCH_MAX_RESTARTS": "2"}) == warning
    assert codes(files={PROJECT: 'sync_checks = "off"\nmax_restarts = 0\nuse_spares = false'}) == []
    # What the command line overrides asks for nothing; the flag itself is judged with the command line.
    assert codes(files={PROJECT: "max_restarts = 2"}, flags={"max_restarts": 0}) == []
    assert codes(flags={"max_restarts": 2}) == []


def test_tables_are_merged_key_by_key():
    files = {
        USER: '[checks]\n"hostfile.*" = "off"\n"cli.*" = "info"\n[env]\nA = "1"\nB = 2\n',
        PROJECT: '[checks]\n"cli.*" = "warning"\n[env]\nA = "3"\n[nodes."n[1]".env]\nA = "4"\nC = 1.5\n',
    }
    loaded = load(files)

    assert loaded.settings.checks == {"hostfile.*": "off", "cli.*": "warning"}
    assert {(v.node, v.name): (v.value, v.origin) for v in loaded.settings.variables} == {
        (None, "A"): ("3", f"{PROJECT}:4"),
        (None, "B"): ("2", f"{USER}:6"),
        ("n[1]", "A"): ("4", f"{PROJECT}:6"),
        ("n[1]", "C"): ("1.5", f"{PROJECT}:7"),
    }
    assert loaded.findings == ()


def test_show_is_toml_with_origins_and_without_secrets():
    text = (
        'grace = 3\nexport = ["A\\"b"]\n[checks]\n"cli.*" = "off"\n[env]\nWANDB_API_KEY = "hunter2"\n'
        'NCCL_DEBUG = "INFO"\n[nodes."n 1".env]\nNCCL_DEBUG = "WARN"\n'
    )
    loaded = load({PROJECT: text})
    shown = settings.show(loaded.settings, loaded.origins)

    assert loaded.findings == ()
    assert "hunter2" not in shown
    assert f"# {PROJECT}:1" in next(line for line in shown.splitlines() if line.startswith("grace = 3 "))
    again = tomli.loads(shown)
    assert again["checks"] == {"cli.*": "off"}
    assert again["env"]["NCCL_DEBUG"] == "INFO"
    assert again["nodes"] == {"n 1": {"env": {"NCCL_DEBUG": "WARN"}}}
    assert again["export"] == ['A"b']
    assert set(SETTINGS) <= set(again)


def test_a_secret_is_in_no_message():
    text = '[env]\nWANDB_API_KEY = ["hunter2"]\n[nodes.n.env]\nA = {b = "hunter2"}\n'
    broken = "[env]\nWANDB_API_KEY = hunter2\n"

    for content in (text, broken):
        loaded = load({PROJECT: content})
        assert loaded.findings
        assert all("hunter2" not in f.observed + f.why + f.fix for f in loaded.findings)


def test_real_files(tmp_path):
    from safelaunch.here import Here

    here = Here(cwd=str(tmp_path), home=str(tmp_path / "home"), environ={})
    (tmp_path / "safelaunch.toml").write_text("grace = 7\n")
    loaded = settings.load({}, {}, script="t.py", cwd=here.cwd, home=here.home, read=here.read_if_there)
    assert loaded.settings.grace == 7
    assert loaded.origins["grace"] == f"{tmp_path}/safelaunch.toml:1"

    (tmp_path / "safelaunch.toml").unlink()
    os.mkdir(tmp_path / "safelaunch.toml")
    loaded = settings.load({}, {}, script="t.py", cwd=here.cwd, home=here.home, read=here.read_if_there)
    assert [f.code for f in loaded.findings] == ["settings.unreadable"]


keys = st.sampled_from(
    [*SETTINGS, "checks", "env", "nodes", "grase", '"a b"', "'x'", "env.A", "nodes.n.env.B", "\n", ""]
)
values = st.sampled_from(
    [
        "1",
        "-1",
        "2.5",
        "true",
        '"x"',
        "'off'",
        "[]",
        "[1, 'a']",
        '"""\na\nb"""',
        "{}",
        "{a = 1}",
        "1979-05-27",
        "[\n1,\n]",
        "",
        "nan",
    ]
)
statements = st.one_of(
    st.builds("{} = {}".format, keys, values),
    st.builds("[{}]".format, keys),
    st.builds("[[{}]]".format, keys),
    st.text(max_size=10),
    st.just("# comment = ["),
)


@given(st.lists(statements, max_size=8).map("\n".join))
def test_any_file_gives_findings_and_no_traceback(text):
    loaded = load({PROJECT: text})

    settings.show(loaded.settings, loaded.origins)
    try:
        table = tomli.loads(text)
    except tomli.TOMLDecodeError:
        assert "settings.syntax" in [finding.code for finding in loaded.findings]
        return
    assert table == {} or loaded.findings or set(table) <= {*SETTINGS, "checks", "env", "nodes"}
    for finding in loaded.findings:
        assert finding.where.line is not None
        line = text.replace("\r\n", "\n").split("\n")[finding.where.line - 1]
        assert line[finding.where.column - 1 :].strip()


@given(st.binary(max_size=40))
def test_any_bytes_give_findings_and_no_traceback(raw):
    load({PROJECT: raw, PYPROJECT: raw + b"safelaunch"})


@given(
    st.dictionaries(st.sampled_from([f"SAFELAUNCH_{key.upper()}" for key in SETTINGS]), st.text(max_size=8))
)
def test_any_variables_give_findings_and_no_traceback(environ):
    loaded = load(environ=environ)

    settings.show(loaded.settings, loaded.origins)
