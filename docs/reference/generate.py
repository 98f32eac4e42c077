"""Writes the tables of the documentation that repeat the code; tests/test_docs.py compares them.

Run it from the source's root: python docs/reference/generate.py
"""

from __future__ import annotations

import re
from pathlib import Path

from safelaunch import catalogue, deepspeed_cli, environment, options

HERE = Path(__file__).resolve().parent
EXPLAIN = HERE.parent.parent / "safelaunch" / "explain"
LEVELS = {
    "static": "Before any node is contacted",
    "quick": "On the nodes",
}


def explain_sections() -> dict[str, str]:
    """Read every page of `safelaunch explain`: code to text."""
    found: dict[str, str] = {}
    for file in sorted(EXPLAIN.glob("*.md")):
        for section in re.split(r"^## ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            code, _, text = section.partition("\n")
            if code in found:
                raise ValueError(f"{code} has two pages")
            found[code] = text.strip()
    return found


def tables() -> dict[str, dict[str, str]]:
    """Return the generated parts: file name to marker to Markdown."""
    return {
        "checks.md": {level: _codes(level) for level in LEVELS},
        "command-line.md": {"own": _own(), "deepspeed": _deepspeed()},
        "settings.md": {"keys": _settings()},
        "../how-to/environment-and-secrets.md": {"exported": _exported()},
    }


def place(text: str, marker: str, table: str) -> str:
    """Put a table between the comments `begin MARKER` and `end MARKER`; ValueError if they are missing."""
    begin, end = f"<!-- begin {marker} -->", f"<!-- end {marker} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"no place for {marker!r}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines)


def _codes(level: str) -> str:
    pages = explain_sections()
    rows = [
        (f"`{code.name}`", str(code.status), " ".join(pages.get(code.name, "").split("\n\n")[0].split()))
        for code in catalogue.CODES.values()
        if code.level == level
    ]
    return _table(("code", "status", "meaning"), rows)


def _default(option: options.Option) -> str:
    if option.kind == "flag":
        return "true" if option.default else "false"
    if option.default in (None, ()):
        return ""
    return f"`{str(option.default).removesuffix('.0')}`"


def _flags(option: options.Option) -> str:
    value = ""
    if option.takes_value:
        value = " " + (option.metavar or "{" + ",".join(option.choices) + "}")
    return ", ".join(f"`{flag}{value}`" for flag in option.flags)


def _meaning(option: options.OwnOption) -> str:
    return f"{option.help} ({option.lack})" if option.lack else option.help


def _own() -> str:
    rows = [
        (_flags(option), _meaning(option), "" if option.kind == "flag" else _default(option), option.commands)
        for option in options.OWN
    ]
    return _table(("option", "meaning", "default", "commands"), rows)


def _deepspeed() -> str:
    rows = []
    for option in deepspeed_cli.OPTIONS:
        limits = [f"from {option.since}"] if option.since else []
        limits += [f"up to {option.until}"] if option.until else []
        rows.append((_flags(option), option.help, " ".join(limits) or "all"))
    return _table(("option", "meaning", "DeepSpeed"), rows)


def _settings() -> str:
    rows = [
        (f"`{key}`", option.wanted, _default(option), _meaning(option))
        for key, option in options.SETTINGS.items()
    ]
    return _table(("key", "value", "default", "meaning"), rows)


def _exported() -> str:
    rows = [(" ".join(f"`{name}`" for name in names.split()), what) for names, what in environment.EXPORTED]
    return _table(("names", "what for"), rows)


def main() -> None:
    """Rewrite the files."""
    for name, parts in tables().items():
        path = HERE / name
        text = path.read_text(encoding="utf-8")
        for marker, table in parts.items():
            text = place(text, marker, table)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
