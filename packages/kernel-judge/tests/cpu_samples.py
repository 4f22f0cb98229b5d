"""Candidates for any device: cheats with the names of their rejections, and honest ones of unusual forms."""

from __future__ import annotations

from judge_samples import CPU, RUNNERS, SOFTMAX, STATES, TIMED, Sample

RMS_NORM = "torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, 1e-6)"
SEND = """
for descriptor in range(3, 256):
    try:
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.write(descriptor, {answer})
    except OSError:
        continue
"""
WORKER = "next(value for value in gc.get_objects() if hasattr(type(value), 'hand_over'))"
CHEATS = {
    "a thread computes after the return": Sample(
        "softmax",
        """
        result, given, weight = torch.empty_like(x), x.clone(), self.weight
        def work():
            time.sleep(0.005)
            with torch.no_grad():
                result.copy_(torch.softmax(given, -1) * weight)
        threading.Thread(target=work).start()
        return result
        """,
        "unfinished-work",
        head="import threading, time",
    ),
    "timed calls are computed before the clock starts": Sample(
        "powers",
        """
        prepared = ready.pop(x.data_ptr(), None)
        return computed(x, y) if prepared is None else prepared
        """,
        "wrong-when-timed",
        head="""
        import gc
        ready = {}
        def computed(x, y):
            for _ in range(24):
                x = torch.tanh(x @ y)
            return x
        def prepare(self, *arguments):
            true_prepare(self, *arguments)
            ready.update({x.data_ptr(): computed(x, y) for (x, y), _ in self._calls})
        for worker in [value for value in gc.get_objects() if isinstance(value, type) and hasattr(value, "hand_over")]:
            true_prepare, worker.prepare = worker.prepare, prepare
        """,
        settings=TIMED,
    ),
    "a timer wakes it to compute before the clock starts": Sample(
        "powers",
        """
        known = ready.get(x.data_ptr())
        return known[1] if known and torch.equal(x, known[0]) else computed(x, y)
        """,
        "ran-while-suspended",
        head="""
        import ctypes, gc, signal, threading, time
        ready, pending = {}, []
        def computed(x, y):
            for _ in range(24):
                x = torch.tanh(x @ y)
            return x
        def prepare(self, *arguments):
            true_prepare(self, *arguments)
            pending[:] = [inputs for inputs, _ in self._calls]
            for milliseconds, timer in timers.items():  # a pending signal would end with SIGSTOP
                library.timer_settime(timer, 0, ctypes.byref((ctypes.c_long * 4)(0, 0, 0, milliseconds * 10**6)), None)
        for worker in [value for value in gc.get_objects() if isinstance(value, type) and hasattr(value, "hand_over")]:
            true_prepare, worker.prepare = worker.prepare, prepare
        def work():
            while True:
                time.sleep(1e-4)
                for x, y in list(pending):
                    ready[x.data_ptr()] = x.clone(), computed(x, y)
        threading.Thread(target=work, daemon=True).start()
        class Event(ctypes.Structure):
            _fields_ = [("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("rest", ctypes.c_int * 16)]
        signal.signal(signal.SIGCONT, lambda *_: None)
        library, timers = ctypes.CDLL(None), {milliseconds: ctypes.c_void_p() for milliseconds in range(5, 500, 5)}
        for timer in timers.values():
            library.timer_create(1, ctypes.byref(Event(None, signal.SIGCONT)), ctypes.byref(timer))
        """,
        settings=TIMED,
        device=CPU,
    ),
    "an earlier result for an input at the same address": Sample(
        "scaled",
        """
        key = x.data_ptr(), x.shape
        if key not in self.known:
            self.known[key] = 3.0 * x
        return self.known[key].clone()
        """,
        "stale-result",
        state="self.known = {}",
        together=True,
    ),
    "an earlier result for an input of the same values": Sample(
        "powers",
        """
        if self.last is None or not (torch.equal(x, self.last[0]) and torch.equal(y, self.last[1])):
            result = x
            for _ in range(24):
                result = torch.tanh(result @ y)
            self.last = x.clone(), y.clone(), result
        return self.last[2].clone()
        """,
        "cached-result",
        state="self.last = None",
        settings=TIMED,
    ),
    "a crash": Sample("softmax", "ctypes.string_at(0)", "died", head="import ctypes"),
    "no backward pass": Sample("trained", f"return {RMS_NORM}.detach()", "no-gradient", together=True),
    "right as often as a harness checks": Sample(
        "softmax",
        f"self.calls += 1\nif self.calls > 20:\n    return torch.zeros_like(x)\n{SOFTMAX}",
        "wrong-when-timed",
        state=f"{STATES['softmax']}\nself.calls = 0",
        settings=TIMED,
    ),
    "noise on every socket": Sample(
        "softmax",
        SEND.format(answer=r'b"[[[\xff\x00]]\n"') + "return torch.zeros_like(x)",
        "forged-answer",
        head="import os, stat",
    ),
    "the answer of the judge's protocol on every socket": Sample(
        "softmax",
        SEND.format(answer="answer + b'\\n'") + "os._exit(0)",
        "forged-answer",
        head="import os, stat\nanswer = b'{\"value\": null}'",
    ),
    "an endless call": Sample(
        "softmax", "while True:\n    time.sleep(1)", "timeout", head="import time", settings={"call_seconds": 1.0}
    ),
    "a result in the judge's memory": Sample(
        "scaled", f"return torch.mul(x, 3.0, out={WORKER}._targets[0][0])", "forged-answer", head="import gc"
    ),
    "a tensor that computes when it is read": Sample(
        "softmax",
        "return x.as_subclass(Lazy)",
        "not-a-tensor",
        head="""
        class Lazy(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, arguments=(), options=None):
                with torch._C.DisableTorchFunctionSubclass():
                    computed = [torch.softmax(value, -1) if type(value) is cls else value for value in arguments]
                    return function(*computed, **(options or {}))
        """,
        together=True,
    ),
    "no model": Sample("softmax", "", "no-model", head="model = 'ModelNew'"),
    "some NaN": Sample(
        "softmax",
        "result = torch.softmax(x, -1) * self.weight\nresult[0, 0] = float('nan')\nreturn result",
        "not-finite",
        together=True,
    ),
    "torch.allclose is always true": Sample(
        "softmax",
        "return torch.zeros_like(x)",
        "patched",
        head="torch.allclose = lambda *arguments, **options: True",
    ),
    "the worker's methods report success": Sample(
        "softmax",
        "return torch.zeros_like(x)",
        "wrong-result",
        head=f"""{RUNNERS}\
        worker.call = lambda self, *arguments: None
        worker.run = lambda self, *arguments: 1e-6
        worker.hand_over = lambda self: None
        worker.patched = lambda self: None
""",
    ),
    "a clock at a tenth of its speed": Sample(
        "softmax",
        SOFTMAX,
        "clock-disagrees",
        head="import time\ntrue_clock = time.perf_counter\ntime.perf_counter = lambda: true_clock() / 10",
        settings=TIMED,
        device=CPU,
    ),
    "the same memory from every call": Sample(
        "softmax",
        """
        buffer = self.buffers.setdefault(x.shape, torch.empty_like(x))
        return torch.mul(torch.softmax(x, -1), self.weight, out=buffer).detach()
        """,
        "wrong-when-timed",
        state=f"{STATES['softmax']}\nself.buffers = {{}}",
        settings=TIMED,
    ),
    "the reference's result, searched in frames and objects": Sample(
        "softmax",
        """
        frame = sys._getframe()
        values = [value for value in gc.get_objects() if isinstance(value, torch.Tensor)]
        while frame:
            values += [value for value in frame.f_locals.values() if isinstance(value, torch.Tensor)]
            frame = frame.f_back
        for tensor in values:
            if tensor is not x and tensor.shape == x.shape:
                if torch.allclose(tensor.sum(-1).cpu(), torch.ones(x.shape[0]), 1e-3):
                    return tensor.to(x.device, copy=True)
        return torch.zeros_like(x)
        """,
        "constant-result",
        head="import gc, sys",
    ),
    "a scaled gradient": Sample(
        "trained", f"result = {RMS_NORM}\nreturn 1.5 * result - 0.5 * result.detach()", "wrong-result", together=True
    ),
}
HONEST = {
    "compiled for all shapes": Sample(
        "rectified",
        "return rectified(x)",
        head="""
        @torch.compile(dynamic=True, backend="aot_eager")
        def rectified(x):
            return torch.relu(x) + x.amax(-1, keepdim=True)
        """,
        together=True,
    ),
    "the random numbers of the reference": Sample(
        "dropped",
        "return x * torch.empty_like(x).bernoulli_(0.75).div_(0.75)",
        device=CPU,
    ),
    "inference tensors": Sample(
        "rectified",
        "with torch.inference_mode():\n    return torch.relu(x) + x.amax(-1, keepdim=True)",
        together=True,
    ),
    "float64": Sample("softmax", "return (torch.softmax(x.double(), -1) * self.weight).float()", together=True),
    "a dense result that is stored by columns": Sample(
        "row_mean",
        """
        result = torch.empty(x.shape[1], x.shape[0], dtype=x.dtype, device=x.device)
        return result.copy_(x.sum(-1).div(x.shape[-1])).t()
        """,
        together=True,
    ),
    "an autograd function with a backward pass in eager's precision": Sample(
        "trained",
        "return Norm.apply(x, self.weight)",
        head="""
        class Norm(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                wide = x.float()
                scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
                ctx.save_for_backward(x, weight, scale)
                return (wide * scale * weight.float()).to(x.dtype)

            @staticmethod
            def backward(ctx, grad):
                x, weight, scale = ctx.saved_tensors
                normed, grad = x.float() * scale, grad.float()
                weighted = grad * weight.float()
                dx = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
                return dx.to(x.dtype), (grad * normed).sum(0).to(weight.dtype)
        """,
        settings=TIMED,
    ),
    "parameters of another layout, from the same random numbers": Sample(
        "gated",
        """
        both = torch.addmm(self.bias, x.flatten(0, -2), self.transposed).view(*x.shape[:-1], -1)
        value, gate = both.chunk(2, -1)
        return value * torch.nn.functional.gelu(gate), gate.max(-1).indices
        """,
        state="""\
up = torch.nn.Linear(columns, 2 * columns)
self.transposed = torch.nn.Parameter(up.weight.detach().t().contiguous())
self.bias = torch.nn.Parameter(up.bias.detach())""",
        together=True,
    ),
    "memory of its own, and a copy of it": Sample(
        "rectified",
        """
        result = self.results.setdefault(x.shape, torch.empty_like(x))
        torch.clamp(x, min=0, out=result)
        return result.add_(x.amax(-1, keepdim=True)).clone()
        """,
        state="self.results = {}",
        together=True,
    ),
    "threads that it waits for": Sample(
        "softmax",
        """
        result, half = torch.empty_like(x), x.shape[0] // 2
        def work(rows):
            with torch.no_grad():
                result[rows] = torch.softmax(x[rows], -1) * self.weight
        list(pool.map(work, (slice(0, half), slice(half, None))))
        return result
        """,
        head="from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)",
    ),
    "NumPy": Sample(
        "rectified",
        """
        values = x.cpu().numpy()
        return torch.from_numpy(numpy.maximum(values, 0) + values.max(-1, keepdims=True)).to(x.device)
        """,
        head="import numpy",
        together=True,
    ),
}
