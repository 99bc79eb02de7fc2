import pytest, sys
pytestmark = pytest.mark.slow
BIASED = {"score": "sigmoid", "bias_rate": 0.01, "z_loss": 0.02, "sequence_aux_loss": 0.05}
SH = {"moe": {"enabled": True, "owners": "sharded"}}
SLICES = {"packing": {"enabled": True, "max_tokens": 24}, **SH}
LAYOUTS = [(2, {"parallel__ep": 2}), (4, {"parallel__ep": 2}), (4, {"parallel__ep": 4}), (4, {"parallel__ep": 2, "parallel__pp": 2})]
@pytest.mark.parametrize("i", range(4))
def test_it(on_ranks, i):
    size, layout = LAYOUTS[i]
    for plugins, more in ((SH, {}), (SLICES, {"train__recompute": i == 0})):
        rows = on_ranks(size, "routed", moe=BIASED, plugins=plugins, seeds=[None]*4, **layout, **more)
        for r in rows:
            for one in r:
                print(i, {k: v for k, v in one.items() if k not in ("names", "expected")}, len(one["names"]), file=sys.stderr)
                assert one["grad"] < 1e-9 and one["norm"] < 1e-9 and one["loss"] < 1e-12 and one["biases"] == []
