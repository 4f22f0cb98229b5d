// The functions of CUDA's runtime that are not in the header, and Torch's interface.
#include "emulator_fibers.h"

cudaError_t cudaGetLastError() { return std::exchange(emulator::last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return emulator::last_error; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess                     ? "no error"
         : error == cudaErrorInvalidConfiguration ? "invalid configuration argument"
                                                  : "an error of the emulated runtime";
}
// As many as on GPUs: kernels have that many partial sums, whose length decides how precise they are.
constexpr int kMultiprocessors = 108;
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {"emulator",
                 "emulator",
                 9,
                 0,
                 kMultiprocessors,
                 EMULATED_WARP_SIZE,
                 1024,
                 2048,
                 32 << 20,
                 size_t{1} << 33,
                 emulator::kStaticBytes,
                 emulator::kSharedBytes,
                 emulator::kSharedBytes};
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp of;
  cudaGetDeviceProperties(&of, device);
  const int values[] = {of.maxThreadsPerBlock,
                        static_cast<int>(of.sharedMemPerBlock),
                        static_cast<int>(of.sharedMemPerBlockOptin),
                        static_cast<int>(of.sharedMemPerMultiprocessor),
                        of.maxThreadsPerMultiProcessor,
                        of.multiProcessorCount,
                        of.l2CacheSize,
                        of.warpSize,
                        of.major,
                        of.minor};
  *value = values[attribute];
  return cudaSuccess;
}

// Torch's interface, as emulator_torch.h renames it.
extern "C" int32_t emulated_create_device_guard(int32_t, void** guard) { return *guard = nullptr, 0; }
extern "C" int32_t emulated_delete_device_guard(void*) { return 0; }
extern "C" int32_t emulated_device_guard_set_index(void*, int32_t) { return 0; }
extern "C" int32_t emulated_current_stream(int32_t, void** stream) { return *stream = nullptr, 0; }
extern "C" int32_t emulated_check_message(int32_t error, const char*, const char*, uint32_t, bool, char** message) {
  return *message = error == cudaSuccess ? nullptr : strdup(cudaGetErrorString(error)), 0;
}
extern "C" void emulated_free_message(char* message) { free(message); }
