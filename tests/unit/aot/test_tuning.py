"""Tests of the rows that are chosen by measured configurations."""

from types import SimpleNamespace

import pytest

from kernel_builder.aot.tuning import Launch, rows, write_rows
from kernel_builder.cli import tune_command
from kernel_format.errors import ConfigError
from tests.support.places import SOURCES

SMALL, LARGE = {"BLOCK": 1024, "num_warps": 4}, {"BLOCK": 4096, "num_warps": 8}


def launch(best, *, m=None, n, **arguments):
    key = {"n": n} if m is None else {"m": m, "n": n}
    return Launch({**key, **arguments}, key, best, {})


def choose(*launches, present=(), **passed):
    return rows(launches, present, passed, "aot.toml: [op.norm] config")


def test_a_range_of_keys_has_one_row():
    assert choose(launch(LARGE, n=9000), launch(SMALL, n=100), launch(SMALL, n=700), launch(LARGE, n=4000)) == [
        {"when": "n <= 700", **SMALL},
        LARGE,
    ]


def test_rows_of_several_keys_choose_the_configuration_of_each_launch():
    launches = [launch(SMALL, m=16, n=8192), launch(SMALL, m=64, n=1024), launch(LARGE, m=64, n=2048)]
    assert choose(*launches) == [
        {"when": "m <= 16 and n <= 8192", **SMALL},
        {"when": "m <= 64 and n <= 1024", **SMALL},
        LARGE,
    ]


def test_constexprs_that_are_not_tuned_are_kept():
    launches = [launch(SMALL, n=1, DIM=64, CAUSAL=True), launch(LARGE, n=1, DIM=128, CAUSAL=False)]
    present = [{"when": "old", "DIM": 64, "CAUSAL": True, "BLOCK": 1}, {"DIM": 128, "CAUSAL": False, "num_warps": 2}]
    passed = {"DIM": "max(q.size(3), 16)", "CAUSAL": "causal"}
    assert choose(*launches, present=present, **passed) == [
        {"when": "(max(q.size(3), 16)) == 64", "DIM": 64, "CAUSAL": True, **SMALL},
        {"when": "(max(q.size(3), 16)) == 128", "DIM": 128, "CAUSAL": False, **LARGE},
    ]
    with pytest.raises(ConfigError, match="no workload launches the kernel with DIM = 128, CAUSAL = False"):
        choose(launches[0], present=present, **passed)
    with pytest.raises(ConfigError, match="the rows set DIM, for which neither"):
        choose(*launches, present=present)


def test_rows_are_replaced_in_the_file(tmp_path):
    path = tmp_path / "aot.toml"
    before = SOURCES["tuned_rows"]
    path.write_text(before)
    write_rows(path, {"norm": [{"when": "n <= 700", **SMALL, "EVEN": True}, LARGE]})
    assert path.read_text() == before.replace(
        "  { BLOCK = 1 },\n",
        '  { when = "n <= 700", BLOCK = 1024, num_warps = 4, EVEN = true },\n  { BLOCK = 4096, num_warps = 8 },\n',
    )


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            SimpleNamespace(configs=[SimpleNamespace(num_ctas=2)]),
            "norm_kernel has configurations with num_ctas above 1",
        ),
        (SimpleNamespace(), "norm_kernel has no configurations to choose from"),
    ],
)
def test_configurations_that_are_not_compiled_are_refused(kernel, message):
    with pytest.raises(ConfigError, match=message):
        tune_command._tuner(SimpleNamespace(norm_kernel=kernel), "norm_kernel", "aot.toml: [op.norm]")
