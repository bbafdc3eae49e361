// The program of a fused matmul (ops/matmul_program.h) on a GPU: as launches on streams.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "core/exchange.h"
#include "core/gpu_gemm.h"
#include "core/gpu_memory.h"
#include "ops/matmul_program.h"

namespace jax_overlap {

enum class MatmulKind { kScatter, kGather, kReduce };

// What a call computes.
struct MatmulSpec {
  MatmulKind kind;
  MatmulShape shape;
  size_t xs;
  GemmType in, in_w, out;
  bool fast, gathered;

  size_t results() const { return kind == MatmulKind::kGather ? shape.products.size() : 1; }
  // The steps of a rank, for slots of so many elements.
  std::vector<MatmulStep> Program(int rank, int64_t slot) const;
  // Where a device has one kernel for several steps, makes them that. An error text.
  std::string Fuse(int ordinal, std::vector<MatmulStep>* steps) const;
  // Bytes of an element at a place.
  int64_t SizeAt(const Place& place) const;
  GemmKey KeyOf(const MatmulStep& step) const;
  // The same for the same computation only.
  uint64_t Hash() const;
};

static_assert(kMatmulStreams == 1 + GpuLane::kStreams, "a stream for each");
static_assert(kHalves == ExchangeLayout::kHalves,
              "the sets of slots of a program are those there are");

class MatmulLaunches {
 public:
  // Where the arrays of a call are, each at a multiple of kAlign bytes.
  struct Arrays {
    std::vector<char*> x, w, out;
    char* gathered = nullptr;
  };
  static constexpr size_t kAlign = 16;

  // For a rank whose part of an exchange of `bytes` is at channel.own. `call` is the same on
  // all ranks for the same call. Null, with an error text, if that cannot be.
  static std::unique_ptr<MatmulLaunches> Make(const MatmulSpec& spec, const GpuLane& lane,
                                              const GpuChannel& channel, size_t bytes,
                                              uint64_t call, std::string* error);
  ~MatmulLaunches();

  // Launches a call; `results` are those that are filled when it fails. An error text.
  std::string Run(const Arrays& arrays, const std::vector<ExchangeCall::Result>& results,
                  cudaStream_t stream) const;

  const std::vector<MatmulStep>& steps() const { return steps_; }
  const ExchangeCall& call() const { return call_; }

 private:
  struct Places;

  MatmulLaunches(const MatmulSpec& spec, const GpuLane& lane) : spec_(spec), lane_(lane) {}
  std::string Prepare();
  void TakeSteps();
  std::string TakeMarks();
  std::string RunStep(size_t i, const Places& places, cudaStream_t stream) const;
  cudaError_t Copy(const MatmulStep& step, const Places& places, cudaStream_t stream) const;
  cudaError_t Sum(const MatmulStep& step, const Places& places, cudaStream_t stream) const;
  SumShape SumOf(const MatmulStep& step, const Rows& from, const Places& places) const;
  std::string Scatter(size_t i, const Places& places, cudaStream_t stream) const;
  cudaError_t Finish(const MatmulStep& step, const Places& places, cudaStream_t stream) const;

  const MatmulSpec spec_;
  const GpuLane& lane_;
  ExchangeCall call_ = {};
  std::vector<MatmulStep> steps_;
  std::vector<const GemmPlan*> plans_;  // of the steps that are products
  std::vector<cudaEvent_t> events_;     // of those that order streams
  // Where steps scatter in one kernel. Not of the device: a call that wrongly runs beside another
  // one, which both find out, must not count for it.
  std::unique_ptr<SiteMemory> memory_;
  uint32_t *tiles_ = nullptr, *blocks_ = nullptr;  // that are through
  uint8_t* marks_ = nullptr;
};

}  // namespace jax_overlap
