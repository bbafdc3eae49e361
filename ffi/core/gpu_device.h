// A device of this process, and work on it that no op does.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace jax_overlap {

// Makes a device current, and afterwards the one that was. With an unknown one, what is done
// next fails.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal);
  ~CurrentDevice();

 private:
  int before_ = 0;
};

// Random numbers, for what is only timed.
void FillForTuning(char* memory, size_t bytes, cudaStream_t stream);

}  // namespace jax_overlap
