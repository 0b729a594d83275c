"""Hyperparameter sweeps."""

import os

# Importing pfl asks torch whether there is a GPU. Answered by NVML, this leaves no CUDA context, which the
# trials, forks of the sweep's process, could not use.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
