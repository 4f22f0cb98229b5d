"""Tests that hold for every public function: derivatives, compilation, streams, graphs, devices and types.

Each kernel links to this file as `test_NAME_ops.py`. The functions are `OPS` of its `reference_NAME.py`.
"""

import importlib

import pytest
import testing
import torch
from differentiate import assert_derivatives, tuple_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

reference = importlib.import_module(__name__.replace("test_", "reference_").replace("_ops", ""))
OPS = reference.OPS
GRAPHS = getattr(reference, "GRAPHS", [OPS])  # the ops that are compiled together
GROUPS = getattr(reference, "GROUPS", [OPS])  # of each, derivatives of the first op are traced, and its input replaced
EMPTY = getattr(reference, "EMPTY", [2])  # the sizes of dimensions, for two rows or sequences, that may be 0


def leaves_of(op, batch, dtype):
    return [tensor.detach().requires_grad_() for tensor in op.inputs(batch, dtype)]


def results_of(op, tensors):
    return tuple_of(op.function(*tensors))


def gradients_of(results, tensors, **options):
    # In float16, `linspace` counts no further than 65,504.
    weights = [torch.linspace(-1, 1, r.numel(), device=r.device).to(r.dtype).view(r.shape) for r in results]
    return torch.autograd.grad(results, tensors, weights, retain_graph=True, **options)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", testing.DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_derivatives(name, dtype):
    """Forward mode, transforms of torch.func and second derivatives agree with float64."""
    op = OPS[name]
    traced = dtype == torch.float32 and name in [next(iter(ops)) for ops in GROUPS]
    assert_derivatives(op.function, op.exact, tuple(op.inputs(2, dtype)), traced)


class RecordedCalls(TorchDispatchMode):
    """Collects the calls of the kernel's ops, with copies of their tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == reference.ops.name:
            self.calls.append((op, *tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs or {}))))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    """The fakes of the ops of a forward and a backward pass agree with the ops."""
    leaves = leaves_of(OPS[name], 3, testing.DTYPES[list(OPS).index(name) % 3])
    with RecordedCalls() as recorded:
        gradients_of(results_of(OPS[name], leaves), leaves)
    assert len(recorded.calls) > 1
    for op, arguments, options in recorded.calls:
        torch.library.opcheck(op, arguments, options)


def together(ops, batch, dtype):
    """Return a function that calls all of the ops, and its leaves."""
    leaves = [leaves_of(op, batch, dtype) for op in ops.values()]

    def function(*tensors):
        rest = iter(tensors)
        return tuple(r for op, own in zip(ops.values(), leaves) for r in results_of(op, [next(rest) for _ in own]))

    return function, [leaf for own in leaves for leaf in own]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=testing.gpu)])
def test_compile(backend):
    for ops in GRAPHS:
        function, _ = together(ops, 4, torch.float32)
        testing.assert_compiles(function, lambda batch, ops=ops: together(ops, batch, torch.float32)[1], backend)


@testing.gpu
def test_stream():
    for op in OPS.values():
        first, *others = op.inputs(64, torch.bfloat16)
        testing.assert_waits_for_stream(lambda late, op=op, others=others: results_of(op, [late, *others]), first)


@testing.gpu
@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_graph(dtype):
    for ops in GROUPS:
        function, leaves = together(ops, 64, dtype)
        testing.assert_replays(lambda f=function, leaves=leaves: gradients_of(f(*leaves), leaves), leaves[0])


@testing.two_gpus
def test_second_device():
    for op in OPS.values():
        testing.assert_runs_on_second_device(lambda *x, op=op: results_of(op, x)[0], *op.inputs(2, torch.float16))


@testing.gpu
@pytest.mark.parametrize("name", OPS)
def test_errors_on_another_device(name):
    tensors = OPS[name].inputs(2, torch.float16)
    one_elsewhere = [[*tensors[:i], tensor.cpu(), *tensors[i + 1 :]] for i, tensor in enumerate(tensors)]
    for given in (*one_elsewhere, [tensor.cpu() for tensor in tensors]):  # it may have tensors of its own on the GPU
        with pytest.raises((RuntimeError, NotImplementedError), match=r"\w+ must be on|backend=\"cpu\""):
            OPS[name].function(*given)


@pytest.mark.parametrize("grad_enabled", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_wrong_types_are_type_errors(name, grad_enabled):
    tensors = OPS[name].inputs(2, torch.float32)
    with torch.set_grad_enabled(grad_enabled):
        for i in range(len(tensors)):
            with pytest.raises(TypeError, match=r"^\w+: \w+ must be a Tensor( or None)?, not str$"):
                OPS[name].function(*tensors[:i], "text", *tensors[i + 1 :])


@pytest.mark.parametrize("name", OPS)
def test_only_what_needs_a_gradient_gets_one(name):
    """Gradients through each result alone, with respect to each tensor alone."""
    op = OPS[name]
    leaves = leaves_of(op, 4, torch.float32)
    for number, result in enumerate(results_of(op, leaves)):
        for i, expected in enumerate(gradients_of([result], leaves, allow_unused=True)):
            alone = [leaf.detach().requires_grad_(i == index) for index, leaf in enumerate(leaves)]
            same = results_of(op, alone)[number]
            if expected is not None:
                torch.testing.assert_close(gradients_of([same], alone[i])[0], expected)
            elif same.requires_grad:
                assert gradients_of([same], alone[i], allow_unused=True) == (None,)
    with torch.no_grad():
        assert not any(result.requires_grad for result in results_of(op, leaves))


@pytest.mark.parametrize("name", OPS)
def test_results_are_equal_to_the_bit(name):
    leaves = leaves_of(OPS[name], 700, torch.bfloat16)
    runs = []
    for threads in (1, 1, 2, 3):
        torch.set_num_threads(threads)
        results = results_of(OPS[name], leaves)
        runs.append([*results, *gradients_of(results, leaves)])
    torch.set_num_threads(1)
    assert all(torch.equal(*pair) for run in runs[1:] for pair in zip(runs[0], run))


@pytest.mark.parametrize("name", OPS)
def test_not_finite(name):
    """Values that are not finite change the results that the formula computes from them, and no others."""
    op = OPS[name]
    for dtype in testing.DTYPES:
        tensors = op.inputs(2, dtype)
        for i, tensor in enumerate(tensors):
            changed = tensor.flatten().clone()
            changed[5 :: len(changed) // 3][:3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
            unaligned = torch.cat((changed[:1], changed))[1:]
            given = (*tensors[:i], changed.view_as(tensor), *tensors[i + 1 :])
            expected = tuple_of(op.exact(*(t.double() for t in given)))
            for given in (changed, unaligned):
                results = results_of(op, [*tensors[:i], given.view_as(tensor), *tensors[i + 1 :]])
                for pair in zip(results, (exact.to(r.dtype) for exact, r in zip(expected, results))):
                    # A kernel may multiply an infinite factor with other factors first.
                    actual, exact = pair if i == 0 else (t.nan_to_num(7, 7, 7) for t in pair)
                    # On a GPU, tokens without a rotation have cos 1 and sin 0: a weight's NaN reaches its pair.
                    if i > 0 and actual.is_cuda:
                        exact = torch.where(actual == 7, actual, exact)
                    assert torch.allclose(actual, exact, rtol=2e-2, atol=2e-2, equal_nan=True), (dtype, i)


@pytest.mark.parametrize("size", EMPTY)
@pytest.mark.parametrize("name", OPS)
def test_empty(name, size):
    """Results of empty tensors are empty, and the gradients of all tensors zero."""
    op = OPS[name]
    tensors = [t[tuple(slice(0 if n == size else None) for n in t.shape)] for t in op.inputs(2, torch.float16)]
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    results, expected = results_of(op, leaves), tuple_of(op.exact(*tensors))
    assert [result.shape for result in results] == [exact.shape for exact in expected]
    for gradient, leaf in zip(gradients_of(results, leaves), leaves):
        assert torch.equal(gradient, torch.zeros_like(leaf))
