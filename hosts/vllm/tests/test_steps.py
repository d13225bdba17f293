from __future__ import annotations
import pytest
import torch
from rig import Rig

def test_mixed():
    rig = Rig([{}, {"sliding_window": 8}])
    a, b, c, d = (rig.add() for _ in range(4))
    assert rig.run([(a, 5), (b, 37), (c, 2)]) < 1e-5
    assert rig.run([(a, 1), (b, 1), (c, 1), (d, 20)]) < 1e-5
    e = rig.add()
    assert rig.run([(a, 1), (b, 9), (e, 1)]) < 1e-5
    assert len(rig.builder.parts) == 2
