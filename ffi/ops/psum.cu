// psum on NVIDIA GPUs: the kernels over the peer link, and how a call is cut for them.
//
// Registers (nvcc 13.0, sm_90a): 40 to 128, which is what 512 threads may have, so at least one
// block is resident on a multiprocessor. No spills, but for 8 to 24 bytes, mostly around the rare
// call of PackTail, in two kernels (sm_80: five; sm_100: nine, and 136 in one of nvrar for int8).
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "core/element_type.h"
#include "core/p2p_link.cuh"
#include "ops/psum_kernel.cuh"
#include "ops/psum_launch.h"

namespace jax_overlap {
namespace {

using xla::ffi::DataType;

// f(the class in psum.h). `several`: a thread has more than one cell of a piece.
template <class T, class F>
void WithAlgorithm(const PsumChoice& choice, bool several, F f) {
  const bool small = choice.small;
  constexpr int kOfTwo = sizeof(T) == 1 ? 2 : 4;  // cells at once, as fit into the registers
  switch (choice.algorithm) {
    case PsumAlgorithm::kOneShot:
      if (!small) return f(OneShotByFlags<T>{});
      if (choice.ranks <= 2) return several ? f(OneShot<T, 2, kOfTwo>{}) : f(OneShot<T, 2>{});
      if (choice.ranks <= 4) return several ? f(OneShot<T, 4, 2>{}) : f(OneShot<T, 4>{});
      return f(OneShot<T, 8>{});
    case PsumAlgorithm::kTwoShot:
      return small ? f(TwoShot<T, Steps::kCells>{}) : f(TwoShot<T, Steps::kFlags>{});
    case PsumAlgorithm::kNvrar:
      return small ? f(Nvrar<T, Steps::kCells>{}) : f(Nvrar<T, Steps::kFlags>{});
  }
}

// Up to this size, of a rank's operands, a fence costs more than twice the bytes.
constexpr size_t kSmallBytes = 512 << 10;

// One thread a cell, of few: 128 threads take 2.5 us where 512 take 2.9, on two H200s. And as
// much as keeps the threads of a block busy otherwise.
constexpr size_t kCellsPiece = 128 * kCellBytes;
constexpr size_t kPutsPiece = kGpuThreads * kCellBytes;  // a put has its price, however small
constexpr size_t kStagedPiece = 16 << 10;
constexpr size_t kSmallestPiece = 512;
constexpr size_t kMaxChannelBytes = 9 << 20;  // more does not make a call faster

template <class Algorithm, class T>
PsumLayout MakeLayout(TeamShape shape, bool cells, bool puts, const std::vector<int64_t>& counts,
                      PsumLimits limits) {
  size_t elements = 0;
  for (const int64_t count : counts) elements += count;
  const size_t budget = Min(limits.bytes, kMaxChannelBytes);
  const size_t smallest = kSmallestPiece / sizeof(T);
  const size_t wanted = (puts ? kPutsPiece : cells ? kCellsPiece : kStagedPiece) / sizeof(T);

  PsumLayout layout;
  layout.grid = static_cast<int>(std::clamp<size_t>(CeilDiv(elements, wanted), 1, limits.blocks));
  layout.piece = std::max(smallest, RoundUp(CeilDiv(elements, layout.grid), kSliceAlign<T>));
  layout.block_bytes = PsumChannelBytes<Algorithm>(shape, layout.piece);
  while (layout.grid * layout.block_bytes > budget && layout.piece > smallest) {
    layout.piece = std::max(smallest, RoundUp(layout.piece / 2, kSliceAlign<T>));
    layout.block_bytes = PsumChannelBytes<Algorithm>(shape, layout.piece);
  }
  while (layout.grid * layout.block_bytes > budget && layout.grid > 1) layout.grid /= 2;

  size_t pieces = 0;
  for (const int64_t count : counts) pieces += CeilDiv(count, layout.piece);
  layout.grid = static_cast<int>(Min(layout.grid, pieces));
  // Each rank of a team needs a thread when they meet.
  const size_t work = cells ? CeilDiv(layout.piece, kPerCell<T>) : kGpuThreads;
  layout.threads =
      static_cast<int>(Min(kGpuThreads, RoundUp(std::max<size_t>(work, shape.size), 32)));
  return layout;
}

}  // namespace

PsumChoice ChoosePsum(PsumAlgorithm algorithm, int ranks, size_t bytes) {
  return {algorithm, bytes <= kSmallBytes, ranks};
}

PsumLayout LayOutPsum(const PsumChoice& choice, DataType dtype, TeamShape shape, bool puts,
                      const std::vector<int64_t>& counts, PsumLimits limits) {
  PsumLayout layout = {};
  WithElementType(dtype, [&](auto element) {
    using T = decltype(element);
    const auto make = [&](auto chosen) {
      layout = MakeLayout<decltype(chosen), T>(shape, choice.small || puts, puts, counts, limits);
    };
    puts ? make(Nvrar<T, Steps::kCells, true>{}) : WithAlgorithm<T>(choice, false, make);
  });
  return layout;
}

cudaError_t LaunchPsum(const PsumChoice& choice, DataType dtype, const PsumLayout& layout,
                       const PsumArguments& arguments, cudaStream_t stream) {
  WithElementType(dtype, [&](auto element) {
    using T = decltype(element);
    const bool several = layout.piece > layout.threads * kPerCell<T>;
    WithAlgorithm<T>(choice, several, [&](auto chosen) {
      PsumKernel<P2pLink, decltype(chosen), T>
          <<<layout.grid, layout.threads, 0, stream>>>(arguments);
    });
  });
  return cudaGetLastError();
}

std::vector<const void*> PsumKernels() {
  std::vector<const void*> kernels;
  const auto add = [&](auto element) {
    using T = decltype(element);
    const auto add_one = [&](auto chosen) {
      kernels.push_back(reinterpret_cast<const void*>(&PsumKernel<P2pLink, decltype(chosen), T>));
    };
    for (const bool several : {false, true}) {
      for (const int ranks : {2, 4, 8}) {
        WithAlgorithm<T>({PsumAlgorithm::kOneShot, true, ranks}, several, add_one);
      }
    }
    WithAlgorithm<T>({PsumAlgorithm::kOneShot, false, 0}, false, add_one);
    for (const bool small : {false, true}) {
      WithAlgorithm<T>({PsumAlgorithm::kTwoShot, small, 0}, false, add_one);
      WithAlgorithm<T>({PsumAlgorithm::kNvrar, small, 0}, false, add_one);
    }
  };
  ForElementTypes(add);
  return kernels;
}

}  // namespace jax_overlap
