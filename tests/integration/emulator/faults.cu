// Kernels with one fault each; `main` runs the one that it is told, and prints what the emulator says.
#include <cuda_runtime.h>

#include <exception>
#include <string>

constexpr int kThreads = 128;

template <int kRow>
__global__ void right(float* x) {
  __shared__ float of_warps[kThreads / 32], all[kThreads];
  float sum = x[threadIdx.x];
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kMask, sum, distance, 32);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  all[threadIdx.x] = of_warps[0] + of_warps[1] + of_warps[2] + of_warps[3];
  __syncthreads();
  x[threadIdx.x] = all[kThreads - 1 - threadIdx.x] + kRow;
}

__global__ void no_barrier(float* x) {
  __shared__ float all[kThreads];
  all[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = all[kThreads - 1 - threadIdx.x];
}

__global__ void no_barrier_in_warp(float* x) {
  extern __shared__ float rows[];
  rows[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = rows[threadIdx.x ^ 1];
}

__global__ void divergent_barrier(float* x) {
  if (threadIdx.x < 32) __syncthreads();
  x[threadIdx.x] = 0.0f;
}

__global__ void two_barriers(float* x) {
  if (threadIdx.x < 32) {
    x[threadIdx.x] = 0.0f;
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void barrier_after_return(float* x) {
  if (threadIdx.x >= 100) return;
  x[threadIdx.x] = 0.0f;
  __syncthreads();
}

__global__ void lane_not_in_mask(float* x) { x[threadIdx.x] = __shfl_sync(kMask & 0xffff, x[threadIdx.x], 0); }

__global__ void lane_elsewhere(float* x) {
  if (threadIdx.x % 32 < 16) x[threadIdx.x] = __shfl_xor_sync(kMask, x[threadIdx.x], 16);
  __syncthreads();
}

__global__ void lane_ended(float* x) {
  if (threadIdx.x % 32 >= 16) return;
  x[threadIdx.x] = __shfl_xor_sync(kMask, x[threadIdx.x], 16);
}

__global__ void index_out_of_bounds(float* x) {
  __shared__ float all[kThreads];
  all[threadIdx.x + 1] = x[threadIdx.x];
}

__global__ void dynamic_out_of_bounds(float* x) {
  extern __shared__ __align__(16) float rows[];
  rows[threadIdx.x + 4] = x[threadIdx.x];
}

__global__ void misaligned(float* x) { *reinterpret_cast<float4*>(x + 1) = make_float4(0, 0, 0, 0); }

__global__ void too_much_shared(float* x) {
  __shared__ float all[1 << 15];
  all[threadIdx.x] = x[threadIdx.x];
}

__global__ void divides_by_zero(int* x) { x[0] = 1 / x[1]; }

__global__ void not_written(float* x) {
  __shared__ float all[kThreads];
  x[threadIdx.x] = all[threadIdx.x];
}

__global__ void warp_of_32(float* x) {
  __shared__ float of_warps[kThreads / 32];
  float sum = x[threadIdx.x];
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kMask, sum, distance);
  if (threadIdx.x % warpSize == 0) of_warps[threadIdx.x / warpSize] = sum;
  __syncthreads();
  x[threadIdx.x] = of_warps[0] + of_warps[1] + of_warps[2] + of_warps[3];
}

__global__ void mask_of_32(float* x) { x[threadIdx.x] = __shfl_sync(MaskType{0xffffffffu}, x[threadIdx.x], 0); }

int main(int, char** arguments) {
  alignas(16) float x[kThreads];
  for (int i = 0; i < kThreads; ++i) x[i] = 1.0f;
  int numbers[2] = {0, 0};
  const std::string which = arguments[1];
#define RUN(kernel) \
  if (which == #kernel) kernel<<<1, kThreads, kThreads * sizeof(float)>>>(x)
  try {
    if (which == "right") right<2><<<dim3(2), dim3(32, 4).x * 4>>>(x);
    if (which == "divides_by_zero") divides_by_zero<<<1, 1>>>(numbers);
    RUN(no_barrier);
    RUN(no_barrier_in_warp);
    RUN(divergent_barrier);
    RUN(two_barriers);
    RUN(barrier_after_return);
    RUN(lane_not_in_mask);
    RUN(lane_elsewhere);
    RUN(lane_ended);
    RUN(index_out_of_bounds);
    RUN(dynamic_out_of_bounds);
    RUN(misaligned);
    RUN(too_much_shared);
    RUN(not_written);
    RUN(warp_of_32);
    RUN(mask_of_32);
    printf("%g %s\n", x[0], cudaGetErrorString(cudaGetLastError()));
  } catch (const std::exception& error) {
    printf("%s\n", error.what());
  }
}
