"""What wandb and TensorBoard get: each step once, nothing secret, and never at a run's cost."""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import wandb
from tensorboardX.event_file_writer import EventFileWriter
from tensorboardX.proto.event_pb2 import Event
from wandb.proto import wandb_internal_pb2

from benchmarks.core import tracking
from benchmarks.core.config.trees import Tree
from benchmarks.core.ledger import PUBLIC_RESULTS
from benchmarks.core.tracking import Tracking, flat, has_wandb_key
from benchmarks.flair.config import Run, parse
from benchmarks.flair.train import Flair
from tests.benchmarks.conftest import Train, killed_at
from tests.benchmarks.core.test_private import REAL
from tests.launching import ROOT, environment, warmly

KEY = "deadbeef" * 5  # wandb takes 40 characters for a key
LINES: list[Tree] = [
    {"round": t, "seconds": 0.5, "users": 4, "val": {"C-AP": 10.0 + t, "loss": 1.0 / (t + 1)}}
    for t in range(5)
]


@pytest.fixture(autouse=True)
def no_wandb_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No key, no mode, no sweep of whoever runs the tests; wandb's process-wide state is dropped after."""
    for name in ("API_KEY", "MODE", "BASE_URL", "RUN_ID", "SWEEP_ID", "SWEEP_PARAM_PATH", "DIR", "PROJECT"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    yield
    wandb.teardown()


def leveldb_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format, blocks of 32 KiB after seven bytes of header."""
    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            yield whole
            whole = b""


def wandb_records(directory: Path) -> list[Any]:
    """Every record of the wandb runs under a run directory, in the order of writing."""
    wandb.teardown()  # or its service may still be writing
    out = []
    for path in sorted(directory.glob("wandb/*run-*/*.wandb"), key=lambda p: p.stat().st_mtime_ns):
        for content in leveldb_records(path):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(content)
            out.append(record)
    return out


def wandb_history(directory: Path) -> list[Tree]:
    rows = []
    for record in wandb_records(directory):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return rows


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard's event files hold of one curve."""
    out = []
    for path in sorted((directory / "tensorboard").iterdir()):
        data, place = path.read_bytes(), 0
        while place < len(data):
            (length,) = struct.unpack("<Q", data[place : place + 8])
            event = Event()
            event.ParseFromString(data[place + 12 : place + 12 + length])
            out += [(event.step, value.simple_value) for value in event.summary.value if value.tag == tag]
            place += 16 + length
    return out


def wanted(directory: Path, backend: str, *argv: str) -> Run:
    return parse([f"--run_dir={directory}", f"--runtime.track={backend}", *argv])


def lines_of(directory: Path) -> list[Tree]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_public_release_shows_trackers_and_pictures_nothing_of_the_training_images(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No counts for a picture to be made of, and no load of the machine, which depends on the cohorts."""
    drawn: list[set[str]] = []
    real = Flair.draw

    def watched(self: Flair, results: Tree, title: str, folder: Path) -> None:
        drawn.append(set(results))
        real(self, results, title, folder)

    monkeypatch.setattr(Flair, "draw", watched)
    words = (*REAL, "--privacy.release=public", "--runtime.track=wandb", "--federated.num_rounds=2")
    directory = train(*words, draw=True)
    assert drawn
    assert drawn[0] <= set(PUBLIC_RESULTS)
    kinds = {record.WhichOneof("record_type") for record in wandb_records(directory)}
    assert "history" in kinds
    assert "stats" not in kinds


def test_numbers_are_flattened_and_the_rest_left_out() -> None:
    assert flat({"a": 1, "val": {"C-AP": 2.5, "name": "x"}, "none": None}) == {"a": 1, "val/C-AP": 2.5}


def test_wandb_holds_the_lines_of_metrics_jsonl(train: Train) -> None:
    words = ("--runtime.track=wandb", "--runtime.artifact=true", "--federated.num_rounds=2")
    directory = train(*words, draw=True)
    *rows, final = wandb_history(directory)
    expected = lines_of(directory)
    assert [row["_step"] for row in rows] == [line["round"] for line in expected] == [0, 1, 2]
    for row, line in zip(rows, expected):
        assert row["val/C-AP"] == line["val"]["C-AP"]
        assert row.get("users") == line.get("users")
    assert {
        "results/path",
        "per_class_ap/path",
        "plots/training_curve/path",
        "plots/per_class_ap/path",
    } <= set(final)
    (table,) = directory.glob("wandb/latest-run/files/media/table/results*.json")
    results = json.loads((directory / "results.json").read_text())
    assert json.loads(table.read_text())["data"][1][1] == results["test"]["C-AP"]
    records = wandb_records(directory)
    assert {"artifact", "stats"} <= {record.WhichOneof("record_type") for record in records}
    assert any(record.artifact.type == "model" for record in records)
    sent = {item.key: json.loads(item.value_json) for r in records for item in r.run.config.update}
    assert sent["federated"]["num_rounds"] == 2
    assert sent["dataset"] == "tiny"


@pytest.mark.parametrize("backend", ["wandb", "tensorboard"])
def test_a_killed_and_resumed_run_sends_each_step_once_to_the_same_run(backend: str, train: Train) -> None:
    """Killed after step 2 with a checkpoint of step 2: step 2 is computed twice and must be sent once."""
    extra = (f"--runtime.track={backend}", "--runtime.checkpoint_every=2")
    with killed_at(2, recorded=True):
        first = json.loads((train(*extra, code=130) / "tracking.json").read_text())[backend]
    assert first["sent"] == 2
    directory = train(*extra)
    assert json.loads((directory / "tracking.json").read_text())[backend] == {"id": first["id"], "sent": 3}
    expected = [(line["round"], line["val"]["C-AP"]) for line in lines_of(directory)]
    if backend == "wandb":
        sent = [(row["_step"], row["val/C-AP"]) for row in wandb_history(directory)[:-1]]
        ids = {r.run.run_id for r in wandb_records(directory) if r.WhichOneof("record_type") == "run"}
        assert ids == {first["id"]}
    else:
        sent = scalars(directory, "val/C-AP")
    assert [step for step, _ in sent] == [0, 1, 2, 3]
    assert [value for _, value in sent] == pytest.approx([value for _, value in expected])


def test_lines_from_before_tracking_was_asked_for_are_sent_too(train: Train) -> None:
    directory = train("--federated.num_rounds=2")
    (directory / "results.json").unlink()
    train("--federated.num_rounds=2", "--runtime.track=tensorboard")
    assert [step for step, _ in scalars(directory, "val/C-AP")] == [0, 1, 2]


def test_tensorboard_shows_the_final_table_and_the_plots(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags: list[str] = []
    real = EventFileWriter.add_event

    def watch(self: EventFileWriter, event: Event) -> None:
        tags.extend(value.tag for value in event.summary.value)
        real(self, event)

    monkeypatch.setattr(EventFileWriter, "add_event", watch)
    train("--federated.num_rounds=1", "--runtime.track=tensorboard", draw=True)
    assert {"results/text_summary", "config/text_summary", "plots/training_curve"} <= set(tags)


class Broken:
    """A backend that fails at a given place."""

    id, where, last = "x", "nowhere", math.inf

    def __init__(self, place: str) -> None:
        self._place = place
        self._fail("init")

    def _fail(self, place: str) -> None:
        if self._place == place:
            raise RuntimeError(f"no {place}\ntoday")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._fail("log")

    def finish(self, step: int, results: Tree, rows: tracking.Rows, directory: Path) -> None:
        self._fail("finish")

    def close(self, failed: bool) -> None:
        self._fail("close")


@pytest.mark.parametrize("place", ["init", "log", "finish", "close"])
def test_whatever_fails_in_a_tracker_becomes_one_line(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking, "BACKENDS", {"wandb": lambda *_: Broken(place)})
    with Tracking(wanted(tmp_path, "wandb"), tmp_path, "tiny", "round") as tracker:
        for line in LINES:
            tracker.tell(line)
        tracker.finish({"rounds": 4}, {})
    warned = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert warned == [f"WARNING: tracking by wandb failed and stops here: RuntimeError: no {place} today"]


def test_a_damaged_state_file_costs_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tracking.json").write_text('{"wandb": {"id"')
    tracker = Tracking(wanted(tmp_path, "wandb"), tmp_path, "tiny", "round")
    tracker.tell(LINES[0])
    assert "WARNING: tracking by wandb failed" in capsys.readouterr().err


def test_a_run_is_the_same_with_a_failing_tracker(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "BACKENDS", {"wandb": lambda *_: Broken("log")})
    models = [
        json.loads((train(f"--runtime.track={word}", name=word) / "results.json").read_text())["model_sha256"]
        for word in ("wandb", "none")
    ]
    assert models[0] == models[1]


def test_a_disabled_run_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no file, whose growth would be waited for."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(tracking, "ROW_SECONDS", 0.1)
    monkeypatch.delattr(tracking, "_size")
    with Tracking(wanted(tmp_path, "wandb"), tmp_path, "tiny", "round") as tracker:
        for line in LINES:
            tracker.tell(line)
    assert capsys.readouterr().err == "tracking: wandb, disabled\n"


@pytest.mark.parametrize("shares", [None, {"cat": 0.5, "dog": 0.0}])
def test_the_table_of_classes_has_the_columns_that_are_known(
    shares: Mapping[str, float] | None, tmp_path: Path
) -> None:
    """Detection has the AP of each class, None where test has no object of it, and no prevalence."""
    results: Tree = {"rounds": 1, "per_class_ap": {"cat": 12.5, "dog": None}}
    results |= {} if shares is None else {"prevalence": shares}
    with Tracking(wanted(tmp_path, "wandb"), tmp_path, "tiny", "round") as tracker:
        tracker.finish(results, {"test": {"AP": 12.5}})
    wandb.teardown()
    (path,) = tmp_path.glob("wandb/latest-run/files/media/table/per_class_ap*.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["label", "AP"] + ["prevalence"] * (shares is not None)
    assert table["data"][1][:2] == ["dog", None]


def test_what_a_server_lacks_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill may come between a row's file and the server, which then has fewer than tracking.json says."""
    steps: list[int] = []

    class Server(Broken):
        last = 1.0

        def log(self, step: int, values: Mapping[str, float]) -> None:
            steps.append(step)

    (tmp_path / "tracking.json").write_text('{"wandb": {"id": "x", "sent": 3}}')
    monkeypatch.setattr(tracking, "BACKENDS", {"wandb": lambda *_: Server("never")})
    tracker = Tracking(wanted(tmp_path, "wandb"), tmp_path, "tiny", "round")
    for line in LINES:
        tracker.tell(line)
    assert steps == [2, 3, 4]


def test_wandb_has_what_was_sent_before_a_kill(tmp_path: Path) -> None:
    """SIGKILL leaves no time for anything: what tracking.json counts as sent must be in wandb's own file."""
    clean = {name: value for name, value in environment().items() if not name.startswith("WANDB_")}
    command = warmly("tests.benchmarks.core.test_tracking", str(tmp_path))
    assert subprocess.run(command, check=False, env=clean, cwd=ROOT).returncode == -signal.SIGKILL
    assert json.loads((tmp_path / "tracking.json").read_text())["wandb"]["sent"] == 2
    rows = len(wandb_history(tmp_path))
    tracker = Tracking(wanted(tmp_path, "wandb"), tmp_path, "tiny", "round")
    for line in LINES:
        tracker.tell(line)
    tracker.close(False)
    assert rows == 3
    assert [row["_step"] for row in wandb_history(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_server_that_is_not_there_costs_one_line_and_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(tracking, "INIT_SECONDS", 2)
    tracker = Tracking(wanted(tmp_path, "wandb"), tmp_path, "tiny", "round")
    for line in LINES:
        tracker.tell(line)
    tracker.close(False)
    written = capfd.readouterr().err.splitlines()
    assert len(written) == 1
    assert written[0].startswith("WARNING: tracking by wandb failed")
    assert KEY not in written[0]


def test_only_the_first_worker_tracks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "is_main", lambda: False)
    with Tracking(wanted(tmp_path, "wandb"), tmp_path, "tiny", "round") as tracker:
        for line in LINES:
            tracker.tell(line)
    assert list(tmp_path.iterdir()) == []


def test_the_run_id_of_a_sweeps_agent_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the sweep's server would wait for ever for the metric of a run that never came."""
    (tmp_path / "tracking.json").write_text('{"wandb": {"id": "older", "sent": 4}}')
    monkeypatch.setenv("WANDB_RUN_ID", "agents1")
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep1")
    tracker = Tracking(wanted(tmp_path, "wandb"), tmp_path, "tiny", "round")
    for line in LINES:
        tracker.tell(line)
    tracker.close(False)
    assert json.loads((tmp_path / "tracking.json").read_text()) == {"wandb": {"id": "agents1", "sent": 4}}
    assert [row["_step"] for row in wandb_history(tmp_path)] == [0, 1, 2, 3, 4]  # another run: all of it


def test_a_key_is_found_where_wandb_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_wandb_key()
    home = tmp_path / "netrc"
    home.write_text(f"machine api.wandb.ai\n login user\n password {KEY}\n")
    monkeypatch.setenv("NETRC", str(home))
    assert has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_wandb_key()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert has_wandb_key()


@pytest.mark.parametrize("backend", ["wandb", "tensorboard", "none"])
def test_no_key_or_environment_reaches_a_file_or_the_screen(
    backend: str,
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Issue 6, secrets. wandb is made to run offline although there is a key."""
    secrets = {"WANDB_API_KEY": KEY, "HF_TOKEN": "hf_" + "Secret7" * 5, "OTHER_PASSWORD": "opensesame99"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    train(f"--runtime.track={backend}", "--federated.num_rounds=1")
    written = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert any("wandb" in p.parts for p in written) == (backend == "wandb")
    shown = capfd.readouterr()
    places = {str(p): p.read_bytes() for p in written} | {
        "output": (shown.out + shown.err).encode(),
    }
    for place, content in places.items():
        for name, value in secrets.items():
            assert value.encode() not in content, (place, name)


def tell_and_die(directory: Path) -> None:
    """Track three lines in a process that is then killed."""
    tracker = Tracking(wanted(directory, "wandb"), directory, "tiny", "round")
    for line in LINES[:3]:
        tracker.tell(line)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    tell_and_die(Path(sys.argv[1]))
