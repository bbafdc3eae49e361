// The CPU handler of a fused matmul: its program, call site and registration.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/host_op.h"
#include "ops/block_op.h"
#include "ops/handlers.h"
#include "ops/matmul.h"

namespace jax_overlap {

// The values of the attribute `algorithm`; jax_overlap/ops/_matmul.py has the same.
enum class MatmulAlgorithm : int64_t { kInPlace = 0, kSliced = 1 };

// Multiplications of all ranks from which a second thread pays for its wake-up.
constexpr size_t kHelpFromProducts = 2 << 20;

// What all calls of one HLO instruction have in common. An `Op` has
//   kTarget, kChannel                   its name, and a number for its kind of channel
//   kGathers                            whether it gathers one x, or adds products
//   Tasks(shape, gathered)              the pieces of the work, in place
//   RunTask<T, Out>(shape, operands, task, gathered)
//   Sliced<T>                           the algorithm over a link, or (void) none
template <class Op>
struct MatmulSite {
  static xla::ffi::TypeId id;

  HostSite host;
  MatmulAlgorithm algorithm;
  MatmulShape shape;
  size_t xs;  // how many of the inputs are xs
  bool wide;  // results of half types stay in fp32
};

template <class Op>
xla::ffi::TypeId MatmulSite<Op>::id = {};

template <class Op>
class MatmulProgram : public HostProgram {
 public:
  MatmulProgram(const MatmulSite<Op>& site, HostTeam& team, xla::ffi::DataType dtype,
                std::unique_ptr<HostCall> call)
      : HostProgram(site.host, team, std::move(call)),
        site_(site),
        dtype_(dtype),
        operands_(this->call().inputs.data(), this->call().outputs.data(), site.host.ranks(),
                  site.xs),
        gathered_(Op::kGathers &&
                  this->call().outputs.size() > site.shape.products.size() * site.host.ranks()) {}

  std::string Prepare() override {
    if (counts() != ExpectedCounts()) return "bad attributes. Compile this program anew";
    std::string error;
    if (waits()) {
      Dispatch([&](auto element, auto) { TakeChannel<decltype(element)>(&error); });
    }
    return error;
  }
  void Finish() override {
    if (channel_ != nullptr) team().Give(std::move(channel_));
  }

  bool waits() const override { return site_.algorithm == MatmulAlgorithm::kSliced; }
  int tasks() const override {
    return waits() ? site().ranks() : static_cast<int>(Op::Tasks(site_.shape, gathered_));
  }
  bool wants_help() const override {
    size_t products = 0;
    for (const Product& p : site_.shape.products) products += p.inner * p.cols;
    const size_t rows = site_.shape.batch * site_.shape.outer * site_.shape.rows;
    return products * rows * site().ranks() >= kHelpFromProducts;
  }

  void RunTask(int task, Waiter& waiter) override {
    Dispatch([&](auto element, auto result) {
      using T = decltype(element);
      using Out = decltype(result);
      if (waits()) {
        RunSliced<T, Out>(task, waiter);
      } else {
        Op::template RunTask<T, Out>(site_.shape, operands_, task, gathered_);
      }
    });
  }

 private:
  template <class T>
  using Sliced = typename Op::template Sliced<T>;
  template <class T>
  static constexpr bool kHasSliced = !std::is_void<Sliced<T>>::value;

  // f(a value of the element type, a value of the results' type)
  template <class F>
  void Dispatch(F f) {
    using xla::ffi::DataType;
    const auto with = [&](auto element) {
      if (site_.wide) {
        f(element, Acc<decltype(element)>{});
      } else {
        f(element, element);
      }
    };
    switch (dtype_) {
      case DataType::F32: return with(float{});
      case DataType::F64: return with(double{});
      case DataType::BF16: return with(BFloat16{});
      case DataType::F16: return with(Float16{});
      default: return;  // jax_overlap/ops/_matmul.py lowers no others
    }
  }

  std::vector<size_t> ExpectedCounts() const {
    const MatmulShape& s = site_.shape;
    const size_t ranks = site().ranks();
    std::vector<size_t> xs, ws;
    for (const Product& p : s.products) {
      xs.push_back(s.batch * s.outer * s.rows * p.inner);
      ws.push_back(s.batch * p.inner * p.cols);
      if (Op::kGathers && (s.cut == Cut::kInner || s.cut == Cut::kBatch)) ws.back() *= ranks;
    }
    xs.resize(site_.xs);
    xs.insert(xs.end(), ws.begin(), ws.end());
    return xs;
  }

  template <class T>
  void TakeChannel(std::string* error) {
    if constexpr (kHasSliced<T>) {
      const size_t capacity = Sliced<T>::Capacity(site_.shape);
      Carver carver(nullptr);
      Sliced<T>::Carve(carver, site().ranks(), capacity);
      const Channel::Key key{Op::kChannel, static_cast<int>(dtype_), capacity};
      channel_ = team().Take(key, carver.bytes(), error);
    } else {
      *error = "there is no such algorithm";
    }
  }

  template <class T, class Out>
  void RunSliced(int rank, Waiter& waiter) {
    if constexpr (kHasSliced<T>) {
      HostLink<false> link(rank, site().ranks(), channel_->heaps.data(), nullptr, nullptr, waiter,
                           deadline());
      Carver carver(channel_->heaps[rank]);
      const auto sliced =
          Sliced<T>::Carve(carver, site().ranks(), Sliced<T>::Capacity(site_.shape));
      Op::template RunSliced<T, Out>(sliced, link, site_.shape, operands_, gathered_);
      if (link.failed()) SetStatus(rank, link.status());
    }
  }

  const MatmulSite<Op>& site_;
  const xla::ffi::DataType dtype_;
  const MatmulOperands operands_;
  const bool gathered_;  // whether the gathered x is the last result
  std::unique_ptr<Channel> channel_;
};

template <class Op>
xla::ffi::ErrorOr<std::unique_ptr<MatmulSite<Op>>> InstantiateMatmul(
    int64_t abi, std::string_view axes, xla::ffi::Span<const int64_t> groups, int64_t group_size,
    int64_t node_size, int64_t algorithm, int64_t cut, int64_t wide,
    xla::ffi::Span<const int64_t> x_shapes, xla::ffi::Span<const int64_t> w_cols,
    xla::ffi::Span<const int64_t> transposed) {
  auto site = std::make_unique<MatmulSite<Op>>();
  std::string error = site->host.Init(Op::kTarget, abi, axes, groups, group_size, node_size);
  const size_t xs = x_shapes.size() / 4, ws = w_cols.size();
  if (error.empty() && (xs == 0 || (xs != 1 && xs != ws) || transposed.size() != ws)) {
    error = std::string(Op::kTarget) + ": bad attributes. Compile this program anew";
  }
  if (!error.empty()) return xla::ffi::Unexpected(xla::ffi::Error::InvalidArgument(error));
  const auto size = [&](size_t i) { return static_cast<size_t>(x_shapes[i]); };
  site->algorithm = static_cast<MatmulAlgorithm>(algorithm);
  site->xs = xs;
  site->wide = wide != 0;
  site->shape = {
      static_cast<Cut>(cut), static_cast<int>(group_size), size(0), size(1), size(2), {}};
  for (size_t i = 0; i < ws; ++i) {
    site->shape.products.push_back(
        {size((xs == 1 ? 0 : i) * 4 + 3), static_cast<size_t>(w_cols[i]), transposed[i] != 0});
  }
  return site;
}

// For an `Op` of this name.
#define JO_DEFINE_MATMUL_HANDLER(name, target)                                   \
  JO_DEFINE_HANDLER(name, target, MatmulSite<name##Op>, MatmulProgram<name##Op>, \
                    InstantiateMatmul<name##Op>,                                 \
                    .Attr<int64_t>("algorithm")                                  \
                        .Attr<int64_t>("cut")                                    \
                        .Attr<int64_t>("wide")                                   \
                        .Attr<xla::ffi::Span<const int64_t>>("x_shapes")         \
                        .Attr<xla::ffi::Span<const int64_t>>("w_cols")           \
                        .Attr<xla::ffi::Span<const int64_t>>("transposed"))

}  // namespace jax_overlap
