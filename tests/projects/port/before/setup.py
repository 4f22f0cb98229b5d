import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

use_cuda = torch.cuda.is_available() and CUDA_HOME is not None
sources = ["csrc/binding.cpp", "csrc/scaled_add_cpu.cpp"]
macros = []
if use_cuda:
    sources.append("csrc/scaled_add_cuda.cu")
    macros.append(("WITH_CUDA", None))

setup(
    name="scaled-add",
    version="1.3.0",
    license="MIT",
    packages=["scaled_add"],
    ext_modules=[
        (CUDAExtension if use_cuda else CppExtension)(
            name="scaled_add._C",
            sources=sources,
            define_macros=macros,
            extra_compile_args={"cxx": ["-fopenmp-simd"], "nvcc": ["-O3", "--use_fast_math"]},
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
