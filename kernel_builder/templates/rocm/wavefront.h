// AMD's clang of ROCm 7.1 still defines it, LLVM's clang 22 no longer does. Headers of HIP 6.0 and kernels use it.
#if !defined(__HIP_DEVICE_COMPILE__) || defined(__GFX9__)
#define __AMDGCN_WAVEFRONT_SIZE 64
#else
#define __AMDGCN_WAVEFRONT_SIZE 32
#endif
