// A hash that is the same in all processes: FNV-1a.
#pragma once

#include <cstdint>

namespace jax_overlap {

constexpr uint64_t kHashSeed = 0xcbf29ce484222325ull;

inline uint64_t MixedByte(uint64_t hash, unsigned char byte) {
  return (hash ^ byte) * 0x100000001b3ull;
}

// Mixes a word into a hash.
inline uint64_t Mixed(uint64_t hash, uint64_t word) {
  for (int byte = 0; byte < 8; ++byte) hash = MixedByte(hash, word >> 8 * byte & 0xff);
  return hash;
}

}  // namespace jax_overlap
