"""For tests: the derivatives of a function in each way that Torch computes them, compared with float64."""

import torch
from torch.autograd import forward_ad

# The largest error as a share of the largest value. Second derivatives round several times.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def assert_derivatives(function, exact, tensors, traced=False):
    """Compare the results and all derivatives of `function(*tensors)` with those of `exact` in float64.

    `traced` adds the ways that trace the function, which take a second.
    """
    dtype = tensors[0].dtype
    doubles = [tensor.double() for tensor in tensors]
    directions = [torch.randn_like(double) for double in doubles]
    weights = [torch.randn_like(result) for result in tuple_of(exact(*doubles))]
    expected = derivatives(exact, doubles, directions, weights, traced)
    for name, actual in derivatives(function, tensors, directions, weights, traced).items():
        for index, (value, reference) in enumerate(zip(actual, expected[name])):
            assert value.shape == reference.shape, (name, index)
            error = (value.double() - reference).abs().max().item()
            allowed = TOLERANCES[dtype] * max(reference.abs().max().item(), 1.0)
            assert error <= allowed, f"{name}, tensor {index}: error {error}, allowed {allowed}"


def derivatives(function, tensors, directions, weights, traced):
    """Return tuples of tensors by the way in which they were computed.

    directions: For each tensor, its tangent, and the weight of its gradient in a sum that is differentiated again.
    weights: For each result, its weight in a sum that is differentiated.
    """
    indexes, repeated = tuple(range(len(tensors))), [torch.stack((tensor, tensor * 2)) for tensor in tensors]
    directions = tuple(direction.to(tensor.dtype) for direction, tensor in zip(directions, tensors))

    def results(*tensors):
        return tuple_of(function(*tensors))

    def loss(*tensors):
        # Squares, so that linear functions have second derivatives, too.
        return _sum([result * result for result in results(*tensors)], weights)

    gradient = torch.func.grad(loss, indexes)

    def eager_gradients(leaves):
        first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        second = torch.autograd.grad(_sum(first, directions), leaves, allow_unused=True, materialize_grads=True)
        return (*first, *second)

    with forward_ad.dual_level():
        duals = results(*map(forward_ad.make_dual, tensors, directions))
        dual = [part for result in duals for part in forward_ad.unpack_dual(result)]
    ways = {
        "forward_ad": dual,
        "jvp": sum(torch.func.jvp(results, tuple(tensors), directions), ()),
        "grad": gradient(*tensors),
        "vmap": torch.func.vmap(results)(*repeated),
        "vmap of grad": torch.func.vmap(gradient)(*repeated),
        "jvp of grad": torch.func.jvp(gradient, tuple(tensors), directions)[1],
        "grad of grad": torch.func.grad(lambda *tensors: _sum(gradient(*tensors), directions), indexes)(*tensors),
        "second backward": eager_gradients([tensor.detach().requires_grad_() for tensor in tensors]),
    }
    if traced:
        ways["linearize"] = torch.func.linearize(results, *tensors)[1](*directions)
        ways["compiled grad"] = torch.compile(gradient, backend="aot_eager", fullgraph=True)(*tensors)
    return ways


def tuple_of(result):
    return tuple(part for part in (result if isinstance(result, tuple) else (result,)) if part is not None)


def _sum(tensors, weights):
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return sum((tensor.to(wide) * weight.to(wide)).sum() for tensor, weight in zip(tensors, weights))
