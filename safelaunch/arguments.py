"""argv to Invocation: pure. Words before the script are read as argparse reads them for `deepspeed`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from safelaunch import deepspeed_cli
from safelaunch.findings import Finding, Severity
from safelaunch.options import OWN, Option, OwnOption, lacking

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from safelaunch.options import Value

Command = Literal["run", "check", "ps", "stop", "clean", "explain", "help", "version"]

COMMANDS: tuple[Command, ...] = ("check", "ps", "stop", "clean", "explain")
"""Reserved words in the first place."""
LATER = ("stacks", "report", "bundle", "diff")
"""Reserved for later versions, so that a script of that name does not change its meaning one day."""
OPERANDS: dict[str, tuple[str, int]] = {
    "ps": ("run", 0),
    "stop": ("run", 1),
    "clean": ("", 0),
    "explain": ("code", 1),
}
"""What a command takes beside options: the field of Invocation, and how many it needs."""
_DEEPSPEED_OF = {"clean": {"hostfile", "ssh_port"}, "stop": {"ssh_port"}}
"""DeepSpeed's options that other commands than `run` and `check` take."""
_OF_OTHERS = {
    "--nproc_per_node": "--num_gpus",
    "--nproc-per-node": "--num_gpus",
    "--num_processes": "--num_gpus",
    "--nnodes": "--num_nodes",
    "--num_machines": "--num_nodes",
    "--machine_rank": "--node_rank",
    "--main_process_ip": "--master_addr",
    "--main_process_port": "--master_port",
    "--rdzv_endpoint": "--master_addr",
    "--rdzv-endpoint": "--master_addr",
}
"""Options of torchrun and accelerate, and what does the same here."""
_NEGATIVE_NUMBER = re.compile(r"-\d+\Z|-\d*\.\d+\Z")
_HELP = Option(dest="help", flags=("-h", "--help"), kind="flag", help="show this text")
_VERSION = Option(dest="version", flags=("--version",), kind="flag", help="show the version")
_EVERY: dict[str, Option] = {
    flag: o for o in (*deepspeed_cli.OPTIONS, *OWN, _HELP, _VERSION) for flag in o.flags
}
"""Options by flag, of whatever command."""
_NO_VALUE = "it takes no value"
_SHOWN = 6
"""Candidates of an ambiguous abbreviation that are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A command line as understood.

    `deepspeed` holds DeepSpeed's options by dest, `flags` ours, only those that were given. `script` is None
    where none was given; undecodable bytes of `script_args` are surrogate escapes. `run` is the operand of
    ps and stop, `code` that of explain, `topic` the command that --help was asked of.
    """

    command: Command
    argv: tuple[str, ...]
    deepspeed: Mapping[str, Value] = field(default_factory=dict)
    flags: Mapping[str, Value] = field(default_factory=dict)
    script: str | None = None
    script_args: tuple[str, ...] = ()
    run: str | None = None
    code: str | None = None
    topic: str = "run"
    findings: tuple[Finding, ...] = ()

    def get(self, dest: str) -> Value:
        """Return a DeepSpeed option, or its default where it was not given; KeyError if there is none."""
        return self.deepspeed.get(dest, deepspeed_cli.BY_DEST[dest].default)

    @property
    def verbosity(self) -> int:
        """How often --verbose was given."""
        count = self.flags.get("verbose", 0)
        return count if isinstance(count, int) else 0

    @property
    def checking(self) -> bool:
        """Whether nothing is to be started."""
        return self.command == "check" or bool(self.flags.get("check_only"))


def parse(argv: Sequence[str], *, installed: str | None) -> Invocation:
    """Read the words behind `safelaunch`; everything wrong with them is in `findings`.

    `installed` is the version of DeepSpeed, None where it is not known or not installed.
    """
    words = list(argv)
    if words and words[0] in LATER:
        return Invocation(command="run", argv=tuple(argv), findings=(_later(words[0]),))
    command: Command = "run"
    for name in COMMANDS:
        if words[:1] == [name]:
            command = name
            del words[0]
    reader = _Reader(words, command, installed)
    reader.read()
    if reader.shortcut:
        return Invocation(command=reader.shortcut, argv=tuple(argv), topic=command)
    operand, _ = OPERANDS.get(command, ("", 0))
    value = reader.operands[0] if reader.operands else None
    return Invocation(
        command=command,
        argv=tuple(argv),
        deepspeed=MappingProxyType(reader.deepspeed),
        flags=MappingProxyType(reader.flags),
        script=reader.script,
        script_args=tuple(reader.script_args),
        run=value if operand == "run" else None,
        code=value if operand == "code" else None,
        findings=tuple(reader.judged()),
    )


@dataclass(frozen=True, slots=True)
class _Word:
    """An option-like word: the option (None: unknown), its flag as meant, and the value glued to it.

    `candidates` are the flags that an ambiguous or unknown word may have been meant for.
    """

    option: Option | None
    flag: str
    value: str | None = None
    candidates: tuple[str, ...] = ()


class _Reader:
    """Reads the words of one command line from left to right."""

    def __init__(self, words: Sequence[str], command: Command, installed: str | None) -> None:
        self.words = words
        self.command: Command = command
        self.installed = installed
        self.deepspeed: dict[str, Value] = {}
        self.flags: dict[str, Value] = {}
        self.script: str | None = None
        self.script_args: list[str] = []
        self.operands: list[str] = []
        self.findings: list[Finding] = []
        self.shortcut: Literal["help", "version"] | None = None
        self._eaten: tuple[str, str] | None = None
        own = [option for option in OWN if command in option.commands.split()]
        theirs = [o for o in deepspeed_cli.OPTIONS if _takes(command, o.dest)]
        self._own: dict[str, Option] = {flag: o for o in (*own, _VERSION) for flag in o.flags}
        self._theirs: dict[str, Option] = {flag: o for o in (_HELP, *theirs) for flag in o.flags}

    def read(self) -> None:
        """Read up to the script, then what of the rest is ours."""
        i, only_operands = 0, False
        while i < len(self.words) and not self.shortcut:
            text = self.words[i]
            word = None if only_operands else self._option(text)
            if text == "--" and not only_operands:
                only_operands = True
                i += 1
            elif word is not None:
                i = self._take(word, i + 1)
            elif self.command in ("run", "check"):
                self.script = text
                self._behind_script(list(self.words[i + 1 :]), ours=not only_operands)
                return
            else:
                self.operands.append(text)
                i += 1

    def judged(self) -> list[Finding]:
        """Return the findings on single words, and then those on all of them together."""
        found = list(self.findings)
        checking = self.command == "check" or bool(self.flags.get("check_only"))
        if self.command in ("run", "check"):
            found += deepspeed_cli.findings(self.deepspeed, self.installed, checking=checking)
        for option in self._own.values():
            if isinstance(option, OwnOption) and option.dest in self.flags:
                lack = lacking(option, self.flags[option.dest], option.spelled)
                found += [lack] if lack else []
        if self.command == "run" and self.script is None:
            found.append(_no_script(self._eaten, empty=not self.words))
        if self.command in OPERANDS:
            found += _operand_findings(self.command, self.operands)
        return found

    def _option(self, text: str) -> _Word | None:
        """Return what an option-like word means, or None for a plain one, by the rules of argparse."""
        if len(text) < 2 or text[0] != "-" or text == "--":
            return None
        name, equals, value = text.partition("=")
        glued = value if equals else None
        exact = self._own.get(name) or self._theirs.get(name)
        if exact is not None:
            return _Word(exact, name, glued)
        matches = self._abbreviated(text)
        if len(matches) == 1:
            return matches[0]
        if matches:
            return _Word(None, name, glued, tuple(match.flag for match in matches))
        if _NEGATIVE_NUMBER.match(text) or " " in text:
            return None
        return _Word(None, name, glued, tuple(self._nearest(name)))

    def _abbreviated(self, text: str) -> list[_Word]:
        """Return DeepSpeed's options that a word can be short for; those that are installed go first."""
        name, equals, value = text.partition("=")
        if text.startswith("--"):
            found = [
                _Word(o, flag, value if equals else None)
                for flag, o in self._theirs.items()
                if flag.startswith(name)
            ]
        else:
            found = [_Word(o, flag, text[2:]) for flag, o in self._theirs.items() if flag == text[:2]]
        present = [word for word in found if _present(word.option, self.installed)]
        return present or found

    def _nearest(self, name: str) -> list[str]:
        if name in _OF_OTHERS:
            return [_OF_OTHERS[name]]
        flags = [flag for flag in (*self._own, *self._theirs) if flag.startswith("--")]
        return difflib.get_close_matches(name, flags, n=1, cutoff=0.7)

    def _take(self, word: _Word, after: int) -> int:
        """Take an option whose value, if any, begins at index `after`; return the index behind it."""
        option = word.option
        if option is None:
            self.findings.append(self._unknown(word))
            # A value that goes with the word must not be taken for the script.
            meant = [_EVERY[flag] for flag in ((word.flag,) if word.flag in _EVERY else word.candidates)]
            takes = bool(meant) and all(o.takes_value for o in meant)
            return after + (takes and word.value is None and self._value_at(after))
        if not option.takes_value:
            return self._take_flag(option, word, after)
        value = word.value
        if value is None and self._value_at(after):
            value = self.words[after]
            self._eaten = (word.flag, value)
            after += 1
        if value is None:
            self.findings.append(_no_value(word.flag, self.words[after : after + 1]))
        else:
            self._set(option, word.flag, value)
        return after

    def _take_flag(self, option: Option, word: _Word, after: int) -> int:
        """Take an option without a value; behind a single dash, more of them may be glued to it."""
        if word.value is not None and (word.flag.startswith("--") or not word.value):
            self.findings.append(_value(word.flag, word.value, _NO_VALUE))
        elif option in (_HELP, _VERSION):
            self.shortcut = "help" if option is _HELP else "version"
        elif option.kind == "count":
            self.flags[option.dest] = int(str(self.flags.get(option.dest, 0))) + 1
        else:
            self._store(option, True)
        if not word.value or word.flag.startswith("--"):
            return after
        flag = "-" + word.value[0]
        next_option = self._theirs.get(flag)
        if next_option is None:
            self.findings.append(_value(word.flag, word.value, _NO_VALUE))
            return after
        return self._take(_Word(next_option, flag, word.value[1:].removeprefix("=") or None), after)

    def _value_at(self, index: int) -> bool:
        """Whether a word stands there that can be a value."""
        words = self.words[index : index + 1]
        return bool(words) and words[0] != "--" and self._option(words[0]) is None

    def _set(self, option: Option, flag: str, text: str) -> None:
        try:
            value = (text,) if option.kind == "list" else option.read(text)
        except ValueError as error:
            self.findings.append(_value(flag, text, str(error)))
            return
        before = self.flags.get(option.dest)
        if isinstance(before, tuple) and isinstance(value, tuple):
            value = before + value
        self._store(option, value)

    def _store(self, option: Option, value: Value) -> None:
        """Keep a value; one given again replaces the first, as in `deepspeed`."""
        where = self.flags if isinstance(option, OwnOption) else self.deepspeed
        where[option.dest] = value

    def _unknown(self, word: _Word) -> Finding:
        ambiguous = len(word.candidates) > 1
        where = [option.commands for option in OWN if word.flag in option.flags]
        fix = f"safelaunch {'' if self.command == 'run' else self.command + ' '}--help lists what there is"
        if ambiguous:
            more = ", ..." if len(word.candidates) > _SHOWN else ""
            observed = f"{word.flag} is ambiguous: {', '.join(word.candidates[:_SHOWN])}{more}"
            fix = f"write the option out, such as {word.candidates[0]}"
        else:
            observed = f"{word.flag} is an option of neither safelaunch nor DeepSpeed"
            fix = f"{word.candidates[0]}, if that was meant" if word.candidates else fix
        if where and where[0] == "check":
            observed, fix = (
                f"{word.flag} is an option of `safelaunch check`",
                f"safelaunch check {word.flag} ...",
            )
        elif where:
            observed = f"{word.flag} is no option of `safelaunch {self.command}`"
        return Finding(
            code="cli.unknown_option",
            severity=Severity.ERROR,
            observed=observed,
            why="an option of the script stands behind the script",
            fix=fix,
        )

    def _behind_script(self, words: list[str], *, ours: bool) -> None:
        """Take --hostfile from the words behind the script, up to a `--`; the rest is the script's.

        A `--` right behind the script is dropped, as argparse does it for deepspeed; a later one stays.
        """
        if ours and words[:1] == ["--"]:
            ours = False
            del words[0]
        hostfiles = []
        launcher: list[Option] = [*deepspeed_cli.OPTIONS, *OWN]
        unmistakable = {flag for o in launcher if o.unmistakable for flag in o.flags if flag.startswith("--")}
        i = 0
        while i < len(words):
            name, equals, value = words[i].partition("=")
            ours = ours and words[i] != "--"
            if ours and name == "--hostfile":
                following = [value] if equals else words[i + 1 : i + 2]
                if following and (equals or not following[0].startswith("-") or following[0] == "-"):
                    hostfiles.append(following[0])
                else:
                    self.findings.append(_no_value("--hostfile", following, behind=True))
                    following = []
                i += 1 + (not equals and len(following))
                continue
            if ours and name in unmistakable:
                self.findings.append(_after_script(name))
            self.script_args.append(words[i])
            i += 1
        if hostfiles:
            before = self.deepspeed.get("hostfile", hostfiles[0])
            if len({before, *hostfiles}) > 1:
                self.findings.append(_two_hostfiles([str(before), *hostfiles]))
            self.deepspeed["hostfile"] = hostfiles[0]


def _takes(command: Command, dest: str) -> bool:
    return command in ("run", "check") or dest in _DEEPSPEED_OF.get(command, ())


def _present(option: Option | None, installed: str | None) -> bool:
    return not isinstance(option, deepspeed_cli.DeepSpeedOption) or option.in_version(installed)


def _later(name: str) -> Finding:
    return Finding(
        code="cli.not_yet",
        severity=Severity.ERROR,
        observed=f"this version of safelaunch has no command {name!r}; the word is reserved for one",
        why="a script of that name would change its meaning with a later version",
        fix=f"./{name} if it is a script",
    )


def _value(flag: str, text: str, wanted: str) -> Finding:
    return Finding(
        code="cli.value",
        severity=Severity.ERROR,
        observed=f"{flag} {text!r}: {wanted}",
        why="a value that is not understood is never guessed at",
        fix=f"correct the value of {flag}" if wanted != _NO_VALUE else flag,
    )


def _no_value(flag: str, following: Iterable[str], *, behind: bool = False) -> Finding:
    text = next(iter(following), "")
    fix = f"{flag}={text} if {text} is the value" if text else f"{flag} VALUE"
    if behind:
        fix += f"; if {flag} is the script's own: safelaunch SCRIPT -- ... {flag}"
    return Finding(
        code="cli.value",
        severity=Severity.ERROR,
        observed=f"{flag} has no value" + (f": {text!r} reads as an option" if text else ""),
        why="behind an option a word that begins with `-` is the next option",
        fix=fix,
    )


def _after_script(flag: str) -> Finding:
    return Finding(
        code="cli.option_after_script",
        severity=Severity.WARNING,
        observed=f"{flag} stands behind the script, so the script gets it",
        why="behind the script only --hostfile is ours; the rest is the script's, as with deepspeed",
        fix=f"put {flag} in front of the script; if it is the script's own: safelaunch SCRIPT -- ... {flag}",
    )


def _two_hostfiles(names: Iterable[str]) -> Finding:
    listed = " and ".join(repr(name) for name in dict.fromkeys(names))
    return Finding(
        code="cli.conflict",
        severity=Severity.ERROR,
        observed=f"--hostfile is given with different values: {listed}",
        why="only one of them can name the nodes",
        fix="leave out one of them; if the last is the script's own: safelaunch SCRIPT -- ... --hostfile F",
    )


def _no_script(eaten: tuple[str, str] | None, *, empty: bool) -> Finding:
    observed, fix = "no script is given", "safelaunch [options] SCRIPT [script args]; see safelaunch --help"
    if eaten is not None and not empty:
        flag, value = eaten
        observed += f"; {flag} took {value!r} as its value"
        fix = f"{flag} VALUE {value}" if value.endswith(".py") else fix
    return Finding(
        code="cli.value", severity=Severity.ERROR, observed=observed, why="there is nothing to run", fix=fix
    )


def _operand_findings(command: str, operands: Sequence[str]) -> list[Finding]:
    name, needed = OPERANDS[command]
    if len(operands) < needed:
        fix = (
            "safelaunch ps lists the runs; safelaunch stop latest"
            if name == "run"
            else "safelaunch explain hostfile.syntax"
        )
        return [_usage(f"`safelaunch {command}` needs a {name}", fix)]
    most = 1 if name else 0
    return [
        _usage(f"`safelaunch {command}` has no use for {word!r}", "leave it out") for word in operands[most:]
    ]


def _usage(observed: str, fix: str) -> Finding:
    return Finding(
        code="cli.value",
        severity=Severity.ERROR,
        observed=observed,
        why="the command line has no meaning like this",
        fix=fix,
    )
