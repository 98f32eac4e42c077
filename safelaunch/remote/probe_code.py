"""Part of the probe: facts about what the ranks will run."""

from __future__ import annotations

import os
import re
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from safelaunch.remote.probe import Node

CODE_FILES, CODE_BYTES = 1000, 16 << 20
"""Local modules are compared up to so many files and bytes."""
CONFIG_BYTES = 4 << 20
IMPORT = re.compile(rb"^[ \t]*import[ \t]+([^\n#;]+)", re.MULTILINE)
FROM_IMPORT = re.compile(rb"^[ \t]*from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#;]*)", re.MULTILINE)
DISTRIBUTION = re.compile(
    r"^(torch|deepspeed|nvidia_nccl_cu\d+)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info$", re.IGNORECASE
)
CUDA = re.compile(rb"""^cuda\b[^=\n]*=\s*['"]([\d.]+)""", re.MULTILINE)
LAYOUT = "import sys;print('layout %d.%d'%sys.version_info[:2]);print('\\n'.join(sys.path))"


def paths(node: Node) -> dict[str, Any]:
    """Return {role: {path, state, ...}} of interpreter, cwd, script and venv_script.

    `state` is ok, missing (`exists`: the part that is there), dangling (`target`), not_a_directory,
    not_executable, unreadable, or not_found for a module.
    """
    program, venv = node.config.get("program"), node.config.get("venv_script")
    found = {
        "interpreter": look(locate(node, node.config["interpreter"]), os.X_OK),
        "cwd": look(node.cwd, os.X_OK),
    }
    if os.path.exists(node.cwd) and not os.path.isdir(node.cwd):
        found["cwd"]["state"] = "not_a_directory"
    if venv:
        found["venv_script"] = look(node.path(venv), os.R_OK)
    if program and program["kind"] == "module":
        file = module_file(node, program["script"])
        found["script"] = look(file, os.R_OK) if file else {"path": program["script"], "state": "not_found"}
    elif program and program["kind"] == "program":
        found["script"] = look(locate(node, program["script"]), os.X_OK)
    elif program:
        found["script"] = look(os.path.join(node.cwd, program["script"]), os.R_OK)
    return found


def look(path: str, mode: int) -> dict[str, Any]:
    if os.path.exists(path):
        wrong = "not_executable" if mode == os.X_OK else "unreadable"
        return {"path": path, "state": "ok" if os.access(path, mode) else wrong}
    if os.path.islink(path):
        return {"path": path, "state": "dangling", "target": os.path.realpath(path)}
    part = path
    while not os.path.exists(part) and part != os.path.dirname(part):
        part = os.path.dirname(part)
    return {"path": path, "state": "missing", "exists": part}


def locate(node: Node, name: str) -> str:
    """Return the path of a program as the node launcher finds it: by PATH where it has no slash."""
    if "/" in name:
        return os.path.join(node.cwd, name)
    places = node.search_path()
    if node.config.get("venv_script"):
        places.insert(0, os.path.dirname(node.path(node.config["venv_script"])))
    return next((p for p in (os.path.join(place, name) for place in places) if os.access(p, os.X_OK)), name)


def module_file(node: Node, name: str) -> str | None:
    """Return the file that `python -m name` starts, as far as directories tell."""
    part = name.replace(".", "/")
    places = [node.cwd, *python_path(node), *site_directories(node)]
    files = (os.path.join(place, part + tail) for place in places for tail in ("/__main__.py", ".py"))
    return next(filter(os.path.isfile, files), None)


def python_path(node: Node) -> list[str]:
    return [os.path.join(node.cwd, part) for part in (node.setting("PYTHONPATH") or "").split(":") if part]


def digest(data: bytes) -> str:
    import hashlib  # noqa: PLC0415 - only where there is something to hash

    return hashlib.sha256(data).hexdigest()[:16]


def code(node: Node) -> dict[str, Any]:
    """Return {files: {path: hash}, complete, git} of the program and all local modules that it imports.

    Paths are relative to the directory that Python searches first; `git` is the commit checked out there.
    """
    program = node.config.get("program") or {"kind": "none", "script": ""}
    start: str | None = os.path.join(node.cwd, program["script"])
    root = os.path.dirname(start or "")
    if program["kind"] == "module":
        start, root = module_file(node, program["script"]), node.cwd
    elif program["kind"] == "program":
        start, root = locate(node, program["script"]), node.cwd
    elif start and os.path.isdir(start):
        start, root = os.path.join(start, "__main__.py"), start
    # What lies elsewhere, a shell or an installed module, is not the user's code.
    foreign = not start or os.path.relpath(start, root).startswith("..") or not os.path.isfile(start)
    if program["kind"] == "none" or not start or foreign:
        return {"files": {}, "complete": True, "git": None}
    hashes, complete = code_tree(node, start, root)
    return {"files": hashes, "complete": complete, "git": git_commit(node, root)}


def code_tree(node: Node, start: str, root: str) -> tuple[dict[str, str], bool]:
    end = time.monotonic() + 0.7 * node.deadline("code")
    waiting, seen, total = [start], {start}, 0
    hashes: dict[str, str] = {}
    while waiting:
        path = waiting.pop()
        data = node.read(path, CODE_BYTES)
        total += len(data)
        if total > CODE_BYTES or len(hashes) >= CODE_FILES or time.monotonic() > end:
            return hashes, False
        hashes[os.path.relpath(path, root)] = digest(data)
        if path.endswith(".py"):
            fresh = set(imported_files(data, path, root)) - seen
            seen |= fresh
            waiting.extend(sorted(fresh))
    return hashes, True


def imported_files(data: bytes, path: str, root: str) -> Iterator[str]:
    """Yield the files under `root` that a module's import statements name."""
    for match in IMPORT.finditer(data):
        for name in match.group(1).split(b","):
            yield from module_files(root, (name.split() or [b""])[0])
    for match in FROM_IMPORT.finditer(data):
        module, base = match.group(1).lstrip(b"."), root
        dots = len(match.group(1)) - len(module)
        if dots:
            base = os.path.normpath(os.path.join(os.path.dirname(path), *[".."] * (dots - 1)))
        listed = re.sub(rb"#[^\n]*", b"", match.group(2)).strip(b"()").split(b",")
        for name in [words[0] for words in map(bytes.split, listed) if words] or [b""]:
            yield from module_files(base, b".".join(part for part in (module, name) if part))


def module_files(base: str, dotted: bytes) -> Iterator[str]:
    """Yield the files that importing `dotted` runs, as far as they lie under `base`."""
    place = base
    for part in dotted.decode(errors="replace").split("."):
        place = os.path.join(place, part)
        if part and os.path.isfile(place + ".py"):
            yield place + ".py"
        if not part or not os.path.isdir(place):
            return
        if os.path.isfile(place + "/__init__.py"):
            yield place + "/__init__.py"


def git_commit(node: Node, path: str) -> str | None:
    """Return the checked-out commit of the work tree around a directory, read from git's own files."""
    while not os.path.exists(os.path.join(path, ".git")):
        if path == os.path.dirname(path):
            return None
        path = os.path.dirname(path)
    git = os.path.join(path, ".git")
    if os.path.isfile(git):  # a linked work tree, or a submodule
        git = os.path.join(path, (node.word(git) or "").replace("gitdir: ", "", 1))
    head = node.word(git + "/HEAD") or ""
    if not head.startswith("ref: "):
        return head or None
    common = os.path.join(git, node.word(git + "/commondir") or "")
    commit = node.word(os.path.join(common, head[5:]))
    packed = re.search(
        r"^(\w+) " + re.escape(head[5:]) + "$", node.word(common + "/packed-refs") or "", re.MULTILINE
    )
    return commit or (packed.group(1) if packed else None)


def configs(node: Node) -> dict[str, Any]:
    """Return {path: {hash}} or {path: {error}} of the DeepSpeed configs."""
    found: dict[str, Any] = {}
    for path in node.config.get("files", ()):
        try:
            found[path] = {"hash": digest(node.read(node.path(path), CONFIG_BYTES))}
        except OSError as error:
            found[path] = {"error": error.strerror}
    return found


def software(node: Node) -> dict[str, Any]:
    """Return versions {python, torch, deepspeed, nccl, cuda}, None for what is not installed.

    They are the names of metadata directories; the interpreter is started only where its place does not tell
    where it looks for packages, or where something is missing there.
    """
    places = site_directories(node)
    found = versions(node, [*python_path(node), *places])
    python = next(
        (m.group(1) for m in (re.search(r"/python(3\.\d+)/", place) for place in places) if m), None
    )
    if not (python and "torch" in found and "deepspeed" in found):
        environ = {name: node.setting(name) or "" for name in {*os.environ, *node.config["env"]}}
        argv = [locate(node, node.config["interpreter"]), "-c", LAYOUT]
        status, output = node.run(argv, 0.8 * node.deadline("software"), environ)
        if status != 0 or "layout " not in output:
            how = "did not answer" if status is None else "exited %d" % status
            raise RuntimeError("%s %s: %s" % (argv[0], how, output.strip()[-200:]))
        python, *places = output[output.index("layout ") + 7 :].splitlines()
        found = versions(node, filter(None, places))
    nccl = next((found[name] for name in sorted(found) if name.startswith("nvidia_nccl")), None)
    row = {name: found.get(name) for name in ("torch", "deepspeed", "cuda")}
    return {"python": python, **row, "nccl": nccl}


def site_directories(node: Node) -> list[str]:
    """Return where the training interpreter looks for packages, as far as its own place tells."""
    path = locate(node, node.config["interpreter"])
    prefix, wanted = os.path.dirname(os.path.dirname(path)), None
    venv = node.word(prefix + "/pyvenv.cfg")
    if venv is None:
        path = os.path.realpath(path)
        prefix = os.path.dirname(os.path.dirname(path))
        number = re.search(r"python(3\.\d+)", os.path.basename(path))
        wanted = "python" + number.group(1) if number else None
        prefixes = [os.path.expanduser("~/.local"), "/usr/local", prefix] if prefix == "/usr" else [prefix]
    else:
        base = re.search(r"^home\s*=\s*(.+)", venv, re.MULTILINE)
        shared = re.search(r"^include-system-site-packages\s*=\s*true", venv, re.MULTILINE | re.IGNORECASE)
        prefixes = [prefix] + ([os.path.dirname(base.group(1))] if base and shared else [])
    found = []
    for place in (one + "/lib" for one in prefixes):
        for name in sorted(os.listdir(place)) if os.path.isdir(place) else []:
            if re.match(r"python3\.\d+$", name) and wanted in (None, name):
                found += ["%s/%s/site-packages" % (place, name), "%s/%s/dist-packages" % (place, name)]
    if prefix == "/usr":  # Debian's packages serve all its Pythons
        found.append("/usr/lib/python3/dist-packages")
    return [place for place in found if os.path.isdir(place)]


def versions(node: Node, places: Iterable[str]) -> dict[str, str]:
    """Return {distribution: version}; the first place on the path wins."""
    found: dict[str, str] = {}
    for place in places:
        for match in map(DISTRIBUTION.match, os.listdir(place) if os.path.isdir(place) else []):
            if match:
                found.setdefault(match.group(1).lower(), match.group(2))
        source = node.word(place + "/torch/version.py")
        cuda = CUDA.search(source.encode()) if source else None
        if cuda:
            found.setdefault("cuda", cuda.group(1).decode())
    return found


COLLECTORS = (paths, code, configs, software)
