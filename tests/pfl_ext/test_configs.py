"""What a config means by a value that is left out: to change one changes every run without it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from pfl_ext.aggregation.geometric_median import WeiszfeldOptions
from pfl_ext.aggregation.krum import MultiKrumOptions
from pfl_ext.aggregation.norm_bound import NormBoundOptions
from pfl_ext.aggregation.rule import SpooledOptions, ToleratedOptions
from pfl_ext.algorithms.fedir import ImportanceOptions
from pfl_ext.algorithms.fednova import FedNova
from pfl_ext.algorithms.fedprox import FedProx, ProximalOptions
from pfl_ext.algorithms.optimizers import ServerConfig
from pfl_ext.algorithms.scaffold import ScaffoldOptions
from pfl_ext.attacks.alie import ALIEOptions
from pfl_ext.attacks.on_updates import BoostOptions, GaussianOptions, SignFlipOptions
from pfl_ext.averaging import AveragingConfig
from pfl_ext.compression.compressor import FeedbackOptions
from pfl_ext.compression.low_rank import LowRankOptions
from pfl_ext.compression.quantised import UniformOptions
from pfl_ext.compression.sparse import RandomKOptions, TopKOptions
from pfl_ext.data.sampling import LocalSampling
from pfl_ext.devices.config import DevicesConfig
from pfl_ext.engine.training import LocalSGDConfig
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.image_changes import KEYED, ImageChanges
from pfl_ext.privacy.accounting import PrivacyConfig
from pfl_ext.privacy.local import LocalPrivacyConfig

SAMPLING = {
    "virtual_size": None,
    "num_epochs": 1,
    "batch_size": 32,
    "max_images": None,
    "cap": "random",
    "straddle": False,
    "shuffle": True,
    "reshuffle": True,
    "crop": "crop",
    "flip": "none",
    "input_size": 224,
    "padding": "zero",
    "views": None,
    "noise_by_user": False,
    "mixup": None,
    "cutmix": None,
    "keys": False,
}
SCHEDULE = {
    "schedule": "constant",
    "final_learning_rate": 0.0,
    "schedule_power": 1.0,
    "schedule_factor": None,
    "schedule_cycle": None,
    "schedule_from": 0,
}
SGD = {
    **SCHEDULE,
    "learning_rate": 0.1,
    "head_rate_factor": 1.0,
    "layer_decay": 1.0,
    "max_grad_norm": None,
    "clip_by": "global",
    "optimizer": "sgd",
    "momentum": 0.0,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-8,
    "weight_decay": 0.0,
}
SERVER = {
    **SCHEDULE,
    "optimizer": "sgd",
    "learning_rate": 1.0,
    "head_rate_factor": 1.0,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-8,
    "momentum": 0.0,
    "adam_form": "torch",
    "warmup_rounds": 0,
}
PRIVACY = {
    "epsilon": 2.0,
    "delta": None,
    "noise_cohort_size": None,
    "noise_population": None,
    "mechanism": "gaussian",
    "clipping": "flat",
    "clipping_bound": 1.0,
    "quantile": 0.5,
    "clip_step": 0.2,
    "indicator_std_fraction": 0.05,
    "accountant": "pld",
    "sampler": "poisson",
    "band": 1,
    "noise": "calibrated",
    "moments_multiplier": None,
    "mean_bound": 1.0,
    "square_bound": 1.0,
}
MODEL = {
    "arch": "resnet18",
    "input_size": 224,
    "pretrained": False,
    "norm": "auto",
    "groups": 32,
    "bottleneck": None,
    "random_features": None,
    "cells": 8,
    "cell_channels": 16,
    "genotype": None,
    "parties": None,
    "random_features_width": 1.0,
    "trained": "all",
    "last_blocks": 1,
    "lora_rank": 8,
    "lora_alpha": 8.0,
    "lora_trained": "both",
    "lora_targets": "all",
    "trained_names": None,
    "init": "torchvision",
    "normalisation": "imagenet",
    "dropout": False,
    "keep_head": False,
    "channel_norm": "group",
    "feature_format": "float32",
}
SPOOLED = {"bucket_size": 1, "max_state_gb": 16.0}
DEVICES = {
    "classes": None,
    "sigma": 0.0,
    "capacities": None,
    "capacities_sha256": None,
    "availability": None,
    "availability_sha256": None,
    "availability_period_s": None,
    "drop_out": 0.0,
    "deadline_s": None,
    "late": "wait",
    "over_selection": 1.0,
    "stragglers": 0.0,
}
LOCAL_PRIVACY = {"mechanism": "gaussian", "clipping_bound": 1.0, "epsilon": 8.0, "delta": 1e-6}


@pytest.mark.parametrize(
    "config, values",
    [
        (
            AveragingConfig(),
            {"average": "none", "average_decay": 0.99, "average_from_round": 0, "average_every": 1},
        ),
        (LocalSampling(), SAMPLING),
        (LocalSGDConfig(), SGD),
        (ServerConfig(), SERVER),
        (PrivacyConfig(epsilon=2.0), PRIVACY),
        (LocalPrivacyConfig(), LOCAL_PRIVACY),
        (ModelConfig(), MODEL),
        (ImageChanges(), dict.fromkeys(KEYED)),
        (FeedbackOptions(), {"error_feedback": True, "max_state_gb": 16.0}),
        (TopKOptions(), {"share": 0.01, "error_feedback": True, "max_state_gb": 16.0}),
        (RandomKOptions(), {"share": 0.01}),
        (UniformOptions(), {"bits": 8}),
        (LowRankOptions(), {"rank": 2, "iterations": 2, "error_feedback": True, "max_state_gb": 16.0}),
        (SpooledOptions(), SPOOLED),
        (ToleratedOptions(), {**SPOOLED, "tolerated": 0.2}),
        (MultiKrumOptions(), {**SPOOLED, "tolerated": 0.2, "kept": None}),
        (WeiszfeldOptions(), {**SPOOLED, "iterations": 4, "least_distance": 1e-5}),
        (NormBoundOptions(), {"bound": 1.0}),
        (SignFlipOptions(), {"scale": 1.0}),
        (BoostOptions(), {"scale": None}),
        (GaussianOptions(), {"scale": 1.0}),
        (ALIEOptions(), {"z": None}),
        (DevicesConfig(), DEVICES),
        (ImportanceOptions(), {"reweight": "none", "max_importance": None}),
        (ScaffoldOptions(), {"scaffold_option": None, "scaffold_correction": None, "max_state_gb": 16.0}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_is_left_out_means_what_it_meant(config: Any, values: dict[str, Any]) -> None:
    assert asdict(config) == values


def test_fedprox_has_a_proximal_term_of_its_own_and_fednova_none() -> None:
    assert FedProx.resolved(ProximalOptions()) == {"mu": 0.01}
    assert FedNova.resolved(ProximalOptions()) == {"mu": 0.0}
    assert (
        FedProx.resolved(ProximalOptions(mu=0.5)) == FedNova.resolved(ProximalOptions(mu=0.5)) == {"mu": 0.5}
    )
