# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A new algorithm in thirty lines
#
# **FedExP** (Jhunjhunwala, Wang and Joshi 2023, [arXiv:2301.09604](https://arxiv.org/abs/2301.09604)): if the users'
# updates point in different directions, their mean is short, and the server can take a larger step. In each round the
# step is max(1, sum of |update|^2 / (2 M (|mean|^2 + epsilon))) for M users.
#
# An algorithm computes the next state from the current one. The project provides local training, the engine, several
# workers, checkpoints, resuming, scores and files. Private training with a new algorithm is refused until its file
# explains why it may be allowed. In Colab, put the address of this repository in the first cell.

# %%
import importlib.util
import subprocess
import sys
from pathlib import Path

CHECKOUT = next((p for p in (Path.cwd(), *Path.cwd().parents) if (p / "pfl_ext").is_dir()), None)
if CHECKOUT:
    sys.path.insert(0, str(CHECKOUT))
elif importlib.util.find_spec("pfl_ext") is None:
    words = [sys.executable, "-m", "pip", "install", "-q", "git+https://github.com/OWNER/REPOSITORY"]
    subprocess.run(words, check=True)

# %%
import json
import os
from typing import Annotated

import matplotlib.pyplot as plt
import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from benchmarks.flair.train import main as train
from pfl_ext.algorithms.algorithm import Algorithm, register
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.configs import STRICT

# %% [markdown]
# ## The algorithm
#
# In a file of its own, `pfl_ext/algorithms/fedexp.py`, the class would be found automatically.


# %%
@dataclass(frozen=True, config=STRICT)
class FedExPOptions:
    epsilon: Annotated[float, Field(ge=0)] = 1e-3


@register("fedexp")
class FedExP(Algorithm[Weights]):
    options = FedExPOptions

    def init(self, seed):
        self.clients = Clients(self.context)
        return self.clients.weights()

    def round(self, state, number):
        users = self.clients.cohort(number)
        updates, line = self.clients.each_update([state] * len(users), users, number)
        mean = {name: sum(update[name] for update in updates) / len(users) for name in state}
        squares = sum(float((u**2).sum()) for update in updates for u in update.values())
        square = sum(float((m**2).sum()) for m in mean.values())
        step = max(1.0, squares / (2 * len(users) * (square + self.context.options.epsilon)))
        return {name: w + step * mean[name] for name, w in state.items()}, {**line, "server_step": step}

    def model(self, state):
        return self.clients.model(state)

    def tensors(self, state):
        return state

    def load(self, state, tensors):
        return {name: tensors[name].to(w.device) for name, w in state.items()}


# %% [markdown]
# ## Compared with FedAvg
#
# FedAvg has a plain server step. Both give all users the same weight; everything else is the same.

# %%
ROUNDS = int(os.environ.get("NOTEBOOK_ROUNDS", "60"))
WORDS = [
    "--config=fl-r-17",
    "--data_path=mini",
    f"--federated.num_rounds={ROUNDS}",
    "--federated.weighting=users",
    "--evaluation.every_rounds=5",
    "--runtime.progress=false",
]

# %%
plain = ["--server.optimizer=sgd", "--server.learning_rate=1"]
train([*WORDS, *plain, "--federated.algorithm=fedavg", "--run_dir=runs/notebook-fedavg"])

# %%
train([*WORDS, "--federated.algorithm=fedexp", "--run_dir=runs/notebook-fedexp"])

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for name, colour in (("fedavg", "#0072B2"), ("fedexp", "#E69F00")):
    text = Path(f"runs/notebook-{name}/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    left.plot(
        *np.array([(line["round"], line["val"]["C-AP"]) for line in lines if "val" in line]).T,
        color=colour,
        label=name,
    )
steps = [(line["round"], line["server_step"]) for line in lines if "server_step" in line]
right.plot(*np.array(steps).T, color="#E69F00")
left.set(xlabel="round", ylabel="val C-AP (%)", ylim=(0, None))
left.legend(frameon=False)
right.set(xlabel="round", ylabel="FedExP's step of the server", ylim=(0, None))
plt.show()

# %% [markdown]
# One seed says little. [Which algorithm, when](../which_algorithm.md) shows how results are compared with several seeds.
# Before you trust an algorithm, test it against its equations, as [CONTRIBUTING](../../CONTRIBUTING.md) asks.
# [Adding something of your own](../extending.md) explains networks, optimisers, tasks and partitions.
