"""Servers that are busy, slow, short or wrong: what is there in the end is right, or is not there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import formatdate
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest

from dataset.cli import SourceError, run
from dataset.fetch import http, hugging_face
from dataset.fetch.http import Patience, fetch, retry_after
from dataset.fetch.http import remote as remote_file
from dataset.flair import download_preprocess, sources
from tests.dataset.drawn import assert_paired, records, write_archives, write_parquet
from tests.dataset.fetch.faulty_server import FaultyServer, serving
from tests.dataset.fetch.test_sources import expected, found_in

QUICK = Patience(attempts=4, timeout_s=0.5, pause_s=0.01)
CONTENT = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PATIENCE", QUICK)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FaultyServer]:
    with serving(tmp_path / "served") as state:
        (state.root / "f").write_bytes(CONTENT)
        yield state


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("fault", [429, 500, 502, 503, 504, "short", "slow", "long"])
def test_what_passes_is_waited_for(tmp_path: Path, server: FaultyServer, fault: int | str) -> None:
    server.faults["f"] = [fault, fault]
    fetch(server.url + "f", tmp_path / "got", remote_file(server.url + "f"))
    assert (tmp_path / "got").read_bytes() == CONTENT
    assert names(tmp_path) == {"got"}
    if fault in ("short", "slow"):
        assert server.asked[1:] == [("/f", "bytes=5120-"), ("/f", "bytes=7680-")]  # nothing is fetched twice


@pytest.mark.parametrize(
    "fault, said",
    [
        (404, "404"),
        (403, "403"),
        ("html", "it now has 26 bytes, but had 10,240 before"),
        ("changed", "the file on the server changed during the download"),
    ],
)
def test_what_does_not_pass_is_said_at_once_and_nothing_is_kept_for_whole(
    tmp_path: Path, server: FaultyServer, fault: int | str, said: str
) -> None:
    there = remote_file(server.url + "f")
    server.faults["f"] = ["short", fault, fault]
    with pytest.raises(SourceError, match=said):
        fetch(server.url + "f", tmp_path / "got", there)
    assert server.faults["f"] == [fault]  # asked once
    assert not (tmp_path / "got").exists()
    server.faults["f"] = []
    fetch(server.url + "f", tmp_path / "got", there)
    assert (tmp_path / "got").read_bytes() == CONTENT


def test_a_server_that_stays_busy_is_given_up_in_one_line(tmp_path: Path, server: FaultyServer) -> None:
    there = remote_file(server.url + "f")
    server.faults["f"] = [503] * 9
    with pytest.raises(SourceError, match=r"cannot download http.*503.*run the command again later"):
        fetch(server.url + "f", tmp_path / "got", there)
    assert len(server.faults["f"]) == 9 - QUICK.attempts


def test_retry_after_is_heeded_in_seconds_or_as_a_date(tmp_path: Path, server: FaultyServer) -> None:
    assert retry_after("7", 1) == 7
    assert retry_after("soon", 1) == 1
    assert 50 < retry_after(formatdate(time.time() + 60, usegmt=True), 1) < 61
    assert retry_after(formatdate(time.time() - 3600, usegmt=True), 4) == 4, "a clock that is ahead"
    there = remote_file(server.url + "f")
    server.faults["f"], server.retry_after = [429], "1"
    started = time.monotonic()
    fetch(server.url + "f", tmp_path / "got", there)
    assert time.monotonic() - started >= 1


def test_a_half_file_of_another_version_is_begun_anew(tmp_path: Path, server: FaultyServer) -> None:
    server.faults["f"] = ["short", 404]
    with pytest.raises(SourceError):
        fetch(server.url + "f", tmp_path / "got", remote_file(server.url + "f"))
    assert (tmp_path / "got.part").stat().st_size == len(CONTENT) // 2
    (server.root / "f").write_bytes(CONTENT[::-1])
    fetch(server.url + "f", tmp_path / "got", remote_file(server.url + "f"))
    assert (tmp_path / "got").read_bytes() == CONTENT[::-1]


def test_apples_archives_survive_a_bad_day(
    tmp_path: Path, server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = records(40)
    write_archives(server.root, rows)
    for folder, pattern in (("labels", "*.json"), ("images/small", "*.gz")):
        (server.root / folder).mkdir(parents=True)
        for path in server.root.glob(pattern):
            path.rename(server.root / folder / path.name)
    first, second = (f"images/small/small_images-0{i}.tar.gz" for i in range(2))
    server.faults = {
        "labels/labels_and_metadata.json": [429, "slow"],
        first: ["short", 500],
        second: ["flipped"],
    }
    monkeypatch.setattr(sources, "NUM_ARCHIVES", 2)
    source = sources.apple(tmp_path / "down", server.url)
    with pytest.raises(ValueError, match=r"small_images-01\.tar\.gz is damaged .*delete it"):
        found_in(source)
    (tmp_path / "down" / "small_images-01.tar.gz").unlink()
    assert found_in(sources.apple(tmp_path / "down", server.url)) == expected(rows)


def test_hugging_faces_shards_survive_a_bad_day(
    tmp_path: Path, server: FaultyServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through huggingface_hub itself: each command ends with one line, and the next goes on."""
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    rows = records(30)
    write_parquet(server.root, rows)
    shards = [f"data/train-0000{i}-of-00003.parquet" for i in range(3)]
    server.faults = {shards[0]: [500], shards[1]: ["flipped"], shards[2]: [404]}
    for name in ("HfApi", "hf_hub_download"):
        there = partial(getattr(huggingface_hub, name), endpoint=server.url[:-1])
        monkeypatch.setattr(hugging_face, name, there)
    output = tmp_path / "f.hdf5"
    codes: list[int] = []
    while not output.exists() and len(codes) < 5:
        codes.append(run(download_preprocess.main, ["--output_file", str(output)]))
        said = capsys.readouterr().err.replace("\r", "\n")
        assert said.count("error: ") == (codes[-1] == 2)
    assert codes[-1] == 0
    assert codes.count(2) >= 2  # the flipped bit is found by its SHA-256, the 404 is said
    assert_paired(output, rows)
    assert names(tmp_path) == {"f.hdf5"}
    assert not (tmp_path / "f.hdf5.download").exists()
    assert not (tmp_path / "f.hdf5.partial").exists()
