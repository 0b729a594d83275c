"""What pfl lacks; knows pfl and torch, and nothing of any one benchmark.

Import this package before pfl: under torchrun pfl joins the workers by itself as soon as its torch operations
are imported, on NCCL wherever there is CUDA and without a timeout; `pfl_ext.workers.distributed` does that
instead.
"""

import importlib
import os

_launched = os.environ.pop("TORCHELASTIC_RUN_ID", None)
if _launched is not None:
    importlib.import_module("pfl.internal.ops.pytorch_ops")
    os.environ["TORCHELASTIC_RUN_ID"] = _launched
