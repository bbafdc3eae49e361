// Reduce-scatter and all-gather among ranks that address each other's memory: the
// steps inside a node, of which the ops are made.
#pragma once

#include <cstring>

#include "core/channel.h"
#include "core/link.h"
#include "core/schedule.h"
#include "core/sum.h"
#include "core/threads.h"

namespace jax_overlap {

// Slices start at cache lines, so that no line is written by two ranks.
template <class T>
constexpr size_t kSliceAlign = 64 / sizeof(T);

// Stores `n` elements at `slot` of the peer's heap, and then says so: the signal
// releases what all threads of this rank have stored before the sync. After a wait in
// vain nothing is stored: the peer may still read what was sent last time.
template <class T, class Threads, class Link>
JO_HD void SendSlice(const Threads& threads, Link& link, const T* from, size_t n, T* slot,
                     Word* flag, int peer, uint64_t sequence) {
  const bool too_early = JO_MUTANT("flag_before_data");
  if (too_early && threads.index() == 0) link.Signal(&flag->value, peer, sequence);
  if (MayStore(link)) Copy(threads, from, n, link.At(slot, peer));
  threads.sync();
  if (!too_early && threads.index() == 0) link.Signal(&flag->value, peer, sequence);
}

// A reduce-scatter and an all-gather among `count` consecutive ranks from `first`,
// where each owns the slice of its place. Staged, they go through slots and flags:
//
//   rank a: in[slice b] -> slot a of b, flag        b: waits for all flags, adds
//   rank b: sum[slice b] -> gathered[slice b] of a, flag      a: waits, copies out
//
// Direct, a rank reads its slice of all inputs and writes it to all outputs; where
// nothing happens in between (AllReduce), piece by piece, out of the cache.
template <class T>
struct GroupSteps {
  T* scattered;         // [2][source][slice]
  T* gathered;          // [2][chunk]
  Word* scatter_flags;  // [source]
  Word* gather_flags;   // [source]
  size_t slice_capacity;
  size_t chunk_capacity;

  // Outputs, of all ranks together, of this size do not stay in the caches anyway.
  static constexpr size_t kStreamFromBytes = 8 << 20;

  static JO_HD GroupSteps Carve(Carver& carver, int count, size_t capacity, bool direct) {
    const size_t slice = MaxSlice(capacity, count, kSliceAlign<T>);
    if (direct) return {nullptr, nullptr, nullptr, nullptr, slice, capacity};
    GroupSteps steps;
    steps.scattered = carver.Take<T>(2 * count * slice);
    steps.gathered = carver.Take<T>(2 * capacity);
    steps.scatter_flags = carver.Take<Word>(count);
    steps.gather_flags = carver.Take<Word>(count);
    steps.slice_capacity = slice;
    steps.chunk_capacity = capacity;
    return steps;
  }

  template <class Threads, class Link>
  JO_HD void AllReduce(const Threads& threads, Link& link, int first, int count, uint64_t sequence,
                       const T* in, size_t n, T* out) const {
    const Slice own = SliceOf(n, count, link.rank() - first, kSliceAlign<T>);
    if constexpr (Link::kDirect) {
      constexpr size_t kPiece = 8192 / sizeof(T);
      const bool stream = n * sizeof(T) * count >= kStreamFromBytes;
      for (size_t begin = own.begin; begin < own.end; begin += kPiece) {
        const size_t m = Min(kPiece, own.end - begin);
        SumRows<T>(
            threads, count, [&](int source) { return link.Input(in, first + source) + begin; }, m,
            out + begin);
        for (int k = 1; k < count; ++k) {
          const int peer = first + Rotated(link.rank() - first, k, count);
          T* const target = link.Output(out, peer) + begin;
          stream ? StreamCopy(out + begin, m * sizeof(T), target)
                 : Copy(threads, out + begin, m, target);
        }
      }
      if (stream) StreamFence();
    } else {
      ReduceScatter(threads, link, first, count, sequence, in, n, out + own.begin);
      AllGather(threads, link, first, count, sequence, n, out);
    }
  }

  // Leaves in `sum` (as T or as its accumulator) the own slice of the group's sum.
  template <class Out, class Threads, class Link>
  JO_HD void ReduceScatter(const Threads& threads, Link& link, int first, int count,
                           uint64_t sequence, const T* in, size_t n, Out* sum) const {
    const int place = link.rank() - first;
    const Slice own = SliceOf(n, count, place, kSliceAlign<T>);
    if constexpr (Link::kDirect) {
      SumRows<T>(
          threads, count, [&](int source) { return link.Input(in, first + source) + own.begin; },
          own.size(), sum);
    } else {
      T* const slots = scattered + SlotOf(sequence) * count * slice_capacity;
      for (int k = 1; k < count; ++k) {
        const int peer = Rotated(place, k, count);
        const Slice theirs = SliceOf(n, count, peer, kSliceAlign<T>);
        SendSlice(threads, link, in + theirs.begin, theirs.size(), slots + place * slice_capacity,
                  scatter_flags + place, first + peer, sequence);
      }
      if (threads.index() == 0) {
        for (int k = 1; k < count; ++k) {
          const int peer = Rotated(place, k, count);
          link.Wait(&scatter_flags[peer].value, sequence, {first + peer, 0});
        }
      }
      threads.sync();
      SumRows<T>(
          threads, count,
          [&](int source) {
            return source == place ? in + own.begin : slots + source * slice_capacity;
          },
          own.size(), sum);
    }
  }

  // Completes `out`, of which this rank has the own slice, on all ranks.
  template <class Threads, class Link>
  JO_HD void AllGather(const Threads& threads, Link& link, int first, int count, uint64_t sequence,
                       size_t n, T* out) const {
    const int place = link.rank() - first;
    const Slice own = SliceOf(n, count, place, kSliceAlign<T>);
    T* const buffer = gathered + SlotOf(sequence) * chunk_capacity;
    threads.sync();
    for (int k = 1; k < count; ++k) {
      const int peer = first + Rotated(place, k, count);
      if constexpr (Link::kDirect) {
        Copy(threads, out + own.begin, own.size(), link.Output(out, peer) + own.begin);
      } else {
        SendSlice(threads, link, out + own.begin, own.size(), buffer + own.begin,
                  gather_flags + place, peer, sequence);
      }
    }
    if constexpr (!Link::kDirect) {
      for (int k = 1; k < count; ++k) {
        const int peer = Rotated(place, k, count);
        const Slice theirs = SliceOf(n, count, peer, kSliceAlign<T>);
        if (threads.index() == 0) {
          link.Wait(&gather_flags[peer].value, sequence, {first + peer, 1});
        }
        threads.sync();
        Copy(threads, buffer + theirs.begin, theirs.size(), out + theirs.begin);
      }
    }
  }
};

}  // namespace jax_overlap
