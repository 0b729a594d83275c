# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Look at FLAIR-like data
#
# This page shows who the users are, what they photograph, how much they differ, and what changes if the same images are
# assigned otherwise. Nothing is downloaded: a small synthetic data set is drawn, with FLAIR's shape (users, labels and
# their skew), but *not* FLAIR's photos. `make flair-data` downloads the real file. Set `DATA` to its path, and all cells
# work on it. In Colab, the first cell installs the package; put the address of this repository in it.

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
import matplotlib.pyplot as plt
import numpy as np

from dataset.flair.mini import MiniSpec, write_mini
from dataset.partitions.statistics import as_text, measure
from dataset.store.hdf5 import DataFile
from dataset.store.views import LabelSetView

DRAWN = Path("data/explore.hdf5")
DATA = DRAWN
if DATA == DRAWN and not DATA.exists():
    DATA.parent.mkdir(exist_ok=True)
    write_mini(DATA, MiniSpec(train_users=80, val_users=20, test_users=20, image_size=36, num_fine_labels=68))

# %% [markdown]
# ## Users
#
# FLAIR's users are the people who took the photos. Most have a handful of photos, a few have hundreds. No user is in
# two splits.

# %%
task = LabelSetView(DataFile(DATA), "labels", 36)
for name in ("train", "val", "test"):
    sizes = np.diff(task.split(name).user_offsets)
    median, most = np.median(sizes), sizes.max()
    print(f"{name:>5}: {len(sizes)} users, {sizes.sum()} images, median {median:.0f}, most {most}")

# %%
users = task.split("train")
sizes = np.diff(users.user_offsets)
labels = users.targets(np.arange(users.num_images))
order = np.argsort(-labels.mean(0))
names = [task.label_names[k] for k in order]

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.step(np.arange(1, len(sizes) + 1), np.sort(sizes)[::-1], where="mid", color="#0072B2")
left.set(xscale="log", yscale="log", xlabel="user, the largest first", ylabel="images")
right.bar(names, 100 * labels.mean(0)[order], color="#0072B2")
right.tick_params("x", rotation=60, labelsize=8)
right.set(ylabel="share of images (%)")
plt.show()

# %% [markdown]
# ## Pictures
#
# Four pictures of each of three users, with their labels. In the real file these are photos. Here each label is a mark
# in the picture, which a network can learn to recognise.

# %%
some = np.argsort(-sizes, kind="stable")[[3, 6, 9]]
figure, grid = plt.subplots(3, 4, figsize=(9, 8), layout="constrained")
for row, user in zip(grid, some):
    images, targets = users.read(users.user_offsets[user] + np.arange(4))
    for axes, image, target in zip(row, images, targets):
        axes.imshow(image)
        axes.set_title(",\n".join(task.label_names[k] for k in np.flatnonzero(target)), fontsize=7)
        axes.set(xticks=[], yticks=[])
    row[0].set_ylabel(f"user {users.user_ids[user]}", fontsize=8)
plt.show()

# %% [markdown]
# ## Skew
#
# Users photograph different things. This makes the benchmark hard. Each row is a user, each column a label. The colour
# shows the share of the user's images that have the label.

# %%
largest = np.argsort(-sizes, kind="stable")[:12]
shares = [labels[users.user_offsets[u] : users.user_offsets[u + 1]][:, order].mean(0) for u in largest]
figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
shown = axes.imshow(100 * np.array(shares), cmap="cividis", vmin=0, vmax=100, aspect="auto")
axes.set_xticks(np.arange(len(names)), names, rotation=60, ha="right", fontsize=8)
axes.set(ylabel="user, the largest first", yticks=[])
figure.colorbar(shown, label="share of the user's images (%)")
plt.show()

# %% [markdown]
# ## In numbers
#
# `python -m dataset.partitions FILE` prints these numbers for any file, and `--output_dir` draws them. Options such as
# `--partition lda=0.1 --clients 20` assign the training images to other clients, and show how the numbers change. They
# need one class an image: here most images have several and are left out.

# %%
print(as_text([statistics for statistics, _ in measure(DataFile(DATA))]))

# %% [markdown]
# Next: [train and read the results](train.ipynb).
