"""Back ends that `build.toml` may name and the builder does not compile for: Python-only packages for them are made.

To compile for one, replace its value by a `CompiledBackend` in a file of its own.
"""

from kernel_builder.config.project import Backend

_NOT_COMPILED = "build.toml has no compiled kernels for it"

CANN = Backend(name="cann", title="CANN", prefix="cann", why_not=_NOT_COMPILED)
METAL = Backend(
    name="metal",
    title="Metal",
    why_not=(
        "Metal's compiler is Apple's and runs on macOS only; Python with torch.mps.compile_shader in a [torch-noarch] "
        "project needs none"
    ),
)
NEURON = Backend(name="neuron", title="Neuron", why_not=_NOT_COMPILED)
TPU = Backend(name="tpu", title="TPU", why_not=_NOT_COMPILED)
XPU = Backend(
    name="xpu",
    title="XPU",
    prefix="xpu",
    torch_version="xpu",
    why_not="the package index has Intel's runtime and no SYCL compiler",
)
