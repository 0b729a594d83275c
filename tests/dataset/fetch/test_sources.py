"""Sources: a local folder of either layout, Apple's server and Hugging Face, both played by this machine."""

from __future__ import annotations

import json
import tarfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset.fetch import http, json_stream
from dataset.fetch.http import Patience, Remote, fetch
from dataset.fetch.http import remote as remote_file
from dataset.fetch.parquet import ParquetSource
from dataset.fetch.source import Shard, Source
from dataset.flair import sources
from dataset.flair.sources import local
from dataset.store.columns import schema
from tests.dataset.drawn import (
    Record,
    add_member,
    records,
    write_archives,
    write_files,
    write_metadata,
    write_mixed,
    write_parquet,
)

QUICK = Patience(attempts=5, timeout_s=5, pause_s=0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PATIENCE", QUICK)


def found_in(source: Source) -> dict[str, tuple[Any, ...]]:
    """What a source says of each image; the second reading must agree with the first."""
    found: dict[str, tuple[Any, ...]] = {}
    first: list[Any] = []
    parts = range(len(source.parts))
    for batch in (batch for part in parts for batch in source.records(part)):
        for row, image in zip(batch.table.to_pylist(), batch.images):
            image = None if image is None else bytes(image)
            first.append(image)
            found[row["image_id"]] = (
                row["user_id"],
                row["partition"],
                row["labels"],
                row["fine_grained_labels"],
                image,
            )
    images = (image for part in parts for batch in source.images(part) for image in batch)
    again = [None if image is None else bytes(image) for image in images]
    assert again == first
    return found


def expected(rows: Sequence[Record]) -> dict[str, tuple[Any, ...]]:
    return {
        str(one.image_id): (one.user_id, one.partition, one.labels, one.fine_grained_labels, one.image)
        for one in rows
    }


@pytest.mark.parametrize("write", [write_parquet, write_files, write_archives, write_mixed])
def test_each_local_layout_gives_the_same_records(tmp_path: Path, write: Any) -> None:
    rows = records(150)
    source = local(write(tmp_path / "flair", rows))
    assert source.num_images == 150
    assert source.download_bytes == 0
    assert found_in(source) == expected(rows)


def test_hidden_files_are_no_shards(tmp_path: Path) -> None:
    rows = records(9)
    folder = write_parquet(tmp_path / "flair", rows)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "unfinished.parquet").write_bytes(b"PAR1")
    assert found_in(local(folder)) == expected(rows)


def test_members_of_an_archive_cannot_reach_outside_or_pose_as_images(tmp_path: Path) -> None:
    rows = records(6)
    write_metadata(tmp_path / "flair", rows)
    with tarfile.open(tmp_path / "flair" / "small_images-00.tar.gz", "w:gz") as archive:
        add_member(archive, "../../../evil.jpg", b"evil")
        add_member(archive, f"small_images/._{rows[0].image_id}.jpg", b"a Mac's notes")
        add_member(archive, "small_images/unlisted.jpg", b"unlisted")
        link = tarfile.TarInfo(f"small_images/{rows[0].image_id}.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        for one in rows:
            add_member(archive, f"/absolute/{one.image_id}.jpg", one.image or b"")
    before = sorted(tmp_path.rglob("*"))
    assert found_in(local(tmp_path / "flair")) == expected(rows)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("write", [write_files, write_archives])
def test_an_image_that_is_listed_but_not_there_comes_as_none(tmp_path: Path, write: Any) -> None:
    rows = records(70)
    folder = write(tmp_path / "flair", rows[:-1])
    (folder / "labels_and_metadata.json").unlink()
    write_metadata(folder, rows)
    found = found_in(local(folder))
    assert found.pop(str(rows[-1].image_id))[-1] is None
    assert found == expected(rows[:-1])


@given(
    st.lists(
        st.recursive(
            st.text() | st.none(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ).map(lambda value: {"v": value})
    ),
    st.integers(1, 40),
    st.sampled_from([None, 1]),
)
def test_a_json_list_is_read_alike_in_blocks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], block: int, indent: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "list.json"
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=False), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "_BLOCK", block)
        assert list(json_stream.elements(path, "FLAIR")) == values


RECORD = '[{"user_id": %s, "image_id": 1, "partition": "x", "labels": %s, "fine_grained_labels": []}]'


@pytest.mark.parametrize(
    "text, message",
    [
        ("{}", "it has '{' where \\[ is expected"),
        ('[{"user_id": "a"', "is damaged or cut off \\("),
        ('[{"user_id": "a"}]', "record 0 has no 'image_id'"),
        (
            RECORD % ("null", '["plant"]'),
            "record 0 has the user_id 'None', which is neither text nor a whole",
        ),
        (RECORD % ("true", '["plant"]'), "record 0 has the user_id 'True', which is neither"),
        (RECORD % ("7", '"plant"'), "record 0 has the labels 'plant', which is not a list"),
        (RECORD % ("7", "[null]"), "record 0 has the labels 'None', which is neither text"),
        ("", "it has 'its end' where \\[ is expected"),
        ("[]", "no usable|0"),
    ],
)
def test_damaged_metadata_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "small_images").mkdir()
    (tmp_path / "labels_and_metadata.json").write_text(text)
    if text == "[]":
        assert found_in(local(tmp_path)) == {}
        return
    with pytest.raises(ValueError, match=message) as caught:
        found_in(local(tmp_path))
    assert "labels_and_metadata.json" in str(caught.value)


def test_a_truncated_archive_is_named(tmp_path: Path) -> None:
    folder = write_archives(tmp_path / "flair", records(60), archives=1)
    archive = folder / "small_images-00.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-400])
    with pytest.raises(ValueError, match=r"small_images-00\.tar\.gz is damaged .*; delete it"):
        found_in(local(folder))


def test_parquet_of_another_kind_is_refused_in_one_sentence(tmp_path: Path) -> None:
    row = {**Record(1).row(), "image": {"bytes": b"x", "path": ""}}
    cases: dict[str, list[dict[str, Any]]] = {
        "no column 'partition'": [{key: value for key, value in row.items() if key != "partition"}],
        "but must have the bytes of images": [{**row, "image": "a path"}],
        "has rows without a value in user_id": [row, {**row, "user_id": None}],
        "has empty values in labels": [row, {**row, "labels": ["dog", None]}],
        "has columns of wrong types:": [{**row, "labels": "dog"}],
    }
    for number, (message, content) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        pq.write_table(pa.Table.from_pylist(content), folder / "train.parquet")
        with pytest.raises(ValueError, match=message) as caught:
            found_in(local(folder))
        assert "train.parquet" in str(caught.value)


def test_nothing_in_the_place_of_an_element_is_refused_however_deep(tmp_path: Path) -> None:
    columns = schema({"objects": "boxes"})
    ids = {"user_id": "u", "partition": "train", "image": b"x"}
    for number, box in enumerate([None, {"name": None}, {"corners": None}, {"corners": [0, 0, None, 1]}, {}]):
        folder, whole = tmp_path / str(number), {"name": "cup", "corners": [0, 0, 1, 1]}
        folder.mkdir()
        rows = [
            {**ids, "image_id": "a", "objects": [whole, None if box is None else {**whole, **box}]},
            {**ids, "image_id": "b", "objects": []},
        ]
        path = folder / "train.parquet"
        pq.write_table(pa.Table.from_pylist(rows, pa.schema([*columns, ("image", pa.binary())])), path)
        shard = Shard.on_disk(path, path.name)
        made = ParquetSource([shard], schema=columns, num_images=2, image_bytes=0, provenance={})
        if box == {}:
            assert [len(batch.table) for batch in made.records(0)] == [2]
            continue
        with pytest.raises(ValueError, match=r"train\.parquet (has empty values in objects|cannot be read)"):
            list(made.records(0))


def test_a_truncated_shard_and_a_wrong_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder: give hf, apple or a folder"):
        local(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"has neither \*\.parquet files nor labels_and_metadata\.json"):
        local(tmp_path)
    folder = write_parquet(tmp_path / "flair", records(20), shards=1)
    shard = next(folder.rglob("*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"train-00000-of-00001\.parquet cannot be read as parquet"):
        local(folder)


@dataclass
class Server:
    """A web server of one folder that can break connections off and refuse ranges."""

    root: Path
    url: str = ""
    break_after: int | None = None
    ranges: bool = True
    asked: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    state = Server(tmp_path / "served")
    state.root.mkdir()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = state.root / self.path.lstrip("/")
            if not path.is_file():
                self.send_error(404)
                return
            content, wanted = path.read_bytes(), self.headers["Range"]
            start = 0
            if wanted is not None and state.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if body:
                state.asked.append((self.path, wanted))
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            if body:
                stop = len(content) if state.break_after is None else start + state.break_after
                self.wfile.write(content[start:stop])

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        state.url = f"http://127.0.0.1:{httpd.server_port}/"
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield state
        httpd.shutdown()
        thread.join(5)


def test_a_broken_download_goes_on_where_it_stopped(tmp_path: Path, server: Server) -> None:
    content = bytes(range(256)) * 40
    (server.root / "f").write_bytes(content)
    server.break_after = 3000
    fetch(server.url + "f", tmp_path / "got", Remote(len(content), ""))
    assert (tmp_path / "got").read_bytes() == content
    assert [wanted for _, wanted in server.asked] == [None, "bytes=3000-", "bytes=6000-", "bytes=9000-"]
    fetch(server.url + "f", tmp_path / "got", Remote(len(content), ""))
    assert len(server.asked) == 4  # what is whole is not asked for again


def test_a_later_run_takes_up_an_earlier_one(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(range(256)) * 40
    (server.root / "f").write_bytes(content)
    server.break_after = 1000
    monkeypatch.setattr(http, "PATIENCE", replace(QUICK, attempts=3))
    with pytest.raises(OSError, match=r"cannot download .*IncompleteRead.*run the command again"):
        fetch(server.url + "f", tmp_path / "got", Remote(len(content), ""))
    assert not (tmp_path / "got").exists()
    server.break_after = None
    fetch(server.url + "f", tmp_path / "got", Remote(len(content), ""))
    assert server.asked[-1] == ("/f", "bytes=3000-")
    assert (tmp_path / "got").read_bytes() == content


def test_a_server_without_ranges_sends_the_whole_file_again(tmp_path: Path, server: Server) -> None:
    content = bytes(range(256)) * 40
    (server.root / "f").write_bytes(content)
    (tmp_path / "got.part").write_bytes(b"x" * 5000)
    (tmp_path / "got.version").write_text("")
    server.ranges = False
    fetch(server.url + "f", tmp_path / "got", Remote(len(content), ""))
    assert (tmp_path / "got").read_bytes() == content


def test_what_cannot_be_reached_is_said_in_one_line(tmp_path: Path, server: Server) -> None:
    with pytest.raises(OSError, match=rf"cannot download {server.url}nothing.*404"):
        remote_file(server.url + "nothing")
    with pytest.raises(OSError, match=r"cannot download http://127.0.0.1:9/x"):
        fetch("http://127.0.0.1:9/x", tmp_path / "x", Remote(10, ""))


def test_apples_archives_are_fetched_one_by_one_and_deleted(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = records(30)
    folder = write_archives(tmp_path / "made", rows, archives=2)
    for name, place in (("labels", "labels_and_metadata.json"), ("images/small", "small_images-0*.tar.gz")):
        (server.root / name).mkdir(parents=True)
        for path in folder.glob(place):
            path.rename(server.root / name / path.name)
    monkeypatch.setattr(sources, "NUM_ARCHIVES", 2)
    source = sources.apple(tmp_path / "down", server.url)
    total = sum(path.stat().st_size for path in server.root.rglob("*") if path.is_file())
    assert source.download_bytes == total
    batches = source.records(0)
    next(batches)
    assert [path for path, _ in server.asked][1:] == ["/images/small/small_images-00.tar.gz"]
    assert found_in(source) == expected(rows)
    assert len(server.asked) == 3
    assert sources.apple(tmp_path / "down", server.url).download_bytes == 0
    (tmp_path / "down" / "mine.txt").write_text("not downloaded")
    source.discard()
    assert [path.name for path in (tmp_path / "down").iterdir()] == ["mine.txt"]
