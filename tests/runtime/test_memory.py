"""Freed memory that is kept: in a process of its own, since it cannot be taken back."""

import ctypes
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from caddie.runtime import memory as heap
from caddie.runtime.memory import peak_bytes

PROGRAM = """
import ctypes
import resource
import sys
import threading
from caddie.runtime.memory import keep_freed_memory

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]

def blocks():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        held = [library.malloc(8 << 20) for _ in range(12)]
        for one in held:
            ctypes.memset(one, 1, 8 << 20)
        for one in held:
            library.free(one)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def by_two():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    threads = [threading.Thread(target=blocks) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

loaded = []
sys.addaudithook(lambda event, _: loaded.append(event) if event == "ctypes.dlopen" else None)
kept = keep_freed_memory()
assert not loaded, "the audit hook of `verify` would report a library"
blocks()
alone = blocks()
by_two()
print(kept, alone, by_two())
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="another C library than glibc")
def test_blocks_are_reused() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    kept, *pages = done.stdout.split()
    assert kept == "True"
    assert int(pages[0]) < 100, "of 245,760 that are written to"
    assert int(pages[1]) < 30_000, "of 491,520 that two new threads write to, even if they overlap as never before"


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.ctypes, "pythonapi", object())
    assert heap.keep_freed_memory() is False


def test_the_peak_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/proc/self/statm").exists():
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        assert 0.9 * resident < peak_bytes(torch.device("cpu")) < 1 << 40  # Linux counts in steps
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7 * (device.index + 1))
    assert peak_bytes(torch.device("cuda", 1)) == 14
