"""Score-first test-time training of low-rank adapters: every document begins anew and learns from its own past."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, ClassVar, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from caddie.config import Config, Count, NonNegative, Positive, Range, Technique
from caddie.errors import UserError
from caddie.model import BlockModule, Cache, Linear, LowRankDelta, Model
from caddie.runtime.distributed import Ranks
from caddie.score.forward import Forward
from caddie.score.scorer import Layout, Positions, ScoredPrefix, Scorer, ScoringBatch, Step, nats
from caddie.score.ttt_sgd import PARTS, SGD, Learner, TestTimeTraining, Tokens, check_chunk
from caddie.score.windows import Window

Target = Literal["query", "key", "value", "output", "up", "down", "attention", "mlp", "head"]
Decay = Annotated[float, Range(0.0, 0.999999)]
_MOST_NUMBERS = 1 << 29  # of all adapters together


@dataclass(frozen=True, kw_only=True)
class GlobalSGD(Config):
    """Between groups of documents, all weights are trained on those that have been scored (records PH1, PH3, TOP)."""

    techniques: ClassVar = {
        "": Technique(
            "What many documents share is learned once for all.",
            "openai/parameter-golf, PhasingTTT2000 and MultiPhaseGlobalSGD_PhasedTTT",
            "one phase -0.0006; three for one -0.0008; six and more too many",
        ),
    }

    documents: Count = 2500
    """Documents after which the last phase is over."""
    phases: Annotated[int, Range(1, 100)] = 3
    """Phases, at equal numbers of documents; each goes through everything that was scored before it."""
    chunk_tokens: Tokens = 32_768
    """Predictions of a chunk; the last, incomplete one is left out."""
    sgd: SGD = SGD(lr=0.001, epochs=1)
    """The optimizer; its state begins anew in each phase."""

    def boundaries(self, documents: int) -> list[int]:
        """Numbers of scored documents at which to train, for a text of so many."""
        most = min(self.documents, documents)
        return [most * (phase + 1) // self.phases for phase in range(self.phases)]


@dataclass(frozen=True, kw_only=True)
class DocumentLoRA(TestTimeTraining):
    """Low-rank adapters (arXiv 2106.09685) of each document's own, trained chunk by chunk on what was scored of it.

    Documents are scored in groups of similar length, the longest first; those of a group run side by side, each with
    adapters of its own, and know nothing of each other. A layer that runs several times in a forward has adapters of
    their own for each run. After openai/parameter-golf's records LoRA_TTT, VARL and TOP.
    """

    techniques: ClassVar = {
        "": Technique(
            "Each document has a small model of its own, and nothing leaks into the next.",
            "arXiv 2106.09685; openai/parameter-golf, LoRA_TTT, VarLenAttn, the record at 1.0611",
            "-0.003 (LoRA_TTT); -0.0127 with phases against documents scored alone (the record at 1.0611)",
        ),
        "warm_start": Technique(
            "New documents begin where others have been.",
            "openai/parameter-golf #1767",
            "-0.0004 with alpha 144 and a larger weight decay (#1767)",
        ),
    }

    rank: Annotated[int, Range(1, 1024)] = 80
    """Rank of every adapter."""
    alpha: Positive = 144.0
    """Adapters add alpha / rank times their product."""
    lr: NonNegative = 1e-4
    """Rate of AdamW."""
    beta1: Decay = 0.0
    """AdamW's decay of the mean gradient."""
    beta2: Decay = 0.99
    """AdamW's decay of the squared gradient."""
    eps: Positive = 1e-10
    """AdamW's smallest denominator."""
    weight_decay: NonNegative = 0.5
    """Decoupled decay, towards no adapter."""
    chunk_tokens: Tokens = 48
    """Predictions between two updates; each is made with at most a window of context."""
    documents: Annotated[int, Range(1, 4096)] = 64
    """Documents of a group."""
    targets: tuple[Target, ...] = ("query", "key", "value", "attention", "mlp", "head")
    """What gets an adapter in every layer: linear layers by name, or the whole `attention`, `mlp` or `head`."""
    warm_start: bool = True
    """Whether a new group takes over the first factors of the one before, with second factors of zero."""
    phases: GlobalSGD | None = None
    """Training of all weights in between, or none."""

    def build(self, model: Model, bos: int, length: int, stride: int, dtype: torch.dtype) -> Scorer:
        """The scorer; windows are as long as `length` and move by `chunk_tokens`."""
        return _DocumentLoRA(self, model, bos, length, dtype)


class _InTurn:
    """What is added to the output of a part: by its first run in a forward the first of the additions, and so on."""

    def __init__(self, runs: Sequence[LowRankDelta]) -> None:
        self.runs = runs
        self.rewind()

    def rewind(self) -> None:
        """Let the next run be the first, whatever became of the forward before."""
        self._next = 0  # not an iterator, at which a compiled graph would break

    def __call__(self, x: Tensor) -> Tensor:
        run = self.runs[self._next]
        self._next += 1
        return run(x)


class _Place(NamedTuple):
    """Where a delta goes, how many inputs and outputs it has, and how often its part runs in a forward."""

    part: nn.Module
    attribute: str
    inputs: int
    outputs: int
    runs: int


class _Adapters:
    """One pair of factors for each run of each target and each document of a group.

    `documents` are the slots of those that this process adapts to, all until it shares them with others; `together` of
    them are moved at once, since where a tensor ends may round otherwise.
    """

    def __init__(self, config: DocumentLoRA, model: Model) -> None:
        self._config = config
        self.documents = range(config.documents)
        self.together = math.ceil(config.documents / PARTS)
        places = [place for name in config.targets for place in _places(name, model)]
        if not places:
            raise UserError('score.ttt.targets must name what gets an adapter, as in ["query", "head"]')
        self._sizes = [(place.inputs, place.outputs) for place in places for _ in range(place.runs)]
        numbers = sum(map(sum, self._sizes)) * config.rank * config.documents
        if numbers > _MOST_NUMBERS:
            raise UserError(f"the adapters would have {numbers:,} numbers; set a smaller rank or fewer documents")
        self._weight = weight = next(model.parameters())  # whose device and number format the adapters share
        self._first: list[Tensor] = []
        self._second: list[Tensor] = []
        self._deltas = [LowRankDelta(weight, weight, config.alpha / config.rank) for _ in self._sizes]
        deltas = iter(self._deltas)
        self._parts = [(place, _InTurn(list(islice(deltas, place.runs)))) for place in places]
        self._used: Sequence[int] | None = None
        self.attach(True)

    def forget(self) -> None:
        """Let the next group begin with new first factors."""
        self._first = []

    def begin(self, group: int) -> None:
        """Adapters that add nothing, and an optimizer without memory."""
        self._used = None
        rows, rank = len(self.documents), self._config.rank
        if not (self._config.warm_start and self._first):
            self._first = [self._draw(group, index) for index in range(len(self._sizes))]
        self._second = [self._weight.new_zeros(rows, out, rank).requires_grad_() for _, out in self._sizes]
        factors = [*self._first, *self._second]
        self._means, self._squares = ([torch.zeros_like(factor) for factor in factors] for _ in range(2))
        begun = range(0, rows, self.together)
        self._steps = [[torch.zeros((), device=factor.device) for factor in factors] for _ in begun]

    def use(self, slots: Sequence[int]) -> None:
        """Let the rows of the next forward have the adapters of these documents; to be called before every forward."""
        for _, in_turn in self._parts:
            in_turn.rewind()
        if self._used == slots:
            return
        self._used = slots
        rows = torch.tensor(slots, device=self._weight.device) - self.documents.start
        with torch.enable_grad():  # they may be learnt from later than they are asked
            for delta, a, b in zip(self._deltas, self._first, self._second, strict=True):
                delta.a, delta.b = a[rows], b[rows]

    def step(self, losses: Sequence[Tensor]) -> None:
        """One step of AdamW on the sum of losses; where nothing is left to learn, factors move on and decay."""
        self._used = None
        factors = [*self._first, *self._second]
        for factor in factors:
            factor.grad = None
        if losses:
            torch.stack(list(losses)).sum().backward()  # type: ignore[no-untyped-call]
        gradients = [torch.zeros_like(factor) if factor.grad is None else factor.grad for factor in factors]
        # The function and not the class, whose first use imports PyTorch's compiler, a second of every process.
        with torch.no_grad():
            for number, steps in enumerate(self._steps):
                part = slice(number * self.together, (number + 1) * self.together)
                adamw(
                    [factor[part] for factor in factors],
                    [gradient[part] for gradient in gradients],
                    [mean[part] for mean in self._means],
                    [square[part] for square in self._squares],
                    [],
                    steps,
                    fused=True,
                    amsgrad=False,
                    beta1=self._config.beta1,
                    beta2=self._config.beta2,
                    lr=self._config.lr,
                    weight_decay=self._config.weight_decay,
                    eps=self._config.eps,
                    maximize=False,
                )

    def attach(self, on: bool) -> None:
        """Put the adapters into the model, or take them out."""
        for place, in_turn in self._parts:
            setattr(place.part, place.attribute, in_turn if on else None)

    def _draw(self, group: int, index: int) -> Tensor:
        """First factors, uniform within one over the root of the number of inputs; the same on every device."""
        inputs, _ = self._sizes[index]
        digest = hashlib.sha256(f"adapter {group} {index}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        bound = 1 / math.sqrt(inputs)
        drawn = torch.empty(self._config.documents, self._config.rank, inputs)
        drawn.uniform_(-bound, bound, generator=generator)
        return drawn[self.documents.start : self.documents.stop].to(self._weight).requires_grad_()


def _places(name: Target, model: Model) -> list[_Place]:
    """Everything of that name; `UserError` where the model has nothing."""
    width, order = model.config.width, model.orders[-1]
    if name == "head":
        return [_Place(model.head, "delta", width, model.config.vocabulary, 1)]
    found: list[_Place] = []
    for number, module in enumerate(model.blocks):
        block, runs = cast(BlockModule, module), order.count(number)
        if name == "mlp" or (name == "attention" and block.attention is not None):
            found.append(_Place(block, f"{name}_delta", width, width, runs))
        mlps = [block.mlp, *block.later_mlps][:runs]  # one for all runs, or one for each
        for part, times in [(block.attention, runs), *((mlp, runs // len(mlps)) for mlp in mlps)]:
            layer = getattr(part, name, None)
            if isinstance(layer, Linear):
                outputs, inputs = layer.weight.shape
                found.append(_Place(layer, "delta", inputs, outputs, times))
    if not found:
        raise UserError(f"score.ttt.targets: this model has no linear layer named {name}")
    return found


class _DocumentLoRA(Scorer):
    per_document = True

    def __init__(self, config: DocumentLoRA, model: Model, bos: int, length: int, dtype: torch.dtype) -> None:
        if config.chunk_tokens > length:
            raise UserError(f"score.ttt.chunk_tokens must be at most score.sequence_length ({length:,})")
        if config.phases:
            check_chunk("score.ttt.phases.chunk_tokens", config.phases.chunk_tokens, length)
        self._config, self._bos, self._length, self._dtype = config, bos, length, dtype
        self._model = copy.deepcopy(model).requires_grad_(False)
        self._forward = Forward(self._model, dtype)
        self._adapters = _Adapters(config, self._model)
        self._ranks = Ranks()
        self.together = self._adapters.together
        self._answers: list[Tensor] = []
        self._due: list[int] = []  # documents to train all weights on after this step

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        """Group after group; in each, chunk after chunk of all its documents."""
        begins, ends = layout.begins.tolist(), layout.ends.tolist()
        boundaries = self._config.phases.boundaries(len(begins)) if self._config.phases else []
        scored: list[int] = []
        together = groups(layout, self._config.documents)
        for number, group in enumerate(together):
            self._adapters.begin(number)
            scored = group + scored  # sorted by length, as the groups are
            longest = max(ends[document] - begins[document] for document in group)
            chunks = math.ceil(longest / self._config.chunk_tokens)
            for chunk in range(chunks):
                windows = {
                    slot: window
                    for slot, document in enumerate(group)
                    if (window := self._window(begins[document], ends[document], chunk))
                }
                # Nothing is left to learn for behind the last group.
                while group is not together[-1] and chunk == chunks - 1 and boundaries and len(scored) >= boundaries[0]:
                    self._due = scored[: boundaries.pop(0)]
                yield Step(list(windows.values()), list(windows))

    def _window(self, begin: int, end: int, chunk: int) -> Window | None:
        first = begin + chunk * self._config.chunk_tokens
        stop = min(first + self._config.chunk_tokens, end)
        return Window(max(begin, stop - self._length), first, stop) if first < end else None

    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        """One forward, each row with its document's adapters; without a cache its graph is kept for the update."""
        self._adapters.use(slots)
        with torch.set_grad_enabled(cache is None):
            answer = self._forward(inputs, inputs == self._bos, last, cache)
        if cache is None:
            self._answers.append(answer)
        return answer

    def share(self, ranks: Ranks) -> bool:
        """Each process has some of the documents of a group; all weights are trained together."""
        self._ranks = ranks
        mine = [slot for slot in range(self._config.documents) if self._owner(slot, ranks.world) == ranks.rank]
        self._adapters.documents = range(mine[0], mine[-1] + 1) if mine else range(0)
        return True

    def owners(self, batches: Sequence[ScoringBatch], world: int) -> list[int]:
        """The processes that have the adapters."""
        return [self._owner(question.slots[0], world) for question in batches]

    def _owner(self, slot: int, world: int) -> int:
        """The first process has the first slots, and so on, in whole questions."""
        return slot // self.together * world // math.ceil(self._config.documents / self.together)

    @torch.enable_grad()
    def update(self, batches: Sequence[ScoringBatch], past: ScoredPrefix) -> None:
        """One step on the mean loss of each document's chunk, but for documents that are over."""
        owners, device = self.owners(batches, self._ranks.world), next(self._model.parameters()).device
        mine = [question for question, owner in zip(batches, owners, strict=True) if owner == self._ranks.rank]
        if not self._answers:
            for question in mine:
                inputs = torch.from_numpy(question.inputs).to(device)
                self.logits(inputs, question.slots, inputs.shape[1] - question.context)
        losses = []
        for question, answer in zip(mine, self._answers, strict=True):
            going = [row for row, window in enumerate(question.windows) if not past.over(window)]
            if going:
                targets = torch.from_numpy(past.targets([question.windows[row] for row in going])).to(device)
                losses.append(nats(answer[going], targets).mean(1).sum())
        self._answers.clear()
        if not all(past.over(window) for question in batches for window in question.windows):
            self._adapters.step(losses)
        if self._due and self._config.phases:
            self._learn_globally(self._config.phases, past)

    def _learn_globally(self, phases: GlobalSGD, past: ScoredPrefix) -> None:
        """Train all weights, without adapters, on the documents that are due, one behind the other."""
        layout = past.layout
        tokens = np.concatenate([past.known(int(layout.begins[d]), int(layout.ends[d])) for d in self._due])
        self._due = []
        self._adapters.attach(False)
        learner = Learner(self._model, self._bos, phases.sgd, self._dtype, self._ranks)
        for chunk, chunks, rows in global_rows(tokens, phases.chunk_tokens, self._length):
            learner.learn(rows, chunk, chunks)
        self._model.requires_grad_(False)
        self._adapters.attach(True)
        self._adapters.forget()


def groups(layout: Layout, size: int) -> list[list[int]]:
    """Numbers of the documents in groups of similar length: sorted by length, the groups of the longest first."""
    order = np.argsort(layout.ends - layout.begins, kind="stable").tolist()
    cut = [order[begin : begin + size] for begin in range(0, len(order), size)]
    return cut[::-1]


def global_rows(tokens: Positions, chunk_tokens: int, length: int) -> Iterator[tuple[int, int, Positions]]:
    """Number of a chunk, number of chunks, and the chunk's complete rows (n, length + 1); without the last chunk."""
    chunks = math.ceil((len(tokens) - 1) / chunk_tokens)
    for chunk in range(chunks - 1):
        starts = range(chunk * chunk_tokens, (chunk + 1) * chunk_tokens - length + 1, length)
        if starts:
            yield chunk, chunks, np.stack([tokens[start : start + length + 1] for start in starts])
