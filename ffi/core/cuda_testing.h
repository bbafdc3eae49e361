// Checks for the tests that run on a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "core/testing.h"

#define JO_CUDA(call)                                                              \
  do {                                                                             \
    const cudaError_t error = (call);                                              \
    JO_CHECK_IN(error == cudaSuccess, "%s: %s", #call, cudaGetErrorString(error)); \
  } while (0)
