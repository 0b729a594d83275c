"""The config of FedCV's classification: that of `benchmarks.visual_classification` with another protocol.

The defaults are FedCV's (He et al. 2021, arXiv 2111.11066) where its paper or its code states them; what
differs is listed in this folder's README.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.core.config.benchmark import Benchmark
from benchmarks.core.config.client_data import check_clients
from benchmarks.core.config.trees import Tree
from benchmarks.visual_classification.config import Config

PROTOCOL: Tree = {
    "model": {"arch": "efficientnet_b0", "input_size": 32, "normalisation": "half"},
    "augment": {"crop": "padded", "flip": "horizontal", "label_smoothing": 0.1},
    "local": {
        "learning_rate": 0.01,
        "momentum": 0.9,
        "weight_decay": 1e-5,
        "num_epochs": 1,
        "batch_size": 32,
    },
    "server": {"optimizer": "sgd", "learning_rate": 1.0},
    "federated": {"num_rounds": 4000, "cohort_size": 10},
    "centralised": {
        "optimizer": "sgd",
        "learning_rate": 0.01,
        "momentum": 0.9,
        "weight_decay": 1e-5,
        "num_epochs": 400,
        "batch_size": 256,
        "schedule": "exponential",
        "schedule_factor": 0.97 ** (1 / 2.4),
        "warmup_epochs": 3,
        "warmup_learning_rate": 1e-6,
    },
    "privacy": {"epsilon": 2.0, "mechanism": "gaussian", "clipping_bound": 0.5},
    "local_privacy": {"clipping_bound": 0.5},
    "evaluation": {"every_rounds": 100, "every_epochs": 10, "best_by": "last"},
}
"""Batches, momentum, weight decay, smoothing and rounds are FedCV's, and its centralised schedule: 0.97
every 2.4 epochs, here in every epoch by as much less, after three epochs of warm-up."""
RECIPES: Mapping[str, Tree] = {
    "cifar100": {"data": {"dataset": "cifar100"}, "augment": {"cutout": 16}},
    "cifar10": {"data": {"dataset": "cifar10"}},
    "gld23k": {
        "data": {"dataset": "landmarks", "image_size": 256},
        "model": {"input_size": 224},
        "augment": {"crop": "resized", "color_jitter": 0.4, "random_erasing": 0.2},
    },
    "efficientnet": {"model": {"arch": "efficientnet_b0"}},
    "mobilenetv3": {"model": {"arch": "mobilenet_v3_large"}},
    "vit": {"model": {"arch": "vit_b_16"}},
    "lite0": {"model": {"arch": "efficientnet_lite0", "normalisation": "efficientnet_lite"}},
    "ft": {"model": {"pretrained": True}},
    "sfl": {"model": {"pretrained": False}},
    "fz": {"model": {"pretrained": True, "trained": "head"}},
    "step-decay": {"local": {"schedule": "exponential", "schedule_factor": 0.999}},
    "centralised": {"mode": "centralised"},
    "fedprox": {"federated": {"algorithm": "fedprox"}},
    "fednova": {"federated": {"algorithm": "fednova"}},
    "scaffold": {"federated": {"algorithm": "scaffold"}},
    "small": {
        "data": {"dataset": "cifar10", "partition": "lda-0.5-clients-10-seed-42"},
        "model": {"arch": "lenet"},
        "augment": {"label_smoothing": 0.0},
        "local": {"batch_size": 64},
        "federated": {"num_rounds": 50},
        "evaluation": {"every_rounds": 5},
    },
    "search": {
        "model": {"arch": "darts_search", "cells": 3, "cell_channels": 4, "groups": 2},
        "local": {
            "learning_rate": 0.025,
            "schedule": "cosine",
            "final_learning_rate": 0.001,
            "weight_decay": 3e-4,
            "max_grad_norm": 5.0,
        },
        "federated": {"algorithm": "fednas"},
    },
    "private": {"federated": {"weighting": "users"}, "privacy": {"epsilon": 2.0}},
}
"""Data, networks, FedCV's modes (ft: fine-tuned, sfl: from scratch, fz: the head alone), algorithms, and the
setting in which all algorithms are compared (small: CIFAR-10, 10 clients by LDA(0.5), LeNet); search: a small
network of FedNAS' search, with the learning rates of its paper."""
CLASSIFICATION = Benchmark(
    Config,
    Path(__file__).parent / "configs",
    "cifar100-efficientnet-ft-a0.5",
    RECIPES,
    PROTOCOL,
    check_clients,
)


parse = CLASSIFICATION.parse
"""The run that a command line asks for."""
