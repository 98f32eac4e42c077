"""The project around the package: make, versions, what is shipped, and what documents name."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import safelaunch

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "safelaunch"
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "hostfiles/README.md"]
FOLDERS = "safelaunch|scripts|tests|examples|hostfiles|docs|benchmarks"
NAMED = re.compile(rf"(?:^|[\s`(])(?:\.\./)*((?:{FOLDERS})/[\w./*-]*[\w*])", re.MULTILINE)
"""A file of the repository in a text, seen from its root or from below."""
MACHINE = re.compile(r"/wor[k]/|[.]pyenv/|/root/[.]")
"""Places of the machines that the project is written on; the brackets keep it from finding itself."""


def run(*argv, cwd=ROOT, **options):
    return subprocess.run(argv, check=True, capture_output=True, text=True, cwd=cwd, **options).stdout


@pytest.fixture(scope="module")
def make():
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split())


def tracked():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git checkout")
    # Whoever runs the tests need not own the checkout.
    names = run("git", "-c", f"safe.directory={ROOT}", "ls-files", "-z").split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_make_help_explains_every_target(make):
    rows = re.findall(r"^  make (\w+) +(.*)$", run("make", "--silent", "help"), re.MULTILINE)
    assert {name for name, text in rows if text} == make


def test_documents_name_make_targets_that_exist(make):
    for path in DOCUMENTS:
        for code in re.findall(r"`make ([a-z ]+)`|^make ([a-z ]+)", path.read_text("utf-8"), re.MULTILINE):
            assert set(" ".join(code).split()) <= make, path


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_name_files_that_exist(path):
    missing = {name for name in NAMED.findall(path.read_text("utf-8")) if not any(ROOT.glob(name))}
    assert not missing


def test_the_version_is_the_newest_of_the_changelog():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[([^\]]+)\]", text, re.MULTILINE)[1] == safelaunch.__version__


@pytest.mark.parametrize(
    "command",
    [[str(Path(sys.executable).parent / "safelaunch")], [sys.executable, "-m", "safelaunch"]],
    ids=["script", "module"],
)
def test_both_commands_tell_the_version(command):
    assert safelaunch.__version__ in run(*command, "--version", stdin=subprocess.DEVNULL)


def test_the_wheel_holds_all_of_the_package_and_nothing_else(tmp_path):
    # A copy: what a build writes must not get into the checkout, which may be read-only too.
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "safelaunch", ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", "dist", cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name == f"safelaunch-{safelaunch.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {p.relative_to(ROOT).as_posix() for p in PACKAGE.rglob("*") if p.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert shipped == files
    for folder, suffix in (("schemas", ".json"), ("explain", ".md"), ("remote", ".py")):
        assert any(name.startswith(f"safelaunch/{folder}/") and name.endswith(suffix) for name in shipped)


def test_no_tracked_file_names_a_place_of_our_machines():
    found = {}
    for path in tracked():
        text = path.read_bytes().decode("utf-8", "replace")
        if MACHINE.search(text):
            found[path.relative_to(ROOT).as_posix()] = MACHINE.findall(text)
    assert not found
