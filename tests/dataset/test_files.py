from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import sys
from pathlib import Path

import pytest

from dataset.files import OWN, file_digest, locked, own_modules, replacing, write_bytes


def test_a_block_that_raises_leaves_the_old_content_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_bytes(path, b"old", mode=0o600)
    with contextlib.suppress(KeyError), replacing(path) as temporary:
        temporary.write_bytes(b"half of the new")
        raise KeyError
    assert path.read_bytes() == b"old"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "mask, mode, expected", [(0o002, 0o666, 0o664), (0o077, 0o666, 0o600), (0o002, 0o600, 0o600)]
)
def test_files_have_the_rights_that_the_umask_leaves(
    mask: int, mode: int, expected: int, tmp_path: Path
) -> None:
    """Also if a library replaces the temporary file by one of its own."""
    before = os.umask(mask)
    try:
        write_bytes(tmp_path / "written", b"", mode)
        with replacing(tmp_path / "replaced", mode) as temporary:
            assert temporary.stat().st_mode & 0o777 == expected, "a secret is never open to others"
            temporary.unlink()
            temporary.touch(0o600)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [expected] * 2


def test_a_lock_is_held_once_and_free_after_its_block(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, "it is taken"):
        with pytest.raises(ValueError, match="it is taken"), locked(path, "it is taken"):
            pass
        with pytest.raises(ValueError, match="it is taken"), locked(path, "it is taken"):
            pass
    with locked(path, "it is taken"):
        pass


def test_a_file_system_without_locks_grants_every_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with locked(tmp_path / "lock", "it is taken"), locked(tmp_path / "lock", "it is taken"):
        pass


def test_a_digest_is_that_of_all_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000  # more than one block
    (tmp_path / "file").write_bytes(content)
    assert file_digest(tmp_path / "file") == hashlib.sha256(content).hexdigest()
    assert file_digest(tmp_path / "file", "md5") == hashlib.md5(content, usedforsecurity=False).hexdigest()


def test_ones_own_file_is_named_by_its_path_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ideas").mkdir()
    for name in ("by_path", "beside", "json"):
        (tmp_path / "ideas" / f"{name}.py").write_text(
            "import beside\n" if name == "by_path" else "here = 1\n"
        )
    for named in ("ideas/by_path.py", f" {tmp_path}/ideas/by_path.py,beside"):
        monkeypatch.setenv(OWN, named)
        assert Path(str(own_modules()[0].__file__)).stem == "by_path"
    (tmp_path / "ideas" / "a_package").mkdir()
    (tmp_path / "ideas" / "a_package" / "__init__.py").write_text("from a_package import inner\n")
    (tmp_path / "ideas" / "a_package" / "inner.py").write_text("")
    monkeypatch.setenv(OWN, "ideas/a_package/")
    assert own_modules()[0].__name__ == "a_package"
    monkeypatch.setenv(OWN, "ideas/json.py")
    with pytest.raises(
        ValueError, match=r"names ideas/json.py, but Python imports /.*json/__init__.py under the name json"
    ):
        own_modules()
    monkeypatch.setenv(OWN, "ideas/none.py")
    with pytest.raises(ValueError, match=r"names ideas/none.py, which cannot be imported \(ModuleNotFound"):
        own_modules()
    for name in ("by_path", "beside", "a_package", "a_package.inner"):
        del sys.modules[name]
