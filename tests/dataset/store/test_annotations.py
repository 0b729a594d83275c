"""Labels of many images."""

import tracemalloc

import numpy as np

from dataset.store.annotations import LabelMatrix


def test_the_labels_of_a_user_are_read_without_going_through_all_images() -> None:
    images = 1 << 20
    labels = LabelMatrix(np.arange(images + 1) * 2, np.tile(np.array([1, 4], np.uint16), images), 5)
    tracemalloc.start()
    dense = labels.dense(np.array([images - 1, 0, 7]))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert dense.tolist() == [[0, 1, 0, 0, 1]] * 3
    assert most < images // 8  # bytes; one number for each image are 8 << 20
