"""Caches whose files are run as code: nobody else can have written them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed import Trainer
from distributed.backends._torch import compile_cache
from distributed.runs.private import own_directory, stranger
from tests.conftest import clean_environment

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A directory of this user alone that holds a file."""
    path = tmp_path / "cache"
    (path / "ab").mkdir(parents=True)
    path.chmod(0o700)
    (path / "ab" / "entry").write_bytes(b"")
    return path


def test_a_missing_directory_is_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert own_directory(tmp_path / "new" / "cache") is None
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700


def test_an_empty_directory_of_this_user_is_closed_to_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert own_directory(tmp_path) is None and tmp_path.stat().st_mode & 0o777 == 0o700


def test_what_only_this_user_can_have_written_is_taken(cache: Path) -> None:
    assert own_directory(cache) is None
    cache.chmod(0o755)
    assert own_directory(cache) is None
    (cache / "ab" / "link").symlink_to("entry")  # whose mode is 0777
    assert own_directory(cache) is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_directory_in_which_others_can_write_is_not(cache: Path, mode: int) -> None:
    cache.chmod(mode)
    assert own_directory(cache) == "other users can write there" and cache.stat().st_mode & 0o7777 == mode


@pytest.mark.parametrize("what", ["ab", "ab/entry"])
def test_content_that_others_can_write_is_not(cache: Path, what: str) -> None:
    (cache / what).chmod(0o720)
    assert own_directory(cache) is None, "nobody of the group can enter"
    cache.chmod(0o750)
    assert own_directory(cache) == f"other users can write to {cache / what}"
    cache.chmod(0o700)
    (cache / what).chmod(0o702)
    assert own_directory(cache) == f"other users can write to {cache / what}"


def test_a_link_is_not(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(cache)
    assert own_directory(tmp_path / "link") == "it is a link"
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    assert own_directory(tmp_path / "nowhere") == "it is a link" and not (tmp_path / "absent").exists()


def test_a_directory_that_others_can_move_away_is_not(cache: Path) -> None:
    cache.parent.chmod(0o777)
    assert stranger(cache) == f"other users can move files in {cache.parent}"
    cache.parent.chmod(0o1777)
    assert stranger(cache) is None


@needs_root
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("", "it belongs to another user"),
        ("ab", "{}/ab belongs to another user"),
        ("ab/entry", "{}/ab/entry belongs to another user"),
        ("..", "{}/.. belongs to another user"),
    ],
)
def test_what_another_user_made_is_not(cache: Path, what: str, said: str) -> None:
    os.chown(cache / what, NOBODY, NOBODY)
    assert own_directory(cache) == said.format(cache).replace("/cache/..", "")


# What torch says of its places, in a process of its own, as the modules of torch keep them. argv[1]: whether torch has been used.
PLACES = """
import json, os, sys
if sys.argv[1] == "late":
    import torch._dynamo, torch._inductor.codecache
from distributed.backends._torch import compile_cache
said = []
compile_cache.secure(said.append)
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor import cache, codecache
from torch._inductor.runtime import cache_dir_utils
places = [cache_dir_utils.cache_dir(), cache_dir_utils.default_cache_dir(), codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR,
    codecache.FxGraphCache._get_tmp_dir(), AOTAutogradCache._get_tmp_dir(), str(cache.InductorOnDiskCache().base_dir)]
print(json.dumps([places, said]))
"""


def places(tmp_path: Path, when: str, **environ: str) -> tuple[set[Path], list[str]]:
    """Where torch keeps what it compiles, and the warnings. The temporary directory is `tmp_path`/tmp."""
    (tmp_path / "tmp").mkdir(mode=0o700, exist_ok=True)
    own = {"TMPDIR": str(tmp_path / "tmp"), "XDG_CACHE_HOME": str(tmp_path / "home"), "LOGNAME": "victim", **environ}
    done = subprocess.run(
        [sys.executable, "-c", PLACES, when], capture_output=True, text=True, timeout=120, env=clean_environment(**own)
    )
    assert done.returncode == 0, done.stderr
    found, said = json.loads(done.stdout)
    return {Path(place) for place in found}, said


@pytest.mark.parametrize("when", ["late", pytest.param("early", marks=pytest.mark.full)])
def test_torch_keeps_nothing_where_others_can_write(tmp_path: Path, when: str) -> None:
    planted = tmp_path / "tmp" / "torchinductor_victim"
    (planted / "fxgraph").mkdir(parents=True)
    planted.chmod(0o777)
    found, [text] = places(tmp_path, when)
    own = tmp_path / "home" / "distributed-trainer" / "torchinductor"
    assert all(place.is_relative_to(own) for place in found) and own.stat().st_mode & 0o777 == 0o700
    assert text == f"torch.compile does not use its cache {planted}, as other users can write there: it uses {own}"


@pytest.mark.full
def test_a_cache_that_the_user_chose_stays_and_an_open_one_is_a_warning(tmp_path: Path) -> None:
    planted, chosen = tmp_path / "tmp" / "torchinductor_victim", tmp_path / "chosen"
    (planted / "fxgraph").mkdir(parents=True)
    planted.chmod(0o777)
    chosen.mkdir(mode=0o700)
    found, said = places(tmp_path, "early", TORCHINDUCTOR_CACHE_DIR=str(chosen))
    assert all(place.is_relative_to(chosen) for place in found) and said == []  # the headers too
    chosen.chmod(0o777)
    _, [text] = places(tmp_path, "early", TORCHINDUCTOR_CACHE_DIR=str(chosen))
    assert "and other users can write there: name a directory of mode 0700" in text


def secured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, default: Path) -> list[str]:
    """The warnings of `secure` where torch's default is `default`; torch itself is left alone."""
    monkeypatch.setattr("torch._inductor.runtime.runtime_utils.default_cache_dir", lambda: str(default))
    monkeypatch.setattr(compile_cache, "_keep_out", lambda chosen: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said: list[str] = []
    compile_cache.secure(said.append)
    return said


def test_torchs_own_directory_serves_where_only_this_user_can_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(
        "TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new")
    )  # as torch sets it, when torch._dynamo is loaded
    assert secured(monkeypatch, tmp_path, tmp_path / "new") == []
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_where_the_users_own_cache_is_open_too_the_run_gets_a_new_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    cache.chmod(0o777)
    own = tmp_path / "home" / "distributed-trainer" / "torchinductor"
    (own / "ab").mkdir(parents=True)
    own.chmod(0o777)
    [text] = secured(monkeypatch, tmp_path, cache)
    chosen = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert chosen.name.startswith("distributed-") and chosen.stat().st_mode & 0o777 == 0o700
    assert chosen.parent == tmp_path and str(chosen) in text


def test_the_cache_is_secured_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []
    monkeypatch.setattr(compile_cache, "secure", lambda warn: order.append("secured"))
    monkeypatch.setattr(torch, "compile", lambda function, **_: order.append("compiled") or function)
    monkeypatch.chdir(tmp_path)
    data = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
    for is_compiled in (False, True):
        trainer = Trainer(
            torch.nn.Linear(2, 1), compile=is_compiled, nproc_per_node=1, device="cpu", verbose=False, tensorboard=False
        )
        trainer.fit(data)
    assert order == ["secured", "compiled"]
