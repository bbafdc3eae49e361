// The link between GPUs whose memory is mapped into each other's address space:
// peers of one process over NVLink, or several ranks on one GPU.
//
// Stores to a peer are plain stores to its mapped heap. Flags are released and
// acquired at system scope, since the peer is another device. A cell is one
// 16-byte access, which arrives whole. Waits are bounded by the global timer,
// which all SMs share; the kernel reports the status and never traps.
#pragma once

#include "core/gpu_channel.h"
#include "core/link.h"
#include "core/status.h"

namespace jax_overlap {

class P2pLink {
 public:
  static constexpr bool kDirect = false;
  static constexpr bool kLoadsManyCells = true;
  static constexpr int kMaxThreads = kGpuThreads;  // of a block

  // `status` is the block's, in shared memory: what one thread waits for in vain, all
  // have missed.
  __device__ P2pLink(const GpuChannel& channel, Status* status)
      : channel_(channel), status_(status) {
    if (threadIdx.x == 0) *status = {};
    __syncthreads();
  }

  __device__ int rank() const { return channel_.shape.rank; }
  __device__ int size() const { return channel_.shape.size; }
  __device__ bool failed() const {
    return *reinterpret_cast<const volatile int32_t*>(&status_->failed) != 0;
  }

  template <class T>
  __device__ T* At(T* mine, int peer) const {
    return channel_.At(mine, peer);
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
    Cell cell;
    do {
      cell = Read(mine);
    } while (!Carries(cell, epoch) && !Expired(epoch, cell.epoch0, where));
    return Data(cell);
  }
  // The cells cell_of(k), k < kCount, whose bit in `wanted` is set, of peers peer_of(k).
  template <int kCount, class CellOf, class PeerOf>
  __device__ void LoadCells(CellOf cell_of, PeerOf peer_of, uint32_t wanted, uint32_t epoch,
                            uint64_t (&data)[kCount]) {
    uint32_t seen = 0;
    do {
      Cell cells[kCount];
      JO_UNROLL
      for (int k = 0; k < kCount; ++k) {
        if (wanted >> k & 1) cells[k] = Read(cell_of(k));
      }
      JO_UNROLL
      for (int k = 0; k < kCount; ++k) {
        if (!(wanted >> k & 1)) continue;
        seen = cells[k].epoch0;
        if (!Carries(cells[k], epoch)) continue;
        data[k] = Data(cells[k]);
        wanted &= ~(1u << k);
      }
    } while (wanted != 0 && !Expired(epoch, seen, {peer_of(__ffs(wanted) - 1), 0}));
  }

  __device__ void Signal(uint64_t* mine, int peer, uint64_t value) const {
    SignalAt(At(mine, peer), peer, value);
  }
  // A flag, whatever has failed.
  static __device__ uint64_t Acquired(const uint64_t* flag) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
  }
  static __device__ void StoreReleased(uint64_t* flag, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
  }

  // `theirs` is the peer's.
  __device__ void SignalAt(uint64_t* theirs, int, uint64_t value) const {
    if (failed()) return;
    StoreReleased(theirs, value);
  }
  __device__ void Wait(const uint64_t* mine, uint64_t value, Where where) {
    uint64_t seen;
    do {
      seen = Acquired(mine);
    } while (seen < value && !Expired(value, seen, where));
  }
  // The same, unless the peer says that it has failed and nothing will come; what was seen. It
  // mostly is there: one look, which takes most of a microsecond, has to do then.
  __device__ uint64_t WaitUnless(const uint64_t* revoked, const uint64_t* mine, uint64_t value,
                                 Where where) {
    for (uint64_t gone = 0;; gone = Acquired(revoked)) {
      const uint64_t seen = Acquired(mine);
      if (seen >= value || Expired(value, seen, where)) return seen;
      if (gone == 0) continue;
      Fail(kPeerFailed, value, seen, where);
      return seen;
    }
  }

  // The first failure of a block is kept.
  __device__ void Fail(Failure failure, uint64_t expected, uint64_t seen, Where where) {
    if (atomicCAS(&status_->failed, kNone, failure) != kNone) return;
    status_->rank = rank();
    status_->peer = where.peer;
    status_->step = where.step;
    status_->expected = expected;
    status_->seen = seen;
  }

  __device__ const Status* status() const { return status_; }

 protected:
  __device__ const GpuChannel& channel() const { return channel_; }

 private:
  static constexpr uint32_t kLooksBetweenClockReads = 64;
  static constexpr uint64_t kMillisecond = 1000 * 1000;

  static __device__ Cell Read(const Cell* mine) {
    Cell cell;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(cell.data0), "=r"(cell.epoch0), "=r"(cell.data1), "=r"(cell.epoch1)
                 : "l"(mine)
                 : "memory");
    return cell;
  }
  static __device__ bool Carries(const Cell& cell, uint32_t epoch) {
    return cell.epoch0 == epoch && cell.epoch1 == epoch;
  }
  static __device__ uint64_t Data(const Cell& cell) {
    return static_cast<uint64_t>(cell.data1) << 32 | cell.data0;
  }

  static __device__ uint64_t Now() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
  }

  // Whether to stop waiting; keeps what was waited for when the limit passes. The timer is
  // slow to read: now and then will do, and most waits are over before.
  __device__ bool Expired(uint64_t expected, uint64_t seen, Where where) {
    if (failed()) return true;
    if (++looks_ % kLooksBetweenClockReads != 0) return false;
    const uint64_t now = Now();
    if (start_ == 0) start_ = now;
    if (now - start_ < kMillisecond) return false;
    // Where one wait was in vain all others would be, one after the other.
    if (channel_.stopped != nullptr && *static_cast<const volatile int32_t*>(channel_.stopped)) {
      Fail(kBroken, expected, seen, where);
      return true;
    }
    if (now - start_ < channel_.limit_ns) return false;
    Fail(kExpired, expected, seen, where);
    return true;
  }

  const GpuChannel& channel_;
  uint64_t start_ = 0;  // the first reading of the clock
  uint32_t looks_ = 0;
  Status* const status_;
};

}  // namespace jax_overlap
