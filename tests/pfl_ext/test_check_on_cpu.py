"""The engine's check where there is no GPU: the engine as it stands, beside pfl's loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pfl_ext.data.federated_dataset import Member
from pfl_ext.engine.lane import Lane
from pfl_ext.engine.selfcheck import CPU_LIMIT, PATHS, CheckOnCpu, SelfCheck
from pfl_ext.engine_trial import Sent, Trial
from tests.pfl_ext.engine.setting import LABELS, Setting, distance, private
from tests.pfl_ext.samplings import local_sampling

SIZES = [3, 1, 9, 2, 0, 5]


def test_an_engine_that_computes_what_pfls_loop_does_is_relied_on(tmp_path: Path) -> None:
    check = CheckOnCpu(kept=tmp_path)
    ours = Setting(SIZES, check=check).run(True)[0]
    assert check.outcome is not None
    assert (check.outcome["path"], check.outcome["users"], check.outcome["failures"]) == (0, 3, [])
    assert check.outcome["deviation"] <= check.outcome["limit"] == CPU_LIMIT
    assert distance(ours, Setting(SIZES).run(True)[0]) == 0, "the check leaves no trace in the round"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def by_pfl(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The users that pfl's loop trains for a comparison."""
    trained, sent = list[int](), Trial._sent

    def noted(self: Trial, member: Member) -> Sent:
        trained.append(member.user)
        return sent(self, member)

    monkeypatch.setattr(Trial, "_sent", noted)
    return trained


def test_bfloat16_may_be_as_far_off_as_pfls_own(by_pfl: list[int]) -> None:
    check = CheckOnCpu()
    Setting(SIZES, amp=torch.bfloat16, check=check).run(True)
    assert check.outcome is not None
    assert check.outcome["path"] == 0
    assert CPU_LIMIT < check.outcome["limit"] < 0.5
    assert len(by_pfl) == 6, "in bfloat16, and in float32"


def test_pfls_loop_trains_once_what_is_in_float32_already(by_pfl: list[int]) -> None:
    check = CheckOnCpu()
    Setting(SIZES, check=check).run(True)
    assert check.outcome is not None
    assert check.outcome["limit"] == CPU_LIMIT
    assert len(by_pfl) == len(set(by_pfl)) == 3


def biases_of_no_effect() -> nn.Module:
    """A norm for each channel takes away what a bias adds, so the bias' gradient is nothing but rounding."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 64, 3, padding=1)
    rest = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, LABELS)
    return nn.Sequential(convolution, nn.GroupNorm(64, 64), *rest)


def test_steps_that_magnify_rounding_are_checked_by_steps_that_do_not() -> None:
    def setting(check: SelfCheck | None = None) -> Setting:
        adam: dict[str, Any] = {"adam": "adamw", "epsilon": 1e-10, "learning_rate": 1e-3}
        # a mean of three is rounded in another way than a sum of thirds
        thirds = local_sampling(input_size=10, batch_size=3)
        return Setting([9, 1], thirds, "none", backbone=biases_of_no_effect, check=check, **adam)

    check = CheckOnCpu()
    ours = setting(check).run(True)[0]
    assert check.outcome is not None
    assert check.outcome["path"] == 0
    assert distance(ours, setting().run(False)[0]) > CPU_LIMIT > 10 * check.outcome["deviation"]
    assert distance(ours, setting().run(True)[0]) == 0, "the check leaves no trace in the round"


def wrong_steps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lane, "_step", lambda *_: None)


def no_clipping(patch: pytest.MonkeyPatch) -> None:
    real = Lane.add
    patch.setattr(Lane, "add", lambda self, weight, scaling: real(self, weight, None))


def no_memory(patch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("made up\nand more")

    patch.setattr(Lane, "train", fail)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [(wrong_steps, "off by more"), (no_clipping, "off by more"), (no_memory, "ValueError: made up")],
)
def test_pfls_loop_trains_where_the_engine_is_wrong(
    wrong: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def setting(check: SelfCheck | None = None) -> Setting:
        return Setting(SIZES, by_images=False, more=[private(len(SIZES), noisy=False)], check=check)

    theirs = setting().run(False)[0]
    wrong(monkeypatch)
    check = CheckOnCpu()
    ours = setting(check).run(True, fuse=False)[0]
    assert check.outcome is not None
    assert check.outcome["path"] == len(PATHS)
    (failure,) = check.outcome["failures"]
    assert why in failure["why"]
    assert "\n" not in failure["why"]
    assert distance(ours, theirs) == 0


def test_a_check_for_gpus_does_nothing_on_a_cpu(tmp_path: Path) -> None:
    check = SelfCheck(tmp_path, kept=tmp_path)
    Setting(SIZES, check=check).run(True)
    assert check.outcome is None
