"""`accelerate(model, scope="model")`: Dynamo's graphs with the kernels in them."""

import gc
import importlib
import operator
from contextlib import nullcontext
from unittest import mock

import pytest
import small_models
import torch
from model_cases import Case, RecordedModel, error
from text_models import PADDED, TOKENS, lively, model_of
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicCache, DynamicLayer

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo", "on_the_device_of_the_kernels")


def text_case(name):
    inputs = {"input_ids": TOKENS, "attention_mask": PADDED, "use_cache": False, "return_dict": False}
    return Case(model_of(name).requires_grad_(False), inputs)


CASES = {
    "qwen3": lambda: text_case("qwen3"),
    "phi3": lambda: text_case("phi3"),
    "ltx": small_models.ltx,
    "wan": small_models.wan,
    "flux2": small_models.flux2,
}
KERNELS = {
    "qwen3": {"RMSNorm", "residual sum with RMSNorm", "q/k norm with rotary embedding", "gated activation"},
    "phi3": {"RMSNorm", "residual sum with RMSNorm", "rotary embedding", "gated activation"},
    "ltx": {"norm with modulation", "residual sum with gate", "q/k norm with rotary embedding"},
    "wan": {"RMSNorm", "residual sum with norm, gate and modulation", "q/k norm with rotary embedding"},
    "flux2": {"RMSNorm", "gated activation", "q/k norm with rotary embedding", "rotary embedding"},
}


@pytest.fixture
def fusions(blocks):
    tracing = importlib.import_module(f"{blocks.__name__}.tracing")
    with mock.patch.object(tracing, "fuse", side_effect=tracing.fuse) as fusions:
        yield fusions


def traced(blocks, model):
    return blocks.accelerate(model, scope="model")


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_outputs_are_the_models_and_bit_equal_once_restored(blocks, name):
    torch.manual_seed(0)
    case = CASES[name]()
    expected = case.run()
    report = traced(blocks, case.model)
    with torch._C.DisableTorchFunction():  # Torch does not trace `unflatten` under the mode of a default device
        assert error(case.run(), expected) < 1e-5
    does = {does for _, does in report.replaced}
    assert KERNELS[name] <= does
    assert not [reason for _, reason in report.left if "rotary" in reason]
    assert "graph break" not in {name for name, _ in report.left}
    blocks.restore(case.model)
    assert torch.equal(case.run(), expected)


def rms_norm(x, weight, eps=1e-6):
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def patches(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2) + x


NORMS = {
    "rounded before the weight": (rms_norm, "RMSNorm"),
    "rounded last": (
        lambda x, w: (w.float() * (x.float() / torch.sqrt(x.float().square().mean(-1, True) + 1e-6))).to(x.dtype),
        "RMSNorm",
    ),
    "plus one": (
        lambda x, w: ((1.0 + w.float()) * (x.float() * (x.float().pow(2).mean(-1, True) + 1e-6).pow(-0.5))).type_as(x),
        "RMSNorm",
    ),
    "of Torch": (lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-6), "RMSNorm"),
    "of Torch, with its locals": (lambda x, w: F.rms_norm(locals()["x"], w.shape, w, 1e-6), "RMSNorm"),
    "centered": (lambda x, w: F.layer_norm(x, (x.shape[-1],), w, None, 1e-6), "LayerNorm"),
    "of patches": (lambda x, w: F.layer_norm(patches(x), x.shape[-1:], w), "residual sum with norm"),
    "of patches with views": (lambda x, w: F.layer_norm(p := patches(x), p.shape[-1:], w) + p.mT.view(-1)[0], None),
    "in bfloat16": (lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), None),
    "of a rounded mean": (
        lambda x, w: (y := 2 * x.float()) * (y.square().mean(-1, True, dtype=x.dtype) + 1e-6).rsqrt(),
        None,
    ),
    "of another dimension": (lambda x, w: w * (x.float() * x.float().pow(2).mean(1, True).rsqrt()).to(x.dtype), None),
}


class Function(nn.Module):
    """A module that computes a function of its input and its weight."""

    def __init__(self, function, size=64):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(size, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x):
        return self.function(x, self.weight)


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_replaced_if_a_kernel_rounds_as_they_do(blocks, name):
    function, does = NORMS[name]
    model, x = Function(function), torch.randn(3, 5, 64, dtype=torch.bfloat16)
    expected = model(x)
    report = traced(blocks, model)
    # Two values in bfloat16 that are neighbors, where a float32 sum has another order.
    torch.testing.assert_close(model(x), expected, rtol=2**-7, atol=0)
    assert [operation.split(",")[0] for _, operation in report.replaced] == ([] if does is None else [does])


def test_gradients_of_parameters_also_through_checkpoints(blocks):
    model = model_of("llama", num_hidden_layers=1).train()

    def gradients():
        model.zero_grad()
        model(TOKENS, use_cache=False).logits.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    expected = gradients()
    report = traced(blocks, model)
    assert error(gradients(), expected) < 1e-5
    assert "rotary embedding" in {operation for _, operation in report.replaced}
    blocks.restore(model)
    model.gradient_checkpointing_enable()
    report = traced(blocks, model)
    assert error(gradients(), expected) < 1e-5
    assert "rotary embedding" in {operation for _, operation in report.replaced}


# Olmo 2 normalizes q and k before it splits them into heads.
@pytest.mark.parametrize(("name", "scope"), [("llama", "model"), ("olmo2", "model"), ("llama", "blocks")])
@torch.no_grad()
def test_forty_lengths_need_two_graphs(blocks, fusions, name, scope):
    model = lively(name, num_hidden_layers=1)
    expected = [model(torch.arange(3, 3 + n)[None], use_cache=False).logits for n in range(2, 42)]
    blocks.accelerate(model, scope=scope)
    for n, own in zip(range(2, 42), expected):
        assert error(model(torch.arange(3, 3 + n)[None], use_cache=False).logits, own) < 1e-5
    assert fusions.call_count == 2


@pytest.mark.parametrize(("assistant", "expected"), [(None, [2, 1, 0]), ("lookup", [3, 1, 0]), ("model", [3, 1, 0])])
@torch.no_grad()
def test_a_growing_cache_needs_a_graph_for_each_kind_of_call(blocks, fusions, assistant, expected):
    """That is the prompt, a token, and candidates, whose rejection crops the cache. A second prompt has symbols."""
    model, counts = lively(num_hidden_layers=1), []
    options = {} if assistant is None else {"prompt_lookup_num_tokens": 3}
    options = {"assistant_model": lively(seed=3, num_hidden_layers=1)} if assistant == "model" else options
    prompts = [torch.randint(3, 60, (1, length)) for length in (50, 60, 72)]
    tokens = [model.generate(prompt, max_new_tokens=16, min_new_tokens=16, **options) for prompt in prompts]
    report = traced(blocks, model)
    for prompt, own in zip(prompts, tokens):
        before = fusions.call_count
        assert torch.equal(model.generate(prompt, max_new_tokens=16, min_new_tokens=16, **options), own)
        counts.append(fusions.call_count - before)
    assert counts == expected and ("LlamaRMSNorm", "residual sum with RMSNorm") in report.replaced


@torch.no_grad()
def test_encoders_and_decoders_need_three_graphs(blocks, fusions):
    """Those of a first, of a second and of later tokens, for all lengths of texts of the encoder."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    prompts, options = [TOKENS[:1, :length] for length in (9, 12, 7)], {"max_new_tokens": 6, "min_new_tokens": 6}
    tokens = [model.generate(prompt, **options) for prompt in prompts]
    traced(blocks, model)
    assert all(torch.equal(model.generate(prompt, **options), own) for prompt, own in zip(prompts, tokens))
    assert fusions.call_count == 3


@torch.no_grad()
def test_sizes_that_guards_know_to_be_equal(blocks, fusions):
    """The rows of a scale, `view(len(x), -1, 64)`, are one for each token: Torch compares them where they meet."""
    model = Calls(lambda x, rows: F.layer_norm(x, (64,)) * (1 + (scale := rows.view(len(x), -1, 64))) + scale)
    traced(blocks, model)
    for batch, tokens in ((2, 5), (3, 5), (4, 7), (5, 9)):
        x, rows = torch.randn(batch, tokens, 64), torch.randn(batch * tokens, 64)
        torch.testing.assert_close(model(x, rows), model.forward(x, rows))
        assert not fusions.call_args.args[0].graph.find_nodes(op="call_function", target=operator.mul)
    assert fusions.call_count == 3


@pytest.mark.parametrize("breaks", [False, True])
def test_errors_that_a_model_catches(blocks, breaks):
    """A trace that fails ends in the model's own forward, unless a part has run, which would run twice."""

    def forward(x):
        calls.append(1)
        if breaks:
            torch._dynamo.graph_break()
        try:
            return x @ torch.ones(3, 3)
        except RuntimeError:
            return F.silu(x)

    calls, x = [], torch.randn(2, 64)
    report = blocks.accelerate(model := Calls(forward))
    for number in (1, 2, 3):
        with pytest.raises(RuntimeError, match="fake tensors") if breaks else nullcontext():
            assert torch.equal(model(x), F.silu(x))
        assert len(calls) == number
    assert breaks or "fails on fake tensors" in str(report)


class Prompt(DynamicLayer):
    """Keys and values in front of a call's own, which it does not keep."""

    def update(self, keys, values, *args, **options):
        return torch.cat((self.keys, keys), 2), torch.cat((self.values, values), 2)


def test_a_prompt_in_a_cache_is_trained(blocks):
    model, prompt, cache = lively(num_hidden_layers=1), nn.Parameter(torch.randn(2, 2, 2, 6, 16)), DynamicCache()
    cache.layers = [layer := Prompt()]
    layer.lazy_initialization(*prompt)
    layer.keys, layer.values = prompt[..., :4, :]
    (expected,) = torch.autograd.grad(model(TOKENS, past_key_values=cache).logits.sum(), prompt)
    blocks.accelerate(model)
    torch.no_grad()(model)(TOKENS, past_key_values=cache)
    (actual,) = torch.autograd.grad(model(TOKENS, past_key_values=cache).logits.sum(), prompt)
    assert error(actual, expected) < 1e-5


@torch.no_grad()
def test_blocks_of_a_list_share_a_graph_without_symbols(blocks, fusions):
    """The inputs of one list are slices of one sample too, those of the other list are longer."""
    model, x = Calls(lambda x: norms[1](long[0](torch.cat([norms[0](x), x], 1))[:, :5])), torch.randn(1, 5, 64)
    norms = model.blocks = nn.ModuleList(2 * [nn.RMSNorm(64, eps=1e-6)])
    long = model.long = nn.ModuleList([nn.RMSNorm(64, eps=1e-6)])
    expected = model(x)
    blocks.accelerate(model, scope="blocks")
    torch.testing.assert_close(model(x), expected)
    graphs = [fusion.args[0].graph for fusion in fusions.call_args_list]
    inputs = [node.meta["example_value"] for graph in graphs for node in graph.find_nodes(op="placeholder")]
    assert len(graphs) == 2 and not any(isinstance(value, torch.SymInt) for value in inputs)
    blocks.restore(model)
    assert torch.equal(model(x), expected) and norms[0]._compiled_call_impl is None


@pytest.mark.parametrize("number, numbered, traced", [(28, False, 28), (29, False, 1), (29, True, 29)])
@torch.no_grad()
def test_more_than_28_blocks_without_numbers_are_traced_alone(blocks, fusions, number, numbered, traced):
    model, x = Calls(lambda x: sum(block(x) for block in model.blocks)), torch.randn(1, 5, 64)
    model.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.SiLU()) for _ in range(number))
    for index, block in enumerate(model.blocks if numbered else ()):
        block[0].layer_idx = index
    expected = model(x)
    blocks.accelerate(model)
    torch.testing.assert_close(model(x), expected)
    graphs = [fusion.args[0].graph for fusion in fusions.call_args_list]
    assert [len(graph.find_nodes(op="call_function", target=F.silu)) for graph in graphs] == [traced]


def test_blocks_with_numbers_in_a_cache_run_as_they_were(blocks):
    """Torch would trace each apart, up to its limit."""
    model = lively()
    expected = model.generate(TOKENS, max_new_tokens=12, do_sample=False)
    report = blocks.accelerate(model, scope="blocks")
    assert torch.equal(model.generate(TOKENS, max_new_tokens=12, do_sample=False), expected)
    assert not report.replaced and "blocks have numbers in a cache" in str(report)


# --- models whose operations have side effects, or change ------------------------------------------------------------


class InPlace(nn.Module):
    """A block with an activation between a residual sum and its norm that may write to an operand of the sum."""

    def __init__(self, act):
        super().__init__()
        self.norm, self.act, self.linear = nn.LayerNorm(32), act, nn.Linear(32, 32)

    def forward(self, x):
        branch = self.linear(x)
        hidden = x + branch
        more = self.act(branch)
        return self.norm(hidden) + more


@torch.no_grad()
def test_activations_in_place(blocks):
    """They are in the second model of a class, or write from the second call on."""
    x = torch.randn(2, 6, 32)
    doubles, rounds = Calls(lambda x: operator.imul(x, 2)), Calls(lambda x: operator.ifloordiv(x, 2))
    for act in (nn.SiLU(), nn.SiLU(inplace=True), doubles, rounds, nn.SiLU()):
        model = InPlace(act)
        traced(blocks, model)
        model(x)
        model.act.inplace = True
        actual = model(x)
        blocks.restore(model)
        torch.testing.assert_close(actual, model(x))


class RotatedPart(nn.Module):
    """Attention whose query is rotated after its first two tokens, where it is, as in CogVideoX."""

    def __init__(self, seen):
        super().__init__()
        self.query, self.norm, self.seen = nn.Linear(32, 32), nn.LayerNorm(8), seen

    def forward(self, x, cos, sin):
        query = self.norm(self.query(x).view(2, -1, 4, 8).transpose(1, 2))
        first, second = query[:, :, 2:].reshape(2, 4, 4, 4, 2).unbind(-1)
        rotated = query[:, :, 2:] * cos + torch.stack((-second, first), -1).flatten(-2) * sin
        query[:, :, 2:] = rotated
        out = F.scaled_dot_product_attention(query, query, query)
        if self.seen == "result":
            out.flatten(1)[:, :4] = 2
        out = out.transpose(1, 2).flatten(2)
        return out + rotated.sum() if self.seen == "rotated" else out


@pytest.mark.parametrize("seen", ["", "rotated", "result"])
@torch.no_grad()
def test_rotation_in_place(blocks, fusions, seen):
    """Nothing copies the rotated part, unless the model reads it apart, nor the result, whose layout nothing sees."""
    model, inputs = RotatedPart(seen), (torch.randn(2, 6, 32), torch.randn(4, 8), torch.randn(4, 8))
    expected = model(*inputs)
    report = traced(blocks, model)
    torch.testing.assert_close(model(*inputs), expected)
    assert report.replaced["RotatedPart", "rotary embedding"] == 1
    nodes = {getattr(node.target, "__name__", ""): node for node in fusions.call_args.args[0].graph.nodes}
    assert ("setitem" in nodes) == bool(seen)
    assert nodes["ada_layer_norm"].args[0].target == ("transpose" if seen else "view")


@torch.no_grad()
def test_functions_that_a_module_holds(blocks):
    model, x = Calls(lambda x: model.act(x) * x), torch.randn(2, 16)
    for function in (lambda x: F.silu(x), lambda x: F.relu(x), lambda x: F.silu(x + 1)):  # noqa: PLW0108
        model.act = function
        traced(blocks, model)
        torch.testing.assert_close(model(x), function(x) * x)


class Negating(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return -result if function is F.silu else result


@torch.no_grad()
def test_a_mode_that_is_entered_later_sees_the_models_calls(blocks):
    model, x = Calls(lambda x: F.silu(norm(x)) * x), torch.randn(2, 16)
    norm = model.norm = nn.RMSNorm(16, eps=1e-6)
    expected = model(x)
    traced(blocks, model)
    torch.testing.assert_close(model(x), expected)
    with Negating():
        torch.testing.assert_close(model(x), -expected)


def attention_with(mask_of):
    return Calls(lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.vmap(mask_of)(torch.arange(6))))


@torch.no_grad()
def test_masks_that_a_vmap_makes(blocks):
    """If one cannot be made, the call fails as the model's own, and ends the `vmap`."""
    failing = attention_with(lambda row: torch.ones(2**50, dtype=torch.bool)[:6].logical_or(row >= torch.arange(6)))
    causal = attention_with(lambda row: row >= torch.arange(6))
    for model in (failing, causal):
        traced(blocks, model)
    with pytest.raises(RuntimeError, match="memory") as raised:
        failing(torch.randn(1, 2, 6, 8))
    assert not isinstance(raised.value, BackendCompilerFailed) and not blocks.kernel_set.is_transformed()
    x = torch.randn(1, 2, 6, 8)
    torch.testing.assert_close(causal(x), F.scaled_dot_product_attention(x, x, x, is_causal=True))


class NormWithDropout(nn.RMSNorm):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


def test_dropout_of_a_norm_in_training(blocks):
    model = NormWithDropout(64, eps=1e-6).eval()
    traced(blocks, model)
    x = torch.randn(4, 64)
    assert model(x).count_nonzero() == x.numel()
    assert model.train()(x).count_nonzero() < x.numel()


@torch.no_grad()
def test_a_norm_that_gets_a_parametrization_later(blocks):
    model, x = nn.Sequential(nn.LayerNorm(32)), torch.randn(2, 32)
    model[0].weight.copy_(torch.randn(32))
    traced(blocks, model)
    model(x)
    parametrize.register_parametrization(model[0], "weight", nn.Softplus())
    actual = model(x)
    blocks.restore(model)
    torch.testing.assert_close(actual, model(x))


class Rotating(nn.Module):
    """Rotates heads by tables that its caller gives it."""

    def __init__(self, half):
        super().__init__()
        self.half = half

    def forward(self, x, cos, sin):
        if self.half:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat((-second, first), -1) * sin
        first, second = x.view(*x.shape[:-1], -1, 2).unbind(-1)
        return x * cos + torch.stack((-second, first), -1).flatten(-2) * sin


@pytest.mark.parametrize(
    ("cos", "sin", "count"),
    [
        (torch.randn(5, 16), torch.randn(5, 16), 1),  # two values for a pair
        (torch.randn(5, 1), torch.randn(5, 1), 0),
        (torch.randn(5, 1), torch.randn(5, 16), 0),
        (torch.randn(5, 16), torch.randn(5, 16).bfloat16(), 0),
    ],
)
@pytest.mark.parametrize("half", [False, True])
@torch.no_grad()
def test_rotary_tables_that_are_inputs(blocks, half, cos, sin, count):
    model, x = Rotating(half), torch.randn(2, 3, 5, 16)
    report, cos, sin = traced(blocks, model), cos.to(x.device), sin.to(x.device)
    for tables in ((cos, sin), (cos * 2, sin * 2)):
        torch.testing.assert_close(model(x, *tables), Rotating(half)(x, *tables))
    assert report.replaced["Rotating", "rotary embedding"] == count


@torch.no_grad()
def test_parts_of_heads_that_are_rotated_apart(blocks):
    """A head as a whole is no rotation that kernels compute, as in Allegro."""
    rotate, tables, x = Rotating(half=True), torch.randn(4, 5, 16), torch.randn(2, 3, 5, 32)
    model = Calls(lambda x: torch.cat([rotate(x[..., :16], *tables[:2]), rotate(x[..., 16:], *tables[2:])], -1))
    expected, report = model(x), traced(blocks, model)
    torch.testing.assert_close(model(x), expected)
    assert report.replaced and not report.left


@torch.no_grad()
def test_a_complex_rotary_table_that_is_loaded(blocks):
    def rotate(x):
        pairs = torch.view_as_complex(x.view(2, 3, 5, 8, 2))
        return torch.view_as_real(pairs * model.table).flatten(-2)

    model, x = Calls(rotate), torch.randn(2, 3, 5, 16)
    model.register_buffer("table", torch.randn(5, 8, dtype=torch.complex64))
    report, first = traced(blocks, model), model(x)
    model.load_state_dict({"table": -2 * model.table})
    torch.testing.assert_close(model(x), -2 * first)
    assert report.replaced == {("Calls", "rotary embedding"): 1}


@pytest.mark.parametrize(
    ("library", "function", "angles"),
    [
        ("stable_audio3", "_apply_rotary_partial", (5, 16)),
        ("stable_audio3", "_apply_rotary_partial", (5, 8)),
        ("helios", "apply_rotary_emb_transposed", (2, 5, 32)),
    ],
)
@torch.no_grad()
def test_rotary_embeddings_of_diffusers_rotate_q_and_k_together(blocks, library, function, angles):
    rotate = getattr(importlib.import_module(f"diffusers.models.transformers.transformer_{library}"), function)
    inputs = torch.randn(2, 5, 3, 16), torch.randn(2, 5, 3, 16), torch.randn(angles)
    model = Calls(lambda q, k, angles: (rotate(q, angles), rotate(k, angles)))
    faster = RecordedModel(blocks, model)
    torch.testing.assert_close(faster(*inputs), model(*inputs))
    assert faster.kernels == {"apply_rotary": 1}


# --- with other tools ------------------------------------------------------------------------------------------------


def test_graph_breaks_are_in_the_report(blocks):
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(64, eps=1e-6)

        def forward(self, x):
            x = self.norm(x)
            return self.norm(x) if x.sum().item() > 0 else x

    model = Breaks()
    report = traced(blocks, model)
    model(torch.ones(2, 64))
    assert gc.isenabled()  # it is off during the first trace
    assert "graph break" in {name for name, _ in report.left}
    assert report.replaced["RMSNorm", "RMSNorm"] == 1


@torch.no_grad()
def test_a_second_call_keeps_graphs_and_report(blocks):
    """Also if TorchScript has traced the model's own operations between the two."""
    model, x = nn.Sequential(nn.RMSNorm(64, eps=1e-6)), torch.randn(2, 64)
    report = traced(blocks, model)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))
    assert traced(blocks, model) is report
    assert report.replaced == {("RMSNorm", "RMSNorm"): 1}


@torch.compiler.allow_in_graph
def silu(x):
    """This is no SiLU, and writes to its argument."""
    return x.mul_(3).sum(-1, keepdim=True)


def with_functions_of_a_user(x):
    branch, more = x.detach().clone(), x.detach().clone()
    first, second = x + branch, x + more
    total = silu(branch) * x + checkpoint(lambda x: more.mul_(3) + x, x, use_reentrant=False)
    return F.layer_norm(first, (6,)) + F.layer_norm(second, (6,)) * total


def with_an_array(x):
    branch = x.detach().clone()
    total = x + branch
    branch.cpu().numpy()[0] = 5
    return F.layer_norm(total, (6,)) + branch


def with_a_hook(x):
    view = x[0]
    view.register_hook(torch.neg)
    return view + 2 * x[0]


def with_another_shape(x):
    tensor = x * 1
    first = tensor[0]
    return first.sum() + tensor.t_()[:, :1] * tensor[0]


def with_the_layout_of_heads(x):
    heads = x.view(1, 2, 3, 2).transpose(1, 2)
    heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-6)
    torch._dynamo.graph_break()
    return heads.transpose(1, 2).view(2, 6)


def without_gradients(part, mode):
    """Return a function whose parts are also made without gradients."""

    def forward(x):
        with mode():
            statistic = part(x)
        first, second = part(x)
        return statistic[0].clone() * first + second

    return forward


PARTS = [lambda x: x.view(2, 2, 3).unbind(1), lambda x: (x.view(2, 6),) * 2, lambda x: (x[..., :6], x)]
FORWARDS = [with_functions_of_a_user, with_an_array, with_a_hook, with_another_shape, with_the_layout_of_heads]
FORWARDS += [without_gradients(part, mode) for part in PARTS for mode in (torch.no_grad, torch.inference_mode)]
FORWARDS += [lambda x: x.to(x.dtype, copy=True).mul_(2) * x]  # the copy stays one


@pytest.mark.parametrize("forward", FORWARDS)
def test_values_and_gradients_are_those_of_the_model(blocks, forward):
    model, x = Calls(forward), torch.randn(2, 6, requires_grad=True)
    expected = model(x)
    gradient = torch.autograd.grad(expected.square().sum(), x)
    traced(blocks, model)
    actual = model(x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual.square().sum(), x), gradient)


@pytest.mark.parametrize("view", [lambda x: x[..., :3], lambda x: x[0], lambda x: x.view(6)])
@torch.no_grad()
def test_a_view_whose_shape_changes_is_no_other_value(blocks, view):
    model, x = Calls(lambda x: (view(x).unsqueeze_(0), view(x), x + 1)), torch.zeros(2, 3)
    traced(blocks, model)
    assert [y.shape for y in (*model(x), x)] == [(1, *view(x).shape), view(x).shape, (2, 3), (2, 3)]
