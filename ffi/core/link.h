// How the ranks of a team reach each other: the seam below the algorithms.
//
// Addresses are symmetric: a pointer into the own heap names the same place in
// every rank's heap. A Link offers
//
//   rank(), size()                    this rank and the team's size
//   At(p, peer)                       the address of `p` in the peer's heap
//   StoreCell(p, peer, data, epoch)   puts 8 bytes and the epoch into a peer's cell
//   SendCells(threads, link, ..)      the same of a range of cells, by all threads together:
//                                     a function, which a link that stores at no peer by
//                                     itself overloads (core/nvshmem_link.cuh)
//   LoadCell(p, epoch, where)         waits until the own cell carries `epoch`
//   kLoadsManyCells, LoadCells(...)   where loads take long: the same of several cells, all
//                                     of which are looked at in turn
//   Signal(flag, peer, value)         releases: what this thread (and, after
//                                     threads.sync(), its rank) wrote before is
//                                     seen by whoever acquires the flag
//   Wait(flag, value, where)          acquires: returns when *flag >= value
//   failed()                          whether a wait has passed its limit
//   kDirect, Input(r), Output(r)      whether peers' operands can be addressed,
//                                     and where they are
//
// Every wait is bounded. When the limit passes, the link keeps the first Status, all
// later waits return at once, and nothing more is sent: the algorithm runs to its end on
// whatever is there, its caller discards the output and reports the status, and whoever
// waits for this rank gets no wrong number from it, but fails as well.
//
// Slots are reused on the strength of what was received: a rank that has not heard from a
// peer must not overwrite what that one may still read. Where nothing else keeps it from
// being calls ahead, as the rendezvous does on the host, a rank that has failed must fail in
// all later calls on the channel, too (ops/protocol_test.cc shows what happens otherwise).
//
// Memory order. A flag is one 64-bit word: stored with release, loaded with
// acquire, at the scope of the link. A cell needs no order at all for its data:
// each half is one 8-byte access that carries data and epoch together, so data
// that is seen is data that has arrived. Its accesses are acquire and release as
// well, so that reading a cell happens before the later store that reuses it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "core/dtype.h"
#include "core/mutants.h"
#include "core/schedule.h"

namespace jax_overlap {

// Eight bytes of data with the epoch beside each half: twice the bytes, but no
// flag, no fence, and nothing to clear, since the next call has another epoch.
// A GPU moves a cell by one 16-byte access, a host by two of 8 bytes.
struct alignas(16) Cell {
  uint32_t data0;
  uint32_t epoch0;
  uint32_t data1;
  uint32_t epoch1;
};
static_assert(sizeof(Cell) == 16, "a cell is one 16-byte access on a GPU");

constexpr size_t kCellBytes = 8;  // of data in a cell

template <class T>
constexpr Index kPerCell = kCellBytes / sizeof(T);

// `count` elements, fewer than a cell has, and zero. Not inlined on a GPU, where rare code in
// the way of a small call costs time.
template <class T>
JO_HD_NOINLINE uint64_t PackTail(const T* data, Index count) {
  if (JO_MUTANT("tail_off_by_one")) --count;
  uint64_t packed = 0;
  for (Index j = 0; j < count; ++j) {
    uint64_t bits = 0;
    memcpy(&bits, data + j, sizeof(T));
    packed |= bits << (8 * sizeof(T) * j);
  }
  return packed;
}

// The elements of cell `i` of a vector of `n`; bytes after its end are zero. On a GPU the
// vector starts at eight bytes, so that a cell is one access.
template <class T>
JO_HD uint64_t PackCell(const T* data, Index n, Index i) {
  const Index first = i * kPerCell<T>;
  if constexpr (kPerCell<T> > 1) {
    if (JO_RARELY(first + kPerCell<T> > n)) return PackTail(data + first, n - first);
  }
#if defined(__CUDA_ARCH__)
  return *reinterpret_cast<const uint64_t*>(data + first);
#else
  uint64_t packed;
  memcpy(&packed, data + first, kCellBytes);
  return packed;
#endif
}

template <class T>
JO_HD void UnpackCell(uint64_t packed, T (&out)[kPerCell<T>]) {
  memcpy(out, &packed, kCellBytes);
}

// The same back: `values`, or what of them exists, are those of cell `i`.
template <class T, size_t kCount>
JO_HD void StoreElements(const T (&values)[kCount], T* out, Index n, Index i) {
  const Index first = i * kCount;
  if (kCount > 1 && JO_RARELY(first + kCount > n)) {
    JO_UNROLL
    for (Index j = 0; j < kCount; ++j) {
      if (first + j < n) out[first + j] = values[j];
    }
    return;
  }
#if defined(__CUDA_ARCH__)
  JO_UNROLL
  for (Index at = 0; at < kCount * sizeof(T); at += kCellBytes) {
    uint64_t eight;
    memcpy(&eight, reinterpret_cast<const char*>(values) + at, kCellBytes);
    *reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(out + first) + at) = eight;
  }
#else
  memcpy(out + first, values, sizeof(values));
#endif
}

// Puts pack(i) and the epoch into the cells i of `range` of the peer's `slot`. Of the own
// heap, `staging` has as many cells for those that a link has to gather first; a link that
// stores each where it belongs has none.
template <class Threads, class Link, class Pack>
JO_HD void SendCells(const Threads& threads, Link& link, Cell* /*staging*/, Cell* slot, int peer,
                     Slice range, uint32_t epoch, Pack pack) {
  for (Index i = range.begin + threads.index(); i < range.end; i += threads.count()) {
    link.StoreCell(slot + i, peer, pack(i), epoch);
  }
}

// Whether plain data may be stored at peers: the link itself keeps cells and signals back.
template <class Link>
JO_HD bool MayStore(const Link& link) {
  return !link.failed() || JO_MUTANT("data_after_failure");
}

}  // namespace jax_overlap
