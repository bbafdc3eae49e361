// Large slots that all call sites of a team share, and the kernels that pass them on.
//
// A product stores at addresses that are fixed when it is launched, so slots cannot be used
// in turn as in ops/psum.h. There are two sets of them (halves). Each has an epoch, which
// counts its uses, and for each pair of ranks
//
//   arrived   of the source, here:  epoch and call for which the slot here is filled
//   ready     of the owner, there:  epoch up to which its slots were read
//   revoked   of the source, here:  not 0 once it has failed
//   telling   here:                 what the copy engine takes to `arrived` of a peer
//
//        rank a                                          rank b
//   Begin  waits for ready of all >= epoch
//          products, copies ------------------------------> slot a
//   Arrive ------------------------------------------------> arrived a = epoch + 1, call
//                                                          Wait for it; reads slot a
//          ready b = epoch + 1 <---------------------------- End; epoch + 1
//
// All of them are one block; the large kernels in between never wait for long
// (core/hopper_scatter.h), so no multiprocessor is held by a wait that its own producers need.
// Finish adds what such a kernel has left, in many blocks, of which the last one is End. Which
// calls use the slots, and in which order, has to be the same on all ranks, and one after the
// other on each: a call says what it is (24 bits) where it arrives, and a word tells whether
// another one is under way.
//
// After a wait in vain a rank cannot keep its products from overwriting what a peer may
// still read. So it first revokes, for good, what it sends: a peer looks at that after it
// has read, and fails as well. Its result is then NaN, as that of all later calls.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/gpu_channel.h"

namespace jax_overlap {

struct ExchangeHalf {
  Word* epoch;
  Word* arrived;  // [source]
  Word* ready;    // [owner]
  Word* telling;
  char* slots;  // [for rank][slot_bytes]
};

// What is at the same places of all heaps, from a channel's beginning on.
struct ExchangeLayout {
  static constexpr int kHalves = 2;

  Word* broken;
  Word* revoked;  // [source]
  ExchangeHalf half[kHalves];
  size_t slot_bytes;

  // In `bytes` that begin at `base`; slot_bytes is 0 if that is too little.
  static ExchangeLayout Carve(char* base, int ranks, size_t bytes);
};

constexpr int kExchangeCallBits = 24;
constexpr uint64_t kExchangeCallMask = (1 << kExchangeCallBits) - 1;
constexpr int kMostResults = 8;  // of a call that are filled when it has failed

struct ExchangeCall {
  GpuChannel channel;
  ExchangeLayout layout;
  uint64_t call;  // of kExchangeCallMask; what this call is, the same on all ranks
  int32_t* busy;  // of the device
  struct Result {
    void* data;
    size_t bytes;
  } results[kMostResults];
};

// Each of them but CopyArrival, which is for one peer, and Finish launches one block. `peer`: -1
// is all of them. From Hopper on they are launched before the kernel ahead of them in the stream
// is through, and wait for that one first: this saves the time of a launch.
cudaError_t LaunchBegin(const ExchangeCall& call, int half, bool first, cudaStream_t stream);
cudaError_t LaunchArrive(const ExchangeCall& call, int half, int peer, cudaStream_t stream);
// The same as Arrive for what was copied on this stream, by the copy engine, whose copies on a
// stream come one after the other: a kernel beside a product may have to wait for a
// multiprocessor until that ends.
cudaError_t CopyArrival(const ExchangeCall& call, int half, int peer, cudaStream_t stream);
// Arrive and Wait, of all, in one.
cudaError_t LaunchArriveAndWait(const ExchangeCall& call, int half, cudaStream_t stream);
cudaError_t LaunchWait(const ExchangeCall& call, int half, int peer, cudaStream_t stream);
cudaError_t LaunchEnd(const ExchangeCall& call, int half, bool last, cudaStream_t stream);

// A matrix of `blocks` times [rows, cols].
struct SumShape {
  int64_t blocks, rows, cols;
  const char* slots;  // element 0 of the first rank's
  size_t slot_bytes;
  int ranks;
  int64_t block, ld;  // in a slot, elements
  void* out;
  int64_t out_block, out_ld;  // elements
};
// out = the sum of the slots in rank order, by T (core/dtype.h).
template <class T>
cudaError_t LaunchSum(const SumShape& shape, int max_blocks, cudaStream_t stream);

// The same for some tiles only: those with a mark, of [blocks][tiles of rows][tiles of columns].
// All rows begin at 16 bytes. And End, once all is added.
struct TileSumShape {
  SumShape all;
  const uint8_t* marks;
  int tile;           // rows, and columns
  uint32_t* through;  // blocks; counts round
};
template <class T>
cudaError_t LaunchFinish(const ExchangeCall& call, int half, bool last, const TileSumShape& shape,
                         int max_blocks, cudaStream_t stream);

// To be loaded before any runs.
std::vector<const void*> ExchangeKernels();

}  // namespace jax_overlap
