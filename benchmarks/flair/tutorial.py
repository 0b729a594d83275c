# %% [markdown]
# # FLAIR on pfl in a few minutes
#
# Look at the data, train for a few rounds, read what a run leaves behind. This page needs no download: it draws a
# small data set with FLAIR's shape (users, labels and their skew; *not* FLAIR's photos). Everything works the same on
# the real file, `data/flair.hdf5`, which `make flair-data` puts in place: set `DATA` to it.
#
# The page is written in `benchmarks/flair/tutorial.py`; `python -m benchmarks.flair.notebook` executes it and writes
# the notebook.

# %%
import json
import os
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

ROOT = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "pfl_ext").is_dir())
os.chdir(ROOT)
sys.path.insert(0, str(ROOT))

from benchmarks.flair.train import main as train  # noqa: E402
from dataset.flair.mini import MiniSpec, write_mini  # noqa: E402
from dataset.store.hdf5 import DataFile  # noqa: E402
from dataset.store.label_sets import LabelSetView  # noqa: E402

DATA = Path("data/tutorial.hdf5")
DATA.parent.mkdir(exist_ok=True)
spec = MiniSpec(
    train_users=80, val_users=20, test_users=20, image_size=36, difficulty=0.25, num_fine_labels=68
)
write_mini(DATA, spec)

# %% [markdown]
# ## Users
#
# FLAIR's users are the people who took the photos, so the data is split as it would be on their phones: most people
# have a handful of photos, a few have hundreds. No user is in two splits.

# %%
task = LabelSetView(DataFile(DATA), "labels", 36)
splits = {name: task.split(name) for name in ("train", "val", "test")}
for name, split in splits.items():
    sizes = np.diff(split.user_offsets)
    print(
        f"{name:>5}: {len(sizes)} users, {sizes.sum()} images, median {np.median(sizes):.0f}, most {sizes.max()}"
    )

# %%
users = splits["train"]
sizes = np.diff(users.user_offsets)
labels = users.targets(np.arange(users.num_images))
share = labels.mean(0)
order = np.argsort(-share)

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.step(np.arange(1, len(sizes) + 1), np.sort(sizes)[::-1], where="mid", color="#0072B2")
left.set(xscale="log", yscale="log", xlabel="user, the largest first", ylabel="images")
right.bar(np.arange(len(order)), 100 * share[order], color="#0072B2")
right.set_xticks(
    np.arange(len(order)), [task.label_names[k] for k in order], rotation=60, ha="right", fontsize=8
)
right.set(ylabel="share of images (%)")
plt.show()

# %% [markdown]
# ## Pictures
#
# Four pictures of each of three users, with their labels: several at once. On the real file these are photos; here
# each label is a mark that the network can learn to see.

# %%
some = np.argsort(-sizes, kind="stable")[[3, 6, 9]]
figure, grid = plt.subplots(3, 4, figsize=(9, 8), layout="constrained")
for row, user in zip(grid, some):
    images, targets = users.read(users.user_offsets[user] + np.arange(4))
    for axes, image, target in zip(row, images, targets):
        axes.imshow(image)
        axes.set_title(",\n".join(task.label_names[k] for k in np.flatnonzero(target)), fontsize=7)
        axes.axis("off")
    row[0].text(-4, 18, f"user {users.user_ids[user]}", rotation=90, ha="right", va="center", fontsize=8)
plt.show()

# %% [markdown]
# ## Skew
#
# What makes the benchmark hard: users photograph different things. Each row is a user, each column a label, the
# shade says on how many of the user's images it stands.

# %%
largest = np.argsort(-sizes, kind="stable")[:12]
mine = [labels[users.user_offsets[u] : users.user_offsets[u + 1]][:, order].mean(0) for u in largest]
figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
shown = axes.imshow(100 * np.array(mine), cmap="cividis", vmin=0, vmax=100, aspect="auto")
axes.set_xticks(
    np.arange(len(order)), [task.label_names[k] for k in order], rotation=60, ha="right", fontsize=8
)
axes.set(ylabel="user, the largest first", yticks=[])
figure.colorbar(shown, label="share of the user's images (%)")
plt.show()

# %% [markdown]
# ## A short federated training
#
# In each round the server sends the model to a cohort of users, each trains on his or her own images, and the server
# takes the mean of what changed as a step of Adam. The call below is the command
# `python -m benchmarks.flair.train --config fl-r-17 --scale mini ...`: every constant is a key, and the paper's
# values are the defaults. The paper trains 5,000 rounds of 200 users; these are a few rounds of a few.

# %%
RUN = Path(os.environ.get("TUTORIAL_RUN", "runs/tutorial"))
ROUNDS = os.environ.get("TUTORIAL_ROUNDS", "30")
train(
    [
        "--config=fl-r-17",
        "--scale=mini",
        f"--data_path={DATA}",
        f"--run_dir={RUN}",
        f"--federated.num_rounds={ROUNDS}",
        "--federated.cohort_size=8",
        "--evaluation.every_rounds=3",
        "--runtime.progress=false",
    ]
)

# %% [markdown]
# ## What a run leaves behind
#
# `metrics.jsonl` has a line a round, `results.json` the paper's columns on val and test, `config.yaml` every constant,
# `model.safetensors` the network. **C-AP** is the mean over labels of each one's average precision, **O-AP** that of
# all pairs of image and label together. Guessing has the labels' mean prevalence, so that is the line to beat. With
# so few test users, a label of one or two images can have any AP: read the common ones.

# %%
lines = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
results = json.loads((RUN / "results.json").read_text())
scored = [line for line in lines if "val" in line]
guess = 100 * np.mean(list(results["prevalence"].values()))

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", width_ratios=(2, 3))
left.plot(
    [line["round"] for line in scored], [line["val"]["C-AP"] for line in scored], color="#0072B2", label="val"
)
left.axhline(guess, color="#777777", linestyle=":", label="guessing (test)")
left.set(xlabel="round", ylabel="C-AP (%)", ylim=(0, None))
left.legend(frameon=False)
names = [task.label_names[k] for k in order]
right.bar(names, [results["per_class_ap"][name] for name in names], color="#0072B2", label="AP on test")
right.plot(
    names, [100 * results["prevalence"][name] for name in names], "_", color="#E69F00", label="guessing"
)
right.set_xticks(np.arange(len(names)), names, rotation=60, ha="right", fontsize=8)
right.set(ylabel="AP (%)")
right.legend(frameon=False)
plt.show()
print(f"test C-AP {results['test']['C-AP']:.1f} %, guessing {guess:.1f} %")

# %% [markdown]
# The same call again would show these results and train nothing: a directory holds one run. Killed half-way, it goes
# on from its checkpoint, to the same numbers.
#
# ## From here
#
# * `make flair-fl CONFIG=fl-f-17`: the paper's settings; `make flair-pfl`: with differential privacy, where
#   `privacy.json` says what is promised; `make flair-c`: all images in one place.
# * `--data.partition iid` deals the same images to users at random: what does the skew cost?
# * `make flair-sweep SWEEP=learning-rates LOCAL=1`: search; `--runtime.track wandb`: watch.
# * [The benchmark card](README.md) has the protocol, and every deviation from it.
