// The link between ranks that are threads or fibres of one process.
//
// A heap is a piece of ordinary memory a rank. Since all ranks of a call have
// arrived before any of them runs, their operands are known too and can be read
// and written in place (kDirect); tests switch that off to run the staged form,
// which is the one that a GPU runs.
#pragma once

#include <chrono>

#include "core/link.h"
#include "core/status.h"
#include "core/waiter.h"

namespace jax_overlap {

template <bool Direct>
class HostLink {
 public:
  static constexpr bool kDirect = Direct;
  static constexpr bool kLoadsManyCells = false;
  using Clock = std::chrono::steady_clock;

  // `heaps`, `inputs` and `outputs` have one entry a rank and outlive the link.
  HostLink(int rank, int size, char* const* heaps, const void* const* inputs, void* const* outputs,
           Waiter& waiter, Clock::time_point deadline)
      : rank_(rank),
        size_(size),
        heaps_(heaps),
        inputs_(inputs),
        outputs_(outputs),
        waiter_(waiter),
        deadline_(deadline) {}

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool failed() const { return status_.failed != 0; }
  const Status& status() const { return status_; }

  template <class T>
  T* At(T* mine, int peer) const {
    return Moved(mine, heaps_[rank_], heaps_[peer]);
  }
  template <class T>
  const T* Input(const T* mine, int peer) const {
    return Moved(mine, inputs_[rank_], inputs_[peer]);
  }
  template <class T>
  T* Output(T* mine, int peer) const {
    return Moved(mine, outputs_[rank_], outputs_[peer]);
  }

  void StoreCell(Cell* mine, int peer, uint64_t data, uint32_t epoch) const {
    if (failed()) return;
    uint64_t* halves = reinterpret_cast<uint64_t*>(At(mine, peer));
    const uint64_t tag = static_cast<uint64_t>(epoch) << 32;
    __atomic_store_n(halves, (data & kLow) | tag, __ATOMIC_RELEASE);
    __atomic_store_n(halves + 1, (data >> 32) | tag, __ATOMIC_RELEASE);
  }
  uint64_t LoadCell(const Cell* mine, uint32_t epoch, Where where) {
    const uint64_t* halves = reinterpret_cast<const uint64_t*>(mine);
    return LoadHalf(halves, epoch, where) | LoadHalf(halves + 1, epoch, where) << 32;
  }

  void Signal(uint64_t* mine, int peer, uint64_t value) const {
    if (!failed()) __atomic_store_n(At(mine, peer), value, __ATOMIC_RELEASE);
  }
  void Wait(const uint64_t* mine, uint64_t value, Where where) {
    WaitFor([&] { return __atomic_load_n(mine, __ATOMIC_ACQUIRE); },
            [&](uint64_t seen) { return seen >= value; }, value, where);
  }

 private:
  static constexpr uint64_t kLow = 0xffffffffu;
  static constexpr int kPausesBetweenClockReads = 64;

  template <class T>
  static T* Moved(T* p, const void* from, const void* to) {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(from) +
                                reinterpret_cast<uintptr_t>(to));
  }

  uint64_t LoadHalf(const uint64_t* half, uint32_t epoch, Where where) {
    const uint64_t word = WaitFor([&] { return __atomic_load_n(half, __ATOMIC_ACQUIRE); },
                                  [&](uint64_t seen) { return seen >> 32 == epoch; }, epoch, where);
    return word & kLow;
  }

  template <class Load, class Arrived>
  uint64_t WaitFor(Load load, Arrived arrived, uint64_t expected, Where where) {
    uint64_t seen = load();
    for (int pauses = 1; !arrived(seen) && !failed(); seen = load(), ++pauses) {
      waiter_.Pause();
      if (pauses % kPausesBetweenClockReads == 0 && Clock::now() > deadline_) {
        status_ = {1, rank_, where.peer, where.step, expected, seen};
      }
    }
    return seen;
  }

  const int rank_;
  const int size_;
  char* const* const heaps_;
  const void* const* const inputs_;
  void* const* const outputs_;
  Waiter& waiter_;
  const Clock::time_point deadline_;
  Status status_ = {};
};

}  // namespace jax_overlap
