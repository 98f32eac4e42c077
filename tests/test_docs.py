"""What the user reads is true: pages of findings, and the documentation against the code."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from safelaunch import catalogue, options

ROOT = Path(__file__).resolve().parent.parent
DOCS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(path for path in sorted(ROOT.glob("*/README.md")) if not path.parent.name.startswith(".")),
]
PARTS = ("How we know", "How to fix", "How to silence")
CODE_LIKE = re.compile(r"`\"?([a-z_]+\.[a-z0-9_]+)\"?(?: = |`)")
PREFIXES = {code.partition(".")[0] for code in catalogue.CODES}
FILE_NAMES = re.compile(r"\.(json|jsonl|toml|md|py|html)$")


def _generator():
    path = ROOT / "docs" / "reference" / "generate.py"
    spec = importlib.util.spec_from_file_location("reference_tables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = _generator()


def named_codes(text: str) -> set[str]:
    """Return what looks like a finding's code: `` `x.y` `` or `"x.y" = ` with a prefix that findings have."""
    found = {name for name in CODE_LIKE.findall(text) if name.partition(".")[0] in PREFIXES}
    return {name for name in found if not FILE_NAMES.search(name)}


def test_every_finding_has_a_page_and_every_page_a_finding():
    assert set(generate.explain_sections()) == set(catalogue.CODES)


@pytest.mark.parametrize("code", sorted(catalogue.CODES))
def test_a_page_says_what_how_we_know_and_what_to_do(code):
    text = generate.explain_sections()[code]
    assert re.match(r"[A-Z`].*\.$", text.split("\n\n")[0], re.DOTALL), "begins with a sentence"
    places = [re.search(rf"^[*#_ ]*{part}\b", text, re.MULTILINE) for part in PARTS]
    assert all(places), f"a page has {PARTS}"
    starts = [place.start() for place in places]
    assert starts == sorted(starts)
    silence = text[starts[-1] :]
    assert f'"{code}" = "' in silence or "cannot be silenced" in silence


@pytest.mark.parametrize("code", sorted(c.name for c in catalogue.CODES.values() if c.level == "static"))
def test_a_page_says_whether_the_finding_can_be_silenced_or_forced(code):
    from safelaunch import static

    silence = generate.explain_sections()[code].partition("How to silence")[2]
    assert ("cannot be silenced" in silence) == (code in static.UNSILENCED)
    assert ("`--force` does not pass it" in silence) == (code in static.UNFORCED)


@pytest.mark.parametrize("code", sorted(catalogue.CODES))
def test_the_command_prints_the_same_page(code):
    from safelaunch import explain

    page = explain.page(code)
    assert page is not None
    assert generate.explain_sections()[code].split("\n")[0] in page


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_pages_name_no_finding_that_does_not_exist(path):
    assert named_codes(path.read_text(encoding="utf-8")) <= set(catalogue.CODES)


def test_explain_pages_name_no_finding_that_does_not_exist():
    for code, text in generate.explain_sections().items():
        assert named_codes(text) <= set(catalogue.CODES), code


@pytest.mark.parametrize("name", sorted(generate.tables()))
def test_generated_tables_are_up_to_date(name):
    text = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    for marker, table in generate.tables()[name].items():
        assert generate.place(text, marker, table) == text, "run: python docs/reference/generate.py"


def _links(text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)\s]+)\)", prose)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    for link in _links(path.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, link


def test_every_page_can_be_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        for link in _links(page.read_text(encoding="utf-8")):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.is_file():
                waiting.append(target)
    assert set(DOCS) - reached == set()


def _commands() -> list[tuple[str, str]]:
    found = []
    for path in DOCS:
        for block in re.findall(r"^```console\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE):
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                command = re.search(r"(?:^\$ |\bhead )((?:SAFELAUNCH_\w+=\S+ )?safelaunch .*)$", line)
                if command:
                    found.append((path.relative_to(ROOT).as_posix(), command[1]))
    return found


@pytest.mark.parametrize(("page", "command"), _commands(), ids=lambda value: value[:60])
def test_shown_commands_are_ones_that_safelaunch_accepts(page, command):
    from safelaunch import arguments

    plain = re.sub(r"<\([^)]*\)", "hosts", command)
    words = shlex.split(plain, comments=True)
    while "=" in words[0]:
        words.pop(0)
    ends = [i for i, word in enumerate(words) if word in ("&&", "||", "|", ";", ">", "2>", "&")]
    argv = words[1 : ends[0] if ends else None]
    invocation = arguments.parse(argv, installed="0.19.8")
    assert catalogue.exit_status(invocation.findings) == 0, invocation.findings


def test_every_deepspeed_option_is_explained_to_those_who_come_from_it():
    from safelaunch import deepspeed_cli

    text = (ROOT / "docs/how-to/coming-from-deepspeed.md").read_text(encoding="utf-8")
    missing = [flag for option in deepspeed_cli.OPTIONS for flag in option.flags if f"`{flag}`" not in text]
    assert not missing


def test_our_options_and_keys_are_all_in_the_reference():
    text = (ROOT / "docs/reference/command-line.md").read_text(encoding="utf-8")
    for option in options.OWN:
        assert option.flags[-1] in text
    settings = (ROOT / "docs/reference/settings.md").read_text(encoding="utf-8")
    for key in options.SETTINGS:
        assert f"`{key}`" in settings


def test_exit_statuses_are_those_of_the_code():
    from safelaunch import diagnose

    text = (ROOT / "docs/reference/exit-status.md").read_text(encoding="utf-8")
    statuses = {int(n) for row in re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE) for n in row.split(",")}
    ours = {catalogue.USAGE, catalogue.CONFIGURATION, catalogue.PREFLIGHT, diagnose.LOST, diagnose.INTERNAL}
    ours |= {diagnose.HANG, diagnose.DESYNC}
    assert statuses == {0, 129, 130, 143} | ours


@pytest.mark.parametrize("name", ["plan", "outcome", "preflight"])
def test_documents_are_described_key_by_key(name):
    schema = json.loads((ROOT / "safelaunch" / "schemas" / f"{name}.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs/reference/run-directory.md").read_text(encoding="utf-8")
    section = text.partition(f"## {name}.json")[2].partition("\n## ")[0]
    described = set(re.findall(r"`(\w+)`", section))
    assert set(schema["properties"]) <= described
    rows = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)[2:]
    keys = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    assert keys <= set(schema["properties"])
