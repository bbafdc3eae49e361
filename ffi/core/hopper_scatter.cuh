// CUTLASS's product for Hopper with the tiles of two parts, as core/hopper_scatter.h wants it:
// instantiated in a file for each kind of operands.
#pragma once

// Kernels may be launched before those ahead of them are through.
#define CUTLASS_ENABLE_GDC_FOR_SM90

#include <cutlass/cutlass.h>

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <type_traits>

#include "core/exchange.h"
#include "core/hopper_scatter.h"
#include "core/mutants.h"
#include "core/schedule.h"

namespace jax_overlap {

// A problem of L matrices is L/2 of the peer's part and as many of the own.
template <class Problem>
CUTLASS_HOST_DEVICE auto HalfOf(const Problem& p) {
  return cute::make_shape(cute::get<0>(p), cute::get<1>(p), cute::get<2>(p), cute::get<3>(p) / 2);
}
template <class Coord>
CUTLASS_DEVICE auto MatrixAt(const Coord& c, int matrix) {
  return cute::make_coord(cute::get<0>(c), cute::get<1>(c), cute::get<2>(c), matrix);
}

// Loads the tiles of x and w of the part that a matrix is of.
template <class Base>
class ScatterMainloop : public Base {
 public:
  struct Arguments {
    typename Base::Arguments peer, own;
  };
  struct Params {
    typename Base::Params peer, own;
    uint32_t tma_transaction_bytes;
  };

  template <class Problem>
  static Params to_underlying_arguments(const Problem& problem, const Arguments& args,
                                        void* workspace) {
    const auto half = HalfOf(problem);
    const auto own = Base::to_underlying_arguments(half, args.own, workspace);
    return {Base::to_underlying_arguments(half, args.peer, workspace), own,
            own.tma_transaction_bytes};
  }
  template <class Problem>
  static bool can_implement(const Problem& problem, const Arguments& args) {
    const auto half = HalfOf(problem);
    return Base::can_implement(half, args.peer) && Base::can_implement(half, args.own);
  }
  CUTLASS_DEVICE static void prefetch_tma_descriptors(const Params& params) {
    Base::prefetch_tma_descriptors(params.peer);
    Base::prefetch_tma_descriptors(params.own);
  }
  template <class Problem>
  CUTLASS_DEVICE auto load_init(const Problem& problem, const Params& params) const {
    const auto half = HalfOf(problem);
    const auto peer = Base::load_init(half, params.peer), own = Base::load_init(half, params.own);
    return cute::make_tuple(cute::get<0>(peer), cute::get<1>(peer), cute::get<0>(own),
                            cute::get<1>(own), cute::get<3>(half));
  }
  template <class Pipeline, class State, class Inputs, class Coord, class Iterator, class Storage>
  CUTLASS_DEVICE void load(const Params& params, Pipeline pipeline, State state,
                           const Inputs& inputs, const Coord& coord, Iterator iterator, int count,
                           int thread, uint32_t rank, Storage& storage) {
    const int matrix = cute::get<3>(coord), half = cute::get<4>(inputs);
    if (matrix < half) {
      Base::load(params.peer, pipeline, state,
                 cute::make_tuple(cute::get<0>(inputs), cute::get<1>(inputs)), coord, iterator,
                 count, thread, rank, storage);
    } else {
      Base::load(params.own, pipeline, state,
                 cute::make_tuple(cute::get<2>(inputs), cute::get<3>(inputs)),
                 MatrixAt(coord, matrix - half), iterator, count, thread, rank, storage);
    }
  }
  template <class Pipeline, class State, class Sums, class Storage>
  CUTLASS_DEVICE void mma(Pipeline pipeline, State state, Sums& sums, int count, int thread,
                          Storage& storage, const Params& params) {
    Base::mma(pipeline, state, sums, count, thread, storage, params.own);
  }
};

// An epilogue whose c and d are in shared memory of their own: they are not of the same tile.
template <class E>
struct Separate;
template <int kC, int kD, int kFragment, bool kReuse, bool kDelay, class... Rest>
struct Separate<cutlass::epilogue::collective::CollectiveEpilogue<
    cutlass::epilogue::Sm90TmaWarpSpecialized<kC, kD, kFragment, kReuse, kDelay>, Rest...>> {
  using type = cutlass::epilogue::collective::CollectiveEpilogue<
      cutlass::epilogue::Sm90TmaWarpSpecialized<kC, kD, kFragment, false, false>, Rest...>;
};

// Stores tiles of the peer's part there, and own ones as the result or, where there is nothing
// to add yet, in the own slot.
template <class Base>
class ScatterEpilogue : public Base {
 public:
  using LoadPipeline = typename Base::LoadPipeline;
  using LoadPipelineState = typename Base::LoadPipelineState;
  using StorePipeline = typename Base::StorePipeline;
  using StorePipelineState = typename Base::StorePipelineState;
  static constexpr int kLoads = Base::get_load_pipe_increment(typename Base::CtaTileMNK{});

  struct Arguments {
    typename Base::Arguments peer, own, slot;
    HopperScatterFlags flags;
  };
  struct Params {
    typename Base::Params peer, own, slot;
    HopperScatterFlags flags;
    uint32_t peer_tiles;  // known with the scheduler's parameters
    uint32_t tiles_m, tiles_n;
    uint32_t tma_transaction_bytes;
  };
  // Whether c has come, by the stage of a tile's first load.
  struct TensorStorage {
    typename Base::TensorStorage base;
    int adds[LoadPipeline::Stages];
  };
  struct SharedStorage {
    TensorStorage tensors;
    typename Base::PipelineStorage pipeline;
  };

  template <class Problem>
  static Params to_underlying_arguments(const Problem& problem, const Arguments& args,
                                        void* workspace) {
    const auto half = HalfOf(problem);
    const auto own = Base::to_underlying_arguments(half, args.own, workspace);
    const auto [m, n, k, batch] = half;
    const auto tiles_m = static_cast<uint32_t>(CeilDiv(m, kScatterTile));
    const auto tiles_n = static_cast<uint32_t>(CeilDiv(n, kScatterTile));
    return {Base::to_underlying_arguments(half, args.peer, workspace),
            own,
            Base::to_underlying_arguments(half, args.slot, workspace),
            args.flags,
            0,
            tiles_m,
            tiles_n,
            own.tma_transaction_bytes};
  }
  template <class Problem>
  static bool can_implement(const Problem& problem, const Arguments& args) {
    const auto half = HalfOf(problem);
    return Base::can_implement(half, args.peer) && Base::can_implement(half, args.own) &&
           Base::can_implement(half, args.slot);
  }
  template <class Problem>
  static size_t get_workspace_size(const Problem&, const Arguments&) {
    return 0;
  }
  template <class Problem>
  static cutlass::Status initialize_workspace(const Problem&, const Arguments&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }
  CUTLASS_DEVICE static void prefetch_tma_descriptors(const Params& params) {
    Base::prefetch_tma_descriptors(params.peer);
    Base::prefetch_tma_descriptors(params.own);
  }

  CUTLASS_HOST_DEVICE ScatterEpilogue(const Params& params, TensorStorage& storage)
      : Base(params.own, storage.base), params_(params), patience_ns_(params.flags.patience_ns) {}

  // By the warp that loads c. The stages are counted for every tile, also where there is none.
  template <class Problem, class Tile, class Coord, class Mma>
  CUTLASS_DEVICE auto load(LoadPipeline pipeline, LoadPipelineState state, const Problem& problem,
                           Tile tile, const Coord& coord, Mma mma, int thread,
                           TensorStorage& storage, int subtile = -1) {
    const int half = cute::get<3>(problem) / 2, matrix = cute::get<3>(coord) - half;
    if (matrix >= 0) {
      pipeline.producer_acquire(state);
      const bool adds = Adds(coord, matrix);
      if (cutlass::canonical_lane_idx() == 0) storage.adds[state.index()] = adds;
      __syncwarp();
      if (adds) {
        return Base::load(pipeline, state, HalfOf(problem), tile, MatrixAt(coord, matrix), mma,
                          thread, storage.base, subtile);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      pipeline.producer_acquire(state);
      pipeline.producer_commit(state);
      ++state;
    }
    return state;
  }

  template <class Problem, class Tile, class Coord, class Engine, class Layout, class Mma>
  CUTLASS_DEVICE auto store(LoadPipeline load_pipeline, LoadPipelineState load_state,
                            StorePipeline store_pipeline, StorePipelineState store_state,
                            const Problem& problem, Tile tile, const Coord& coord,
                            cute::Tensor<Engine, Layout> accumulators, Mma mma, int thread,
                            TensorStorage& storage, int subtile = -1) {
    const int half = cute::get<3>(problem) / 2, at = cute::get<3>(coord);
    const bool own = at >= half;
    const auto where = MatrixAt(coord, own ? at - half : at);
    load_pipeline.consumer_wait(load_state);
    if (own && storage.adds[load_state.index()] != 0) {
      return Base::store(load_pipeline, load_state, store_pipeline, store_state, HalfOf(problem),
                         tile, where, accumulators, mma, thread, storage.base, subtile);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      load_pipeline.consumer_wait(load_state);
      load_pipeline.consumer_release(load_state);
      ++load_state;
    }
    Base there(own ? params_.slot : params_.peer, storage.base);
    auto states =
        there.store(load_pipeline, load_state, store_pipeline, store_state, HalfOf(problem), tile,
                    where, accumulators, mma, thread, storage.base, subtile);
    if (!own && thread / cutlass::NumThreadsPerWarp == 0) TellIfLast();
    // No loads are left to be counted.
    return cute::make_tuple(load_state, cute::get<1>(states));
  }

  CUTLASS_DEVICE auto load_tail(LoadPipeline pipeline, LoadPipelineState state) {
    return Base::load_tail(pipeline, state);
  }

 private:
  static CUTLASS_DEVICE uint64_t Nanoseconds() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
  }
  static CUTLASS_DEVICE uint64_t Acquired(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }

  // Whether what the peer has sent is here, for TMA. Marks the tile if not.
  template <class Coord>
  CUTLASS_DEVICE bool Adds(const Coord& coord, int matrix) {
    bool adds = false;
    if (cutlass::canonical_lane_idx() == 0) {
      const HopperScatterFlags& flags = params_.flags;
      const uint64_t wanted = Acquired(flags.telling);
      const auto look = [&] {
        const uint64_t seen = Acquired(flags.arrived);
        adds = seen >= wanted && ((seen ^ wanted) & kExchangeCallMask) == 0;
      };
      if (wanted != 0) look();
      if (!adds && wanted != 0) {
        const uint64_t begin = Nanoseconds();
        uint64_t passed = 0;
        while (!adds && passed < patience_ns_) {
          __nanosleep(500);  // looks of all multiprocessors slow down what comes
          look();
          passed = Nanoseconds() - begin;
        }
        patience_ns_ -= Min(passed, patience_ns_);
      }
      if (JO_MUTANT("adds_too_early")) adds = true;
      const uint32_t m = cute::get<0>(coord), n = cute::get<1>(coord);
      if (m < params_.tiles_m && n < params_.tiles_n) {
        const int64_t tile = (static_cast<int64_t>(matrix) * params_.tiles_m + m) * params_.tiles_n;
        flags.marks[tile + n] = !adds && !JO_MUTANT("no_marks");
      }
    }
    __syncwarp();
    adds = __shfl_sync(0xffffffffu, adds, 0);
    asm volatile("fence.proxy.async.global;" ::: "memory");
    return adds;
  }

  // By the warp that has issued the stores of a tile of the peer's part: they are done, and if it
  // was the last tile, the peer is told.
  CUTLASS_DEVICE void TellIfLast() const {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async.global;" ::: "memory");
    __syncwarp();
    if (cutlass::canonical_lane_idx() != 0) return;
    const HopperScatterFlags& flags = params_.flags;
    __threadfence_system();
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(flags.done), "r"(params_.peer_tiles - 1)
                 : "memory");
    if (before + 1 != params_.peer_tiles) return;
    const uint64_t telling = Acquired(flags.telling);
    __threadfence_system();
    if (telling == 0) return;
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flags.arrived_there), "l"(telling)
                 : "memory");
  }

  const Params& params_;
  uint64_t patience_ns_;
};

template <class T, bool kTransposed>
struct HopperScatter {
  using Tile = cute::Shape<cute::Int<kScatterTile>, cute::Int<kScatterTile>, cute::_64>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using Rows = cutlass::layout::RowMajor;
  using WLayout = std::conditional_t<kTransposed, cutlass::layout::ColumnMajor, Rows>;
  static constexpr int kAlign = 16 / sizeof(T);
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;

  // beta * c + the product, which is rounded first, as what has come is.
  using Rounded = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::epilogue::thread::Identity, T, float, kRound>,
      cutlass::epilogue::fusion::Sm90AccFetch>;
  using Sum = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::homogeneous_multiply_add, T, float, kRound>,
      cutlass::epilogue::fusion::Sm90ScalarBroadcast<float,
                                                     cute::Stride<cute::_0, cute::_0, int64_t>>,
      cutlass::epilogue::fusion::Sm90SrcFetch<T>, Rounded>;
  using Epilogue =
      ScatterEpilogue<typename Separate<typename cutlass::epilogue::collective::CollectiveBuilder<
          cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
          cutlass::epilogue::collective::EpilogueTileAuto, float, float, T, Rows, kAlign, T, Rows,
          kAlign, cutlass::epilogue::TmaWarpSpecialized, Sum>::CollectiveOp>::type>;
  using Mainloop = ScatterMainloop<typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, T, Rows, kAlign, T, WLayout, kAlign,
      float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelTmaWarpSpecializedPingpong>::CollectiveOp>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                      Epilogue, cutlass::gemm::PersistentScheduler>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static std::string Load() {
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, cutlass::device_kernel<Kernel>);
    return status == cudaSuccess ? "" : cudaGetErrorString(status);
  }

  static std::string Launch(const HopperScatterCall& call, cudaStream_t stream) {
    const GemmKey& key = call.own;
    const auto strides = [&](int64_t ld, int64_t block) {
      return cute::make_stride(ld, cute::_1{}, key.batch == 1 ? 0 : block);
    };
    typename Gemm::Arguments args = {};
    args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    args.problem_shape = {static_cast<int>(key.m), static_cast<int>(key.n), static_cast<int>(key.k),
                          static_cast<int>(2 * key.batch)};
    const auto read = [&](auto& to, const GemmKey& of, const void* x, const void* w) {
      to.ptr_A = static_cast<const T*>(x);
      to.dA = strides(of.ldx, of.x_block);
      to.ptr_B = static_cast<const T*>(w);
      if constexpr (kTransposed) {
        to.dB = strides(of.ldw, of.w_block);
      } else {
        to.dB = cute::make_stride(cute::_1{}, of.ldw, of.batch == 1 ? 0 : of.w_block);
      }
    };
    read(args.mainloop.peer, call.peer, call.x_peer, call.w_peer);
    read(args.mainloop.own, call.own, call.x_own, call.w_own);
    // children of beta * c + product: beta, c, product
    const auto write = [&](auto& to, float beta, const void* c, void* d, auto d_strides) {
      to.thread = {{{beta}, {nullptr}, {}}, {}, {{}, {}}, {}};
      to.ptr_C = static_cast<const T*>(c);
      to.dC = strides(call.own.ldc, call.own.c_block);
      to.ptr_D = static_cast<T*>(d);
      to.dD = d_strides;
    };
    write(args.epilogue.peer, 0, call.c, call.d_peer, strides(call.peer.ldd, call.peer.d_block));
    write(args.epilogue.own, 1, call.c, call.d_own, strides(call.own.ldd, call.own.d_block));
    write(args.epilogue.slot, 0, call.c, call.slot, strides(call.own.ldc, call.own.c_block));
    args.epilogue.flags = call.flags;
    args.hw_info.sm_count = call.multiprocessors;
    // Tiles of several columns one after the other find more of x in the cache; where no tiles
    // have to be added for that.
    const int64_t tiles_m = CeilDiv(key.m, kScatterTile), tiles_n = CeilDiv(key.n, kScatterTile);
    args.scheduler.max_swizzle_size = 1;
    for (const int size : {2, 4}) {
      if (tiles_m % (2 * size) == 0 && tiles_n % size == 0) args.scheduler.max_swizzle_size = size;
    }
    Gemm gemm;
    cutlass::Status status = Gemm::can_implement(args);
    // Launched before the kernel ahead of it is through, for which it waits.
    if (status == cutlass::Status::kSuccess) status = gemm.initialize(args, nullptr, stream);
    if (status == cutlass::Status::kSuccess) {
      typename Kernel::Params params = gemm.params();
      // Also those that are there to fill a cluster.
      params.epilogue.peer_tiles = static_cast<uint32_t>(params.scheduler.blocks_per_problem_ / 2);
      status = Gemm::run(params, stream, nullptr, true);
    }
    if (status == cutlass::Status::kSuccess) return "";
    return std::string("CUTLASS failed: ") + cutlass::cutlassGetStatusString(status);
  }
};

}  // namespace jax_overlap
