// How far the stores of SMs run ahead of the link: the constants of the burst-gap model (X-Stage,
// https://arxiv.org/abs/2607.23264), from the first GPU to the second one.
//
// A block on each SM stores a burst, does something else for the length of a gap, and so on. With
// V bytes of all blocks in a burst,
//   issue = max(T0, V/R - gap), and of a burst by itself max(T0, (V - Q)/R)
// T0 is what it takes to issue a burst while nothing holds it up: the same stores to this GPU's
// memory, and those after long gaps; R the rate at which the link drains: bursts without gaps; Q
// what may be under way: the longest bursts after long gaps. Prints lines of JSON.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "core/cuda_testing.h"

namespace jax_overlap {
namespace {

constexpr int kThreads = 256;
constexpr int kBursts = 40, kWarmUp = 10;
constexpr int kRounds = 5;
constexpr int kBlockKb[] = {2, 4, 8, 16, 20, 24, 32, 48, 64, 128};  // a burst of a block
constexpr double kGapsUs[] = {0, 1, 2, 5, 10, 20, 50, 200};
constexpr double kLongGapUs = 200;
constexpr int kMostBlocks = 1024;

struct Times {
  int64_t issue, cycles, ns;  // the last two: of all that was measured
};

__device__ int64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return static_cast<int64_t>(now);
}

// Waits for nothing but the clock.
__global__ void Bursts(uint4* to, int words, int64_t gap, Times* times) {
  uint4* const own = to + static_cast<size_t>(blockIdx.x) * words;
  const uint4 value = make_uint4(threadIdx.x, blockIdx.x, words, 1);
  Times sum = {};
  for (int burst = 0; burst < kBursts; ++burst) {
    __syncthreads();
    const int64_t start = clock64();
    if (burst == kWarmUp) sum = {0, -start, -Nanoseconds()};
    for (int i = threadIdx.x; i < words; i += kThreads) {
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(own + i), "r"(value.x),
                   "r"(value.y), "r"(value.z), "r"(value.w)
                   : "memory");
    }
    __syncthreads();
    const int64_t end = clock64();
    sum.issue += end - start;
    while (clock64() - end < gap) {
    }
  }
  sum.cycles += clock64();
  sum.ns += Nanoseconds();
  if (threadIdx.x == 0) times[blockIdx.x] = sum;
}

struct Measured {
  double issue_us, gap_us, period_us;
};

class Bench {
 public:
  Bench() : times_(kMostBlocks * sizeof(Times)) {
    JO_CUDA(cudaDeviceGetAttribute(&blocks_, cudaDevAttrMultiProcessorCount, 0));
    JO_CHECK(blocks_ <= kMostBlocks);
    JO_CUDA(cudaDeviceGetAttribute(&khz_, cudaDevAttrClockRate, 0));
  }
  int blocks() const { return blocks_; }

  // Of the block that issues for longest, the median of some rounds.
  Measured Run(char* to, int kb, double gap_us) const {
    std::vector<Measured> rounds;
    for (int round = 0; round < kRounds; ++round) rounds.push_back(Round(to, kb, gap_us));
    const auto shorter = [](const Measured& a, const Measured& b) {
      return a.issue_us < b.issue_us;
    };
    std::sort(rounds.begin(), rounds.end(), shorter);
    return rounds[kRounds / 2];
  }

 private:
  Measured Round(char* to, int kb, double gap_us) const {
    // By the nominal clock: how long it was in the end is measured.
    const int64_t gap = static_cast<int64_t>(gap_us * khz_ / 1000);
    Bursts<<<blocks_, kThreads>>>(reinterpret_cast<uint4*>(to), kb * 1024 / 16, gap,
                                  reinterpret_cast<Times*>(times_.data()));
    JO_CUDA(cudaGetLastError());
    std::vector<Times> times(blocks_);
    JO_CUDA(
        cudaMemcpy(times.data(), times_.data(), blocks_ * sizeof(Times), cudaMemcpyDeviceToHost));
    const auto shorter = [](const Times& a, const Times& b) { return a.issue < b.issue; };
    const Times longest = *std::max_element(times.begin(), times.end(), shorter);
    constexpr int kMeasured = kBursts - kWarmUp;
    const double us_per_cycle = longest.ns / 1e3 / longest.cycles;
    const double issue = longest.issue * us_per_cycle / kMeasured;
    const double period = longest.ns / 1e3 / kMeasured;
    return {issue, period - issue, period};
  }

  int blocks_ = 0, khz_ = 0;
  const Memory times_;
};

double Megabytes(const Bench& bench, int kb) { return bench.blocks() * kb * 1024 / 1e6; }

struct Constants {
  double r = 0, q = 0;  // MB/us (TB/s) and MB
};

Constants ConstantsOf(const Bench& bench, char* to) {
  Constants found;
  const int kb = kBlockKb[std::size(kBlockKb) - 1];
  const double mb = Megabytes(bench, kb);
  found.r = mb / bench.Run(to, kb, 0).period_us;
  found.q = mb - found.r * bench.Run(to, kb, kLongGapUs).issue_us;
  return found;
}

void Table(const Bench& bench, const char* where, char* to, const Constants* constants,
           char* local) {
  for (const int kb : kBlockKb) {
    const double mb = Megabytes(bench, kb);
    const double t0 = constants == nullptr ? 0 : bench.Run(local, kb, kLongGapUs).issue_us;
    for (const double gap : kGapsUs) {
      const Measured m = bench.Run(to, kb, gap);
      std::printf(
          "{\"to\": \"%s\", \"block_kb\": %d, \"burst_mb\": %.3f, \"gap_us\": %.3f, "
          "\"issue_us\": %.3f, \"period_us\": %.3f",
          where, kb, mb, m.gap_us, m.issue_us, m.period_us);
      if (constants != nullptr) {
        // What is under way when a burst begins is what the gap before has left of Q.
        const double after_gap = mb / constants->r - m.gap_us;
        const double alone = (mb - constants->q) / constants->r;
        std::printf(", \"t0_us\": %.3f, \"model_issue_us\": %.3f", t0,
                    std::max({t0, after_gap, alone}));
      }
      std::printf("},\n");
    }
  }
}

}  // namespace
}  // namespace jax_overlap

int main() {
  using namespace jax_overlap;  // NOLINT
  if (const size_t found = Ordinals(2).size(); found < 2) {
    std::fprintf(stderr, "link_cuda_bench needs two GPUs, and found %zu.\n", found);
    return 1;
  }
  JO_CUDA(cudaSetDevice(1));
  const size_t bytes = static_cast<size_t>(kMostBlocks) * 128 * 1024;
  const Memory peer(bytes);
  JO_CUDA(cudaSetDevice(0));
  const cudaError_t access = cudaDeviceEnablePeerAccess(1, 0);
  JO_CHECK_IN(access == cudaSuccess, "GPU 0 can't write to GPU 1: %s", cudaGetErrorString(access));
  const Memory local(bytes);
  const Bench bench;
  const Constants constants = ConstantsOf(bench, peer.data());
  std::printf("{\"blocks\": %d, \"threads\": %d, \"r_gb_s\": %.1f, \"q_mb\": %.3f},\n",
              bench.blocks(), kThreads, constants.r * 1e3, constants.q);
  Table(bench, "this GPU", local.data(), nullptr, local.data());
  Table(bench, "the other GPU", peer.data(), &constants, local.data());
}
