"""Times of passes, on a device that is not done with a step when the next one begins."""

from __future__ import annotations

import pytest
import torch

from trainer.engine.stopwatch import Stopwatch


class Device:
    """Events of a stream that takes 10 ms for each that is recorded, and is done with what was waited for."""

    def __init__(self) -> None:
        self.recorded = self.done = 0

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self._place = device, 0

    def record(self) -> None:
        self._device.recorded += 1
        self._place = self._device.recorded

    def elapsed_time(self, end: Event) -> float:
        assert max(self._place, end._place) <= self._device.done, (
            "as CUDA refuses events that are not reached"
        )
        return 10.0 * (end._place - self._place)


def test_a_gpus_passes_are_told_once_their_step_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    watch, found = Stopwatch("cuda"), []
    for micro_batches in (1, 3, 2):
        for _ in range(micro_batches):
            with watch.running(4):
                pass
        found.append(watch.lap())  # only the step before is waited for by then
        device.done = device.recorded
    assert found[0] == (0.0, 0.0)
    assert found[1:] == [pytest.approx((0.01, 0.01 / 4)), pytest.approx((0.03, 0.03 / 12))]
