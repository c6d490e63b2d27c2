"""The secret of several nodes: where it comes from, and what is not signed with it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from distributed.errors import ConfigError, ResourceError
from distributed.launching import secret
from distributed.launching.secret import bind, messages, read_token_file, shared_secret

SECRET, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2


@pytest.fixture
def store(tmp_path: Path) -> dist.FileStore:
    return dist.FileStore(str(tmp_path / "store"), -1)


def test_a_signed_value_comes_back_and_is_not_readable_under_another_key(
    store: dist.FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRIBUTED_TOKEN", SECRET)
    signed = messages(store, "part")
    signed.set("a", "one")
    assert signed.get("a") == b"one" and signed.check(["a"]) and not signed.check(["a", "b"])
    store.set("part/b", store.get("part/a"))
    with pytest.raises(ResourceError, match=r"part/b .* is not signed"):
        signed.get("b")


def test_what_was_signed_in_another_attempt_is_refused(store: dist.FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same key, value and secret, put back by somebody who had read them."""
    monkeypatch.setenv("DISTRIBUTED_TOKEN", SECRET)
    monkeypatch.setattr(secret, "_bound", {})
    bind("first")
    messages(store, "part").set("a", "one")
    assert messages(store, "part").get("a") == b"one"
    bind("second")
    with pytest.raises(ResourceError, match=r"part/a .* is not signed"):
        messages(store, "part").get("a")


def test_compare_set_is_that_of_the_values(store: dist.FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTED_TOKEN", SECRET)
    signed = messages(store, "part")
    assert signed.compare_set("a", "", "1") == b"1"
    assert signed.compare_set("a", "", "2") == b"1"
    assert signed.compare_set("a", "1", "2") == b"2" == signed.get("a")


@pytest.mark.parametrize("theirs", [None, OTHER])
def test_a_node_with_another_secret_or_none_is_told(
    theirs: str | None, store: dist.FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    if theirs is not None:
        monkeypatch.setenv("DISTRIBUTED_TOKEN", theirs)
    messages(store, "part").set("a", "one")
    monkeypatch.setenv("DISTRIBUTED_TOKEN", SECRET)
    with pytest.raises(ResourceError, match="set the same DISTRIBUTED_TOKEN on all nodes"):
        messages(store, "part").get("a")


def test_without_a_secret_values_are_as_they_are(store: dist.FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTRIBUTED_TOKEN", raising=False)
    messages(store, "part").set("a", "one")
    assert store.get("part/a") == b"one"


def test_a_secret_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTED_TOKEN", "hunter2")
    with pytest.raises(ConfigError, match="needs at least 16"):
        shared_secret()


def test_the_file_of_the_secret_must_be_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTED_TOKEN", OTHER)  # which the file wins over; and set again after the test
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=f"is open to other users: chmod 600 {file}"):
        read_token_file(str(file))
    file.chmod(0o600)
    read_token_file(str(file))
    assert shared_secret() == SECRET.encode()
    file.write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        read_token_file(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token_file(str(tmp_path / "absent"))
