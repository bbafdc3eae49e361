// What a rank was waiting for when its limit passed.
//
// Plain data: on the CPU it becomes the error of the result, on a GPU it is the
// error word that a kernel leaves in mapped host memory.
#pragma once

#include <cstdint>

namespace jax_overlap {

// The point in an algorithm at which a rank waits: for whom, and in which step.
struct Where {
  int peer;
  int step;
};

enum Failure : int32_t {
  kNone = 0,
  kExpired = 1,     // a wait has passed its limit
  kMismatch = 2,    // a peer takes the call for another one
  kBroken = 3,      // an earlier call has failed
  kPeerFailed = 4,  // a peer has, and what it sent may be anything
  kConcurrent = 5,  // another call was under way on this device
};

struct Status {
  int32_t failed;  // a Failure; set once, by the first
  int32_t rank;
  int32_t peer;
  int32_t step;
  uint64_t expected;
  uint64_t seen;
};

}  // namespace jax_overlap
