"""Whose request is it: keys, their hashes, and the models that they may use."""

from __future__ import annotations

import hashlib

import pytest

from app.auth import ANONYMOUS, ApiKey, Authenticator
from app.config import KeyConfig
from app.credential import new_key
from app.errors import InvalidApiKey, ModelNotAllowed
from tests.checklist import lines

ALICE, BOB = "lg-alice-0123456789", "lg-bob-0123456789"


def _hash(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def authenticator() -> Authenticator:
    return Authenticator(
        [
            KeyConfig(name="alice", hash=_hash(ALICE)),
            KeyConfig(name="bob", hash=_hash(BOB), models=("small", "tiny")),
        ]
    )


def _bearer(key: str) -> tuple[bytes, bytes]:
    return b"authorization", b"Bearer " + key.encode()


@lines(45)
@pytest.mark.parametrize(
    "headers",
    [
        [_bearer(ALICE)],
        [(b"authorization", b"bearer " + ALICE.encode())],
        [(b"authorization", b"BEARER   " + ALICE.encode() + b" ")],
        [(b"x-api-key", ALICE.encode())],
        [(b"x-api-key", b" " + ALICE.encode())],
        [_bearer(ALICE), (b"x-api-key", ALICE.encode())],
        [(b"host", b"box"), _bearer(ALICE), (b"cookie", b"a=b")],
    ],
)
def test_a_key_is_found(authenticator: Authenticator, headers: list[tuple[bytes, bytes]]) -> None:
    assert authenticator.authenticate(headers).name == "alice"


@lines(43, 44)
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"host", b"box")],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", ALICE.encode())],
        [(b"authorization", b"Basic " + ALICE.encode())],
        [(b"authorization", b"Bearer" + ALICE.encode())],
        [_bearer(ALICE + "x")],
        [_bearer(ALICE[:-1])],
        [_bearer(ALICE.upper())],
        [_bearer(_hash(ALICE))],
        [_bearer(_hash(ALICE).removeprefix("sha256:"))],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"x-api-key", b"")],
        [(b"api-key", ALICE.encode())],
    ],
)
def test_what_is_no_key_of_ours(authenticator: Authenticator, headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(InvalidApiKey) as refusal:
        authenticator.authenticate(headers)
    assert refusal.value.headers()["www-authenticate"] == "Bearer"


@lines(46, 47)
@pytest.mark.parametrize(
    "headers",
    [
        [_bearer(ALICE), (b"x-api-key", BOB.encode())],
        [_bearer(ALICE), _bearer(BOB)],
        [_bearer(ALICE), _bearer("wrong")],
        [(b"authorization", b"Basic x"), (b"x-api-key", ALICE.encode())],
        [_bearer(""), (b"x-api-key", ALICE.encode())],
    ],
)
def test_two_different_keys_are_none(authenticator: Authenticator, headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(InvalidApiKey, match="two different API keys"):
        authenticator.authenticate(headers)


def test_a_refusal_does_not_repeat_the_key(authenticator: Authenticator) -> None:
    with pytest.raises(InvalidApiKey) as refusal:
        authenticator.authenticate([_bearer("lg-wrong-0123456789")])
    assert "wrong" not in refusal.value.message


def test_without_keys_everybody_is_anonymous() -> None:
    assert Authenticator([]).authenticate([]) is ANONYMOUS
    assert Authenticator([]).authenticate([_bearer("anything")]) is ANONYMOUS
    ANONYMOUS.require("any model")


def test_the_models_of_a_key(authenticator: Authenticator) -> None:
    alice = authenticator.authenticate([_bearer(ALICE)])
    bob = authenticator.authenticate([_bearer(BOB)])
    assert [key.allows(model) for key in (alice, bob) for model in ("small", "big", "smal", "*")] == [
        *(True, True, True, True),
        *(True, False, False, False),
    ]
    bob.require("tiny")
    with pytest.raises(ModelNotAllowed, match="'bob' may not use the model 'big'") as refusal:
        bob.require("big")
    assert (refusal.value.status, refusal.value.param) == (403, "model")


def test_a_key_for_no_model_may_use_none() -> None:
    assert not ApiKey("eve", frozenset()).allows("small")


def test_a_new_key_is_found_by_its_hash() -> None:
    key, digest = new_key()
    authenticator = Authenticator([KeyConfig(name="new", hash=digest)])
    assert authenticator.authenticate([_bearer(key)]).name == "new"
    assert key not in digest


def test_new_keys_differ_and_are_long() -> None:
    keys = {new_key()[0] for _ in range(50)}
    assert len(keys) == 50
    # 32 random bytes in base64, after the prefix.
    assert {len(key.removeprefix("lg-")) for key in keys} == {43}
