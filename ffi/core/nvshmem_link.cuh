// The link between processes, of one host or of several, over NVSHMEM.
//
// A peer whose heap is mapped here (NVLink, or ranks that share a GPU) is reached as over
// P2pLink, by plain stores. Any other is reached by puts: all threads gather a chunk's cells
// in the own heap, and the network takes them from there, while the threads go on.
//
//   this rank                                          the peer
//   pack(i), epoch -> staging[i]
//   sync; put of the chunk ---------- network -------> slot[i]: sees the epoch, reads
//                                                      .. all cells of the exchange ..
//   ready word >= sequence <--------- signal --------- has read
//   the next call packs into staging[i] again
//
// Nothing waits for a put to leave, and none has to be waited for: the peer cannot have read
// what has not come, and what has come was read from the staging. So the ready word, without
// which the next call writes nothing (ops/psum.h), frees the staging as it frees the slots.
// A retransmission after that can only repeat a packet that the receiver has had, and drops.
//
// A put keeps no order among its bytes, and needs none: each half of a cell has its own epoch,
// and eight aligned bytes arrive whole. Both ends have to be aligned, as NVSHMEM copies in
// pieces of 4 bytes otherwise: slots and staging start at cache lines, and a cell has 16 bytes.
//
// Waits are those of P2pLink, and have its limit. NVSHMEM's own, for room in its queues to
// the network, have none; a rank enters them only with puts, and puts only while nothing is
// overdue.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include "core/p2p_link.cuh"
#include "core/threads.h"

namespace jax_overlap {

class NvshmemLink : public P2pLink {
 public:
  // NVSHMEM's code takes 200 registers a thread and more: they do not suffice for more threads.
  static constexpr int kMaxThreads = 256;

  using P2pLink::P2pLink;

  __device__ bool mapped(int peer) const { return pe(peer) < 0; }
  __device__ int pe(int peer) const { return channel().pes[peer]; }

  __device__ void Signal(uint64_t* mine, int peer, uint64_t value) const {
    SignalAt(At(mine, peer), peer, value);
  }
  __device__ void SignalAt(uint64_t* theirs, int peer, uint64_t value) const {
    if (mapped(peer)) return P2pLink::SignalAt(theirs, peer, value);
    if (failed()) return;
    // Releases as the store of P2pLink does, before the request is handed to the network.
    __threadfence_system();
    nvshmemx_signal_op(theirs, value, NVSHMEM_SIGNAL_SET, pe(peer));
  }
};

// By all threads of a block, none of which may be elsewhere.
template <class Pack>
__device__ void SendCells(const BlockThreads& threads, NvshmemLink& link, Cell* staging, Cell* slot,
                          int peer, Slice range, uint32_t epoch, Pack pack) {
  static_assert(alignof(Cell) == 16, "a put of aligned cells moves at least 8 bytes at once");
  const bool mapped = link.mapped(peer);
  SendCells<BlockThreads, NvshmemLink>(threads, link, nullptr, mapped ? slot : staging,
                                       mapped ? peer : link.rank(), range, epoch, pack);
  if (mapped) return;
  // A sync that also asks whether a thread has waited in vain: then it has packed what did not
  // come, and nothing of the chunk may leave. All get the same answer: the put is for all.
  if (__syncthreads_or(link.failed())) return;
  nvshmemx_putmem_nbi_block(link.At(slot, peer) + range.begin, staging + range.begin,
                            range.size() * sizeof(Cell), link.pe(peer));
}

}  // namespace jax_overlap
