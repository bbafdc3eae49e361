// The error words that kernels leave in mapped host memory, and who reads them.
//
// A kernel that waits in vain cannot fail its result: the handler returned long before,
// and a captured graph does not call it again. So a thread of ours looks at the words and
// records what it finds in the ledger, at once and whoever reads the result.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "core/gpu_team.h"
#include "core/status.h"

namespace jax_overlap {

class GpuErrors {
 public:
  static GpuErrors& Get();

  // Makes the memory and starts the thread; an error text if that fails. Once.
  std::string Start();

  // A word for kernels; `describe` makes the text of what they leave there. Null if there
  // is no room for another.
  Status* Take(std::function<std::string(const Status&)> describe);
  void Give(Status* word);

  // A word for kernels: not 0 once one has failed, after which none waits for long.
  int32_t* stopped() const;

  // Looks at all words now.
  void Look();
  // The first text since the ledger was last cleared; empty if all is well. Costs nothing.
  std::string Unacknowledged();

  // Call sites of this process, times its devices: as many as channels of a pool, on 8.
  static constexpr size_t kWords = 8 * GpuPool::kMaxChannels;

 private:
  GpuErrors() = default;

  struct State;
  State* state_ = nullptr;
};

}  // namespace jax_overlap
