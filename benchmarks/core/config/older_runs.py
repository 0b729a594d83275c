"""What keeps runs readable that are older than a key of the config, or than the name of a value."""

from __future__ import annotations

from dataclasses import asdict

from pydantic import BeforeValidator

from pfl_ext.aggregation.rule import MEAN
from pfl_ext.attacks.attack import HONEST
from pfl_ext.compression.compressor import PLAIN
from pfl_ext.models.config import CALLED
from pfl_ext.models.small import NETWORKS
from pfl_ext.schedules import DecayConfig

YOUNG_SCHEDULES = {
    f"{section}.{key}": value
    for section in ("local", "server", "centralised")
    for key, value in asdict(DecayConfig()).items()
    if section != "server" or key not in ("schedule", "final_learning_rate")
}
YOUNGER = {
    "augment.padding": "zero",
    "augment.views": None,
    "augment.label_smoothing": 0.0,
    "augment.cutout": None,
    "augment.color_jitter": None,
    "augment.rand_augment": None,
    "augment.random_erasing": None,
    "data.test_users": None,
    "augment.noise": None,
    "augment.noise_by_user": False,
    "augment.mixup": None,
    "augment.cutmix": None,
    "loss.focal_gamma": 0.0,
    "loss.absent_gamma": None,
    "loss.absent_margin": 0.0,
    "loss.dice": 0.0,
    "loss.class_weights": None,
    "centralised.warmup_epochs": 0,
    "centralised.warmup_learning_rate": 0.0,
    "model.normalisation": "imagenet",
    "model.norm": "auto",
    "model.dropout": False,
    "model.keep_head": False,
    "model.last_blocks": 1,
    "model.lora_rank": 8,
    "model.lora_alpha": 8.0,
    "model.lora_trained": "both",
    "model.lora_targets": CALLED,
    "model.trained_names": None,
    "model.channel_norm": "group",
    "model.feature_format": "float32",
    "model.parties": None,
    "model.random_features": None,
    "model.cells": 8,
    "model.cell_channels": 16,
    "model.genotype": None,
    "model.random_features_width": 1.0,
    "privacy.moments_multiplier": None,
    "privacy.mean_bound": 1.0,
    "privacy.square_bound": 1.0,
    "devices": None,
    "evaluation.average": "none",
    "evaluation.average_decay": 0.99,
    "evaluation.average_from_round": 0,
    "evaluation.average_every": 1,
    "own_code": None,
    "local.shuffle": True,
    "local.optimizer": "sgd",
    "local.beta1": 0.9,
    "local.beta2": 0.999,
    "local.epsilon": 1e-8,
    "local.head_rate_factor": 1.0,
    "server.head_rate_factor": 1.0,
    "centralised.head_rate_factor": 1.0,
    "local.layer_decay": 1.0,
    "centralised.layer_decay": 1.0,
    "compression.kind": PLAIN,
    "compression.options": None,
    "aggregation.kind": MEAN,
    "aggregation.options": None,
    "attack.kind": HONEST,
    "attack.options": None,
    "attack.share": 0.2,
    "federated.options.room": 0.0,
    "federated.options.scored_on": "train",
    "federated.options.sigma": 1.0,
    "federated.options.sigma0": 1.0,
    "federated.options.gamma": 1.0,
    **YOUNG_SCHEDULES,
}
"""Keys that are younger than the first runs, and the value that says what those runs did."""
CHANGED = {"model": {"lora_targets": CALLED}}
"""Those of these keys whose default today is another value, as a tree."""
_CALLING = """
cifar_cnn darts darts_search efficientnet_lite0 fedavg_cnn fedrep_cnn lenet moon_cnn scatternet simple_cnn
ssdlite_efficientnet_lite0 ssdlite_mobilenet_v3_large vgg9
""".split()  # noqa: SIM905
_ENCODERS = ("efficientnet_lite0", "mobilenet_v2", "resnet18", "resnet34", "resnet50", "resnet101")
_CALLING += [
    f"{kind}_{name}" for kind in ("deeplabv3plus", "fasterrcnn", "fcos", "unet") for name in _ENCODERS
]
"""This project's networks when ``model.lora_targets`` was new: they call each layer that can have LoRA."""
YOUNG_SECTIONS = ("compression", "aggregation", "attack", "loss")
"""Sections that are younger than the first runs."""
OLD_WORDS = {"model.init": ("paper", "keras"), "privacy.noise": ("paper_bug", "rounds_as_epochs")}
"""The old name of a value, which the config.yaml of runs still has, and today's, by key."""


def calls_all(arch: str) -> bool:
    """Whether a network is known to call each layer that can have an adapter: `CALLED` is all of them."""
    if arch in NETWORKS.names():
        return arch in _CALLING
    return not arch.startswith(("vit_", "swin_"))


def by_today(key: str) -> BeforeValidator:
    """What reads the old name of a value of this key as today's."""
    old, new = OLD_WORDS[key]
    return BeforeValidator(lambda word: new if word == old else word)
