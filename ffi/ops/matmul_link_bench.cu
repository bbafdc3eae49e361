// What the launches of a fused matmul take over the links between the GPUs of this process,
// beside a plain product of the same size and beside the copies that a gather makes.
//
// Each GPU is a rank with a thread of its own, as in JAX. Variants take turns, and the slowest
// GPU counts. Prints a line of JSON for each shape; `efficiency` is the larger of the product
// and the copies, over the launches.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/cuda_testing.h"
#include "core/gpu_device.h"
#include "core/gpu_memory.h"
#include "core/schedule.h"
#include "ops/matmul_bench.h"

namespace jax_overlap {
namespace {

constexpr uint64_t kLimitNs = 3000 * 1000 * 1000ull;
constexpr size_t kDirectory = kMaxGpuRanks * sizeof(uint64_t);
constexpr int kMaxRanks = 8;
constexpr int kRounds = 15;
constexpr int kCalls = 8;  // of a round

class Bench {
 public:
  Bench(MatmulKind kind, const Problem& problem, const std::vector<int>& ordinals)
      : kind_(kind),
        ranks_(static_cast<int>(ordinals.size())),
        m_(problem.m),
        k_(gathers() ? problem.k : problem.k / ranks_),
        n_(gathers() ? problem.n / ranks_ : problem.n),
        part_(static_cast<size_t>(m_ / ranks_ * (gathers() ? k_ : n_)) * sizeof(BFloat16)) {
    const size_t exchange = 2 * ranks_ * (part_ + 256) + (64 << 10);
    for (const int ordinal : ordinals) {
      const CurrentDevice current(ordinal);
      heaps_.emplace_back(kDirectory + exchange);
    }
    for (int r = 0; r < ranks_; ++r) AddRank(r, ordinals[r], exchange);
  }

  // Microseconds of a call: of a plain product, of the copies, of all launches.
  std::vector<double> Run() {
    std::vector<std::vector<double>> samples(3);
    for (int round = 0; round < kRounds; ++round) {
      samples[0].push_back(Time([this](Rank& r) {
        return GpuGemm::Get().Launch(*r.lane, *r.product, r.x->data(), r.w->data(), r.out->data(),
                                     r.out->data(), r.stream);
      }));
      samples[1].push_back(Time([this](Rank& r) { return Push(r); }));
      samples[2].push_back(Time([](Rank& r) {
        return r.launches->Run({{r.x->data()}, {r.w->data()}, {r.out->data()}, nullptr}, {},
                               r.stream);
      }));
    }
    std::vector<double> medians;
    for (std::vector<double>& s : samples) {
      std::sort(s.begin(), s.end());
      medians.push_back(s[s.size() / 2]);
    }
    for (const Rank& r : team_) {
      JO_CHECK_IN(r.status->failed == kNone, "rank %d failed: %d", r.rank, r.status->failed);
      cudaFreeHost(r.status);
      cudaStreamDestroy(r.stream);
    }
    return medians;
  }

 private:
  struct Rank {
    int rank, ordinal;
    const GpuLane* lane;
    cudaStream_t stream;
    Status* status;
    std::unique_ptr<Memory> x, w, out;
    const GemmPlan* product;
    std::unique_ptr<MatmulLaunches> launches;
  };

  bool gathers() const { return kind_ == MatmulKind::kGather; }

  void AddRank(int rank, int ordinal, size_t exchange) {
    const CurrentDevice current(ordinal);
    std::string error;
    Rank r = {};
    r.rank = rank;
    r.ordinal = ordinal;
    r.lane = GpuGemm::Get().LaneOf(ordinal, &error);
    JO_CHECK_IN(r.lane != nullptr, "%s", error.c_str());
    JO_CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    JO_CUDA(cudaHostAlloc(&r.status, sizeof(Status), cudaHostAllocMapped | cudaHostAllocPortable));
    *r.status = {};
    // For a plain product x is whole, also where a rank has a part of it.
    r.x = std::make_unique<Memory>(m_ * k_ * sizeof(BFloat16));
    r.w = std::make_unique<Memory>(k_ * n_ * sizeof(BFloat16));
    r.out = std::make_unique<Memory>(m_ * n_ * sizeof(BFloat16));
    FillForTuning(r.x->data(), m_ * k_ * sizeof(BFloat16), r.stream);
    FillForTuning(r.w->data(), k_ * n_ * sizeof(BFloat16), r.stream);

    const MatmulSpec spec = SpecOf(kind_, ranks_, m_, k_, n_);
    r.product = GpuGemm::Get().PlanOf(ordinal, spec.KeyOf(PlainProduct(m_, k_, n_)), &error);
    JO_CHECK_IN(r.product != nullptr, "%s", error.c_str());

    GpuChannel channel = {};
    channel.shape = {rank, ranks_, ranks_};
    for (int p = 0; p < ranks_; ++p) channel.heaps[p] = heaps_[p].data() + kDirectory;
    channel.own = channel.heaps[rank];
    channel.directory = kDirectory;
    channel.descriptor = 7;
    channel.limit_ns = kLimitNs;
    channel.error = r.status;
    r.launches = MatmulLaunches::Make(spec, *r.lane, channel, exchange, spec.Hash(), &error);
    JO_CHECK_IN(r.launches != nullptr, "%s", error.c_str());
    JO_CUDA(cudaStreamSynchronize(r.stream));
    team_.push_back(std::move(r));
  }

  // A rank's part to each of the others, at places where nothing else is yet.
  std::string Push(Rank& r) const {
    const ExchangeCall& call = r.launches->call();
    cudaError_t status = cudaSuccess;
    for (int i = 1; i < ranks_ && status == cudaSuccess; ++i) {
      const int peer = Rotated(r.rank, i, ranks_);
      char* const slot =
          call.channel.At(call.layout.half[1].slots, peer) + r.rank * call.layout.slot_bytes;
      status = cudaMemcpyAsync(slot, r.x->data(), part_, cudaMemcpyDefault, r.stream);
    }
    return status == cudaSuccess ? "" : cudaGetErrorString(status);
  }

  double Time(const std::function<std::string(Rank&)>& run) {
    std::vector<double> us(team_.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < team_.size(); ++i) {
      threads.emplace_back([&, i] {
        Rank& r = team_[i];
        const CurrentDevice current(r.ordinal);
        cudaEvent_t begin, end;
        JO_CUDA(cudaEventCreate(&begin));
        JO_CUDA(cudaEventCreate(&end));
        for (int call = 0; call <= kCalls; ++call) {  // the first one brings all in step
          if (call == 1) JO_CUDA(cudaEventRecord(begin, r.stream));
          const std::string error = run(r);
          JO_CHECK_IN(error.empty(), "%s", error.c_str());
        }
        JO_CUDA(cudaEventRecord(end, r.stream));
        JO_CUDA(cudaEventSynchronize(end));
        float ms = 0;
        JO_CUDA(cudaEventElapsedTime(&ms, begin, end));
        us[i] = ms * 1e3 / kCalls;
        cudaEventDestroy(begin);
        cudaEventDestroy(end);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return *std::max_element(us.begin(), us.end());
  }

  const MatmulKind kind_;
  const int ranks_;
  const int64_t m_, k_, n_;  // of the plain product of a rank
  const size_t part_;        // bytes that a rank has for another
  std::vector<Memory> heaps_;
  std::vector<Rank> team_;
};

}  // namespace
}  // namespace jax_overlap

int main() {
  using namespace jax_overlap;  // NOLINT
  const std::vector<int> ordinals = Ordinals(kMaxRanks);
  JO_CHECK_IN(ordinals.size() > 1, "%zu GPUs: links are between two", ordinals.size());
  std::string error = EnablePeers(ordinals);
  if (error.empty()) error = LoadKernels(ordinals, ExchangeKernels());
  JO_CHECK_IN(error.empty(), "%s", error.c_str());
  for (const Kind& kind : kKinds) {
    for (const Problem& p : kProblems) {
      const std::vector<double> us = Bench(kind.kind, p, ordinals).Run();
      std::printf(
          "{\"op\": \"%s\", \"ranks\": %zu, \"m\": %d, \"k\": %d, \"n\": %d, \"product_us\": %.1f, "
          "\"copies_us\": %.1f, \"launches_us\": %.1f, \"launches\": %.3f, \"efficiency\": "
          "%.3f},\n",
          kind.op, ordinals.size(), static_cast<int>(p.m), static_cast<int>(p.k),
          static_cast<int>(p.n), us[0], us[1], us[2], us[2] / us[0],
          std::max(us[0], us[1]) / us[2]);
      std::fflush(stdout);
    }
  }
}
