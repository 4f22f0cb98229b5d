"""Tensors and assertions that the kernels' tests share: each kernel links to this file.

A kernel is loaded from `build/` with the public client. It runs on the GPU if there is one, else on the CPU.
"""

from typing import Callable, NamedTuple

import kernels
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


class Op(NamedTuple):
    """A public function with a gradient, for the tests of op_tests.py."""

    function: Callable  # takes tensors, in the order of its arguments, and returns one or a tuple
    exact: Callable  # the formula, in the precision of its tensors
    inputs: Callable  # takes a number of rows or sequences and a dtype, and returns the tensors of a call


def load(project):
    """Return the package as built. Without one, skip the test, or the module that is imported."""
    try:
        return kernels.get_local_kernel(project)
    except FileNotFoundError:
        pytest.skip(f"not built: kernel-builder build {project} --backend {DEVICE}", allow_module_level=True)


def random(*shape, dtype=torch.float32, requires_grad=False):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_(requires_grad)


def doubles(tensors):
    """Return copies in float64 that require gradients where the tensors do."""
    return [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def assert_as_good(actual, reference, expected, factor=1.1):
    """Assert that the error of `actual` is at most `factor` times that of `reference`."""
    assert actual.dtype == reference.dtype and actual.shape == reference.shape
    if actual.numel() == 0:
        return
    scale = expected.abs().max().item()
    slack = {torch.float32: 2e-6, torch.float16: 1e-4, torch.bfloat16: 1e-3}[actual.dtype] * max(scale, 1.0)
    error = (actual.double() - expected).abs().max().item()
    allowed = factor * (reference.double() - expected).abs().max().item() + slack
    assert error <= allowed


def units_apart(a, b):
    """Return the distance between two 16-bit tensors, in representable numbers."""
    bits = torch.stack((a, b)).view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits).diff(dim=0)[0].abs()


def views(width, dtype):
    """Return tensors whose rows of `width` elements are not contiguous, by name."""
    x = random(4, 6, 5, width + 8, dtype=dtype)
    deep = random(3, 3, 3, 3, 3, 2 * width, dtype=dtype)
    return {
        "slice of each row": x[..., :width],
        "slice at an odd offset": x[..., 1 : width + 1],
        "every second row": x[:, :, ::2, :width],
        "permuted": x[..., :width].permute(2, 0, 1, 3),
        "leading dimensions that do not fold": x[:3, 1:5, :4, 8:],
        "more of them than are read in place": deep.permute(4, 2, 0, 1, 3, 5)[..., :width],
        "expanded rows": random(1, width, dtype=dtype).expand(7, width),
        "expanded elements": random(7, 1, dtype=dtype).expand(7, width),
        "elements apart": random(width, 9, dtype=dtype).t(),
        "odd storage offset": random(6 * width + 1, dtype=dtype)[1:].view(6, width),
    }


def copies(call):
    """Return the names of the copies that a call makes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.name for event in profile.events()} & {"aten::clone", "aten::contiguous", "aten::copy_"}


def kernelized(module, project, layer):
    """Return a module with the `forward` of a layer of the kernel, put there by kernelize."""
    # A new class, because marking changes it.
    module.__class__ = kernels.use_kernel_forward_from_hub(layer)(type("Marked", (type(module),), {}))
    mapping = {layer: {DEVICE: kernels.LocalLayerRepository(project, layer_name=layer)}}
    model = torch.nn.Sequential(module).to(DEVICE)
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
        kernels.kernelize(model, mode=mode, device=DEVICE, use_fallback=False)
    assert module.forward.__func__ is getattr(load(project).layers, layer).forward
    return module


def assert_runs_on_second_device(function, *tensors):
    """Assert that a call whose tensors are not on the current device gives the result and does not change that."""
    expected, actual = function(*tensors), function(*(tensor.to("cuda:1") for tensor in tensors))
    assert actual.device.index == 1 and torch.cuda.current_device() == 0
    torch.testing.assert_close(actual.cpu(), expected.cpu())


def results_and_gradients(function, inputs, grads):
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [i for i in inputs if i is not None and i.requires_grad]
    return outputs, torch.autograd.grad(outputs, wanted, [g.to(o.dtype) for g, o in zip(grads, outputs)])


def assert_accurate(function, eager_function, exact_function, inputs, grads, results=True):
    """Assert that a function's results and gradients, or these alone, are as good as those of the eager function."""
    expected = results_and_gradients(exact_function, doubles(inputs), grads)
    reference = results_and_gradients(eager_function, inputs, grads)
    actual = results_and_gradients(function, inputs, grads)
    for kind in (0, 1) if results else (1,):
        for a, r, e in zip(actual[kind], reference[kind], expected[kind]):
            assert_as_good(a, r, e)


def assert_waits_for_stream(function, x):
    """Assert that a call on a stream reads `x` after an earlier copy on that stream, which is late."""
    expected = function(x)
    stream, late = torch.cuda.Stream(), torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        actual = function(late)
    stream.synchronize()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def capture(step, warm_up=None):
    """Return a CUDA graph of a call, and the call's results, which each replay changes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        (warm_up or step)()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


def assert_replays(step, x):
    """Assert that a replayed CUDA graph computes from new values of `x`."""
    graph, captured = capture(step)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(captured, step(), rtol=0, atol=0)


def assert_compiles(function, inputs_of, backend="aot_eager"):
    """Assert that a compiled function gives the function's results and gradients, without another compilation."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for batch in (4, 9):
        with torch.compiler.set_stance("fail_on_recompile" if batch == 9 else "default"):
            inputs = inputs_of(batch)
            results = function(*inputs)
            grads = [torch.randn_like(r) for r in (results if isinstance(results, tuple) else (results,))]
            torch.testing.assert_close(*(results_and_gradients(call, inputs, grads) for call in (compiled, function)))
