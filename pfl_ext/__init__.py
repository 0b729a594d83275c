"""What pfl lacks. This package knows pfl and torch, and nothing of any one benchmark.

Import it before pfl. Under torchrun, pfl joins the workers as soon as its torch operations are imported, on
NCCL wherever there is CUDA, and without a timeout. This package makes `pfl_ext.workers.distributed` do that
instead.
"""

import importlib
import os

_launched = os.environ.pop("TORCHELASTIC_RUN_ID", None)
if _launched is not None:
    importlib.import_module("pfl.internal.ops.pytorch_ops")
    os.environ["TORCHELASTIC_RUN_ID"] = _launched
