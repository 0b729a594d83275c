"""FedAMSGrad: the server's Adam with a second moment that never falls
(Wang, Lin and Chen 2022, "Communication-Efficient Adaptive Federated Learning", arXiv 2205.02719; Reddi, Kale
and Kumar 2018).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from pfl_ext.algorithms.optimizers import OptimizerConfig, server_optimizer


@server_optimizer("amsgrad", "beta1", "beta2", "epsilon")
def amsgrad(params: ParamsT, config: OptimizerConfig, options: Any) -> torch.optim.Optimizer:
    """torch's."""
    betas = config.beta1, config.beta2
    return torch.optim.Adam(params, config.learning_rate, betas, config.epsilon, amsgrad=True)
