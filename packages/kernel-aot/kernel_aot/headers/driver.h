// Loads and launches machine code by the driver of CUDA, or of HIP with USE_ROCM.
//
// CUDA's driver is called through the runtime, so that the library does not need libcuda to load.
#pragma once

#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>

#include "aot/images.h"

namespace aot {

// The prefix of error messages, in binding.cpp.
extern const char* const kProject;

[[noreturn]] inline void fail(const std::string& problem) {
  throw std::runtime_error(std::string(kProject) + ": " + problem);
}

#ifdef USE_ROCM

inline void check(hipError_t error, const char* name) {
  if (error != hipSuccess) fail(std::string(name) + ": " + hipGetErrorString(error));
}

// Returns the architecture of a device, as 0x942 for gfx942.
inline int capability_of(int device) {
  hipDeviceProp_t properties;
  check(hipGetDeviceProperties(&properties, device), "hipGetDeviceProperties");
  return static_cast<int>(std::strtol(properties.gcnArchName + std::string("gfx").size(), nullptr, 16));
}

inline std::string shown(int capability) {
  std::string digits;
  for (; capability > 0; capability /= 16) digits.insert(digits.begin(), "0123456789abcdef"[capability % 16]);
  return "gfx" + digits;
}

inline bool runs(const Image& image, int capability) { return image.capability == capability; }

// Loads a kernel into the current device, which is `device`.
inline hipFunction_t loaded(const Kernel&, const Image& image, int) {
  hipModule_t library;
  hipFunction_t function;
  check(hipModuleLoadData(&library, image.data), image.name);
  check(hipModuleGetFunction(&function, library, image.name), image.name);
  return function;
}

inline void start(const Image& image, hipFunction_t function, int, const unsigned (&grid)[3], void* stream,
                  void** arguments) {
  check(hipModuleLaunchKernel(function, grid[0], grid[1], grid[2], image.threads, 1, 1, image.shared,
                              static_cast<hipStream_t>(stream), arguments, nullptr),
        image.name);
}

inline bool is_captured(void* stream) {
  hipStreamCaptureStatus status;
  check(hipStreamIsCapturing(static_cast<hipStream_t>(stream), &status), "hipStreamIsCapturing");
  return status != hipStreamCaptureStatusNone;
}

inline void fill_with_zeros(void* data, size_t bytes, void* stream) {
  check(hipMemsetAsync(data, 0, bytes, static_cast<hipStream_t>(stream)), "hipMemsetAsync");
}

// Permits loading while a stream of this thread is captured.
struct DuringCapture {
  hipStreamCaptureMode mode = hipStreamCaptureModeRelaxed;
  DuringCapture() { (void)hipThreadExchangeStreamCaptureMode(&mode); }
  ~DuringCapture() { (void)hipThreadExchangeStreamCaptureMode(&mode); }
};

#else

// The functions of the driver.
struct Driver {
  decltype(&cuGetErrorString) error_string;
  decltype(&cuLibraryLoadData) load;
  decltype(&cuLibraryGetKernel) get_kernel;
  decltype(&cuKernelSetAttribute) set_attribute;
  decltype(&cuKernelSetCacheConfig) set_cache_config;
  decltype(&cuLaunchKernel) launch;
};

template <class Function>
void find(Function* function, const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || found == nullptr) fail(std::string("the driver has no ") + name + ": CUDA 12 is needed");
  *function = reinterpret_cast<Function>(found);
}

inline const Driver& driver() {
  static const Driver functions = [] {
    Driver all;
    find(&all.error_string, "cuGetErrorString");
    find(&all.load, "cuLibraryLoadData");
    find(&all.get_kernel, "cuLibraryGetKernel");
    find(&all.set_attribute, "cuKernelSetAttribute");
    find(&all.set_cache_config, "cuKernelSetCacheConfig");
    find(&all.launch, "cuLaunchKernel");
    return all;
  }();
  return functions;
}

inline void check(cudaError_t error, const char* name) {
  if (error != cudaSuccess) fail(std::string(name) + ": " + cudaGetErrorString(error));
}

inline void check(CUresult error, const char* name) {
  if (error == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver().error_string(error, &text);
  fail(std::string(name) + ": " + (text != nullptr ? text : "CUDA error " + std::to_string(error)));
}

// Returns the capability of a device, as 90 for 9.0.
inline int capability_of(int device) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return 10 * major + minor;
}

inline std::string shown(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

// Code for 8.0 also runs on later 8.x; from 9.0 on it runs on its own capability alone.
inline bool runs(const Image& image, int capability) {
  if (image.is_ptx || image.capability == capability) return image.capability <= capability;
  return image.capability < 90 && image.capability / 10 == capability / 10 && image.capability < capability;
}

// Loads a kernel, or takes it from another device with the same image: the driver's libraries have all devices.
inline CUkernel loaded(const Kernel& kernel, const Image& image, int device) {
  CUkernel function = nullptr;
  for (int other = 0; other < kDevices && function == nullptr; ++other) {
    if (kernel.chosen[other] == &image) function = kernel.loaded[other].load(std::memory_order_relaxed);
  }
  if (function == nullptr) {
    CUlibrary library;
    check(driver().load(&library, image.data, nullptr, nullptr, 0, nullptr, nullptr, 0), image.name);
    check(driver().get_kernel(&function, library, image.name), image.name);
  }
  if (image.shared > 48 * 1024) {
    const int bytes = static_cast<int>(image.shared);
    check(driver().set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes, function, device), image.name);
    if (kernel.prefer_shared) {
      check(driver().set_cache_config(function, CU_FUNC_CACHE_PREFER_SHARED, device), image.name);
    }
  }
  if (image.threads == 0 && image.capability >= 90) {  // of CuTe DSL: clusters may have more than 8 blocks
    check(driver().set_attribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, function, device), image.name);
  }
  return function;
}

inline void start(const Image& image, CUkernel function, int device, const unsigned (&grid)[3], void* stream,
                  void** arguments) {
  const auto attempt = [&] {
    return driver().launch(reinterpret_cast<CUfunction>(function), grid[0], grid[1], grid[2], image.threads, 1, 1,
                           image.shared, static_cast<CUstream>(stream), arguments, nullptr);
  };
  CUresult error = attempt();
  if (error == CUDA_ERROR_INVALID_CONTEXT) {  // a new thread has no context before its first call of the runtime
    cudaSetDevice(device);
    error = attempt();
  }
  check(error, image.name);
}

inline bool is_captured(void* stream) {
  cudaStreamCaptureStatus status;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

inline void fill_with_zeros(void* data, size_t bytes, void* stream) {
  check(cudaMemsetAsync(data, 0, bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
}

// Permits loading while a stream of this thread is captured.
struct DuringCapture {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  DuringCapture() { cudaThreadExchangeStreamCaptureMode(&mode); }
  ~DuringCapture() { cudaThreadExchangeStreamCaptureMode(&mode); }
};

#endif

inline const Image& choose(const Kernel& kernel, int device) {
  const int capability = capability_of(device);
  const Image* best = nullptr;
  std::string known;
  for (const Image* image = kernel.images; image != kernel.images + kernel.count; ++image) {
    if (runs(*image, capability) && (best == nullptr || !image->is_ptx)) best = image;
    known += (known.empty() ? "" : ", ") + shown(image->capability) + (image->is_ptx ? "+PTX" : "");
  }
  if (best != nullptr) return *best;
  fail("there is no code for this GPU of capability " + shown(capability) + "; this package has " + known);
}

inline Function load(Kernel& kernel, int device) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (Function known = kernel.loaded[device].load(std::memory_order_acquire)) return known;
  const DuringCapture permission;
  const Image& image = choose(kernel, device);
  const Function function = loaded(kernel, image, device);
  kernel.chosen[device] = &image;
  kernel.loaded[device].store(function, std::memory_order_release);
  return function;
}

}  // namespace aot
