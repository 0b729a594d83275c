"""Which algorithms a privacy mechanism goes with, and that its bound holds over all that a user sends."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from pfl.aggregate.weighting import WeightByDatapoints, WeightByUser
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.reptile import Reptile
from pfl.algorithm.scaffold import SCAFFOLD
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from torch import Tensor

from pfl_ext.algorithms.algorithm import Algorithm
from pfl_ext.algorithms.clients import Clients
from pfl_ext.algorithms.fedavg import FedAvg
from pfl_ext.algorithms.fedprox import FedProx
from pfl_ext.algorithms.on_pfl import OnPfl
from pfl_ext.algorithms.scaffold import Scaffold
from pfl_ext.backend import CentrallyEvaluatedBackend, training_context
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.rules import Refusals, Rule
from tests.pfl_ext.engine.setting import Setting, distance, norm, private, rounding_of, without_noise
from tests.pfl_ext.stores import NumberedStore
from tests.pfl_ext.test_backend import WHOLE

MECHANISMS: dict[str, Any] = {
    "ours": lambda: private(2),
    "pfl's": lambda: CentrallyAppliedPrivacyMechanism(GaussianMechanism(0.1, 1.0)),
}
NO_RUN: Any = None
NOBODY = "nobody has argued how much one user can change"


class OfPfl(FederatedAveraging):
    pass


class OfOurs(FedAvg):
    pass


class OfLoop(OnPfl):
    pass


def made(kind: Any) -> Any:
    return kind(NO_RUN) if issubclass(kind, OnPfl) else kind()


def backend(mechanism: Any, **options: Any) -> CentrallyEvaluatedBackend:
    data = FederatedImageDataset(NumberedStore([3, 2]), WHOLE, seed=1, noise_seed=7, **options)
    return CentrallyEvaluatedBackend(data, seed=1, postprocessors=[WeightByUser(), mechanism])


def one_round(backend: CentrallyEvaluatedBackend, algorithm: Any, cohort_size: int = 2) -> None:
    """As far as the first thing that needs a model."""
    backend.gather_results(None, algorithm, central_context=training_context(0, cohort_size))


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("kind", [SCAFFOLD, Reptile, OfPfl, OfOurs, OfLoop, object], ids=lambda k: k.__name__)
def test_an_algorithm_of_which_nothing_is_argued_is_refused(kind: type, mechanism: str) -> None:
    with pytest.raises(ValueError, match=NOBODY):
        one_round(backend(MECHANISMS[mechanism]()), made(kind))


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("kind", [FederatedAveraging, FedAvg])
def test_an_algorithm_of_one_update_goes_on_to_its_model(kind: type, mechanism: str) -> None:
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'pytorch_model'"):
        one_round(backend(MECHANISMS[mechanism]()), made(kind))


def test_a_subclass_inherits_what_is_refused_and_not_what_is_allowed() -> None:
    assert "privacy" not in FedAvg.refusals
    assert "privacy" not in FedProx.refusals
    assert "privacy" in OfOurs.refusals
    other: Any = type("Other", (Scaffold,), {})
    assert other.refusals == Scaffold.refusals


def test_a_loop_of_its_own_is_refused_before_it_begins() -> None:
    kind: Any = type("Loop", (Algorithm,), dict.fromkeys(Algorithm.__abstractmethods__))
    kind(SimpleNamespace(postprocessors=[WeightByUser()]))
    for mechanism in MECHANISMS.values():
        context: Any = SimpleNamespace(postprocessors=[mechanism()])
        with pytest.raises(ValueError, match=NOBODY):
            kind(context)
        with pytest.raises(ValueError, match=r"^federated.algorithm trains its users by Clients"):
            Clients(context)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_private_user_comes_once_in_a_cohort(mechanism: str) -> None:
    drawn = backend(MECHANISMS[mechanism](), sampler="replacement")
    with pytest.raises(ValueError, match="twice the clipping bound"):
        one_round(drawn, FederatedAveraging(), cohort_size=3)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_nothing_changes_an_update_after_it_was_clipped(mechanism: str) -> None:
    """A weighting there would multiply the sensitivity by a user's images."""
    data = FederatedImageDataset(NumberedStore([3, 2]), WHOLE, seed=1, noise_seed=7)
    order = [MECHANISMS[mechanism](), WeightByDatapoints()]
    with pytest.raises(ValueError, match="place the mechanism last"):
        CentrallyEvaluatedBackend(data, seed=1, postprocessors=order)


class Louder(Rule):
    """Updates times 50, and a number besides."""

    def scale(self, num_steps: int) -> float:
        return 50.0

    def counts(self, num_steps: int) -> Mapping[str, float]:
        return {"count": 1000.0}


class Pushed(Rule):
    """Every step is corrected, and the user sends its update again, a thousand times as long."""

    correction = "step"

    def user(self, user_id: str | None) -> Any:
        shapes = {n: p.shape for n, p in Setting([1]).backbone().named_parameters(prefix="backbone")}

        def finish(update: Mapping[str, Tensor], *_: Any) -> Mapping[str, Tensor]:
            return {f"again/{name}": 1000 * t for name, t in update.items()}

        return SimpleNamespace(correction={n: torch.ones(s) for n, s in shapes.items()}, finish=finish)


@pytest.mark.parametrize("rule", [Louder, Pushed])
def test_the_bound_holds_over_all_that_a_user_sends(rule: type[Rule]) -> None:
    """An author may argue for privacy; then the engine must clip what pfl's loop clips."""

    class Argued(OnPfl):
        refusals: ClassVar[Refusals] = {}

        def rule(self, model: Any, context: Any) -> Rule:
            return rule()

    sizes = [1, 2, 9]

    def setting() -> Setting:
        return Setting(sizes, by_images=False, algorithm=Argued(NO_RUN), more=[without_noise(0.01)])

    sums = [setting().run(engine)[0] for engine in (False, True)]
    for total in sums:
        assert 0 < norm(total) <= 0.01 * len(sizes)
    assert len(sums[0]) > len(list(Setting(sizes).backbone().parameters()))
    assert distance(*sums[::-1]) <= rounding_of(setting())
