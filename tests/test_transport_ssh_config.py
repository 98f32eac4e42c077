"""Our reading of ssh_config and known_hosts against that of OpenSSH itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

import pytest
import sshd as sshds

from safelaunch.transport.known_hosts import KnownHosts
from safelaunch.transport.ssh_config import SshConfig, UnsafeNameError

ssh_needed = pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")

CONFIGS = {
    "plain": "Host node1\n HostName 10.0.0.1\n Port 2222\n User alice\nHost *\n User bob\n Port 23\n",
    "first value wins": "User early\nHost node*\n User late\n Port 7\nHost node1\n Port 8\n",
    "equals and quotes": 'Host = node1\n HostName="10.0.0.2"\n Port= 24\n IdentityFile "~/.ssh/a key"\n',
    "case and tabs": "HOST\tnode1\n\thostname\t10.0.0.3\n\tPORT\t25\n",
    "comments": "# Host node1\nHost node1 # not this\n Port 26 # nor that\n",
    "negated": "Host node* !node1\n Port 27\nHost *\n Port 28\n",
    "question mark": "Host node? other\n Port 29\n",
    "brackets are letters": "Host node[12]\n Port 30\n",
    "several patterns": "Host a b node1 c\n Port 31\n",
    "hostname with %h": "Host node1\n HostName %h.cluster.example\n",
    "match all": "Match all\n Port 32\n",
    "match host": "Host node1\n HostName 10.9.9.9\nMatch host 10.9.*\n Port 33\n",
    "match originalhost": "Host node1\n HostName 10.9.9.9\nMatch originalhost node1\n Port 34\n",
    "match user": "Match user carol\n Port 35\nHost *\n User carol\nMatch user carol\n Port 36\n",
    "match two": "Match originalhost node1 user nobody\n Port 37\nMatch host node1 !user x\n Port 38\n",
    "match list": "Match originalhost a,node*,!node2\n Port 39\n",
    "match final": "Host node1\n HostName 10.8.8.8\nMatch final host 10.8.8.8\n Port 40\n",
    "include": "Include more.conf\nHost node1\n Port 41\n",
    "include glob": "Include d/*.conf\n Port 42\n",
    "include in a block": "Host other\n Include more.conf\nHost node1\n Port 43\n",
    "include in our block": "Host node1\n Include more.conf\n",
    "identities": "IdentityFile ~/.ssh/x\nIdentitiesOnly yes\nHost node1\n IdentityFile %d/.ssh/y\n",
    "identity none": "IdentityFile none\n",
    "files": "UserKnownHostsFile ~/.ssh/k1 /tmp/k2\nGlobalKnownHostsFile /etc/k3\nHostKeyAlias Alias1\n",
    "timeout": "ConnectTimeout 7\nAddressFamily inet\nStrictHostKeyChecking accept-new\n",
    "ipv6 name": "Host fe80::1 ::1\n Port 44\nHost *\n Port 45\n",
    "windows line ends": "Host node1\r\n Port 46\r\n",
}


def write(home, text):
    own = home / ".ssh"
    (own / "d").mkdir(parents=True)
    (own / "config").write_text(text)
    (own / "more.conf").write_text("Port 50\nHost node1\n User included\n")
    (own / "d" / "b.conf").write_text("Host node2\n Port 51\n")
    (own / "d" / "a.conf").write_text("Host node1\n Port 52\n")


def oracle(home, host):
    """Return what OpenSSH makes of it; relative includes and `~` are put where `home` is."""
    copy = home / "absolute"
    text = (home / ".ssh" / "config").read_text()
    for relative in ("more.conf", "d/*.conf"):
        text = text.replace(f"Include {relative}", f"Include {home}/.ssh/{relative}")
    copy.write_text(text)
    run = subprocess.run(["ssh", "-F", copy, "-G", host], check=True, capture_output=True, text=True)
    found = {}
    for line in run.stdout.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    return found


def at_home(paths, home):
    return [path.replace("~", str(home), 1).replace("%d", str(home)) for path in paths]


@ssh_needed
@pytest.mark.parametrize("host", ["node1", "node2", "other", "::1"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_like_openssh(tmp_path, config, host):
    write(tmp_path, config)
    ours = SshConfig(str(tmp_path), {}, system="/nonexistent").lookup(host)
    theirs = oracle(tmp_path, host)
    assert ours.openssh_because is None
    assert ours.hostname == theirs["hostname"][0]
    assert ours.port == int(theirs["port"][0])
    assert ours.user == theirs["user"][0]
    assert ours.identities_only is (theirs["identitiesonly"][0] == "yes")
    assert (ours.host_key_alias or "").lower() == theirs.get("hostkeyalias", [""])[0].lower()
    assert (ours.connect_timeout or "none") == (
        "none" if theirs["connecttimeout"][0] == "none" else float(theirs["connecttimeout"][0])
    )
    assert bool(ours.weak) is (theirs["stricthostkeychecking"][0] not in {"ask", "true", "yes"})
    if ours.explicit:
        files = [path for path in at_home(theirs.get("identityfile", []), tmp_path) if path != "none"]
        assert [path.replace('"', "") for path in ours.identity_files] == files
    known = " ".join([*theirs["userknownhostsfile"], *theirs["globalknownhostsfile"]])
    if "UserKnownHostsFile" in config:
        account_home = os.path.expanduser("~")
        assert (
            list(ours.known_hosts)
            == known.replace(account_home, str(tmp_path)).replace("~", str(tmp_path)).split()
        )


@pytest.mark.parametrize(
    ("config", "because"),
    [
        ("ProxyJump bastion", "proxyjump"),
        ("ProxyCommand nc %h %p", "proxycommand"),
        ("Host *\n ProxyJump none", None),
        ('Match exec "true"\n Port 3', "Match exec"),
        ('Match host other exec "true"\n Port 3', None),
        ("Match tagged x\n Port 3", "Match tagged"),
        ("PKCS11Provider /usr/lib/x.so", "pkcs11provider"),
        ("CertificateFile ~/.ssh/x-cert.pub", "certificatefile"),
        ("Ciphers aes256-gcm@openssh.com", "ciphers"),
        ("KexAlgorithms -diffie*", "kexalgorithms"),
        ("PubkeyAuthentication no", "pubkeyauthentication"),
        ("CanonicalizeHostname yes", "canonicalizehostname"),
        ("CanonicalizeHostname no", None),
        ("Port many", "number"),
        ("what is this?", None),
        ("!!!", "config:1"),
        ("ForwardAgent yes\nServerAliveInterval 30\nControlMaster auto\nSendEnv LANG", None),
    ],
)
def test_what_only_the_ssh_program_can_honour(tmp_path, config, because):
    write(tmp_path, config)
    found = SshConfig(str(tmp_path), {}, system="/nonexistent").lookup("node1").openssh_because
    assert (because in found) if because else found is None


def test_algorithms_of_the_distribution_are_no_choice_of_the_user(tmp_path):
    write(tmp_path, "")
    system = tmp_path / "system"
    system.write_text(
        "Host *\n Ciphers aes256-ctr\n GSSAPIAuthentication yes\nMatch final all\n MACs hmac-sha2-256\n"
    )
    target = SshConfig(str(tmp_path), {}, system=str(system)).lookup("node1")
    assert target.openssh_because is None
    assert target.other_login


def test_unreadable_configuration_is_left_to_ssh(tmp_path):
    (tmp_path / ".ssh" / "config").mkdir(parents=True)
    found = SshConfig(str(tmp_path), {}, system="/nonexistent").lookup("node1")
    assert "cannot be read" in found.openssh_because


def test_an_include_of_itself_ends(tmp_path):
    write(tmp_path, "Include config\nHost node1\n Port 5\n")
    assert SshConfig(str(tmp_path), {}, system="/nonexistent").lookup("node1").port == 5


def test_user_and_port_before_the_files(tmp_path):
    write(tmp_path, "Host node1\n User alice\n Port 2\n")
    target = SshConfig(str(tmp_path), {}, system="/nonexistent").lookup("bob@node1", port=9)
    assert (target.name, target.hostname, target.user, target.port) == ("bob@node1", "node1", "bob", 9)
    assert target.host_key_names == ("[node1]:9", "node1")


@pytest.mark.parametrize(
    ("value", "environ", "path"),
    [
        ("none", {"SSH_AUTH_SOCK": "/s"}, None),
        ("SSH_AUTH_SOCK", {"SSH_AUTH_SOCK": "/s"}, "/s"),
        ("$OTHER", {"OTHER": "/o"}, "/o"),
        ("${OTHER}/x", {"OTHER": "/o"}, "/o/x"),
        ("~/agent", {}, "{home}/agent"),
        ("%d/agent-%r", {}, "{home}/agent-alice"),
    ],
)
def test_identity_agent(tmp_path, value, environ, path):
    write(tmp_path, f"User alice\nIdentityAgent {value}\n")
    target = SshConfig(str(tmp_path), environ, system="/nonexistent").lookup("node1")
    assert target.agent == (path and path.format(home=tmp_path))


@pytest.mark.parametrize(
    "name", ["", "-x", "a b", "a;b", "a|b", "$(x)", "`x`", "u@", "-l@h", "a\nb", "a'b", "x@-y"]
)
def test_names_that_are_never_passed_on(tmp_path, name):
    with pytest.raises(UnsafeNameError):
        SshConfig(str(tmp_path), {}, system="/nonexistent").lookup(name)


def test_a_block_for_each_of_two_thousand_nodes_is_quick(tmp_path):
    write(
        tmp_path,
        "".join(f"Host node{n}\n HostName 10.0.{n // 250}.{n % 250}\n User u{n}\n" for n in range(2000)),
    )
    config = SshConfig(str(tmp_path), {}, system="/nonexistent")
    started = time.process_time()
    users = [config.lookup(f"node{n}").user for n in range(2000)]
    # Without the index it takes a minute; this is no measurement.
    assert time.process_time() - started < 10
    assert users == [f"u{n}" for n in range(2000)]


@ssh_needed
class TestKnownHosts:
    @pytest.fixture
    def key(self, tmp_path):
        return " ".join(sshds.make_key(tmp_path / "key").with_suffix(".pub").read_text().split()[:2])

    @pytest.mark.parametrize(
        "names",
        [
            *("node1", "node1,10.0.0.1", "NODE1", "node*", "node?", "node*,!node1", "!node1,node*"),
            *("[node1]:2222", "*", "other", "node[1]", "[node1]:*", "node1.example"),
        ],
    )
    @pytest.mark.parametrize("name", ["node1", "[node1]:2222", "10.0.0.1", "node2"])
    @pytest.mark.parametrize("hashed", [False, True])
    def test_like_openssh(self, tmp_path, key, names, name, hashed):
        file = tmp_path / "known"
        file.write_text(
            f"# a comment\n\n{names} {key} comment\nbroken line\n@revoked x {key}\n|1|bad {key}\n"
        )
        if hashed:
            subprocess.run(["ssh-keygen", "-H", "-f", file], check=False, capture_output=True)
        theirs = subprocess.run(
            ["ssh-keygen", "-F", name, "-f", file], check=False, capture_output=True, text=True
        )
        found = KnownHosts().find([name], [str(file)])
        assert bool(found.keys) is (theirs.returncode == 0), theirs.stdout

    def test_markers(self, tmp_path, key):
        file = tmp_path / "known"
        file.write_text(
            f"node1 {key}\n@cert-authority *.example {key}\n@revoked node1 {key}\n@new node1 {key}\n"
        )
        hosts = KnownHosts()
        found = hosts.find(["node1"], [str(file)])
        assert (len(found.keys), len(found.revoked), len(found.authorities)) == (1, 1, 0)
        assert found.keys[0].place == f"{file}:1"
        assert len(hosts.find(["a.example"], [str(file)]).authorities) == 1

    def test_fingerprint(self, tmp_path, key):
        file = tmp_path / "known"
        file.write_text(f"node1 {key}\n")
        shown = subprocess.run(["ssh-keygen", "-lf", file], check=True, capture_output=True, text=True).stdout
        assert KnownHosts().find(["node1"], [str(file)]).keys[0].fingerprint == shown.split()[1]

    def test_the_name_with_the_port_goes_first(self, tmp_path, key):
        other = " ".join(sshds.make_key(tmp_path / "other").with_suffix(".pub").read_text().split()[:2])
        file = tmp_path / "known"
        file.write_text(f"node1 {other}\n[node1]:2222 {key}\n")
        found = KnownHosts().find(["[node1]:2222", "node1"], [str(file)])
        assert [known.place for known in found.keys] == [f"{file}:2"]

    def test_files_that_are_not_there(self, tmp_path):
        assert not KnownHosts().find(["node1"], [str(tmp_path / "no"), str(tmp_path)]).keys
