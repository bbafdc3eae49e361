// A channel as the kernels of a GPU see it: the same memory at every rank, at an address
// of this device, and where to say that a call has failed.
//
// It begins with a line that says whether a failure was told; then each block of a grid has
// a part of its own, with a head and what the algorithm needs. Which channel is the n-th of its
// pool is found out by every rank for itself: so the first call on a channel meets the others in
// the pool's directory, where each rank leaves what it takes the channel for, and fails if they do
// not agree.
#pragma once

#include <cstdint>

#include "core/channel.h"
#include "core/schedule.h"
#include "core/status.h"

namespace jax_overlap {

constexpr int kMaxGpuRanks = 64;  // of a team, as their addresses are arguments
constexpr int kGpuThreads = 512;  // of a block, at most

// What the part of a block begins with. A part is done for once a call has failed on it:
// slots are reused on the strength of what was received before, so this rank could overwrite
// what a late peer still reads.
struct BlockHead {
  Word sequence;  // the last one; the line has room for more

  JO_HD int32_t* broken() { return reinterpret_cast<int32_t*>(&sequence.value + 1); }
};
static_assert(sizeof(BlockHead) == sizeof(Word), "a head is one line");

// Arguments of a kernel are read through a small cache that is cold when it starts: what
// every call needs comes first.
struct GpuChannel {
  char* own;  // where the channel begins in the own heap
  TeamShape shape;
  int64_t directory;       // bytes from the directory's words for this channel to the channel
  uint64_t limit_ns;       // of a wait
  uint64_t descriptor;     // what this rank takes the channel for; not 0
  Status* error;           // in mapped host memory
  const int32_t* stopped;  // there, too: something of this process has failed; may be null
  // Where the channel begins at each rank. A rank to which stores do not reach has the
  // number of its process in `pes`, and the address is that of the same place in the own
  // heap, as NVSHMEM wants it; others have -1.
  char* heaps[kMaxGpuRanks];
  int32_t pes[kMaxGpuRanks];

  static constexpr size_t kHeadBytes = sizeof(Word);  // before the parts of the blocks

  // The same place of the channel at a peer.
  template <class T>
  JO_HD T* At(T* mine, int peer) const {
    return reinterpret_cast<T*>(heaps[peer] + (reinterpret_cast<char*>(mine) - own));
  }

  // Where rank `to` hears from `from` before the first call.
  JO_HD uint64_t* Heard(int to, int from) const {
    return reinterpret_cast<uint64_t*>(heaps[to] - directory) + from;
  }

#if defined(__CUDACC__)
  // By all threads of a block. Block 0 says what the channel is; all compare.
  template <class Link>
  __device__ void Meet(Link& link) const {
    const int peer = threadIdx.x;  // a block has more threads than a team has ranks
    const bool meets = peer < shape.size && peer != shape.rank;
    if (meets && blockIdx.x == 0) {
      link.SignalAt(Heard(peer, shape.rank), peer, descriptor);
    }
    __syncthreads();
    if (meets) {
      const uint64_t* const theirs = Heard(shape.rank, peer);
      link.Wait(theirs, 1, {peer, kMeeting});
      const uint64_t seen = *reinterpret_cast<const volatile uint64_t*>(theirs);
      if (seen != descriptor && seen != 0) {
        link.Fail(kMismatch, descriptor, seen, {peer, kMeeting});
      }
    }
    __syncthreads();
  }

  // By one thread of a block in which a call has failed: the first failure of a channel is
  // the one that is told.
  __device__ void Tell(const Status& status) const {
    auto* const told = reinterpret_cast<int32_t*>(own);
    if (atomicCAS(told, 0, 1) == 0) Report(status);
  }
  // What the host has not looked at yet says more.
  __device__ void Report(const Status& status) const {
    if (*reinterpret_cast<const volatile int32_t*>(&error->failed) != kNone) return;
    Status fields = status;
    fields.failed = kNone;
    *error = fields;
    __threadfence_system();
    *reinterpret_cast<volatile int32_t*>(&error->failed) = status.failed;
  }
#endif

  static constexpr int kMeeting = -1;  // the step in which ranks meet
};

}  // namespace jax_overlap
