// The version of the attributes that custom calls have.
#pragma once

#include <cstdint>

namespace jax_overlap {

// Changes with the attributes that all ops have; jax_overlap/_native.py has the same.
constexpr int64_t kAbi = 1;

}  // namespace jax_overlap
