import pytest

pytestmark = pytest.mark.slow


def test_stock(on_ranks):
    one = on_ranks(1, "stock")
    two = on_ranks(2, "stock", cp=2)
    print(one[0]["shapes"], two[0]["shapes"])
    for name, g in one[0]["gradients"].items():
        print(name, float((two[0]["gradients"][name] - g).norm() / g.norm()))
