"""What the user reads is true: pages of findings, and the documentation against the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from safelaunch import catalogue

ROOT = Path(__file__).resolve().parent.parent
EXPLAIN = ROOT / "safelaunch" / "explain"
PARTS = ("How we know", "How to fix", "How to silence")
CODE_LIKE = re.compile(r"`\"?([a-z_]+\.[a-z0-9_]+)\"?(?: = |`)")
PREFIXES = {code.partition(".")[0] for code in catalogue.CODES}


def sections() -> dict[str, str]:
    """Read every page of the explain folder: code to text."""
    found: dict[str, str] = {}
    for file in sorted(EXPLAIN.glob("*.md")):
        for section in re.split(r"^## ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            code, _, text = section.partition("\n")
            assert code not in found, f"{code} has two pages"
            found[code] = text.strip()
    return found


def named_codes(text: str) -> set[str]:
    """Return what looks like a finding's code in a text: `` `x.y` `` or `"x.y" = ` with a known prefix."""
    return {name for name in CODE_LIKE.findall(text) if name.partition(".")[0] in PREFIXES}


def test_every_finding_has_a_page_and_every_page_a_finding():
    assert set(sections()) == set(catalogue.CODES)


@pytest.mark.parametrize("code", sorted(catalogue.CODES))
def test_a_page_says_what_how_we_know_and_what_to_do(code):
    text = sections()[code]
    assert re.match(r"[A-Z`].*\.$", text.split("\n\n")[0], re.DOTALL), "begins with a sentence"
    places = [re.search(rf"^[*#_ ]*{part}\b", text, re.MULTILINE) for part in PARTS]
    assert all(places), f"a page has {PARTS}"
    starts = [place.start() for place in places]
    assert starts == sorted(starts)
    silence = text[starts[-1] :]
    assert f'"{code}" = "' in silence or "cannot be silenced" in silence


def test_pages_name_no_finding_that_does_not_exist():
    for code, text in sections().items():
        assert named_codes(text) <= set(catalogue.CODES), code
