"""`make bench-growth`, in small."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.bench import growth
from dataset.flair.mini import MiniSpec, mini_index
from dataset.store.hdf5 import DataFile
from dataset.store.validate import validate

SPEC = MiniSpec(train_users=12, val_users=4, test_users=4, image_size=growth.SIDE)


def test_users_are_there_so_many_times_each_with_an_id_of_its_own(tmp_path: Path) -> None:
    once, path = mini_index(SPEC), tmp_path / "grown.hdf5"
    growth.write(path, growth.grown(growth.Row(train=3, val=2), SPEC))
    validate(path)
    file = DataFile(path)
    for name, times in (("train", 3), ("val", 2), ("test", 1)):
        before, after = once.splits[name], file.split(name)
        assert len(set(after.user_ids)) == after.num_users == times * before.num_users
        sizes = np.tile(np.diff(before.user_offsets), times)
        assert np.array_equal(np.diff(after.user_offsets), sizes)
        labels = np.tile(before.labels["labels"].dense(np.arange(before.num_images)), (times, 1))
        assert np.array_equal(after.labels["labels"].dense(np.arange(len(labels))), labels)


@pytest.mark.parametrize("words", [["--times=0"], ["--times=1,x"], ["--val=101"]])
def test_sizes_that_are_none_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match="give whole numbers from 1 to 100"):
        growth.main(words)
