"""Candidates for a GPU: cheats with the names of their rejections, and honest ones."""

from __future__ import annotations

from judge_samples import RUNNERS, SOFTMAX, TIMED, Sample

TIMED_ON_GPU = {"rounds": 3}
GRAPH = """
if x.shape not in self.graphs:
    given = x.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = 3.0 * given
    self.graphs[x.shape] = graph, given, result
graph, given, result = self.graphs[x.shape]
{copy}
graph.replay()
return result.clone()
"""
SLOW_EVENTS = """
true_time = torch.cuda.Event.elapsed_time
torch.cuda.Event.elapsed_time = lambda self, other: true_time(self, other) / 10
"""
CHEATS = {
    "a graph of the first inputs": Sample("scaled", GRAPH.format(copy=""), "stale-result", state="self.graphs = {}"),
    "events that report a tenth": Sample("softmax", SOFTMAX, "patched", head=SLOW_EVENTS, settings=TIMED),
    "events that report a tenth, hidden": Sample(
        "softmax",
        SOFTMAX,
        "clock-disagrees",
        head=f"{SLOW_EVENTS}{RUNNERS}        worker.patched = lambda self: None",
        settings=TIMED,
    ),
    "no synchronization": Sample(
        "softmax", SOFTMAX, "patched", head="torch.cuda.synchronize = lambda *arguments: None"
    ),
    "reused memory": Sample("softmax", "return torch.empty_like(x)", "wrong-result"),
    "another stream that nothing waits for": Sample(
        "softmax",
        """
        result = torch.empty_like(x)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            result.copy_(torch.softmax(x, -1) * self.weight)
        return result
        """,
        "unfinished-work",
        head="stream = torch.cuda.Stream()",
    ),
}
HONEST = {
    "compiled by Inductor": Sample(
        "softmax",
        "return softmax(x, self.weight)",
        head="softmax = torch.compile(lambda x, weight: torch.softmax(x, -1) * weight, dynamic=True)",
    ),
    "inline CUDA": Sample(
        "scaled",
        "return module.scaled(x.contiguous())",
        head='''
        from torch.utils.cpp_extension import load_inline

        SOURCE = """
        #include <c10/cuda/CUDAStream.h>
        #include <torch/types.h>

        __global__ void scale(const float* in, float* out, int64_t count) {
          const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
          if (i < count) out[i] = 3.f * in[i];
        }

        torch::Tensor scaled(torch::Tensor x) {
          auto out = torch::empty_like(x);
          const int64_t count = x.numel();
          scale<<<(count + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
              x.data_ptr<float>(), out.data_ptr<float>(), count);
          return out;
        }
        """
        module = load_inline("scaled", "torch::Tensor scaled(torch::Tensor x);", SOURCE, functions=["scaled"])
        ''',
        settings=TIMED_ON_GPU,
    ),
    "a graph with a copy of the input": Sample(
        "scaled", GRAPH.format(copy="given.copy_(x)"), state="self.graphs = {}", settings=TIMED_ON_GPU
    ),
    "a Triton kernel": Sample(
        "softmax",
        """
        x = x.contiguous()
        out = torch.empty_like(x)
        softmax_row[(x.shape[0],)](x, self.weight, out, x.shape[1], triton.next_power_of_2(x.shape[1]))
        return out
        """,
        head="""
        import triton
        import triton.language as tl

        @triton.jit
        def softmax_row(x, weight, out, columns, BLOCK: tl.constexpr):
            row = tl.program_id(0)
            column = tl.arange(0, BLOCK)
            inside = column < columns
            values = tl.load(x + row * columns + column, inside, -float("inf"))
            values = tl.exp(values - tl.max(values, 0))
            values = values / tl.sum(values, 0) * tl.load(weight + column, inside, 0.0)
            tl.store(out + row * columns + column, values, inside)
        """,
        settings=TIMED_ON_GPU,
    ),
    "another stream that the caller's waits for": Sample(
        "softmax",
        """
        here = torch.cuda.current_stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            result = torch.softmax(x, -1) * self.weight
        here.wait_stream(stream)
        result.record_stream(here)
        return result
        """,
        head="stream = torch.cuda.Stream()",
        settings=TIMED_ON_GPU,
    ),
}
