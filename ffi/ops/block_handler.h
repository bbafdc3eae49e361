// The CPU handler of an op on blocks: its program, call site and registration.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "core/host_op.h"
#include "ops/block_op.h"
#include "ops/handlers.h"

namespace jax_overlap {

// What all calls of one HLO instruction have in common. `Op` has a name and the
// algorithm: struct Op { static constexpr char kTarget[]; using Algorithm = ...; }
template <class Op>
struct BlockSite {
  static xla::ffi::TypeId id;

  HostSite host;
  size_t outer;
  size_t inner;
};

template <class Op>
xla::ffi::TypeId BlockSite<Op>::id = {};

template <class Op>
class BlockProgram : public HostProgram {
 public:
  BlockProgram(const BlockSite<Op>& site, HostTeam& team, xla::ffi::DataType dtype,
               std::unique_ptr<HostCall> call)
      : HostProgram(site.host, team, std::move(call)),
        blocks_{site.host.ranks(), site.outer, site.inner},
        dtype_(dtype) {}

  // Operands are read and written in place: nothing is taken, nobody waits.
  std::string Prepare() override { return ""; }
  void Finish() override {}
  bool waits() const override { return false; }
  bool wants_help() const override {
    return blocks_.part_size() * blocks_.parts * xla::ffi::ByteWidth(dtype_) * blocks_.parts >=
           kHelpFromBytes;
  }

  void RunTask(int rank, Waiter& waiter) override {
    WithElementType(dtype_, [&](auto element) {
      using T = decltype(element);
      HostLink<true> link(rank, site().ranks(), nullptr, call().inputs.data(),
                          call().outputs.data(), waiter, deadline());
      RunBlocks<typename Op::Algorithm>(OneThread{}, link, nullptr, 0, blocks_,
                                        static_cast<const T*>(call().inputs[rank]),
                                        static_cast<T*>(call().outputs[rank]));
    });
  }

 private:
  const Blocks blocks_;
  const xla::ffi::DataType dtype_;
};

template <class Op>
xla::ffi::ErrorOr<std::unique_ptr<BlockSite<Op>>> InstantiateBlockOp(
    int64_t abi, std::string_view axes, xla::ffi::Span<const int64_t> groups, int64_t group_size,
    int64_t node_size, int64_t outer, int64_t inner) {
  auto site = std::make_unique<BlockSite<Op>>();
  site->outer = static_cast<size_t>(outer);
  site->inner = static_cast<size_t>(inner);
  const std::string error = site->host.Init(Op::kTarget, abi, axes, groups, group_size, node_size);
  if (!error.empty()) {
    return xla::ffi::Unexpected(xla::ffi::Error::InvalidArgument(error));
  }
  return site;
}

// For an `Op` of this name.
#define JO_DEFINE_BLOCK_HANDLER(name, target)                                  \
  JO_DEFINE_HANDLER(name, target, BlockSite<name##Op>, BlockProgram<name##Op>, \
                    InstantiateBlockOp<name##Op>, .Attr<int64_t>("outer").Attr<int64_t>("inner"))

}  // namespace jax_overlap
