"""A checkpoint is whole or refused, the one before it is kept, and one process owns a run."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pfl_ext import checkpoint


def save(path: Path, step: int) -> None:
    tensors = {"w": torch.full((3, 2), float(step)), "b": torch.ones(4, dtype=torch.bfloat16) * step}
    checkpoint.save(path, tensors, {"step": step}, keep_previous=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_checkpoint_before_the_newest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    for step in (1, 2, 3):
        save(path, step)
    assert names(tmp_path) == ["last.previous.safetensors", "last.safetensors"]
    assert checkpoint.load(path)[1] == {"step": 3}
    assert checkpoint.load(checkpoint.previous(path))[1] == {"step": 2}
    assert checkpoint.load_newest(path)[1:] == ({"step": 3}, None)


def test_tensors_that_share_memory_are_saved_apart(tmp_path: Path) -> None:
    """An algorithm's mean of models is its model before averaging begins; safetensors refuses such pairs."""
    model, path = torch.arange(6.0), tmp_path / "last.safetensors"
    checkpoint.save(path, {"x": model, "mean": model, "part": model[2:4]}, {})
    found, _ = checkpoint.load(path)
    assert found["x"].equal(model)
    assert found["mean"].equal(model)
    assert found["part"].equal(model[2:4])


@pytest.mark.parametrize("hard_links", [True, False])
def test_the_name_is_kept_without_hard_links_too(
    tmp_path: Path, hard_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hard_links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError("no links")))
    path = tmp_path / "last.safetensors"
    save(path, 1)
    save(path, 2)
    assert checkpoint.load(checkpoint.previous(path))[1] == {"step": 1}
    assert len(names(tmp_path)) == 2


def test_a_kill_between_the_second_name_and_the_first_leaves_nothing_behind(tmp_path: Path) -> None:
    """Both names are then of one file, which renaming leaves as it is (found by `kill_training`)."""
    path = tmp_path / "last.safetensors"
    save(path, 1)
    os.link(path, checkpoint.previous(path))
    save(path, 2)
    assert names(tmp_path) == ["last.previous.safetensors", "last.safetensors"]
    assert checkpoint.load(path)[1] == {"step": 2}
    assert checkpoint.load(checkpoint.previous(path))[1] == {"step": 1}


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_or_a_cut_is_found_and_the_one_before_is_loaded(
    tmp_path: Path, data: st.DataObject
) -> None:
    """safetensors alone accepts a flipped bit in a tensor: the checksum does not."""
    path = tmp_path / "last.safetensors"
    save(path, 1)
    save(path, 2)
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del whole[at:]
    path.unlink()  # not through the hard link
    path.write_bytes(whole)
    tensors, state, sentence = checkpoint.load_newest(path)
    if sentence is None:  # a bit that says nothing: white space of the header
        assert state == {"step": 2}
        assert torch.equal(tensors["w"], torch.full((3, 2), 2.0))
        return
    assert "last.safetensors is not a whole checkpoint" in sentence
    assert "going on from the one before it" in sentence
    assert state == {"step": 1}
    assert torch.equal(tensors["w"], torch.full((3, 2), 1.0))


def altered(path: Path, change: str) -> None:
    """Change what a checkpoint says, and keep the checksum that it was written with."""
    with safetensors.safe_open(path, framework="pt") as file:
        text, digest = json.loads(file.metadata()["checkpoint"])
    tensors = safetensors.torch.load_file(path)
    match change:
        case "step":
            text = text.replace('"step": 1', '"step": 2')
        case "swapped dimensions":
            tensors["w"] = tensors["w"].reshape(2, 3)
        case "type":
            tensors["b"] = tensors["b"].view(torch.float16)
        case "name":
            tensors["v"] = tensors.pop("w")
        case "value":
            tensors["w"][2, 1] = 7
        case "lost":
            del tensors["b"]
    safetensors.torch.save_file(tensors, path, metadata={"checkpoint": json.dumps([text, digest])})


@pytest.mark.parametrize("change", ["step", "swapped dimensions", "type", "name", "value", "lost", "nothing"])
def test_the_checksum_covers_the_state_and_all_that_a_tensor_is(change: str, tmp_path: Path) -> None:
    """Each change leaves a sound safetensors file with the same bytes of tensors, or nearly so."""
    path = tmp_path / "last.safetensors"
    save(path, 1)
    altered(path, change)
    if change == "nothing":
        assert checkpoint.load(path)[1] == {"step": 1}
        return
    with pytest.raises(ValueError, match=r"last\.safetensors is not a whole checkpoint \(its checksum"):
        checkpoint.load(path)


def test_what_the_disk_gives_back_otherwise_never_takes_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.safetensors"
    save(path, 1)
    real = safetensors.torch.save_file

    def rotten(tensors: dict[str, torch.Tensor], target: Path, metadata: dict[str, str]) -> None:
        real(tensors, target, metadata=metadata)
        content = bytearray(target.read_bytes())
        content[-1] ^= 1
        target.write_bytes(content)

    monkeypatch.setattr(checkpoint, "save_file", rotten)
    with pytest.raises(OSError, match=r"last\.safetensors cannot be written: .*checksum does not agree"):
        save(path, 2)
    assert checkpoint.load(path)[1] == {"step": 1}
    assert names(tmp_path) == ["last.safetensors"]


def test_the_same_content_is_the_same_bytes(tmp_path: Path) -> None:
    """Models are compared by the hash of their file."""
    tensors = {name: torch.ones(3) for name in "abcdefgh"}
    for number in range(8):
        checkpoint.save(tmp_path / f"{number}.safetensors", tensors, {"x": 1, "y": 2})
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_two_damaged_checkpoints_are_one_sentence_with_the_mend(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    save(path, 1)
    save(path, 2)
    for one in (path, checkpoint.previous(path)):
        one.write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="nor is there one before it: choose another --run_dir") as caught:
        checkpoint.load_newest(path)
    assert "\n" not in str(caught.value)


def test_a_directory_has_one_owner_and_a_dead_owner_none(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / ".last.safetensors.1.partial").write_text("half")
    (tmp_path / ".config.yaml.x.partial").write_text("half")
    code = (
        "import sys; from pathlib import Path; from pfl_ext.checkpoint import sole_owner\n"
        "with sole_owner(Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"mine\n"
        with pytest.raises(ValueError, match="is in use by another process"), checkpoint.sole_owner(tmp_path):
            pass
        other.kill()
    with checkpoint.sole_owner(tmp_path):
        assert not list(tmp_path.rglob("*.partial"))


def test_files_of_a_run_in_an_inner_directory_stay(tmp_path: Path) -> None:
    """A run in ``runs`` has the runs ``runs/a`` and ``runs/b`` in its directory, which may be training."""
    for folder in ("checkpoint", "plots", "a", "a/checkpoint"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / ".last.safetensors.1.partial").write_text("half")
        (tmp_path / folder / ".tmpAb12Cd").write_text("half")
    with checkpoint.sole_owner(tmp_path):
        left = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob(".*[!k]")}
        assert left == {"a", "a/checkpoint"}


def test_a_directory_that_is_not_there_is_made_with_those_above_it(tmp_path: Path) -> None:
    with checkpoint.sole_owner(tmp_path / "runs" / "first"):
        assert (tmp_path / "runs" / "first").is_dir()


def test_a_read_only_file_system_is_one_clause_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the lock of an existing directory; the kernel's own error names no remedy and no writing."""
    real = os.open

    def read_only(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    found = f"^{tmp_path} cannot be written: Read-only file system$"
    with pytest.raises(OSError, match=found), checkpoint.sole_owner(tmp_path):
        pass


def test_a_folder_that_cannot_be_flushed_is_named_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network's disk, which says only then that it is full."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve() == tmp_path:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=r"last\.safetensors cannot be written: No space left on device"):
        checkpoint.save(tmp_path / "last.safetensors", {}, {})
