// What a rank's launches of a fused matmul cost beside a plain product, on one GPU: its peers'
// heaps are memory of the same device, and their flags say that they are through.
//
// So nothing is waited for, and no link is used: what is more than the product is what the
// splits, the small kernels and the sums cost, at best. Prints a line of JSON for each shape.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/cuda_testing.h"
#include "core/gpu_device.h"
#include "core/schedule.h"
#include "ops/matmul_bench.h"

namespace jax_overlap {
namespace {

constexpr uint64_t kLimitNs = 3000 * 1000 * 1000ull;
constexpr size_t kDirectory = kMaxGpuRanks * sizeof(uint64_t);
constexpr int kRounds = 31;
constexpr int kCalls = 4;  // of a graph

class Bench {
 public:
  // `exchange`: bytes for slots; 0: as many as take a rank's part whole.
  Bench(const Kind& kind, int ranks, const Problem& problem, size_t exchange)
      : gathers_(kind.kind == MatmulKind::kGather),
        ranks_(ranks),
        m_(problem.m),
        k_(gathers_ ? problem.k : problem.k / ranks),
        n_(gathers_ ? problem.n / ranks : problem.n),
        x_(m_ * k_ * 2),
        w_(k_ * n_ * 2),
        out_(m_ * n_ * 2) {
    std::string error;
    lane_ = GpuGemm::Get().LaneOf(0, &error);
    JO_CHECK_IN(lane_ != nullptr, "%s", error.c_str());
    JO_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    JO_CUDA(cudaHostAlloc(&status_, sizeof(*status_), cudaHostAllocMapped));
    *status_ = {};
    FillForTuning(x_.data(), m_ * k_ * 2, stream_);
    FillForTuning(w_.data(), k_ * n_ * 2, stream_);
    const size_t part = static_cast<size_t>(m_ / ranks * (gathers_ ? k_ : n_)) * 2;
    if (exchange == 0) exchange = 2 * ranks * (part + 256) + (64 << 10);
    MakeLaunches(kind.kind, exchange);
    MatmulStep step = PlainProduct(m_, k_, n_);
    product_ = PlanOf(step);
    // All rows in one product that scatters, the own ones, too.
    step.batch = ranks;
    step.m = m_ / ranks;
    step.x.block = m_ / ranks * k_;
    step.c = step.d = {{Space::kSlot, 0, 0, 0}, static_cast<int64_t>(heap_ / 2), n_};
    if (kind.kind == MatmulKind::kScatter && part <= launches_->call().layout.slot_bytes) {
      scattering_ = PlanOf(step);
    }
  }
  ~Bench() {
    cudaFreeHost(status_);
    cudaStreamDestroy(stream_);
  }

  // Microseconds of a call: of a plain product, of one that scatters, of all launches. In
  // turn, as a GPU that gets warm gets slower.
  std::vector<double> Run() {
    std::vector<std::function<std::string()>> variants;
    const auto multiply = [this](const GemmPlan* plan, char* to) {
      return GpuGemm::Get().Launch(*lane_, *plan, x_.data(), w_.data(), to, to, stream_);
    };
    variants.push_back([&] { return multiply(product_, out_.data()); });
    variants.push_back([&] {
      return scattering_ == nullptr ? ""
                                    : multiply(scattering_, launches_->call().layout.half[0].slots);
    });
    variants.push_back([&] {
      return launches_->Run({{x_.data()}, {w_.data()}, {out_.data()}, nullptr}, {}, stream_);
    });
    std::vector<cudaGraphExec_t> graphs;
    for (const auto& variant : variants) graphs.push_back(Captured(variant));
    cudaEvent_t begin, end;
    JO_CUDA(cudaEventCreate(&begin));
    JO_CUDA(cudaEventCreate(&end));
    std::vector<std::vector<double>> samples(variants.size());
    for (int round = 0; round < kRounds; ++round) {
      for (size_t v = 0; v < variants.size(); ++v) {
        JO_CUDA(cudaEventRecord(begin, stream_));
        JO_CUDA(cudaGraphLaunch(graphs[v], stream_));
        JO_CUDA(cudaEventRecord(end, stream_));
        JO_CUDA(cudaEventSynchronize(end));
        float ms = 0;
        JO_CUDA(cudaEventElapsedTime(&ms, begin, end));
        samples[v].push_back(ms * 1e3 / kCalls);
      }
    }
    JO_CHECK(status_->failed == kNone);
    std::vector<double> medians;
    for (std::vector<double>& s : samples) {
      std::sort(s.begin(), s.end());
      medians.push_back(s[s.size() / 2]);
    }
    if (scattering_ == nullptr) medians[1] = 0;
    for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
    return medians;
  }

 private:
  void MakeLaunches(MatmulKind kind, size_t exchange) {
    // One range, so that heaps are at one distance.
    heap_ = RoundUp(kDirectory + exchange, 4096);
    heaps_ = std::make_unique<Memory>(heap_ * ranks_);
    GpuChannel channel = {};
    channel.shape = {0, ranks_, ranks_};
    for (int p = 0; p < ranks_; ++p) channel.heaps[p] = heaps_->data() + p * heap_ + kDirectory;
    channel.own = channel.heaps[0];
    channel.directory = kDirectory;
    channel.descriptor = 7;
    channel.limit_ns = kLimitNs;
    channel.error = status_;
    spec_ = std::make_unique<MatmulSpec>(SpecOf(kind, ranks_, m_, k_, n_));
    std::string error;
    launches_ = MatmulLaunches::Make(*spec_, *lane_, channel, exchange, spec_->Hash(), &error);
    JO_CHECK_IN(launches_ != nullptr, "%s", error.c_str());
    const ExchangeCall& call = launches_->call();
    for (int p = 1; p < ranks_; ++p) {  // all have said so, for all time
      const uint64_t always = uint64_t{1} << 60, arrived = always | call.call;
      for (const ExchangeHalf& half : call.layout.half) {
        JO_CUDA(cudaMemcpy(&half.ready[p].value, &always, 8, cudaMemcpyHostToDevice));
        JO_CUDA(cudaMemcpy(&half.arrived[p].value, &arrived, 8, cudaMemcpyHostToDevice));
      }
      JO_CUDA(cudaMemcpy(channel.Heard(0, p), &channel.descriptor, 8, cudaMemcpyHostToDevice));
    }
  }

  const GemmPlan* PlanOf(const MatmulStep& step) const {
    std::string error;
    const GemmPlan* const plan = GpuGemm::Get().PlanOf(0, spec_->KeyOf(step), &error);
    JO_CHECK_IN(plan != nullptr, "%s", error.c_str());
    return plan;
  }

  cudaGraphExec_t Captured(const std::function<std::string()>& variant) const {
    const auto run = [&] {
      const std::string error = variant();
      JO_CHECK_IN(error.empty(), "%s", error.c_str());
    };
    run();
    JO_CUDA(cudaStreamSynchronize(stream_));
    cudaGraph_t graph;
    cudaGraphExec_t made;
    JO_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kCalls; ++i) run();
    JO_CUDA(cudaStreamEndCapture(stream_, &graph));
    JO_CUDA(cudaGraphInstantiate(&made, graph, 0));
    JO_CUDA(cudaGraphDestroy(graph));
    return made;
  }

  const bool gathers_;
  const int ranks_;
  const int64_t m_, k_, n_;  // of the plain product of a rank
  const Memory x_, w_, out_;
  const GpuLane* lane_ = nullptr;
  cudaStream_t stream_ = nullptr;
  Status* status_ = nullptr;
  size_t heap_ = 0;
  std::unique_ptr<Memory> heaps_;
  std::unique_ptr<MatmulSpec> spec_;
  std::unique_ptr<MatmulLaunches> launches_;
  const GemmPlan *product_ = nullptr, *scattering_ = nullptr;
};

}  // namespace
}  // namespace jax_overlap

// With a number: MiB for slots.
int main(int argc, char** argv) {
  using namespace jax_overlap;  // NOLINT
  const size_t exchange = argc > 1 ? std::stoul(argv[1]) << 20 : 0;
  for (const Kind& kind : kKinds) {
    for (const int ranks : {2, 4, 8}) {
      for (const Problem& p : kProblems) {
        const std::vector<double> us = Bench(kind, ranks, p, exchange).Run();
        std::printf(
            "{\"op\": \"%s\", \"ranks\": %d, \"m\": %d, \"k\": %d, \"n\": %d, \"product_us\": "
            "%.1f, \"all_launches_us\": %.1f, \"all_launches\": %.3f",
            kind.op, ranks, static_cast<int>(p.m), static_cast<int>(p.k), static_cast<int>(p.n),
            us[0], us[2], us[2] / us[0]);
        if (us[1] > 0) {
          std::printf(", \"scattering_us\": %.1f, \"scattering\": %.3f", us[1], us[1] / us[0]);
        }
        std::printf("},\n");
        std::fflush(stdout);
      }
    }
  }
}
