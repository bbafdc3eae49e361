// On Hopper, the two products of a reduce-scatter of two ranks in one kernel, by CUTLASS:
// that of the peer's part goes from its epilogue straight into the peer's slot, tile by tile,
// then the own one. No multiprocessor is idle between the two, and what is on its way to the
// peer is so while the own tiles are computed.
//
// The last block to finish the peer's part tells the peer. An own tile adds what the peer has
// sent, if that has come; if not, it goes to the own slot, with a mark, and is added by a
// kernel that comes after a wait (core/exchange.h). So no multiprocessor is held by a wait for
// a peer, but for a first while (patience_ns of each block in all), in which the last tiles
// of a peer that is as far as this rank come. Both ways have the same bits: the own product is
// rounded before it is added.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "core/gpu_gemm_key.h"
#include "core/schedule.h"

namespace jax_overlap {

// Rows and columns of what has one mark.
constexpr int kScatterTile = 128;
constexpr int64_t kMostScatterMarks = 1 << 18;

struct HopperScatterFlags {
  const uint64_t* telling;  // the word that says that a part is there; 0: tell nobody
  const uint64_t* arrived;  // here: that of the peer
  uint64_t* arrived_there;  // in the heap of the peer
  uint32_t* done;           // tiles of the peer's part; counts round
  uint8_t* marks;           // [batch][tiles of rows][tiles of columns]
  uint64_t patience_ns;
};

struct HopperScatterCall {
  // Products of one size, which only differ by where their matrices are; the own one adds c.
  const GemmKey &peer, &own;
  const void *x_peer, *w_peer;
  void* d_peer;  // in the peer's slot
  const void *x_own, *w_own, *c;
  void* d_own;
  void* slot;  // of the own part, as far apart as c
  HopperScatterFlags flags;
  int multiprocessors;
};

inline int64_t ScatterMarks(const GemmKey& key) {
  return key.batch * CeilDiv(key.m, kScatterTile) * CeilDiv(key.n, kScatterTile);
}

// Whether there is a kernel for it in this build, and `device` can run it.
bool HopperScatterTakes(const GemmKey& peer, const GemmKey& own, const cudaDeviceProp& device);
// Loads it, as it may not be while another kernel spins. An error text.
std::string LoadHopperScatter(const GemmKey& key);
// Launches it. An error text.
std::string LaunchHopperScatter(const HopperScatterCall& call, cudaStream_t stream);

// By whether w comes transposed: one a file, as each takes long to compile. Without a call
// they only load.
std::string LaunchHopperScatterBF16(const HopperScatterCall* call, cudaStream_t stream);
std::string LaunchHopperScatterBF16T(const HopperScatterCall* call, cudaStream_t stream);

}  // namespace jax_overlap
