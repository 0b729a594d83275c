"""What the server reads of a compressed update, and how many bytes it takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import numpy as np
import pytest
import torch
from pfl.stats import MappedVectorStatistics

from benchmarks.core.config.trees import build
from pfl_ext.algorithms.channel import Channel
from pfl_ext.attacks.attack import ATTACKS, Attackers
from pfl_ext.attacks.on_updates import GaussianOptions
from pfl_ext.compression.compressor import COMPRESSORS, Compressor, FeedbackOptions
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.models.classifier import build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.randomness import stream, torch_stream
from tests.pfl_ext.samplings import local_sampling
from tests.pfl_ext.stores import NumberedStore

SHAPES = [torch.Size(shape) for shape in ((6, 5, 3, 3), (6,), (40, 30), (), (2, 1))]


def compressor(kind: str, **options: Any) -> Compressor:
    chosen = COMPRESSORS[kind]
    return chosen(build(chosen.options, options, "test"))


def update(seed: int = 0) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draws) for shape in SHAPES]


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.double().reshape(-1) for t in tensors])


def decoded(kind: str, x: list[torch.Tensor], user: int = 0, **options: Any) -> torch.Tensor:
    before = flat(x).clone()
    out = compressor(kind, **options).decoded(x, stream(3, "test", user))
    assert [t.shape for t in out] == SHAPES
    assert (flat(x) == before).all(), "the update is left as it was"
    return flat(out)


@pytest.fixture(scope="module")
def resnet() -> list[torch.Size]:
    """Shapes of the parameters of ResNet-18 with 17 labels."""
    network = build_backbone(ModelConfig(arch="resnet18"), 17, torch_stream(0, "test"), None)
    return [p.shape for p in network.parameters()]


MB = [
    ("float32", {}, 44.7),
    ("uniform", {"bits": 8}, 11.2),
    ("uniform", {"bits": 4}, 5.6),
    ("sign", {}, 1.40),
    ("top_k", {"share": 0.01}, 0.89),
    ("top_k", {"share": 0.1}, 5.9),
    ("random_k", {"share": 0.01}, 0.45),
    ("low_rank", {"rank": 1}, 0.18),
    ("low_rank", {"rank": 2}, 0.33),
    ("low_rank", {"rank": 4}, 0.62),
]


@pytest.mark.parametrize("kind, options, megabytes", MB)
def test_bytes_of_a_resnet_are_the_table_of_the_literature(
    kind: str, options: dict[str, Any], megabytes: float, resnet: list[torch.Size]
) -> None:
    assert sum(shape.numel() for shape in resnet) == 11_185_233
    assert len(resnet) == 62
    digits = len(str(megabytes).split(".")[1])
    assert round(compressor(kind, **options).num_bytes(resnet) / 1e6, digits) == megabytes


def test_bytes_to_the_byte(resnet: list[torch.Size]) -> None:
    found = {
        name: compressor(kind, **options).num_bytes(resnet)
        for name, kind, options in (
            ("8 bit", "uniform", {"bits": 8}),
            ("sign", "sign", {}),
            ("bitmap", "top_k", {"share": 0.1}),
            ("places", "top_k", {"share": 0.01}),
            ("all", "top_k", {"share": 1}),
            ("random", "random_k", {"share": 0.01}),
        )
    }
    assert found == {
        "8 bit": 11_185_233 + 8 * 62,
        "sign": 1_398_155 + 4 * 62,
        "bitmap": 4 * 1_118_523 + 1_398_155,
        "places": 8 * 111_852,
        "all": 4 * 11_185_233,
        "random": 4 * 111_852 + 8,
    }


@pytest.mark.parametrize(
    "kind, options", [("top_k", {"share": 1}), ("random_k", {"share": 1}), ("low_rank", {"rank": 30})]
)
def test_all_of_it_is_the_update(kind: str, options: dict[str, Any]) -> None:
    x = update()
    assert (decoded(kind, x, **options) == flat(x)).all()


def test_enough_bits_are_the_update_to_rounding() -> None:
    x = update()
    out = decoded("uniform", x, bits=32)
    assert (out - flat(x)).norm() < 1e-7 * flat(x).norm()


def test_top_k_keeps_the_greatest_of_all_tensors_together() -> None:
    x = update()
    out, whole = decoded("top_k", x, share=0.1), flat(x)
    k = round(0.1 * len(whole))
    expected = torch.zeros_like(whole)
    places = sorted(range(len(whole)), key=lambda place: -abs(whole[place]))[:k]
    expected[places] = whole[places]
    assert (out == expected).all()


@pytest.mark.parametrize("kind, options", [("random_k", {"share": 0.25}), ("uniform", {"bits": 2})])
def test_the_mean_over_draws_is_the_update(kind: str, options: dict[str, Any]) -> None:
    x, draws = update(), 3000
    whole = flat(x)
    outs = torch.stack([decoded(kind, x, user, **options) for user in range(draws)])
    deviation = outs.std(0).max() / draws**0.5  # of the mean of the noisiest number
    assert (outs.mean(0) - whole).abs().max() < 5 * deviation < 0.2 * whole.abs().max()
    if kind == "random_k":
        variance = (outs - whole).square().sum(1).mean()
        assert variance == pytest.approx(float((1 / 0.25 - 1) * whole.square().sum()), rel=0.02)


def test_levels_are_evenly_spaced_between_the_extremes() -> None:
    x = update()
    out = compressor("uniform", bits=2).decoded(x, stream(0, "test"))[2]
    low, high = float(x[2].min()), float(x[2].max())
    levels = torch.tensor([low + n * (high - low) / 3 for n in range(4)])
    assert torch.cdist(out.reshape(-1, 1), levels[:, None]).min(1).values.max() < 1e-6
    assert len(set(out.reshape(-1).tolist())) == 4
    assert (out - x[2]).abs().max() < (high - low) / 3


def test_a_constant_tensor_is_sent_exactly() -> None:
    x = [torch.full(shape, -2.5) for shape in SHAPES]
    assert (decoded("uniform", x, bits=1) == -2.5).all()
    assert (decoded("sign", x) == -2.5).all()
    zeros = [torch.zeros(shape) for shape in SHAPES]
    assert not any(decoded(kind, zeros).any() for kind in COMPRESSORS.names())


def test_signs_have_the_mean_magnitude_of_their_tensor() -> None:
    x = update()
    out = compressor("sign").decoded(x, stream(0, "test"))
    for tensor, read in zip(x, out):
        expected = tensor.double().sign() * tensor.double().abs().mean()
        torch.testing.assert_close(read.double(), expected, rtol=1e-6, atol=0)


def test_low_rank_projects_each_matrix_and_leaves_vectors() -> None:
    x = update()
    draws = np.random.default_rng(0)
    u, v = (torch.from_numpy(draws.standard_normal((n, 3))).float() for n in (40, 30))
    x[2] = u @ v.T  # of rank 3
    for rank, error in ((3, 1e-5), (2, None)):
        out = compressor("low_rank", rank=rank, iterations=20).decoded(x, stream(0, "test"))
        assert all((a == b).all() for a, b in zip(out, x) if a.ndim < 2)
        left = (out[2] - x[2]).double().norm() / x[2].double().norm()
        assert torch.linalg.matrix_rank(out[2]) <= rank
        best = torch.linalg.svdvals(x[2].double())[rank:].norm() / x[2].double().norm()
        assert left < error if error else left == pytest.approx(float(best), rel=1e-3)


BIASED = [name for name in COMPRESSORS.names() if issubclass(COMPRESSORS[name].options, FeedbackOptions)]


@pytest.mark.parametrize("kind", BIASED)
def test_what_has_error_feedback_never_leaves_out_more_than_there_is(kind: str) -> None:
    assert BIASED == ["low_rank", "sign", "top_k"]
    for seed in range(20):
        x = update(seed)
        assert (decoded(kind, x) - flat(x)).norm() < flat(x).norm()


@pytest.mark.parametrize("kind", COMPRESSORS.names())
def test_the_same_draws_give_the_same_message(kind: str) -> None:
    x = update()
    assert (decoded(kind, x, 7) == decoded(kind, x, 7)).all()
    others: dict[str, dict[str, Any]] = {"random_k": {"share": 0.5}, "uniform": {"bits": 1}}
    if kind in others:
        assert (decoded(kind, x, 7, **others[kind]) != decoded(kind, x, 8, **others[kind])).any()


@pytest.mark.parametrize("stage", ["compression", "attack"])
def test_a_user_who_comes_twice_has_draws_of_its_own_each_time(stage: str) -> None:
    """The first time those of a user who comes once."""
    module = torch.nn.Linear(40, 30)
    names = [name for name, _ in module.named_parameters()]
    data = FederatedImageDataset(NumberedStore([4, 4]), local_sampling(1, 4), seed=3)
    if stage == "compression":
        channel: Any = Channel(compressor("uniform", bits=2), data, module, names, 3, None)
    else:
        channel = Attackers(ATTACKS["gaussian"](GaussianOptions()), data, 1.0, names, 3)

    def sent(*cohort: int) -> list[torch.Tensor]:
        channel.begin(1, np.array(cohort))
        found = []
        for user in cohort:
            stats = MappedVectorStatistics(
                {name: p.detach().clone() for name, p in module.named_parameters()}
            )
            of_user: Any = SimpleNamespace(user_id=f"user-{user}", num_datapoints=4)
            stats, _ = channel.postprocess_one_user(stats=stats, user_context=of_user)
            found.append(flat([stats[name] for name in names]))
        channel.end()
        return found

    first, other, second = sent(0, 1, 0)
    (alone,) = sent(0)
    assert (first == alone).all()
    assert not torch.allclose(second, first)
    assert not torch.allclose(other, first)
