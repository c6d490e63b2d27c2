"""Which libraries are there, when files and folders of their names lie beside the script."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from distributed.config.libraries import check_not_hidden, is_installed
from distributed.config.registry import backend_entry, missing_libraries, require_installed
from distributed.errors import ResourceError


@pytest.fixture(autouse=True)
def beside_the_script(monkeypatch, tmp_path):
    """A folder of data, a file and a package."""
    (tmp_path / "folder_of_data").mkdir()
    (tmp_path / "file_of_code.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])


def test_a_folder_without_code_is_no_library():
    assert [is_installed(name) for name in ("nothing", "folder_of_data", "file_of_code", "package")] == [
        False, False, True, True,
    ]  # fmt: skip
    with pytest.raises(ResourceError, match=r"file_of_code\.py hides the library file_of_code: rename that file"):
        check_not_hidden("file_of_code")
    check_not_hidden("package")


def test_a_backend_whose_library_is_a_folder_is_refused():
    entry = dataclasses.replace(backend_entry("ray"), requires=("package", "folder_of_data"))
    assert missing_libraries(entry) == ("folder_of_data",)
    with pytest.raises(ResourceError, match=r"backend 'ray' needs folder_of_data, which is not installed: run pip"):
        require_installed(entry)
