// Whose data are where on an explored machine (core/explore.h), and whether who reads them
// may: calls are counted by the test, and not by the protocol.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/explore_step.h"

namespace jax_overlap {

class DataOrigins {
 public:
  DataOrigins(int ranks, size_t words) : origins_(ranks, std::vector<Origin>(words)) {}

  // Stores data of a call of `rank`; `unread` if somebody has to read them. Returns what
  // is wrong with that, or nothing.
  std::string Put(const Access& access, int rank, int call, bool unread) {
    std::string wrong;
    for (size_t w = access.begin; w < access.end; ++w) {
      Origin& origin = origins_[access.heap][w];
      if (origin.unread) {
        wrong = "unread " + Words(origin) + " is overwritten, before rank " +
                std::to_string(access.heap) + " has read it";
      }
      origin = {rank, call, unread};
    }
    return wrong;
  }

  // Reads data, in a call of `rank`, and adds to `seen` where they are from.
  std::string Take(const Access& access, int rank, int call, size_t* seen) {
    std::string wrong;
    for (size_t w = access.begin; w < access.end; ++w) {
      Origin& origin = origins_[access.heap][w];
      *seen = Mix(*seen, origin);
      origin.unread = false;
      if (origin.rank >= 0 && origin.call == call) continue;
      wrong = origin.rank < 0 ? "early" : origin.call < call ? "stale" : "overwritten";
      wrong += " read: rank " + std::to_string(rank) + " in call " + std::to_string(call);
      wrong +=
          origin.rank < 0 ? " reads where nothing has arrived yet" : " reads the " + Words(origin);
    }
    return wrong;
  }

  size_t Hash() const {
    size_t hash = 0;
    for (const std::vector<Origin>& heap : origins_) {
      for (const Origin& origin : heap) hash = Mix(hash, origin);
    }
    return hash;
  }

 private:
  struct Origin {
    int rank = -1;
    int call = 0;
    bool unread = false;
  };
  static std::string Words(const Origin& origin) {
    return "data of call " + std::to_string(origin.call) + " from rank " +
           std::to_string(origin.rank);
  }
  static size_t Mix(size_t hash, const Origin& origin) {
    const size_t value = (origin.rank + 1) * 128 + origin.call * 2 + origin.unread;
    return (hash ^ value) * 0x9E3779B97F4A7C15u;
  }

  std::vector<std::vector<Origin>> origins_;
};

}  // namespace jax_overlap
