"""FLAIR from the network: Apple's archives, or ``apple/flair`` on Hugging Face; each file in its turn."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download

from dataset.fetch.http import PATIENT, Patience, SourceError, fetch, remote
from dataset.files import file_digest
from dataset.flair.sources import LICENCE, METADATA, ArchiveSource, ParquetSource, Shard, Source

REPOSITORY = "apple/flair"
REVISION = "227b0632"
"""The commit of ``apple/flair`` that is downloaded (a prefix is enough)."""
APPLE = "https://docs-assets.developer.apple.com/ml-research/datasets/flair/"
NUM_ARCHIVES, NUM_IMAGES = 43, 429_078  # of the whole of FLAIR


def apple(folder: Path, base: str = APPLE, patience: Patience = PATIENT) -> Source:
    """Apple's archives of 256-pixel images; downloaded to ``folder``, each when it is needed."""

    def shard(path: str) -> Shard:
        target, url = folder / Path(path).name, base + path
        there = remote(url, patience)

        def get() -> Path:
            fetch(url, target, there, patience)
            return target

        return Shard(target.name, there.size, get, f"{url} {there.size} {there.version}")

    metadata = shard(f"labels/{METADATA}")
    archives = [shard(f"images/small/small_images-{i:02d}.tar.gz") for i in range(NUM_ARCHIVES)]
    size = sum(one.size for one in archives)

    def discard() -> None:
        _delete(folder, [one.name for one in (metadata, *archives)])

    provenance = {"source": base, "revision": None, "licence": LICENCE, "format": "archives"}
    return ArchiveSource(
        metadata,
        archives,
        None,
        NUM_IMAGES,
        size,
        provenance,
        _to_download([metadata, *archives], folder),
        discard,
    )


def hugging_face(folder: Path, revision: str = REVISION, endpoint: str | None = None) -> Source:
    """``apple/flair`` at one commit; shards come to ``folder`` when needed, and their SHA-256 is checked.

    ``endpoint`` is another server than huggingface.co; huggingface_hub retries, and goes on with half files.
    """
    api = HfApi(endpoint=endpoint)
    try:
        commits = api.list_repo_commits(REPOSITORY, repo_type="dataset")
        commit = next((c.commit_id for c in commits if c.commit_id.startswith(revision)), None)
        if commit is None:
            commit = api.dataset_info(REPOSITORY, revision=revision).sha
        tree = list(api.list_repo_tree(REPOSITORY, recursive=True, revision=commit, repo_type="dataset"))
    except Exception as error:  # its errors come from three libraries and several versions of them
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SourceError(
            f"cannot list {REPOSITORY} at revision {revision} on Hugging Face ({text}); check the network "
            "and --revision, or give a local copy with --source DIR"
        ) from None

    def shard(file: Any) -> Shard:
        def get() -> Path:
            target = folder / str(file.path)
            checked = target.with_name(target.name + ".checked")
            if target.is_file() and checked.exists() and target.stat().st_size == file.size:
                return target
            try:
                hf_hub_download(
                    REPOSITORY,
                    file.path,
                    repo_type="dataset",
                    revision=commit,
                    local_dir=folder,
                    endpoint=endpoint,
                )
            except Exception as error:
                text = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise SourceError(
                    f"cannot download {file.path} ({text}); what has arrived is kept: run the command again"
                ) from None
            digest = file_digest(target)
            if file.lfs is not None and digest != file.lfs.sha256:
                target.unlink()
                raise SourceError(f"{file.path} arrived damaged (SHA-256 {digest}); run the command again")
            checked.touch()
            return target

        return Shard(file.path, file.size, get, f"{commit} {file.path} {file.size}")

    shards = [
        shard(one) for one in sorted(tree, key=lambda one: str(one.path)) if one.path.endswith(".parquet")
    ]
    if not shards:
        raise SourceError(f"{REPOSITORY} holds no parquet at revision {revision}; try another --revision")

    def discard() -> None:
        shutil.rmtree(folder / ".cache" / "huggingface", ignore_errors=True)  # huggingface_hub's own notes
        _delete(folder, [*(one.name for one in shards), ".cache/huggingface"])

    provenance = {
        "source": f"https://huggingface.co/datasets/{REPOSITORY}",
        "revision": commit,
        "licence": LICENCE,
        "format": "parquet",
    }
    return ParquetSource(shards, NUM_IMAGES, provenance, _to_download(shards, folder), discard)


def _delete(folder: Path, names: Sequence[str]) -> None:
    """Delete these files of a download folder, and folders that this leaves empty; nothing else."""
    for name in names:
        for path in (folder / name, folder / f"{name}.checked"):
            path.unlink(missing_ok=True)
    for parent in dict.fromkeys([*((folder / name).parent for name in names), folder]):
        with contextlib.suppress(OSError):  # it is not empty
            parent.rmdir()


def _to_download(shards: Sequence[Shard], folder: Path) -> int:
    here = {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return sum(shard.size for shard in shards if here.get(Path(shard.name).name) != shard.size)
