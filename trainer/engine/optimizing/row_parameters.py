"""Parameters in rows as an optimizer takes them: this rank's rows are plain tensors, files get whole ones."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from trainer.engine.ranks import Ranks
from trainer.modeling.rows import Rows
from trainer.modeling.storage.trained_rows import Root, own_rows, parameters
from trainer.modeling.tensor_file import Later, Writable


class RowParameters:
    """The trained parameters of a model in rows; of each this rank updates its own.

    `all_bytes` is the size of all of them together, on all ranks.
    """

    def __init__(self, root: Root, ranks: Ranks) -> None:
        self._ranks = ranks
        self._parameters = dict(parameters(root))
        self.rows: Mapping[str, Rows] = {
            name: Rows(shape=tuple(one.shape), rank=ranks.rank, size=ranks.size)
            for name, one in self._parameters.items()
        }
        self.own: Mapping[str, torch.nn.Parameter] = {
            name: torch.nn.Parameter(own_rows(one)) for name, one in self._parameters.items()
        }
        """This rank's rows by name, in the memory that the model's are gathered from."""
        self.all_bytes = sum(one.numel() * one.element_size() for one in self._parameters.values())

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Give its rows their gradients, which are summed over the ranks already; none where it has no row,
        which kernels of optimizers do not expect.

        With autograd `to_local` takes the host twelve times as long, between a step's backward pass and its
        update.
        """
        for name, parameter in self._parameters.items():
            gradient, own = parameter.grad, self.own[name]
            assert gradient is None or isinstance(gradient, DTensor), name
            own.grad = None if gradient is None or not own.numel() else gradient.to_local()

    def drop_gradients(self) -> None:
        """Forget the model's gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def norm(self, own: torch.Tensor) -> torch.Tensor:
        """The norm over all rows of what has the norm `own` in this rank's, a scalar: the same bits on every
        rank.
        """
        squares = torch.zeros(self._ranks.size, 1, device=own.device, dtype=torch.float64)
        self._ranks.all_gather(squares, own.double().square()[None])
        return squares.sum().sqrt().to(own.dtype)

    def whole(self, label: str, own: torch.Tensor) -> Later:
        """The whole tensor of which every rank has its rows in `own`, made where it is written.

        `label` is a parameter's name, or `<parameter>/<key>` of what an optimizer keeps for each value.
        """
        rows = self.rows[_owner(label)]
        make = functools.partial(_gathered, self._ranks, rows, own, self.own[_owner(label)].device)
        return Later(dtype=own.dtype, shape=rows.shape, make=make)

    def whole_state(self, state: Mapping[str, torch.Tensor]) -> dict[str, Writable]:
        """`whole` of a model's tensors or of an optimizer's by label; buffers as they are.

        All ranks call this together: an optimizer keeps nothing for parameters of which a rank has no row.
        """
        made: dict[str, Writable] = {}
        own = {label: one for label, one in state.items() if _owner(label) in self.rows}
        for types in self._ranks.gathered({label: one.dtype for label, one in own.items()}):
            for label, dtype in types.items():
                if label not in made:
                    made[label] = self.whole(label, own.get(label, torch.empty(0, dtype=dtype)))
        return made | {label: one for label, one in state.items() if label not in own}


def _owner(label: str) -> str:
    """The parameter that a tensor of an optimizer's state belongs to."""
    name, separated, _ = label.rpartition("/")
    return name if separated else label


@torch.no_grad()
def _gathered(ranks: Ranks, rows: Rows, own: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The whole tensor, on every rank: gathered as bytes, which links have types enough for."""
    sent = torch.zeros(rows.each * rows.values, dtype=own.dtype, device=device)
    sent[: own.numel()] = own.reshape(-1)
    gathered = sent.new_empty(rows.size, sent.numel())
    ranks.all_gather(gathered.view(torch.uint8), sent.view(torch.uint8))
    count = rows.shape[0] * rows.values
    return gathered.view(-1)[:count].view(rows.shape)
