// Checks for the tests that run on a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/testing.h"

#define JO_CUDA(call)                                                              \
  do {                                                                             \
    const cudaError_t error = (call);                                              \
    JO_CHECK_IN(error == cudaSuccess, "%s: %s", #call, cudaGetErrorString(error)); \
  } while (0)

namespace jax_overlap {

// The GPUs of this process, `most` of them at most.
inline std::vector<int> Ordinals(int most) {
  int count = 0;
  JO_CUDA(cudaGetDeviceCount(&count));
  std::vector<int> ordinals;
  for (int i = 0; i < std::min(count, most); ++i) ordinals.push_back(i);
  return ordinals;
}

// Of the device.
class Memory {
 public:
  explicit Memory(size_t bytes, int fill = 0) : bytes_(std::max<size_t>(bytes, 16)) {
    JO_CUDA(cudaMalloc(&data_, bytes_));
    JO_CUDA(cudaMemset(data_, fill, bytes_));
  }
  Memory(Memory&& other) : bytes_(other.bytes_), data_(other.data_) { other.data_ = nullptr; }
  ~Memory() { cudaFree(data_); }
  char* data() const { return data_; }

 private:
  size_t bytes_;
  char* data_ = nullptr;
};

}  // namespace jax_overlap
