"""FLOPs of a step against a count by hand and against the costs that planners take."""

import numpy as np
import pytest
from evenload.core.costs.costs import analytic
from evenload.core.machine.cluster import Cluster, Link
from evenload.core.machine.shape import ExpertShape, Shape, step_flops

DENSE = Shape(2, 8, 16, 8, 4, 32, gated=True)
LINK = Link(latency_s=0.0, bytes_per_s=1.0)


def test_every_product_of_a_layer_is_counted_once_forward_and_twice_backward():
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16  # Q, K and V, output, gate, up and down
    pairs = (5 * 5 + 3 * 3) / 2
    forward = 2 * (2 * layer + 8 * 32) * 8 + 2 * 2 * 2 * 8 * pairs  # scores and their product with the values
    assert step_flops(DENSE, np.array([5, 3])) == pytest.approx(3 * forward)


@pytest.mark.parametrize("shape", [DENSE, DENSE._replace(experts=ExpertShape(4, 2, 16, 8, (1,)))])
def test_the_forward_is_what_planners_count(shape):
    cluster = Cluster(name="c", source="", ranks_per_node=1, flops_per_s=10.0, memory_bytes=1.0, intra=LINK, inter=LINK)
    forward = analytic(shape, cluster).forward
    lengths = np.array([7, 100, 2])
    assert step_flops(shape, lengths) == pytest.approx(30 * sum(forward.seconds(n) for n in lengths.tolist()))
