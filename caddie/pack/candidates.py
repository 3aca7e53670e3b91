"""Candidates: a model's weights as sections of an artifact, each under one choice of quantizers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from torch import Tensor

from caddie.pack.calibrate import predicted_loss
from caddie.pack.coding import ArrayCodec, EncodeJob, ProcessPool
from caddie.pack.container import Section
from caddie.pack.decompress import LENGTH_BYTES, PREFIX
from caddie.pack.quantize import Arrays, Calibration, Quantizer
from caddie.runtime.progress import SILENT, Progress


@dataclass(frozen=True)
class StoredWeight:
    """One weight as it would be stored."""

    quantizer: Quantizer
    arrays: Arrays
    shape: tuple[int, ...]
    section: Section
    relative_error: float
    """Frobenius norm of the error, divided by that of the weight."""
    predicted_loss: float | None
    """Predicted loss of quantizing it, in nats per token; None without a calibration."""

    @property
    def restored(self) -> Tensor:
        """The weight after dequantizing; not stored, because a search keeps many candidates."""
        return self.quantizer.dequantize(self.arrays, self.shape)


@dataclass(frozen=True)
class Candidate:
    """All weights under one choice of quantizers, by parameter name."""

    weights: dict[str, StoredWeight]
    file_bytes: int
    """Bytes of the whole file with these weights."""

    @property
    def predicted_loss(self) -> float | None:
        """Sum over the weights, in nats per token; None if one was not calibrated."""
        losses = [stored.predicted_loss for stored in self.weights.values()]
        return None if None in losses else sum(loss for loss in losses if loss is not None)

    @property
    def sections(self) -> list[Section]:
        """The artifact's sections of weights."""
        return [stored.section for stored in self.weights.values()]


def section_of(name: str, streams: Iterable[bytes]) -> Section:
    """Return a weight's section: its coded arrays in layout order, each after its length."""
    return Section(PREFIX + name, b"".join(len(one).to_bytes(LENGTH_BYTES, "little") + one for one in streams))


class Candidates:
    """Makes candidates; quantizes and codes only the weights whose quantizer has changed since the last one."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        calibrations: Mapping[str, Calibration],
        coding: ArrayCodec,
        size: Callable[[list[Section]], int],
        pool: ProcessPool | None = None,
        progress: Progress = SILENT,
        cap_bytes: int | None = None,
    ) -> None:
        """`size` returns the bytes of the whole file with the given weight sections. Without a `pool`, this process
        codes alone. `progress` gets an event for every candidate, with its bytes and the cap, if there is one."""
        self.weights = {name: weight.detach().float().cpu() for name, weight in weights.items()}
        self.calibrations = calibrations
        self._coding, self._size, self._pool = coding, size, pool or ProcessPool()
        self._progress, self._cap_bytes, self._numbers = progress, cap_bytes, count(1)
        self._kept: dict[str, StoredWeight] = {}
        self._streams: dict[tuple[str, str], bytes] = {}
        """First stream of each array, whose coder settings are reused at other steps: that costs a ten-thousandth more
        bytes and saves the trials of settings, two thirds of the coding time (`docs/log.md`, 2026-11-22)."""

    def make(self, quantizers: Mapping[str, Quantizer]) -> Candidate:
        """Return the candidate with these quantizers, by parameter name."""
        found = {
            name: (quantizer, quantizer.quantize(self.weights[name], self.calibrations.get(name, Calibration())))
            for name, quantizer in quantizers.items()
            if (stored := self._kept.get(name)) is None or stored.quantizer != quantizer
        }
        self._kept |= self._store(found)
        return self._candidate({name: self._kept[name] for name in quantizers})

    def changed(self, candidate: Candidate, arrays: Mapping[str, Arrays]) -> Candidate:
        """Return `candidate` with new arrays for some weights; the quantizers stay the same."""
        found = {name: (candidate.weights[name].quantizer, stored) for name, stored in arrays.items()}
        return self._candidate(candidate.weights | self._store(found))

    def _candidate(self, weights: dict[str, StoredWeight]) -> Candidate:
        candidate = Candidate(weights, self._size([stored.section for stored in weights.values()]))
        sizes = {"file_bytes": candidate.file_bytes, "cap_bytes": self._cap_bytes}
        self._progress.step({"event": "candidate", "number": next(self._numbers), **sizes})
        return candidate

    def _store(self, found: Mapping[str, tuple[Quantizer, Arrays]]) -> dict[str, StoredWeight]:
        shapes = {name: tuple(self.weights[name].shape) for name in found}
        keys = [(name, key) for name, (quantizer, _) in found.items() for key in quantizer.layout(shapes[name])]
        jobs = [EncodeJob(found[name][1][key], self._streams.get((name, key), b"")) for name, key in keys]
        streams = dict(zip(keys, self._pool.encode(self._coding, jobs), strict=True))
        self._streams = streams | self._streams
        stored = {}
        for name, (quantizer, arrays) in found.items():
            weight, calibration = self.weights[name], self.calibrations.get(name)
            restored = quantizer.dequantize(arrays, shapes[name])
            error = float((restored - weight).norm() / weight.norm().clamp_min(1e-30))
            loss = None if calibration is None else predicted_loss(calibration, weight, restored)
            section = section_of(name, (streams[name, key] for key in quantizer.layout(shapes[name])))
            stored[name] = StoredWeight(quantizer, arrays, shapes[name], section, error, loss)
        return stored
