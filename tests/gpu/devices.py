"""The devices these tests run on: the GPU, and where they can the CPU, so that the tests are tested."""

from __future__ import annotations

import os

import pytest
import torch

from bench.gpu import REHEARSAL

IS_REHEARSED = os.environ.get(REHEARSAL) == "1"
"""Whether the CPU stands in for the GPU: `make gpu-rehearsal`."""

needs_cuda = pytest.mark.skipif(not (IS_REHEARSED or torch.cuda.is_available()), reason="needs a CUDA device")
CUDA = pytest.param("cpu" if IS_REHEARSED else "cuda", marks=[pytest.mark.gpu, needs_cuda], id="cuda")
DEVICES = ["cpu", CUDA]
