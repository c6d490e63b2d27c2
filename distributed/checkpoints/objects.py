"""Files below one address of object storage: upload and verify, download, list, remove. Imports fsspec on first use."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from distributed.checkpoints.digests import file_digest, stream_digest
from distributed.config.addresses import scheme_of
from distributed.errors import ConfigError, DistributedError, ResourceError

T = TypeVar("T")

TRIES = 5  # attempts at one request
_FIRST_PAUSE_S = 0.5  # before the second attempt; each further pause is twice as long
_CONNECT_S, _READ_S = 5.0, 30.0  # until a server that does not accept a connection, or sends nothing, fails a request
_LEAST_BYTES_PER_S = 16 << 10  # an upload that takes `_READ_S` longer than at this rate fails
_PROBE_S = 25.0  # until `probe` fails, all its attempts together
_PATIENT_S = 3.0  # until `probe` says that it waits
_MAX_WORDS = 300  # characters of a server's message that are shown
_PART_BYTES = 16 << 20  # a file of at least twice this size is uploaded to S3 in parts
_MAX_PARTS = 10_000  # largest number of parts that S3 accepts
# A further attempt cannot help: wrong credentials, no such bucket, no permission, no space.
_FINAL = re.compile(
    r"credential(?!s? from)|access ?denied|forbidden|not authorized|permission|no ?such ?bucket|bucket does not exist|not exist|quota|storage.?full"
    r"|insufficient|invalid ?access ?key|signature|expired ?token|invalid bucket name|invalid endpoint",
    re.IGNORECASE,
)
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    # One attempt inside the library, because this module repeats requests itself.
    "s3": {"config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": _CONNECT_S, "read_timeout": _READ_S}},
    "file": {"auto_mkdir": True},
}
# Classes of the errors that the libraries raise, besides OSError.
_ERRORS = {
    "s3": ("botocore.exceptions:BotoCoreError", "botocore.exceptions:ClientError", "aiohttp:ClientError"),
    "gs": ("gcsfs.retry:HttpError", "gcsfs.retry:ChecksumError", "google.auth.exceptions:GoogleAuthError", "aiohttp:ClientError"),
    "file": (),
}  # fmt: skip


class StorageError(OSError):
    """Raised if object storage refuses a request or does not answer. The message has the server's own words.

    Attributes:
        words: the server's words.
        is_missing: whether the file does not exist.
        is_final: whether a further attempt cannot help, for example because permission is missing.
    """

    def __init__(self, words: str, *, is_missing: bool = False, is_final: bool = False) -> None:
        super().__init__(words)
        self.words, self.is_missing, self.is_final = words, is_missing, is_final


def unusable(message: str, error: OSError, final: type[DistributedError] = ConfigError) -> DistributedError:
    """Return the error to raise with `message` because of `error`: `final` if a further attempt cannot help, else ResourceError."""
    return (final if isinstance(error, StorageError) and error.is_final else ResourceError)(message)


@dataclasses.dataclass
class Objects:
    """The files below `address`. Creating the object is cheap: fsspec is imported and connected at the first request.

    All methods raise StorageError after `TRIES` attempts, or after the first one if a further attempt cannot help. Methods may be
    called from any thread.

    Attributes:
        address: an address that `check_address` returned.
        pause: waits for a number of seconds between two attempts, and returns whether to give up.
    """

    address: str
    pause: Callable[[float], bool | None] = time.sleep
    _system: Any = None
    _errors: tuple[type[BaseException], ...] = ()
    _until: float = math.inf  # when `probe` gives up

    def probe(self, name: str, say: Callable[[str], None] = lambda text: None) -> None:
        """Write a small file, read it and remove it. Call `say` with one line, from a thread, if the storage is slow to answer.

        If one of these fails, raises an error that names the setting `name`: ResourceError if the storage does not answer,
        ConfigError if it refuses.
        """
        probe = f".probe-{secrets.token_hex(8)}"
        doing = "written"
        waiting = threading.Timer(
            _PATIENT_S, say, [f"waiting for an answer from {self.address} (at most {_PROBE_S:g} s)"]
        )
        waiting.daemon = True
        waiting.start()
        self._until = time.monotonic() + _PROBE_S
        try:
            self.write(probe, b"probe")
            doing = "listed"
            self.sizes()
            doing = "removed from"
            self.remove([probe])
        except StorageError as error:
            what = (
                "the credentials, their permissions and the quota"
                if error.is_final
                else "the network, or try again later"
            )
            words = error.words.replace(f"/{probe}", "").rstrip(".")
            text = f"{name}={self.address!r} cannot be {doing}: {words}: check the address, {what}"
            raise unusable(text, error) from None
        finally:
            self._until = math.inf
            waiting.cancel()

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the bytes of every file below `folder`, by its name relative to the address."""
        root = self._path(folder).rstrip("/")
        found = self._try(lambda system: system.find(root, detail=True, **self._limit()))
        start = len(self._root) + 1
        return {path[start:]: int(info["size"]) for path, info in found.items() if info["type"] == "file"}

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        content: bytes = self._try(lambda system: system.cat_file(self._path(name), **self._limit()))
        return content

    def get(self, name: str, target: Path) -> None:
        """Download a file to `target`, whose directory must exist."""
        self._try(lambda system: system.get_file(self._path(name), str(target)))

    def put(self, source: Path, name: str) -> None:
        """Upload the file `source` and verify what has arrived. An upload that does not verify is repeated.

        The size must be right. The MD5 digest of the content or of its parts is compared if the storage has computed one, as S3
        and Google Cloud Storage do. If there is no such digest, or it differs because the storage encrypts files, the file is
        read back.
        """
        self._try(lambda system: self._put(system, source, name))

    def write(self, name: str, content: bytes) -> None:
        """Write a small file and read it back."""
        self._try(lambda system: self._write(system, name, content))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, one after the other in this order."""
        for name in names:
            self._try(lambda system: _remove(system, self._path(name), **self._limit()))  # noqa: B023
            if scheme_of(self.address) == "file":
                self._remove_empty(Path(self._path(name)).parent)

    def _remove_empty(self, directory: Path) -> None:
        """Remove a directory of a mounted file system and those above it if they are empty, except that of the address."""
        with contextlib.suppress(OSError):
            while directory != Path(self._root):
                directory.rmdir()
                directory = directory.parent

    @property
    def _root(self) -> str:
        scheme, _, rest = self.address.partition("://")
        return rest if scheme != "file" else f"/{rest.lstrip('/')}"

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _put(self, system: Any, source: Path, name: str) -> None:
        parts = {"chunksize": _part_bytes(source)} if scheme_of(self.address) == "s3" else {}
        with self._arriving(name) as path:
            system.put_file(str(source), path, **parts, **self._limit(source.stat().st_size))
            info = system.info(path)
            if int(info["size"]) != source.stat().st_size:
                raise OSError(f"{name} has {info['size']} bytes after the upload, {source.stat().st_size} were sent")
            if _is_digest_of(info, source):
                return
            with system.open(path, "rb") as stored:
                if stream_digest(stored) != file_digest(source):
                    raise OSError(f"{name} does not have the content that was sent (digest differs)")

    def _write(self, system: Any, name: str, content: bytes) -> None:
        with self._arriving(name) as path:
            system.pipe_file(path, content, **self._limit(len(content)))
            if system.cat_file(path, **self._limit()) != content:
                raise OSError(f"{name} does not have the content that was sent")

    @contextlib.contextmanager
    def _arriving(self, name: str) -> Iterator[str]:
        """Yield the path to write `name` to. On a mounted file system, this is a temporary path that is renamed at the end."""
        path = self._path(name)
        if scheme_of(self.address) != "file":
            yield path
            return
        folder, _, file = path.rpartition("/")
        yield (staged := f"{folder}/.{file}.part")
        Path(staged).replace(path)

    def _limit(self, num_bytes: int | None = None) -> dict[str, float]:
        """Return the argument with the time limit of one call of fsspec, which uploads `num_bytes` or nothing.

        Without an upload, `_READ_S` ends a silent request. Workaround (aiohttp 3.14, no upstream issue known; may go when aiohttp has
        a time limit for this): a request that uploads waits for ever if the server does not read, or does not confirm the headers.
        """
        if scheme_of(self.address) == "file":
            return {}
        limit = math.inf if num_bytes is None else _READ_S + num_bytes / _LEAST_BYTES_PER_S
        limit = min(limit, max(1.0, self._until - time.monotonic()))
        return {"timeout": limit} if limit < math.inf else {}

    def _connect(self) -> Any:
        if self._system is None:
            import fsspec

            scheme = scheme_of(self.address)
            options = {"use_listings_cache": False, "skip_instance_cache": True, **_OPTIONS.get(scheme, {})}
            system = _google(options) if scheme == "gs" else fsspec.filesystem(scheme, **options)
            if scheme == "s3":
                system.retries = 1
            named = (each.split(":") for each in _ERRORS[scheme])
            self._errors = (
                OSError,
                ValueError,
                *(getattr(importlib.import_module(module), each) for module, each in named),
            )
            self._system = system
        return self._system

    def _try(self, request: Callable[[Any], T]) -> T:
        """Return what `request` returns. Repeat the request while it fails with an error that may be temporary."""
        system = self._connect()
        for attempt in range(1, TRIES + 1):
            try:
                return request(system)
            except self._errors as raised:
                error = raised
            words = _words(error)
            is_final = isinstance(error, (PermissionError, FileNotFoundError)) or bool(_FINAL.search(words))
            if (
                is_final
                or attempt == TRIES
                or time.monotonic() >= self._until
                or self.pause(_FIRST_PAUSE_S * 2 ** (attempt - 1))
            ):
                break
        if scheme_of(self.address) == "gs" and system.credentials.credentials is None:
            words += "; no credentials of Google Cloud were found"
        if not is_final and attempt > 1:
            words += f" (after {attempt} attempts)"
        raise StorageError(words, is_missing=isinstance(error, FileNotFoundError), is_final=is_final) from None


def _google(options: Mapping[str, Any]) -> Any:
    """Return a file system of gcsfs that attempts a request once. From now on, gcsfs logs no failures: this module reports them."""
    import aiohttp
    import fsspec
    from google.auth.exceptions import DefaultCredentialsError

    for name in ("gcsfs", "google.auth"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S)
    options = {**options, "requests_timeout": timeout}
    try:
        # Without the name of a method, gcsfs asks the metadata server of a virtual machine twice.
        system = fsspec.filesystem("gs", token="google_default", **options)
    except DefaultCredentialsError:  # the usual class would look for credentials again before each request
        system = importlib.import_module("gcsfs.core").GCSFileSystem(token="anon", **options)
    system._request = functools.partial(type(system)._request.__wrapped__, system)
    return system


def _remove(system: Any, path: str, **limit: float) -> None:
    try:
        system.rm_file(path, **limit)
    except FileNotFoundError:  # an earlier attempt removed it, and its answer was lost
        return


def _words(error: BaseException) -> str:
    """Return the message of an error in one line, without credentials of an address."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, TimeoutError) and not text:
        text = "the server does not answer"
    words = " ".join(str(text).split()) or type(error).__name__
    words = re.sub(r"//[^/@\s]*@", "//", words)
    if isinstance(error, FileNotFoundError) and " " not in words:
        words = f"{words} does not exist"
    return words if len(words) <= _MAX_WORDS else f"{words[:_MAX_WORDS]}..."


def _is_digest_of(info: Mapping[str, Any], source: Path) -> bool:
    """Return whether the storage's own digest equals that of `source`. If it does not, the digest may be of another kind."""
    if isinstance(given := info.get("md5Hash"), str):  # Google Cloud Storage
        return base64.b64decode(given) == bytes(_md5(source).digest())
    etag = str(info.get("ETag", "")).strip('"')
    if re.fullmatch(r"[0-9a-f]{32}", etag):
        return etag == str(_md5(source).hexdigest())
    if re.fullmatch(r"[0-9a-f]{32}-\d+", etag):  # an upload in parts: the digest of the digests
        return etag == _md5_of_parts(source)
    return False


def _md5(source: Path) -> Any:
    with open(source, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))


def _part_bytes(source: Path) -> int:
    return max(_PART_BYTES, -(-source.stat().st_size // _MAX_PARTS))


def _md5_of_parts(source: Path) -> str:
    digests, size = [], _part_bytes(source)
    with open(source, "rb") as file:
        while part := file.read(size):
            digests.append(hashlib.md5(part, usedforsecurity=False).digest())
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"
