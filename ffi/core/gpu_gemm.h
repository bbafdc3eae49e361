// Products on a GPU: row-major D = X W or C + X W, in batches, by cuBLASLt, or on Hopper by
// CUTLASS (core/hopper_gemm.h).
//
// Which algorithm serves a product is cuBLASLt's own first guess for small ones, and for
// large ones measured, once: when a call site is made, as no peer waits for that, and kept
// in a file (core/tuning_cache.h). Algorithms that split the inner dimension, and so
// add in another order, are not measured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "core/gpu_gemm_key.h"
#include "core/hopper_scatter.h"

namespace jax_overlap {

struct GemmPlan;

// What one call at a time uses of a device. Never freed.
struct GpuLane {
  static constexpr int kStreams = 3;

  int ordinal;
  char* workspace;                 // of one product at a time
  int32_t* busy;                   // 0 while there is no call
  cudaStream_t streams[kStreams];  // beside that of a program, and ahead of it
};

class GpuGemm {
 public:
  static GpuGemm& Get();

  // The lane of all programs on a device, or (for tests of several ranks on one) a new one.
  // Null, with an error text, if there is none.
  const GpuLane* LaneOf(int ordinal, std::string* error);
  std::unique_ptr<GpuLane> MakeLane(int ordinal, std::string* error);
  // Where measurements are kept; empty: nowhere. Before the first plan.
  void SetCacheFolder(std::string folder);

  // How to compute this; never freed. Null, with an error text, if cuBLASLt cannot.
  const GemmPlan* PlanOf(int ordinal, const GemmKey& key, std::string* error);
  // Launches it. An error text.
  std::string Launch(const GpuLane& lane, const GemmPlan& plan, const void* x, const void* w,
                     const void* c, void* d, cudaStream_t stream);

  // Whether these are one kernel (core/hopper_scatter.h), which is loaded then.
  bool ScattersInOne(int ordinal, const GemmKey& peer, const GemmKey& own, std::string* error);
  // Launches it: `call` without what is of the device alone. An error text.
  std::string LaunchScatter(const GpuLane& lane, HopperScatterCall call, cudaStream_t stream);

 private:
  GpuGemm();

  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace jax_overlap
