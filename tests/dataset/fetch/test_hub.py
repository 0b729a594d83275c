"""Hugging Face's shards, from a hub that this machine plays."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub._local_folder import get_local_download_paths

from dataset.fetch import http, hugging_face
from dataset.flair import sources
from tests.dataset.drawn import (
    records,
    write_parquet,
)
from tests.dataset.fetch.test_sources import QUICK, expected, found_in


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PATIENCE", QUICK)


COMMIT = "227b0632" + "0" * 32


@dataclass
class Hub:
    """Stands for huggingface_hub: lists and 'downloads' the shards of a folder."""

    root: Path
    downloads: list[tuple[str, str]] = field(default_factory=list)
    damage: bool = False

    def list_repo_commits(self, repository: str, *, repo_type: str) -> list[Any]:
        assert (repository, repo_type) == ("apple/flair", "dataset")
        return [SimpleNamespace(commit_id="f" * 40), SimpleNamespace(commit_id=COMMIT)]

    def dataset_info(self, repository: str, *, revision: str) -> Any:
        raise ConnectionError(f"no revision {revision}\nin apple/flair")

    def list_repo_tree(
        self, repository: str, *, recursive: bool, revision: str, repo_type: str
    ) -> Iterator[Any]:
        assert revision == COMMIT
        yield SimpleNamespace(path="README.md", size=10, lfs=None)
        for path in sorted(self.root.rglob("*.parquet"), reverse=True):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            lfs = SimpleNamespace(sha256=digest)
            yield SimpleNamespace(path=str(path.relative_to(self.root)), size=path.stat().st_size, lfs=lfs)

    def hf_hub_download(
        self, repository: str, path: str, *, repo_type: str, revision: str, local_dir: Path, **_: object
    ) -> str:
        self.downloads.append((path, revision))
        target = local_dir / path
        target.parent.mkdir(parents=True, exist_ok=True)
        notes = get_local_download_paths(local_dir, path)  # huggingface_hub's own places for its notes
        notes.metadata_path.write_text("etag")
        content = bytearray((self.root / path).read_bytes())
        if self.damage:
            content[100] ^= 1
        target.write_bytes(content)
        return str(target)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    stand_in = Hub(write_parquet(tmp_path / "hub", records(30)))
    monkeypatch.setattr(hugging_face, "HfApi", lambda **_: stand_in)
    monkeypatch.setattr(hugging_face, "hf_hub_download", stand_in.hf_hub_download)
    return stand_in


def test_hugging_faces_shards_come_from_the_pinned_commit_one_by_one(tmp_path: Path, hub: Hub) -> None:
    source = sources.hugging_face(tmp_path / "down", sources.REVISION)
    assert source.provenance["revision"] == COMMIT
    assert source.download_bytes == sum(path.stat().st_size for path in hub.root.rglob("*.parquet"))
    next(iter(source.records(0)))
    assert hub.downloads == [("data/train-00000-of-00003.parquet", COMMIT)]
    assert found_in(source) == expected(records(30))
    assert len(hub.downloads) == 3
    again = sources.hugging_face(tmp_path / "down", sources.REVISION)  # a later run: all is there
    assert again.download_bytes == 0
    assert found_in(again) == expected(records(30))
    assert len(hub.downloads) == 3
    own = [
        tmp_path / "down" / ".cache" / "huggingface" / name for name in ("token", "hub/models--a/config.json")
    ]
    for path in own:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("own")
    again.discard()
    assert [path.read_text() for path in own] == ["own", "own"], "the cache of a user whose home this is"
    assert not (tmp_path / "down" / "data").exists()
    own[0].unlink()
    shutil.rmtree(own[1].parents[1])
    again.discard()
    assert not (tmp_path / "down").exists()


def test_a_shard_that_arrives_damaged_is_not_kept(tmp_path: Path, hub: Hub) -> None:
    hub.damage = True
    with pytest.raises(OSError, match=r"data/train-00000-of-00003\.parquet was damaged in the download"):
        found_in(sources.hugging_face(tmp_path / "down", sources.REVISION))
    hub.damage = False
    assert found_in(sources.hugging_face(tmp_path / "down", sources.REVISION)) == expected(records(30))


def test_an_unknown_revision_is_said_in_one_line(tmp_path: Path, hub: Hub) -> None:
    with pytest.raises(
        OSError, match=r"cannot list apple/flair at revision abc .*no revision abc.*--source DIR"
    ) as caught:
        sources.hugging_face(tmp_path / "down", "abc")
    assert "\n" not in str(caught.value)
