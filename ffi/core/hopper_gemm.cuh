// CUTLASS's product for Hopper, as core/hopper_gemm.h wants it: instantiated in a file for
// each kind of operands.
//
// 168 registers, no spills; 1 block a multiprocessor.
#pragma once

#include <cutlass/cutlass.h>

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <type_traits>

#include "core/hopper_gemm.h"

namespace jax_overlap {

template <class T, bool kTransposed>
struct HopperGemm {
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_64>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using Rows = cutlass::layout::RowMajor;
  using WLayout = std::conditional_t<kTransposed, cutlass::layout::ColumnMajor, Rows>;
  static constexpr int kAlign = 16 / sizeof(T);

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, T, Rows, kAlign, T, Rows,
      kAlign, cutlass::epilogue::TmaWarpSpecialized>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, T, Rows, kAlign, T, WLayout, kAlign,
      float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelTmaWarpSpecializedPingpong>::CollectiveOp;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<
      cute::Shape<int, int, int, int>, Mainloop, Epilogue, cutlass::gemm::PersistentScheduler>>;

  static std::string Launch(const HopperGemmCall& call, cudaStream_t stream) {
    const GemmKey& key = call.key;
    const auto strides = [&](int64_t ld, int64_t block) {
      return cute::make_stride(ld, cute::_1{}, key.batch == 1 ? 0 : block);
    };
    typename Gemm::Arguments args = {};
    args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    args.problem_shape = {static_cast<int>(key.m), static_cast<int>(key.n), static_cast<int>(key.k),
                          static_cast<int>(key.batch)};
    args.mainloop.ptr_A = static_cast<const T*>(call.x);
    args.mainloop.dA = strides(key.ldx, key.x_block);
    args.mainloop.ptr_B = static_cast<const T*>(call.w);
    if constexpr (kTransposed) {
      args.mainloop.dB = strides(key.ldw, key.w_block);
    } else {
      args.mainloop.dB = cute::make_stride(cute::_1{}, key.ldw, key.batch == 1 ? 0 : key.w_block);
    }
    args.epilogue.thread.alpha = 1;
    args.epilogue.thread.beta = key.accumulates != 0 ? 1 : 0;
    args.epilogue.ptr_C = static_cast<const T*>(call.c);
    args.epilogue.dC = strides(key.ldc, key.c_block);
    args.epilogue.ptr_D = static_cast<T*>(call.d);
    args.epilogue.dD = strides(key.ldd, key.d_block);
    args.hw_info.sm_count = call.multiprocessors;
    Gemm gemm;
    cutlass::Status status = Gemm::can_implement(args);
    if (status == cutlass::Status::kSuccess) status = gemm.initialize(args, nullptr, stream);
    if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
    if (status == cutlass::Status::kSuccess) return "";
    return std::string("CUTLASS failed: ") + cutlass::cutlassGetStatusString(status);
  }
};

}  // namespace jax_overlap
