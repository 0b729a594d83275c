# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Train, and read the results of a run
#
# Two short federated runs on FLAIR's mini data set: one with its users, one with the same images assigned to users at
# random. How much accuracy is lost because users differ? In Colab, put the address of this repository in the first cell.

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

ROUNDS = int(os.environ.get("NOTEBOOK_ROUNDS", "60"))
WORDS = [
    "--config=fl-r-17",
    "--data_path=mini",
    f"--federated.num_rounds={ROUNDS}",
    "--evaluation.every_rounds=5",
    "--runtime.progress=false",
]

# %% [markdown]
# ## Train
#
# In each round the server sends the model to a cohort of users. Each user trains on their own images. The server uses the
# mean of the changes as the gradient of one step of Adam. These calls do the same as the command
# `python -m benchmarks.flair.train --config fl-r-17 --data_path mini ...`. Every constant is a key (`--help` lists them),
# and the paper's values are the defaults. The paper trains 5,000 rounds of 200 users.

# %%
train([*WORDS, "--run_dir=runs/notebook-users"])

# %%
train([*WORDS, "--run_dir=runs/notebook-iid", "--data.partition=iid"])

# %% [markdown]
# ## Read
#
# `metrics.jsonl` has one line for each round, `results.json` the paper's columns on val and test, `config.yaml` every
# constant, and `model.safetensors` the network. **C-AP** is the average precision of each label, averaged over the labels.
# **O-AP** is the average precision of all pairs of image and label together. Random guessing scores the labels' mean
# prevalence; a model must be better than this. A label that only one or two test images have can have any AP, so look at
# the common labels.


# %%
def read(run):
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    scored = [(line["round"], line["val"]["C-AP"]) for line in lines if "val" in line]
    return np.array(scored).T, json.loads(Path(run, "results.json").read_text())


runs = {"FLAIR's users": read("runs/notebook-users"), "dealt at random": read("runs/notebook-iid")}
prevalence = runs["FLAIR's users"][1]["prevalence"]
guess = 100 * np.mean(list(prevalence.values()))
names = sorted(prevalence, key=prevalence.get, reverse=True)

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", width_ratios=(2, 3))
for (name, (curve, results)), colour in zip(runs.items(), ("#0072B2", "#E69F00")):
    left.plot(*curve, color=colour, label=name)
    right.plot(names, [results["per_class_ap"][n] for n in names], "o", color=colour, label=name)
left.axhline(guess, color="#777777", linestyle=":", label="guessing (test)")
left.set(xlabel="round", ylabel="val C-AP (%)", ylim=(0, None))
left.legend(frameon=False)
right.plot(names, [100 * prevalence[n] for n in names], "_", color="#777777", label="guessing")
right.tick_params("x", rotation=60, labelsize=8)
right.set(ylabel="AP on test (%)")
right.legend(frameon=False)
plt.show()

# %%
for name, (_, results) in runs.items():
    test = results["test"]
    print(f"{name:>16}: test C-AP {test['C-AP']:.1f} %, O-AP {test['O-AP']:.1f} %; guessing {guess:.1f} %")

# %% [markdown]
# Here no accuracy was lost because users differ. With images assigned at random, all users have equally many images, so no
# user makes many local steps; after so few rounds, the number of steps matters most. One seed and 60 rounds decide nothing.
# The paper's Table 1 has both settings at full scale.
#
# The same call again shows these results and trains nothing, because a directory holds one run. A killed run resumes from
# its checkpoint and gives the same numbers. `python -m benchmarks.compare runs/a runs/b` shows runs side by side in one page.
#
# Next: [private training and its cost](private.ipynb).
