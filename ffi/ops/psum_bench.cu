// What psum takes in a CUDA graph, without JAX: each rank has a stream, on the GPUs there are in
// turn, and a graph of many calls, one after the other. Prints lines of JSON.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/cuda_testing.h"
#include "core/gpu_device.h"
#include "core/gpu_memory.h"
#include "core/test_data.h"
#include "ops/psum_launch.h"

namespace jax_overlap {
namespace {

constexpr int kCalls = 200;  // of a graph
constexpr int kRounds = 25;
constexpr uint64_t kLimitNs = 3000 * 1000 * 1000ull;
constexpr size_t kDirectory = kMaxGpuRanks * sizeof(uint64_t);
// As jax_overlap/_heaps.py has it.
constexpr int kMaxBlocks = 64, kResidentBlocks = 66;
constexpr auto kType = xla::ffi::DataType::BF16;
constexpr size_t kLargest = 16 << 20;
// What a call gets of a heap of 1 GiB: of the half that a mesh has, as GpuPool::Share says.
constexpr size_t kChannelKiB = (1 << 19) / 120;

struct Named {
  PsumAlgorithm algorithm;
  const char* name;
};
constexpr Named kAlgorithms[] = {{PsumAlgorithm::kOneShot, "one_shot"},
                                 {PsumAlgorithm::kTwoShot, "two_shot"},
                                 {PsumAlgorithm::kNvrar, "nvrar"}};

class Bench {
 public:
  Bench(int ranks, PsumAlgorithm algorithm, size_t bytes, size_t channel)
      : ranks_(ranks), devices_(static_cast<int>(Ordinals(ranks).size())), bytes_(bytes) {
    const int64_t count = static_cast<int64_t>(bytes / sizeof(BFloat16));
    const TeamShape shape{0, ranks, algorithm == PsumAlgorithm::kNvrar ? 1 : ranks};
    choice_ = ChoosePsum(algorithm, ranks, bytes);
    const int sharers = static_cast<int>(CeilDiv(ranks, devices_));
    const int blocks = std::max(1, std::min(kMaxBlocks, kResidentBlocks) / sharers);
    layout_ = LayOutPsum(choice_, kType, shape, false, {count}, {channel, blocks});
    JO_CUDA(cudaHostAlloc(&statuses_, ranks * sizeof(Status),
                          cudaHostAllocMapped | cudaHostAllocPortable));
    memset(statuses_, 0, ranks * sizeof(Status));
    const std::vector<BFloat16> ones(count, FromInt<BFloat16>(1));
    for (int r = 0; r < ranks; ++r) {
      const CurrentDevice current(r % devices_);
      heaps_.emplace_back(kDirectory + layout_.channel_bytes());
      ins_.emplace_back(bytes);
      outs_.emplace_back(bytes);
      JO_CUDA(cudaMemcpy(ins_[r].data(), ones.data(), bytes, cudaMemcpyHostToDevice));
      JO_CUDA(cudaStreamCreateWithFlags(&streams_.emplace_back(), cudaStreamNonBlocking));
      JO_CUDA(cudaEventCreate(&begins_.emplace_back()));
      JO_CUDA(cudaEventCreate(&ends_.emplace_back()));
    }
    for (int r = 0; r < ranks; ++r) Capture(r, shape);
  }
  ~Bench() {
    for (const cudaGraphExec_t graph : graphs_) cudaGraphExecDestroy(graph);
    for (const cudaStream_t stream : streams_) cudaStreamDestroy(stream);
    for (const auto* events : {&begins_, &ends_}) {
      for (const cudaEvent_t event : *events) cudaEventDestroy(event);
    }
    cudaFreeHost(statuses_);
  }

  const PsumLayout& layout() const { return layout_; }

  // Microseconds of a call, of the slowest rank, from the fastest round to the slowest one.
  std::vector<double> Run() {
    std::vector<double> rounds;
    for (int round = 0; round < kRounds; ++round) {
      LaunchAll();  // behind it the ranks start in step
      LaunchAll();
      double slowest = 0;
      for (int r = 0; r < ranks_; ++r) {
        float ms = 0;
        JO_CUDA(cudaEventSynchronize(ends_[r]));
        JO_CUDA(cudaEventElapsedTime(&ms, begins_[r], ends_[r]));
        slowest = std::max(slowest, ms * 1e3 / kCalls);
      }
      rounds.push_back(slowest);
    }
    for (int r = 0; r < ranks_; ++r) Check(r);
    std::sort(rounds.begin(), rounds.end());
    return rounds;
  }

 private:
  void LaunchAll() {
    for (int r = 0; r < ranks_; ++r) {
      const CurrentDevice current(r % devices_);
      JO_CUDA(cudaEventRecord(begins_[r], streams_[r]));
      JO_CUDA(cudaGraphLaunch(graphs_[r], streams_[r]));
      JO_CUDA(cudaEventRecord(ends_[r], streams_[r]));
    }
  }

  void Capture(int r, TeamShape shape) {
    PsumArguments arguments = {};
    GpuChannel& channel = arguments.channel;
    channel.shape = shape;
    channel.shape.rank = r;
    for (int p = 0; p < ranks_; ++p) {
      channel.heaps[p] = heaps_[p].data() + kDirectory;
      channel.pes[p] = -1;
    }
    channel.own = channel.heaps[r];
    channel.directory = kDirectory;
    channel.descriptor = 7;
    channel.limit_ns = kLimitNs;
    channel.error = &statuses_[r];
    arguments.block_bytes = static_cast<uint32_t>(layout_.block_bytes);
    arguments.piece = static_cast<uint32_t>(layout_.piece);
    arguments.leaf_count = 1;
    const size_t count = bytes_ / sizeof(BFloat16);
    arguments.leaf = {ins_[r].data(), outs_[r].data(), count,
                      static_cast<uint32_t>(CeilDiv(count, layout_.piece)), 0};
    const CurrentDevice current(r % devices_);
    cudaGraph_t graph;
    JO_CUDA(cudaStreamBeginCapture(streams_[r], cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kCalls; ++i) {
      JO_CUDA(LaunchPsum(choice_, kType, layout_, arguments, streams_[r]));
    }
    JO_CUDA(cudaStreamEndCapture(streams_[r], &graph));
    JO_CUDA(cudaGraphInstantiate(&graphs_.emplace_back(), graph, 0));
    JO_CUDA(cudaGraphUpload(graphs_.back(), streams_[r]));
    JO_CUDA(cudaGraphDestroy(graph));
  }

  void Check(int r) const {
    JO_CHECK_IN(statuses_[r].failed == kNone, "rank %d: %d, for %d", r, statuses_[r].failed,
                statuses_[r].peer);
    std::vector<BFloat16> out(bytes_ / sizeof(BFloat16));
    JO_CUDA(cudaMemcpy(out.data(), outs_[r].data(), bytes_, cudaMemcpyDeviceToHost));
    const BFloat16 right = FromInt<BFloat16>(ranks_);
    for (const BFloat16& x : out) JO_CHECK(memcmp(&x, &right, sizeof(x)) == 0);
  }

  const int ranks_, devices_;
  const size_t bytes_;
  PsumChoice choice_;
  PsumLayout layout_;
  Status* statuses_ = nullptr;
  std::vector<Memory> heaps_, ins_, outs_;
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> begins_, ends_;
  std::vector<cudaGraphExec_t> graphs_;
};

}  // namespace
}  // namespace jax_overlap

// psum_cuda_bench [RANKS [KIB]]: by default 2 ranks, or one a GPU, and channels of up to what the
// default heap has for a call.
// CUDA_DEVICE_MAX_CONNECTIONS=32 gives each rank on a GPU a queue of its own.
int main(int argc, char** argv) {
  using namespace jax_overlap;  // NOLINT
  const int devices = static_cast<int>(Ordinals(kMaxGpuRanks).size());
  const int ranks = argc > 1 ? std::stoi(argv[1]) : std::max(2, devices);
  const size_t channel = (argc > 2 ? std::stoul(argv[2]) : kChannelKiB) << 10;
  JO_CHECK_IN(ranks >= 2 && ranks <= kMaxGpuRanks, "%d ranks", ranks);
  const std::vector<int> ordinals = Ordinals(ranks);
  std::string error = EnablePeers(ordinals);
  if (error.empty()) error = LoadKernels(ordinals, PsumKernels());
  JO_CHECK_IN(error.empty(), "%s", error.c_str());
  for (size_t bytes = 1 << 10; bytes <= kLargest; bytes *= 2) {
    for (const Named& named : kAlgorithms) {
      Bench bench(ranks, named.algorithm, bytes, channel);
      const std::vector<double> us = bench.Run();
      std::printf(
          "{\"ranks\": %d, \"gpus\": %zu, \"bytes\": %zu, \"algorithm\": \"%s\", \"us\": %.2f, "
          "\"fastest_us\": %.2f, \"slowest_us\": %.2f, \"grid\": %d, \"threads\": %d, "
          "\"piece\": %zu},\n",
          ranks, ordinals.size(), bytes, named.name, us[kRounds / 2], us.front(), us.back(),
          bench.layout().grid, bench.layout().threads, bench.layout().piece);
      std::fflush(stdout);
    }
  }
}
