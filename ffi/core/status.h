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

struct Status {
  int32_t failed;  // 0 while all is well; set once, by the first wait that expires
  int32_t rank;
  int32_t peer;
  int32_t step;
  uint64_t expected;
  uint64_t seen;
};

}  // namespace jax_overlap
