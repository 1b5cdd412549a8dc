"""Without a CUDA device, Triton kernels run through its interpreter: chosen before anything imports triton."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def no_profiles(tmp_path_factory, monkeypatch):
    """Profiles of this machine reach no test, and those that tests leave reach nothing else."""
    place = tmp_path_factory.mktemp("profiles")
    monkeypatch.setattr("bass_cli.profiling.store.folder", lambda: place)
