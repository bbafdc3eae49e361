// What the handlers of all platforms have in common: the attributes of a custom call, and
// the stages that Python registers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace jax_overlap {

// Changes with the attributes that all ops have; jax_overlap/_native.py has the same.
constexpr int64_t kAbi = 2;

// An error text for attributes that make no sense: a team of `group_size` ranks, in nodes
// of `node_size`, for each group of the `places`; and what a platform asks for besides.
inline std::string CheckAttributes(std::string_view what, int64_t abi, size_t places,
                                   int64_t group_size, int64_t node_size, bool besides = true) {
  if (besides && abi == kAbi && group_size >= 1 && node_size >= 1 && places % group_size == 0 &&
      group_size % node_size == 0) {
    return "";
  }
  return std::string(what) +
         ": bad attributes. This program was made for another version of "
         "jax_overlap: compile it anew";
}

// An FFI target with its stages and its state type.
struct Handler {
  const char* target;
  void* instantiate;
  void* initialize;  // null: there is no such stage
  void* execute;
  const char* state_name;
  void* state_id;
  void* state_info;
};

}  // namespace jax_overlap
