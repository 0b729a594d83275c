"""Users who do not train, so that their images are test: leave one client out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compare.groups import Group
from benchmarks.compare.reading import read_any
from benchmarks.predict.__main__ import main
from dataset.cli import run
from dataset.store.hdf5 import DataFile
from tests.benchmarks.predict.test_own_split import Trained
from tests.benchmarks.predict.test_own_split import photos as photos
from tests.benchmarks.predict.test_own_split import trained as trained
from tests.benchmarks.predict.test_predict import rows_of
from tests.benchmarks.run_files import error_line, results


def test_a_run_scores_and_predicts_the_users_who_did_not_train(
    photos: Path, trained: Trained, tmp_path: Path
) -> None:
    with DataFile(photos) as file:
        train = file.split("train")
        user, images = train.user_ids[1], np.diff(train.user_offsets).tolist()
    words = (f"--data.test_users={user}", "--federated.cohort_size=2")
    directory, output = trained(photos, *words), tmp_path / "p.csv"
    assert run(main, [str(directory), "--split=test", f"--output={output}"]) == 0
    found = rows_of(output)
    assert ({row["user"] for row in found}, len(found)) == ({user}, images[1])
    right = [row["predicted"] == row["truth"] for row in found]
    outcome = results(directory)
    assert outcome["test"]["accuracy"] == pytest.approx(100 * np.mean(right), abs=1e-3)
    assert outcome["partition"]["sizes"] == [*images[:1], *images[2:]]
    record, experiment = read_any(directory)
    ours = Group("a", (record,), experiment)
    other = replace(record.config, data=replace(record.config.data, test_users="another"))
    assert ours.test_key != Group("b", (replace(record, config=other),), experiment).test_key


def test_a_user_who_is_not_there_is_refused_before_the_first_round(
    photos: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = trained(photos, "--data.test_users=nobody", code=2)
    assert "data.test_users has 'nobody', but the training users are" in error_line(capsys)
    assert not directory.exists()
