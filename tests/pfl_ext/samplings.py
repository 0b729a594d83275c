"""Local sampling with the defaults that the tests of pfl_ext have in common."""

from __future__ import annotations

from typing import Any

from pfl_ext.data.sampling import LocalSampling


def local_sampling(
    num_epochs: int = 2, batch_size: int = 16, max_images: int | None = 512, **options: Any
) -> LocalSampling:
    """FLAIR's, where nothing else is given."""
    common: dict[str, Any] = {"num_epochs": num_epochs, "batch_size": batch_size, "max_images": max_images}
    return LocalSampling(**{"straddle": True, "flip": "both", **common, **options})
