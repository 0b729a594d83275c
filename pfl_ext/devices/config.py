"""The config section of users' devices: their speeds, when they are on, and what happens to late users.

Every draw is a function of (seed, purpose, user) or (seed, purpose, round, user). Time is a sum of predicted
seconds and is never measured, so a run has the same cohorts on every machine and any number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass

from pfl_ext.configs import STRICT, Fraction

Late = Literal["wait", "drop", "partial"]


@dataclass(frozen=True)
class DeviceClass:
    """Devices of one speed.

    ``share`` of the users have such a device. ``ms_per_sample`` is the time of one forward pass of one image,
    in milliseconds. ``kbps_up`` and ``kbps_down`` are 1,000 bits per second to the server and from it.
    """

    share: float
    ms_per_sample: float
    kbps_up: float
    kbps_down: float


def _device_class(name: str, values: Any) -> DeviceClass:
    """One of ``devices.classes``.

    Raises:
        ValueError: one line, when a key is missing or unknown, or a value is no positive number.
    """
    keys, where = [item.name for item in fields(DeviceClass)], f"devices.classes.{name}"
    if not isinstance(values, Mapping) or set(values) != set(keys):
        raise ValueError(f"{where} needs exactly the keys {', '.join(keys)}")
    numbers = {}
    for key in keys:
        try:
            numbers[key] = math.nan if isinstance(values[key], bool) else float(values[key])
        except (TypeError, ValueError):
            numbers[key] = math.nan
        if not 0 < numbers[key] < math.inf:
            raise ValueError(f"{where}.{key} is {values[key]!r}: give a positive number")
    return DeviceClass(**numbers)


@dataclass(frozen=True, config=STRICT)
class DevicesConfig:
    """Slow and unreliable devices. Any of these keys turns them on; ``--devices none`` turns them off."""

    classes: Mapping[str, Any] | None = None
    """Speeds by name, each with share, ms_per_sample, kbps_up, kbps_down; none: there is no clock."""
    sigma: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Standard deviation of the logarithm of each speed within a class; the median is the class's speed."""
    capacities: str | None = None
    """CSV file client,ms_per_sample,kbps_up,kbps_down with each device's speeds, instead of classes."""
    capacities_sha256: str | None = None
    """SHA-256 of that file, which is filled in."""
    availability: str | None = None
    """CSV file client,on,off: seconds between which devices are on; a device that is off cannot take part."""
    availability_sha256: str | None = None
    """SHA-256 of that file, which is filled in."""
    availability_period_s: PositiveFloat | None = None
    """Seconds after which the times of that file repeat."""
    drop_out: Fraction = 0.0
    """Probability that a user of a round is lost before it reports, independent of its data."""
    deadline_s: PositiveFloat | None = None
    """Virtual seconds from a round's start within which users must report; none: no limit."""
    late: Late = "wait"
    """Users who miss the deadline, and stragglers: wait for them, drop them, or take their partial work."""
    over_selection: Annotated[float, Field(ge=1, le=10)] = 1.0
    """Number of selected users over the cohort's size; the first to report are kept. 1: no extra users."""
    stragglers: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of each cohort that has time for 1 to local.num_epochs - 1 epochs, drawn each round (FedProx)."""

    def __post_init__(self) -> None:
        self._check_speeds()
        if (self.availability is None) != (self.availability_period_s is None):
            raise ValueError("devices.availability and devices.availability_period_s must be set together")
        for key in ("capacities", "availability"):
            if getattr(self, f"{key}_sha256") is not None and getattr(self, key) is None:
                raise ValueError(
                    f"devices.{key}_sha256 is the checksum of a file that is not set: set devices.{key}"
                )
        if self.late == "wait":
            for key, value in (("deadline_s", self.deadline_s), ("stragglers", self.stragglers)):
                if value:
                    raise ValueError(f"devices.{key} has no effect where devices.late is wait: choose drop")
        elif self.deadline_s is None and not self.stragglers:
            raise ValueError(
                f"devices.late is {self.late}, but without a deadline no user is late: set devices.deadline_s"
            )

    def _check_speeds(self) -> None:
        """Refuse speeds that contradict one another, and what needs speeds without any."""
        shares = sum(each.share for each in self.device_classes)
        if self.classes and not math.isclose(shares, 1, abs_tol=1e-6):
            raise ValueError(f"the shares of devices.classes add up to {shares:g}: make them add up to 1")
        if self.classes and self.capacities:
            raise ValueError("devices.classes and devices.capacities both set speeds: leave one of them out")
        if self.sigma and not self.classes:
            raise ValueError(
                "devices.sigma varies the speeds of devices.classes, which are not set: set "
                "devices.classes, or leave sigma out"
            )
        need_a_clock = {
            "deadline_s": self.deadline_s is not None,
            "availability": self.availability is not None,
            "over_selection": self.over_selection > 1,
        }
        for key, is_set in need_a_clock.items():
            if is_set and not self.has_clock:
                raise ValueError(f"devices.{key} needs speeds: set devices.classes or devices.capacities")

    @property
    def device_classes(self) -> list[DeviceClass]:
        """The device classes that `classes` describes."""
        return [_device_class(name, values) for name, values in (self.classes or {}).items()]

    @property
    def has_clock(self) -> bool:
        """Whether rounds take virtual time."""
        return bool(self.classes) or self.capacities is not None

    def check_epochs(self, num_epochs: int, replacement: bool) -> None:
        """Refuse options that have no meaning with the run's other keys.

        Raises:
            ValueError: one line with the reason.
        """
        if self.stragglers and num_epochs < 2:
            raise ValueError(
                f"devices.stragglers train fewer epochs than local.num_epochs, which is {num_epochs}: "
                "set local.num_epochs to at least 2"
            )
        if replacement:
            raise ValueError(
                "devices needs each user at most once in a round, but federated.replacement is true: "
                "set it to false"
            )
