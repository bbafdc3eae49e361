// The symmetric memory of the GPUs of a process, and whether it does what it should.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace jax_overlap {

// All functions leave an error text, or an empty one.

// Lets each of these devices of the process address the memory of the others.
std::string EnablePeers(const std::vector<int>& ordinals);

// Zeroed memory of a device, never freed: programs may use it until the process ends.
std::string AllocateForGood(int ordinal, size_t bytes, char** memory);

// Memory of a device that a call site keeps, zeroed when it is new. What a site that is gone has
// had another one gets, as it was left: nothing is freed, as that waits for whatever runs there.
class SiteMemory {
 public:
  // Null, with an error text, if there is none.
  static std::unique_ptr<SiteMemory> Take(int ordinal, size_t bytes, std::string* error);
  ~SiteMemory();
  SiteMemory(const SiteMemory&) = delete;
  SiteMemory& operator=(const SiteMemory&) = delete;

  char* data() const { return data_; }

 private:
  SiteMemory(int ordinal, size_t bytes) : ordinal_(ordinal), bytes_(bytes) {}

  const int ordinal_;
  const size_t bytes_;  // a power of two
  char* data_ = nullptr;
};

// Clears memory of a device, while anything may run there and a graph be captured.
std::string ClearMemory(int ordinal, const std::vector<std::pair<char*, size_t>>& ranges);

// Loads kernels on these devices.
std::string LoadKernels(const std::vector<int>& ordinals, const std::vector<const void*>& kernels);

// What one rank found out about a peer.
enum ProbeResult : int32_t {
  kProbeOk = 0,
  kProbeNothingCame = 1,  // what the peer should have written
  kProbeReadBack = 2,     // what was written there is read otherwise
};
constexpr size_t kProbeBytes = 64;  // of a heap, for each rank; they begin it

// A rank that takes part in a probe: it has a device of this process.
struct Prober {
  int rank;
  int ordinal;
};
// Each of these ranks writes a pattern to all heaps, waits for those of the others, and
// reads its own back. `heaps`: of all ranks, also of other processes, which do the same at
// the same time; null where there is no address. results[i][peer] is of probers[i].
std::string ProbeHeaps(const std::vector<Prober>& probers, const std::vector<char*>& heaps,
                       uint64_t limit_ns, std::vector<std::vector<int32_t>>* results);

}  // namespace jax_overlap
