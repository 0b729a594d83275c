"""Predictions by users' own models score as the run scored these users; what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score

from benchmarks.predict import own_model, trained
from benchmarks.predict.__main__ import main
from benchmarks.visual_classification.train import main as classify
from dataset.cli import run
from dataset.flair.mini import write_mini
from dataset.store.hdf5 import DataFile
from pfl_ext import checkpoint
from pfl_ext.algorithms.personal_parts import FILE
from tests.benchmarks.conftest import Train, train_into
from tests.benchmarks.core.test_personal_runs import OPTION, WORDS, words
from tests.benchmarks.predict.test_predict import COMMON, SPEC, numbers, rows_of
from tests.benchmarks.run_files import results
from tests.benchmarks.sparing import sparingly

FEATURES = ("--augment.flip=none", "--augment.crop=crop", "--data.image_size=18")
"""With which features are computed once."""


def seen_users(directory: Path, data: Path) -> list[str]:
    """The users who trained, and kept something."""
    tensors, _ = checkpoint.load(directory / "checkpoint" / "last.safetensors")
    with DataFile(data) as file:
        ids = trained(directory).on(file).split("train").user_ids
    return [ids[number] for number in np.flatnonzero(tensors["seen"].numpy()).tolist()]


def micro(rows: Sequence[dict[str, str]], names: Sequence[str]) -> float:
    """O-AP in percent, of the probabilities in a table."""
    truth = np.array([[name in row["truth"].split(";") for name in names] for row in rows])
    return 100 * float(average_precision_score(truth.ravel(), numbers(rows, names).ravel()))


@pytest.mark.parametrize(
    "argv",
    [
        *map(words, WORDS),
        ["--federated.algorithm=fedper", f"{OPTION}personal=none", f"{OPTION}tune_epochs=1"],
        ["--federated.algorithm=fedbn", "--model.arch=shufflenet_v2_x0_5", "--federated.cohort_size=2"],
        ["--federated.algorithm=ditto", "--model.trained=lora"],
        [*words("fedrep"), "--model.trained=names", "--model.trained_names=conv2,fc3"],
        [*words("fedrep"), "--compression.kind=uniform"],
        ["--federated.algorithm=ditto", "--model.trained=head", *FEATURES],
    ],
    ids=[*WORDS, "tuned", "fedbn", "lora", "names", "compressed", "features"],
)
def test_each_user_is_scored_as_the_run_did(
    argv: Sequence[str], train: Train, mini_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train("--federated.num_rounds=2", "--server.learning_rate=0.7", *argv)
    names, found = results(directory)["classes"], list[list[dict[str, str]]]()
    output = tmp_path / "p.csv"
    for user in seen_users(directory, mini_file):
        call = [str(directory), f"--user={user}", f"--output={output}", "--overwrite"]
        if (code := run(main, call)) == 0:
            found.append(rows_of(output))
            assert {row["user"] for row in found[-1]} == {user}
        else:
            assert code == 2
            assert "no images of train that scored it" in capsys.readouterr().err, "it has one image"
    scored = results(directory)["clients"]["seen"]
    assert scored["images"] == sum(map(len, found))
    own, server = scored["personal"], scored["server"]
    assert micro([row for rows in found for row in rows], names) == pytest.approx(
        own["pooled"]["O-AP"], abs=1e-3
    )
    each = [micro(rows, names) for rows in found]
    assert np.mean(each) == pytest.approx(own["users"]["O-AP"]["mean"], abs=1e-3)
    assert min(each) == pytest.approx(own["users"]["O-AP"]["lowest decile"], abs=1e-3)
    assert own["pooled"]["loss"] != server["pooled"]["loss"]


def test_a_user_of_a_drawn_partition_is_a_client(tmp_path: Path) -> None:
    """Clients are tuned as in the run, with its task and its drawn crops."""
    file, directory, output = tmp_path / "classes.hdf5", tmp_path / "run", tmp_path / "p.csv"
    write_mini(file, replace(SPEC, coarse_labels=1))
    options = ("--data.partition=lda-1-clients-3-seed-0", "--augment.label_smoothing=0.2")
    argv = ["--config=cifar10-fedavg", f"--data_path={file}", f"--run_dir={directory}", *COMMON, *options]
    argv += ["--federated.algorithm=fedrep", f"{OPTION}tune_epochs=2", "--runtime.keep_checkpoints=true"]
    with sparingly(False):
        assert run(classify, argv) == 0
    right, losses = [], list[float]()
    for client in ("0", "1", "2"):
        call = [str(directory), f"--user={client}", f"--output={output}", "--overwrite"]
        assert run(main, call) == 0
        right.append([row["predicted"] == row["truth"] for row in rows_of(output)])
        losses += [-np.log(float(row[row["truth"]])) for row in rows_of(output)]
    own = results(directory)["clients"]["seen"]["personal"]
    assert 100 * np.mean([each for client in right for each in client]) == pytest.approx(
        own["pooled"]["accuracy"], abs=1e-3
    )
    assert np.mean(losses) == pytest.approx(own["pooled"]["loss"], abs=1e-3)
    each = [100 * np.mean(client) for client in right]
    assert np.mean(each) == pytest.approx(own["users"]["accuracy"]["mean"], abs=1e-3)


@pytest.fixture(scope="module")
def personal(mini_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose users keep their head."""
    words = ("--federated.algorithm=fedper", "--federated.num_rounds=1")
    return train_into(tmp_path_factory.mktemp("run") / "run", mini_file, *words)


def test_images_and_splits_can_be_given_to_a_users_model(
    personal: Path, mini_file: Path, tmp_path: Path
) -> None:
    user, photo = seen_users(personal, mini_file)[0], tmp_path / "photo.png"
    Image.new("RGB", (20, 20), "red").save(photo)
    call, names = [str(personal), f"--user={user}"], results(personal)["classes"]
    assert run(main, [*call, f"--images={photo}", f"--output={tmp_path / 'a.csv'}"]) == 0
    assert run(main, [*call, "--split=test", f"--output={tmp_path / 'b.csv'}"]) == 0
    assert run(main, [str(personal), "--split=test", f"--output={tmp_path / 'c.csv'}"]) == 0
    own, server = (rows_of(tmp_path / f"{name}.csv") for name in "bc")
    assert [row["image"] for row in own] == [row["image"] for row in server]
    assert (numbers(own, names) != numbers(server, names)).any()
    model = trained(personal)
    with DataFile(mini_file) as file:
        theirs, split, held_out = own_model(model, file, user)
        assert split == "train"
        assert len(held_out) > 0
    np.testing.assert_allclose(
        numbers(rows_of(tmp_path / "a.csv"), names), theirs.predict(theirs.read([photo])), rtol=1e-5
    )
    weights, shared = theirs.network.state_dict(), model.network.state_dict()
    assert [name for name in shared if not torch.equal(weights[name], shared[name])] == [
        "backbone.fc3.weight", "backbone.fc3.bias",
    ], "the one round's model is the best one"  # fmt: skip


def test_what_is_refused(
    personal: Path, train: Train, mini_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = "--federated.num_rounds=1"
    average = train(short, name="average")
    alone = ("--federated.algorithm=fedper", f"{OPTION}held_out=0")
    none = train("--federated.algorithm=fedper", f"{OPTION}personal=none", short, name="none")
    unscored, removed = train(*alone, short, name="unscored"), tmp_path / "removed"
    shutil.copytree(personal, removed)
    (removed / "checkpoint" / FILE).unlink()
    damaged = tmp_path / "damaged"
    shutil.copytree(personal, damaged)
    (damaged / "checkpoint" / FILE).write_bytes(bytes((damaged / "checkpoint" / FILE).stat().st_size))
    swept = tmp_path / "swept"
    shutil.copytree(personal, swept, ignore=shutil.ignore_patterns("checkpoint"))
    earlier = tmp_path / "earlier"
    shutil.copytree(personal, earlier)
    (earlier / "checkpoint" / "last.safetensors").rename(earlier / "checkpoint" / "kept")
    (earlier / "checkpoint" / "last.previous.safetensors").rename(earlier / "checkpoint" / "last.safetensors")
    seen = seen_users(personal, mini_file)
    with DataFile(mini_file) as file:
        new = next(user for user in file.split("train").user_ids if user not in seen)
    capsys.readouterr()
    for directory, user, reason in (
        (average, seen[0], "have no models of their own (fedavg): leave --user out"),
        (none, seen[0], "keeps nothing, as federated.options.personal is none: leave --user out"),
        (personal, new, f"--user {new} took part in no round: leave --user out for the server's model"),
        (personal, "nobody", "no training user with this id; the 12 ids are like "),
        (removed, seen[0], f"{FILE} is missing, perhaps because the run removed it at its end: make the"),
        (swept, seen[0], "last.safetensors is missing, perhaps because the run removed it at its end"),
        (damaged, seen[0], "is not the one that the checkpoint was written with"),
        (earlier, seen[0], "last.safetensors is not the checkpoint of the end of the run: make the run"),
        (unscored, seen_users(unscored, mini_file)[0], "no images of train that scored it: give --split or"),
    ):
        assert run(main, [str(directory), f"--user={user}", f"--output={tmp_path / 'p.csv'}"]) == 2
        line = capsys.readouterr().err
        assert reason in line
        assert line.count("\n") == 1
    assert not (tmp_path / "p.csv").exists()
    assert not (removed / "checkpoint" / FILE).exists(), "nothing is made"
