"""Pages of `safelaunch explain`: one section of a Markdown file beside this for each finding code."""

from __future__ import annotations

import re
from importlib import resources


def page(code: str) -> str | None:
    """Return the page of a finding code as Markdown text, its code as the title; None for an unknown code."""
    for file in resources.files(__name__).iterdir():
        if file.name.endswith(".md"):
            text = file.read_text(encoding="utf-8")
            found = re.search(rf"^## {re.escape(code)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
            if found:
                return f"{code}\n\n{found.group(1).strip()}"
    return None
