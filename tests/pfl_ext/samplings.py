"""Local sampling with the defaults that the tests of pfl_ext have in common."""

from __future__ import annotations

from typing import Literal

from pfl_ext.data.sampling import LocalSampling
from pfl_ext.data.transforms import Crop, Flip


def local_sampling(
    num_epochs: int = 2,
    batch_size: int = 16,
    max_images: int | None = 512,
    cap: Literal["random", "first"] = "random",
    straddle: bool = True,
    reshuffle: bool = True,
    crop: Crop = "crop",
    flip: Flip = "both",
    input_size: int = 224,
    virtual_size: int | None = None,
) -> LocalSampling:
    """FLAIR's, where nothing else is given."""
    return LocalSampling(
        num_epochs=num_epochs,
        batch_size=batch_size,
        max_images=max_images,
        cap=cap,
        straddle=straddle,
        reshuffle=reshuffle,
        crop=crop,
        flip=flip,
        input_size=input_size,
        virtual_size=virtual_size,
    )
