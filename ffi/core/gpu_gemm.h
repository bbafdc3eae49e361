// Products on a GPU, by cuBLASLt: row-major D = X W or C + X W, in batches.
//
// Which of its algorithms serves a product is its own first guess for small ones, and for
// large ones measured, once: when a call site is made, as no peer waits for that, and kept
// in a file (core/tuning_cache.h). Algorithms that split the inner dimension are measured
// for none: so a result has the same bits whichever was the fastest.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/gpu_gemm_key.h"

namespace jax_overlap {

struct GemmPlan;

class GpuGemm {
 public:
  static GpuGemm& Get();

  // What belongs to each of these devices; may be called again. An error text.
  std::string Start(const std::vector<int>& ordinals);
  // Where measurements are kept; empty: nowhere. Before the first plan.
  void SetCacheFolder(std::string folder);

  // How to compute this; never freed. Null, with an error text, if cuBLASLt cannot.
  const GemmPlan* PlanOf(int ordinal, const GemmKey& key, std::string* error);
  // Launches it. The workspace of the device is used by one product at a time.
  std::string Launch(int ordinal, const GemmPlan& plan, const void* x, const void* w, const void* c,
                     void* d, cudaStream_t stream);
  // A word that is 0 while nothing uses the workspace.
  int32_t* Busy(int ordinal);

 private:
  GpuGemm();

  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace jax_overlap
