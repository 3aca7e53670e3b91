"""Models that `rivals.py` compares: caddie's recipes, and those of public checkouts, through one door.

Each is trained on the same tokens for the same seconds, packed by caddie's quantizer and coder into a cap of bytes,
read back from that file, and scored by caddie's windows; so only the training differs. Model, loss and optimizer of
nanoGPT (github.com/karpathy/nanoGPT) and nanochat (github.com/karpathy/nanochat) are imported from a checkout and left
as they are. The loop around them follows their scripts, with two differences in their favour. What those count in
iterations of a run is a part of the budget of seconds, so that every schedule ends when the clock does. Rows come in a
random order, each once, where nanoGPT draws with repetition and nanochat drops what its rows cut off.
"""

import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from caddie.data.corpus import Corpus
from caddie.data.loaders import ShuffledSequences
from caddie.errors import CheckFailed, UserError
from caddie.model import GPT, Model
from caddie.model.parameters import Constant, Part
from caddie.pack import container
from caddie.pack.artifact import load
from caddie.pack.calibrate import calibrate
from caddie.pack.codecs import Brotli
from caddie.pack.compress import Pack, compress, pack
from caddie.pack.container import Section
from caddie.pack.decompress import decompress
from caddie.pack.quantize import Calibration
from caddie.recipes.catalog import find
from caddie.run.resolve_corpus import open_corpus
from caddie.run.run import metadata_of, train_recipe
from caddie.run.stages import calibrate_recipe
from caddie.runtime.autotune import compiled_here
from caddie.runtime.cpu_share import CpuShare
from caddie.runtime.distributed import Ranks
from caddie.runtime.progress import SILENT, Progress
from caddie.score import Scoring

Settings = Mapping[str, Any]
Weights = dict[str, Tensor]
TRAINING_ONLY = ("dtype", "compile")
"""Settings of public models that packing and scoring do not know: both are done in float32, uncompiled."""
WARM_STEPS = 3
"""Steps before the clock, which are undone, as caddie's own warm-up is."""
TELL_SECONDS = 1.0
"""Between two reports of training."""


class Outcome(NamedTuple):
    """Trained weights, and the facts of the training."""

    weights: Weights
    facts: dict[str, Any]


class Packed(NamedTuple):
    """Bytes of a file, the model read back from it, and its scoring."""

    file_bytes: int
    model: Model
    scoring: Scoring


class Contender(ABC):
    """A model that is trained, packed and scored; `given` are its settings that are not the defaults."""

    name: str

    @abstractmethod
    def __init__(self, given: Settings, checkout: Path | None = None) -> None: ...

    @abstractmethod
    def corpus(self, source: str, progress: Progress = SILENT) -> Corpus:
        """Return a text under the model's tokenizer and the demo's split, prepared once."""

    @abstractmethod
    def train(self, corpus: Corpus, seconds: float, seed: int, folder: Path, progress: Progress) -> Outcome:
        """Train for so many seconds, not counting the warm-up; `folder` may take files."""

    @abstractmethod
    def calibrate(self, weights: Weights, corpus: Corpus, progress: Progress) -> dict[str, Calibration]:
        """Measure on training text how much the loss depends on each weight."""

    @abstractmethod
    def pack(self, weights: Weights, known: Mapping[str, Calibration], cap: int, corpus: Corpus, path: Path) -> Packed:
        """Write a file of at most `cap` bytes, with settings and tokenizer, and read it back."""


# caddie


class Caddie(Contender):
    """A recipe of caddie's; the settings are `recipe`, by name, and a diff on it."""

    name = "caddie"

    def __init__(self, given: Settings, checkout: Path | None = None) -> None:
        diff = {"pack": Pack(cap_bytes=1_000_000), **given}
        self.recipe = find(str(diff.pop("recipe", "tiny"))).but(diff)

    def corpus(self, source: str, progress: Progress = SILENT) -> Corpus:
        """Return a text under the recipe's tokenizer; the held-out documents are the same under any."""
        return open_corpus(self.recipe, source, progress)

    def train(self, corpus: Corpus, seconds: float, seed: int, folder: Path, progress: Progress) -> Outcome:
        """Train as `caddie train` does."""
        recipe = self.recipe.but({"train.seconds": seconds, "train.steps": None})
        trained = train_recipe(recipe, corpus, folder, seed, Ranks(device=torch.device("cpu")), progress)
        facts = {name: getattr(trained, name) for name in ("steps", "tokens", "seconds", "threads", "precision")}
        facts |= {"parameters": recipe.parameters, "cpu_share": trained.cpu_share}
        return Outcome(weights=trained.weights, facts=facts)

    def calibrate(self, weights: Weights, corpus: Corpus, progress: Progress) -> dict[str, Calibration]:
        """Measure as `caddie pack` does."""
        return calibrate_recipe(self.recipe, weights, corpus, Ranks(device=torch.device("cpu")), progress)

    def pack(self, weights: Weights, known: Mapping[str, Calibration], cap: int, corpus: Corpus, path: Path) -> Packed:
        """Write the artifact, and load it."""
        pack(metadata_of(self.recipe, 0, corpus), weights, Pack(cap_bytes=cap), path, known)
        artifact = load(path)
        return Packed(artifact.file_bytes, artifact.model, artifact.scoring)


# Public models


class Outline(Part):
    """Names and shapes of a public model's weights in the roles that quantizers are chosen by; it holds no values."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            role = "matrix" if len(shape) > 1 else "scalar"
            self.register_parameter(name, self.declare(name, shape, cast(Any, role), Constant(value=0.0)))


class PublicModel(nn.Module):
    """A public model, called as caddie's are: ids (rows, n) to logits (rows, last or n, vocabulary) in float32."""

    def __init__(self, model: nn.Module, logits: Callable[[nn.Module, Tensor], Tensor], vocabulary: int) -> None:
        super().__init__()
        self.model, self._logits = model, logits
        self.config = SimpleNamespace(vocabulary=vocabulary, head=None)

    def forward(
        self, ids: Tensor, starts: Tensor, dtype: object = None, last: int | None = None, cache: object = None
    ) -> Tensor:
        """Return logits; where documents begin is not known to these models."""
        logits = self._logits(self.model, ids)
        return logits if last is None else logits[:, -last:]

    def outline(self) -> Outline:
        """Return what packing asks of a model. A module's own parameter has no dots in its name."""
        with torch.device("meta"):
            return Outline({flat(name): tuple(weight.shape) for name, weight in self.named_parameters()})


def flat(name: str) -> str:
    """Return the name of a weight in a file."""
    return name.replace(".", "/")


class Public(Contender):
    """A model of a checkout, trained by its own optimizer."""

    first: str
    """File by which a checkout is known."""
    defaults: ClassVar[Settings]
    clip: float = 0.0
    """Norm that gradients are clipped to, 0 for none."""

    def __init__(self, given: Settings, checkout: Path | None = None) -> None:
        if unknown := given.keys() - self.defaults.keys():
            raise UserError(f"{self.name} has no setting {sorted(unknown)[0]}; it has {', '.join(self.defaults)}")
        if checkout is None or not (checkout / self.first).is_file():
            raise UserError(f"no {self.first} in {checkout}; name a checkout of {self.name} with --{self.name.lower()}")
        self.settings, self.checkout = {**self.defaults, **given}, checkout

    def corpus(self, source: str, progress: Progress = SILENT) -> Corpus:
        """Return a text under the demo's tokenizer."""
        return open_corpus(find("tiny"), source, progress)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows of a step, and tokens of a row."""

    @abstractmethod
    def build(self, vocabulary: int) -> nn.Module:
        """Return the model with its first weights."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return its own optimizer."""

    @abstractmethod
    def loss(self, forward: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch by its own forward."""

    @abstractmethod
    def logits(self, model: nn.Module, ids: Tensor) -> Tensor:
        """Return logits of all positions."""

    @abstractmethod
    def schedule(self, optimizer: torch.optim.Optimizer, step: int, progress: float, steps: float) -> None:
        """Set rates for a step as its script does; of about `steps` in all, `progress` is the part that is over."""

    def model(self, vocabulary: int) -> PublicModel:
        """Return the model as it is packed and scored."""
        with redirect_stdout(io.StringIO()):
            return PublicModel(self.build(vocabulary).float(), self.logits, vocabulary)

    def train(self, corpus: Corpus, seconds: float, seed: int, folder: Path, progress: Progress) -> Outcome:
        """Train on rows in a random order."""
        rows, length = self.shape
        bos, vocabulary = corpus.manifest.tokenizer.bos, corpus.manifest.tokenizer.vocabulary
        shards = corpus.train_shards()
        stream = ShuffledSequences().build(shards, tokens=rows * length, sequence_length=length, seed=seed, bos=bos)
        torch.manual_seed(seed)
        with redirect_stdout(io.StringIO()):
            model = self.build(vocabulary)
            first, optimizer = deepcopy(model.state_dict()), self.optimizer(model)
        forward = compiled_here(model) if self.settings["compile"] else model

        def make(step: int, part: float, steps: float) -> float:
            self.schedule(optimizer, step, part, steps)
            batch = stream.micro_batch(step)
            loss = self.loss(forward, torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets))
            loss.backward()  # type: ignore[no-untyped-call]
            if self.clip:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return float(loss.detach())

        progress.step({"event": "doing", "text": "warm-up"})
        for step in range(WARM_STEPS):
            make(step, 0.0, math.inf)
        model.load_state_dict(first)
        with redirect_stdout(io.StringIO()):
            optimizer = self.optimizer(model)
        step, told, share = 0, 0.0, CpuShare(torch.get_num_threads())
        while (spent := share.seconds) < seconds:
            loss = make(step, spent / seconds, step * seconds / spent)
            step += 1
            if not math.isfinite(loss):
                raise CheckFailed(f"{self.name} diverged at step {step:,}: its loss is {loss}")
            if spent - told > TELL_SECONDS:
                told = spent
                progress.step(
                    {"event": "doing", "text": f"step {step:,}, loss {loss:.4f}, {seconds - spent:.0f} s left"}
                )
        weights = {
            name: weight.detach().float() for name, weight in PublicModel(model, self.logits, 0).named_parameters()
        }
        facts = {"steps": step, "tokens": step * rows * length, "seconds": share.seconds, "cpu_share": share.share}
        facts |= {"threads": share.threads, "precision": self.settings.get("dtype", "float32")}
        facts |= {"parameters": sum(weight.numel() for weight in weights.values())}
        return Outcome(weights=weights, facts=facts)

    def calibrate(self, weights: Weights, corpus: Corpus, progress: Progress) -> dict[str, Calibration]:
        """Measure as caddie does, by gradients alone: the inputs of caddie's own layers are not there to be seen."""
        tokenizer, length = corpus.manifest.tokenizer, self.shape[1]
        model = cast(Model, self.model(tokenizer.vocabulary))
        _fill(model, weights)
        batches = Pack().calibration.batches(model, corpus.train_shards(), length=length, bos=tokenizer.bos)
        found = calibrate(model, batches, bos=tokenizer.bos, progress=progress)
        return {flat(name): calibration for name, calibration in found.items()}

    def pack(self, weights: Weights, known: Mapping[str, Calibration], cap: int, corpus: Corpus, path: Path) -> Packed:
        """Write settings, tokenizer and weights in caddie's container, and read them back."""
        tokenizer = corpus.tokenizer()
        settings = json.dumps(self.settings, separators=(",", ":")).encode()
        head = [Section("config", settings, Brotli()), Section("tokenizer", tokenizer.serialize(), Brotli())]
        model = self.model(tokenizer.vocabulary)
        stored = {flat(name): weight for name, weight in weights.items()}
        found = compress(
            cast(GPT, model), stored, Pack(cap_bytes=cap), known, lambda _, body: len(container.pack([*head, *body]))
        )
        container.write(path, [*head, *found.candidate.sections])
        read = decompress(model.outline(), found.dequantizers, container.read(path).sections)
        _fill(model, {name: read[flat(name)] for name in weights})
        length = self.shape[1]
        scoring = Scoring(
            sequence_length=length, stride=max(1, length // 2), batch_tokens=find("tiny").score.batch_tokens
        )
        return Packed(path.stat().st_size, cast(Model, model.requires_grad_(False)), scoring)


def _fill(model: nn.Module, weights: Weights) -> None:
    """Copy weights into a model; names that share a weight are filled by the one that is stored."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
