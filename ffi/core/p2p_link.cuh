// The link between GPUs whose memory is mapped into each other's address space:
// peers of one process over NVLink, or several ranks on one GPU.
//
// Stores to a peer are plain stores to its mapped heap. Flags are released and
// acquired at system scope, since the peer is another device. A cell is one
// 16-byte access, which arrives whole. Waits are bounded by the global timer,
// which all SMs share; the kernel reports the status and never traps.
#pragma once

#include "core/link.h"
#include "core/status.h"

namespace jax_overlap {

class P2pLink {
 public:
  static constexpr bool kDirect = false;

  // `heaps` has the address of every rank's heap, as this device sees it. `status` is
  // the block's, in shared memory: what one thread waits for in vain, all have missed.
  __device__ P2pLink(int rank, int size, char* const* heaps, uint64_t limit_ns, Status* status)
      : rank_(rank), size_(size), heaps_(heaps), deadline_(Now() + limit_ns), status_(status) {
    if (threadIdx.x == 0) *status = {};
    __syncthreads();
  }

  __device__ int rank() const { return rank_; }
  __device__ int size() const { return size_; }
  __device__ bool failed() const {
    return *reinterpret_cast<const volatile int32_t*>(&status_->failed) != 0;
  }

  template <class T>
  __device__ T* At(T* mine, int peer) const {
    return reinterpret_cast<T*>(heaps_[peer] + (reinterpret_cast<char*>(mine) - heaps_[rank_]));
  }
  // Peers' operands lie in XLA's pool, which is not mapped.
  template <class T>
  __device__ const T* Input(const T* mine, int) const {
    return mine;
  }
  template <class T>
  __device__ T* Output(T* mine, int) const {
    return mine;
  }

  __device__ void StoreCell(Cell* mine, int peer, uint64_t data, uint32_t epoch) const {
    if (failed()) return;
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(At(mine, peer)),
                 "r"(static_cast<uint32_t>(data)), "r"(epoch),
                 "r"(static_cast<uint32_t>(data >> 32))
                 : "memory");
  }
  __device__ uint64_t LoadCell(const Cell* mine, uint32_t epoch, Where where) {
    uint32_t data0, epoch0, data1, epoch1;
    do {
      asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(data0), "=r"(epoch0), "=r"(data1), "=r"(epoch1)
                   : "l"(mine)
                   : "memory");
    } while ((epoch0 != epoch || epoch1 != epoch) && !Expired(epoch, epoch0, where));
    return static_cast<uint64_t>(data1) << 32 | data0;
  }

  __device__ void Signal(uint64_t* mine, int peer, uint64_t value) const {
    if (failed()) return;
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(At(mine, peer)), "l"(value)
                 : "memory");
  }
  __device__ void Wait(const uint64_t* mine, uint64_t value, Where where) {
    uint64_t seen;
    do {
      asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(mine) : "memory");
    } while (seen < value && !Expired(value, seen, where));
  }

 private:
  static __device__ uint64_t Now() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
  }

  // Whether to stop waiting; keeps what was waited for when the limit passes.
  __device__ bool Expired(uint64_t expected, uint64_t seen, Where where) {
    if (failed()) return true;
    if (Now() < deadline_) return false;
    if (atomicCAS(&status_->failed, 0, 1) == 0) {
      status_->rank = rank_;
      status_->peer = where.peer;
      status_->step = where.step;
      status_->expected = expected;
      status_->seen = seen;
    }
    return true;
  }

  const int rank_;
  const int size_;
  char* const* const heaps_;
  const uint64_t deadline_;
  Status* const status_;
};

}  // namespace jax_overlap
