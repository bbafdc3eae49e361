// One step of an explored execution (core/explore.h), and what it reads as in a trace.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>

namespace jax_overlap {

constexpr size_t kWordBytes = 8;

// Words [begin, end) of the heap of a rank. The default is no access at all.
struct Access {
  int heap = -1;
  size_t begin = 0, end = 0;
  bool writes = false;
};
inline bool Conflict(const Access& a, const Access& b) {
  return a.heap == b.heap && (a.writes || b.writes) && a.begin < b.end && b.begin < a.end;
}

// Who makes a step: a thread, a store, or the limit of a thread's waits.
using Mover = int;

enum class Kind { kWait, kLoadCell, kRead, kWrite, kSync, kGiveUp, kEnd, kData, kCell, kFlag };

inline bool IsStore(Kind kind) { return kind >= Kind::kData; }

struct Step {
  static constexpr size_t kMax = 1024;  // in an execution
  using Past = std::bitset<kMax>;       // steps, by their places

  Mover mover;
  Kind kind;
  int rank, call;  // of the thread, or of the thread that has stored
  Access access;
  uint64_t value;   // that is waited for, or arrives
  uint64_t before;  // where something arrives: what was there
  Past past;        // what has happened before, and this step
};

inline std::string Words(Kind kind) {
  switch (kind) {
    case Kind::kWait: return "waits for the flag";
    case Kind::kLoadCell: return "loads the cell";
    case Kind::kRead: return "reads the data";
    case Kind::kWrite: return "writes its own data";
    case Kind::kSync: return "waits for its other threads";
    case Kind::kGiveUp: return "gives up its wait";
    case Kind::kEnd: return "has ended";
    case Kind::kData: return "data";
    case Kind::kCell: return "cell";
    case Kind::kFlag: return "flag";
  }
  return "";
}

inline std::string Place(const Access& access) {
  return " at +" + std::to_string(access.begin * kWordBytes);
}

inline std::string Words(const Step& step) {
  const std::string rank = "rank " + std::to_string(step.rank);
  const std::string call = "call " + std::to_string(step.call);
  if (!IsStore(step.kind)) return rank + ", " + call + ": " + Words(step.kind) + Place(step.access);
  const std::string value =
      step.kind == Kind::kFlag ? ", value " + std::to_string(step.value) + "," : "";
  return "    " + rank + "'s " + Words(step.kind) + " of " + call + value + " arrives at rank " +
         std::to_string(step.access.heap) + Place(step.access);
}

}  // namespace jax_overlap
