"""The device of a process: a CUDA GPU, Apple's where a step would work, or the CPU."""

from collections.abc import Iterator

import pytest
import torch

from caddie.ops.products import product_dtype
from caddie.run.result import device_name
from caddie.runtime import distributed

MPS = torch.device("mps")


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    trial = distributed._apple_gpu_works  # which a test may replace
    trial.cache_clear()
    yield
    trial.cache_clear()


def test_apples_gpu_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_apple_gpu_works", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert distributed.local_device() == MPS
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert distributed.local_device() == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert distributed.local_device() == MPS
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert distributed.local_device() == torch.device("cpu")


def test_an_apple_gpu_on_which_a_step_fails_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim a GPU of Apple's that PyTorch does not have, as on this machine."""
    assert distributed.local_device() == torch.device("cpu")
    distributed._apple_gpu_works.cache_clear()
    asked = []
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: asked.append(True) or True)
    assert distributed.local_device() == distributed.local_device() == torch.device("cpu")
    assert len(asked) == 1, "it is found out once"


def test_the_trial_of_a_step_passes_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operations on the CPU in its place."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for name in ("randn", "zeros"):
        plain = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, plain=plain, **how: plain(*size, **{**how, "device": "cpu"}))
    assert distributed.local_device() == MPS


def test_apples_gpu_multiplies_float32() -> None:
    assert product_dtype(MPS, torch.bfloat16) == product_dtype(MPS, torch.float32) == torch.float32
    assert device_name(MPS, 1) == "Apple GPU"
