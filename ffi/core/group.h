// Reduce-scatter and all-gather among ranks that address each other's memory: the
// steps inside a node, of which the ops are made.
#pragma once

#include <cstring>
#include <type_traits>

#include "core/channel.h"
#include "core/link.h"
#include "core/schedule.h"
#include "core/status.h"
#include "core/sum.h"
#include "core/threads.h"

namespace jax_overlap {

// Slices start at cache lines, so that no line is written by two ranks.
template <class T>
constexpr size_t kSliceAlign = 64 / sizeof(T);

// What place `place` of `count` consecutive ranks from `first` does with all others: a
// thread each where there are enough, so that neither the waits nor the fences of the
// signals follow one another.
struct Others {
  int first;
  int count;
  int place;

  // Rotated(place, k, count), without a division.
  JO_HD int Peer(int k) const { return place + k < count ? place + k : place + k - count; }

  // f(peer's place) for all others, by all threads together.
  template <class F>
  JO_HD void ForAll(F f) const {
    JO_NO_UNROLL
    for (int k = 1; k < count; ++k) f(Peer(k));
  }
  // f(peer's place) for all others, each by one thread.
  template <class Threads, class F>
  JO_HD void ForEach(const Threads& threads, F f) const {
    for (int k = 1 + threads.index(); k < count; k += threads.count()) f(Peer(k));
  }

  // send(peer's place) stores what the peer gets in its heap; then all are told: a signal
  // releases what all threads of this rank have stored before the sync. After a wait in
  // vain nothing is stored: the peer may still read what was sent last time.
  template <class Threads, class Link, class Send>
  JO_HD void SendAndSignal(const Threads& threads, Link& link, Word* flag, uint64_t sequence,
                           Send send) const {
    const auto signal = [&] {
      ForEach(threads, [&](int peer) { link.Signal(&flag->value, first + peer, sequence); });
    };
    const bool too_early = JO_MUTANT("flag_before_data");
    if (too_early) signal();
    if (MayStore(link)) ForAll(send);
    threads.sync();
    if (!too_early) signal();
  }

  // Until all others have signalled.
  template <class Threads, class Link>
  JO_HD void Wait(const Threads& threads, Link& link, const Word* flags, uint64_t sequence,
                  int step) const {
    ForEach(threads,
            [&](int peer) { link.Wait(&flags[peer].value, sequence, {first + peer, step}); });
    threads.sync();
  }
};

// out[i] = the sum, in rank order, of what each of `others.count` ranks has of element i < n:
// this one has `own`, the others have sent theirs to the cells cell_of(place, index).
// A link that waits for several cells at once waits for those of up to kAtOnce ranks, for
// kEach cells of a thread: what is on its way is not waited for one after the other.
template <class T, int kAtOnce, int kEach, class Threads, class Link, class CellOf, class Out>
JO_HD void SumCells(const Threads& threads, Link& link, const Others& others, CellOf cell_of,
                    const T* own, Index n, uint32_t epoch, Out* out) {
  const Index cells = CeilDiv(n, kPerCell<T>);
  const int sources = JO_MUTANT("skip_peer") ? others.count - 1 : others.count;
  const Index step = threads.count();
  for (Index first = threads.index(); first < cells; first += kEach * step) {
    const auto cell = [&](int e) { return first + e * step; };
    const auto exists = [&](int e) { return e == 0 || cell(e) < cells; };
    uint64_t mine[kEach];
    JO_UNROLL
    for (int e = 0; e < kEach; ++e) mine[e] = exists(e) ? PackCell(own, n, cell(e)) : 0;
    T values[kPerCell<T>];
    Acc<T> sums[kEach][kPerCell<T>] = {};
    const auto add = [&](int e, int source, uint64_t theirs) {
      UnpackCell(source == others.place ? mine[e] : theirs, values);
      for (Index j = 0; j < kPerCell<T>; ++j) {
        Acc<T>& sum = sums[e][j];
        sum = source == 0 ? Numeric<T>::Widen(values[j]) : Accumulate<T>(sum, values[j]);
      }
    };
    if constexpr (!Link::kLoadsManyCells) {
      for (int e = 0; e < kEach && exists(e); ++e) {
        for (int source = 0; source < sources; ++source) {
          const Where where{others.first + source, 0};
          add(e, source,
              source == others.place ? 0 : link.LoadCell(cell_of(source, cell(e)), epoch, where));
        }
      }
    } else {
      for (int begin = 0; begin < sources; begin += kAtOnce) {
        const int count = sources - begin < kAtOnce ? sources - begin : kAtOnce;
        uint32_t peers = (1u << count) - 1;
        const int place = others.place - begin;
        if (place >= 0 && place < count) peers &= ~(1u << place);
        // Bit e * kAtOnce + k is cell e of rank begin + k.
        uint32_t wanted = 0;
        JO_UNROLL
        for (int e = 0; e < kEach; ++e) wanted |= exists(e) ? peers << (e * kAtOnce) : 0;
        uint64_t data[kAtOnce * kEach] = {};
        link.LoadCells([&](int b) { return cell_of(begin + b % kAtOnce, cell(b / kAtOnce)); },
                       [&](int b) { return others.first + begin + b % kAtOnce; }, wanted, epoch,
                       data);
        JO_UNROLL
        for (int b = 0; b < kAtOnce * kEach; ++b) {
          if (b % kAtOnce < count) add(b / kAtOnce, begin + b % kAtOnce, data[b]);
        }
      }
    }
    JO_UNROLL
    for (int e = 0; e < kEach; ++e) {
      if (!exists(e)) continue;
      Out result[kPerCell<T>];
      for (Index j = 0; j < kPerCell<T>; ++j) StoreSum<T>(sums[e][j], result + j);
      StoreElements(result, out, n, cell(e));
    }
  }
}

// A reduce-scatter and an all-gather among `count` consecutive ranks from `first`,
// where each owns the slice of its place. Staged, they go through slots and flags:
//
//   rank a: in[slice b] -> slot a of b, flag        b: waits for all flags, adds
//   rank b: sum[slice b] -> gathered[slice b] of a, flag      a: waits, copies out
//
// In cells, which have no flags, they take half the time of a small call and twice the bytes.
//
// Direct, a rank reads its slice of all inputs and writes it to all outputs; where
// nothing happens in between (AllReduce), piece by piece, out of the cache.
enum class Steps { kFlags, kCells, kDirect };

template <class T, Steps kSteps>
struct GroupSteps {
  static constexpr bool kCells = kSteps == Steps::kCells;
  using Slot = std::conditional_t<kCells, Cell, T>;

  Slot* scattered;        // [2][source][slice]
  Slot* gathered;         // [2][chunk]
  Word* scatter_flags;    // [source]
  Word* gather_flags;     // [source]
  size_t slice_capacity;  // slots
  size_t chunk_capacity;

  // Outputs, of all ranks together, of this size do not stay in the caches anyway.
  static constexpr size_t kStreamFromBytes = 8 << 20;

  static JO_HD GroupSteps Carve(Carver& carver, int count, size_t capacity) {
    size_t slice = MaxSlice(capacity, count, kSliceAlign<T>);
    if (kSteps == Steps::kDirect) return {nullptr, nullptr, nullptr, nullptr, slice, capacity};
    if (kCells) {
      slice = CeilDiv(slice, kPerCell<T>);
      capacity = CeilDiv(capacity, kPerCell<T>);
    }
    GroupSteps steps;
    steps.scattered = carver.Take<Slot>(2 * count * slice);
    steps.gathered = carver.Take<Slot>(2 * capacity);
    steps.scatter_flags = kCells ? nullptr : carver.Take<Word>(count);
    steps.gather_flags = kCells ? nullptr : carver.Take<Word>(count);
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
    } else if constexpr (kCells) {
      const auto epoch = static_cast<uint32_t>(sequence);
      const Others others{first, count, place};
      Cell* const slots = scattered + SlotOf(sequence) * count * slice_capacity;
      // Slices start with a cell: the cells of the vector are those of its slices.
      const Index step = SliceCells(n, count);
      ForOtherCells(threads, n, step, place, [&](Index i, int owner) {
        link.StoreCell(slots + place * slice_capacity + (i - owner * step), first + owner,
                       PackCell(in, n, i), epoch);
      });
      SumCells<T, 8, 1>(
          threads, link, others,
          [&](int source, Index i) { return slots + source * slice_capacity + i; }, in + own.begin,
          own.size(), epoch, sum);
    } else {
      T* const slots = scattered + SlotOf(sequence) * count * slice_capacity;
      const Others others{first, count, place};
      others.SendAndSignal(threads, link, scatter_flags + place, sequence, [&](int peer) {
        const Slice theirs = SliceOf(n, count, peer, kSliceAlign<T>);
        Copy(threads, in + theirs.begin, theirs.size(),
             link.At(slots + place * slice_capacity, first + peer));
      });
      others.Wait(threads, link, scatter_flags, sequence, 0);
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
    Slot* const buffer = gathered + SlotOf(sequence) * chunk_capacity;
    threads.sync();
    const Others others{first, count, place};
    if constexpr (Link::kDirect) {
      others.ForAll([&](int peer) {
        Copy(threads, out + own.begin, own.size(), link.Output(out, first + peer) + own.begin);
      });
    } else if constexpr (kCells) {
      const auto epoch = static_cast<uint32_t>(sequence);
      const Index step = SliceCells(n, count);
      const Index cells = CeilDiv(own.size(), kPerCell<T>);
      for (Index i = threads.index(); i < cells; i += threads.count()) {
        const uint64_t cell = PackCell(out + own.begin, own.size(), i);
        others.ForAll([&](int peer) {
          link.StoreCell(buffer + place * step + i, first + peer, cell, epoch);
        });
      }
      ForOtherCells(threads, n, step, place, [&](Index i, int owner) {
        T values[kPerCell<T>];
        UnpackCell(link.LoadCell(buffer + i, epoch, {first + owner, 1}), values);
        StoreElements(values, out, n, i);
      });
    } else {
      others.SendAndSignal(threads, link, gather_flags + place, sequence, [&](int peer) {
        Copy(threads, out + own.begin, own.size(), link.At(buffer + own.begin, first + peer));
      });
      others.Wait(threads, link, gather_flags, sequence, 1);
      others.ForAll([&](int peer) {
        const Slice theirs = SliceOf(n, count, peer, kSliceAlign<T>);
        Copy(threads, buffer + theirs.begin, theirs.size(), out + theirs.begin);
      });
    }
  }

 private:
  // The cells of a slice, but for the last ones.
  static JO_HD Index SliceCells(size_t n, int count) {
    return CeilDiv(SliceOf(n, count, 0, kSliceAlign<T>).size(), kPerCell<T>);
  }
  // f(index, place) for the cells of a vector of `n` elements that belong to other places.
  template <class Threads, class F>
  static JO_HD void ForOtherCells(const Threads& threads, Index n, Index step, int place, F f) {
    const Index cells = CeilDiv(n, kPerCell<T>);
    for (Index i = threads.index(); i < cells; i += threads.count()) {
      const int owner = i / step;
      if (owner != place) f(i, owner);
    }
  }
};

}  // namespace jax_overlap
