"""Banks: matrices of one shape, updated as one batch that several ranks share."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from caddie.config.schedules import TrainProgress, value_at
from caddie.errors import UserError
from caddie.runtime.distributed import Ranks
from caddie.train.optim.optimizer import Optimizer, Updater, sum_of_squares

Communication = Literal["all_reduce", "reduce_scatter"]
"""Collectives for gradients and updates."""


class Bank:
    """Stack of matrices of one shape, padded with zeros so that all ranks have equally many.

    Its buffers hold the whole stack on every rank; between calls of `state` only the rank's share is current.
    """

    def __init__(self, parameters: list[nn.Parameter], ranks: Ranks, group_rows: int | None) -> None:
        self.parameters = parameters
        first = parameters[0].detach()[:group_rows]
        self.count = len(parameters) * (len(parameters[0]) // len(first))
        """Number of matrices without the padding; each is a group of rows of a parameter."""
        self.padding = -self.count % ranks.world
        self.size = self.count + self.padding
        self.share = ranks.share(self.size)
        self.buffers = {"momentum": first.new_zeros(self.size, *first.shape)}

    def gradients(self) -> Tensor:
        """Return a new stack of the gradients, with zeros for missing ones."""
        found = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        return self.padded(found)

    def weights(self) -> Tensor:
        """Return a new stack of the weights."""
        return self.padded(torch.stack([parameter.detach() for parameter in self.parameters]))

    def padded(self, parameters: Tensor) -> Tensor:
        """Return a stack of parameters as matrices of the bank, with zeros after them."""
        matrices = parameters.view(self.count, *self.buffers["momentum"].shape[1:])
        return nn.functional.pad(matrices, (0, 0, 0, 0, 0, self.padding)) if self.padding else matrices


class BankUpdater(Updater):
    """Updater of matrices in banks: each rank computes the updates of its share and receives the others.

    Raises `UserError` for a parameter that is no matrix or whose rows do not divide into groups.
    """

    def __init__(
        self,
        config: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        ranks: Ranks,
        communication: Communication,
        group_rows: int | None = None,
    ) -> None:
        self.config, self.ranks, self.communication = config, ranks, communication
        groups: dict[torch.Size, list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            if parameter.ndim != 2:
                given = f"{name}, of shape {list(parameter.shape)},"
                raise UserError(f"{type(config).__name__} updates matrices; give {given} to AdamW")
            if group_rows and len(parameter) % group_rows:
                raise UserError(f"{len(parameter)} rows of {name} do not divide into groups of {group_rows}")
            groups.setdefault(parameter.shape, []).append(parameter)
        largest_first = sorted(groups.values(), key=lambda group: -len(group) * group[0].numel())
        self.banks = [Bank(group, ranks, group_rows) for group in largest_first]
        self.gradients: list[Callable[[], Tensor]] = []
        """For each bank, a function that waits for the summed gradient of this rank's share; empty before `launch`."""

    def launch(self) -> None:
        self.gradients = [self._begin_sum(bank, bank.gradients()) for bank in self.banks]

    def squares(self) -> Tensor:
        if not self.gradients:
            self.launch()
        total = sum_of_squares([gradient() for gradient in self.gradients])
        self.ranks.sum([total])
        return total

    @torch.no_grad()
    def step(self, train_progress: TrainProgress, lr_scale: float, gradient_scale: Tensor | None = None) -> None:
        """Make the updates of this rank's shares, exchange them, and move all weights."""
        if not self.gradients:
            self.launch()
        lr = value_at(self.config.lr, train_progress) * lr_scale
        updates = []
        for bank, gradient in zip(self.banks, self.gradients, strict=True):
            share = gradient()
            if gradient_scale is not None:
                share.mul_(gradient_scale)
            updates.append(self._begin_gather(bank, self.update(bank, share, train_progress)))
        self.gradients = []
        for bank, update in zip(self.banks, updates, strict=True):
            weights: list[Tensor] = [*bank.parameters]
            steps = update()[: bank.count].to(weights[0].dtype).reshape(len(weights), *weights[0].shape)
            self.apply(bank, weights, steps, lr, train_progress)

    @abstractmethod
    def update(self, bank: Bank, gradient: Tensor, train_progress: TrainProgress) -> Tensor:
        """Return the updates of this rank's share of a bank; it may overwrite the gradient."""

    @abstractmethod
    def apply(self, bank: Bank, weights: list[Tensor], steps: Tensor, lr: float, train_progress: TrainProgress) -> None:
        """Move the weights of a bank by the updates (parameters, rows, columns) of all ranks."""

    def _begin_sum(self, bank: Bank, stack: Tensor) -> Callable[[], Tensor]:
        """Start to sum a stack over the ranks; the returned function waits for this rank's share of the sum."""
        if self.communication == "reduce_scatter":
            return self.ranks.begin_reduce_scatter(stack)
        return self._begin_all_reduce(stack, bank.share)

    def _begin_gather(self, bank: Bank, share: Tensor) -> Callable[[], Tensor]:
        """Start to send this rank's share to all; the returned function waits for the whole stack."""
        if self.communication == "reduce_scatter" or self.ranks.world == 1:
            return self.ranks.begin_all_gather(share)
        stack = share.new_zeros(bank.size, *share.shape[1:])
        stack[bank.share] = share
        return self._begin_all_reduce(stack, slice(None))

    def _begin_all_reduce(self, stack: Tensor, part: slice) -> Callable[[], Tensor]:
        """Start to sum a stack over the ranks; the returned function waits for it and returns a part of it."""
        finish = self.ranks.begin_sum([stack])

        def wait() -> Tensor:
            finish()
            return stack[part]

        return wait

    def state(self) -> dict[str, Tensor]:
        found = {}
        for bank in self.banks:
            shape = "x".join(map(str, bank.parameters[0].shape))
            for name, buffer in bank.buffers.items():
                if self.ranks.world > 1:
                    buffer.copy_(self.ranks.begin_all_gather(buffer[bank.share].clone())())
                found[f"{name}/{shape}"] = buffer[: bank.count]
        return found
