"""The scattering transform: that of kymatio where its part can be imported, and what is known of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.features import Split
from pfl_ext.models.scatternet import Scattering, gabor, morlet
from pfl_ext.models.standardised import standardised_in
from pfl_ext.tasks.single_label import SingleLabel
from tests.closeness import assert_close_as_vector

PATH = 6 * 4 * math.log2(40)
"""Roundings on the way to a number: six Fourier transforms of two axes, some for each halving of a side."""


def build(seed: int = 0, **options: Any) -> nn.Module:
    config = ModelConfig(**{"arch": "scatternet", "input_size": 32, "trained": "head", **options})
    return build_backbone(config, 10, torch.Generator().manual_seed(seed))


def pictures(count: int = 3, side: int = 32, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def by_colour(features: Tensor) -> Tensor:
    """``[B, 3, 81, n, n]``: the average, 16 moduli, and 8 x 8 moduli of moduli."""
    return features.view(len(features), 3, 81, *features.shape[2:])


@pytest.mark.parametrize("side", [32, 64])
def test_it_is_kymatios_transform(side: int) -> None:
    """But for pi, which kymatio takes to be 3.1415 in the scale of each of its filters."""
    frontend = pytest.importorskip("kymatio.scattering2d.frontend.torch_frontend")
    images = pictures(side=side)
    theirs = frontend.ScatteringTorch2D(J=2, shape=(side, side))(images).double()
    for first, last, filters in ((0, 1, 1), (1, 17, 2), (17, 81, 3)):
        theirs[:, :, first:last] /= (math.pi / 3.1415) ** filters
    assert_close_as_vector(by_colour(Scattering(side)(images)), theirs.float(), PATH)


def test_a_flat_image_has_its_average_and_nothing_else() -> None:
    features = by_colour(Scattering(32)(torch.full((1, 3, 32, 32), 0.7)))
    assert_close_as_vector(features[:, :, 0], torch.full((1, 3, 8, 8), 0.7), PATH)
    assert float(features[:, :, 1:].abs().max()) < 0.7 * PATH * 2**-24


def test_contrast_scales_all_features_and_brightness_moves_the_averages_alone() -> None:
    images, scattering = pictures(), Scattering(32)
    features = scattering(images)
    assert_close_as_vector(scattering(2 * images), 2 * features, 1)
    moved = by_colour(scattering(images + 1) - features)
    assert_close_as_vector(moved[:, :, 0], torch.ones(3, 3, 8, 8), 8 * PATH)
    assert float(moved[:, :, 1:].norm() / features.norm()) < 8 * PATH * 2**-24


def test_mirroring_at_the_diagonal_mirrors_maps_and_turns_wavelets() -> None:
    """Angle t becomes 90 degrees minus t, so that number k becomes 2 - k of 8: opposite waves are equal."""
    images, scattering = pictures(), Scattering(32)
    features, mirrored = by_colour(scattering(images)), by_colour(scattering(images.mT)).mT
    turned = [(2 - k) % 8 for k in range(8)]
    order = [0, *(1 + 8 * j + k for j in range(2) for k in turned)]
    order += [17 + 8 * k + m for k in turned for m in turned]
    assert_close_as_vector(mirrored, features[:, :, order], 2 * PATH)
    assert float((mirrored - features).norm()) > 0.1 * float(features.norm())


def test_a_picture_that_moves_by_four_pixels_moves_the_maps_by_one() -> None:
    """But for the tails of the widest wavelet, three standard deviations of 3.2 pixels and more away."""
    image = torch.zeros(1, 3, 96, 96)
    image[:, :, 40:48, 40:48] = pictures(1, 8)
    scattering = Scattering(96)
    at_rest, moved = scattering(image), scattering(image.roll((4, -8), (2, 3)))
    far = moved - at_rest.roll((1, -2), (2, 3))
    assert float(far.norm()) < 1e-4 * float(at_rest.norm())


def test_no_frequency_gains_energy_and_no_two_images_are_further_apart_after_it() -> None:
    """A modulus brings numbers nearer; the maps hold one pixel of 16, of an image with its border."""
    waves = [morlet(40, octave, math.pi * (3 - k) / 8) for octave in range(2) for k in range(8)]
    average = torch.fft.fft2(gabor(40, 1.6, 0, 0, 1)).real
    energy = torch.stack(waves).square().sum(0)
    opposite = energy.flip(0, 1).roll((1, 1), (0, 1))
    kept = average.square() + (energy + opposite) / 2
    assert float(kept.max()) == pytest.approx(1, abs=1e-9)
    scattering, images = Scattering(32), pictures(8)
    for one, other in ((images[:4], images[4:]), (images[:4], images[:4] + 0.01 * images[4:])):
        before = F.pad(one - other, [4] * 4, mode="reflect").square().flatten(1).sum(1)
        after = 16 * (scattering(one) - scattering(other)).square().flatten(1).sum(1)
        assert float((after / before).max()) < 1


@pytest.mark.parametrize("groups, made", [(9, 9), (27, 27), (32, 27), (81, 81), (243, 243)])
@pytest.mark.parametrize("init", ["torchvision", "keras"])
def test_features_are_normalised_in_groups_of_one_image(groups: int, made: int, init: str) -> None:
    net = build(groups=groups, init=init)
    norm = net.get_submodule("norm")
    assert isinstance(norm, nn.GroupNorm)
    assert (norm.num_groups, norm.num_channels, norm.affine) == (made, 243, False)
    assert [name for name, _ in net.named_parameters()] == ["classifier.weight", "classifier.bias"]
    assert sum(p.numel() for p in net.parameters()) == 155_530
    scattering, images = net.get_submodule("scattering"), pictures()
    plain = scattering(images).double().view(3, made, -1)
    variance, mean = torch.var_mean(plain, 2, correction=0, keepdim=True)
    features = norm(scattering(images))
    # of small variances the 1e-5 is a part: it is in the source's layer too
    expected = ((plain - mean) / (variance + 1e-5).sqrt()).float().view_as(features)
    assert_close_as_vector(features, expected, 40)
    alone = torch.cat([norm(scattering(image[None])) for image in images])
    assert_close_as_vector(alone, features, 2 * PATH)


def test_a_network_standardises_channels_once_their_moments_are_set() -> None:
    net, images = build(channel_norm="data"), pictures(8)
    plain = net.get_submodule("scattering")(images)
    layer = standardised_in(net)
    assert layer is not None
    assert torch.equal(layer(plain), plain)
    mean, mean_square = plain.mean((0, 2, 3)), plain.square().mean((0, 2, 3))
    mean_square[5] = mean[5].square() / 2  # as noise may have it
    layer.set(mean, mean_square)
    made = layer(plain)
    assert not made[:, 5].any()
    others = [channel for channel in range(243) if channel != 5]
    expected = F.batch_norm(plain.double(), None, None, training=True)[:, others]
    # of small variances, the difference of two moments in float32 has lost some digits
    assert float((made[:, others] - expected).norm() / expected.norm()) < 1e-3
    layer.clear()
    assert torch.equal(layer(plain), plain)


def test_the_features_of_all_seeds_are_one_cache() -> None:
    splits = [Split(ImageClassifier(build(seed), task=SingleLabel(), input_size=32)) for seed in (0, 1)]
    assert splits[0].digest() == splits[1].digest()
    assert [split.width for split in splits] == [15_552] * 2
    other = Split(ImageClassifier(build(groups=9), task=SingleLabel(), input_size=32))
    assert other.digest() != splits[0].digest()


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"input_size": 30},
            "input_size is 30, but scatternet halves the image 2 times: use a multiple of 4",
        ),
        ({"input_size": 4}, "use a multiple of 4 above 4"),
        (
            {"arch": "resnet18", "channel_norm": "data"},
            "model.channel_norm is data, but resnet18 has no norm for it",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)
