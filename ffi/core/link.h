// How the ranks of a team reach each other: the seam below the algorithms.
//
// Addresses are symmetric: a pointer into the own heap names the same place in
// every rank's heap. A Link offers
//
//   rank(), size()                    this rank and the team's size
//   At(p, peer)                       the address of `p` in the peer's heap
//   StoreCell(p, peer, data, epoch)   puts 8 bytes and the epoch into a peer's cell
//   LoadCell(p, epoch, where)         waits until the own cell carries `epoch`
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
constexpr size_t kPerCell = kCellBytes / sizeof(T);

// The elements of cell `i` of a vector of `n`; bytes after its end are zero.
template <class T>
JO_HD uint64_t PackCell(const T* data, size_t n, size_t i) {
  const size_t first = i * kPerCell<T>;
  uint64_t packed = 0;
  if (kPerCell<T> == 1 || first + kPerCell<T> <= n) {
    memcpy(&packed, data + first, kCellBytes);
  } else {
    size_t count = Min(n - first, kPerCell<T> - 1);
    if (JO_MUTANT("tail_off_by_one")) --count;
    memcpy(&packed, data + first, count * sizeof(T));
  }
  return packed;
}

template <class T>
JO_HD void UnpackCell(uint64_t packed, T (&out)[kPerCell<T>]) {
  memcpy(out, &packed, kCellBytes);
}

template <class T>
JO_HD void StoreElements(const T (&values)[kPerCell<T>], T* out, size_t n, size_t i) {
  const size_t first = i * kPerCell<T>;
  const size_t count = Min(n - first, kPerCell<T>);
  memcpy(out + first, values, count * sizeof(T));
}

// Whether plain data may be stored at peers: the link itself keeps cells and signals back.
template <class Link>
JO_HD bool MayStore(const Link& link) {
  return !link.failed() || JO_MUTANT("data_after_failure");
}

}  // namespace jax_overlap
