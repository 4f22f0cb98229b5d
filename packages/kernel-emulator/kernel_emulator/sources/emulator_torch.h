// Included before each source: the CUDA part of Torch's interface. Tensors of the emulated device are on the CPU.
#pragma once

#include <cstdint>

#define aoti_torch_device_type_cuda aoti_torch_device_type_cpu
#define aoti_torch_create_device_guard emulated_create_device_guard
#define aoti_torch_delete_device_guard emulated_delete_device_guard
#define aoti_torch_device_guard_set_index emulated_device_guard_set_index
#define aoti_torch_get_current_cuda_stream emulated_current_stream
#define torch_c10_cuda_check_msg emulated_check_message
#define torch_c10_cuda_free_error_msg emulated_free_message
