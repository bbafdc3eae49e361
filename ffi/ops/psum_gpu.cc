// The FFI handler of psum on NVIDIA GPUs: its call site, and a launch for each call.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/element_type.h"
#include "core/gpu_op.h"
#include "ops/gpu_handlers.h"
#include "ops/psum_launch.h"

namespace jax_overlap {
namespace {

namespace ffi = xla::ffi;

LaunchPsumOverPutFn* launch_over_put = nullptr;

constexpr size_t kOperandAlign = 16;

struct PsumGpuSite {
  static ffi::TypeId id;

  GpuSite gpu;
  PsumChoice choice;
  ffi::DataType dtype;
  std::vector<int64_t> counts;
  PsumLayout layout;  // once the channel is taken

  GpuSite::Need Need(size_t budget) {
    layout = LayOutPsum(choice, dtype, gpu.shape(), gpu.puts(), counts,
                        {budget, GpuWorld::Get().max_blocks()});
    uint64_t hash = Mixed(static_cast<uint64_t>(choice.algorithm), static_cast<uint64_t>(dtype));
    hash = Mixed(hash, layout.piece);
    hash = Mixed(hash, layout.grid);
    for (const int64_t count : counts) hash = Mixed(hash, count);
    return {layout.channel_bytes(), hash};
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
  site->choice = ChoosePsum(chosen, site->gpu.ranks(), bytes);
  return {std::move(site)};
}

cudaError_t Launch(const PsumGpuSite& site, const PsumArguments& arguments, cudaStream_t stream) {
  if (!site.gpu.puts()) {
    return LaunchPsum(site.choice, site.dtype, site.layout, arguments, stream);
  }
  return launch_over_put(static_cast<int>(site.dtype), &arguments, site.layout.grid,
                         site.layout.threads, stream);
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

}  // namespace jax_overlap
