"""The CPU: g++ compiles all sources, and Torch's C++ libraries are all that a binary needs."""

from kernel_builder.backends import CompiledBackend

CPU = CompiledBackend(name="cpu", title="CPU", preference=1, dispatch_key="CPU", in_every_torch=True)
