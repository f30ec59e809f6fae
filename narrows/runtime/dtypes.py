"""Types of weights and KV, by the names that settings use."""

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
