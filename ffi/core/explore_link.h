// The seams Link and Threads on a Machine (core/explore.h).
//
// An algorithm runs on them unchanged. What it does through the link is seen there; its
// plain accesses are seen where it hands them to Copy, SumRows or Gemm, which are replaced:
// Copy and SumRows by overloads for ExploreThreads, Gemm by one for the type Element.
#pragma once

#include <cstdint>

#include "core/explore.h"
#include "core/gemm.h"
#include "core/group.h"
#include "core/link.h"
#include "core/status.h"
#include "core/sum.h"
#include "core/threads.h"

namespace jax_overlap {

// What a protocol under test carries: exact, as large as the data of a cell, and its own
// accumulator. A slice may be one element, so that all ranks have one.
struct Element {
  int64_t value;
};
inline Element operator+(Element a, Element b) { return {a.value + b.value}; }
template <>
struct Numeric<Element> {
  using Acc = Element;
  static Acc Widen(Element x) { return x; }
  static Element Narrow(Acc x) { return x; }
};
template <>
inline constexpr size_t kSliceAlign<Element> = 1;

class ExploreLink {
 public:
  static constexpr bool kDirect = false;
  static constexpr bool kLoadsManyCells = false;

  // A cell arrives in so many pieces.
  ExploreLink(Machine& machine, int rank, int cell_pieces, bool failed)
      : machine_(machine), rank_(rank), piece_(sizeof(Cell) / cell_pieces), failed_(failed) {}

  int rank() const { return rank_; }
  int size() const { return machine_.ranks(); }
  bool failed() const { return failed_; }

  template <class T>
  T* At(T* mine, int peer) const {
    const auto offset = reinterpret_cast<char*>(mine) - machine_.heap(rank_);
    return reinterpret_cast<T*>(machine_.heap(peer) + offset);
  }

  // Peers' operands cannot be addressed.
  template <class T>
  T* Output(T* mine, int) const {
    return mine;
  }

  void StoreCell(Cell* mine, int peer, uint64_t data, uint32_t epoch) const {
    if (failed_) return;
    const Cell cell{static_cast<uint32_t>(data), epoch, static_cast<uint32_t>(data >> 32), epoch};
    for (size_t at = 0; at < sizeof(Cell); at += piece_) {
      machine_.Send(Kind::kCell, reinterpret_cast<char*>(At(mine, peer)) + at,
                    reinterpret_cast<const char*>(&cell) + at, piece_);
    }
  }
  uint64_t LoadCell(const Cell* mine, uint32_t epoch, Where) {
    Cell cell;
    for (size_t at = 0; at < sizeof(Cell); at += piece_) {
      const char* const from = reinterpret_cast<const char*>(mine) + at;
      failed_ = failed_ || !machine_.Act(Kind::kLoadCell, from, piece_, epoch);
      memcpy(reinterpret_cast<char*>(&cell) + at, from, piece_);
    }
    return static_cast<uint64_t>(cell.data1) << 32 | cell.data0;
  }

  void Signal(uint64_t* mine, int peer, uint64_t value) const {
    if (!failed_) machine_.Send(Kind::kFlag, At(mine, peer), &value, sizeof(value));
  }
  void Wait(const uint64_t* mine, uint64_t value, Where) {
    failed_ = failed_ || !machine_.Act(Kind::kWait, mine, sizeof(*mine), value);
  }

 private:
  Machine& machine_;
  const int rank_;
  const size_t piece_;
  bool failed_;
};

// Loads and stores of an element, wherever it is. Operands are nobody else's, so only
// accesses to heaps are steps.
inline Element Load(Machine& machine, const Element* at) {
  if (machine.HeapOf(at) >= 0) machine.Act(Kind::kRead, at, sizeof(Element));
  return *at;
}
inline void Store(Machine& machine, Element* at, Element value) {
  const int heap = machine.HeapOf(at);
  if (heap >= 0 && heap != machine.rank()) {
    machine.Send(Kind::kData, at, &value, sizeof(value));
  } else {
    if (heap >= 0) machine.Act(Kind::kWrite, at, sizeof(value));
    *at = value;
  }
}

// The threads of a rank share loops as those of a CUDA block do.
class ExploreThreads {
 public:
  ExploreThreads(Machine& machine, int index) : machine_(machine), index_(index) {}
  int index() const { return index_; }
  int count() const { return machine_.threads(); }
  void sync() const { machine_.Sync(); }
  Machine& machine() const { return machine_; }

 private:
  Machine& machine_;
  const int index_;
};

inline void Copy(const ExploreThreads& threads, const Element* from, size_t n, Element* to) {
  for (size_t i = threads.index(); i < n; i += threads.count()) {
    Store(threads.machine(), to + i, Load(threads.machine(), from + i));
  }
}

template <class T, class Out, class Row>
void SumRows(const ExploreThreads& threads, int rows, Row row, size_t n, Out* out) {
  for (size_t i = threads.index(); i < n; i += threads.count()) {
    Element sum = Load(threads.machine(), row(0) + i);
    for (int r = 1; r < rows; ++r) sum = sum + Load(threads.machine(), row(r) + i);
    Store(threads.machine(), out + i, sum);
  }
}

}  // namespace jax_overlap
