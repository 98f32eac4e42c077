"""What is to be run, and the DeepSpeed configs that its arguments name: judged by look, not executed."""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING

from safelaunch import ds_config
from safelaunch.ds_rules.arguments import options
from safelaunch.findings import Finding, Severity, Where
from safelaunch.hostnames import show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safelaunch.here import Here
    from safelaunch.plan import Program

_EXPLICIT = ("deepspeed_config", "deepscale_config")
"""Arguments that deepspeed.add_config_arguments gives to scripts; their value can only be a config."""
_TRAINER = "deepspeed"
"""The Hugging Face Trainer's: a config, or with other scripts a switch."""
_CONFIG_NAME = re.compile(r".*\.h?json", re.IGNORECASE | re.DOTALL)
_SHELL_NAMES = (".sh", ".bash", ".zsh", ".ksh", ".csh", ".fish")


def findings(program: Program, here: Here, *, other_python: bool) -> list[Finding]:
    """Judge what each rank is to run.

    `other_python` says that another interpreter or environment than ours will run it, whose modules and PATH
    we don't see.
    """
    if program.kind == "module":
        return _module(program.script, here, other_python=other_python)
    if program.kind == "program" and os.sep not in program.script:
        return _on_path(program.script, here, other_python=other_python)
    if not here.is_file(program.script) and not _runnable_folder(program, here):
        return [_missing(program, here)]
    if program.kind == "program":
        return [] if here.may_run(program.script) else [_not_executable(program.script)]
    return _python(program.script, here)


def config_findings(
    args: Sequence[str], here: Here, *, deepspeed_version: str | None, world_size: int | None
) -> tuple[list[Finding], tuple[str, ...]]:
    """Judge the DeepSpeed configs that a script's arguments name.

    Returns the paths of those that are files too, as the ranks will read them.
    """
    found: list[Finding] = []
    paths: list[str] = []
    for name, only_config in _named_configs(args):
        text, label = _config_text(name, here, only_config=only_config)
        if here.is_file(name) and text is not None:
            paths.append(name)
        if text is not None:
            found += ds_config.check(
                text, label, deepspeed_version=deepspeed_version, world_size=world_size, script_args=args
            )
        elif only_config or (_CONFIG_NAME.fullmatch(name) and here.stat(name) is None):
            found.append(
                _no_config(name, here) if here.stat(name) is None else _unreadable_config(name, here)
            )
    return found, tuple(paths)


def _named_configs(args: Sequence[str]) -> list[tuple[str, bool]]:
    """Return what may name a config, with whether it can be nothing else.

    `--deepspeed` is a switch for most scripts, and what follows it then is something else.
    """
    given = options(args)
    found = [path for name in _EXPLICIT if (path := given.get(name)) is not None]
    if found:
        return [(path, True) for path in dict.fromkeys(found)]
    path = given.get(_TRAINER)
    return [(path, False)] if path is not None else []


def _config_text(name: str, here: Here, *, only_config: bool) -> tuple[bytes | None, str]:
    """Return a config and the name to show for it; None where there is none that can be read here."""
    if not only_config and name.lstrip().startswith("{"):
        return name.encode(errors="surrogateescape"), f"--{_TRAINER}"
    if here.stat(name) is None:
        return ds_config.decode_argument(name), "the base64 text of the DeepSpeed config"
    try:
        # What is no regular file could be read once only, and the ranks need it.
        text = here.read(name) if here.is_file(name) else None
    except OSError:
        return None, name
    if text is not None and not only_config and not text.lstrip().startswith((b"{", b"//", b"#", b"/*")):
        return None, name
    return text, name


def _python(script: str, here: Here) -> list[Finding]:
    if here.is_folder(script):
        return []
    try:
        start = here.read_start(script)
    except OSError as error:
        why = f"python can't open it: {error.strerror}"
        return [
            _finding("script.missing", f"{show(script)} can't be read", why, f"ls -l {shlex.quote(script)}")
        ]
    what = ""
    interpreter = _interpreter(start)
    if start.startswith(b"\x7fELF"):
        what = "a compiled program"
    elif interpreter and "py" not in interpreter:
        what = f"a script for {show(interpreter)}"
    elif script.endswith(_SHELL_NAMES):
        what = "a shell script by its name"
    elif b"\0" in start and not start.startswith(b"PK"):
        what = "no text"
    if not what:
        return []
    observed = (
        f"{show(script)} is {what}, and the ranks would run it as python -u {show(shlex.quote(script))}"
    )
    run = script if os.sep in script else f".{os.sep}{script}"
    return [
        _finding(
            "script.not_python",
            observed,
            "every rank would end with a SyntaxError",
            f"--no_python {shlex.quote(run)}",
        )
    ]


def _interpreter(start: bytes) -> str:
    """Return the program that a `#!` line names, the one behind `env` too; nothing where there is none."""
    if not start.startswith(b"#!"):
        return ""
    words = start[2:].split(b"\n", 1)[0].decode(errors="replace").split()
    names = [os.path.basename(word) for word in words if not word.startswith("-") and "=" not in word]
    return next((name for name in names if name != "env"), "")


def _runnable_folder(program: Program, here: Here) -> bool:
    main = os.path.join(program.script, "__main__.py")
    return program.kind == "python" and here.is_folder(program.script) and here.is_file(main)


def _missing(program: Program, here: Here) -> Finding:
    script = program.script
    near = here.near(script)
    if here.stat(script) is not None:
        what = "is a directory without a __main__.py" if here.is_folder(script) else "is no regular file"
        code = "script.not_python" if program.kind == "python" else "script.missing"
        return _finding(
            code, f"{show(here.path(script))} {what}", "there is nothing to run", "give a script in it"
        )
    observed = f"there is no {show(here.path(script))}"
    observed += f"; near it: {', '.join(map(show, near))}" if near else ""
    why = "it is looked up from the current directory, as deepspeed does on every node"
    fix = shlex.quote(near[0]) if near else "correct the path of the script"
    if not script.endswith(".py") and "." in script and here.module(script):
        fix = f"--module {script}"
    elif program.kind == "python" and os.sep not in script and here.program(script):
        fix = f"--no_python {script}, which runs {here.program(script)}"
    return _finding("script.missing", observed, why, fix)


def _not_executable(script: str) -> Finding:
    return _finding(
        "script.missing",
        f"{show(script)} is not executable",
        "--no_python runs the file itself, so every rank would end with a PermissionError",
        f"chmod +x {shlex.quote(script)}, or leave --no_python out if it is a Python script",
    )


def _on_path(script: str, here: Here, *, other_python: bool) -> list[Finding]:
    if here.program(script) is not None:
        return []
    why = "a name without a slash is looked up on PATH, not in the current directory"
    fix = (
        f"--no_python ./{shlex.quote(script)}" if here.is_file(script) else "give its path, such as ./run.sh"
    )
    observed = f"no program {show(script)} is on PATH"
    if other_python:
        return [_finding("script.missing", observed + " here", why, fix, Severity.NOT_CHECKED)]
    return [_finding("script.missing", observed, why, fix)]


def _module(name: str, here: Here, *, other_python: bool) -> list[Finding]:
    if here.module(name):
        return []
    observed = f"no module {show(name)} that `python -m` could run was found"
    why = "it is looked up in the current directory, on PYTHONPATH and among the installed packages"
    path = name.replace(".", "/")
    fix = "correct the name, or start from the directory that holds the package"
    dotted = re.sub(r"(?:\A\./)|(?:\.py\Z)", "", name).strip("/").replace("/", ".")
    if dotted != name and here.module(dotted):
        fix = f"--module {dotted}"
    elif here.is_folder(path):
        observed += f"; {show(path)} has no __main__.py"
    severity = Severity.NOT_CHECKED if other_python else Severity.ERROR
    return [_finding("script.module_missing", observed, why, fix, severity)]


def _no_config(name: str, here: Here) -> Finding:
    near = here.near(name) if name else []
    observed = f"there is no {show(here.path(name))}" if name else "the DeepSpeed config has an empty name"
    observed += f"; near it: {', '.join(map(show, near))}" if near else ""
    if name.startswith("~"):
        near = [os.path.join(here.home, name[2:])]
    return Finding(
        code="config.missing",
        severity=Severity.ERROR,
        observed=observed,
        why="DeepSpeed would take the name for a config in base64, and every rank ends with an obscure error",
        fix=shlex.quote(near[0]) if near else "correct the path of the DeepSpeed config",
        where=Where(name) if name else None,
    )


def _unreadable_config(name: str, here: Here) -> Finding:
    severity, reason = Severity.ERROR, "it can't be read"
    if here.is_folder(name):
        reason = "it is a directory"
    elif not here.is_file(name):
        severity, reason = Severity.NOT_CHECKED, "it is no regular file, and the ranks can read it only once"
    return Finding(
        code="config.unreadable",
        severity=severity,
        observed=f"{show(name)}: {reason}",
        why="every rank reads the DeepSpeed config",
        fix=f"ls -l {shlex.quote(name)}",
        where=Where(name),
    )


def _finding(code: str, observed: str, why: str, fix: str, severity: Severity = Severity.ERROR) -> Finding:
    return Finding(code=code, severity=severity, observed=observed, why=why, fix=fix)
