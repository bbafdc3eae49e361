// psum on NVIDIA GPUs: the kernels over the peer link, and the FFI handler around them.
//
// A call is one launch. Its grid and the cut of its operands depend on shapes only, so
// that they are alike on all ranks and in a captured graph. Everything that changes from
// call to call, the sequence numbers, is in the channel.
//
// Registers (nvcc 13.0, sm_90a): 40 to 128, which is what 512 threads may have, so at least one
// block is resident on a multiprocessor. No spills, but for a few bytes around the rare call
// of PackTail in three kernels of one_shot (sm_80: two; sm_100: nine).
#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/element_type.h"
#include "core/gpu_op.h"
#include "core/p2p_link.cuh"
#include "ops/gpu_handlers.h"
#include "ops/psum_kernel.cuh"

namespace jax_overlap {
namespace {

namespace ffi = xla::ffi;

// What decides, beside the element type, which kernel serves a call.
struct Choice {
  PsumAlgorithm algorithm;
  bool small;  // in cells rather than with flags
  int ranks;
};

// f(the class in psum.h).
template <class T, class F>
void WithAlgorithm(const Choice& choice, F f) {
  const bool small = choice.small;
  switch (choice.algorithm) {
    case PsumAlgorithm::kOneShot:
      if (choice.ranks <= 2) return f(OneShot<T, 2>{});
      if (choice.ranks <= 4) return f(OneShot<T, 4>{});
      return f(OneShot<T, 8>{});
    case PsumAlgorithm::kTwoShot:
      return small ? f(TwoShot<T, Steps::kCells>{}) : f(TwoShot<T, Steps::kFlags>{});
    case PsumAlgorithm::kNvrar:
      return small ? f(Nvrar<T, Steps::kCells>{}) : f(Nvrar<T, Steps::kFlags>{});
  }
}

// Up to this size, of a rank's operands, a fence costs more than twice the bytes.
constexpr size_t kSmallBytes = 512 << 10;

LaunchPsumOverPutFn* launch_over_put = nullptr;

// How a call is cut, and what it needs of its channel.
struct Layout {
  size_t piece;  // elements
  int grid;
  int threads;
  size_t block_bytes;
};

constexpr size_t kOperandAlign = 16;
// One thread a cell, and as much as keeps the threads of a block busy otherwise.
constexpr size_t kCellsPiece = kGpuThreads * kCellBytes;
constexpr size_t kStagedPiece = 16 << 10;
constexpr size_t kSmallestPiece = 512;
constexpr size_t kMaxChannelBytes = 8 << 20;  // more does not make a call faster

template <class Algorithm, class T>
Layout MakeLayout(TeamShape shape, bool cells, const std::vector<int64_t>& counts, size_t budget) {
  size_t elements = 0;
  for (const int64_t count : counts) elements += count;
  budget = Min(budget, kMaxChannelBytes);
  const size_t smallest = kSmallestPiece / sizeof(T);
  const size_t wanted = (cells ? kCellsPiece : kStagedPiece) / sizeof(T);

  Layout layout;
  layout.grid = static_cast<int>(
      std::clamp<size_t>(CeilDiv(elements, wanted), 1, GpuWorld::Get().max_blocks()));
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

struct PsumGpuSite {
  static ffi::TypeId id;

  GpuSite gpu;
  Choice choice;
  ffi::DataType dtype;
  std::vector<int64_t> counts;
  Layout layout;  // once the channel is taken

  GpuSite::Need Need(size_t budget) {
    WithElementType(dtype, [&](auto element) {
      using T = decltype(element);
      const auto make = [&](auto chosen) {
        layout = MakeLayout<decltype(chosen), T>(gpu.shape(), choice.small || gpu.puts(), counts,
                                                 budget);
      };
      gpu.puts() ? make(Nvrar<T, Steps::kCells, true>{}) : WithAlgorithm<T>(choice, make);
    });
    uint64_t hash = Mixed(static_cast<uint64_t>(choice.algorithm), static_cast<uint64_t>(dtype));
    hash = Mixed(hash, layout.piece);
    hash = Mixed(hash, layout.grid);
    for (const int64_t count : counts) hash = Mixed(hash, count);
    return {GpuChannel::kHeadBytes + layout.grid * layout.block_bytes, hash};
  }
};

ffi::TypeId PsumGpuSite::id = {};

ffi::ErrorOr<std::unique_ptr<PsumGpuSite>> Instantiate(
    int64_t abi, std::string_view axes, ffi::Span<const int64_t> groups, int64_t group_size,
    int64_t node_size, int64_t puts, ffi::Span<const int64_t> devices, std::string_view dtype,
    ffi::Span<const int64_t> counts, int64_t algorithm) {
  auto site = std::make_unique<PsumGpuSite>();
  const auto chosen = static_cast<PsumAlgorithm>(algorithm);
  site->dtype = ElementTypeOf(dtype);
  site->counts.assign(counts.begin(), counts.end());
  std::string error = site->gpu.Init("jax_overlap.psum", abi, axes, groups, group_size, node_size,
                                     puts != 0, devices);
  if (error.empty() && site->dtype == ffi::DataType::INVALID) {
    error = site->gpu.what() + ": unexpected dtype";
  }
  if (error.empty() && puts != 0 &&
      (chosen != PsumAlgorithm::kNvrar || launch_over_put == nullptr)) {
    error = site->gpu.what() +
            ": its ranks are in nodes between which stores do not reach, which "
            "needs nvrar and NVSHMEM";
  }
  if (!error.empty()) return ffi::Unexpected(ffi::Error::InvalidArgument(error));
  size_t bytes = 0;
  WithElementType(site->dtype, [&](auto element) {
    for (const int64_t count : counts) bytes += count * sizeof(element);
  });
  const bool small = chosen == PsumAlgorithm::kOneShot || bytes <= kSmallBytes;
  site->choice = {chosen, small, site->gpu.ranks()};
  return {std::move(site)};
}

cudaError_t Launch(const PsumGpuSite& site, const PsumArguments& arguments, cudaStream_t stream) {
  const int grid = site.layout.grid, threads = site.layout.threads;
  if (site.gpu.puts()) {
    return launch_over_put(static_cast<int>(site.dtype), &arguments, grid, threads, stream);
  }
  WithElementType(site.dtype, [&](auto element) {
    using T = decltype(element);
    WithAlgorithm<T>(site.choice, [&](auto chosen) {
      PsumKernel<P2pLink, decltype(chosen), T><<<grid, threads, 0, stream>>>(arguments);
    });
  });
  return cudaGetLastError();
}

ffi::Error Internal(const std::string& text) { return ffi::Error(ffi::ErrorCode::kInternal, text); }

std::string ChannelAt(PsumGpuSite* site, int32_t ordinal, const GpuChannel** channel) {
  return site->gpu.ChannelAt(
      ordinal, [site](size_t budget) { return site->Need(budget); }, channel);
}

// At the start of each execution of a program, for all of its calls in one order: also for
// those that a condition leaves out, which may be others on other ranks. So it is here that
// a channel is taken.
ffi::Error Initialize(PsumGpuSite* site, int32_t ordinal) {
  std::string error = UnacknowledgedOnGpu();
  const GpuChannel* channel = nullptr;
  if (error.empty()) error = ChannelAt(site, ordinal, &channel);
  return error.empty() ? ffi::Error::Success() : Internal(error);
}

ffi::Error Execute(cudaStream_t stream, PsumGpuSite* site, int32_t ordinal, ffi::Dictionary,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const GpuChannel* channel = nullptr;
  const std::string error = ChannelAt(site, ordinal, &channel);
  if (!error.empty()) return Internal(error);

  PsumArguments arguments;
  arguments.channel = *channel;
  arguments.block_bytes = static_cast<uint32_t>(site->layout.block_bytes);
  arguments.piece = static_cast<uint32_t>(site->layout.piece);
  for (size_t begin = 0; begin < args.size(); begin += kMaxLeaves) {
    arguments.leaf_count = static_cast<uint32_t>(Min(args.size() - begin, kMaxLeaves));
    uint32_t first_block = 0;
    for (uint32_t i = 0; i < arguments.leaf_count; ++i) {
      const auto in = args.get<ffi::AnyBuffer>(begin + i);
      auto out = rets.get<ffi::AnyBuffer>(begin + i);
      if (in.has_error() || out.has_error()) return Internal(site->gpu.what() + ": bad operands");
      const auto unaligned = [](const void* p) {
        return reinterpret_cast<uintptr_t>(p) % kOperandAlign != 0;
      };
      if (unaligned(in->untyped_data()) || unaligned((*out)->untyped_data())) {
        return Internal(site->gpu.what() + ": an operand does not start at a multiple of " +
                        std::to_string(kOperandAlign) + " bytes, as all of XLA's do");
      }
      const size_t count = in->element_count();
      const auto pieces = static_cast<uint32_t>(CeilDiv(count, arguments.piece));
      (i == 0 ? arguments.leaf : arguments.more[i - 1]) = {
          in->untyped_data(), (*out)->untyped_data(), count, pieces, first_block};
      first_block = (first_block + pieces) % site->layout.grid;
    }
    const cudaError_t launched = Launch(*site, arguments, stream);
    if (launched != cudaSuccess) {
      return Internal(site->gpu.what() + ": " + cudaGetErrorString(launched));
    }
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate,
                       ffi::Ffi::BindInstantiate()
                           .Attr<int64_t>("abi")
                           .Attr<std::string_view>("axes")
                           .Attr<ffi::Span<const int64_t>>("groups")
                           .Attr<int64_t>("group_size")
                           .Attr<int64_t>("node_size")
                           .Attr<int64_t>("puts")
                           .Attr<ffi::Span<const int64_t>>("devices")
                           .Attr<std::string_view>("dtype")
                           .Attr<ffi::Span<const int64_t>>("counts")
                           .Attr<int64_t>("algorithm"));
XLA_FFI_DEFINE_HANDLER(
    kInitialize, Initialize,
    ffi::Ffi::BindInitialize().Ctx<ffi::State<PsumGpuSite>>().Ctx<ffi::DeviceOrdinal>());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::State<PsumGpuSite>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs()  // read at instantiation
                           .RemainingArgs()
                           .RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});
ffi::TypeInfo kInfo = ffi::MakeTypeInfo<PsumGpuSite>();

}  // namespace

Handler PsumGpuHandler() {
  return {"jax_overlap.psum",
          reinterpret_cast<void*>(kInstantiate),
          reinterpret_cast<void*>(kInitialize),
          reinterpret_cast<void*>(kExecute),
          "jax_overlap.psum_gpu_site",
          &PsumGpuSite::id,
          &kInfo};
}

void UsePsumOverPut(LaunchPsumOverPutFn* launch) { launch_over_put = launch; }

std::vector<const void*> PsumKernels() {
  std::vector<const void*> kernels;
  const auto add = [&](auto element) {
    using T = decltype(element);
    const auto add_one = [&](auto chosen) {
      kernels.push_back(reinterpret_cast<const void*>(&PsumKernel<P2pLink, decltype(chosen), T>));
    };
    for (const int ranks : {2, 4, 8})
      WithAlgorithm<T>({PsumAlgorithm::kOneShot, true, ranks}, add_one);
    for (const bool small : {false, true}) {
      WithAlgorithm<T>({PsumAlgorithm::kTwoShot, small, 0}, add_one);
      WithAlgorithm<T>({PsumAlgorithm::kNvrar, small, 0}, add_one);
    }
  };
  ForElementTypes(add);
  return kernels;
}

}  // namespace jax_overlap
