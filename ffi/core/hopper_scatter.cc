#include "core/hopper_scatter.h"

#include "core/hopper_gemm.h"

namespace jax_overlap {

bool HopperScatterTakes(const GemmKey& peer, const GemmKey& own, const cudaDeviceProp& device) {
  const bool alike = peer.m == own.m && peer.n == own.n && peer.k == own.k &&
                     peer.batch == own.batch && peer.transposed == own.transposed;
  // Pairs of tiles that are mostly full.
  const int64_t rows = static_cast<int64_t>(RoundUp(own.m, 2 * kScatterTile));
  return alike && rows * 4 <= own.m * 5 && own.in == GemmType::kBF16 && peer.accumulates == 0 &&
         own.accumulates != 0 && ScatterMarks(own) <= kMostScatterMarks &&
         HopperGemmTakes(peer, device) && HopperGemmTakes(own, device);
}

std::string LoadHopperScatter(const GemmKey& key) {
#ifdef JAX_OVERLAP_CUTLASS
  return key.transposed != 0 ? LaunchHopperScatterBF16T(nullptr, nullptr)
                             : LaunchHopperScatterBF16(nullptr, nullptr);
#else
  static_cast<void>(key);
  return "built without CUTLASS";
#endif
}

std::string LaunchHopperScatter(const HopperScatterCall& call, cudaStream_t stream) {
#ifdef JAX_OVERLAP_CUTLASS
  return call.own.transposed != 0 ? LaunchHopperScatterBF16T(&call, stream)
                                  : LaunchHopperScatterBF16(&call, stream);
#else
  static_cast<void>(call);
  static_cast<void>(stream);
  return "built without CUTLASS";
#endif
}

}  // namespace jax_overlap
