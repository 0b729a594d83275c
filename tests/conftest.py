"""One thread for torch: the tests' steps are small, and other work shares the cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
