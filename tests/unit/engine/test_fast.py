"""What a model is prepared for before its blocks are compiled."""

from __future__ import annotations

import torch

from trainer.engine.fast import move_plain_tensors


class Table(torch.nn.Module):
    """Keeps a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = torch.arange(4.0)
        self.name = "table"


def test_tensors_that_are_plain_attributes_move_too() -> None:
    model = torch.nn.Sequential(Table())
    model.to("meta")
    table = model[0]
    assert isinstance(table, Table)
    assert table.frequencies.device.type == "cpu"  # torch leaves it
    move_plain_tensors(model, "meta")
    assert table.frequencies.device.type == "meta"
    assert table.name == "table"
