// The GPU handler of a fused matmul: its call site and registration.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/gpu_op.h"
#include "core/handler.h"
#include "ops/matmul_launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_overlap {

// What all calls of one HLO instruction have in common.
class MatmulGpuSite {
 public:
  struct Attributes {
    std::string_view op;
    MatmulKind kind;
    int64_t abi;
    std::string_view axes;
    xla::ffi::Span<const int64_t> groups;
    int64_t group_size, node_size, puts;
    xla::ffi::Span<const int64_t> devices;
    std::string_view dtype, w_dtype, out_dtype;
    int64_t cut, fast, gathered;
    xla::ffi::Span<const int64_t> x_shapes, w_cols, transposed;
  };
  static xla::ffi::ErrorOr<std::unique_ptr<MatmulGpuSite>> Make(const Attributes& attributes);

  xla::ffi::Error Initialize(int32_t ordinal);
  xla::ffi::Error Execute(cudaStream_t stream, int32_t ordinal, xla::ffi::RemainingArgs args,
                          xla::ffi::RemainingRets rets);

 private:
  std::string Tune() const;
  std::string LaunchesOf(int32_t ordinal, const MatmulLaunches** launches);
  std::string MakeLaunches();

  GpuSite gpu_;
  MatmulSpec spec_ = {};

  std::mutex mutex_;
  std::map<int32_t, std::unique_ptr<MatmulLaunches>> launches_;
};

// The stages of an op: `Op` is a struct with kTarget and kKind.
template <class Op>
struct MatmulGpuHandler {
  struct Site {
    static xla::ffi::TypeId id;
    std::unique_ptr<MatmulGpuSite> site;
  };

  static xla::ffi::ErrorOr<std::unique_ptr<Site>> Instantiate(
      int64_t abi, std::string_view axes, xla::ffi::Span<const int64_t> groups, int64_t group_size,
      int64_t node_size, int64_t puts, xla::ffi::Span<const int64_t> devices,
      std::string_view dtype, xla::ffi::Span<const int64_t> /*counts*/, int64_t /*algorithm*/,
      std::string_view w_dtype, std::string_view out_dtype, int64_t cut, int64_t fast,
      int64_t gathered, xla::ffi::Span<const int64_t> x_shapes,
      xla::ffi::Span<const int64_t> w_cols, xla::ffi::Span<const int64_t> transposed) {
    auto made = MatmulGpuSite::Make({Op::kTarget, Op::kKind, abi, axes, groups, group_size,
                                     node_size, puts, devices, dtype, w_dtype, out_dtype, cut, fast,
                                     gathered, x_shapes, w_cols, transposed});
    if (made.has_error()) return xla::ffi::Unexpected(made.error());
    auto site = std::make_unique<Site>();
    site->site = std::move(*made);
    return {std::move(site)};
  }
  static xla::ffi::Error Initialize(Site* site, int32_t ordinal) {
    return site->site->Initialize(ordinal);
  }
  static xla::ffi::Error Execute(cudaStream_t stream, Site* site, int32_t ordinal,
                                 xla::ffi::Dictionary, xla::ffi::RemainingArgs args,
                                 xla::ffi::RemainingRets rets) {
    return site->site->Execute(stream, ordinal, args, rets);
  }
};

template <class Op>
xla::ffi::TypeId MatmulGpuHandler<Op>::Site::id = {};

// Defines `Handler name##GpuHandler()`. Not for command buffers: what a captured call of
// copies and products becomes cannot be updated to other addresses (jax 0.11.2: "the graph
// update was not performed"), and of launches there are few beside a large product.
#define JO_DEFINE_MATMUL_GPU_HANDLER(name, target, kind)                           \
  namespace {                                                                      \
  struct name##OnGpu {                                                             \
    static constexpr char kTarget[] = target;                                      \
    static constexpr MatmulKind kKind = kind;                                      \
  };                                                                               \
  using name##Stages = MatmulGpuHandler<name##OnGpu>;                              \
  XLA_FFI_DEFINE_HANDLER(k##name##Instantiate, name##Stages::Instantiate,          \
                         xla::ffi::Ffi::BindInstantiate()                          \
                             .Attr<int64_t>("abi")                                 \
                             .Attr<std::string_view>("axes")                       \
                             .Attr<xla::ffi::Span<const int64_t>>("groups")        \
                             .Attr<int64_t>("group_size")                          \
                             .Attr<int64_t>("node_size")                           \
                             .Attr<int64_t>("puts")                                \
                             .Attr<xla::ffi::Span<const int64_t>>("devices")       \
                             .Attr<std::string_view>("dtype")                      \
                             .Attr<xla::ffi::Span<const int64_t>>("counts")        \
                             .Attr<int64_t>("algorithm")                           \
                             .Attr<std::string_view>("w_dtype")                    \
                             .Attr<std::string_view>("out_dtype")                  \
                             .Attr<int64_t>("cut")                                 \
                             .Attr<int64_t>("fast")                                \
                             .Attr<int64_t>("gathered")                            \
                             .Attr<xla::ffi::Span<const int64_t>>("x_shapes")      \
                             .Attr<xla::ffi::Span<const int64_t>>("w_cols")        \
                             .Attr<xla::ffi::Span<const int64_t>>("transposed"));  \
  XLA_FFI_DEFINE_HANDLER(k##name##Initialize, name##Stages::Initialize,            \
                         xla::ffi::Ffi::BindInitialize()                           \
                             .Ctx<xla::ffi::State<name##Stages::Site>>()           \
                             .Ctx<xla::ffi::DeviceOrdinal>());                     \
  XLA_FFI_DEFINE_HANDLER(k##name##Execute, name##Stages::Execute,                  \
                         xla::ffi::Ffi::Bind()                                     \
                             .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()        \
                             .Ctx<xla::ffi::State<name##Stages::Site>>()           \
                             .Ctx<xla::ffi::DeviceOrdinal>()                       \
                             .Attrs() /* read at instantiation */                  \
                             .RemainingArgs()                                      \
                             .RemainingRets());                                    \
  xla::ffi::TypeInfo k##name##Info = xla::ffi::MakeTypeInfo<name##Stages::Site>(); \
  }                                                                                \
  Handler name##GpuHandler() {                                                     \
    return {target,                                                                \
            reinterpret_cast<void*>(k##name##Instantiate),                         \
            reinterpret_cast<void*>(k##name##Initialize),                          \
            reinterpret_cast<void*>(k##name##Execute),                             \
            target "_gpu_site",                                                    \
            &name##Stages::Site::id,                                               \
            &k##name##Info};                                                       \
  }

}  // namespace jax_overlap
