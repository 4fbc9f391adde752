"""The devices that tests of this folder run on: the GPU, and the CPU so that their own logic is seen to work."""

from __future__ import annotations

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])
DEVICES = ["cpu", CUDA]
