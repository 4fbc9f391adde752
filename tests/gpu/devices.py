"""The devices these tests run on: the GPU, and where they can the CPU, so that the tests are tested."""

from __future__ import annotations

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])
DEVICES = ["cpu", CUDA]
