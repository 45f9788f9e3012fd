from __future__ import annotations

from torch import Tensor

from atoll.methods.periodic import NoSync
from tests.contracts.strategy_suite import StrategySuite, plain_training


class TestAlone(StrategySuite):
    name = "alone"
    options = NoSync(every=4)
    exchanges = False

    def reference(self, members: int, steps: int) -> Tensor:
        return plain_training(steps).double()
