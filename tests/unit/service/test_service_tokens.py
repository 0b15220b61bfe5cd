"""Tokens: only who has one gets in, as the one whom it names; the file betrays none."""

import json
import stat
import threading

import pytest

from kvtier.cli import main
from kvtier.errors import ConfigError
from kvtier.service.cache import LOCAL, Caller, Scope, ServiceError, Tokens

READ, WRITE, ADMIN = Scope


@pytest.fixture
def path(tmp_path):
    return tmp_path / "etc" / "tokens.json"


def refused(tokens: Tokens, secret: str | None) -> str:
    with pytest.raises(ServiceError) as caught:
        tokens.caller(secret)
    assert (caught.value.status, caught.value.code) == (401, "unauthorized")
    return str(caught.value)


def test_a_token_names_its_caller(path):
    tokens = Tokens.open(path)
    secret = tokens.create("alice", [READ, WRITE], ["team-*"])
    public = secret.split("_")[1]
    assert tokens.caller(secret) == Caller("alice", frozenset({READ, WRITE}), ("team-*",), public)
    assert Tokens.open(path).caller(secret) == tokens.caller(secret)
    assert tokens.caller(tokens.create("bob", [ADMIN])).namespaces is None


def test_everything_else_is_refused_in_the_same_words(path):
    tokens = Tokens.open(path)
    secret, other = tokens.create("alice", [READ]), tokens.create("bob", [READ])
    head, public, rest = secret.split("_")
    wrong = [
        None,
        "",
        "kvt_",
        secret[:-1],
        secret + "0",
        secret.upper(),
        f" {secret}",
        f"{secret}\n",
        f"{head}_{public}_{other.split('_')[2]}",
        f"{head}_{'0' * 16}_{rest}",
        f"{head}_{public}_{'0' * 64}",
        "kvt_ä_ö",
    ]
    assert len({refused(tokens, one) for one in wrong}) == 1


def test_the_file_has_hashes_and_no_secrets(path):
    tokens = Tokens.open(path)
    secret = tokens.create("alice", [READ])
    text = path.read_text()
    assert secret not in text
    assert secret.split("_")[2] not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len({tokens.create("alice", [READ]) for _ in range(20)}) == 20


def test_a_token_expires(path):
    now = [1000.0]
    tokens = Tokens(path, clock=lambda: now[0])
    secret = tokens.create("alice", [READ], lifetime=60)
    tokens.caller(secret)
    now[0] += 60
    assert "has expired" in refused(tokens, secret)


def test_a_revoked_token_is_out_once_the_file_is_read_again(path):
    tokens = Tokens.open(path)
    secret, kept = tokens.create("alice", [READ]), tokens.create("alice", [READ])
    serving = Tokens.open(path)
    tokens.revoke(secret.split("_")[1])
    assert serving.caller(secret).tenant == "alice"
    serving.reload()
    refused(serving, secret)
    serving.caller(kept)
    with pytest.raises(ConfigError, match="unknown id"):
        tokens.revoke(secret.split("_")[1])


def test_without_a_file_everybody_is_the_local_caller():
    tokens = Tokens.open(None)
    assert not tokens.required
    assert tokens.caller(None) == tokens.caller("anything") == LOCAL
    with pytest.raises(ConfigError, match=r"set service\.tokens"):
        tokens.create("alice", [READ])


def test_a_file_that_is_not_there_lets_nobody_in(path):
    tokens = Tokens.open(path)
    assert tokens.required
    refused(tokens, None)
    assert tokens.entries() == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-3],
        lambda text: "[" * 100_000,
        lambda text: "{}",
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace('"read"', '"root"'),
        lambda text: text.replace('"hash"', '"hush"'),
        lambda text: text.replace('"alice"', '"../alice"'),
        lambda text: text.replace('"namespaces": null', '"namespaces": []'),
        lambda text: text.replace('"namespaces": null', '"namespaces": "public"'),
        lambda text: text.replace('"namespaces": null', '"namespaces": ["a/b"]'),
        lambda text: text.replace('"namespaces": null', '"namespaces": [1]'),
        lambda text: text.replace('"expires": null', '"expires": "tomorrow"'),
        lambda text: text.replace('"expires": null', '"expires": NaN'),
        lambda text: text.replace('"created": ', '"created": null, "was": '),
    ],
)
def test_a_damaged_file_is_refused_and_what_was_read_stays_in_force(path, damage):
    tokens = Tokens.open(path)
    secret = tokens.create("alice", [READ])
    path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match=r"service\.tokens|tenant"):
        Tokens.open(path)
    with pytest.raises(ConfigError):
        tokens.reload()
    assert tokens.caller(secret).tenant == "alice"


@pytest.mark.parametrize(
    ("tenant", "scopes", "namespaces", "lifetime"),
    [
        ("../alice", [READ], None, None),
        ("", [READ], None, None),
        ("alice", [], None, None),
        ("alice", [READ], [], None),
        ("alice", [READ], ["a/b"], None),
        ("alice", [READ], None, 0),
    ],
)
def test_a_token_that_makes_no_sense_is_not_made(path, tenant, scopes, namespaces, lifetime):
    with pytest.raises(ConfigError):
        Tokens.open(path).create(tenant, scopes, namespaces, lifetime=lifetime)
    assert Tokens.open(path).entries() == []


def test_two_that_make_tokens_at_once_lose_none(path):
    threads = [
        threading.Thread(target=lambda: [Tokens.open(path).create("alice", [READ]) for _ in range(5)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Tokens.open(path).entries()) == 20


def test_a_namespace_pattern_is_matched_as_a_whole():
    some = Caller("alice", frozenset(), ("team-?", "lab*"), "id")
    assert [some.sees(name) for name in ("team-a", "team-ab", "lab", "lab.1", "my-lab", "Team-a")] == [
        True,
        False,
        True,
        True,
        False,
        False,
    ]


# ---- the command


def test_the_command_makes_lists_and_revokes(path, capsys):
    place = ["--file", str(path)]
    assert main(["cache", "token", "create", "--tenant", "alice", "--scope", "read", "--days", "1", *place]) == 0
    secret = capsys.readouterr().out.strip()
    assert Tokens.open(path).caller(secret).scopes == {READ}
    assert main(["cache", "token", "list", "--json", *place]) == 0
    out = capsys.readouterr().out
    (row,) = json.loads(out)
    assert (row["tenant"], row["scopes"], row["namespaces"]) == ("alice", ["read"], None)
    assert secret.split("_")[2] not in out
    assert main(["cache", "token", "list", *place]) == 0
    assert capsys.readouterr().out.split("\t")[:4] == [row["id"], "alice", "read", "*"]
    assert main(["cache", "token", "revoke", row["id"], *place]) == 0
    assert Tokens.open(path).entries() == []
    assert main(["cache", "token", "create", "--scope", "root", *place]) == 2
    assert "expected read, write, admin" in capsys.readouterr().err
    assert main(["cache", "token", "list"]) == 2
    assert "service.tokens = none" in capsys.readouterr().err
