"""Parquet files from a repository of Hugging Face, pinned to a commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download

from dataset.cli import SourceError
from dataset.fetch.source import Shard, delete_downloads
from dataset.files import file_digest


def parquet_shards(repository: str, folder: Path, revision: str) -> tuple[str, list[Shard]]:
    """The commit, and the parquet files of a repository at it, whose SHA-256 is checked on arrival.

    Args:
        repository: of a data set on Hugging Face.
        folder: where the shards come to, each when it is needed.
        revision: a commit (a prefix is enough), branch or tag.

    Raises:
        SourceError: when the repository cannot be listed, or has no parquet. huggingface_hub retries, and
            goes on with half files.
    """
    api = HfApi()
    refused = f"cannot list {repository} at revision {revision} on Hugging Face"
    with _named(refused, "check the network and --revision, or give a local copy with --source DIR"):
        commits = api.list_repo_commits(repository, repo_type="dataset")
        commit = next((c.commit_id for c in commits if c.commit_id.startswith(revision)), None)
        if commit is None:
            commit = api.dataset_info(repository, revision=revision).sha
        tree = list(api.list_repo_tree(repository, recursive=True, revision=commit, repo_type="dataset"))

    def shard(file: Any) -> Shard:
        def get() -> Path:
            target = folder / str(file.path)
            checked = target.with_name(target.name + ".checked")
            if target.is_file() and checked.exists() and target.stat().st_size == file.size:
                return target
            with _named(
                f"cannot download {file.path}",
                "the part that was downloaded is kept: run the command again",
            ):
                hf_hub_download(repository, file.path, repo_type="dataset", revision=commit, local_dir=folder)
            digest = file_digest(target)
            if file.lfs is not None and digest != file.lfs.sha256:
                target.unlink()
                raise SourceError(
                    f"{file.path} was damaged in the download (SHA-256 {digest}); run the command again"
                )
            checked.touch()
            return target

        return Shard(file.path, file.size, get, f"{commit} {file.path} {file.size}")

    parquet = [file for file in tree if file.path.endswith(".parquet")]
    shards = [shard(file) for file in sorted(parquet, key=lambda file: str(file.path))]
    if not shards:
        raise SourceError(
            f"{repository} has no *.parquet files at revision {revision}; try another --revision"
        )
    return commit, shards


@contextmanager
def _named(failure: str, remedy: str) -> Iterator[None]:
    """Turn the library's errors, which come from three libraries and several versions, into a SourceError."""
    try:
        yield
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SourceError(f"{failure} ({text}); {remedy}") from None


def discard(folder: Path, shards: Sequence[Shard]) -> None:
    """Delete what was downloaded and huggingface_hub's notes about it: nothing else, as the user's own cache
    may be in the same place."""
    names, notes = [shard.name for shard in shards], ".cache/huggingface"
    about = [f"{notes}/download/{name}{suffix}" for name in names for suffix in (".metadata", ".lock")]
    delete_downloads(folder, [*names, *about])
    marks = {f"{notes}/{name}" for name in (".gitignore", ".gitignore.lock", "CACHEDIR.TAG")}
    if {f"{notes}/{path.name}" for path in (folder / notes).glob("*")} <= marks:
        delete_downloads(folder, sorted(marks))
