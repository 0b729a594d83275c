"""What the rows of a comparison are called."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.compare.reading import compare
from benchmarks.core.config.digests import config_tree
from benchmarks.fedcv.classification.config import CLASSIFICATION
from tests.benchmarks.made_runs import make_run
from tests.benchmarks.visual_classification.test_visual_classification import made_run


def test_a_row_says_its_algorithm_where_the_setting_has_another(tmp_path: Path) -> None:
    make_run(tmp_path / "one", "fl-r-17", "--federated.algorithm=scaffold")
    make_run(tmp_path / "other", "c-r-17")
    labels = {group.label for group in compare([tmp_path]).groups}
    assert labels == {"FL-R-17, algorithm scaffold", "C-R-17"}
    make_run(tmp_path / "third", "fl-r-17")
    labels = {group.label for group in compare([tmp_path]).groups}
    assert labels == {"FL-R-17, algorithm scaffold", "C-R-17", "FL-R-17"}


def test_a_row_with_three_keys_of_its_own_is_called_by_these(tmp_path: Path) -> None:
    values = {"local.num_epochs": 3, "local.batch_size": 8, "local.learning_rate": 0.3}
    argv = [f"--{key}={value}" for key, value in values.items()]
    make_run(tmp_path / "p0", "fl-r-17", *argv)
    for left in range(3):
        make_run(tmp_path / f"other{left}", "fl-r-17", *(argv[:left] + argv[left + 1 :]))
    labels = [group.label for group in compare([tmp_path]).groups]
    (label,) = [label for label in labels if all(str(value) in label for value in (3, 8, 0.3))]
    assert label == "FL-R-17, learning_rate 0.3, num_epochs 3, batch_size 8"


def test_two_keys_with_one_last_word_are_named_in_full(tmp_path: Path) -> None:
    for local, server in ((0.1, 0.1), (0.1, 0.3), (0.3, 0.1)):
        argv = f"--local.learning_rate={local}", f"--server.learning_rate={server}"
        make_run(tmp_path / f"{local} {server}", "fl-r-17", *argv)
    labels = {group.label for group in compare([tmp_path]).groups}
    assert "FL-R-17, local.learning_rate 0.1, server.learning_rate 0.1" in labels


@pytest.mark.parametrize(
    ("words", "labels"),
    [
        (["--data.partition=none"], ["fedavg", "fedavg"]),
        (
            ["--data.partition=none", "--federated.algorithm=scaffold"],
            ["fedavg", "fedavg, algorithm scaffold"],
        ),
    ],
)
def test_a_row_says_its_clients_where_one_setting_has_several(
    words: list[str], labels: list[str], tmp_path: Path
) -> None:
    """Another key that differs, too, or another algorithm, does not take the partition's place."""
    for name, argv in {"one": [], "other": words}.items():
        config = CLASSIFICATION.parse(["--config=fedavg", *argv]).config
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config_tree(config)))
        (tmp_path / name / "metrics.jsonl").write_text('{"round": 0}\n')
    found = [group.label for group in compare([tmp_path / "one", tmp_path / "other"]).groups]
    first, second = labels
    assert found == [f"{first}, partition lda-0.5-clients-10-seed-42", f"{second}, partition of the file"]


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--config=fedavg"], "fedavg"),
        (["--config=fedavg", "--federated.algorithm=scaffold"], "fedavg, algorithm scaffold"),
        (["--config=fedavg", "--federated.algorithm=scaffold", "--setting=mine"], "mine"),
    ],
)
def test_the_name_of_a_run(argv: list[str], name: str) -> None:
    assert CLASSIFICATION.name_of(CLASSIFICATION.parse(argv).config) == name


def test_names_that_would_be_cut_to_the_same_letters_name_the_folder(tmp_path: Path) -> None:
    for end in "ab":
        make_run(tmp_path / end, "fl-r-17", f"--setting={'x' * 80}{end}")
    labels = [group.label for group in compare([tmp_path]).groups]
    assert sorted(label.rpartition("/")[2] for label in labels) == ["a)", "b)"]


def test_labels_name_as_few_keys_as_tell_groups_apart(tmp_path: Path) -> None:
    for place, (epochs, size) in enumerate([(1, 16), (2, 16), (2, 8), (3, 8)]):
        make_run(
            tmp_path / str(place), "fl-r-17", f"--local.num_epochs={epochs}", f"--local.batch_size={size}"
        )
    assert [group.label for group in compare([tmp_path]).groups] == [
        "FL-R-17, num_epochs 1",
        "FL-R-17, num_epochs 2, batch_size 16",
        "FL-R-17, num_epochs 2, batch_size 8",
        "FL-R-17, num_epochs 3",
    ]


def test_settings_that_the_user_named_say_the_sizes_in_which_they_differ(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fl-r-17", "--setting=ours")
    make_run(tmp_path / "b", "fl-r-17", "--setting=small", "--model.input_size=192")
    make_run(tmp_path / "c")
    assert [group.label for group in compare([tmp_path]).groups] == [
        "ours, input_size 224", "small, input_size 192", "FL-R-17, input_size 224",
    ]  # fmt: skip
    assert [group.label for group in compare([tmp_path / "a", tmp_path / "c"]).groups] == ["ours", "FL-R-17"]


def test_shipped_settings_say_sizes_that_are_not_their_own(tmp_path: Path) -> None:
    made_run(tmp_path / "vision" / "a", "cifar10-fedavg", 0, 40.0)
    made_run(tmp_path / "vision" / "b", "inat-geo-3k-fedavgm-k10", 0, 40.0)
    labels = {group.label for group in compare([tmp_path / "vision"]).groups}
    assert labels == {"cifar10-fedavg", "inat-geo-3k-fedavgm-k10"}, "of 32 and 299 pixels"
    make_run(tmp_path / "a", "c-r-17", "--model.input_size=192")
    make_run(tmp_path / "b")
    labels |= {"C-R-17, input_size 192", "FL-R-17, input_size 224"}
    assert {group.label for group in compare([tmp_path]).groups} == labels
