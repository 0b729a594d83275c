# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Private training, and its cost
#
# Differential privacy of users means: whoever sees the model learns hardly more about a person than if that person had
# never taken part. Each user's update is clipped to a maximum norm, and noise is added to the sum of the updates. This
# page shows what this costs, and on what the cost depends. In Colab, put the address of this repository in the first cell.

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

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.flair.train import main as train
from pfl_ext.privacy.accounting import PrivacyConfig

ROUNDS = int(os.environ.get("NOTEBOOK_ROUNDS", "60"))

# %% [markdown]
# ## Noise follows from the budget
#
# FLAIR has 41,131 training users, and the paper trains 5,000 rounds. The noise on the *mean* of the updates is the
# noise multiplier times the clipping bound, divided by the cohort size. Larger cohorts reduce it, but only up to a point:
# if nearly everybody takes part in many rounds, random sampling protects little. Larger cohorts help more with epsilon 8
# than with epsilon 2.

# %%
POPULATION, PAPER_ROUNDS = 41_131, 5_000
cohorts = [200, 1_000, 5_000]
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
for epsilon, colour in ((2, "#0072B2"), (8, "#009E73")):
    budget = PrivacyConfig(epsilon=epsilon, delta=1e-5, mechanism="gaussian")
    noise = [budget.calibrate(POPULATION, c, PAPER_ROUNDS).simulated.noise_multiplier / c for c in cohorts]
    axes.plot(cohorts, noise, "o-", color=colour, label=f"epsilon {epsilon}")
axes.set(xscale="log", yscale="log", xlabel="users in a round")
axes.set_xticks(cohorts, [f"{cohort:,}" for cohort in cohorts], minor=False)
axes.set_xticks([], minor=True)
axes.set(ylabel="noise on the mean update\n(clipping bounds)")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Three trainings
#
# The first is not private. The second has the noise of a system with FLAIR's 41,131 users, 5,000 of them in each round.
# The third has the noise of 100 users in each round. `privacy.noise_cohort_size` simulates a larger system, as the paper
# does: the model learns from the few users of this page and gets the noise that many users would need.

# %%
WORDS = [
    "--config=pfl-r-17",
    "--data_path=mini",
    f"--federated.num_rounds={ROUNDS}",
    "--evaluation.every_rounds=5",
    "--runtime.progress=false",
    "--seed=0",
]
SYSTEM = ["--privacy.noise_population=41131", "--privacy.epsilon=2", "--privacy.delta=1e-5"]

# %%
train([*WORDS, "--privacy=none", "--run_dir=runs/notebook-not-private"])

# %%
train([*WORDS, *SYSTEM, "--privacy.noise_cohort_size=5000", "--run_dir=runs/notebook-5000"])

# %%
train([*WORDS, *SYSTEM, "--privacy.noise_cohort_size=100", "--run_dir=runs/notebook-100"])


# %%
def curve(run):
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return np.array([(line["round"], line["val"]["C-AP"]) for line in lines if "val" in line]).T


figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
labels = {"not-private": "not private", "5000": "noise of 5,000 users", "100": "noise of 100 users"}
for (name, label), colour in zip(labels.items(), ("#777777", "#0072B2", "#D55E00")):
    axes.plot(*curve(f"runs/notebook-{name}"), color=colour, label=label)
axes.set(xlabel="round", ylabel="val C-AP (%)", ylim=(0, None))
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# Both private runs end about two points lower on val. One seed cannot tell the two amounts of noise apart, because a
# budget for 60 rounds instead of 5,000 needs little noise. [RESULTS](../../benchmarks/flair/RESULTS.md) has private
# training on real photos, over three seeds and several budgets.
#
# ## What is guaranteed
#
# `privacy.json` says whom the guarantee protects, and what it covers and does not cover. It has a paragraph for a paper.
# It states two guarantees: that of the simulated system, and that of this run with its few users, which is worth little.
# `--seed` makes a run repeatable, but whoever knows the seed can subtract the noise. Leave it out if you will publish the
# model. [Private training](../private.md) explains the choices. [Sharp edges](../sharp_edges.md) lists what no program can
# prevent.

# %%
statement = json.loads(Path("runs/notebook-5000/privacy.json").read_text())
print(statement["paragraph"])
print("\nnot covered:", *statement["not_covered"], sep="\n* ")

# %% [markdown]
# Next: [an algorithm of your own](algorithm.ipynb).
