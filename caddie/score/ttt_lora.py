"""Score-first test-time training of LoRA: every document has its own adapters, trained on its scored tokens."""

import copy
import math
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Annotated, Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from caddie.config import Config, Count, NonNegative, Positive, Range
from caddie.errors import UserError
from caddie.model import BlockModule, Cache, Linear, LowRankDelta, Model
from caddie.model.parameters import named_generator
from caddie.runtime.distributed import Ranks
from caddie.score.forward import Forward
from caddie.score.scorer import Layout, Positions, ScoredPrefix, Scorer, ScoringBatch, Step, nats
from caddie.score.ttt_sgd import PARTS, SGD, Learner, TestTimeTraining, Tokens, check_chunk
from caddie.score.windows import Window

Target = Literal["query", "key", "value", "output", "up", "down", "attention", "mlp", "head"]
Decay = Annotated[float, Range(0.0, 0.999999)]
_MOST_NUMBERS = 1 << 29  # of all adapters together


class GlobalSGD(Config):
    """Train all weights on the scored documents, between groups of documents (records #1610, #1626, #1855)."""

    documents: Count = 2500
    """Number of scored documents after which the last phase runs."""
    phases: Annotated[int, Range(1, 100)] = 3
    """Phases, at equal intervals of scored documents; a phase after n documents trains on the n shortest so far.

    Of several phases that one group of documents reaches, only the last runs.
    """
    chunk_tokens: Tokens = 32_768
    """Predictions of a chunk; the last chunk of a phase is not trained on."""
    sgd: SGD = SGD(lr=0.001, epochs=1)
    """The optimizer; each phase starts with a new state."""

    def boundaries(self, documents: int) -> list[int]:
        """Return the numbers of scored documents at which to train, for a text of `documents`."""
        most = min(self.documents, documents)
        return [most * (phase + 1) // self.phases for phase in range(self.phases)]


class DocumentLoRA(TestTimeTraining):
    """LoRA-TTT: low-rank adapters (arXiv 2106.09685) for each document, trained chunk by chunk on its scored tokens.

    Documents are scored in groups of similar length, the longest first. Those of a group run in parallel, each with
    its own adapters, and do not affect each other. A layer that runs several times in a forward has separate adapters
    for each run. After openai/parameter-golf's records LoRA_TTT, #1530 and #1855.
    """

    rank: Annotated[int, Range(1, 1024)] = 80
    """Rank of every adapter."""
    alpha: Positive = 144.0
    """Adapters add alpha / rank times their product."""
    lr: NonNegative = 1e-4
    """Learning rate of AdamW."""
    beta1: Decay = 0.0
    """AdamW's decay of the mean gradient."""
    beta2: Decay = 0.99
    """AdamW's decay of the squared gradient."""
    eps: Positive = 1e-10
    """AdamW's smallest denominator."""
    weight_decay: NonNegative = 0.5
    """Decoupled weight decay of the adapters."""
    chunk_tokens: Tokens = 48
    """Predictions between two updates; each has at most a window of context."""
    short_chunks: tuple[tuple[Count, Tokens], ...] = ()
    """Smaller chunks for groups of short documents: pairs (most tokens of the group's longest document, chunk), rising.

    [[256, 8], [2000, 24]] in the record at 1.0576. The `bos` of the document and of the next one count too.
    """
    documents: Annotated[int, Range(1, 4096)] = 64
    """Documents per group."""
    targets: tuple[Target, ...] = ("query", "key", "value", "attention", "mlp", "head")
    """Parts of every layer with an adapter: linear layers by name, or the whole `attention`, `mlp` or `head`."""
    warm_start: bool = True
    """True if a new group keeps the first factors (A) of the previous one; second factors (B) always start at zero."""
    phases: GlobalSGD | None = None
    """Training of all weights between groups, or none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = [limit for limit, _ in self.short_chunks]
        if any(a >= b for a, b in pairwise(limits)):
            raise UserError(f"score.ttt.short_chunks must have rising lengths, not {limits}")

    def chunk(self, predictions: int) -> int:
        """Return the chunk for a group whose longest document has this many predictions."""
        fitting = (chunk for limit, chunk in self.short_chunks if predictions + 1 <= limit)
        return next(fitting, self.chunk_tokens)

    def build(self, model: Model, bos: int, length: int, stride: int, dtype: torch.dtype) -> Scorer:
        """Return the scorer; its windows have `length` tokens and advance by a chunk."""
        return _DocumentLoRA(self, model, bos, length, dtype)


class _PerRun:
    """The adapters of a part that runs several times in a forward: the first for its first run, and so on."""

    def __init__(self, runs: Sequence[LowRankDelta]) -> None:
        self.runs, self.next = runs, 0  # not an iterator, which would break a compiled graph

    def __call__(self, x: Tensor) -> Tensor:
        run = self.runs[self.next]
        self.next += 1
        return run(x)


class Place(NamedTuple):
    """The place of an adapter, its inputs and outputs, and the runs of its part in a forward."""

    part: nn.Module
    attribute: str
    inputs: int
    outputs: int
    runs: int


class _Adapters:
    """A pair of factors for each run of each target and each document of a group.

    All numbers of a document are contiguous, first factors before second ones, so that AdamW takes one call for each
    part of the documents. `documents` are the slots that this process trains: all, unless processes share them. A part
    is `together` slots for any number of processes, since the length of a tensor may change rounding.
    """

    def __init__(self, config: DocumentLoRA, model: Model) -> None:
        self._config = config
        self.documents = range(config.documents)
        self.together = math.ceil(config.documents / PARTS)
        places = [place for name in config.targets for place in adapter_places(name, model)]
        if not places:
            raise UserError('score.ttt.targets must name the parts that get adapters, as in ["query", "head"]')
        inputs, outputs = zip(*((p.inputs, p.outputs) for p in places for _ in range(p.runs)), strict=True)
        self._shapes = [(config.rank, n) for n in inputs] + [(n, config.rank) for n in outputs]
        numbers = sum(map(math.prod, self._shapes)) * config.documents
        if numbers > _MOST_NUMBERS:
            raise UserError(f"the adapters would have {numbers:,} numbers; set a smaller rank or fewer documents")
        self._weight = weight = next(model.parameters())  # adapters have its device and dtype
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []
        self._factors: Tensor = weight  # of no slot yet
        self._deltas = [LowRankDelta(weight, weight, config.alpha / config.rank) for _ in inputs]
        deltas = iter(self._deltas)
        self._parts = [(place, _PerRun(list(islice(deltas, place.runs)))) for place in places]
        self._used: Sequence[int] | None = None
        self._taken: list[tuple[Tensor, Tensor]] = []
        """Rows of the factors that forwards took since the last step, and the copies that get their gradients."""
        self.attach(True)

    def begin(self, group: int) -> None:
        """Reset the optimizer's state and the adapters for a new group; the adapters then add nothing."""
        self.forget()
        if not (self._config.warm_start and self.first):
            self._factors = self._weight.new_zeros(len(self.documents), sum(map(math.prod, self._shapes)))
            factors, half = self._cut(self._factors), len(self._deltas)
            self.first, self.second = factors[:half], factors[half:]
            for index, factor in enumerate(self.first):
                factor.copy_(self._draw(group, index))
        else:
            for factor in self.second:
                factor.zero_()
        self._means, self._squares = torch.zeros_like(self._factors), torch.zeros_like(self._factors)
        self._steps = [torch.zeros((), device=self._weight.device) for _ in torch.split(self._factors, self.together)]

    @torch.enable_grad()  # a decoder's forward takes no gradients, and the update after it does
    def use(self, slots: Sequence[int]) -> None:
        """Select the adapters of these slots for the rows of the next forward; required before every forward."""
        for _, per_run in self._parts:
            per_run.next = 0  # even after a forward that failed
        if self._used == slots:
            return
        self._used = slots
        rows = torch.tensor([slot - self.documents.start for slot in slots]).to(self._weight.device, non_blocking=True)
        copies = self._factors[rows].requires_grad_()
        self._taken.append((rows, copies))
        factors = self._cut(copies)
        for delta, a, b in zip(self._deltas, factors, factors[len(self._deltas) :], strict=False):
            delta.a, delta.b = a, b

    def forget(self) -> None:
        """Forget the forwards since the last step."""
        self._used = None
        self._taken.clear()

    def step(self, losses: Sequence[Tensor]) -> None:
        """Take one step of AdamW on the sum of losses; without losses, momentum and decay still apply."""
        if losses:
            torch.stack(list(losses)).sum().backward()  # type: ignore[no-untyped-call]
        gradients = torch.zeros_like(self._factors)  # allocated only now: the backward takes as much memory
        for rows, copies in self._taken:
            if copies.grad is not None:
                gradients.index_add_(0, rows, copies.grad)
        names = ("lr", "beta1", "beta2", "eps", "weight_decay")
        options: Any = {name: getattr(self._config, name) for name in names}
        # Not the class AdamW, whose first use imports PyTorch's compiler, which takes a second.
        with torch.no_grad():
            whole = (self._factors, gradients, self._means, self._squares)
            parts = zip(*(torch.split(tensor, self.together) for tensor in whole), strict=True)
            for step, part in zip(self._steps, parts, strict=True):
                weights, slopes, means, squares = ([tensor] for tensor in part)
                adamw(weights, slopes, means, squares, [], [step], fused=True, amsgrad=False, maximize=False, **options)

    def _cut(self, rows: Tensor) -> list[Tensor]:
        """Return the factors in rows of numbers (n, numbers), each (n, rank, inputs) or (n, outputs, rank)."""
        pieces = torch.split(rows, [math.prod(shape) for shape in self._shapes], 1)
        return [piece.view(len(piece), *shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def attach(self, on: bool) -> None:
        for place, per_run in self._parts:
            setattr(place.part, place.attribute, per_run if on else None)

    def _draw(self, group: int, index: int) -> Tensor:
        """Draw first factors, uniform within 1 / sqrt(inputs); the same on every device."""
        _, inputs = self._shapes[index]
        generator = named_generator(f"adapter {group} {index}")
        bound, drawn = 1 / math.sqrt(inputs), torch.empty(self._config.documents, self._config.rank, inputs)
        drawn.uniform_(-bound, bound, generator=generator)
        return drawn[self.documents.start : self.documents.stop].to(self._weight)


def adapter_places(name: Target, model: Model) -> list[Place]:
    """Return the places of the adapters of one target."""
    width, order = model.config.width, model.orders[-1]
    if name == "head":
        return [Place(model.head, "delta", width, model.config.vocabulary, 1)]
    found: list[Place] = []
    for number, module in enumerate(model.blocks):
        block, runs = cast(BlockModule, module), order.count(number)
        if name == "mlp" or (name == "attention" and block.attention is not None):
            found.append(Place(block, f"{name}_delta", width, width, runs))
        mlps = [block.mlp, *block.later_mlps][:runs]  # one for all runs, or one for each
        for part, times in [(block.attention, runs), *((mlp, runs // len(mlps)) for mlp in mlps)]:
            layer = getattr(part, name, None)
            if isinstance(layer, Linear):
                outputs, inputs = layer.weight.shape
                found.append(Place(layer, "delta", inputs, outputs, times))
    if not found:
        raise UserError(f"score.ttt.targets: this model has no linear layer named {name}")
    return found


class _DocumentLoRA(Scorer):
    per_document = True

    def __init__(self, config: DocumentLoRA, model: Model, bos: int, length: int, dtype: torch.dtype) -> None:
        if config.chunk_tokens > length:
            raise UserError(f"score.ttt.chunk_tokens must be at most score.sequence_length ({length:,})")
        if any(chunk > length for _, chunk in config.short_chunks):
            raise UserError(f"chunks of score.ttt.short_chunks must be at most score.sequence_length ({length:,})")
        if config.phases:
            check_chunk("score.ttt.phases.chunk_tokens", config.phases.chunk_tokens, length)
        self._config, self._bos, self._length, self._dtype = config, bos, length, dtype
        self._model = copy.deepcopy(model).requires_grad_(False)
        self._forward = Forward(self._model, bos, dtype)
        self._adapters = _Adapters(config, self._model)
        self._ranks = Ranks()
        self.together = self._adapters.together
        self._logits: list[Tensor] = []
        self._due: list[int] = []  # documents to train all weights on after this step

    def plan(self, layout: Layout, rows: int) -> Iterator[Step]:
        """Yield group after group, in each chunk after chunk of all its documents."""
        begins, ends = layout.begins.tolist(), layout.ends.tolist()
        boundaries = self._config.phases.boundaries(len(begins)) if self._config.phases else []
        scored: list[int] = []
        all_groups = groups(layout, self._config.documents)
        for number, group in enumerate(all_groups):
            self._adapters.begin(number)
            scored = group + scored  # sorted by length, as the groups are
            longest = max(ends[document] - begins[document] for document in group)
            size = self._config.chunk(longest)
            chunks = math.ceil(longest / size)
            for chunk in range(chunks):
                windows: dict[int, Window] = {}
                for slot, document in enumerate(group):
                    first = begins[document] + chunk * size
                    if first < ends[document]:
                        stop = min(first + size, ends[document])
                        windows[slot] = Window(max(begins[document], stop - self._length), first, stop)
                # Training after the last group would help no document.
                over = chunk == chunks - 1 and group is not all_groups[-1]
                while over and boundaries and len(scored) >= boundaries[0]:
                    self._due = scored[: boundaries.pop(0)]
                yield Step(list(windows.values()), list(windows))

    def logits(self, inputs: Tensor, slots: Sequence[int], last: int, cache: Cache | None = None) -> Tensor:
        """Run one forward, each row with its document's adapters; without a cache, keep its graph for the update."""
        self._adapters.use(slots)
        with torch.set_grad_enabled(cache is None):
            logits = self._forward(inputs, last, cache, begun=len(inputs))
        if cache is None:
            self._logits.append(logits)
        return logits

    def share(self, ranks: Ranks) -> bool:
        """Share the work: each process adapts some documents of a group; all weights are trained together."""
        self._ranks = ranks
        mine = [slot for slot in range(self._config.documents) if self._owner(slot, ranks.world) == ranks.rank]
        self._adapters.documents = range(mine[0], mine[-1] + 1) if mine else range(0)
        return True

    def owners(self, batches: Sequence[ScoringBatch], world: int) -> list[int]:
        return [self._owner(batch.slots[0], world) for batch in batches]

    def _owner(self, slot: int, world: int) -> int:
        """Return the rank of a slot: equal shares in order, in units of `together` slots."""
        return slot // self.together * world // math.ceil(self._config.documents / self.together)

    @torch.enable_grad()
    def update(self, batches: Sequence[ScoringBatch], prefix: ScoredPrefix) -> None:
        """Take one step on the mean loss of each document's chunk, except for documents that have ended."""
        owners, device = self.owners(batches, self._ranks.world), next(self._model.parameters()).device
        mine = [batch for batch, owner in zip(batches, owners, strict=True) if owner == self._ranks.rank]
        if not self._logits:
            for batch in mine:
                inputs = torch.from_numpy(batch.inputs).to(device)
                self.logits(inputs, batch.slots, inputs.shape[1] - batch.context)
        losses = []
        for batch, logits in zip(mine, self._logits, strict=True):
            going = [row for row, window in enumerate(batch.windows) if not prefix.is_last(window)]
            if going:
                targets = torch.from_numpy(prefix.targets([batch.windows[row] for row in going])).to(device)
                losses.append(nats(logits[going], targets).mean(1).sum())
        self._logits.clear()
        if not all(prefix.is_last(window) for batch in batches for window in batch.windows):
            self._adapters.step(losses)
        self._adapters.forget()
        if self._due and self._config.phases:
            self._learn_globally(self._config.phases, prefix)

    def _learn_globally(self, phases: GlobalSGD, prefix: ScoredPrefix) -> None:
        """Train all weights, without adapters, on the concatenation of the documents that are due."""
        edges = prefix.layout.edges
        tokens = np.concatenate([prefix.tokens(*edges[document]) for document in self._due])
        self._due = []
        self._adapters.attach(False)
        learner = Learner(self._model, self._bos, phases.sgd, self._dtype, self._ranks)
        for chunk, chunks, rows in global_rows(tokens, phases.chunk_tokens, self._length):
            learner.learn(rows, chunk, chunks)
        self._model.requires_grad_(False)
        self._adapters.attach(True)
        self._adapters.first = []  # the next group draws new ones


def groups(layout: Layout, size: int) -> list[list[int]]:
    """Return the documents' indices, sorted by length, in groups of `size`; the longest group first."""
    order = np.argsort(layout.ends - layout.begins, kind="stable").tolist()
    return [order[begin : begin + size] for begin in range(0, len(order), size)][::-1]


def global_rows(tokens: Positions, chunk_tokens: int, length: int) -> Iterator[tuple[int, int, Positions]]:
    """Yield each chunk's index, the number of chunks and the complete rows (n, length + 1), except the last chunk's."""
    chunks = math.ceil((len(tokens) - 1) / chunk_tokens)
    for chunk in range(chunks - 1):
        starts = range(chunk * chunk_tokens, (chunk + 1) * chunk_tokens - length + 1, length)
        yield chunk, chunks, np.stack([tokens[start : start + length + 1] for start in starts])
