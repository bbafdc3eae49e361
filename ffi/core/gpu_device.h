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

// Lets this thread allocate, and wait, while another one captures a graph.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Random numbers, for what is only timed.
void FillForTuning(char* memory, size_t bytes, cudaStream_t stream);

}  // namespace jax_overlap
