"""A stand-in for kubectl, which records what it is asked and answers what a test tells it to. No server is behind it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

_SCRIPT = """#!{python}
import json, pathlib, sys, time
here, words = pathlib.Path({here!r}), sys.argv[1:]
verb = words[2] if words[0] == "--namespace" else words[0]
given = None
if "-f" in words:
    name = words[words.index("-f") + 1]
    given = sys.stdin.read() if name == "-" else pathlib.Path(name).read_text()
with open(here / "calls", "a") as calls:
    calls.write(json.dumps([words, given]) + "\\n")
answer = here / verb
out, err, code, seconds, then = json.loads(answer.read_text()) if answer.exists() else ("", "", 0, 0, None)
if then is not None:
    answer.write_text(json.dumps([then, err, code, seconds, None]))
time.sleep(seconds)
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


class FakeKubectl:
    """A `kubectl` in `directory`, which a test puts on PATH."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory, self._answers = directory, directory / "answers"
        self._answers.mkdir()
        file = directory / "kubectl"
        file.write_text(_SCRIPT.format(python=sys.executable, here=str(self._answers)))
        file.chmod(0o755)

    def answer(
        self, verb: str, out: str = "", *, err: str = "", code: int = 0, seconds: float = 0, then: str | None = None
    ) -> None:
        """Set what `kubectl VERB` prints and returns from now on. After the first call it prints `then`, if that is given."""
        (self._answers / verb).write_text(json.dumps([out, err, code, seconds, then]))

    @property
    def calls(self) -> list[list[str]]:
        """The words of each call so far."""
        return [words for words, _ in self._calls()]

    @property
    def applied(self) -> list[dict[str, Any]]:
        """The objects that were handed over by `kubectl apply`."""
        given = [text for words, text in self._calls() if "apply" in words]
        return [document for text in given for document in yaml.safe_load_all(text)]

    def _calls(self) -> list[tuple[list[str], str]]:
        file = self._answers / "calls"
        return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
