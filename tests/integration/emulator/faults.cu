// Kernels with one fault each. The argument of `main` selects the kernel; it prints the error of the emulator.
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

// Right kernels, whose results `main` computes again. Shared and global memory, votes, shuffles, sums and conversions.

template <typename Operation>
__global__ void collective(uint64_t* results, Operation operation) {
  results[threadIdx.x] = operation(static_cast<int>(threadIdx.x));
}

// Prints the results of an operation in the last warp, as hexadecimal numbers.
template <typename Operation>
void print(const char* name, Operation operation) {
  uint64_t results[kThreads];
  collective<<<1, kThreads>>>(results, operation);
  printf("%s", name);
  for (const int i : {kThreads - warpSize, kThreads - 1}) printf(" %llx", static_cast<unsigned long long>(results[i]));
  puts("");
}

void print_collectives() {
  print("ballot", [](int i) { return __ballot_sync(kMask, i % 3 == 0); });
  print("match_any", [](int i) { return __match_any_sync(kMask, i % 4); });
  print("any", [](int i) { return __any_sync(kMask, i == 100); });
  print("all", [](int i) { return __all_sync(kMask, i >= 64) + 2 * __all_sync(kMask, i >= 99); });
  print("shfl_up", [](int i) { return __shfl_up_sync(kMask, i, 1u); });
  print("shfl_down", [](int i) { return __shfl_down_sync(kMask, i, 2u, 16); });
  print("reduce_add", [](int i) { return __reduce_add_sync(kMask, i); });
  print("reduce_min", [](int i) { return -__reduce_min_sync(kMask, -i); });
  print("syncthreads_count", [](int i) { return __syncthreads_count(i < 5); });
}

__device__ int arrived[2];

__global__ void order(float* x) {
  const int before = atomicAdd(&arrived[blockIdx.x], 1);
  if (threadIdx.x == 0) x[blockIdx.x] = before;
}

const char* wrong_conversion() {
  for (unsigned bits = 0; bits < 0x10000u; ++bits) {
    const auto half = __ushort_as_half(static_cast<uint16_t>(bits));
    const auto bfloat16 = __ushort_as_bfloat16(static_cast<uint16_t>(bits));
    if (half == half && __float2half(half).x != bits) return "half";
    if (bfloat16 == bfloat16 && __float2bfloat16(bfloat16).x != bits) return "bfloat16";
  }
  // Ties go to the even neighbour.
  const bool rounds = __float2half(1.0f + 0x1p-11f).x == 0x3c00 && __float2half(1.0f + 0x3p-11f).x == 0x3c02 &&
                      __float2half(0x1p-25f).x == 0 && __float2half(0x3p-25f).x == 2 &&
                      __float2half(65519.0f).x == 0x7bff && __float2half(65520.0f).x == 0x7c00 &&
                      __float2bfloat16(1.0f + 0x1p-8f).x == 0x3f80 && __float2bfloat16(1.0f + 0x3p-8f).x == 0x3f82;
  if (abs(-1.75f) != 1.75f || min(NAN, 1.0f) != 1.0f || __float2uint_rn(-2.5f) != 0) return "overload";
  if (__fadd_ru(1.0f, 1e-9f) == 1.0f || __dsqrt_rd(2.0) == __dsqrt_ru(2.0) || __ull2float_rz(~0ull) == 0x1p64f ||
      __double2float_rn(0.1) != 0.1f || __hiloint2double(__double2hiint(-1.1), __double2loint(-1.1)) != -1.1 ||
      __tanhf(0.0f) != 0.0f)
    return "a rounding mode";
  const double roots[] = {erfinv(0.3) - 0.27246271472675443, erfcinv(1e-20) - 6.6015806223551430,
                          erfcinvf(1.7f) + 0.7328691f,       normcdfinv(0.025) + 1.9599639845400543,
                          erfcx(30.0) - 0.01879563616130149, rsqrtf(4.0f) - 0.5f,
                          norm3df(2.0f, 3.0f, 6.0f) - 7.0f};
  for (const double& difference : roots) {
    if (!(fabs(difference) < 1e-6)) return "a function of double";
  }
  return rounds && __byte_perm(0x33221100u, 0x77665544u, 0x7531u) == 0x77553311u ? nullptr : "rounding";
}

int main(int, char** arguments) {
  alignas(16) float x[kThreads];
  for (int i = 0; i < kThreads; ++i) x[i] = 1.0f;
  int numbers[2] = {0, 0};
  const std::string which = arguments[1];
#define RUN(kernel) \
  if (which == #kernel) kernel<<<1, kThreads, kThreads * sizeof(float)>>>(x)
  try {
    if (which == "collectives") return print_collectives(), 0;
    if (which == "conversions") return puts(wrong_conversion() ? wrong_conversion() : "right") < 0;
    if (which == "order") {
      order<<<2, kThreads>>>(x);
      return printf("%g %g\n", x[0], x[1]) < 0;
    }
    if (which == "right") right<2><<<dim3(2), dim3(32, 4).x * 4>>>(x);
    if (which == "divides_by_zero") divides_by_zero<<<1, 1>>>(numbers);
    RUN(no_barrier);
    RUN(no_barrier_in_warp);
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
