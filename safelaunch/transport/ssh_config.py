"""`~/.ssh/config` and `/etc/ssh/ssh_config`, read once for all hosts.

What we can honour ourselves becomes a `Target`. For the rest (`openssh_because`) the host goes by the `ssh`
program, which reads the same files: no option is honoured half. Rules after ssh_config(5) of OpenSSH 9.
"""

from __future__ import annotations

import getpass
import glob
import os
import pwd
import re
import socket
from dataclasses import dataclass, field
from fnmatch import translate
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SYSTEM_CONFIG = "/etc/ssh/ssh_config"
SYSTEM_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")

_MAX_INCLUDES = 16
"""How deep files may include each other (READCONF_MAX_DEPTH of OpenSSH)."""

_DEFAULT_KEYS = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk")
"""In the order in which OpenSSH offers them."""

_KNOWN_CRITERIA = frozenset({"all", "final", "canonical", "host", "originalhost", "user", "localuser"})

_REPEATABLE = frozenset({"identityfile", "certificatefile"})

# An option the `ssh` program must look after, unless its value is the one that means nothing is asked.
_OPENSSH_ONLY: Mapping[str, tuple[str, ...]] = {
    "proxyjump": ("none",),
    "proxycommand": ("none",),
    "certificatefile": ("none",),
    "pkcs11provider": ("none",),
    "knownhostscommand": ("none",),
    "revokedhostkeys": ("none",),
    "canonicalizehostname": ("no",),
    "bindaddress": (),
    "bindinterface": (),
    "tunnel": ("no",),
    "pubkeyauthentication": ("yes", "unbound", "host-bound"),
}

# In the user's own file these are a choice; in the system's they are a distribution's default for `ssh`.
_USER_POLICY = frozenset(
    {"ciphers", "macs", "kexalgorithms", "hostkeyalgorithms", "pubkeyacceptedalgorithms"}
    | {"pubkeyacceptedkeytypes", "hostbasedacceptedalgorithms", "casignaturealgorithms", "fingerprinthash"}
    | {"preferredauthentications", "requiredrsasize"}
)

_TOKEN = re.compile(r'"((?:[^"\\]|\\.)*)"|\'([^\']*)\'|([^\s"\'#][^\s"\']*)|(#.*)')
_DIRECTIVE = re.compile(r"([A-Za-z][A-Za-z0-9]*)(?:\s*=\s*|\s+)(.*)")
# After valid_hostname() and valid_ruser() of OpenSSH's ssh.c: nothing a shell or getopt could take for more.
_UNSAFE = re.compile(r"""^-|['`"$\\;&<>|(){}\s\x00-\x1f\x7f]""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What has to be dialled for a name of the hostfile, and how to log in there.

    `openssh_because` says why only the `ssh` program can do that, or is None. `identity_files` are in the
    order of preference; `explicit` says that the user named them. `host_key_names` are what known_hosts is
    searched for, the best first. `weak` names the place where the user turned verification down.
    """

    name: str
    hostname: str
    user: str
    port: int = 22
    family: int = socket.AF_UNSPEC
    identity_files: tuple[str, ...] = ()
    explicit: bool = False
    identities_only: bool = False
    agent: str | None = None
    known_hosts: tuple[str, ...] = ()
    host_key_alias: str | None = None
    weak: str | None = None
    connect_timeout: float | None = None
    other_login: bool = False
    proxy: str | None = None
    openssh_because: str | None = None

    @property
    def host_key_names(self) -> tuple[str, ...]:
        if self.host_key_alias:
            return (self.host_key_alias.lower(),)
        plain = self.hostname.lower()
        return (plain,) if self.port == 22 else (f"[{plain}]:{self.port}", plain)


@dataclass(frozen=True, slots=True)
class _Criterion:
    kind: str
    patterns: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class _Directive:
    key: str
    values: tuple[str, ...]
    place: str
    users: bool


@dataclass(frozen=True, slots=True)
class _Block:
    """Directives under the same Host and Match lines: those of an including file and the block's own."""

    when: tuple[tuple[_Criterion, ...], ...]
    directives: list[_Directive] = field(default_factory=list)

    @property
    def literal_names(self) -> list[str] | None:
        """The only names that this block can hold for, lower case, or None where patterns decide."""
        for part in self.when:
            if part[0].kind == "patterns" and not set(part[0].patterns) & set("*?!"):
                return part[0].patterns.lower().split(",")
        return None


@dataclass(slots=True)
class _Lookup:
    """What is known of one host while the directives are gone through."""

    name: str
    user: str | None
    local_user: str
    options: dict[str, list[str]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    openssh: str | None = None


class UnsafeNameError(ValueError):
    """A host or user name that a program could take for something else."""


class SshConfig:
    """All configuration files of one user, parsed; `lookup` is pure and cheap."""

    def __init__(self, home: str, environ: Mapping[str, str], *, system: str = SYSTEM_CONFIG) -> None:
        self._home = home
        self._environ = environ
        self._local_user = getpass.getuser()
        self._problem: str | None = None
        self._blocks = [
            *self._read(os.path.join(home, ".ssh", "config"), users=True),
            *self._read(system, users=False),
        ]
        self._final = any(c.kind == "final" for block in self._blocks for part in block.when for c in part)
        # One block a node is common; without an index a thousand of them would be judged a thousand times.
        self._by_name: dict[str, list[int]] = {}
        for number, block in enumerate(self._blocks):
            for name in block.literal_names or [""]:
                self._by_name.setdefault(name, []).append(number)

    def lookup(self, name: str, *, port: int | None = None) -> Target:
        """Return how to reach a name of the hostfile (`host` or `user@host`); `port` goes before the files.

        Raises UnsafeNameError.
        """
        user, _, host = name.rpartition("@")
        if not host or _UNSAFE.search(host) or (user and _UNSAFE.search(user)):
            raise UnsafeNameError(name)
        found = _Lookup(host, user or None, self._local_user, openssh=self._problem)
        candidates = sorted({*self._by_name.get("", []), *self._by_name.get(host.lower(), [])})
        for final in (False, True) if self._final else (False,):
            for block in (self._blocks[number] for number in candidates):
                if all(_holds(part, found, final=final) for part in block.when):
                    for directive in block.directives:
                        _apply(directive, found)
        return self._target(name, found, port)

    def _target(self, name: str, found: _Lookup, port: int | None) -> Target:
        options = found.options

        def first(key: str, default: str) -> str:
            return options[key][0] if options.get(key) else default

        hostname = first("hostname", "%h").replace("%%", "\0").replace("%h", found.name).replace("\0", "%")
        user = found.user or first("user", found.local_user)
        bad = None
        try:
            number = port or int(first("port", "22"))
            connect_timeout = float(first("connecttimeout", "0")) or None
        except ValueError:
            number, connect_timeout = 22, None
            bad = "a number in the ssh configuration is not one"
        tokens = {"h": hostname, "r": user, "p": str(number), "n": found.name, "u": found.local_user}
        files = [self._path(value, tokens) for value in options.get("identityfile", []) if value != "none"]
        explicit = "identityfile" in options
        defaults = tuple(os.path.join(self._home, ".ssh", key) for key in _DEFAULT_KEYS)
        strict = first("stricthostkeychecking", "ask").lower()
        families = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
        proxies = [first(key, "none") for key in ("proxyjump", "proxycommand")]
        return Target(
            name=name,
            hostname=hostname,
            user=user,
            port=number,
            family=families.get(first("addressfamily", "any").lower(), socket.AF_UNSPEC),
            identity_files=tuple(files) if explicit else defaults,
            explicit=explicit,
            identities_only=first("identitiesonly", "no").lower() == "yes",
            agent=self._agent(first("identityagent", "SSH_AUTH_SOCK"), tokens),
            known_hosts=self._known_hosts(options, tokens),
            host_key_alias=options["hostkeyalias"][0] if options.get("hostkeyalias") else None,
            weak=found.places["stricthostkeychecking"] if strict in {"no", "off", "accept-new"} else None,
            connect_timeout=connect_timeout,
            other_login=any(
                first(key, "no").lower() == "yes"
                for key in ("gssapiauthentication", "hostbasedauthentication")
            ),
            proxy=next((value for value in proxies if value.lower() != "none"), None),
            openssh_because=found.openssh or bad,
        )

    def _known_hosts(self, options: dict[str, list[str]], tokens: dict[str, str]) -> tuple[str, ...]:
        own = [os.path.join(self._home, ".ssh", name) for name in ("known_hosts", "known_hosts2")]
        files = options.get("userknownhostsfile", own) + options.get(
            "globalknownhostsfile", list(SYSTEM_KNOWN_HOSTS)
        )
        return tuple(self._path(value, tokens) for value in files if value.lower() != "none")

    def _agent(self, value: str, tokens: dict[str, str]) -> str | None:
        if value == "none":
            return None
        if value == "SSH_AUTH_SOCK":
            return self._environ.get("SSH_AUTH_SOCK") or None
        if value.startswith("$") and not value.startswith("${"):
            return self._environ.get(value[1:]) or None
        return self._path(value, tokens)

    def _path(self, value: str, tokens: dict[str, str]) -> str:
        """Expand `~`, `${NAME}` and the percent tokens of a file name."""
        known = {**tokens, "%": "%", "d": self._home}
        if value == "~" or value.startswith("~/"):
            value = self._home + value[1:]
        elif value.startswith("~"):
            value = os.path.expanduser(value)
        value = re.sub(r"\$\{(\w+)\}", lambda m: self._environ.get(m[1], ""), value)
        return re.sub(r"%(.)", lambda m: known[m[1]] if m[1] in known else _machine_token(m[1]), value)

    def _read(
        self,
        path: str,
        *,
        users: bool,
        outer: tuple[tuple[_Criterion, ...], ...] = (),
        depth: int = 0,
    ) -> Iterator[_Block]:
        try:
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                lines = file.read().split("\n")
        except OSError as error:
            if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                self._problem = self._problem or f"{path} cannot be read ({error.strerror})"
            return
        block = _Block(outer)
        for number, raw in enumerate(lines, 1):
            line = raw.strip()
            if not line or line.startswith("#"):
                continue
            place = f"{path}:{number}"
            match = _DIRECTIVE.fullmatch(line)
            if not match:
                self._problem = self._problem or f"{place} is no ssh option"
                continue
            key, values = match[1].lower(), tuple(_words(match[2]))
            if key == "host":
                yield block
                block = _Block((*outer, (_Criterion("patterns", ",".join(values)),)))
            elif key == "match":
                yield block
                block = _Block((*outer, tuple(_criteria(values))))
            elif key == "include" and depth < _MAX_INCLUDES:
                yield block
                for included in (path for name in values for path in self._included(name, users=users)):
                    yield from self._read(included, users=users, outer=block.when, depth=depth + 1)
                block = _Block(block.when)
            else:
                block.directives.append(_Directive(key, values, place, users))
        yield block

    def _included(self, name: str, *, users: bool) -> list[str]:
        path = self._path(name, {})
        if not os.path.isabs(path):
            path = os.path.join(self._home, ".ssh", path) if users else os.path.join("/etc/ssh", path)
        return sorted(glob.glob(path))


def home_directory() -> str:
    """Return the home that `ssh` looks at: the account's, whatever $HOME says."""
    return pwd.getpwuid(os.getuid()).pw_dir


def _words(text: str) -> Iterator[str]:
    for match in _TOKEN.finditer(text):
        double, single, bare, comment = match.groups()
        if comment is not None:
            return
        if double is not None:
            yield re.sub(r"\\(.)", r"\1", double)
        else:
            yield single if single is not None else bare


def _criteria(values: tuple[str, ...]) -> Iterator[_Criterion]:
    words = iter(values)
    for word in words:
        negated, kind = word.startswith("!"), word.lstrip("!").lower()
        kind, equals, attached = kind.partition("=")
        takes_value = kind not in {"all", "final", "canonical"}
        yield _Criterion(kind, attached if equals else next(words, "") if takes_value else "", negated)


def _holds(block: tuple[_Criterion, ...], found: _Lookup, *, final: bool) -> bool:
    """Say whether a Host or Match block applies; one we cannot judge sends the host to `ssh`."""
    results = []
    unknown = None
    for criterion in block:
        if criterion.kind in _KNOWN_CRITERIA or criterion.kind == "patterns":
            results.append(_criterion_holds(criterion, found, final=final) is not criterion.negated)
        else:
            unknown = f"Match {criterion.kind}"
    if unknown and all(results):
        found.openssh = found.openssh or f"only ssh can judge `{unknown}`"
        return False
    return all(results)


def _criterion_holds(criterion: _Criterion, found: _Lookup, *, final: bool) -> bool:
    kind = criterion.kind
    if kind in {"all", "final", "canonical"}:
        # `canonical` holds after a name was made canonical, which is left to `ssh`.
        return kind == "all" or (kind == "final" and final)
    hostname = found.options.get("hostname", [found.name])[0].replace("%h", found.name)
    subject = {
        "patterns": found.name,
        "originalhost": found.name,
        "host": hostname,
        "user": found.user or found.options.get("user", [found.local_user])[0],
        "localuser": found.local_user,
    }[kind]
    if kind in {"user", "localuser"}:
        return matches(criterion.patterns, subject)
    return matches(criterion.patterns.lower(), subject.lower())


def matches(patterns: str, subject: str) -> bool:
    """Match a comma-separated pattern list of OpenSSH: `*`, `?`, and `!` that rules out."""
    matched = False
    for pattern in patterns.split(","):
        if _pattern(pattern.removeprefix("!")).fullmatch(subject):
            if pattern.startswith("!"):
                return False
            matched = True
    return matched


@lru_cache(maxsize=4096)
def _pattern(pattern: str) -> re.Pattern[str]:
    # Brackets mean nothing special to OpenSSH.
    return re.compile(translate(pattern.replace("[", "[[]")))


def _apply(directive: _Directive, found: _Lookup) -> None:
    key, values = directive.key, list(directive.values)
    if not values:
        return
    if key in found.options:
        if key in _REPEATABLE:
            found.options[key] += [value for value in values if value not in found.options[key]]
        return
    found.options[key] = values
    found.places[key] = directive.place
    harmless = _OPENSSH_ONLY.get(key, (values[0].lower(),))
    if values[0].lower() not in harmless or (key in _USER_POLICY and directive.users):
        found.openssh = found.openssh or f"only ssh can honour {key} ({directive.place})"


def _machine_token(letter: str) -> str:
    names = {"l": socket.gethostname(), "L": socket.gethostname().split(".")[0], "i": str(os.getuid())}
    return names.get(letter, "%" + letter)
